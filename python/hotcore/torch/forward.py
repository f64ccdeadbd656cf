"""The 8-bit forward of layers (``forward="int8"``), and the codes of weights that it can keep.

A trained weight is quantised by every call, or by the first micro-batch inside
:func:`hotcore.torch.gradient_accumulation`. A frozen one is quantised once: its codes, a byte a
value, stay until it is written, moved, trained or freed. Two kinds of writes are not seen:

* past torch's version counter (through ``.data``). So only calls that autograd follows take codes
  of frozen weights; what runs without gradients (generation between the steps of a training, with
  adapters merged into the base for its time) quantises w itself.
* FSDP's, which gathers a weight anew into the same Parameter. So where ``torch.distributed`` is
  initialised codes are kept inside of ``gradient_accumulation`` alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import _compat, accumulation, ops

_INT8 = '"forward":"int8"'


def is_int8(config: str) -> bool:
    """Whether a configuration, as its own ``json`` has it, has an 8-bit forward.

    By its text, as torch.compile cannot follow what parses it.
    """
    return _INT8 in config


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: str,
    *,
    matrix: Tensor | None = None,
    followed: bool,
) -> Tensor:
    """``x weight^T + bias`` in INT8 and in x's dtype, in eager mode; no gradients.

    Args:
        x: ``[..., I]``, as autocast casts it.
        weight: ``[O, I]``, of any dtype that HOT takes.
        bias: ``[O]`` or None, likewise.
        config: as JSON.
        matrix: the weight as ``[O, I]``, where its own shape is another.
        followed: whether autograd follows the call, which may then take a frozen weight's codes.
    """
    rows = weight if matrix is None else matrix
    codes = _codes_of(weight, rows, config, followed) if ops.bypasses_dispatcher(x, rows) else None
    return ops.forward_linear(x, rows, bias, config, codes)


class _Frozen:
    """Codes of frozen weights, outside of ``gradient_accumulation``."""

    def __init__(self) -> None:
        self._codes: Any = WeakTensorKeyDictionary()  # weight -> what -> (state, codes)
        self._lock = threading.Lock()
        self._hooked = False

    def codes(
        self, weight: Tensor, what: Hashable, state: Hashable, make: Callable[[], Tensor]
    ) -> Tensor:
        with self._lock:
            if not self._hooked:
                register_optimizer_step_post_hook(self._stepped)
                self._hooked = True
            return accumulation.kept(self._codes, weight, what, state, make)

    def _stepped(self, *_: Any) -> None:
        """Drop those of weights that are trained now; fused optimizers raise no version."""
        with self._lock:
            for weight in [w for w in self._codes if w.requires_grad]:
                del self._codes[weight]

    def forget(self, weights: Iterable[Tensor]) -> None:
        with self._lock:
            for weight in weights:
                self._codes.pop(weight, None)

    def bytes(self, weights: Iterable[Tensor]) -> int:
        with self._lock:
            found = [self._codes.get(weight) or {} for weight in weights]
        return sum(codes.nbytes for entry in found for _, codes in entry.values())


_frozen = _Frozen()


def kept_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes of the codes that are kept of these frozen weights."""
    return _frozen.bytes(weights)


def forget(weights: Iterable[Tensor]) -> None:
    """Drop the codes that are kept of these frozen weights."""
    _frozen.forget(weights)


def _codes_of(weight: Tensor, rows: Tensor, config: str, followed: bool) -> Tensor | None:
    """Codes of ``rows``, a view of ``weight`` or of its base; None: nothing keeps any."""
    owner = weight if weight.is_leaf or weight._base is None else weight._base
    state = accumulation.current()
    if not owner.is_leaf or (state is None and not (followed and _lasting(owner))):
        return None
    settings = ops.parsed(config)
    # Of a stream: another one would not wait until they are made.
    stream = _compat.current_stream(rows.get_device()) if rows.is_cuda else 0
    view = (rows.shape, rows.stride(), rows.storage_offset())
    what = ("y", settings.forward_block, stream, *view)
    try:
        now = (owner._version, owner.data_ptr(), owner.dtype, owner.device)
    except RuntimeError:  # tensors of inference mode have no version
        return None

    def make() -> Tensor:
        return ops.quantize_forward_weight(rows.detach(), settings)

    if state is not None:
        return state.kept(owner, what, now, make)
    return _frozen.codes(owner, what, now, make)


def _lasting(weight: Tensor) -> bool:
    """Whether codes of it hold from step to step."""
    if weight.requires_grad or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False  # replays of a graph would read codes that may be freed
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized())
