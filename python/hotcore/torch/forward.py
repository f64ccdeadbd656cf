"""The 8-bit forward of layers (``forward="int8"``) in eager mode.

A trained weight is quantised by every call, or by the first micro-batch inside of
:func:`hotcore.torch.gradient_accumulation`; a frozen one once (:mod:`hotcore.torch.weight_codes`).
"""

from __future__ import annotations

from torch import Tensor

from . import accumulation, ops, weight_codes

_INT8 = '"forward":"int8"'


def is_int8(config: str) -> bool:
    """Whether a configuration, as its own ``json`` has it, has an 8-bit forward.

    By its text, as torch.compile cannot follow what parses it.
    """
    return _INT8 in config


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: str, *, followed: bool
) -> Tensor:
    """``x weight^T + bias`` in INT8 and in x's dtype; no gradients.

    Args:
        x: ``[..., I]``, as autocast casts it.
        weight: ``[O, I]``, of any dtype that HOT takes.
        bias: ``[O]`` or None, likewise.
        config: as JSON.
        followed: whether autograd follows the call, which may then take a frozen weight's codes.
    """
    codes = None
    if ops.bypasses_dispatcher(x, weight):
        codes = _codes_of(weight, config, followed)
    return ops.forward_linear(x, weight, bias, config, codes)


def _codes_of(rows: Tensor, config: str, followed: bool) -> Tensor | None:
    """Codes of a weight; None: nothing keeps any."""
    state = accumulation.current()
    if state is None:
        return ops.frozen_codes(rows, ops.parsed(config)) if followed else None
    owner, settings = weight_codes.owner_of(rows), ops.parsed(config)
    key = weight_codes.forward_key(rows, settings.forward_block)
    if key is None or not owner.is_leaf:
        return None
    return state.kept(owner, *key, lambda: ops.quantize_forward_weight(rows, settings))
