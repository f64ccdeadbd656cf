"""``from_pretrained(quantization_config=HotQuantizationConfig(...))``, with transformers itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import numpy as np
import pytest
import torch
from hotcore.torch.frozen import HotFrozenLinear
from support import refused, without_broken_torchvision
from torch_graphs import causal, same

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


def load(
    path: Path, *arguments: Any, freeze: Any = False, save_codes: bool = False, **options: Any
) -> Any:
    wanted = HotQuantizationConfig(*arguments, freeze=freeze, save_codes=save_codes)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=wanted, **options)


def hot_layers(model: Any) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if isinstance(m, hot.HotLinear)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loaded_model_is_converted_and_trains(plain: Path, dtype: Any) -> None:
    left = ["down_proj", "model.layers.1"]
    model = load(plain, hot.HotConfig.recipe("accurate"), left, dtype=dtype)
    layers = hot_layers(model)
    names = {f"self_attn.{name}_proj" for name in "qkvo"} | {"mlp.gate_proj", "mlp.up_proj"}
    assert set(layers) == {f"model.layers.0.{name}" for name in names}
    assert {layer.config.name for layer in layers.values()} == {"accurate"}
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.requires_grad for p in model.parameters())
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    tokens = torch.randint(96, (2, 32))
    assert torch.equal(model(tokens).logits, reference(tokens).logits)
    for each in (model, reference):
        each.train()(tokens, labels=tokens).loss.backward()
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
    assert same(again.state_dict().values(), model.state_dict().values())


def test_without_hotcore_the_checkpoint_is_a_plain_model(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(plain).save_pretrained(tmp_path / "saved")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "hot")  # the state before the import
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not hot_layers(model)
    expected = AutoModelForCausalLM.from_pretrained(plain)
    assert same(model.state_dict().values(), expected.state_dict().values())


def test_dequantize_gives_the_plain_model(plain: Path) -> None:
    assert hot_layers(model := load(plain))
    model = model.dequantize()
    assert not hot_layers(model) and not hasattr(model.config, "quantization_config")


def trainer_of(model: Any, path: Path) -> Any:
    steps = {"per_device_train_batch_size": 4, "max_steps": 3}
    steps |= {"save_strategy": "steps", "save_steps": 3}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(path), **steps, **quiet)
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
    refused(lambda: trainer_of(model, tmp_path / "out"), "attach trainable adapters")
    expected = load(plain)  # the same codes as from weights in memory
    hot.freeze(expected, 4 if freeze == "int4" else 8)
    for name, layer in layers.items():
        assert torch.equal(layer.weight_codes, expected.get_submodule(name).weight_codes)
    assert model.freeze_report.to_json() == expected.freeze_report.to_json()
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, layer in layers.items():
        reloaded = again.get_submodule(name)
        assert isinstance(reloaded, HotFrozenLinear) and reloaded.weight_bits == layer.weight_bits
        values, error = layer.dequantized(), reloaded.dequantized() - layer.dequantized()
        assert error.norm() <= (0.1 if freeze == "int4" else 1e-3) * values.norm()


@pytest.mark.parametrize("freeze", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_codes(freeze: Any, dtype: Any, plain: Path, tmp_path: Path) -> None:
    """Exact, in shards, for the base model as well, and without an argument."""
    options = {"freeze": freeze, "save_codes": True, "dtype": dtype}
    model = load(plain, "default", ["down_proj"], **options)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) > 1
    tokens = torch.randint(96, (2, 32))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype == dtype and torch.equal(again(tokens).logits, model(tokens).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert {f"model.{name}" for name in hot_layers(base)} == {*hot_layers(model)}
    for name, layer in hot_layers(model).items():
        for other in (again.get_submodule(name), base.get_submodule(name[len("model.") :])):
            assert torch.equal(other.weight_codes, layer.weight_codes) and other.save_codes
            assert other.weight_dtype == dtype
    hot.thaw(again)
    again.save_pretrained(tmp_path / "thawed")  # values, though the configuration says codes
    thawed = AutoModelForCausalLM.from_pretrained(tmp_path / "thawed")
    assert hot_layers(thawed).keys() == hot_layers(model).keys()
    assert all(isinstance(layer, HotFrozenLinear) for layer in hot_layers(thawed).values())


PEAK = """
import gc, re, sys, threading, time
import torch
from support import without_broken_torchvision

with without_broken_torchvision():
    from hotcore.integrations.transformers import HotQuantizationConfig
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # imports its modules

