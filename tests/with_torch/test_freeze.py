"""``freeze_int8``: frozen weights as INT8 codes alone, what they compute, and all around them."""

import copy
import dataclasses
import functools
import itertools
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hotcore
import hotcore.torch as hot
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from hotcore import paper
from hotcore.config import RECIPES, HotConfig
from hotcore.torch import _compat
from hotcore.torch.frozen import FrozenWeight, HotFrozenLinear
from hotcore.torch.ops import frozen_codes
from hotcore.torch.ops.frozen_codes import Format
from support import refused, saved_tensors
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torch_graphs import Graphs, adapted, causal, every, imported, same

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")
guarded = pytest.mark.skipif(
    not _compat.traces_parameters(), reason="torch.compile needs 2.13 to follow guarded codes"
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORWARDS = ("int8", "plain")
both = pytest.mark.parametrize("bits", [8, 4])
BACKWARDS = [{"recipe": name} for name in RECIPES]


def config(forward: str = "int8", recipe: str = "default", **fields: Any) -> HotConfig:
    return HotConfig.recipe(recipe, forward=forward, **fields)


class Net(nn.Module):
    """Two layers, and a norm before the first, so that x has a gradient."""

    def __init__(self, ins: int = 72, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(ins)
        self.up, self.down = nn.Linear(ins, 96, bias=bias), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def frozen(
    forward: str = "int8",
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    bits: Any = 8,
    **options: Any,
) -> nn.Module:
    model = Net(bias=bias).to(dtype)
    with torch.no_grad():  # so that features have sizes of their own
        for layer in (model.up, model.down):
            layer.weight *= torch.linspace(0.1, 3, layer.in_features, dtype=dtype)
    hot.convert(model, config(forward, **options), every)
    return hot.freeze(model, bits)


def thawed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    assert hot.thaw(other) == 2
    return other


def near(layer: Any, other: Any, error: float) -> bool:
    """Whether two layers' weights differ by this share at most; INT4 rounds its own values anew."""
    found, expected = layer.weight.float() + 0, other.weight.float() + 0
    return bool((found - expected).norm() <= error * expected.norm())


def results(
    call: Callable[..., torch.Tensor], x: torch.Tensor, model: nn.Module
) -> tuple[torch.Tensor, ...]:
    """y, and the gradients of x and the norm, from the same seed."""
    torch.manual_seed(11)
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    y = call(leaf)
    y.float().square().sum().backward()
    return y.detach(), leaf.grad, model.norm.weight.grad


# ---- the numbers ----


@pytest.mark.parametrize("block", [1, 16, 64, 256])
@pytest.mark.parametrize("shape", [(40, 72), (7, 5), (96, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_weight(shape: tuple[int, int], block: int, dtype: torch.dtype) -> None:
    """docs/numerics.md, "Forward": codes transformed back, times scale / n, rounded once."""
    layer = nn.Linear(shape[1], shape[0]).to(dtype)
    weight = layer.weight.detach().clone()
    model = nn.Sequential(hot.HotLinear.from_linear(layer, config(forward_block=block)))
    hot.freeze_int8(model)
    q = hotcore.quantize_forward_weight(weight, config(forward_block=block)).data.numpy()
    rows, width = shape[0], q.size // shape[0] - 4
    codes = q[: rows * width].view(np.int8).reshape(rows, width)
    expected = reference.dequantize_weight(
        codes, q[rows * width :].view(np.float32), block, shape[1]
    )
    found = model[0].weight.dequantized()
    assert found.dtype == dtype and torch.equal(found, torch.from_numpy(expected).to(dtype))
    error = (found - weight).float().norm() / weight.float().norm()
    assert 0 < error < 0.012
    assert model[0].weight_codes.nbytes == Format(block).bytes(*shape)
    assert torch.equal(model[0].weight_codes[: len(q)], torch.from_numpy(q))


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_weight_of_int4(block: int, dtype: torch.dtype) -> None:
    """docs/numerics.md, "INT4 weights": codes transformed back, times scale / n, times factors."""
    layer = nn.Linear(72, 40).to(dtype)
    with torch.no_grad():
        layer.weight[:, 5] *= 9
    weight = layer.weight.detach().clone()
    model = nn.Sequential(hot.HotLinear.from_linear(layer, config(forward_block=block)))
    hot.freeze(model)
    exponents = model[0].weight_exponents.numpy()
    assert exponents[5] < exponents.min(where=np.arange(72) != 5, initial=0)
    packed, scales, steps = reference.quantize_weight_int4(
        weight.float().numpy(), block, 32, exponents
    )
    codes = reference.expand_weight_int4(packed, steps, 32)
    expected = reference.dequantize_weight(codes, scales, block, 72, exponents)
    found = model[0].weight.dequantized()
    assert found.dtype == dtype and torch.equal(found, torch.from_numpy(expected).to(dtype))
    error = (found - weight).float().norm() / weight.float().norm()
    assert 0.05 < error < 0.11
    assert model[0].weight_codes.nbytes == Format(block, False, 4).bytes(40, 72)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", BACKWARDS, ids=lambda fields: next(iter(fields.values())))
def test_gx_is_that_of_the_dequantised_weight(
    bits: int, fields: dict[str, str], dtype: torch.dtype
) -> None:
    """g_x has the bits of a HOT layer that holds the weight that the codes stand for."""
    model = frozen("plain", dtype, **fields)
    x = torch.randn(3, 20, 72, dtype=dtype)
    ours, others = results(model, x, model), results(plain := thawed(model), x, plain)
    assert same(ours, others)
    exact = results(hot.revert(plain), x, plain)
    assert not torch.equal(ours[1], exact[1])


@both
def test_forward_takes_the_codes(bits: Any) -> None:
    """y is ``forward_linear`` of the codes, g_b the sum, and g_x as with a plain forward."""
    layer = nn.Linear(72, 96)
    with torch.no_grad():
        layer.weight[:, 5] *= 9
    weight = layer.weight.detach().clone()
    model = hot.freeze(nn.Sequential(hot.HotLinear.from_linear(layer, config())), bits)
    x, gy = torch.randn(30, 72, requires_grad=True), torch.randn(30, 96)
    y = model(x)
    if bits == 8:
        quantized = hotcore.quantize_forward_weight(weight, config())
    else:
        exponents = model[0].weight_exponents
        quantized = hotcore.expand_weight_int4(
            hotcore.quantize_weight_int4(weight, config(), exponents=exponents)
        )
    bias = model[0].bias.detach()
    assert torch.equal(y, hotcore.forward_linear(x.detach(), quantized, bias, config=config()))
    torch.manual_seed(3)
    gx, gb = torch.autograd.grad(model(x), (x, model[0].bias), gy)
    plain = copy.deepcopy(model)
    plain[0].config = config("plain")
    torch.manual_seed(3)
    (other,) = torch.autograd.grad(plain(x), x, gy)
    assert torch.equal(gx, other)
    assert torch.allclose(gb, gy.sum(0), atol=1e-5)


@both
@pytest.mark.parametrize("forward", FORWARDS)
def test_nothing_is_kept(bits: int, forward: str) -> None:
    """Neither x nor a weight, but a seed of 8 bytes a layer."""
    model = frozen(forward, bias=False, bits=bits)
    model.norm = nn.Identity()
    held = {p.data_ptr() for p in model.parameters()}
    with saved_tensors(leaves=True) as kept:
        model(torch.randn(8, 72, requires_grad=True))
    found = sorted(t.nbytes for t in kept if t.data_ptr() not in held)
    assert found == [8, 8, 8 * 96 * 4]  # the last is GELU's


@both
@pytest.mark.parametrize("forward", FORWARDS)
def test_eval_is_the_plain_layer(bits: int, forward: str) -> None:
    model = frozen(forward, bits=bits)
    plain = hot.revert(thawed(model)).eval()
    model.eval()
    x = torch.randn(9, 72)
    wanted = results(plain, x, plain)
    torch.testing.assert_close(results(model, x, model), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    state = torch.get_rng_state()
    model(x)
    assert torch.equal(torch.get_rng_state(), state)  # no seed
    doubled = torch.func.vmap(model)(x[None].expand(2, 9, 72))
    assert torch.allclose(doubled[1], model(x), atol=1e-5)
    found, expected = (torch.func.jacrev(net)(x[0]) for net in (model, plain))
    assert torch.allclose(found, expected, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        traced = torch.jit.trace(model, x)
        first = torch.jit.trace(frozen(forward, bits=bits).eval(), x)  # was never called
    assert torch.allclose(traced(x + 1), model(x + 1), atol=1e-5) and first(x).isfinite().all()
    assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64


@both
def test_eight_bits_in_eval(bits: int) -> None:
    model = frozen(forward_in_eval=True, bits=bits)
    x = torch.randn(9, 72)
    y = model(x)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), y)
    assert torch.equal(results(model, x, model)[0], y)


@both
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(bits: int, dtype: torch.dtype, forward: str) -> None:
    model, x = frozen(forward, dtype, bits=bits), torch.randn(9, 72, dtype=dtype)
    plain = thawed(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours, others = results(model, x, model), results(plain, x, plain)
    assert ours[0].dtype == torch.bfloat16 and ours[1].dtype == dtype
    if forward == "plain":
        assert torch.equal(ours[0], others[0])
    # The layer's own g_x is rounded to bf16, as a plain layer's.
    # In INT4 the thawed weight is rounded to INT8 without the sizes of its features.
    assert (ours[1] - others[1]).norm() < (0.02 if bits == 8 else 0.04) * others[1].norm()


def test_wrong_dtypes_are_refused() -> None:
    model = frozen(dtype=torch.bfloat16)
    refused(lambda: model.up(torch.randn(3, 72)), "layer up: weight: dtype bfloat16; x has float32")
    refused(lambda: model.up(torch.randn(3, 72, dtype=torch.float64)), "x: dtype float64")
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda x: model.up(x).sum())(torch.randn(3, 72, dtype=torch.bfloat16))
    refused(lambda: model.eval().up(torch.ones(3, 72, dtype=torch.int64)), "x: dtype int64")


def test_not_finite() -> None:
    layer = nn.Linear(72, 64)
    with torch.no_grad():
        layer.weight[3, 5] = float("nan")
    model = hot.freeze_int8(nn.Sequential(hot.HotLinear.from_linear(layer, config())))
    x = torch.randn(4, 72, requires_grad=True)
    y = model(x)
    assert y[:, 3].isnan().all() and y[:, :3].isfinite().all()
    y.sum().backward()
    assert x.grad.isnan().all()


# ---- sizes of in features ----


class Attention(nn.Module):
    """Two layers of one x, and one of another; a feature of x is 30 times the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.o = (nn.Linear(64, 64, bias=False) for _ in range(3))
        with torch.no_grad():
            self.norm.weight[7] = 30.0
            self.k.weight.copy_(self.q.weight.flip(0))  # with the same columns' sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.o(torch.tanh(self.q(x) * self.k(x)))


def batches() -> list[Any]:
    return [torch.randn(50, 64), (torch.randn(40, 64),), {"x": torch.randn(10, 64)}]


def test_sizes_from_inputs() -> None:
    """The exponents are the square root of x's size over that of w's column, in powers of two."""
    plain = Attention()
    model = hot.convert(copy.deepcopy(plain), config(), every)
    before, state = torch.get_rng_state(), model.training
    data = batches()
    report = hot.freeze(model, inputs=data).freeze_report
    assert model.training is state and not model.q._forward_pre_hooks
    assert "x of 100 tokens, and weights" in str(report) and "frozen in INT4" in str(report)
    x = torch.cat([data[0], *data[1], data[2]["x"]])
    size = plain.norm(x).double().square().mean(0).sqrt()
    column = plain.q.weight.double().square().mean(0).sqrt()
    logs = (size / column).log2()
    expected = (logs - logs.mean()) * 0.5 * frozen_codes.STEPS
    assert (model.q.weight_exponents - expected).abs().max() < 0.51
    assert model.q.weight_exponents[7] >= 2 * frozen_codes.STEPS
    without = hot.freeze(hot.convert(copy.deepcopy(plain), config(), every))
    assert without.freeze_report.sizes == "weights"
    x = plain.norm(torch.randn(200, 64))
    errors = [(each.q(x) - plain.q(x)).norm() for each in (model, without)]
    assert errors[0] < 0.6 * errors[1]
    torch.set_rng_state(before)


def test_sizes_from_a_vector() -> None:
    """A layer may get one token, without an axis of tokens."""
    data, plain = torch.randn(3, 64), nn.Linear(64, 64)
    vectors, rows = (
        hot.freeze(hot.convert(copy.deepcopy(plain), config(), every), inputs=inputs)
        for inputs in ([*data], [data])
    )
    assert torch.equal(vectors.weight_exponents, rows.weight_exponents)
    assert vectors.freeze_report.sizes == "x of 3 tokens, and weights"


def test_layers_of_one_x_have_their_own_sizes() -> None:
    """Each quantises x by its own: codes of another layer would be wrong, eager and in a graph."""
    model, other = (
        hot.freeze(hot.convert(Attention(), config(), every), inputs=inputs)
        for inputs in (batches(), None)
    )
    with torch.no_grad():
        model.k.weight_codes.copy_(other.k.weight_codes)
    x = torch.randn(9, 64, requires_grad=True)
    y = model(x)
    inner = model.norm(x).detach()
    product = torch.tanh(model.q(inner) * model.k(inner))
    assert not torch.equal(model.q.weight_exponents, model.k.weight_exponents)
    assert torch.equal(model.o(product), y)
    assert Graphs().run(model, x).count("forward", "forward_input") == 3
    other = hot.freeze(hot.convert(Attention(), config(), every))
    other.load_state_dict(saved(model, True))
    assert torch.equal(other.q.weight_exponents, model.q.weight_exponents)
    assert torch.equal(other(x), y)


def test_codes_with_other_sizes() -> None:
    """An eager layer follows codes that were copied into its own; a graph refuses them."""
    model = hot.freeze(hot.convert(Attention(), config(), every), inputs=batches())
    other = hot.freeze(hot.convert(Attention(), config(), every))
    x = torch.randn(9, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    with torch.no_grad():
        model.q.weight_codes.copy_(other.q.weight_codes)
    refused(lambda: compiled(x), "weight_codes: these codes have other sizes", RuntimeError)
    assert torch.equal(model.q(x), other.q(x))
    assert torch.equal(model.q.weight_exponents, other.q.weight_exponents)


def test_loading_keeps_sizes_that_come_from_x() -> None:
    model = hot.freeze(hot.convert(Attention(), config(), every), inputs=batches())
    exponents = model.q.weight_exponents.clone()
    model.load_state_dict({"q.weight": torch.randn(64, 64)}, strict=False)
    assert torch.equal(model.q.weight_exponents, exponents)
    plain = hot.freeze(hot.convert(Attention(), config(), every))
    weight = torch.randn(64, 64) * torch.logspace(-1, 1, 64)
    plain.load_state_dict({"q.weight": weight}, strict=False)
    assert plain.q.weight_exponents[0] - plain.q.weight_exponents[-1] > 2


def test_int4_is_refused() -> None:
    """The argument or the layer is named, and nothing has changed."""
    infinite = [torch.full((3, 64), torch.inf)]
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (ValueError, {"bits": 5}, "bits: expected 4 or 8, got 5"),
        (ValueError, {"bits": 8, "inputs": []}, "inputs: expected None with bits=8"),
        (ValueError, {"convrot": True}, "convrot: expected False with bits=4"),
        (TypeError, {"inputs": torch.zeros(3, 64)}, "inputs: expected an iterable of batches"),
        (TypeError, {"inputs": {"x": torch.zeros(3, 64)}}, r"as \[batch\], got a dict"),
        (TypeError, {"inputs": 3}, "got a int"),
        (ValueError, {"inputs": []}, "inputs: none of 0 batches reached a layer"),
        (ValueError, {"inputs": infinite}, "inputs: NaN or infinity in the"),
    ]
    model = hot.convert(Attention(), config(), every)
    for kind, options, text in calls:
        with pytest.raises(kind, match=text):
            hot.freeze(model, **options)
    with torch.no_grad():
        model.o.weight[1, 2] = torch.nan
    refused(lambda: hot.freeze(model), "layer o: weight: it has a NaN or an infinity")
    assert {type(m) for m in (model.q, model.k, model.o)} == {hot.HotLinear}
    narrow = hot.convert(Net(72), config(forward_block=16), every)
    report = hot.freeze(narrow).freeze_report
    why = "80 codes a row; INT4 needs a multiple of 32, as forward_block 32 has"
    assert (report.layers, report.skipped) == (("down",), (("up", why),))


def test_a_layer_that_no_batch_reaches() -> None:
    model = hot.convert(nn.ModuleDict({"a": Attention(), "b": nn.Linear(64, 64)}), config(), every)
    model.forward = lambda x: model["a"](x)
    report = hot.freeze(model, inputs=batches()[:1]).freeze_report
    assert "weights alone for b, which no batch reached" in report.sizes
    assert model["a"].q.weight_measured and not model["b"].weight_measured


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hotcore.torch.progress.now", itertools.count(0.0, 4.0).__next__)
    for terminal, progress in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        model = hot.convert(Attention(), config(), every)
        hot.freeze(model, inputs=iter(batches()), progress=progress)
        text = capsys.readouterr().err
        for part in ("columns of o, 3 of 3, 6 s left", "batch 3\033", "o, 3 of 3"):
            assert (f"freeze: {part}" in text) == (terminal and progress)


# ---- compiled, checkpoints, modes ----


@both
@pytest.mark.long
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_compiled(bits: int, forward: str, mode: str) -> None:
    model = frozen(forward, bits=bits).train(mode != "eval")
    x = torch.randn(2, 20, 72)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if mode == "no_grad":
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
        return
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            ours, eager = results(compiled, x, model), results(model, x, model)
            assert all(map(torch.equal, ours, eager))


@both
@pytest.mark.parametrize("forward", FORWARDS)
def test_compiled_under_autocast(bits: int, forward: str) -> None:
    model, x = frozen(forward, bits=bits), torch.randn(9, 72)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = results(compiled, x, model), results(model, x, model)
    assert ours[0].dtype == torch.bfloat16
    assert (ours[0] - eager[0]).norm() < 0.01 * eager[0].norm()
    assert (ours[1] - eager[1]).norm() < 0.03 * eager[1].norm()


@both
def test_a_graph_keeps_no_weight(bits: int) -> None:
    """The weight is dequantised in backward, and not kept since forward."""
    model = frozen("plain", bits=bits)
    graphs = Graphs().run(model, torch.randn(9, 72, requires_grad=True))
    assert graphs.count("forward", "product") == 2
    assert graphs.count("backward", "backward_linear") == 2
    assert not {t.numel() for t in graphs.kept} & {96 * 72, 64 * 96}


def test_reading_the_weight_in_a_graph() -> None:
    """Its dtype costs nothing; its values are an operator."""

    class Parent(nn.Module):
        def __init__(self, values: bool) -> None:
            super().__init__()
            self.inner, self.values = frozen(), values

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x.to(self.inner.up.weight.dtype))
            return y + self.inner.down.weight.sum() if self.values else y

    for values in (False, True):
        model, x = Parent(values), torch.randn(5, 72)
        graphs = Graphs().run(model, x.clone().requires_grad_())
        assert graphs.count("forward", "dequantize_weight") == values
        with torch.no_grad():
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            assert torch.allclose(compiled(x), model(x), atol=1e-4)


@both
def test_selective_checkpoints_keep_products(bits: int) -> None:
    model, x = frozen(bits=bits), torch.randn(9, 72, requires_grad=True)
    everything = functools.partial(checkpoint, model, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, hot.policies.keep_products)
    products = functools.partial(everything, context_fn=contexts)
    assert Graphs().run(products, x).count("backward", "product") == 0
    assert Graphs().run(everything, x).count("backward", "product") >= 1


@both
@pytest.mark.parametrize("forward", FORWARDS)
def test_flops(bits: int, forward: str) -> None:
    model, x = frozen(forward, bits=bits), torch.randn(9, 72)
    totals = []
    for each in (model, thawed(model)):
        leaf = x.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            each(leaf).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] == 2 * 2 * 9 * (72 * 96 + 96 * 64)


# ---- the module ----


def test_report() -> None:
    model = Net(64)
    tied = nn.Embedding(96, 64)
    tied.weight = model.up.weight
    both = nn.ModuleDict({"net": model, "embedding": tied, "conv": nn.Conv2d(64, 64, 1)})
    report = hot.freeze_int8(hot.convert(both, config(), every)).freeze_report
    assert report.layers == ("net.down",)
    assert report.before == 64 * 96 * 4 and report.after == Format(64).bytes(64, 96)
    text = str(report)
    assert "1 layers frozen in INT8" in text and "net.up" in text and "embedding" in text
    assert "Conv2d 1x1; only linear layers" in text and "forward_in_eval" in text
    assert json.loads(report.to_json())["layers"] == ["net.down"]
    plain = hot.convert(Net(64), "default", every)
    assert "forward='int8'" in str(hot.freeze_int8(plain).freeze_report)


@both
def test_tied_weights_share_codes(bits: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    hot.convert(model, config(), every)
    inputs = [torch.randn(9, 64)] if bits == 4 else None
    report = hot.freeze(model, bits, inputs=inputs).freeze_report
    assert report.before == 64 * 64 * 4 and report.after == Format(64, False, bits).bytes(64, 64)
    assert model[0].weight_codes is model[1].weight_codes
    with pytest.raises(RuntimeError, match="weight: several layers have it"):
        model[1].weight.data += 1  # of one alone
    hot.thaw(other := copy.deepcopy(model))
    assert other[0].weight is other[1].weight
    with pytest.warns(UserWarning, match="0, 1 had one weight, and not all of them are thawed"):
        hot.thaw(copy.deepcopy(model)[1])
    hot.revert(model)
    assert type(model[0]) is nn.Linear and model[0].weight is model[1].weight


@both
def test_tied_weights_that_a_state_dict_parts(bits: Any) -> None:
    """load_state_dict(assign=True) gives each layer its own weight, which thawing keeps."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    hot.convert(model, config(), every)
    hot.freeze(model, bits, inputs=[torch.randn(9, 64)] if bits == 4 else None)
    weights = {f"{i}.weight": torch.randn(64, 64) for i in range(2)}
    model.load_state_dict(model.state_dict() | weights, assign=True)
    with pytest.warns(UserWarning, match="0, 1 had one weight"):
        hot.thaw(model)
    for i, layer in enumerate(model):
        loaded = weights[f"{i}.weight"]
        assert (layer.weight - loaded).norm() < 0.15 * loaded.norm()


def test_tied_weights_of_two_blocks_stay_one() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    hot.convert(model, config(), every, overrides={"1": {"forward_block": 16}})
    hot.freeze_int8(model)
    assert model[0].weight_codes is not model[1].weight_codes
    hot.thaw(model)
    assert model[0].weight is model[1].weight


@both
def test_frozen_and_thawed_in_inference_mode(bits: Any) -> None:
    model = hot.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config(), every)
    x = torch.randn(9, 64, requires_grad=True)
    with torch.inference_mode():
        hot.freeze(model, bits)
    model(x).sum().backward()
    with torch.inference_mode():
        hot.thaw(model)
    model(x).sum().backward()
    assert not model[0].weight.is_inference()


def test_refused() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got list"):
        hot.freeze_int8([])
    refused(lambda: hot.freeze_int8(Net()), r"no converted layer; call hot\.convert")
    model = frozen()
    refused(lambda: hot.freeze_int8(model), "no layer can be frozen: up .frozen already., down")
    sharded = hot.convert(nn.Sequential(nn.Linear(64, 64)), "default", every)
    sharded[0].weight.data = torch.empty(0)  # as DeepSpeed's ZeRO 3 leaves it
    for bits in (4, 8):
        refused(lambda bits=bits: hot.freeze(sharded, bits), r"shape .0.; freeze comes before ZeRO")
    refused(lambda: hot.convert(model, "default", every), "already converted")
    refused(lambda: model.requires_grad_(True), r"frozen in codes; hot\.thaw\(model\)")
    refused(lambda: model.up.requires_grad_(True), r"frozen in codes; hot\.thaw\(model\)")
    with pytest.raises(ValueError, match=r"frozen in codes; hot\.thaw\(model\)"):
        model.up.weight.requires_grad = True
    with pytest.raises(ValueError, match="forward_block 16; the weight is frozen in codes"):
        model.up.config = config(forward_block=16, forward_in_eval=True)
    assert model.up.config == config() and model.eval().up.runs_plain
    refused(lambda: HotFrozenLinear(64, 64), "hot.freeze makes it of a HotLinear", TypeError)
    refused(lambda: hot.thaw(None), "model: expected", TypeError)
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("layers", [("up",), ("up", "down")])
def test_pruning_is_refused(layers: tuple[str, ...]) -> None:
    model = frozen()
    state, x = model.state_dict(), torch.randn(3, 72)
    y = model(x)
    with pytest.raises(RuntimeError, match=r"up: weight_orig: the weight is frozen.*hot\.thaw"):
        if len(layers) == 1:
            prune.l1_unstructured(model.up, "weight", 0.5)
        else:
            pairs = [(getattr(model, name), "weight") for name in layers]
            prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    assert torch.equal(model(x), y) and list(model.state_dict()) == list(state)


@pytest.mark.parametrize("convrot", [False, True])
def test_a_sparse_weight_is_refused(convrot: bool) -> None:
    model = of_format(64, convrot)
    before, x = model.up.weight_codes.clone(), torch.randn(3, 64)
    state = {"up.weight": torch.randn(96, 64).to_sparse()}
    with pytest.raises(RuntimeError, match=r"loading up\.weight: .*layout torch\.sparse_coo"):
        model.load_state_dict(state, strict=False)
    assert torch.equal(model.up.weight_codes, before) and model(x).isfinite().all()


def half_averaged(model: nn.Module) -> None:
    with torch.no_grad():
        model.down.weight_codes.data.zero_()


def patched(model: nn.Module) -> None:
    model.down.forward = lambda x: x


@pytest.mark.parametrize("change", [pytest.param(half_averaged, marks=guarded), patched])
@pytest.mark.parametrize("undo", [hot.thaw, hot.revert])
def test_all_layers_are_thawed_or_none(
    undo: Callable[[nn.Module], Any], change: Callable[[nn.Module], None]
) -> None:
    model = frozen()
    change(model)
    content = [(type(m), dict(vars(m)), dict(m._parameters)) for m in model.modules()]
    refused(lambda: undo(model), "(layer|model:) down: ", (ValueError, RuntimeError))
    assert content == [(type(m), dict(vars(m)), dict(m._parameters)) for m in model.modules()]


def test_all_layers_are_frozen_or_none_or_those_of_a_filter() -> None:
    model = hot.convert(Net(), config(), every)
    model.down.double()
    refused(lambda: hot.freeze_int8(model), "^layer down: .*dtype float64")
    assert type(model.up) is type(model.down) is hot.HotLinear
    report = hot.freeze_int8(model, lambda module, name: name == "up").freeze_report
    assert report.layers == ("up",) and report.skipped == (("down", "left out by filter_fn"),)
    model.down.float()
    assert type(hot.freeze_int8(model).down) is HotFrozenLinear


def test_weights_that_are_trained_beside_frozen_ones() -> None:
    """Copies for training (peft's ``modules_to_save``) stay trained, unless a filter takes them."""
    model = hot.convert(Net(), config(), every)
    model.up.weight.requires_grad_(False)
    report = hot.freeze_int8(model).freeze_report
    assert report.layers == ("up",)
    assert report.skipped[0][0] == "down" and "its weight is trained" in report.skipped[0][1]
    model(torch.randn(9, 72)).sum().backward()
    assert model.down.weight.grad is not None
    assert hot.freeze_int8(model, every).freeze_report.layers == ("down",)


def test_replacing_the_weight_is_refused() -> None:
    model = frozen()
    for value in (nn.Parameter(torch.randn(96, 72)), torch.randn(96, 72), None):
        with pytest.raises(AttributeError, match=r"up: weight is frozen in codes.*hot\.thaw"):
            model.up.weight = value
    with pytest.raises(AttributeError, match="weight is frozen in codes"):
        torch.func.functional_call(model, dict(Net().named_parameters()), torch.randn(9, 72))


def test_weight_reads_as_a_tensor() -> None:
    model = frozen(dtype=torch.bfloat16)
    weight, values = model.up.weight, model.up.dequantized()
    assert isinstance(weight, torch.Tensor) and isinstance(weight, FrozenWeight)
    assert weight.shape == (96, 72) and weight.dtype == torch.bfloat16
    assert weight.device == values.device and weight.is_cpu and not weight.is_meta
    assert not weight.requires_grad and weight.numel() == 96 * 72 and weight.stride() == (72, 1)
    assert type(weight + 1) is torch.Tensor and torch.equal(weight + 1, values + 1)
    assert torch.equal(torch.cat([weight, weight]), torch.cat([values, values]))
    assert torch.equal(weight.data.clone(), values) and torch.equal(weight[3], values[3])
    ones = torch.ones(3, 72, dtype=torch.bfloat16)
    assert torch.equal(F.linear(ones, weight), F.linear(ones, values))
    assert type(copy.deepcopy(weight)) is torch.Tensor
    assert torch.equal(pickle.loads(pickle.dumps(weight)), values)
    for view in (weight[3], weight.t(), weight.view(-1), weight.data, weight.detach()):
        assert isinstance(view, torch.Tensor) and not view.requires_grad
        assert type(view * 1) is type(view.clone()) is type(copy.deepcopy(view)) is torch.Tensor
    assert np.array_equal(weight.float().numpy(), values.float().numpy())
    weight.requires_grad = False


WRITES: dict[str, Callable[[Any], Any]] = {
    "method": lambda w: w.add_(1),
    "copy_": lambda w: w.data.copy_(w + 1),
    "detach": lambda w: w.detach().zero_(),
    "init": lambda w: nn.init.normal_(w),
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 2),
    "relu": lambda w: F.relu(w, inplace=True),
    "relu, positional": lambda w: F.relu(w, True),
    "dropout": lambda w: F.dropout(w, 0.5, True, True),
    "operator": lambda w: torch.ops.aten.add_.Tensor(w, w),
    "packet": lambda w: torch.ops.aten.add_(w, 1),
    "embedding": lambda w: F.embedding(torch.arange(3), w, max_norm=0.1),
    "embedding_bag": lambda w: F.embedding_bag(torch.arange(3)[None], w, max_norm=0.1),
    "swap": lambda w: torch.utils.swap_tensors(w, torch.zeros(96, 72)),
    "swap, second": lambda w: torch.utils.swap_tensors(torch.zeros(96, 72), w),
    "slice": lambda w: w[0].zero_(),
    "view": lambda w: w.view(-1).data.mul_(2),
    "transposed": lambda w: w.t().__setitem__(0, 1.0),
    "rows": lambda w: [row.zero_() for row in w],
    "unbind": lambda w: torch.unbind(w)[1].zero_(),
    "apply": lambda w: w.apply_(lambda value: 0.0),
    "map": lambda w: w.map_(torch.zeros(96, 72), lambda a, b: 0.0),
    "dlpack": lambda w: torch.from_dlpack(w).zero_(),
    "numpy's dlpack": lambda w: np.from_dlpack(w),
    "storage": lambda w: w.untyped_storage().fill_(0),
    "view's data": lambda w: setattr(w.view(-1), "data", torch.zeros(96 * 72)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_to_the_weight_is_refused(write: Callable[[Any], Any]) -> None:
    model = frozen()
    before = model.up.dequantized()
    with torch.no_grad(), pytest.raises(RuntimeError, match="the weight is frozen in codes, and "):
        write(model.up.weight)
    assert torch.equal(model.up.dequantized(), before)


@pytest.mark.parametrize("array", [lambda w: w.numpy(), np.asarray, lambda w: w[2:].numpy()])
def test_arrays_of_the_weight_cannot_be_written(array: Callable[[Any], Any]) -> None:
    found = array(frozen().up.weight)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


CODES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda c: c.zero_(),
    "setitem": lambda c: c.__setitem__(slice(0, 9), 3),
    "numbers": lambda c: c.copy_(torch.randn(c.shape)),
    "numbers as data": lambda c: setattr(c, "data", torch.randn(c.shape)),
    "init": lambda c: nn.init.zeros_(c),
    "bits": lambda c: c.bitwise_xor_(1),
    "average": lambda c: c.mul_(0.9).add_(c, alpha=0.1),
    "dlpack": lambda c: torch.from_dlpack(c),
    "vector": lambda c: nn.utils.vector_to_parameters(torch.zeros(c.shape), [c]),
    "detach": lambda c: c.detach().fill_(2),
}
BYTES: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda c: c.view(-1).zero_(),
    "clamped": lambda c: setattr(c, "data", c.clamp(60, 90)),
    "view": lambda c: c.view(-1)[3:9].add_(1),
    "slice": lambda c: c[5:].add_(1),
    "out": lambda c: torch.add(c, 1, out=c),
    "foreach": lambda c: torch._foreach_zero_([torch.ones(2), c]),
    "operator": lambda c: torch.ops.aten.mul_.Tensor(c, c),
    "four codes": lambda c: c[8:12].copy_(c[16:20]),
}
if _compat.traces_parameters():
    BYTES["data"] = lambda c: c.data.clamp_(60, 90)


@pytest.mark.parametrize("write", CODES.values(), ids=CODES)
@guarded
def test_codes_are_no_numbers(write: Callable[[Any], Any]) -> None:
    model = frozen()
    codes = model.up.weight_codes
    before = codes.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="weight_codes are codes"):
        write(codes)
    assert torch.equal(codes, before)
    with pytest.raises(ValueError, match="read-only"):
        codes.numpy()[0] = 1
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        codes.requires_grad = True
    codes.requires_grad, codes.grad = False, None


@both
@pytest.mark.parametrize("write", BYTES.values(), ids=BYTES)
def test_bytes_that_are_no_codes_are_found(bits: int, write: Callable[[Any], Any]) -> None:
    model, x = frozen(bits=bits), torch.randn(3, 72)
    state = {key: value.clone() for key, value in saved(model, True).items()}
    y, compiled = model(x), torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), y)
    with torch.no_grad():
        write(model.up.weight_codes)
    for call in (model, compiled, lambda _: model.up.weight + 1):
        with pytest.raises(RuntimeError, match="weight_codes: these bytes are not codes"):
            call(x)
    with pytest.raises(RuntimeError, match=r"up\.weight: weight_codes: these bytes are not codes"):
        frozen(bits=bits).load_state_dict(saved(model, True))
    model.load_state_dict(state)
    assert torch.equal(model(x), y) and torch.equal(compiled(x), y)


