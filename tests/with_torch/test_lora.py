"""LoRA through peft: HOT on the frozen base weights, plain adapters, and Conv1D of transformers."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from support import cosine, saved_tensors, storage_bytes, without_broken_torchvision

with without_broken_torchvision():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from transformers.pytorch_utils import Conv1D
import hotcore.torch as hot
from hotcore.torch.layers.conv1d import HotConv1D
from torch import nn
from torch_graphs import Graphs, causal

ORDERS = ("peft first", "HOT first")


pytestmark = pytest.mark.usefixtures("seeded")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def with_lora(model: nn.Module, order: str | None, config: Any = "default") -> nn.Module:
    """``model`` with adapters, and with HOT unless ``order`` is None; B is not zero."""
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["up", "down"])
    if order == "HOT first":
        hot.convert(model, config)
    wrapped = peft.get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator).mul_(0.1)
    if order == "peft first":
        hot.convert(wrapped, config)
    return wrapped


def adapter_grads(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", ORDERS)
def test_only_base_layers_are_converted(order: str) -> None:
    model = with_lora(Model(), order)
    kinds = {name: type(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(kinds) == 4 * 3 + 1
    for name, kind in kinds.items():
        assert (kind is hot.HotLinear) == name.endswith("base_layer"), name
    if order == "peft first":
        report = hot.convert(with_lora(Model(), None)).hot_report
        assert {row.bytes_per_value for row in report.converted} == {0.0}
        reasons = {row.reason for row in report.skipped}
        assert reasons == {"an adapter of peft", "the output head"}
        assert "nothing (weight frozen)" in str(report)


def test_the_report_of_a_deep_model_is_short() -> None:
    """The number of lines is the same for 64 blocks and for 2."""
    model = Model()
    model.blocks = nn.Sequential(*(Block(64) for _ in range(64)))
    report = hot.convert(with_lora(model, None)).hot_report
    lines = str(report).splitlines()
    assert len(report.layers) == 64 * 6 + 1 and len(lines) == 8, lines
    counts = "\n128 of 129 layers run HOT, default\n256 layers of peft's adapters stay plain\n"
    assert counts in str(report)
    assert "base_model.model.blocks.*.up.base_layer (64)" in lines[1]


@pytest.mark.parametrize("order", ORDERS)
def test_adapter_gradients(order: str) -> None:
    base = Model()
    x = torch.randn(6, 32, 64)
    exact = adapter_grads(with_lora(copy.deepcopy(base), None), x)
    model = with_lora(copy.deepcopy(base), order)
    got = adapter_grads(model, x)
    assert got.keys() == exact.keys() or order == "HOT first"
    assert all("lora_" in name for name in got) and len(got) == 8
    for name, gradient in got.items():
        last = ".1.down." in name
        # After the last adapted layer nothing is quantised: the same bits.
        assert torch.equal(gradient, exact[name]) == last, name
        # g_x in INT8 of up to three layers, each within about a hundredth of its norm.
        assert (gradient - exact[name]).norm() < 0.03 * exact[name].norm(), name


@pytest.mark.parametrize("order", ORDERS)
def test_frozen_base_weights_save_nothing(order: str) -> None:
    base = Model()
    x = torch.randn(16, 64, 64)
    totals = {}
    for kind in (None, order):
        model = with_lora(copy.deepcopy(base), kind)
        with saved_tensors(leaves=True) as kept:
            model(x)
        totals[kind] = sum(storage_bytes(kept, model.parameters()).values())
    # Plain LoRA keeps nothing of x for the frozen weights either. HOT adds a seed for each layer
    # but the first, which has nothing to differentiate.
    assert totals[order] == totals[None] + 3 * 8
    # Where base weights train (no adapters), the same layers do keep x, compressed.
    model = Model()
    hot.convert(model)
    with saved_tensors(leaves=True) as kept:
        model(x * 1)
    sizes = storage_bytes(kept, model.parameters())
    compressed = [size for size in sizes.values() if size > 8]
    inputs = 2 * (64 + 128) * 16 * 64
    assert 0.5 * inputs < sum(sorted(compressed)[:4]) < 0.54 * inputs


@pytest.mark.parametrize("order", ORDERS)
def test_merge_and_revert(order: str) -> None:
    base = Model()
    x = torch.randn(3, 64)
    plain = with_lora(copy.deepcopy(base), None)
    model = with_lora(copy.deepcopy(base), order)
    assert torch.equal(model(x), plain(x))
    merged = model.merge_and_unload()
    assert torch.equal(merged(x), plain.merge_and_unload()(x))
    assert type(merged.blocks[0].up) is hot.HotLinear
    assert type(hot.revert(merged).blocks[0].up) is nn.Linear


def test_overrides_reach_base_layers() -> None:
    model = with_lora(Model(), None)
    report = hot.convert(model, overrides={"*.up.base_layer": {"gx_bits": 4}}).hot_report
    bits = {row.name.split(".")[-2]: row.config.gx_bits for row in report.converted}
    assert bits == {"up": 4, "down": 8}


@pytest.mark.parametrize("shape", [(40, 64), (2, 20, 64), (64,)])
def test_conv1d(shape: tuple[int, ...]) -> None:
    plain = Conv1D(96, 64)
    module = HotConv1D.from_plain(copy.deepcopy(plain))
    assert isinstance(module, Conv1D)
    x = torch.randn(shape, requires_grad=True)
    y = module(x)
    assert torch.equal(y, plain(x)) and torch.equal(module.eval()(x), plain(x))
    module.train()
    # The linear layer with the transposed weight.
    linear = hot.HotLinear(64, 96)
    linear.load_state_dict({"weight": plain.weight.T, "bias": plain.bias})
    gy = torch.randn_like(y)
    results = []
    for layer in (module, linear):
        torch.manual_seed(5)
        results.append(torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), gy))
    (gx, gw, gb), expected = results
    assert torch.equal(gx, expected[0]) and torch.equal(gw, expected[1].T)
    assert torch.equal(gb, expected[2])
    module(x).sum().backward()
    assert module.weight.grad.stride() == module.weight.stride()


def test_gpt2() -> None:
    model = causal("GPT2")
    tokens = torch.randint(96, (2, 32))
    exact_loss = model(tokens, labels=tokens).loss
    exact_loss.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    report = hot.convert(model).hot_report
    assert [row.kind for row in report.converted] == ["Conv1D"] * 8
    assert [(row.name, row.reason) for row in report.skipped] == [("lm_head", "the output head")]
    loss = model(tokens, labels=tokens).loss
    assert torch.equal(loss, exact_loss)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert cosine(parameter.grad.numpy(), exact[name].numpy()) > 0.97, name
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert type(again.transformer.h[0].mlp.c_fc) is HotConv1D
    assert torch.equal(again(tokens, labels=tokens).loss, loss)
    assert "HotConv1D(nf=192, nx=64, config=default)" in repr(model)
    hot.revert(model)
    assert type(model.transformer.h[0].mlp.c_fc) is Conv1D


@pytest.mark.parametrize("order", ORDERS)
def test_gpt2_with_lora(order: str) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = causal("GPT2")
    if order == "HOT first":
        hot.convert(model)
    model = peft.get_peft_model(model, lora)
    if order == "peft first":
        hot.convert(model)
    base = model.base_model.model.transformer.h[0].attn.c_attn.base_layer
    assert type(base) is HotConv1D and not base.weight.requires_grad
    tokens = torch.randint(96, (2, 32))
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == 8 and all("lora_" in name for name in grads)


def test_wrong_module() -> None:
    with pytest.raises(TypeError, match="module: expected a plain Conv1D, got Linear"):
        HotConv1D.from_plain(nn.Linear(4, 4))


def llama(recipe: str | None, order: str = "peft first", dtype: Any = torch.bfloat16) -> Any:
    """A Llama of one block on INT4 codes, in bf16, its adapters of ``dtype``, and the block."""
    model = causal("Llama", num_hidden_layers=1).bfloat16()
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    if order == "HOT first":
        hot.freeze(hot.convert(model, "default", forward="int8"), 4)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=dtype == torch.float32)
    if order == "peft first":
        hot.freeze(hot.convert(model, "default", forward="int8"), 4)
    if recipe is not None:
        hot.convert(model, recipe, filter_fn=lambda _, name: ".lora_A." in name)
    return model, model.base_model.model.model.layers[0]


def called(model: Any, block: nn.Module) -> Any:
    rotary = model.base_model.model.model.rotary_emb
    tables = rotary(torch.zeros(1, dtype=torch.bfloat16), torch.arange(64)[None])
    return lambda x: block(2 * x, position_embeddings=tables, use_cache=False)


def kept_sizes(model: Any, block: nn.Module) -> Counter[int]:
    """Bytes of the large tensors that a call keeps, and their number."""
    x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as tensors:
        called(model, block)(x)
    sizes = storage_bytes(tensors, model.parameters()).values()
    return Counter(size for size in sizes if size > 4000)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_keep_their_x_in_codes(dtype: torch.dtype, order: str) -> None:
    """x of q, k, v, o, gate, up and down in 4 and 8 bits; plain adapters share it in bf16."""
    narrow, wide = 2 * 64 * 64, 2 * 64 * 128
    kept = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        for recipe in (None, "default", "accurate"):
            model, block = llama(recipe, order, dtype)
            with peft.helpers.disable_input_dtype_casting(model):
                kept[recipe] = kept_sizes(model, block)
        # peft's cast of x to fp32 makes a tensor for each layer. o's x is kept by attention, too.
        copies = kept_sizes(*llama(None, order, dtype)) - kept[None]
    assert copies == (Counter({2 * narrow: 4}) if dtype == torch.float32 else Counter())
    for recipe, share, scales in (("default", 17 / 32, 0), ("accurate", 1, 4)):
        codes = Counter({share * narrow + scales * 64: 6, share * wide + scales * 128: 1})
        assert kept[recipe] - kept[None] == codes
        assert kept[None] - kept[recipe] == Counter({2 * narrow: 2, 2 * wide: 1})


def test_gradients_of_adapters_whose_x_is_kept_in_codes() -> None:
    """Eager, in a graph that compresses x once, and in one that recomputes it."""
    torch.manual_seed(3)
    x, expected = torch.randn(2, 64, 64, dtype=torch.bfloat16), {}
    for recipe in (None, "default"):
        torch.manual_seed(4)
        model, block = llama(recipe)
        called(model, block)(x.requires_grad_()).float().square().mean().backward()
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                assert parameter.grad is None
            elif recipe is None:
                expected[name] = parameter.grad
            else:
                near = cosine(parameter.grad.float().numpy(), expected[name].float().numpy())
                assert near > 0.97, name
    graphs = Graphs().run(called(model, block), x)
    assert graphs.count("forward", "compress") == 4, graphs.calls
    hot.recompute(block)
    graphs = Graphs().run(called(model, block), x)
    assert graphs.count("backward", "compress_activation") == 4, graphs.calls
    assert not graphs.count("forward", "compress")
