"""``gradient_accumulation``: what the micro-batches of one optimizer step can share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..config import Key
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
    quantised once), when the weight is written, and at the end. The gradients are the same bits.
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
        x_shape: torch.Size,
        config: str,
        key: Key,
        dtypes: Sequence[torch.dtype | None],
        need: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """g_x, g_w and g_b; None for what is not needed, or was added to ``.grad``."""
        outs, ins = self.weight.shape
        few = 2 <= len(x_shape) <= 4  # as libhot takes it
        of_gx = tuple(x_shape) if few else (math.prod(x_shape[:-1]), ins)
        shapes = (of_gx, (outs, ins), (outs,))
        in_place = [False, need[1] and _adds(self.weight), need[2] and _adds(self.bias)]
        accumulate = any(in_place)
        results: list[Tensor | None] = [None, None, None]
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            if not need[i]:
                continue
            parameter = self.bias if i == 2 else self.weight
            if in_place[i] and parameter is not None:
                results[i] = parameter.grad
            else:  # one call adds to both or to none
                new = torch.zeros if accumulate and i > 0 else torch.empty
                results[i] = new(shape, dtype=dtype, device=gy.device)
        ops.backward(
            gy,
            self.weight.detach() if need[0] else None,
            saved if need[1] else None,
            ins,
            ops.parsed(config),
            key,
            (results[0], results[1], results[2]),
            accumulate,
            _codes(self.weight, config) if need[0] else None,
        )
        for i, added in enumerate(in_place):
            result = results[i]
            if added and result is not None:
                torch.autograd.graph.increment_version(result)
                results[i] = None
        gx = results[0]
        return gx if gx is None or few else gx.view(x_shape), results[1], results[2]


def shared(weight: Tensor, bias: Tensor | None) -> Shared | None:
    """What a layer keeps of its parameters; None outside of :func:`gradient_accumulation`."""
    if torch.compiler.is_compiling() or _active is None or not weight.is_leaf:
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


def _adds(parameter: Tensor | None) -> bool:
    """Whether a gradient of ``parameter`` is to be added to its ``.grad`` by the product."""
    if _active is None or not _active.in_place or parameter is None:
        return False
    grad = parameter.grad
    return (
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