def by_numpy(e: Any, p: Any) -> None:
    array = np.float32(0.9) * e.detach().numpy() + np.float32(0.1) * p.detach().numpy()
    e.data = torch.from_numpy(array).to(e.dtype)


AVERAGES: dict[str, Callable[[Any, Any], object]] = {
    "copied": lambda e, p: e.copy_((0.9 * e + 0.1 * p).to(e.dtype)),
    "data": lambda e, p: setattr(e, "data", (0.9 * e.data + 0.1 * p.data).to(e.dtype)),
    "numpy": by_numpy,
    "foreach": lambda e, p: torch._foreach_copy_([e], [torch._foreach_mul([p], 0.9)[0] + 0.1 * p]),
}


@both
@pytest.mark.parametrize("update", AVERAGES)
@pytest.mark.parametrize("other", [False, True])
def test_averages_cast_back(bits: int, update: str, other: bool) -> None:
    """Averages of equal codes are truncated, averages of other codes have no meaning."""
    model, x = frozen(bits=bits), torch.randn(3, 72)
    ema = copy.deepcopy(frozen(bits=bits) if other else model)
    ema(x)
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            AVERAGES[update](e, p)
    refused(lambda: ema(x), "layer up: weight_codes: these bytes are not codes", RuntimeError)
    values = {name: p.detach() for name, p in ema.named_parameters()}
    with pytest.raises(RuntimeError, match="layer up: weight_codes: these bytes are not codes"):
        torch.func.functional_call(model, values, x)


