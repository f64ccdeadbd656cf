"""Layers with an 8-bit forward: its bits, HOT's gradients, and what torch does around it."""

import copy
from collections.abc import Callable
from typing import Any

import hotcore
import hotcore.torch as hot
import pytest
import torch
import torch.nn.functional as F
from hotcore import paper
from hotcore.config import HotConfig
from support import refused
from torch import nn
from torch_graphs import Mlp, adapted, conv1d, every, imported, same

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT8 = HotConfig(forward="int8")


def int8(recipe: str = "default", **fields: Any) -> HotConfig:
    return HotConfig.recipe(recipe, forward="int8", **fields)


def expected(x: Any, weight: Any, bias: Any, dtype: Any = None, config: Any = INT8) -> torch.Tensor:
    """The result of ``hotcore.forward_linear``."""
    operands = (None if t is None else t.detach() for t in (x, weight, bias))
    return hotcore.forward_linear(*operands, config=config, out_dtype=dtype)


def converted(model: nn.Module, config: Any) -> nn.Module:
    return hot.convert(model, config, every)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70,), (33, 70), (2, 17, 70), (1, 2, 3, 4, 70), (0, 70)])
def test_a_linear_layer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = hot.HotLinear(70, 48, dtype=dtype, config=INT8)
    x = torch.randn(shape, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*shape[:-1], 48)
    assert torch.equal(y, expected(x.reshape(-1, 70), layer.weight, layer.bias).reshape(y.shape))
    assert not shape[0] or not torch.equal(y, F.linear(x, layer.weight, layer.bias))
    with torch.no_grad():  # in training mode the same: a checkpoint may run it so first
        assert torch.equal(layer(x), y)
    assert torch.equal(hot.linear(x, layer.weight, layer.bias, INT8), y)


@pytest.mark.long
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_1x1_convolution(stride: int, last: bool) -> None:
    plain = nn.Conv2d(70, 48, 1, stride=stride)
    layer = hot.HotConv2d.from_conv(copy.deepcopy(plain), INT8)
    x = torch.randn(2, 70, 7, 5)
    x = x.to(memory_format=torch.channels_last) if last else x
    y = layer(x)
    pixels = x[:, :, ::stride, ::stride].permute(0, 2, 3, 1)
    found = expected(pixels.reshape(-1, 70), plain.weight.flatten(1), plain.bias)
    assert torch.equal(y, found.reshape(*pixels.shape[:3], 48).permute(0, 3, 1, 2))
    assert y.stride() == plain(x).stride()
    assert torch.equal(layer(x[0]), y[0])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), y)
    with torch.no_grad():
        assert torch.equal(layer(x), y) and torch.equal(compiled(x), y)
        layer.eval().config = int8(forward_in_eval=True)
        assert torch.equal(layer(x), y) and torch.equal(compiled(x), y)
        assert torch.equal(layer(x[0]), y[0])


def test_other_convolutions_stay_plain_and_the_report_says_so() -> None:
    plain = nn.Sequential(nn.Conv2d(70, 48, 3, padding=1), nn.Conv2d(48, 48, 1, padding=1))
    x = torch.randn(2, 70, 7, 5)
    before = plain(x)
    report = hot.convert(plain, int8(forward_in_eval=True), every).hot_report
    assert torch.equal(plain(x), before)
    assert torch.equal(plain.eval()(x), before)
    assert all("forward stays plain: 8 bits are for 1x1" in row.note for row in report.converted)
    pointwise = nn.Sequential(nn.Conv2d(70, 48, 1), nn.Linear(48, 4))
    assert not any(row.note for row in hot.convert(pointwise, INT8, every).hot_report.converted)


