"""``freeze_int8(convrot=True)``: the codes and keys of ConvRot's 8-bit checkpoints.

The reference is written from the format of Comfy-Org/comfy-kitchen at 7d86acf. The matrix and the
rotation are in comfy_kitchen/tensor/int8_utils.py:11-61, rounding and dequantisation in
comfy_kitchen/backends/eager/quantization.py:857-906, 915-918.
"""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch.frozen.convrot import HotConvRotLinear
from torch import nn
from torch_graphs import every

pytestmark = pytest.mark.usefixtures("seeded")
GROUPS = (4, 16, 64, 256)


def cosine(a: Any, b: Any) -> float:
    pair = a.detach().float().flatten(), b.detach().float().flatten()
    return float(nn.functional.cosine_similarity(*pair, 0))


def rotated(rows: Any, group: int) -> Any:
    """``rows H``, by H itself; it is symmetric and its own inverse."""
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).float()
    h = torch.ones(1, 1)
    while len(h) < group:
        h = torch.kron(h, h4)
    return (rows.float().view(len(rows), -1, group) @ (h / group**0.5)).view(rows.shape)


def checkpoint(weight: Any, group: int, prefix: str = "") -> dict[str, Any]:
    """Entries that a trainer of ConvRot writes for a layer."""
    turned = rotated(weight, group)
    scale = turned.abs().amax(1, keepdim=True) / 127
    said = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    return {
        prefix + "weight": (turned / scale).round().clamp(-128, 127).to(torch.int8),
        prefix + "weight_scale": scale,
        prefix + "comfy_quant": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }


def dequantized(state: dict[str, Any], group: int, prefix: str = "") -> Any:
    return rotated(state[prefix + "weight"] * state[prefix + "weight_scale"], group)


def frozen(ins: int = 512, outs: int = 96, group: int = 256, **fields: Any) -> Any:
    """A layer, its plain weight."""
    model = nn.Sequential(nn.Linear(ins, outs))
    weight = model[0].weight.detach().clone()
    config = hot.HotConfig(forward_block=group, **fields)
    hot.freeze_int8(hot.convert(model, config, filter_fn=every), convrot=True)
    return model, weight


@pytest.mark.parametrize("group", GROUPS)
def test_the_codes_are_convrots(group: int) -> None:
    model, weight = frozen(group=group)
    state, expected = model.state_dict(), checkpoint(weight, group, "0.")
    assert set(state) == {*expected, "0.bias"}
    apart = (state["0.weight"].int() - expected["0.weight"].int()).abs()
    assert apart.max() <= 1 and apart.float().mean() < 1e-3  # ties of the rounding alone
    scales = state["0.weight_scale"], expected["0.weight_scale"]
    torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
    assert torch.equal(state["0.comfy_quant"], expected["0.comfy_quant"])
    values = dequantized(state, group, "0.")
    torch.testing.assert_close(model[0].dequantized(), values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("group", GROUPS)
def test_comfy_kitchen_reads_what_is_written(group: int) -> None:
    """With comfy-kitchen itself, as ``pip install --target FOLDER`` puts it on PYTHONPATH."""
    pytest.importorskip("comfy_kitchen")
    from comfy_kitchen.tensor import TensorWiseINT8Layout

    model, weight = frozen(group=group)
    state = model.state_dict()
    options = {"convrot": True, "per_channel": True, "convrot_groupsize": group}
    q, params = TensorWiseINT8Layout.quantize(weight, **options)
    assert (q.int() - state["0.weight"].int()).abs().float().mean() < 1e-3
    params = dataclasses.replace(params, scale=state["0.weight_scale"])
    values = TensorWiseINT8Layout.dequantize(state["0.weight"], params)
    torch.testing.assert_close(model[0].dequantized(), values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("forward", ["plain", "int8"])
def test_what_is_loaded_is_what_is_served(group: int, forward: str, tmp_path: Path) -> None:
    """Codes and scales go in and out without rounding, by way of a safetensors file."""
    safetensors = pytest.importorskip("safetensors.torch")
    weight, bias = torch.randn(96, 512), torch.randn(96)
    state = {**checkpoint(weight, group, "0."), "0.bias": bias}
    safetensors.save_file(state, tmp_path / "served.safetensors")
    model, _ = frozen(group=64, forward=forward)  # the group is the checkpoint's
    model.load_state_dict(safetensors.load_file(tmp_path / "served.safetensors"))
    assert model[0].config.forward_block == model[0].weight_block == group
    safetensors.save_file(model.state_dict(), tmp_path / "again.safetensors")
    again = safetensors.load_file(tmp_path / "again.safetensors")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], value) for key, value in state.items())
    values = dequantized(state, group, "0.")
    x = torch.randn(32, 512, requires_grad=True)
    exact = x.detach() @ values.T + bias
    y = model(x)
    error = (y - exact).norm() / exact.norm()
    assert error < (0.02 if forward == "int8" else 1e-5)
    gy = torch.randn_like(y)
    y.backward(gy)
    assert cosine(x.grad, gy @ values) > 0.999


def test_autocast_compile_and_eval() -> None:
    model, _ = frozen(128, 96, 64, forward="int8", forward_in_eval=True)
    x = torch.randn(16, 128)
    exact = nn.functional.linear(x, model[0].dequantized(), model[0].bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert cosine(model(x), exact) > 0.999
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    assert torch.equal(copy.deepcopy(model).eval()(x), model(x))


def test_on_the_meta_device() -> None:
    """A model whose weights never exist beside their codes."""
    with torch.device("meta"):
        model, _ = frozen(128, 96, 64)
    state = {**checkpoint(torch.randn(96, 128), 16, "0."), "0.bias": torch.randn(96)}
    model.load_state_dict(state, assign=True)
    x = torch.randn(8, 128)
    exact = nn.functional.linear(x, dequantized(state, 16, "0."), state["0.bias"])
    torch.testing.assert_close(model(x), exact, rtol=1e-4, atol=1e-5)
    with torch.device("meta"):
        model, _ = frozen(128, 96, 64)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), exact, rtol=1e-4, atol=1e-5)


