"""Codes of weights that are kept from call to call, for an 8-bit forward and for g_x.

Inside of :func:`hotcore.torch.gradient_accumulation` its state has a table of them. Outside, frozen
Parameters are quantised for the forward once: their codes, a byte a value, stay until the weight is
written, moved, trained or freed. Two kinds of writes are not seen:

* past torch's version counter (through ``.data``). So only calls that autograd follows take codes
  of frozen weights; what runs without gradients (generation between the steps of a training, with
  adapters merged into the base for its time) quantises w itself.
* FSDP's, which gathers a weight anew into the same Parameter. So where ``torch.distributed`` is
  initialised codes are kept inside of ``gradient_accumulation`` alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import _compat

Make = Callable[[], Tensor]


def kept(table: Any, weight: Tensor, what: Hashable, state: Hashable, make: Make) -> Tensor:
    """Codes of ``weight`` in a table of weights; made where there are none, or of another state."""
    entry: dict[Hashable, tuple[Hashable, Tensor]] = table.setdefault(weight, {})
    found = entry.get(what)
    if found is None or found[0] != state:
        found = entry[what] = (state, make())
    return found[1]


def owner_of(rows: Tensor) -> Tensor:
    """The tensor that ``rows`` is a view of, or itself."""
    return rows if rows._base is None else rows._base


def forward_key(rows: Tensor, block: int) -> tuple[Hashable, Hashable] | None:
    """Which codes ``rows`` has for the forward, and the state of its owner that they are of.

    None where that has no version (a tensor of inference mode).
    """
    owner = owner_of(rows)
    # Of a stream: another one would not wait until they are made.
    stream = _compat.current_stream(rows.get_device()) if rows.is_cuda else 0
    place = (rows.shape, rows.stride(), rows.storage_offset(), rows.is_neg())
    what = ("y", block, stream, *place)
    try:
        return what, (owner._version, owner.data_ptr(), owner.dtype, owner.device)
    except RuntimeError:
        return None


class _Frozen:
    """Codes of frozen Parameters."""

    def __init__(self) -> None:
        self.table: Any = WeakTensorKeyDictionary()  # weight -> what -> (state, codes)
        self._lock = threading.Lock()
        self._hooked = False

    def codes(self, weight: Tensor, what: Hashable, state: Hashable, make: Make) -> Tensor:
        with self._lock:
            if not self._hooked:
                register_optimizer_step_post_hook(self._stepped)
                self._hooked = True
            return kept(self.table, weight, what, state, make)

    def after_fork(self) -> None:
        """In the child. A thread that is not there may hold the lock, or have half written."""
        self._lock = threading.Lock()
        self.table = WeakTensorKeyDictionary()

    def _stepped(self, *_: Any) -> None:
        """Drop those of weights that are trained now; fused optimizers raise no version."""
        with self._lock:
            for weight in [w for w in self.table if w.requires_grad]:
                del self.table[weight]

    def forget(self, weights: Iterable[Tensor]) -> None:
        with self._lock:
            for weight in weights:
                self.table.pop(weight, None)

    def bytes(self, weights: Iterable[Tensor]) -> int:
        with self._lock:
            found = [self.table.get(weight) or {} for weight in weights]
        return sum(codes.nbytes for entry in found for _, codes in entry.values())


_frozen = _Frozen()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_frozen.after_fork)


def of_frozen(rows: Tensor, block: int, make: Make) -> Tensor | None:
    """Codes of ``rows`` for the forward, where it is (a view of) a Parameter that is frozen.

    For calls that autograd follows. None where none are kept: for a trained weight, while a CUDA
    graph is captured (its replays would read codes that may be freed), among processes.
    """
    owner = owner_of(rows)
    if owner.requires_grad or not isinstance(owner, torch.nn.Parameter):
        return None
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return None
    key = forward_key(rows, block)
    return None if key is None else _frozen.codes(owner, *key, make)


def frozen_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes of the codes that are kept of these frozen weights."""
    return _frozen.bytes(weights)


def forget(weights: Iterable[Tensor]) -> None:
    """Drop the codes that are kept of these frozen weights."""
    _frozen.forget(weights)