swa = torch.optim.swa_utils


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_model(use_buffers: bool) -> None:
    """docs/torch/lora.md: an average by an ``avg_fn`` that leaves out codes."""

    def ema(average: Any, value: Any, _: Any) -> Any:
        return average.lerp(value, 0.1) if value.is_floating_point() else value

    model, x = frozen(), torch.randn(3, 72)
    average = swa.AveragedModel(model, avg_fn=ema, use_buffers=use_buffers)
    for _ in range(4):
        average.update_parameters(model)
        with torch.no_grad():
            model.norm.weight.add_(1)
    assert torch.equal(average.module.up.weight_codes, model.up.weight_codes)
    assert average.module.up.weight_codes.data_ptr() != model.up.weight_codes.data_ptr()
    assert 1 < average.module.norm.weight[0] < 4
    average(x)
    average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # copies
    with pytest.raises(RuntimeError, match="weight_codes"):
        average.update_parameters(model)
        average(x)


def by_call(model: Any, codes: Any) -> None:
    torch.func.functional_call(model, {"up.weight_codes": codes.detach()}, torch.randn(3, 64))


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "assigned": lambda model, codes: setattr(model.up, "weight_codes", codes),
    "copy_": lambda model, codes: model.up.weight_codes.copy_(codes),
    "data": lambda model, codes: setattr(model.up.weight_codes, "data", codes),
    "data.copy_": lambda model, codes: model.up.weight_codes.data.copy_(codes),
    "numpy": lambda model, codes: setattr(
        model.up.weight_codes, "data", torch.from_numpy(codes.numpy().copy())
    ),
    "swap": lambda model, codes: torch.utils.swap_tensors(model.up.weight_codes, codes),
    "foreach": lambda model, codes: torch._foreach_copy_([model.up.weight_codes], [codes]),
    "call": by_call,
    "load": lambda model, codes: model.load_state_dict({"up.weight_codes": codes}, strict=False),
}