def test_plain_weights_thaw_and_revert() -> None:
    model, weight = frozen(128, 96, 64)
    plain = nn.Sequential(nn.Linear(128, 96))
    model.load_state_dict(plain.state_dict())
    assert cosine(model[0].dequantized(), plain[0].weight) > 0.9999
    values = model[0].dequantized()
    assert torch.equal(model[0].weight + 0, values)
    assert hot.thaw(model) == 1 and torch.equal(model[0].weight, values)
    assert set(model.state_dict()) == {"0.weight", "0.bias"} and not list(model.buffers())
    x = torch.randn(8, 128)
    exact = nn.functional.linear(x, values, model[0].bias)
    assert torch.equal(model(x), exact)
    hot.freeze_int8(model, convrot=True)
    assert type(hot.revert(model)[0]) is nn.Linear and not list(model.buffers())
    torch.testing.assert_close(model(x), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="its FSDP2 shards no integers")
def test_fully_sharded(mesh: Any) -> None:
    """``state_dict`` gathers, as without ConvRot."""
    from torch.distributed.fsdp import fully_shard

    model, _ = frozen(128, 96, 64, forward="int8")
    before, x = model.state_dict(), torch.randn(16, 128)
    y = model(x)
    fully_shard(model, mesh=mesh)
    assert torch.equal(model(x), y)
    after = model.state_dict()
    for key in ("0.weight", "0.weight_scale", "0.comfy_quant"):
        assert torch.equal(after[key], before[key])


def test_codes_without_a_rotation() -> None:
    weight = torch.randn(96, 128)
    scale = weight.abs().max() / 127
    said = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    q = (weight / scale).round().to(torch.int8)
    model, _ = frozen(128, 96, 64)
    state = {"0.weight": q, "0.weight_scale": scale, "0.comfy_quant": said}
    model.load_state_dict({**state, "0.bias": torch.zeros(96)})
    torch.testing.assert_close(model[0].dequantized(), q * scale, rtol=1e-6, atol=0)


def tied(forward: str = "int8") -> Any:
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    model[2].weight = model[0].weight
    config = hot.HotConfig(forward=forward, forward_block=64)
    return hot.freeze_int8(hot.convert(model, config, filter_fn=every), convrot=True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_tied_layers_after_a_load_into_one_of_them(first: int, assign: bool) -> None:
    """The codes are shared, so that both layers have the group that was loaded."""
    model, weight = tied(), torch.randn(128, 128)
    before = model[2 - first].dequantized()
    model.load_state_dict(checkpoint(weight, 16, f"{first}."), strict=False, assign=assign)
    values = dequantized(checkpoint(weight, 16), 16)
    x = torch.randn(8, 128)
    for index in (0, 2):
        expected = before if assign and index != first else values  # assign unties, as ever
        torch.testing.assert_close(model[index].dequantized(), expected, rtol=0, atol=1e-6)
        exact = nn.functional.linear(x, expected, model[index].bias)
        assert cosine(model[index](x), exact) > 0.999
        assert model[index].config.forward_block == model[index].weight_block
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_what_is_refused() -> None:
    model, _ = frozen(128, 96, 64)
    before = model.state_dict()
    good = {**checkpoint(torch.randn(96, 128), 64, "0."), "0.bias": torch.zeros(96)}

    def said(**fields: Any) -> dict[str, Any]:
        text = json.dumps(fields).encode()
        return {"0.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}

    def weight(codes: torch.Tensor) -> dict[str, Any]:
        return {"0.weight": codes}

    turned = functools.partial(said, format="int8_tensorwise", convrot=True)
    q = good["0.weight"]
    minus = q.clone()
    minus[3, 4] = -128
    bad = {
        "format 'nvfp4'; expected 'int8_tensorwise'": said(format="nvfp4"),
        "convrot_groupsize 32; expected one of": turned(convrot_groupsize=32),
        "groups of 256 do not divide 128": turned(),
        "expected the bytes of a JSON object": {"0.comfy_quant": said()["0.comfy_quant"][:1]},
        r"codes \(96, 64\); expected \(96, 128\)": weight(q[:, :64]),
        "weight of torch.int16; expected int8": weight(q.to(torch.int16)),
        "weight of torch.float8_e4m3fn; expected int8": weight(q.to(torch.float8_e4m3fn)),
        r"weight_scale: shape \(2,\); expected one number": {"0.weight_scale": torch.ones(2)},
        "a code is -128": weight(minus),
    }
    for message, change in bad.items():
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict({**good, **change})
    with pytest.raises(RuntimeError, match="expected int8 beside weight_scale and comfy_quant, or"):
        model.load_state_dict({k: v for k, v in good.items() if "comfy" not in k})
    assert torch.equal(before["0.weight"], model.state_dict()["0.weight"])
    layers = nn.Sequential(nn.Linear(128, 64), nn.Linear(100, 64), nn.Linear(128, 64))
    narrow = {"2": {"forward_block": 32}}
    hot.convert(layers, filter_fn=lambda module, name: True, overrides=narrow)
    report = hot.freeze_int8(layers, convrot=True).freeze_report
    assert report.layers == ("0",) and isinstance(layers[0], HotConvRotLinear)
    reasons = dict(report.skipped)
    assert "100 features are no multiple of ConvRot's group 64" in reasons["1"]
    assert "not forward_block 32" in reasons["2"]
