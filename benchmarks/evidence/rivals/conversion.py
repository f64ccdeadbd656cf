"""``convert``: a rival's method, or one of hotcore's recipes, into a model's layers."""

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
"""What :func:`convert` takes; the last ones are hotcore's recipes."""


@dataclass(frozen=True)
class Converted:
    """What :func:`convert` did."""

    method: str
    names: tuple[str, ...]
    """Layers that have the method now."""
    left: dict[str, str] = field(default_factory=dict)
    """Layers that hotcore would take and the method does not, each with the reason."""


def method_of(name: str, **settings: Any) -> Method:
    """The simulated method of that name. Raises ValueError for another name."""
    if name not in _SIMULATED:
        raise ValueError(f"method: {name!r} is none of {', '.join(_SIMULATED)}")
    return _SIMULATED[name](**settings)


def of_file(spec: str) -> Method:
    """The method ``FILE.py:Class``, an object of a class of one's own.

    Raises ValueError where the file is not there, or has no such subclass of :class:`Method`.
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
    """Give the layers that hotcore would convert a rival's backward, in place.

    Parameters stay the same objects, so an optimizer made before goes on.

    Args:
        model: a plain one.
        method: one of :data:`METHODS` ("fp32" changes nothing), or an object of a class of one's
            own, a :class:`hotcore.torch.CustomBackward`, or ``FILE.py:Class`` of one.
        filter_fn: which layers, as for :func:`hotcore.torch.convert`.
        settings: the method's: ``rank``, ``token_grid``, ``prefix_tokens`` (lbp_wht), ``rank``
            (lbp_wht_flat, lora), ``gw_bits`` (authors_hot), ``emulate``, ``recipe`` (torchao_fp8),
            those of a recipe's HotConfig.

    Raises ValueError for an unknown method or where no layer can be taken; TorchaoMissing.
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
    """Names of the layers that :func:`hotcore.torch.convert` would take, slower or not."""
    report = hot.convert(model, "default", filter_fn, slower=True).hot_report
    names = [row.name for row in report.converted]
    hot.revert(model)
    return names


def _simulated(model: nn.Module, name: str, names: list[str], method: Method) -> Converted:
    done = method.convert(model, lambda _, fqn: fqn in names).hot_report
    return Converted(name, done.names, {fqn: done.left[fqn] for fqn in names if fqn in done.left})


def _lora(model: nn.Module, names: list[str], rank: int = 16) -> Converted:
    """peft's adapters beside the layers, whose own parameters are frozen; the rest trains on."""
    mend_torchvision()  # peft imports transformers, which imports it
    peft = importlib.import_module("peft")
    trained = [p for p in model.parameters() if p.requires_grad]
    layers = {id(p) for fqn in names for p in model.get_submodule(fqn).parameters()}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(names))
    peft.inject_adapter_in_model(config, model)
    for parameter in trained:  # peft freezes everything that is no adapter
        if id(parameter) not in layers:
            parameter.requires_grad_(True)
    return Converted("lora", tuple(names))


def _torchao(
    model: nn.Module,
    method: str,
    names: list[str],
    recipe: str = "tensorwise",
    emulate: bool | None = None,
) -> Converted:
    before = {fqn: model.get_submodule(fqn) for fqn in names}
    if method == "torchao_fp8":
        device = next(model.parameters()).device.type
        torchao_convert(model, recipe, names, device == "cpu" if emulate is None else emulate)
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