def of_format(block: int, convrot: bool) -> nn.Module:
    model = hot.convert(Net(64), config(forward_block=block), every)
    return hot.freeze_int8(model, convrot=convrot)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("convrot", [False, True])
def test_codes_of_another_format(way: Callable[[Any, Any], Any], convrot: bool) -> None:
    """They are refused where they are copied or where they are read, and those of the own not."""
    for block, rotated in ((16, convrot), (64, not convrot)):
        model, codes = of_format(64, convrot), of_format(block, rotated).up.weight_codes
        expected = of_format(block, rotated).up
        expected.weight_codes = codes
        values = expected.dequantized()
        try:
            with torch.no_grad():
                way(model, codes)
            model(torch.randn(3, 64))
            assert convrot and rotated  # its group is that of its codes
            if way is not by_call:
                assert torch.equal(model.up.dequantized(), values)
        except (RuntimeError, ValueError) as error:
            assert "; expected codes of " in str(error) or "must match" in str(error)
    model, other = of_format(64, convrot), of_format(64, convrot)
    expected = other.up.dequantized()
    way(model, other.up.weight_codes)
    if way is not by_call:
        assert torch.equal(model.up.dequantized(), expected)
    model(torch.randn(3, 64))


@both
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("save_codes", [False, True])
@guarded
def test_swapping_parameters_on_conversion(bits: int, save_codes: bool, assign: bool) -> None:
    """A layer that has run is loaded and cast, and its codes stay guarded."""
    model, other, x = frozen(bits=bits), frozen(bits=bits), torch.randn(3, 72)
    model(x).sum().backward()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(saved(other, save_codes), assign=assign)
        model.bfloat16().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert near(model.up, other.up, 1e-5 if bits == 8 or save_codes else 0.1)
    refused(model.up.weight_codes.zero_, "weight_codes are codes", RuntimeError)


