"""Training by torchao in FP8 and INT8: layers to time, and conversion of models.

torchao comes from third_party/torchao (scripts/fetch_torchao.py) or is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from .calls import Call

TORCHAO = Path(__file__).resolve().parents[3] / "third_party" / "torchao"


class TorchaoMissing(Exception):
    """Reason why torchao's layers are unavailable."""


def _torchao(*names: str) -> list[Any]:
    """Import modules of torchao. Raises TorchaoMissing."""
    # Training does not need torchao's C++ kernels, which may fail to load.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    if TORCHAO.is_dir() and str(TORCHAO) not in sys.path:
        sys.path.insert(0, str(TORCHAO))
    try:
        return [importlib.import_module(f"torchao.{name}") for name in names]
    except Exception as error:  # other versions may raise any error
        raise TorchaoMissing(f"torchao does not import: {error}") from error


def _float8() -> Any:
    return _torchao("float8.float8_linear", "float8")[1]


def torchao_int8_convert(model: torch.nn.Module, names: Collection[str]) -> int:
    """Convert linear layers to torchao's INT8 training in place. Returns their number.

    All three products are INT8, rounded to nearest, with scales per row and column. x is kept in
    full. The CUDA kernel is Triton's, the CPU uses torch._int_mm.

    Args:
        model: as for :func:`torchao_convert`.
        names: names of layers; those that are no ``nn.Linear`` stay plain.

    Raises TorchaoMissing, also if no layer can be converted.

    Source: torchao/prototype/quantized_training of github.com/pytorch/ao.
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
    """Convert linear layers to torchao's FP8 training in place. Returns their number.

    Args:
        model: compile it afterwards, because torchao leaves the casts to ``torch.compile``.
        recipe: "tensorwise" or "rowwise". "gathered" is tensorwise, and FSDP2 gathers weights in
            FP8.
        names: names of layers. A layer stays plain if it is no ``nn.Linear``, or if its features
            are no multiple of 16.
        emulate: whether to compute without FP8 hardware, for tests.

    Raises TorchaoMissing, also if no layer can be converted.
    """
    float8 = _float8()
    taken = []

    def chosen(module: torch.nn.Module, name: str) -> bool:
        assert isinstance(module, torch.nn.Linear)  # torchao passes no other layers
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


def torchao_nf4(weight: torch.Tensor) -> torch.nn.Parameter:
    """Return a frozen weight in torchao's NF4, with double quantisation. Raises TorchaoMissing."""
    homes = _torchao("quantization", "dtypes")  # since 0.18, and before
    kinds = [home.NF4Tensor for home in homes if hasattr(home, "NF4Tensor")]
    if not kinds:
        raise TorchaoMissing("torchao's NF4Tensor is neither in quantization nor in dtypes")
    scales = math.gcd(256, weight.numel() // 64)  # 256, except in a toy
    coded = kinds[0].from_tensor(weight, 64, scales)
    return torch.nn.Parameter(coded, requires_grad=False)


def torchao_adamw(parameters: Iterable[torch.Tensor], rate: float) -> torch.optim.Optimizer:
    """Make AdamW with 8-bit states, a scale per 256, and stochastic rounding of bf16 weights.

    Args:
        parameters: parameters on one device.
        rate: learning rate.

    Raises TorchaoMissing.
    """
    (optim,) = _torchao("optim")
    adamw: torch.optim.Optimizer = optim.AdamW8bit(parameters, lr=rate, bf16_stochastic_round=True)
    if not adamw.param_groups[0]["params"][0].is_cuda:  # a CPU would compile it for minutes
        eager = torch.compiler.set_stance("force_eager")
        adamw.step = eager(adamw.step)  # type: ignore[method-assign]  # this optimizer only
    return adamw


def torchao_calls(
    gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor
) -> tuple[dict[str, Call], str]:
    """Make contenders "torchao forward", "torchao both", "torchao backward" (graph retained).

    They run a compiled FP8 layer that holds ``w``, tensorwise (torchao's default). torchao leaves
    the casts to ``torch.compile``.

    Returns the calls, and torchao's version. Raises TorchaoMissing.
    """
    float8 = _float8()
    layer_type = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta", dtype=w.dtype)
    linear.weight = torch.nn.Parameter(w)
    layer: Any = layer_type.from_float(linear, float8.Float8LinearConfig())
    version = str(importlib.import_module("torchao").__version__)
    torch._functorch.config.donated_buffer = False  # allows a backward to run twice
    torch._dynamo.reset()  # layers compile the same code, and dynamo stops after eight times
    layer = torch.compile(layer, dynamic=False)
    leaf = x.detach().clone().requires_grad_()

    def gradients(y: torch.Tensor) -> object:
        return torch.autograd.grad(y, (leaf, layer.weight), gy, retain_graph=True)

    try:
        y = layer(leaf)
        gradients(y)
    except Exception as error:  # compilation can raise any error
        raise TorchaoMissing(f"torchao's layer does not run: {error!s:.300}") from error
    calls: dict[str, Call] = {
        "torchao forward": lambda: layer(leaf),
        "torchao both": lambda: torch.autograd.grad(layer(leaf), (leaf, layer.weight), gy),
        "torchao backward": lambda: gradients(y),
    }
    return calls, version
