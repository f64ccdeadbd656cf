"""The Axolotl plugin, against axolotl's base class or, without it, against its interface.

The interface and the order of calls are those of axolotl-ai-cloud/axolotl at 067b021 (2026-07-24),
below src/axolotl:

* integrations/base.py:54 (``BasePlugin``), 89-97 (``register``, ``get_input_args``), 144-150;
* cli/config.py:207-221: ``register`` gets the values of the YAML file;
* integrations/config.py:25-60: the class of ``get_input_args`` becomes a base of the schema;
* utils/schemas/config.py:1983-1992: the LoRA kernels' defaults;
* loaders/model.py:185-193: ``post_model_build``, then adapters.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch.frozen import HotFrozenLinear
from support import without_broken_torchvision
from torch_graphs import causal, imported

pydantic = pytest.importorskip("pydantic")
with without_broken_torchvision():
    pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.usefixtures("seeded")
OURS = "hotcore.integrations.axolotl"
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


class BasePlugin:
    def __init__(self) -> None:
        pass

    def register(self, cfg: dict) -> None:
        pass

    def get_input_args(self) -> str | None:
        return None

    def post_model_build(self, cfg: Any, model: Any) -> None:
        pass


class DictDefault(dict):
    """axolotl.utils.dict: a missing key is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def plugin() -> Iterator[Any]:
    """The plugin that ``plugins: [hotcore.integrations.axolotl.HotPlugin]`` makes."""
    added: list[str] = []
    try:
        with without_broken_torchvision():
            import axolotl.integrations.base  # noqa: F401
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            sys.modules[name] = ModuleType(name)
            added.append(name)
        sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    module, name = f"{OURS}.HotPlugin".rsplit(".", 1)  # load_plugin, base.py:315-352
    yield getattr(importlib.import_module(module), name)()
    for name in (*added, OURS):
        sys.modules.pop(name, None)


def llama() -> Any:
    return causal("Llama", num_hidden_layers=1, num_key_value_heads=4)


def validated(plugin: Any, cfg: DictDefault) -> DictDefault:
    """Apply the schema: the plugin's fields, and the kernels' default for an adapter."""
    module, name = plugin.get_input_args().rsplit(".", 1)
    checked = getattr(importlib.import_module(module), name).model_validate(cfg)
    cfg.update(checked.model_dump())
    if cfg.adapter:
        for kernel in KERNELS:
            if cfg.get(kernel) is None:
                cfg[kernel] = True
    return cfg


def hot_layers(model: Any) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, hot.HotLinear)}


def test_full_fine_tuning(plugin: Any) -> None:
    cfg = DictDefault(hot_config="accurate", hot_modules_to_not_convert=["down_proj"])
    plugin.register(cfg)
    model = llama()
    plugin.post_model_build(validated(plugin, cfg), model)
    names = {f"self_attn.{name}_proj" for name in "qkvo"} | {"mlp.gate_proj", "mlp.up_proj"}
    assert hot_layers(model) == {f"model.layers.0.{name}" for name in names}
    assert {model.get_submodule(n).config.name for n in hot_layers(model)} == {"accurate"}
    tokens = torch.randint(96, (2, 32))
    model.train()
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("bits", [True, "int4"])
def test_adapters_on_a_frozen_base(plugin: Any, bits: bool | str) -> None:
    peft = imported("peft")
    cfg = DictDefault(adapter="lora", hot_freeze=bits, hot_config={"forward": "int8"})
    plugin.register(cfg)
    cfg = validated(plugin, cfg)
    assert not any(cfg[kernel] for kernel in KERNELS)  # they would not call HOT's layers
    model = llama()
    plugin.post_model_build(cfg, model)
    frozen = [model.get_submodule(name) for name in hot_layers(model)]
    assert frozen and all(isinstance(layer, HotFrozenLinear) for layer in frozen)
    assert {layer.weight_bits for layer in frozen} == {8 if bits is True else 4}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    tokens = torch.randint(96, (2, 32))
    model(tokens, labels=tokens).loss.backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad)


def test_the_pages_yaml_is_taken(plugin: Any) -> None:
    page = Path(__file__).resolve().parents[2] / "docs/torch/integrations.md"
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert f"  - {OURS}.HotPlugin\n" in text
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE)) - {"plugins"}
    module, name = plugin.get_input_args().rsplit(".", 1)
    assert keys == set(getattr(importlib.import_module(module), name).model_fields)


def test_what_it_refuses(plugin: Any) -> None:
    with pytest.raises(ValueError, match="lora_qkv_kernel: bypasses the layers that HOT"):
        plugin.register(DictDefault(adapter="lora", lora_qkv_kernel=True))
    with pytest.raises(ValueError, match="hot_freeze: requires an adapter"):
        plugin.register(DictDefault(hot_freeze=True))
    with pytest.raises(pydantic.ValidationError, match="hot_freeze"):
        validated(plugin, DictDefault(hot_freeze="often"))
