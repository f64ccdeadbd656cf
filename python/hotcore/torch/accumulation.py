"""``gradient_accumulation``: gradients of micro-batches, added to ``.grad`` by the product."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import _compat


class _State:
    """State of one ``with gradient_accumulation()``; graphs made inside keep it alive."""

    __slots__ = ("__weakref__", "ended")

    def __init__(self) -> None:
        self.ended = False
        """Graphs that were made inside then behave like any other."""


class _Threads(threading.local):
    state: _State | None = None


_threads = _Threads()


def current() -> _State | None:
    """The state of the context that the calling thread is inside; None outside."""
    return _threads.state


@contextlib.contextmanager
def gradient_accumulation() -> Iterator[None]:
    """Add g_w and g_b of linear layers to ``.grad`` in the product itself (eager mode).

    For the micro-batches of an optimizer step: the sum is made in fp32 before one rounding, without
    a temporary g_w and a pass over it. Nothing else is shared; no codes of a weight are kept.
    Autograd adds a first gradient as usual, gradients of parameters with hooks (tensor or
    post-accumulate), and all gradients of other layers. ``torch.autograd.grad`` returns its
    gradients and leaves ``.grad`` alone.

    The context belongs to the calling thread: layers that this thread runs inside take part,
    whichever thread runs their backward. Other threads are not affected and may have their own
    contexts, but not for the same parameters at once: additions of two threads could be lost. A
    reentrant checkpoint on CUDA recomputes in one of autograd's threads and accumulates there as if
    outside. After the end, graphs that were made inside behave like any other.

    Raises:
        RuntimeError: when nested, or while compiling (autograd adds in compiled layers).

    Source: docs/torch/accumulation.md, "Gradient accumulation".
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("gradient_accumulation: not inside a compiled region")
    if _threads.state is not None:
        raise RuntimeError("gradient_accumulation: this thread is already inside one")
    state = _threads.state = _State()
    try:
        yield
    finally:
        _threads.state = None
        state.ended = True


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The parameters of a layer whose forward ran inside :func:`gradient_accumulation`."""

    state: _State
    weight: Tensor
    bias: Tensor | None

    def grads(self, dtypes: Sequence[torch.dtype | None]) -> tuple[Tensor | None, Tensor | None]:
        """The ``.grad`` of weight and bias that the product adds to.

        None where autograd adds, and for a dtype of None: not wanted.
        """
        gw, gb = (
            None if dtype is None else self._grad_to_add_to(parameter)
            for dtype, parameter in zip(dtypes, (self.weight, self.bias), strict=True)
        )
        return gw, gb

    def _grad_to_add_to(self, parameter: Tensor | None) -> Tensor | None:
        """The ``.grad`` of ``parameter`` that the product adds to; None: autograd adds."""
        if self.state.ended or parameter is None or not parameter.is_leaf:
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
            and not _compat.post_accumulate_hooks(parameter)
            and _compat.accumulates(parameter)
        )
        return grad if adds else None


def shared(weight: Tensor, bias: Tensor | None) -> Shared | None:
    """The layer's parameters for backward; None outside of :func:`gradient_accumulation`."""
    state = current()
    return None if state is None or not weight.is_leaf else Shared(state, weight, bias)
