"""``gradient_accumulation``: what the micro-batches of one optimizer step can share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from . import ops


@dataclasses.dataclass
class _State:
    in_place: bool
    # weight -> its version, the configuration and dtype it was quantised for, the codes
    weights: Any = dataclasses.field(default_factory=WeakTensorKeyDictionary)


_active: _State | None = None


@contextlib.contextmanager
def gradient_accumulation(*, in_place: bool = True) -> Iterator[None]:
    """Share work between the micro-batches of one optimizer step (linear layers, eager mode).

    Inside, a weight is quantised for g_x by the first micro-batch alone. The codes, one byte a
    weight, are dropped when an optimizer steps (frozen weights keep theirs: LoRA's base is
    quantised once), when the weight is written (not seen: through ``.data``), and at the end.
    The gradients are the same bits.
    With ``in_place`` g_w and g_b are added to ``.grad`` by the product itself, in fp32 before one
    rounding: no g_w of its own, and no pass over it.

    Args:
        in_place: False leaves the adding to autograd. Needed where something waits for autograd's
            own accumulation (DistributedDataParallel outside of ``no_sync()``), and where gradients
            are asked for by ``torch.autograd.grad`` instead of ``backward()``. Parameters with
            hooks (tensor or post-accumulate) are left to autograd anyway, and so is a first
            gradient.

    Raises:
        RuntimeError: when nested, or while compiling (torch.compile'd layers share nothing).

    Source: docs/torch.md, "Gradient accumulation".
    """
    global _active
    if torch.compiler.is_compiling():
        raise RuntimeError("gradient_accumulation: not inside a compiled region")
    if _active is not None:
        raise RuntimeError("gradient_accumulation: already inside one")
    state = _State(in_place)

    def stepped(*_: Any) -> None:
        for weight in [w for w in state.weights if w.requires_grad]:
            del state.weights[weight]

    hook = register_optimizer_step_post_hook(stepped)
    _active = state
    try:
        yield
    finally:
        _active = None
        hook.remove()


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The parameters of a layer whose forward ran inside :func:`gradient_accumulation`."""

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
        """g_x, g_w, g_b; None where the dtype is None, or where it was added to ``.grad``."""
        of_gx, *others = dtypes
        added = [
            None if dtype is None else _grad_to_add_to(parameter)
            for dtype, parameter in zip(others, (self.weight, self.bias), strict=True)
        ]
        others = [
            dtype if grad is None else None for dtype, grad in zip(others, added, strict=True)
        ]
        gx, gw, gb = ops.new_gradients(gy, x_shape, (of_gx, *others))
        accumulate = any(grad is not None for grad in added)
        if accumulate:  # one call adds to both or to none
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
            None if gx is None else _codes(self.weight, config),
        )
        for grad in added:
            if grad is not None:
                torch.autograd.graph.increment_version(grad)
        return gx, gw, gb


def shared(weight: Tensor, bias: Tensor | None) -> Shared | None:
    """What a layer keeps of its parameters; None outside of :func:`gradient_accumulation`."""
    if _active is None or not weight.is_leaf:
        return None
    return Shared(weight, bias)


def _codes(weight: Tensor, config: str) -> Tensor | None:
    state = _active
    if state is None:
        return None
    wanted = (weight._version, config, weight.dtype, weight.device)
    found = state.weights.get(weight)
    if found is None or found[0] != wanted:
        found = (wanted, ops.quantize_weight(weight.detach(), ops.parsed(config)))
        state.weights[weight] = found
    codes: Tensor = found[1]
    return codes


def _grad_to_add_to(parameter: Tensor | None) -> Tensor | None:
    """The ``.grad`` of ``parameter`` that the product is to add to; None: autograd adds."""
    if _active is None or not _active.in_place or parameter is None:
        return None
    grad = parameter.grad
    adds = (
        grad is not None
        and parameter.is_leaf
        and not grad.requires_grad
        and grad.layout == torch.strided
        and grad.dtype == parameter.dtype
        and grad.device == parameter.device
        and grad.shape == parameter.shape
        and not parameter._backward_hooks
        and not getattr(parameter, "_post_accumulate_grad_hooks", None)
    )
    return grad if adds else None
