"""torchtitan's overrides, against torchtitan itself or, without it, against its interface.

The interface is that of pytorch/torchtitan at b5bcd76 (2026-08-21), below torchtitan:

* config/configurable.py:18-180 (``Configurable``), models/common/linear.py:26-40 (``Linear``);
* protocols/module.py:57-70 (``Module.Config.build``), 72-206 (``init_states``);
* config/override.py:137-172 (``Override``), 175-246 (``override``), 249-304 (``derive``);
* distributed/activation_checkpoint.py:112-163 (the base's ``apply``), 185-287 (``SelectiveAC``).
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from types import ModuleType
from typing import Any, ClassVar

import hotcore.torch as hot
import pytest
import torch
from support import refused
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_graphs import Calls, gradients, same

pytestmark = pytest.mark.usefixtures("seeded")
OURS = "hotcore.integrations.torchtitan"
record: Any = dataclasses.dataclass(kw_only=True, slots=True)


class Configurable:
    @record
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self._owner(config=dataclasses.replace(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__, "@dataclass(kw_only=True, slots=True)"
            cls.Config._owner = cls


class Module(nn.Module, Configurable):
    @record
    class Config(Configurable.Config):
        param_init: Any = None
        sharding_config: Any = None

        def build(self, **kwargs: Any) -> Any:
            instance = Configurable.Config.build(self, **kwargs)
            instance._param_init = self.param_init
            return instance

    def init_states(self, *, buffer_device: Any = None) -> None:
        if self._param_init is None:
            self.reset_parameters()
        else:
            for name, parameter in self.named_parameters(recurse=False):
                self._param_init[name](parameter)


class Linear(nn.Linear, Module):
    @record
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Any) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class SelectiveAC(Configurable):
    @record
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        force_recompute_mm_shapes_by_fqns: list = dataclasses.field(default_factory=list)

    def __init__(self, config: Any) -> None:
        self.config = config

    def get_save_ops(self) -> set:
        return {torch.ops.aten.mm.default, torch.ops.aten.linear.default}

    def apply(self, model: nn.Module) -> None:
        layers = model.get_submodule("layers")
        for name, block in layers.named_children():
            layers.register_module(name, self._wrap_block(block))

    def _wrap_block(self, module: nn.Module) -> nn.Module:
        ops = self.get_save_ops()

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = func in ops
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint_wrapper(
            module,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
        )


@dataclasses.dataclass
class Override:
    target_cls: Any
    factory: Any
    fqns: Any
    description: str
    exact: bool

    def matches(self, fqn: str) -> bool:
        return self.fqns is None or any(fnmatch(fqn, pattern) for pattern in self.fqns)


_REGISTRY: dict[str, Override] = {}


def override(*, target: Any, fqns: Any = None, description: str = "", exact: bool = False) -> Any:
    def decorator(fn: Any) -> Any:
        _REGISTRY[f"{fn.__module__}.{fn.__name__}"] = Override(target, fn, fqns, description, exact)
        return fn

    return decorator


def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
    fields = {field.name for field in dataclasses.fields(target_cls) if field.init}
    assert deltas.keys() <= fields
    common = {f.name for f in dataclasses.fields(source)} & (fields - deltas.keys())
    return target_cls(**{name: getattr(source, name) for name in common}, **deltas)


@pytest.fixture(scope="module")
def titan() -> Iterator[Any]:
    """Yield torchtitan's names, and ``ours``: hotcore's registered overrides."""
    here = sys.modules[__name__]
    places = {
        "torchtitan.config.override": ("_REGISTRY", "derive", "override"),
        "torchtitan.models.common.linear": ("Linear",),
        "torchtitan.protocols.module": ("Module",),
        "torchtitan.distributed.activation_checkpoint": ("SelectiveAC",),
    }
    added: list[str] = []
    try:
        import torchtitan.config.override  # noqa: F401
    except ImportError:
        for path, names in places.items():
            parts = path.split(".")
            for i in range(1, len(parts) + 1):
                added.append(".".join(parts[:i]))
                sys.modules.setdefault(added[-1], ModuleType(added[-1]))
            for name in names:
                setattr(sys.modules[path], name, getattr(here, name))
    import importlib

    importlib.import_module(OURS)
    module = ModuleType("titan")
    for path, names in places.items():
        for name in names:
            setattr(module, name, getattr(importlib.import_module(path), name))
    yield module
    for name in {*added, *([OURS] if added else [])}:
        sys.modules.pop(name, None)


def replaced(titan: Any, name: str, config: Any, **kwargs: Any) -> Any:
    override = titan._REGISTRY[f"{OURS}.{name}"]
    assert override.exact and type(config) is override.target_cls
    return override.factory(config, **kwargs)


def test_the_layers_it_claims(titan: Any) -> None:
    claims = titan._REGISTRY[f"{OURS}.hot_linear"].matches
    own = ("attention.wq", "attention.qkv_linear.wkv", "feed_forward.w2", "moe.shared_experts.w1")
    for name in own:
        assert claims(f"model.layers.11.{name}") and claims(f"layers.11.{name}")
    for name in ("output", "lm_head", "layers.3.moe.router.gate", "layers.3.moe.experts"):
        assert not claims(name) and not claims(f"model.{name}")


def test_the_config_builds_a_layer_that_trains(titan: Any) -> None:
    init = {"weight": functools.partial(nn.init.constant_, val=0.5), "bias": nn.init.zeros_}
    config = titan.Linear.Config(in_features=64, out_features=128, bias=True, param_init=init)
    ours = replaced(titan, "hot_linear", config, recipe="accurate", forward="int8")
    with torch.device("meta"):
        layer = ours.build()
    assert isinstance(layer, hot.HotLinear) and isinstance(layer, titan.Module)
    assert layer.config == hot.HotConfig.recipe("accurate", forward="int8")
    layer.to_empty(device="cpu")
    layer.init_states()
    assert (layer.weight == 0.5).all() and (layer.bias == 0).all()
    x = torch.randn(32, 64, requires_grad=True)
    layer(x).square().mean().backward()
    assert layer.weight.grad is not None and x.grad is not None
    assert set(layer.state_dict()) == {"weight", "bias"}
    small = titan.Linear.Config(in_features=64, out_features=8)
    assert replaced(titan, "hot_linear", small) is small
    refused(lambda: replaced(titan, "hot_linear", config, rang=3), "no field 'rang'")


@pytest.mark.skipif(
    "early_stop" not in inspect.signature(checkpoint).parameters, reason="torchtitan needs it"
)
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("with_ours", [False, True])
def test_selective_checkpoints_compress_once(titan: Any, with_ours: bool, preserve: bool) -> None:
    """The stock policy runs HOT's compression again in backward; ours saves its result."""
    config = titan.Linear.Config(in_features=64, out_features=64)
    block = nn.Sequential(
        replaced(titan, "hot_linear", config, recipe="fast").build(), nn.GELU(),
        replaced(titan, "hot_linear", config, recipe="fast").build(),
    )  # fmt: skip
    for layer in (block[0], block[2]):
        layer.init_states()
    x = torch.randn(32, 64)
    expected = gradients(block, block, x)
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    policy = titan.SelectiveAC.Config(
        force_recompute_mm_shapes_by_fqns=[], preserve_rng_state=preserve
    )
    if with_ours:
        policy = replaced(titan, "hot_selective_ac", policy)
    policy.build().apply(model)
    with Calls() as calls:
        actual = gradients(block, model.layers["0"], x)
    compressed = sum(n for name, n in calls.found.items() if "hotcore.compress" in name)
    assert compressed == (2 if with_ours else 4)
    assert not with_ours or same(actual, expected)