@both
@guarded
def test_codes_stay_guarded(bits: int) -> None:
    """After copies, moves and loads."""
    model = frozen(bits=bits)
    again = pickle.loads(pickle.dumps(model.up))
    loaded = frozen(bits=bits)
    loaded.load_state_dict(saved(model, True), assign=True)
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    shared = copy.deepcopy(model).share_memory()
    assert shared.up.weight_codes.is_shared()
    others = (shared.up, copy.deepcopy(model).up, loaded.up, model.to("cpu").up, empty.up)
    for layer in (again, *others):
        with pytest.raises(RuntimeError, match="weight_codes are codes"):
            layer.weight_codes.zero_()


@both
def test_assigning_data_thaws(bits: int) -> None:
    model = frozen(dtype=torch.bfloat16, bits=bits)
    before, ids = model.up.dequantized(), id(model.up)
    with pytest.warns(UserWarning, match="frozen in codes have been written"):
        model.up.weight.data += torch.ones(96, 72)
    assert type(model.up) is hot.HotLinear and id(model.up) == ids
    assert torch.equal(model.up.weight, before + 1) and model.up.weight.dtype == torch.bfloat16
    assert not model.up.weight.requires_grad
    with pytest.warns(UserWarning, match="frozen in codes have been written"):
        model.down.weight *= 2
    hot.freeze(model, bits, lambda _, fqn: fqn == "down")
    assert [name for name, _ in model.up.named_parameters()] == ["weight", "bias"]
    with pytest.raises(ValueError, match=r"weight: shape \(2, 2\); expected \(64, 96\)"):
        model.down.weight.data = torch.zeros(2, 2)
    model.up.weight.requires_grad_(True)
    model(torch.randn(3, 72, dtype=torch.bfloat16)).sum().backward()
    assert model.up.weight.grad is not None