def test_transformers_conv1d() -> None:
    plain = conv1d(70, 48)
    x = torch.randn(2, 17, 70)
    layer = converted(plain, int8(forward_in_eval=True))
    found = expected(x, plain.weight.t(), plain.bias)
    assert torch.equal(layer(x), found)
    assert torch.equal(layer.eval()(x), found)
    layer.config = INT8
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention(batch_first: bool) -> None:
    plain = nn.MultiheadAttention(64, 4, batch_first=batch_first)
    layer = converted(copy.deepcopy(plain), int8(forward_in_eval=True)).eval()
    x = torch.randn(3, 20, 64)

    def error() -> float:
        y, wanted = (each(x, x, x, need_weights=False)[0].detach() for each in (layer, plain))
        return float((y - wanted).norm() / wanted.norm())

    plain.eval()
    assert 1e-3 < error() < 0.02
    layer.config = INT8
    assert error() < 1e-6  # plain in eval mode
    layer.train()
    assert 1e-3 < error() < 0.02


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(70, 48), (2, 50, 70)),
    "1x1": (lambda: nn.Conv2d(70, 48, 1, stride=2), (2, 70, 9, 9)),
    "conv1d": (lambda: conv1d(70, 48), (2, 50, 70)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", ["default", "accurate"])
def test_gradients_are_those_of_the_plain_forward(recipe: str, kind: str) -> None:
    make, shape = LAYERS[kind]
    plain, x = make(), torch.randn(shape)
    found = []
    for config in (HotConfig.recipe(recipe), int8(recipe)):
        layer = converted(copy.deepcopy(plain), config)
        torch.manual_seed(3)
        y = layer(x.requires_grad_())
        gy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
        found.append((y, torch.autograd.grad(y, [x, *layer.parameters()], gy)))
    (plain_y, wanted), (y, got) = found
    assert not torch.equal(y, plain_y)
    assert len(got) == 3 and same(got, wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_alone(compiled: bool) -> None:
    layer = hot.HotLinear(70, 48, config=INT8)
    layer.weight.requires_grad_(False)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, gy = torch.randn(50, 70), torch.randn(50, 48)
    y = call(x)
    assert torch.equal(y, expected(x, layer.weight, layer.bias))
    y.backward(gy)
    assert torch.allclose(layer.bias.grad, gy.sum(0), rtol=1e-5, atol=1e-5)


def test_eval_mode_is_plain_unless_it_is_kept() -> None:
    layer = hot.HotLinear(70, 48, config=INT8).eval()
    x = torch.randn(50, 70)
    plain = F.linear(x, layer.weight, layer.bias)
    assert layer.runs_plain and torch.equal(layer(x), plain)
    layer.config = int8(forward_in_eval=True)
    found = expected(x, layer.weight, layer.bias)
    with torch.no_grad():
        assert torch.equal(layer(x), found)
    with torch.inference_mode():
        assert torch.equal(layer(x), found)
    y = layer(x)
    assert torch.equal(y, found)
    y.sum().backward()
    assert layer.weight.grad is not None  # HOT's
    assert type(hot.revert(layer)) is nn.Linear and "_plain_in_eval" not in vars(layer)


@pytest.mark.parametrize("fast", [True, False])
def test_torchs_fast_path_goes_past_the_layers_and_the_report_says_so(fast: bool) -> None:
    model, x = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), torch.randn(2, 10, 64)
    plain = copy.deepcopy(model).eval()
    report = hot.convert(model, int8(forward_in_eval=True), every).hot_report
    assert any("set_fastpath_enabled(False)" in note for note in report.notes)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            error = float((model.eval()(x) - plain(x)).norm())
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert (error > 1e-2) != fast
    hot.revert(model)
    assert not any("fastpath" in note for note in hot.convert(model, INT8, every).hot_report.notes)


def test_the_report_knows_what_is_plain() -> None:
    for config, plain in ((INT8, 1), (int8(forward_in_eval=True), 0)):
        model = nn.Sequential(nn.Linear(64, 64)).eval()
        report = hot.convert(model, config, every).hot_report
        assert len(report.in_eval_mode) == plain
        assert any("in eval mode" in note for note in report.notes) == bool(plain)
        report = hot.convert(nn.Linear(64, 64).eval(), config, every).hot_report
        assert report.in_eval_mode == [""] * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool, dtype: torch.dtype) -> None:
    """y is of autocast's type; the parameters are read as they are, in fp32."""
    layer = hot.HotLinear(70, 48, config=INT8)
    conv = hot.HotConv2d(70, 48, 1, config=INT8)
    x = torch.randn(50, 70, requires_grad=True)
    image = torch.randn(2, 70, 3, 3)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), conv(image)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with torch.autocast("cpu", dtype=dtype):
        y, z = run()
    assert y.dtype == z.dtype == dtype
    assert torch.equal(y, expected(x.to(dtype), layer.weight, layer.bias))
    assert not torch.equal(y, expected(x.to(dtype), layer.weight.to(dtype), layer.bias))
    pixels = image.to(dtype).permute(0, 2, 3, 1).contiguous()
    found = expected(pixels, conv.weight.flatten(1), conv.bias)
    assert torch.equal(z, found.permute(0, 3, 1, 2))
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        assert torch.equal(run()[0], y)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_plain_layer_refuses(compiled: bool) -> None:
    layer = hot.HotLinear(70, 48, config=INT8)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    if not compiled:
        layer.layer_name = "blocks.0.fc1"
        wrong = torch.randn(50, 70).bfloat16()
        refused(lambda: layer(wrong), r"^layer blocks.0.fc1: weight: dtype float32; x has")
        refused(lambda: layer.double()(wrong.double()), "x: dtype float64; expected float32")
        layer.float()
    with pytest.raises((ValueError, RuntimeError)):
        call(torch.randn(50, 71))


