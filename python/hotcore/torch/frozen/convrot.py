"""``HotConvRotLinear``: a frozen weight whose codes are those of ConvRot's 8-bit checkpoints.

ConvRot (arXiv 2512.03673; ComfyUI's format ``int8_tensorwise``) rotates w along I by a regular
Hadamard matrix H in groups of n = 4^k. It rounds to INT8 with a scale a row. H is D S Q. D has a
sign for each feature. S is the Hadamard matrix of libhot (``forward_block`` n). Q exchanges columns
and their signs. ConvRot's codes of w are therefore libhot's of ``w D``, in another order. They are
read and written without rounding, and the layer computes ``(x D)(w D)^T``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config import HotConfig
from ..layers.modules import HotLinear
from ..ops import frozen_codes
from ..ops.codes import body
from ..ops.frozen_codes import Format
from .weights import FrozenModule, HotFrozenLinear

GROUPS = (1, 4, 16, 64, 256)
"""Numbers of features that are rotated together; 1 is no rotation."""
_FORMAT = "int8_tensorwise"
_KEYS = ("weight", "weight_scale", "comfy_quant")
_SIGNS = "weight_signs"


@functools.cache  # arrays: a tensor would be of the device or mode of the first call
def _order(group: int) -> tuple[Any, Any]:
    """Q and D of a group: code j of ConvRot is ``signs[j]`` times code ``order[j]`` of libhot.

    The signs of D are the same. (H of 16 and more is the Kronecker product of H of 4.)
    """
    order, signs = np.zeros(1, np.int64), np.ones(1, np.int8)
    while len(order) < group:
        order = (np.array([0, 2, 1, 3])[:, None] * len(order) + order).ravel()
        signs = np.kron(np.array([1, 1, 1, -1], np.int8), signs)
    return order, signs


def _reordered(codes: Tensor, group: int) -> Tensor:
    """Codes ``[O, I]`` in the other order; the function is its own inverse."""
    order, signs = (torch.tensor(part, device=codes.device) for part in _order(group))
    rows, columns = codes.shape
    return (codes.view(rows, columns // group, group)[:, :, order] * signs).view(rows, columns)


def _signs(features: int, group: int, device: torch.device) -> Tensor:
    return torch.tensor(np.tile(_order(group)[1], features // group), device=device)


def why_not(layer: HotLinear) -> str:
    """Why a layer's weight cannot have such codes; empty if it can."""
    group, features = layer.config.forward_block, layer.in_features
    if group not in GROUPS:
        return f"ConvRot takes groups of {GROUPS} features, not forward_block {group}"
    return f"{features} features are no multiple of ConvRot's group {group}" * (
        features % group > 0
    )