@pytest.mark.parametrize("of", [lambda layer: layer.weight, lambda layer: layer.weight.data])
def test_adding_to_a_name_of_the_weight_thaws(of: Callable[[Any], Any]) -> None:
    """``w = layer.weight; w += 1`` assigns nothing to the layer, and would be lost."""
    model = frozen()
    before, w = model.up.dequantized(), of(model.up)
    old = w
    with torch.no_grad(), pytest.warns(UserWarning, match="frozen in codes have been written"):
        w += 1
    w *= 2
    assert type(model.up) is hot.HotLinear and torch.equal(model.up.weight, (before + 1) * 2)
    assert torch.equal(old.clone(), model.up.weight) and old.device == model.up.weight.device


@both
def test_revert_and_copies(bits: int) -> None:
    model = frozen(bits=bits)
    hooked: list[int] = []
    model.up.register_forward_hook(lambda *_: hooked.append(1))
    x = torch.randn(9, 72)
    y = model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(frozen(bits=bits).up))):
        with pytest.raises(ValueError, match="frozen in codes"):
            again.requires_grad_(True)
    again = copy.deepcopy(model)
    assert type(again.up) is HotFrozenLinear and torch.equal(again(x), y)
    assert again.up.weight_codes.data_ptr() != model.up.weight_codes.data_ptr()
    assert "HotFrozenLinear(in_features=72, out_features=96" in repr(model)
    values = model.up.dequantized()
    plain = hot.revert(model)
    assert type(plain.up) is nn.Linear and torch.equal(plain.up.weight, values)
    assert [name for name, _ in plain.up.named_parameters()] == ["weight", "bias"]
    assert set(plain.up.__dict__) == set(nn.Linear(1, 1).__dict__)
    hooked.clear()
    plain(x)
    assert hooked