def test_opcheck() -> None:
    x, weight, bias = torch.randn(50, 70), torch.randn(48, 70), torch.randn(48)
    text, product = INT8.json, torch.ops.hotcore.product.default
    turned = weight.t().contiguous().t()
    for arguments in ((x, weight, bias), (x.bfloat16(), weight, None), (x, turned, bias.half())):
        torch.library.opcheck(product, (*arguments, None, None, text))
    given = (x, weight, bias, None, None)
    assert torch.equal(product(*given, INT8.to_json()), product(*given, text))
    assert not torch.equal(product(*given, text), product(*given, ""))
    saved, seed = torch.ops.hotcore.compress(x, text)
    torch.library.opcheck(product, (x, weight, bias, saved, seed, text))
    fields = (INT8.forward_block, *weight.shape, weight.dtype)
    frozen = hot.ops.codes.quantize_forward_weight(weight, INT8)
    for config in (text, ""):
        torch.library.opcheck(product, (x, frozen, bias, None, None, config, None, *fields))
    for given, config in ((seed, text), (None, "")):
        gy, dtypes = torch.randn(50, 48), "float32 None float32"
        arguments = (gy, frozen, None, None, given, config, 70, dtypes)
        torch.library.opcheck(torch.ops.hotcore.backward_linear.default, (*arguments, *fields))
    trained = [t.requires_grad_() for t in (x, weight, bias)]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    operator = torch.ops.hotcore.linear.default
    torch.library.opcheck(operator, (*trained, saved, seed, text), test_utils=tests)


def test_compiled_for_any_number_of_tokens() -> None:
    model, x = converted(Mlp(), INT8), torch.randn(96, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (x, x[:33]):
        assert torch.equal(compiled(tokens), model(tokens))
    model.eval()
    assert torch.equal(compiled(x), model(x))


def stepped(layer: hot.HotLinear) -> None:
    """Write by a fused optimizer that still holds a gradient; it raises no version."""
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=1.0, fused=True).step()


WRITES: dict[str, Callable[[hot.HotLinear], object]] = {
    "clipped": lambda layer: layer.weight.data.clamp_(-0.02, 0.02),
    "stepped": stepped,
    "swapped": lambda layer: layer.weight.data.copy_(3 * layer.weight.data),  # as EMA does
    "numpy": lambda layer: layer.weight.detach().numpy().__imul__(-2),
    "loaded": lambda layer: layer.load_state_dict(
        {n: p + 1 for n, p in layer.state_dict().items()}
    ),
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_written_weight_is_read(write: str, frozen: bool) -> None:
    """However it was written: y and g_x are those of a layer that was made with the new values."""
    layer = hot.HotLinear(64, 48, config=INT8)
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(20, 64, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
    WRITES[write](layer)
    fresh = copy.deepcopy(layer)
    y = layer(x)
    assert torch.equal(y, expected(x, layer.weight, layer.bias))
    found = []
    for each in (layer, fresh):
        torch.manual_seed(5)
        found.append(torch.autograd.grad(each(x).square().sum(), x)[0])
    assert torch.equal(*found)


def test_relora() -> None:
    """peft merges by ``.data``; the next adapters then train beside the merged base."""
    peft = imported("peft")
    model = hot.convert(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48)), INT8, every)
    x = torch.randn(20, 64, requires_grad=True)
    for _ in range(2):
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["1"]))
        base = wrapped.base_model.model[1].base_layer
        assert isinstance(base, hot.HotLinear) and not base.weight.requires_grad
        inner = torch.randn(20, 64, requires_grad=True)
        assert torch.equal(base(inner), expected(inner, base.weight, base.bias))
        adapted(wrapped)(x).square().sum().backward()
        model = wrapped.merge_and_unload()
        assert torch.equal(model[1](inner), expected(inner, model[1].weight, model[1].bias))


def test_compute_report_counts_the_forward() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    x = torch.randn(100, 64)
    plain = paper.compute_report(model, x, "default", filter_fn=every)
    report = paper.compute_report(model, x, INT8, filter_fn=every)
    assert plain.forward_by(plain.methods[-1]) == plain.forward == report.forward
    own = report.forward_by(report.methods[-1])
    products = sum(row.tokens * row.outs * row.ins for row in report.layers)
    assert products * 64 < own < report.forward / 4
    assert report.forward_by("LUQ") == report.forward
    operations = (100 * 64 + 64 * 128) * 7 + 100 * 128
    assert report.layers[0].own_forward == 100 * 64 * 128 * 64 + operations * 1024
    layer, image = nn.Conv2d(64, 64, 3), torch.randn(1, 64, 8, 8)
    conv = paper.compute_report(layer, image, INT8, filter_fn=every)
    assert conv.forward_by(conv.methods[-1]) == conv.forward


def test_overrides_and_plans_take_the_fields() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    overrides = {"1": {"forward": "int8", "forward_block": 16}}
    report = hot.convert(model, "fast", every, overrides).hot_report
    first, second = report.converted
    assert first.config.forward == "plain" and second.config.forward_block == 16
    assert "forward='int8'" in str(report)
    schedule = paper.PrecisionSchedule(model, 0)
    assert model[1].config == int8("fast", gx_bits=4, forward_block=16)
    schedule.close()