def anonymous():  # without the pages of files, which the system takes back
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1]) * 1024

def watch():
    while not done.is_set():
        sizes.append(anonymous())
        time.sleep(0.002)

for how in sys.argv[2:]:
    done, sizes = threading.Event(), []
    wanted = None if how == "whole" else HotQuantizationConfig("default", freeze=how)
    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, quantization_config=wanted
    )
    done.set()
    watcher.join()
    gc.collect()
    print(max(sizes) - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_plain_model_is_never_held(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}
    model = causal("Llama", **sizes)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())  # 149 MiB in fp32
    model.bfloat16().save_pretrained(tmp_path)
    del model

    run = [sys.executable, "-c", PEAK, str(tmp_path), "int4", "whole"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # freed tensors go back to the system
    printed = subprocess.check_output(run, text=True, env=environment)
    int4, whole = map(int, printed.split())
    assert int4 < size / 2 < 0.9 * size < whole


def changed(path: Path, **values: Any) -> None:
    """Replace tensors of a checkpoint; None removes one."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = safetensors.load_file(path / "model.safetensors") | values
    kept = {name: value for name, value in state.items() if value is not None}
    safetensors.save_file(kept, path / "model.safetensors", {"format": "pt"})


def test_weights_that_cannot_be_frozen(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj"
    weight = AutoModelForCausalLM.from_pretrained(plain).get_submodule(name).weight.detach()
    bad = weight.clone()
    bad[2, 3] = torch.inf
    for dtype, word in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        changed(plain, **{f"{name}.weight": weight.to(dtype)})  # of another quantiser
        with pytest.raises(ValueError, match=rf"the checkpoint has {name}\.weight: {word}; take"):
            load(plain, freeze="int4")
    for value in (bad, weight[:-1].contiguous(), None):
        changed(plain, **{f"{name}.weight": value})
        with pytest.raises((ValueError, RuntimeError), match="no usable weight|conversion"):
            load(plain, freeze="int4")
    model = load(plain, "default", ["up_proj"], freeze="int4")  # initialised, as transformers warns
    assert type(model.get_submodule(name)) is torch.nn.Linear
    changed(plain, **{f"{name}.weight": weight})
    model = load(plain, freeze="int4", save_codes=True)
    model.save_pretrained(tmp_path / "codes")
    changed(tmp_path / "codes", **{f"{name}.weight_codes": torch.zeros(9, dtype=torch.uint8)})
    with pytest.raises((ValueError, RuntimeError), match="mismatched|weight_codes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "codes")


def test_biases(tmp_path: Path) -> None:
    """A bias is the checkpoint's, or zero where it has none, as transformers initialises it."""
    source = causal("Llama", attention_bias=True)
    name = "model.layers.0.self_attn.q_proj"
    torch.nn.init.normal_(source.get_submodule(name).bias)
    for codes in (False, True):
        folder = tmp_path / str(codes)
        source.save_pretrained(folder)
        if codes:
            load(folder, freeze="int4", save_codes=True).save_pretrained(folder)
        found = load(folder, freeze="int4", save_codes=codes).get_submodule(name)
        assert torch.equal(found.bias, source.get_submodule(name).bias)
        changed(folder, **{f"{name}.bias": None})
        bias = load(folder, freeze="int4", save_codes=codes).get_submodule(name).bias
        assert torch.equal(bias, torch.zeros(64)) and type(bias) is torch.nn.Parameter


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
    refused(lambda: load(plain, freeze=True, **options), "freeze needs all weights in memory")


def test_bad_arguments() -> None:
    refused(lambda: HotQuantizationConfig({"rang": 3}), "^config: HotConfig has no field 'rang'")
    says = "^rank: expected an int, got np.int64"
    refused(lambda: HotQuantizationConfig({"rank": np.int64(3)}), says, TypeError)
    refused(lambda: HotQuantizationConfig(3), "config: expected a HotConfig", TypeError)
    with pytest.raises(TypeError, match="modules_to_not_convert: expected a list"):
        HotQuantizationConfig("fast", "lm_head")
    with pytest.raises(ValueError, match="freeze: expected 'int4', 'int8' or a bool, got 'int5'"):
        HotQuantizationConfig(freeze="int5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="save_codes: expected False without freeze"):
        HotQuantizationConfig(save_codes=True)
    refused(lambda: HotQuantizationConfig(frezze=True), "frezze", TypeError)
