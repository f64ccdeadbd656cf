"""What every call of a layer checks and casts before an autograd function runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import handle_torch_function, has_torch_function

from ...config import RECIPE_TEXTS, ConfigLike, HotConfig, as_config
from .. import _compat
from . import core
from .core import DTYPES, PLAIN_TYPES

_INT8 = '"forward":"int8"'


def is_int8(config: str) -> bool:
    """Whether a configuration, as its own ``json`` has it, has an 8-bit forward.

    By its text, as torch.compile cannot follow what parses it.
    """
    return _INT8 in config


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
    """Refuse what is no tensor by its name; there need not be a bias."""
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and not has_torch_function((tensor,)):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")


_OPEN: AbstractContextManager[Any] = nullcontext()


def hide_from_modes(x: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """Hide a layer's inner calls from torch-function modes (``torch.set_default_device`` sets one).

    A mode would see about twenty attributes and calls, at 2 us of host time each. Nothing is hidden
    from subclasses of Tensor, which may need to see the calls.
    """
    if _compat.torch_function_modes() and type(x) in PLAIN_TYPES and type(weight) in PLAIN_TYPES:
        return _compat.without_torch_function()
    return _OPEN


def seed_for_call(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, config_json: str = ""
) -> Tensor | None:
    """The seed of a call in eager mode; None if there is nothing to differentiate."""
    if _compat.transforms_active():
        raise unsupported_transform(name)
    # A seed is drawn even if nothing is differentiated: a checkpoint may run a region without and
    # then with gradients, and must see the same random numbers.
    try:
        seed = core.seed_for(x)
    except RuntimeError as error:
        if "vmap" in str(error):  # torch.autograd's vmap, which transforms_active() does not report
            raise unsupported_transform(name) from error
        raise
    if not wants_gradients(x, weight, bias, config_json):
        return None
    if _compat.jit_tracing():
        raise NotImplementedError(
            f"hotcore.torch.{name}: torch.jit.trace would turn the random seed into a constant; "
            "trace the model in eval mode or under no_grad, or use torch.compile to train"
        )
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
    x: Tensor, weight: torch.dtype, bias: Tensor | None, autocast: torch.dtype | None
) -> None:
    """An 8-bit forward refuses what ``F.linear`` refuses."""
    if not torch.compiler.is_compiling():
        _check(x)
    for name, dtype in (("weight", weight), ("bias", None if bias is None else bias.dtype)):
        if dtype is None:
            continue
        if dtype not in DTYPES or (autocast is None and dtype != x.dtype):
            found = str(dtype).removeprefix("torch.")
            expected = str(x.dtype).removeprefix("torch.")
            raise ValueError(f"{name}: dtype {found}; x has {expected}, and autocast is off")


def check_transforms(name: str, *tensors: Tensor | None) -> None:
    """Refuse what would not see an 8-bit forward: it is one call, without a derivative."""
    if torch.compiler.is_compiling():
        return
    found = [tensor for tensor in tensors if tensor is not None]
    unpacked = map(unpack_dual, found)
    if _compat.transforms_active() or any(dual.tangent is not None for dual in unpacked):
        raise unsupported_transform(name)


def refuse_transforms(name: str) -> None:
    """Raise NotImplementedError inside of a transform; in an operator that tracers take apart."""
    if _compat.transforms_active():
        raise unsupported_transform(name)


def unsupported_transform(name: str) -> NotImplementedError:
    """The error of a call inside a transform."""
    return NotImplementedError(
        f"hotcore.torch.{name}: torch.func transforms (grad, vmap, jvp, ...) and forward mode are "
        "not supported; use autograd, or revert() the model"
    )


def _check(x: Tensor) -> None:
    if not (x.is_cpu or x.is_meta):
        core.context_for(x)  # reports a missing backend in forward, not in backward
    if x.dtype not in DTYPES:
        # autocast leaves such dtypes alone, and casts others to a supported one
        name = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"x: dtype {name}; expected float32, float16 or bfloat16")
    if x.is_nested:
        raise ValueError("x: a nested tensor; a HOT layer takes its values(), [tokens, I]")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast would cast x to; None if it would leave x alone."""
    device = x.device.type
    if x.dtype not in DTYPES or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor as autocast casts it, given :func:`autocast_dtype`."""
    return tensor if dtype is None or tensor.dtype not in DTYPES else tensor.to(dtype)
