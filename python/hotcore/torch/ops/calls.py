"""Checks and casts of a layer's call, before its autograd function runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import handle_torch_function, has_torch_function

from ...config import RECIPE_TEXTS, ConfigLike, HotConfig, as_config, own_text
from .. import _compat
from . import core
from .core import DTYPES, PLAIN_TYPES


def is_int8(config: str) -> bool:
    """Whether a configuration's text has an 8-bit forward; torch.compile can trace this."""
    return "'forward':'int8'" in own_text(config)


def config_json(config: ConfigLike) -> str:
    """The configuration as the operators take it; torch.compile can trace this function."""
    if isinstance(config, HotConfig):
        return config.json
    if isinstance(config, str) and config in RECIPE_TEXTS:
        return RECIPE_TEXTS[config]
    return as_config(config).json  # raises


def handle_overrides(function: Callable[..., Tensor], x: Any, *arguments: Any) -> Tensor:
    """Pass the call to the ``__torch_function__`` of x; torch.fx's proxies record it so."""
    if not has_torch_function((x,)):
        raise TypeError(f"x: {type(x).__name__}; expected a torch.Tensor")
    output: Tensor = handle_torch_function(function, (x,), x, *arguments)
    return output


def check_tensors(bias: object = None, **tensors: object) -> None:
    """Refuse arguments that are no tensors, by name; the bias may be None."""
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and not has_torch_function((tensor,)):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")


OPEN: AbstractContextManager[Any] = nullcontext()
"""The context that hides nothing."""


def hide_from_modes(x: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """Hide a layer's inner calls from torch-function modes (``torch.set_default_device`` sets one).

    A mode would see about twenty attributes and calls, at 2 us of host time each. Nothing is hidden
    from subclasses of Tensor, which may need to see the calls.
    """
    if _compat.torch_function_modes() and type(x) in PLAIN_TYPES and type(weight) in PLAIN_TYPES:
        return _compat.without_torch_function()
    return OPEN


def seed_for_call(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, config_json: str = ""
) -> Tensor | None:
    """The seed of a call in eager mode; None if there is nothing to differentiate."""
    if _compat.transforms_active():
        raise unsupported_transform(name)
    # A seed is drawn even if nothing is differentiated. A checkpoint may run a region first without
    # and then with gradients, and must see the same random numbers.
    try:
        seed = core.seed_for(x)
    except RuntimeError as error:
        if "vmap" in str(error):  # torch.autograd's vmap, which transforms_active() does not report
            raise unsupported_transform(name) from error
        raise
    trained = x.requires_grad or weight.requires_grad
    if not (torch.is_grad_enabled() if trained else wants_gradients(x, weight, bias, config_json)):
        return None
    if _compat.jit_tracing():
        raise NotImplementedError(
            f"hotcore.torch.{name}: torch.jit.trace would turn the random seed into a constant; "
            "trace the model in eval mode or under no_grad, or use torch.compile to train"
        )
    if not x.is_cpu or x.dtype not in DTYPES or x.is_nested:
        _check(x)
    return seed


def wants_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, config_json: str) -> bool:
    """Whether HOT's backward is wanted. A plain forward leaves a bias alone to autograd."""
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad or weight.requires_grad:
        return True
    return bias is not None and bias.requires_grad and is_int8(config_json)


def check_dtypes(
    x: Tensor, weight: torch.dtype, bias: Tensor | None, autocast: Any, hint: str = ""
) -> None:
    """Refuse the dtypes that ``F.linear`` refuses; ``hint`` ends the error of a weight."""
    if not torch.compiler.is_compiling():
        _check(x)
    for name, dtype in (("weight", weight), ("bias", None if bias is None else bias.dtype)):
        if dtype is not None and (dtype not in DTYPES or (autocast is None and dtype != x.dtype)):
            raise ValueError(
                f"{name}: dtype {_name(dtype)}; x has {_name(x.dtype)}, and autocast is off"
                f"{hint if name == 'weight' else ''}"
            )


def check_transforms(name: str, *tensors: Tensor | None) -> None:
    """Refuse transforms and forward mode: an 8-bit forward is one call, without a derivative."""
    if torch.compiler.is_compiling():
        return
    refuse_transforms(name)
    duals = map(unpack_dual, (tensor for tensor in tensors if tensor is not None))
    if any(dual.tangent is not None for dual in duals):
        raise unsupported_transform(name)


def refuse_transforms(name: str) -> None:
    """Raise NotImplementedError inside a transform; operators that tracers take apart call it."""
    if _compat.transforms_active():
        raise unsupported_transform(name)


def unsupported_transform(name: str) -> NotImplementedError:
    """The error that a call inside a transform raises."""
    return NotImplementedError(
        f"hotcore.torch.{name}: torch.func transforms (grad, vmap, jvp, ...) and forward mode are "
        "not supported; use autograd, or revert() the model"
    )


def _check(x: Tensor) -> None:
    if not (x.is_cpu or x.is_meta):
        core.context_for(x)  # reports a missing backend in forward, not in backward
    if x.dtype not in DTYPES:
        # autocast leaves such dtypes alone, and casts others to a supported one
        raise ValueError(f"x: dtype {_name(x.dtype)}; expected float32, float16 or bfloat16")
    if x.is_nested:
        raise ValueError("x: a nested tensor; a HOT layer takes its values(), [tokens, I]")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast would cast x to; None if it would leave x alone."""
    return autocast_on(x.device.type) if x.dtype in DTYPES else None


def autocast_on(device: str) -> torch.dtype | None:
    """The dtype autocast computes in on a type of device; None if it is off."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """The tensor, or None, as autocast casts it to its :func:`autocast_dtype`."""
    plain = tensor is None or dtype is None or tensor.dtype not in DTYPES
    return tensor if plain else tensor.to(dtype)
