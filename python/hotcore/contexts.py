"""A cache of contexts (device, stream or threads, instruction set).

:func:`set_num_threads` and :func:`set_isa` change the default of the process; results have the same
bits for every setting.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable

from . import _core, selftest
from .config import as_int

_LIMIT = 16  # contexts in the cache; a CPU context owns its threads

_lock = threading.Lock()
_cache: OrderedDict[tuple[int, str, int, int], _core.CoreContext] = OrderedDict()
_threads = 0
_isa = ""
_openmp = 0  # GOMP_parallel of a library of the process, whose threads are used; 0: own threads
_warned: set[int] = set()  # CUDA devices that were checked for a warning
_admitted: set[int] = set()  # CUDA devices whose class needs no self-test, or has passed it


def _get(threads: int, isa: str, device: int, stream: int) -> _core.CoreContext:
    key = (threads, isa, device, stream)
    try:
        return _cache[key]
    except KeyError:
        pass
    with _lock:
        if key not in _cache:
            _cache[key] = _core.CoreContext(threads, isa, device, stream, _openmp)
            while len(_cache) > _LIMIT:
                _cache.popitem(last=False)  # a running call holds its own reference
        return _cache[key]


def cpu(threads: int | None = None) -> _core.CoreContext:
    """Context of the CPU backend; ``threads=None`` is the default of the process."""
    return _get(_threads if threads is None else threads, _isa, -1, 0)


def cuda(device: int, stream: int) -> _core.CoreContext:
    """Context of a CUDA device and stream.

    Raises NotImplementedError in a build without CUDA or without kernels for that device, or if it
    fails the self-test, which classes of devices that nobody measured have to pass at their first
    use; ValueError if there is no such device; RuntimeError if that first use is inside of a stream
    capture. Warns once per device if a better build would be faster.
    """
    context = _get(0, "", device, stream)
    if device not in _admitted:
        _admit(device)
    return context


def _admit(device: int) -> None:
    level, text = _core.cuda_device_verdict(device)
    if device not in _warned:
        _warned.add(device)
        if level == "slow":
            message = f"hotcore: cuda:{device} is slower than it could be: {text}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
    capability = re.match(r"compute capability (\d+)\.(\d+)", text)
    assert capability is not None, text
    if selftest.gate.admits(device, (int(capability[1]), int(capability[2]))):
        _admitted.add(device)


def num_threads() -> int:
    """Number of threads of the CPU backend."""
    return cpu().threads


def set_num_threads(threads: int) -> None:
    """Set the number of threads of the CPU backend; 0: one for each core. Results stay the same.

    Raises TypeError for what is no int, ValueError for a negative number.
    """
    global _threads
    threads = as_int(threads, "threads")
    if threads < 0:
        raise ValueError(f"threads: {threads} is negative")
    _get(threads, _isa, -1, 0)  # raises before anything changes
    _threads = threads
    _notify_followers()


def use_openmp(address: int) -> None:
    """Compute on the threads of an OpenMP library: ``address`` of its GOMP_parallel; 0: own ones.

    A forked child goes back to threads of its own: OpenMP's do not survive a fork.
    """
    global _openmp
    with _lock:
        _openmp = address
        _cache.clear()


def isa() -> str:
    """Instruction set of the CPU backend: ``"plain"``, ``"avx2"``, ``"avx512"`` or ``"amx"``."""
    return cpu().isa


def set_isa(name: str | None) -> None:
    """Restrict the CPU backend to an instruction set; None: the best. Results stay the same.

    ``name`` is one of those that :func:`isa` returns. Raises NotImplementedError if the machine or
    the build lacks it, ValueError for another name, TypeError for what is no name.
    """
    global _isa
    if not isinstance(name, str | None):
        raise TypeError(f"name: expected a str or None, got {type(name).__name__}")
    wanted = name or ""
    _get(_threads, wanted, -1, 0)
    _isa = wanted
    _notify_followers()


_followers: list[Callable[[int, str], None]] = []


def follow_cpu(follower: Callable[[int, str], None]) -> Callable[[], None]:
    """Call ``follower`` with the default's threads and instruction set, now and at every change.

    For code that does not ask this module, such as XLA's calls. Returns a function that ends it.
    """
    follower(_threads, _isa)
    _followers.append(follower)
    return lambda: _followers.remove(follower)


def _notify_followers() -> None:
    for follower in _followers:
        follower(_threads, _isa)


def _reset_after_fork() -> None:
    # The pools' threads do not exist in the child, where such a pool would use one thread.
    global _lock, _openmp
    _lock = threading.Lock()
    _openmp = 0
    _cache.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
