"""Cache of contexts (device, stream or threads, instruction set).

:func:`set_num_threads` and :func:`set_isa` change the default of the process; results have the same
bits for every setting.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable

from . import _core, selftest
from .config import as_size

_threads = 0
_isa = ""
_openmp = 0  # address of GOMP_parallel in the OpenMP library to use; 0: libhot's threads
_warned: set[int] = set()  # CUDA devices that were checked for a warning
_admitted: set[int] = set()  # CUDA devices whose class needs no self-test, or has passed it


@functools.lru_cache(maxsize=16)  # a CPU context owns its threads; a running call holds its own
def _context(threads: int, isa: str, device: int, stream: int, margin: int) -> _core.CoreContext:
    return _core.CoreContext(threads, isa, device, stream, _openmp, margin)


def cpu(threads: int | None = None) -> _core.CoreContext:
    """Return a context of the CPU backend; ``threads=None`` is the default of the process."""
    return _context(_threads if threads is None else threads, _isa, -1, 0, 0)


def cuda(device: int, stream: int, sm_margin: int = 0) -> _core.CoreContext:
    """Return a context of a CUDA device and stream. Warns once if another build would be faster.

    Persistent kernels leave ``sm_margin`` multiprocessors to other work.

    The first use of a device runs the self-test if its class was never measured. Raises
    NotImplementedError without CUDA or kernels for the device, or if the self-test fails. Raises
    ValueError if there is no such device, RuntimeError for a self-test inside a stream capture.
    """
    context = _context(0, "", device, stream, sm_margin)
    if device in _admitted:
        return context
    level, text = _core.cuda_device_verdict(device)
    if level == "slow" and device not in _warned:
        message = f"hotcore: cuda:{device} is slower than it could be: {text}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    _warned.add(device)
    capability = re.match(r"compute capability (\d+)\.(\d+)", text)
    assert capability is not None, text
    if selftest.gate.admits(device, (int(capability[1]), int(capability[2]))):
        _admitted.add(device)
    return context


def is_admitted(device: int) -> bool:
    """Whether :func:`cuda` has nothing left to check for a device; -1: the CPU."""
    return device < 0 or device in _admitted


def num_threads() -> int:
    """Number of threads of the CPU backend."""
    return cpu().threads


def set_num_threads(threads: int) -> None:
    """Set the number of threads of the CPU backend; 0: one for each core. Results stay the same.

    Raises TypeError for a value that is no int, ValueError for a negative number.
    """
    _set_defaults(as_size(threads, "threads"), _isa)


def use_openmp(address: int) -> None:
    """Compute on an OpenMP library's threads; ``address`` of its GOMP_parallel, 0: libhot's.

    A forked child uses libhot's threads again: OpenMP's do not survive a fork.
    """
    global _openmp
    _openmp = address
    _context.cache_clear()
    _core.torch_forget()


def isa() -> str:
    """Instruction set of the CPU backend: ``"plain"``, ``"avx2"``, ``"avx512"`` or ``"amx"``."""
    return cpu().isa


def set_isa(name: str | None) -> None:
    """Restrict the CPU backend to an instruction set; None: the best. Results stay the same.

    ``name`` is a result of :func:`isa`. Raises NotImplementedError if the machine or the build
    lacks it, ValueError for another name, TypeError for a value that is no str.
    """
    if not isinstance(name, str | None):
        raise TypeError(f"name: expected a str or None, got {type(name).__name__}")
    _set_defaults(_threads, name or "")


def _set_defaults(threads: int, isa: str) -> None:
    global _threads, _isa
    _context(threads, isa, -1, 0, 0)  # raises before anything changes
    _threads, _isa = threads, isa
    _core.torch_forget()
    for follower in _followers:
        follower(threads, isa)


_followers: list[Callable[[int, str], None]] = []


def follow_cpu(follower: Callable[[int, str], None]) -> None:
    """Call XLA's ``follower`` with threads and instruction set, now and at every change."""
    follower(_threads, _isa)
    _followers.append(follower)


def _reset_after_fork() -> None:
    # The pools' threads do not exist in the child, where such a pool would use one thread.
    global _openmp
    _openmp = 0
    _context.cache_clear()
    _core.torch_forget(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
