"""Linear layers of whose weight only codes exist (:class:`.codes.Frozen`): g_x and g_b, by HOT.

Without a configuration (an empty text) such a layer is the plain one with the dequantised weight,
in forward and backward, and draws no seed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat
from . import calls, codes, core, linear
from .codes import Frozen
from .core import handle_of


def frozen_linear(x: Tensor, weight: Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    """A linear layer with a frozen weight: gradients of x and bias.

    Without a configuration it is plain.
    """
    if not isinstance(x, Tensor):
        return calls.handle_overrides(frozen_linear, x, weight, bias, config_json)
    if torch.compiler.is_compiling():
        return _call(x, weight, bias, config_json)
    with calls.hide_from_modes(x, weight.codes):
        return _call(x, weight, bias, config_json)


def _call(x: Tensor, weight: Frozen, bias: Tensor | None, config_json: str) -> Tensor:
    compiled, seed = torch.compiler.is_compiling(), None
    if config_json and not compiled:
        seed = calls.seed_for_call("linear", x, weight.codes, bias, config_json)
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )
    dtype = calls.autocast_dtype(x)
    inner = calls.cast(x, dtype)
    if config_json:
        calls.check_dtypes(x, weight.dtype, bias, dtype)
        calls.check_transforms("linear", x, bias)
    elif not wanted or (not compiled and (_compat.transforms_active() or _compat.jit_tracing())):
        # Plain operations, which every transform can trace.
        matrix = codes.dequantized(linear.for_product(weight, inner.dtype)).to(inner.dtype)
        return F.linear(inner, matrix, None if bias is None else calls.cast(bias, dtype))
    if not wanted:
        return linear.product(inner, weight, bias, config_json)
    x_codes = None
    if not calls.is_int8(config_json):
        if compiled and config_json:
            _, seed = codes.kept_of(x, inner, config_json, False)
    elif compiled:
        x_codes, _, seed = codes.input_of(x, inner, config_json, False)
    elif seed is not None and core.product_bypasses_dispatcher(inner, weight.codes):
        handle = handle_of(config_json)
        x_codes, _, _ = codes.forms_of(x, inner, weight.codes, None, seed, handle, None)
    return linear.from_codes(inner, weight, bias, seed, config_json, x_codes)