@both
def test_moves_and_casts(bits: int) -> None:
    model = frozen(bits=bits)
    codes = model.up.weight_codes.clone()
    model.to(torch.bfloat16)
    assert model.up.weight.dtype == model.up.bias.dtype == torch.bfloat16
    assert torch.equal(model.up.weight_codes, codes)
    assert model(torch.randn(3, 72, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model.float().up.weight.dtype == torch.float32
    model.to("meta")
    assert model.up.weight.is_meta and model.up.weight.device.type == "meta"
    assert model(torch.empty(3, 72, device="meta")).shape == (3, 64)
    refused(lambda: model.requires_grad_(True), "frozen in codes")


@both
def test_meta_device_first(bits: int) -> None:
    """A large model: its weights need never exist beside the codes."""
    source, error = frozen(bits=bits), 1e-5 if bits == 8 else 0.1

    def empty() -> nn.Module:
        with torch.device("meta"):
            model = Net()
        return hot.freeze(hot.convert(model, config(), every), bits)

    model = empty().to_empty(device="cpu")
    model.load_state_dict(hot.revert(copy.deepcopy(source)).state_dict())
    assert near(model.up, source.up, error) and model(torch.randn(3, 72)).isfinite().all()
    model = empty()
    model.load_state_dict(source.state_dict(), assign=True)
    assert near(model.up, source.up, error) and near(model.down, source.down, error)


# ---- state_dict ----


def saved(model: nn.Module, save_codes: bool) -> Any:
    for module in model.modules():
        if isinstance(module, HotFrozenLinear):
            module.save_codes = save_codes
    return model.state_dict()


@both
def test_plain_state_dict_both_ways(bits: int) -> None:
    model = frozen(dtype=torch.bfloat16, bits=bits)
    state = model.state_dict()
    plain = Net().bfloat16()
    assert list(state) == list(plain.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    plain.load_state_dict(state)
    assert torch.equal(plain.up.weight, model.up.dequantized())
    other = frozen(dtype=torch.bfloat16, bits=bits)
    codes = other.up.weight_codes
    other.load_state_dict(plain.state_dict())
    assert other.up.weight_codes is codes
    # Quantised again: rounded to the same codes, but for those that bf16 or INT4's steps move.
    moved = (other.up.weight_codes != model.up.weight_codes).float().mean()
    assert moved < (0.06 if bits == 8 else 0.4)
    assert near(other.up, model.up, 0.005 if bits == 8 else 0.1)
    exact, again = frozen(bits=bits), frozen(bits=bits)
    again.load_state_dict(exact.state_dict(), assign=True)
    assert again.up.weight_codes is not exact.up.weight_codes
    assert near(again.up, exact.up, 1e-6 if bits == 8 else 0.1)


@both
def test_codes_in_the_state_dict(bits: int, tmp_path: Path) -> None:
    model = frozen(bits=bits)
    state = saved(model, True)
    assert {key for key in state if key.startswith("up.")} == {"up.weight_codes", "up.bias"}
    assert state["up.weight_codes"].data_ptr() == model.up.weight_codes.data_ptr()  # no copy
    torch.save(state, tmp_path / "codes.pt")
    loaded = [torch.load(tmp_path / "codes.pt", weights_only=True)]
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "codes.safetensors")
    loaded.append(safetensors.load_file(tmp_path / "codes.safetensors"))
    safetensors.save_file(saved(model, False), tmp_path / "plain.safetensors")
    assert "up.weight" in safetensors.load_file(tmp_path / "plain.safetensors")
    for each in loaded:
        for assign in (False, True):
            other = frozen(bits=bits)
            other.load_state_dict(each, assign=assign)
            assert torch.equal(other.up.weight_codes, model.up.weight_codes)
            assert other.up.weight_codes.data_ptr() % 16 == 0
            x = torch.randn(3, 72)
            assert torch.equal(other(x), model(x))


@both
def test_wrong_state_dicts(bits: int) -> None:
    model = frozen(bits=bits)
    before = model.up.weight_codes.clone()
    state = dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"up\.weight: size mismatch: shape \(2, 2\)"):
        model.load_state_dict({**state, "up.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r"up\.weight: dtype torch\.int8; expected floating"):
        model.load_state_dict({**state, "up.weight": state["up.weight"].to(torch.int8)})
    assert torch.equal(model.up.weight_codes, before)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "up.more"'):
        model.load_state_dict({**state, "up.more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "up.weight"'):
        model.load_state_dict({**saved(model, True), "up.weight": state["up.weight"]})
    del state["up.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "up.weight"'):
        model.load_state_dict(state)
    codes = saved(frozen(forward_block=16, bits=bits), True)
    kind = "" if bits == 8 else " in INT4"
    with pytest.raises(RuntimeError, match=f"blocks of 16{kind}; expected .* blocks of 64{kind}"):
        model.load_state_dict(codes)
    other = {8: "", 4: " in INT4"}[12 - bits]
    with pytest.raises(RuntimeError, match=f"blocks of 64{other}; expected .* blocks of 64{kind}"):
        model.load_state_dict(saved(frozen(bits=12 - bits), True))
    with pytest.raises(RuntimeError, match=r"weight_codes: .* hot\.freeze\(model, bits\) before"):
        hot.convert(Net(), config(), every).load_state_dict(saved(frozen(bits=bits), True))


# ---- the rest of hotcore.torch ----


@both
def test_reports_count_frozen_layers(bits: int) -> None:
    model, x = frozen(bits=bits), torch.randn(4, 9, 72)
    other = hot.convert(copy.deepcopy(hot.revert(copy.deepcopy(model))), config(), every)
    for p in (other.up.weight, other.down.weight):
        p.requires_grad_(False)
    found, expected = paper.compute_report(model, x), paper.compute_report(other, x)
    rows = [[dataclasses.replace(row, type="") for row in r.layers] for r in (found, expected)]
    assert len(rows[0]) == 2 and rows[0] == rows[1]
    codes = model.up.weight_codes
    report = hot.memory_report(model, x)
    assert model.up.weight_codes is codes and type(model.up) is HotFrozenLinear
    assert report.after <= report.before + 16
    with (noise := hot.NoiseMonitor(model)):
        model(x).square().sum().backward()
    assert 1e-5 < noise.scalars["hot/noise_gx/up"] < 1e-3
    assert "hot/noise_gw/up" not in noise.scalars


def test_precision_schedule() -> None:
    model = frozen()
    schedule = paper.PrecisionSchedule(model, warmup=1)
    assert model.up.config.gx_bits == 8
    schedule.step()
    assert model.up.config.gx_bits == 4
    model(torch.randn(3, 72)).sum().backward()


# ---- peft, transformers ----


@pytest.fixture(scope="module")
def peft() -> Any:
    imported("transformers")
    return imported("peft")


def test_modules_to_save_that_are_frozen(peft: Any) -> None:
    """peft has wrapped other layers by then; the error says how to go on."""
    model, lora = frozen(), {"target_modules": ["up"], "modules_to_save": ["down"]}
    with pytest.raises(ValueError, match=r"modules_to_save names .* thaw that part and call get_"):
        peft.get_peft_model(model, peft.LoraConfig(**lora))
    hot.thaw(model.down)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a second time, says peft
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**lora))
    wrapped(torch.randn(9, 72)).sum().backward()
    assert model.down.modules_to_save["default"].weight.grad is not None
    assert type(model.up.base_layer) is HotFrozenLinear


ORDERS = ("peft first", "frozen first")


def with_lora(
    peft: Any, order: str, dtype: torch.dtype = torch.float32, bits: Any = 8, **lora: Any
) -> nn.Module:
    model = Net().to(dtype)
    options = peft.LoraConfig(**{"r": 4, "target_modules": ["up", "down"], **lora})
    if order == "frozen first":
        hot.freeze(hot.convert(model, config(), every), bits)
    wrapped = peft.get_peft_model(model, options)
    if order == "peft first":
        hot.convert(wrapped, config(), lambda module, name: name.endswith("base_layer"))
        hot.freeze(wrapped, bits)
    return adapted(wrapped, torch.Generator().manual_seed(5))


@both
@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
def test_lora(bits: int, peft: Any, order: str, tmp_path: Path) -> None:
    model = with_lora(peft, order, torch.bfloat16, bits)
    inner = model.base_model.model
    assert type(inner.up.base_layer) is HotFrozenLinear
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    total = sum(p.numel() for p in inner.parameters())
    assert model.get_nb_trainable_parameters()[1] == total
    x = torch.randn(9, 72, dtype=torch.bfloat16)
    before = inner.up.base_layer.weight_codes.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # the codes among them
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(inner.up.base_layer.weight_codes, before)
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    names = pytest.importorskip("safetensors.torch").load_file(file)
    assert len(names) == 4 and all("lora_" in name for name in names)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        y = compiled(x)
        assert torch.allclose(y, model(x), atol=0.05)
    y.float().sum().backward()


@both
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("safe", [False, True])
def test_merge(bits: int, peft: Any, order: str, safe: bool) -> None:
    model = with_lora(peft, order, bits=bits)
    inner = model.base_model.model
    expected = {
        name: layer.base_layer.dequantized() + layer.get_delta_weight("default")
        for name, layer in (("up", inner.up), ("down", inner.down))
    }
    with pytest.warns(UserWarning, match="frozen in codes have been written"):
        merged = model.merge_and_unload(safe_merge=safe)
    for name, weight in expected.items():
        layer = getattr(merged, name)
        assert type(layer) is hot.HotLinear
        assert torch.allclose(layer.weight, weight.detach(), atol=1e-6)
    assert list(merged.state_dict()) == list(Net().state_dict())
    assert type(hot.revert(merged).up) is nn.Linear


def test_unload_without_merging(peft: Any) -> None:
    model = with_lora(peft, "peft first")
    codes = model.base_model.model.up.base_layer.weight_codes
    plain = model.unload()
    assert type(plain.up) is HotFrozenLinear and plain.up.weight_codes is codes


def test_dora_reads_the_weight(peft: Any) -> None:
    model = with_lora(peft, "frozen first", use_dora=True)
    model(torch.randn(9, 72)).square().mean().backward()
    assert sum(p.grad is not None for p in model.parameters()) == 6
    assert type(model.base_model.model.up.base_layer) is HotFrozenLinear


@both
def test_conv1d(bits: Any, peft: Any) -> None:
    model = causal("GPT2", n_layer=1)
    names = list(model.state_dict())
    hot.convert(model, config("plain"))
    assert len(hot.freeze(model, bits).freeze_report.layers) == 4
    layer = model.transformer.h[0].mlp.c_fc
    assert type(layer).__name__ == "HotFrozenConv1D" and layer.weight.shape == (64, 256)
    assert layer.weight.stride() == layer.dequantized().stride()
    assert repr(layer).startswith("HotFrozenConv1D(nf=256, nx=64")
    other = copy.deepcopy(model)
    assert hot.thaw(other) == 4
    assert list(model.state_dict()) == names
    tokens = torch.randint(96, (2, 32))
    losses, grads = [], []
    for each in (model, other):
        torch.manual_seed(2)
        loss = each(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        grads.append(each.transformer.wte.weight.grad)
    assert losses[0] == losses[1] and torch.equal(*grads)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    wrapped = peft.get_peft_model(model, lora)
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = wrapped.merge_and_unload()
    assert torch.equal(*(m.transformer.h[0].mlp.c_fc.weight for m in (merged, other)))
    assert type(hot.revert(merged).transformer.h[0].mlp.c_proj).__name__ == "Conv1D"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_full_state_dict_of_torch_s_checkpoints(bits: int) -> None:
    """torch puts the model's own Parameters beside the values that it loads."""
    models = [hot.convert(nn.Sequential(nn.Linear(64, 64)), filter_fn=every) for _ in range(2)]
    for model in models:
        hot.freeze(model, bits, progress=False)
    options = checkpoints.StateDictOptions(full_state_dict=True)
    state = checkpoints.get_model_state_dict(models[0], options=options)
    checkpoints.set_model_state_dict(models[1], state, options=options)
    weights = [model[0].weight for model in models]
    assert (weights[1] - weights[0]).norm() < 0.1 * weights[0].norm()
