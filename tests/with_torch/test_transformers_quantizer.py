"""``from_pretrained(quantization_config=HotQuantizationConfig(...))``, with transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import without_broken_torchvision

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from hotcore.torch.frozen import HotFrozenLinear  # noqa: E402
from torch_graphs import causal  # noqa: E402

with without_broken_torchvision():
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    from hotcore.integrations.transformers import HotQuantizationConfig
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import auto

pytestmark = pytest.mark.usefixtures("seeded")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def plain(tmp_path: Path, seeded: None) -> Path:
    """A small Llama on disk."""
    causal("Llama", num_key_value_heads=4).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(path: Path, *arguments: Any, freeze: Any = False, **options: Any) -> Any:
    wanted = HotQuantizationConfig(*arguments, freeze=freeze)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=wanted, **options)


def hot_layers(model: Any) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, hot.HotLinear)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loaded_model_is_converted_and_trains(plain: Path, dtype: Any) -> None:
    model = load(
        plain, hot.HotConfig.recipe("accurate"), ["down_proj", "model.layers.1"], dtype=dtype
    )
    layers = hot_layers(model)
    names = {f"self_attn.{name}_proj" for name in "qkvo"} | {"mlp.gate_proj", "mlp.up_proj"}
    assert set(layers) == {f"model.layers.0.{name}" for name in names}
    assert {layer.config.name for layer in layers.values()} == {"accurate"}
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.requires_grad for p in model.parameters())
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    tokens = torch.randint(96, (2, 32))
    assert torch.equal(model(tokens).logits, reference(tokens).logits)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    reference.train()
    reference(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        other = reference.get_parameter(name).grad.double().flatten()
        cosine = torch.nn.functional.cosine_similarity(parameter.grad.double().flatten(), other, 0)
        assert cosine > 0.98, name


def test_saved_and_loaded_again(plain: Path, tmp_path: Path) -> None:
    config = hot.HotConfig(hadamard_block=32, forward="int8", token_grid=(4, 4))
    model = load(plain, config, ["layers.1"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    model.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "hot" and written["config"]["hadamard_block"] == 32
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.model.layers[0].mlp.up_proj.config == config
    assert hot_layers(again).keys() == hot_layers(model).keys()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name


def test_without_hotcore_the_checkpoint_is_a_plain_model(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(plain).save_pretrained(tmp_path / "saved")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "hot")  # the state before the import
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not hot_layers(model)
    for name, value in AutoModelForCausalLM.from_pretrained(plain).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_dequantize_gives_the_plain_model(plain: Path) -> None:
    model = load(plain)
    assert hot_layers(model)
    model = model.dequantize()
    assert not hot_layers(model) and not hasattr(model.config, "quantization_config")


def trainer_of(model: Any, path: Path) -> Any:
    arguments = transformers.TrainingArguments(
        str(path),
        per_device_train_batch_size=4,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=3,
    )
    rows = torch.randint(96, (12, 32)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model, arguments, train_dataset=data)


@pytest.mark.filterwarnings("ignore")
def test_trainer_trains_and_checkpoints(plain: Path, tmp_path: Path) -> None:
    model = load(plain)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer_of(model, tmp_path / "out").train()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-3")
    assert hot_layers(again).keys() == hot_layers(model).keys()
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("freeze", [True, "int8", "int4"])
def test_frozen(freeze: Any, plain: Path, tmp_path: Path) -> None:
    model = load(plain, freeze=freeze)
    layers = hot_layers(model)
    assert all(isinstance(layer, HotFrozenLinear) for layer in layers.values())
    assert {layer.weight_bits for layer in layers.values()} == {4 if freeze == "int4" else 8}
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer_of(model, tmp_path / "out")
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, layer in layers.items():
        reloaded = again.get_submodule(name)
        assert isinstance(reloaded, HotFrozenLinear)
        assert reloaded.weight_bits == layer.weight_bits
        values, error = layer.dequantized(), reloaded.dequantized() - layer.dequantized()
        assert error.norm() <= (0.1 if freeze == "int4" else 1e-3) * values.norm()


def test_offloaded_weights(plain: Path, tmp_path: Path) -> None:
    """accelerate's hooks stay; a weight that is not in memory cannot be frozen."""
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    where = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    options = {"device_map": where, "offload_folder": tmp_path / "offload"}
    model, tokens = load(plain, **options), torch.randint(96, (2, 32))
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, hot.HotLinear) and layer.weight.is_meta
    reference = AutoModelForCausalLM.from_pretrained(plain)
    assert torch.equal(model(tokens).logits, reference(tokens).logits)
    with pytest.raises(ValueError, match="freeze needs all weights in memory"):
        load(plain, freeze=True, **options)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no field 'rang'"):
        HotQuantizationConfig({"rang": 3})
    with pytest.raises(TypeError, match="config: expected a HotConfig"):
        HotQuantizationConfig(3)
    with pytest.raises(TypeError, match="modules_to_not_convert: expected a list"):
        HotQuantizationConfig("fast", "lm_head")
    with pytest.raises(ValueError, match="freeze: expected 'int4', 'int8' or a bool, got 'int5'"):
        HotQuantizationConfig(freeze="int5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="frezze"):
        HotQuantizationConfig(frezze=True)
