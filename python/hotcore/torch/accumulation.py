"""``gradient_accumulation``: work that the micro-batches of one optimizer step share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import _compat, ops, weight_codes


class _State:
    """State of one ``with gradient_accumulation()``; graphs made inside keep it alive."""

    __slots__ = ("__weakref__", "_codes", "_ended", "_in_place", "_lock")

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._ended = False
        # weight -> for g_x or for y -> what it was then, the codes
        self._codes: Any = WeakTensorKeyDictionary()
        self._lock = threading.Lock()  # autograd has a thread for every CUDA device

    @property
    def in_place(self) -> bool:
        """Whether gradients are added in place; False after the end."""
        return self._in_place and not self._ended

    def codes(self, weight: Tensor, config: str) -> Tensor | None:
        """``weight`` quantised for g_x, by the first micro-batch; None after the end."""
        now = (weight._version, config, weight.dtype, weight.device)

        def make() -> Tensor:
            return ops.quantize_weight(weight.detach(), ops.parsed(config))

        return self.kept(weight, "gx", now, make)

    def kept(
        self, weight: Tensor, what: Hashable, state: Hashable, make: Callable[[], Tensor]
    ) -> Tensor | None:
        """Codes of ``weight`` by ``make``, of the first micro-batch; None after the end."""
        with self._lock:
            if self._ended:
                return None
            return weight_codes.kept(self._codes, weight, what, state, make)

    def stepped(self, *_: Any) -> None:
        """Drop the codes of trained weights; fused optimizers do not raise a weight's version."""
        with self._lock:
            for weight in [w for w in self._codes if w.requires_grad]:
                del self._codes[weight]

    def end(self) -> None:
        """End: graphs that were made inside now behave like any other."""
        with self._lock:
            self._ended = True
            self._codes.clear()


class _Threads(threading.local):
    state: _State | None = None


_threads = _Threads()
_open_contexts = 0  # open contexts in the process; layers return early if there is none
_count = threading.Lock()


def _after_fork() -> None:
    global _count
    _count = threading.Lock()  # a thread that does not exist in the child may hold the other


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def current() -> _State | None:
    """The state of the context that the calling thread is inside; None outside."""
    return _threads.state if _open_contexts else None


def open_contexts() -> int:
    """Number of open contexts in the process."""
    return _open_contexts


@contextlib.contextmanager
def gradient_accumulation(*, in_place: bool = True) -> Iterator[None]:
    """Share work between the micro-batches of one optimizer step (linear layers, eager mode).

    Inside, only the first micro-batch quantises a weight for g_x, and for an 8-bit forward. The
    codes, one byte per weight for each, are dropped when an optimizer steps (frozen weights keep
    theirs: LoRA's base is quantised once), when the weight is written (writes through ``.data`` go
    unnoticed), and at the end. Gradients are the same bits. With ``in_place`` the product itself
    adds g_w and g_b to ``.grad``, in fp32 before one rounding, without a temporary g_w and a pass
    over it.

    The context belongs to the calling thread: layers that this thread runs inside take part,
    whichever thread runs their backward. Other threads are not affected and may have their own
    contexts. A reentrant checkpoint on CUDA recomputes in one of autograd's threads and accumulates
    there as if outside. After the end, graphs that were made inside behave like any other.

    Args:
        in_place: False leaves accumulation to autograd. This is needed if something waits for
            autograd's accumulation (DistributedDataParallel outside of ``no_sync()``), and if
            several threads run backward for the same parameters at once. Autograd always adds a
            first gradient, and gradients of parameters with hooks (tensor or post-accumulate).
            ``torch.autograd.grad`` returns its gradients and leaves ``.grad`` alone.

    Raises:
        RuntimeError: when nested, or while compiling (compiled layers share nothing).

    Source: docs/torch/accumulation.md, "Gradient accumulation".
    """
    global _open_contexts
    if torch.compiler.is_compiling():
        raise RuntimeError("gradient_accumulation: not inside a compiled region")
    if _threads.state is not None:
        raise RuntimeError("gradient_accumulation: this thread is already inside one")
    state = _State(in_place)
    hook = register_optimizer_step_post_hook(state.stepped)
    _threads.state = state
    with _count:
        _open_contexts += 1
    try:
        yield
    finally:
        with _count:
            _open_contexts -= 1
        _threads.state = None
        state.end()
        hook.remove()


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The parameters of a layer whose forward ran inside :func:`gradient_accumulation`."""

    state: _State
    weight: Tensor
    bias: Tensor | None

    def backward(
        self,
        gy: Tensor,
        saved: Tensor | None,
        saved_seed: Tensor | None,
        seed: Tensor,
        config: str,
        x_shape: torch.Size,
        dtypes: Sequence[torch.dtype | None],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """g_x, g_w, g_b; None for a dtype of None and for gradients added to ``.grad``."""
        of_gx, *others = dtypes
        if ops.is_sparse_or_batched(gy):
            weight = None if of_gx is None else self.weight
            common = (saved, saved_seed, seed, config, x_shape)
            return ops.backward_linear(gy, weight, *common, *dtypes)
        added = [
            None if dtype is None else self._grad_to_add_to(parameter)
            for dtype, parameter in zip(others, (self.weight, self.bias), strict=True)
        ]
        others = [
            dtype if grad is None else None for dtype, grad in zip(others, added, strict=True)
        ]
        gx, gw, gb = ops.new_gradients(gy, x_shape, (of_gx, *others))
        accumulate = any(grad is not None for grad in added)
        if accumulate:  # a call adds to both gradients or to none
            for new in (gw, gb):
                if new is not None:
                    new.zero_()
        ops.backward(
            gy,
            None if gx is None else self.weight.detach(),
            saved,
            x_shape[-1],
            ops.parsed(config),
            ops.keys_of(saved_seed, seed),
            (gx, gw if added[0] is None else added[0], gb if added[1] is None else added[1]),
            accumulate,
            None if gx is None else self.state.codes(self.weight, config),
        )
        for grad in added:
            if grad is not None:
                torch.autograd.graph.increment_version(grad)
        return gx, gw, gb

    def _grad_to_add_to(self, parameter: Tensor | None) -> Tensor | None:
        """The ``.grad`` of ``parameter`` that the product adds to; None: autograd adds."""
        if not self.state.in_place or parameter is None or not parameter.is_leaf:
            return None  # an attention's bias is a slice, and reading a non-leaf's .grad warns
        grad = parameter.grad
        adds = (
            grad is not None
            and not grad.requires_grad
            and grad.layout == torch.strided
            and grad.dtype == parameter.dtype
            and grad.device == parameter.device
            and grad.shape == parameter.shape
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
            and _compat.accumulates(parameter)
        )
        return grad if adds else None


def shared(weight: Tensor, bias: Tensor | None) -> Shared | None:
    """The layer's parameters for backward; None outside of :func:`gradient_accumulation`."""
    state = current()
    return None if state is None or not weight.is_leaf else Shared(state, weight, bias)