class HotConvRotLinear(HotFrozenLinear):
    """:class:`HotFrozenLinear` with ConvRot's codes; ``freeze_int8(model, convrot=True)`` makes it.

    ``state_dict`` has ConvRot's keys: ``weight`` int8 ``[O, I]``, ``weight_scale`` fp32 ``[O, 1]``
    and ``comfy_quant``, a uint8 vector of JSON. ``load_state_dict`` takes these, with the group
    that they say, and plain weights.
    """

    thawed = HotLinear
    convrot = True
    buffers_of_codes = (_SIGNS,)
    weight_signs: Tensor
    """The signs D, int8 ``[I]``."""

    @classmethod
    def encode(cls, rows: Tensor, config: HotConfig, exponents: Tensor | None = None) -> Tensor:
        """libhot's codes of ``rows D``."""
        return super().encode(
            rows * _signs(rows.shape[1], config.forward_block, rows.device), config
        )

    def take_format(self, codes: Tensor) -> None:
        """Take the group of ConvRot's codes; raises ValueError for others."""
        form = frozen_codes.format_of(codes.numel(), *self.weight_features)
        if form is None or not form.convrot or torch.compiler.is_compiling():
            super().take_format(codes)
        else:
            self.weight_block = form.block
            self.config = dataclasses.replace(self._config, forward_block=form.block)
            self.on_frozen()

    def on_frozen(self) -> None:
        """Hold D, a sign for each feature."""
        signs = _signs(self.in_features, self.weight_block, self.weight_codes.device)
        self.register_buffer(_SIGNS, signs, persistent=False)

    def dequantized(self) -> Tensor:
        """The weight that the codes stand for, in its shape and dtype: a new tensor."""
        return super().dequantized() * self.weight_signs

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._product(x * self.weight_signs, weight, bias)

    def _parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Views of libhot's codes ``[O, Kp]``, Kp ≥ I, and of their scales ``[O]``."""
        rows = self.out_features
        q, scales = codes[: -4 * rows].view(torch.int8), codes[-4 * rows :].view(torch.float32)
        return q.view(rows, q.numel() // max(rows, 1)), scales

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        others: dict[str, Any] = {}
        super(FrozenModule, self)._save_to_state_dict(others, prefix, False)
        del others[prefix + "weight_codes"]
        weight = self.frozen
        group, codes = weight.block, frozen_codes.gathered(weight.codes)
        q, scales = self._parts(body(weight._replace(codes=codes)))
        layout = {"format": _FORMAT, "convrot": group > 1, "convrot_groupsize": group}
        values = (
            _reordered(q[:, : self.in_features], group),
            (scales * group**-0.5)[:, None],  # of a normalised H; a power of two
            torch.tensor(list(json.dumps(layout).encode()), dtype=torch.uint8, device="cpu"),
        )
        destination.update({prefix + key: v for key, v in zip(_KEYS, values, strict=True)} | others)

    def _codes_from(self, state: dict[str, Any], prefix: str, assign: bool) -> Tensor | None:
        weight = state.get(prefix + "weight")
        if weight is not None and (prefix + "comfy_quant" in state or weight.dtype == torch.int8):
            state[prefix + "weight_codes"] = self._read(state, prefix)
        return super()._codes_from(state, prefix, assign)

    def _read(self, state: dict[str, Any], prefix: str) -> Tensor:
        """Take ConvRot's keys out of ``state``; return libhot's codes. Raises ValueError."""
        q, scale, said = (state.pop(prefix + key, None) for key in _KEYS)
        if q.dtype != torch.int8 or scale is None or said is None:
            raise ValueError(
                f"a weight of {q.dtype}; expected int8 beside weight_scale and comfy_quant, or a "
                "floating-point one alone"
            )
        rows, columns = self.weight_features
        group = _group_of(said)
        if tuple(q.shape) != (rows, columns):
            raise ValueError(f"size mismatch: codes {tuple(q.shape)}; expected {rows, columns}")
        if columns % group:
            raise ValueError(f"comfy_quant: groups of {group} do not divide {columns} features")
        if scale.numel() not in (1, rows):
            shape = tuple(scale.shape)
            raise ValueError(f"weight_scale: shape {shape}; expected one number, or {rows, 1}")
        if bool((q == -128).any()):
            raise ValueError("weight: a code is -128; expected -127 to 127")
        form = Format(group, True)
        codes = torch.zeros(form.body(rows, columns), dtype=torch.uint8, device=q.device)
        target, scales = self._parts(codes)
        target[:, :columns] = _reordered(q.contiguous(), group)
        scales.copy_(scale.float().flatten() * group**0.5)
        return frozen_codes.sealed(codes, form)


def _group_of(said: Tensor) -> int:
    """The group of a ``comfy_quant``; 1 without a rotation. Raises ValueError."""
    try:
        fields = json.loads(bytes(said.cpu().tolist()))
        layout, rotated = fields["format"], fields.get("convrot", False)
        group = fields.get("convrot_groupsize", 256) if rotated else 1
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("comfy_quant: expected the bytes of a JSON object with a format") from None
    if layout != _FORMAT:
        raise ValueError(f"comfy_quant: format {layout!r}; expected {_FORMAT!r}")
    if group not in GROUPS:
        raise ValueError(f"comfy_quant: convrot_groupsize {group!r}; expected one of {GROUPS}")
    return int(group)
