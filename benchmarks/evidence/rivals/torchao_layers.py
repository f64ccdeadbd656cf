"""torchao's training in FP8 and INT8: layers to be timed, and models to be converted.

Taken from third_party/torchao (scripts/fetch_torchao.py) or from what is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from .calls import Call

TORCHAO = Path(__file__).resolve().parents[3] / "third_party" / "torchao"


class TorchaoMissing(Exception):
    """Why torchao's layers cannot be had here."""


def _torchao(*names: str) -> list[Any]:
    """Modules of torchao, of third_party/torchao or of what is installed. Raises TorchaoMissing."""
    # Its own C++ kernels have no part in training; loading them is a matter of luck.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    if TORCHAO.is_dir() and str(TORCHAO) not in sys.path:
        sys.path.insert(0, str(TORCHAO))
    try:
        return [importlib.import_module(f"torchao.{name}") for name in names]
    except Exception as error:  # whatever a package of another version may raise
        raise TorchaoMissing(f"torchao does not import: {error}") from error


def _float8() -> Any:
    return _torchao("float8.float8_linear", "float8")[1]


def torchao_int8_convert(model: torch.nn.Module, names: Collection[str]) -> int:
    """Convert linear layers to torchao's INT8 mixed-precision training, in place; how many.

    All three products are INT8, rounded to nearest, a scale a row and a column, taken anew from
    each operand; x is kept as it is. A prototype: github.com/pytorch/ao,
    torchao/prototype/quantized_training. Its CUDA kernel is Triton's; the CPU has torch._int_mm.

    Args:
        model: as for :func:`torchao_convert`.
        names: the layers; what is no ``nn.Linear`` stays as it is.

    Raises TorchaoMissing; also where no layer is left.
    """
    training, quantization = _torchao("prototype.quantized_training", "quantization")
    config = training.Int8MixedPrecisionTrainingConfig(module_swap=True)
    taken = [name for name in names if type(model.get_submodule(name)) is torch.nn.Linear]
    chosen = {id(model.get_submodule(name)) for name in taken}
    quantization.quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    if not taken:
        raise TorchaoMissing("torchao takes nn.Linear alone; no layer is one")
    return len(taken)


def torchao_convert(
    model: torch.nn.Module, recipe: str, names: Collection[str], emulate: bool
) -> int:
    """Convert linear layers to torchao's FP8 training, in place; how many.

    Args:
        model: to be compiled afterwards: torchao leaves the casts to ``torch.compile``.
        recipe: "tensorwise" or "rowwise"; "gathered": tensorwise, and FSDP2 gathers weights in FP8.
        names: the layers; those of them that are no ``nn.Linear``, or have a number of features
            that FP8's products do not take (no multiple of 16), stay as they are.
        emulate: compute without FP8 hardware, which tests the way here, not the time.

    Raises TorchaoMissing; also where no layer is left.
    """
    float8 = _float8()
    taken = []

    def chosen(module: torch.nn.Module, name: str) -> bool:
        assert isinstance(module, torch.nn.Linear)  # torchao asks for no other
        fits = module.in_features % 16 == 0 and module.out_features % 16 == 0
        if name in names and fits:
            taken.append(name)
        return name in names and fits

    config = (
        float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        if recipe == "gathered"
        else float8.Float8LinearConfig.from_recipe_name(recipe)
    )
    if emulate:
        config = dataclasses.replace(config, emulate=True)
    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    if not taken:
        raise TorchaoMissing("torchao takes nn.Linear alone; no layer is one that FP8 fits")
    return len(taken)


def torchao_adamw(
    parameters: Iterable[torch.Tensor], rate: float, **options: Any
) -> torch.optim.Optimizer:
    """AdamW with states in 8 bits, a scale for 256; weights in bf16 are rounded stochastically.

    Args:
        parameters: all on one device.
        rate: the learning rate.
        options: others of AdamW, as torch calls them.

    Raises TorchaoMissing.
    """
    (optim,) = _torchao("optim")
    made: torch.optim.Optimizer = optim.AdamW8bit(
        parameters, lr=rate, bf16_stochastic_round=True, **options
    )
    if not made.param_groups[0]["params"][0].is_cuda:  # torchao compiles it; here in minutes
        eager = torch.compiler.set_stance("force_eager")
        made.step = eager(made.step)  # type: ignore[method-assign]  # of this one alone
    return made


def torchao_calls(
    gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, emulate: bool = False
) -> tuple[dict[str, Call], str]:
    """Contenders "torchao forward", "torchao both" and "torchao backward" (graph retained).

    They are a compiled FP8 layer's, tensorwise (torchao's default), that holds ``w``: torchao
    leaves the casts to ``torch.compile``, which is therefore part of it. ``emulate`` computes
    without FP8 hardware and uncompiled: it tests the way here, not the time.

    Returns the calls, and torchao's version. Raises TorchaoMissing.
    """
    float8 = _float8()
    layer_type = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta", dtype=w.dtype)
    linear.weight = torch.nn.Parameter(w)
    layer: Any = layer_type.from_float(linear, float8.Float8LinearConfig(emulate=emulate))
    version = str(importlib.import_module("torchao").__version__)
    if emulate:
        version = f"{version}, emulated: no timing"
    else:
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # else a backward cannot be run twice
        torch._dynamo.reset()  # every layer compiles the same code; dynamo gives up after eight
        layer = torch.compile(layer, dynamic=False)
    leaf = x.detach().clone().requires_grad_()

    def gradients(y: torch.Tensor) -> object:
        return torch.autograd.grad(y, (leaf, layer.weight), gy, retain_graph=True)

    try:
        y = layer(leaf)
        gradients(y)
    except Exception as error:  # compilation can fail in any way
        raise TorchaoMissing(f"torchao's layer does not run: {error!s:.300}") from error
    calls: dict[str, Call] = {
        "torchao forward": lambda: layer(leaf),
        "torchao both": lambda: torch.autograd.grad(layer(leaf), (leaf, layer.weight), gy),
        "torchao backward": lambda: gradients(y),
    }
    return calls, version
