"""Conversion of a model's layers to a rival's method or a recipe of hotcore."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hotcore.torch as hot
from hotcore.config import RECIPES
from models import mend_torchvision
from torch import nn

from .lbp_wht import LbpWht
from .methods import AuthorsHot, BFloat16, Luq, Method, NaiveInt4, TwoBitActivations, WithoutAbc
from .torchao_layers import torchao_convert, torchao_int8_convert

Filter = Callable[[nn.Module, str], bool]

_SIMULATED: dict[str, Callable[..., Method]] = {
    "bf16": BFloat16,
    "naive_int4": NaiveInt4,
    "luq": Luq,
    "luq_forward": lambda: Luq(forward=True),
    "lbp_wht": LbpWht,
    "lbp_wht_flat": lambda rank=8: LbpWht(rank, tiles=False),
    "authors_hot": AuthorsHot,
    "actnn_2bit": TwoBitActivations,
    "without_abc": WithoutAbc,
}
_OTHERS = ("fp32", "lora", "torchao_fp8", "torchao_int8")

METHODS: tuple[str, ...] = (*_OTHERS[:1], *_SIMULATED, *_OTHERS[1:], *RECIPES)
"""Names that :func:`convert` takes; the last ones are hotcore's recipes."""


@dataclass(frozen=True)
class Converted:
    """Result of :func:`convert`."""

    method: str
    names: tuple[str, ...]
    """Layers that have the method."""
    left: dict[str, str] = field(default_factory=dict)
    """Layers that hotcore would convert and the method cannot, each with the reason."""


def method_of(name: str, **settings: Any) -> Method:
    """Make the simulated method of a name. Raises ValueError for another name."""
    if name not in _SIMULATED:
        raise ValueError(f"method: {name!r} is none of {', '.join(_SIMULATED)}")
    return _SIMULATED[name](**settings)


def of_file(spec: str) -> Method:
    """Make an object of ``FILE.py:Class``, a method from outside of this package.

    Raises ValueError if the file is missing or has no such subclass of :class:`Method`.
    """
    path, _, name = spec.rpartition(":")
    try:
        kind = runpy.run_path(path).get(name)
    except FileNotFoundError as error:
        raise ValueError(f"method: {spec}: there is no {path!r}") from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"method: {spec}: {name!r} is no subclass of CustomBackward")
    return kind()


def convert(
    model: nn.Module, method: str | Method, filter_fn: Filter | None = None, **settings: Any
) -> Converted:
    """Give a rival's backward, in place, to the layers that hotcore would convert.

    Parameters stay the same objects, so an existing optimizer remains valid.

    Args:
        model: plain model.
        method: name in :data:`METHODS` ("fp32" changes nothing), a
            :class:`hotcore.torch.CustomBackward`, or its ``FILE.py:Class``.
        filter_fn: selects layers, as for :func:`hotcore.torch.convert`.
        settings: ``rank``, ``token_grid``, ``prefix_tokens`` (lbp_wht), ``rank`` (lbp_wht_flat,
            lora), ``gw_bits`` (authors_hot), or HotConfig's.

    Raises ValueError for an unknown method or if no layer can be converted, and TorchaoMissing.
    """
    if isinstance(method, str) and ".py:" in method:
        method = of_file(method)
    if isinstance(method, Method):
        if settings:
            raise TypeError(f"{type(method).__name__}: settings are for methods by name")
        return _simulated(model, type(method).__name__, taken_by_hotcore(model, filter_fn), method)
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"method: the class {method.__name__}; make an object of it first")
    if method not in METHODS:
        raise ValueError(
            f"method: {method!r} is none of {', '.join(METHODS)}, and no CustomBackward"
        )
    if method in RECIPES:
        config = hot.HotConfig.recipe(method, **settings)
        report = hot.convert(model, config, filter_fn, slower=True).hot_report
        return Converted(method, tuple(row.name for row in report.converted))
    names = taken_by_hotcore(model, filter_fn)
    if method in _SIMULATED:
        return _simulated(model, method, names, method_of(method, **settings))
    if method == "lora":
        return _lora(model, names, **settings)
    if method == "fp32":
        if settings:
            raise TypeError(f"fp32: unexpected settings {', '.join(settings)}")
        return Converted(method, tuple(names))
    return _torchao(model, method, names, **settings)


def taken_by_hotcore(model: nn.Module, filter_fn: Filter | None = None) -> list[str]:
    """List the layers that :func:`hotcore.torch.convert` can convert, also slower ones."""
    report = hot.convert(model, "default", filter_fn, slower=True).hot_report
    names = [row.name for row in report.converted]
    hot.revert(model)
    return names


def _simulated(model: nn.Module, name: str, names: list[str], method: Method) -> Converted:
    done = method.convert(model, lambda _, fqn: fqn in names).hot_report
    return Converted(name, done.names, {fqn: done.left[fqn] for fqn in names if fqn in done.left})


def _lora(model: nn.Module, names: list[str], rank: int = 16) -> Converted:
    """Add peft's adapters to the layers and freeze the layers' parameters; others still train."""
    mend_torchvision()  # peft imports transformers, which imports torchvision
    peft = importlib.import_module("peft")
    trained = [p for p in model.parameters() if p.requires_grad]
    layers = {id(p) for fqn in names for p in model.get_submodule(fqn).parameters()}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(names))
    peft.inject_adapter_in_model(config, model)
    for parameter in trained:  # peft freezes everything except adapters
        if id(parameter) not in layers:
            parameter.requires_grad_(True)
    return Converted("lora", tuple(names))


def _torchao(model: nn.Module, method: str, names: list[str]) -> Converted:
    before = {fqn: model.get_submodule(fqn) for fqn in names}
    if method == "torchao_fp8":
        device = next(model.parameters()).device.type
        torchao_convert(model, "tensorwise", names, emulate=device == "cpu")
    else:
        torchao_int8_convert(model, names)
    kinds = {fqn: type(model.get_submodule(fqn)) for fqn in before}
    taken = [fqn for fqn, kind in kinds.items() if kind.__module__.startswith("torchao.")]
    left = {
        fqn: "torchao takes nn.Linear with features of a multiple of 16 alone"
        for fqn in before
        if fqn not in taken
    }
    if not taken:
        raise ValueError(f"model: {method} takes none of its layers: {left}")
    return Converted(method, tuple(taken), left)
