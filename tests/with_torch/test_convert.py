"""convert and revert: which layers, in place, with a report."""

import collections
import copy
import dataclasses
import functools
import gc
import json
import pickle
import re
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import hotcore
import hotcore.torch as hot
import models
import pytest
import torch
from hotcore.config import HotConfig
from hotcore.torch.conversion.selection import HEAD_NAMES, MIN_FEATURES
from support import refused
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch_graphs import every


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.small = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.qkv(x)[..., : x.shape[-1]]) + self.small(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, width: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names(report: Any) -> list[str]:
    return [layer.name for layer in report.converted]


def reasons_of(report: Any) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.skipped}


CONVERTED = ["blocks.0.qkv", "blocks.0.proj", "blocks.1.qkv", "blocks.1.proj"]


def test_default_filter() -> None:
    model = Model()
    assert hot.convert(model, "fast") is model
    report = model.hot_report
    assert names(report) == CONVERTED
    few = dict.fromkeys(("blocks.0.small", "blocks.1.small"), f"fewer than {MIN_FEATURES} features")
    assert reasons_of(report) == {**few, "head": "the output head"}
    assert type(model.blocks[0].qkv) is hot.HotLinear
    assert model.blocks[0].qkv.config == HotConfig.recipe("fast")
    assert type(model.head) is nn.Linear
    model(torch.randint(50, (2, 20))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_and_keys_stay() -> None:
    model = Model()
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    hot.convert(model)
    assert list(model.state_dict()) == state
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    model(torch.randint(50, (2, 20))).square().sum().backward()
    optimizer.step()
    weight = "blocks.0.qkv.weight"
    assert not torch.equal(model.state_dict()[weight], before[weight])
    model.load_state_dict(before)
    Model().load_state_dict(model.state_dict())


def test_revert() -> None:
    model = Model()
    types = [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    hot.convert(model)
    assert hot.revert(model) is model
    assert [type(module) for module in model.modules()] == types
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with pytest.warns(UserWarning, match="revert: model: no layer of it is converted"):
        assert hot.revert(model) is model
    assert hot.convert(model).hot_report.converted
    layer = nn.Linear(64, 64)  # the root itself
    content = set(vars(layer))
    assert hot.convert(layer) is layer and type(layer) is hot.HotLinear
    assert "(root)" in str(layer.hot_report)
    assert hot.revert(layer) is layer and type(layer) is nn.Linear and set(vars(layer)) == content


def test_a_second_call_counts_the_layers_of_the_first() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    hot.convert(model, filter_fn=lambda _, name: name == "0")
    report = hot.convert(model, "accurate", filter_fn=lambda _, name: name == "2").hot_report
    assert [(row.name, row.reason) for row in report.skipped] == [
        ("0", "HOT by an earlier call"), ("1", "left out by filter_fn")
    ]  # fmt: skip
    assert "1 of 3 layers run HOT, accurate; 1 more by an earlier call" in str(report)


def test_filter_fn() -> None:
    model = Model()
    seen: list[str] = []

    def first_block(module: nn.Module, fqn: str) -> bool:
        assert isinstance(module, nn.Linear)
        seen.append(fqn)
        return fqn.startswith("blocks.0") or fqn == "head"

    report = hot.convert(model, filter_fn=first_block).hot_report
    # A filter replaces the default rules: the head and the small layer are converted.
    assert names(report) == ["blocks.0.qkv", "blocks.0.proj", "blocks.0.small", "head"]
    assert {layer.reason for layer in report.skipped} == {"left out by filter_fn"}
    assert len(seen) == 7
    model(torch.randint(50, (2, 20))).sum().backward()


def test_filter_that_matches_nothing() -> None:
    """The error lists the layers, and those that could be converted."""
    with pytest.raises(
        ValueError,
        match=r"(?s)filter_fn matched no .* \(2\) +Linear +64 -> 192 +stays plain: left out by .*"
        r"\na filter_fn .* could have converted: blocks.\*.qkv \(2\), .*, head$",
    ):
        hot.convert(Model(), filter_fn=lambda module, fqn: False)
    with pytest.raises(ValueError, match=r"no layer can .*; its modules: ReLU, Sequential$"):
        hot.convert(nn.Sequential(nn.ReLU()))
    few = rf"0 +Linear +4 -> 4 .* than {MIN_FEATURES} features\na filter_fn .* converted: 0$"
    refused(lambda: hot.convert(nn.Sequential(nn.Linear(4, 4))), few)
    double = r"0 +Linear +64 -> 64 +stays plain: its weight is float64$"  # for any filter
    refused(lambda: hot.convert(nn.Sequential(nn.Linear(64, 64)).double()), double)
    # The message stays readable for any number of layers.
    many = nn.ModuleList(nn.ModuleList(Model() for _ in range(10)) for _ in range(10))
    with pytest.raises(ValueError, match=r"\*.\*.blocks.\*.qkv \(200\) ") as caught:
        hot.convert(many, filter_fn=lambda module, fqn: False)
    assert len(str(caught.value)) < 700


def test_twice_is_refused() -> None:
    model = hot.convert(Model(), "fast", filter_fn=lambda module, fqn: fqn.startswith("blocks.0"))
    modules = list(model.modules())
    with pytest.raises(ValueError, match=r"converted \(blocks.0.qkv, blocks.0.proj.*revert"):
        hot.convert(model, "default")
    assert list(model.modules()) == modules
    # The rest of a model is another matter.
    report = hot.convert(model, filter_fn=lambda module, fqn: fqn == "blocks.1.qkv").hot_report
    assert names(report) == ["blocks.1.qkv"]
    assert model.blocks[0].qkv.config == HotConfig.recipe("fast")


def test_weight_tied_to_an_embedding() -> None:
    head = reasons_of(hot.convert(Model(tied=True)).hot_report)["head"]
    assert head in ("the output head", "its weight is an embedding's")
    model = Model(tied=True)
    model.final = nn.Linear(64, 64)  # the head is no longer the last layer
    report = hot.convert(model).hot_report
    assert reasons_of(report)["head"] == "its weight is an embedding's"
    assert model.head.weight is model.embed.weight and "final" in names(report)


@pytest.mark.parametrize("name", sorted(HEAD_NAMES))
def test_head_names(name: str) -> None:
    for build in (lambda: nn.Linear(64, 64), lambda: nn.Sequential(nn.ReLU(), nn.Linear(64, 64))):
        model = nn.Module()
        model.body = nn.Linear(64, 64)
        setattr(model, name, build())
        assert names(hot.convert(model).hot_report) == ["body"]
    # The same name earlier in the model is no head.
    model = nn.Module()
    setattr(model, name, nn.Linear(64, 64))
    model.body = nn.Linear(64, 64)
    assert len(hot.convert(model).hot_report.converted) == 2


def test_subclasses_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    class Mine(nn.MultiheadAttention):
        pass

    layers = {"special": Special(64, 64), "attention": Mine(64, 4), "plain": nn.Linear(64, 64)}
    for filter_fn in (None, lambda module, fqn: True):
        model = nn.ModuleDict(copy.deepcopy(layers))
        report = hot.convert(model, filter_fn=filter_fn).hot_report
        assert names(report) == ["plain"]
        assert reasons_of(report) == {  # without the attention's own out_proj
            "special": "a subclass of Linear (Special)",
            "attention": "a subclass of MultiheadAttention (Mine)",
        }


def test_shared_module_is_replaced_everywhere() -> None:
    model = nn.Sequential(shared := nn.Linear(64, 64), nn.ReLU(), shared)
    assert len(hot.convert(model).hot_report.converted) == 1
    assert model[0] is model[2] and type(model[0]) is hot.HotLinear
    hot.revert(model)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


def test_report_prints_as_a_table() -> None:
    model = Model()
    model.blocks[0].qkv.weight.requires_grad_(False)
    report = hot.convert(model, "default", overrides={"*.0.proj": "fast"}).hot_report
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "kind", "in", "->", "out", "x", "is", "kept", "in"]
    for pattern in (
        r"blocks\.0\.qkv +Linear +64 -> 192 +nothing \(weight frozen\)",
        r"blocks\.0\.proj +Linear +64 -> 64 +0\.50 bytes .* fast",
        r"blocks\.1\.qkv +Linear +64 -> 192 +0\.53 bytes a value \(fp32 / 7\.5\)",
        r"blocks\.\*\.small \(2\) +Linear +64 -> 8 +stays plain: fewer than \d+ features",
        r"head +Linear +64 -> 50 +stays plain: the output head",
    ):
        assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1, pattern
    ends = [re.search(r" -> \d+", line).end() for line in lines[1:7]]
    assert len(set(ends)) == 1
    assert lines[7] == "4 of 7 layers run HOT, default"
    held = 2 * sum(64 * outs + outs for outs in (192, 64))
    share = held / sum(p.numel() for p in model.parameters())
    assert lines[8] == f"they hold {share:.1%} of the model's parameters"
    assert f"fewer than {MIN_FEATURES}" in lines[9]  # the rule
    assert len(lines) == 10
    every = report.table(grouped=False).splitlines()
    assert [line.split()[0] for line in every[1:8]] == [
        *("blocks.0.qkv", "blocks.0.proj", "blocks.0.small"),
        *("blocks.1.qkv", "blocks.1.proj", "blocks.1.small", "head"),
    ]
    filtered = hot.convert(Model(), filter_fn=lambda module, fqn: fqn != "head").hot_report
    assert "default filter" not in str(filtered)
    # Nor if it left nothing out: layers plain by overrides, or not convertible.
    body = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64).double())
    assert "default filter" not in str(hot.convert(body, overrides={"0": None}).hot_report)


def test_fields_as_arguments() -> None:
    """They replace the configuration's, for all layers; overrides replace more of them."""
    config = HotConfig.recipe("accurate", gx_bits=4)
    for base in ("fast", config):
        model = hot.convert(Model(), base, overrides={"*.proj": {"rank": 8}}, forward="int8")
        expected = dataclasses.replace(hotcore.config.as_config(base), forward="int8")
        assert hot.report(model).config == model.blocks[0].qkv.config == expected
        assert model.blocks[0].proj.config == dataclasses.replace(expected, rank=8)
    no_filter = "filter_fn: .* function, got dict; did you mean overrides"
    for fields, error, message in (
        ({"config": 3}, TypeError, "config: "),
        ({"config": "quick"}, ValueError, "config: 'quick'"),
        ({"filter_fn": {"0": "fast"}}, TypeError, no_filter),
        ({"forwrd": "int8"}, TypeError, "^convert: unexpected argument 'forwrd'; .* 'forward'"),
        ({"filter": every}, TypeError, "convert: unexpected argument 'filter'; .*'filter_fn'"),
        ({"forward": "int9"}, ValueError, "^forward: 'int9' is not one of 'plain', 'int8'"),
    ):
        with pytest.raises(error, match=message):
            hot.convert(Model(), **fields)


def test_overrides() -> None:
    model = Model()
    custom = HotConfig(gx_rounding="nearest")
    # "*.qkv" is on top of the base configuration.
    overrides = {"blocks.*": "fast", "*.qkv": {"gx_bits": 4}, "blocks.1.proj": custom}
    report = hot.convert(model, "accurate", overrides=overrides).hot_report
    configs = {layer.name: layer.config for layer in report.converted}
    int4 = HotConfig.recipe("accurate", gx_bits=4)
    assert configs == dict(
        zip(CONVERTED, (int4, HotConfig.recipe("fast"), int4, custom), strict=True)
    )
    for name, config in configs.items():
        assert model.get_submodule(name).config == config
    assert report.config == HotConfig.recipe("accurate")


def test_overrides_leave_out() -> None:
    model = Model()
    overrides = {"*.proj": None, "blocks.1.*": "fast"}  # the last counts
    report = hot.convert(model, overrides=overrides).hot_report
    assert names(report) == ["blocks.0.qkv", *CONVERTED[2:]]
    skipped = reasons_of(report)
    assert skipped["blocks.0.proj"] == "left out by overrides"
    assert skipped["head"] == "the output head"  # what the rule says comes first
    with pytest.raises(ValueError, match="(?s)no layer can be converted.*left out by over"):
        hot.convert(Model(), overrides={"blocks.*": None})
    # Layers that are converted already may be left out of the next call.
    twin = hot.convert(Model(), overrides={"blocks.0.*": None})
    more = hot.convert(twin, "fast", overrides={"blocks.1.*": None}).hot_report
    assert names(more) == CONVERTED[:2]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"blocks.0.qvk": "fast"}, ValueError, "'blocks.0.qvk' matches no layer; near it: .*0.qkv"),
        ({"zz": "fast"}, ValueError, "'zz' matches no layer; layers: blocks.0.qkv, blocks.0.proj"),
        ({"head": "fast"}, ValueError, r"only layers that stay plain: head \(the output head\)"),
        ({"*.qkv": "quick"}, ValueError, r"overrides\['\*.qkv'\]: 'quick' is not one of"),
        ({"*.qkv": 3}, TypeError, r"overrides\['\*.qkv'\]: expected a HotConfig or a recipe"),
        ({"*.qkv": {"bits": 4}}, ValueError, r"overrides\['\*.qkv'\]: HotConfig has no field '?bi"),
        ({"*.qkv": {"gx_bits": 5}}, ValueError, r"overrides\['\*.qkv'\]: gx_bits: expected 4"),
        (["*.qkv"], TypeError, r"overrides: expected a mapping of .*, got \['\*.qkv'\]"),
        ({0: "fast"}, TypeError, r"overrides: expected a mapping of .*, got {0: 'fast'}"),
    ],
)
def test_bad_overrides(overrides: Any, error: type[Exception], message: str) -> None:
    model = Model()
    refused(lambda: hot.convert(model, overrides=overrides), message, error)
    assert not any(isinstance(module, hot.HotLinear) for module in model.modules())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.down = nn.Conv2d(64, 96, 1, stride=2)
        self.depthwise = nn.Conv2d(96, 96, 3, padding=1, groups=96)
        self.grouped = nn.Conv2d(96, 96, 3, padding=1, groups=4)
        self.narrow = nn.Conv2d(96, 32, 1)
        self.fc = nn.Linear(32, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.conv(self.stem(x).relu()).relu()).relu()
        x = self.narrow(self.grouped(self.depthwise(x)))
        return self.fc(x.mean((2, 3)))


def test_convolutions() -> None:
    model = ConvNet()
    types = [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    report = hot.convert(model).hot_report
    kinds = {layer.name: layer.kind for layer in report.converted}
    assert kinds == {"conv": "Conv2d 3x3", "down": "Conv2d 1x1", "grouped": "Conv2d 3x3"}
    few = dict.fromkeys(("depthwise", "narrow"), f"fewer than {MIN_FEATURES} features")
    reasons = {"stem": "the first convolution", **few, "fc": "the output head"}
    assert reasons_of(report) == reasons
    # INT4; with a stride, a 1x1 kernel meets a quarter of the pixels only.
    assert [round(layer.bytes_per_value, 2) for layer in report.converted] == [0.53, 0.13, 0.53]
    assert re.search(r"conv +Conv2d 3x3 +64 -> 64 +0\.53 bytes a value.*torch's own", str(report))
    assert type(model.conv) is hot.HotConv2d
    y = model(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    hot.revert(model)
    assert [type(module) for module in model.modules()] == types
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("default", "its products stay torch's own"),
        ("paper", "x is kept whole, in int4: a low rank is for 1x1 kernels"),
    ],
)
def test_the_report_says_what_a_kernel_does_not_get(config: str, said: str) -> None:
    layers = (nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 1, groups=2), nn.Conv2d(64, 64, 1))
    report = hot.convert(nn.Sequential(*layers), config, lambda module, name: True).hot_report
    assert [said in layer.note for layer in report.converted] == [True, True, False]


def test_on_cuda_1x1_kernels_of_full_rank_keep_torch_s_products() -> None:
    for config, bytes_kept, said in (
        ("default", 0.53, "its products stay torch's own"),
        (HotConfig(forward="int8"), 0.53, "its products of backward stay torch's own"),
        ("fast", 0.13, ""),
    ):
        model = nn.Sequential(nn.Conv2d(64, 64, 1, 2))
        report = hot.convert(model, config, lambda *_: True, device="cuda", slower=True).hot_report
        (layer,) = report.converted
        assert round(layer.bytes_per_value, 2) == bytes_kept
        assert layer.note.startswith(said or "slower on CUDA: quantising its pixels")


def test_parametrised_after_convert() -> None:
    model = hot.convert(Model())
    nn.utils.parametrizations.weight_norm(model.blocks[0].qkv)
    refused(lambda: hot.revert(model), "blocks.0.qkv is now a ParametrizedHotLinear; undo")
    nn.utils.parametrize.remove_parametrizations(model.blocks[0].qkv, "weight")
    assert type(hot.revert(model).blocks[0].qkv) is nn.Linear


def test_data_parallel_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match="DataParallel is not supported; use.*Distributed"):
        hot.convert(nn.DataParallel(model))
    hot.convert(model)
    # nn.parallel.replicate calls this on every module (and needs GPUs itself).
    with pytest.raises(NotImplementedError, match="HotLinear.*DataParallel is not supported"):
        for module in model.modules():
            module._replicate_for_data_parallel()


# ---- What the report says of a model that HOT reaches in part ----


class Past(nn.Module):
    """A layer that holds a weight and is not called, like those of timm's swinv2, beit, eva02."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)
        self.proj = nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.zeros(192))
        self.separate = separate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.separate:
            y = self.qkv(x) + self.bias
        else:
            y = nn.functional.linear(input=x, weight=self.qkv.weight, bias=self.bias)
        return self.proj(y[..., :64])


class OnlyPast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.proj = nn.Linear(64, 64)
        nn.init.xavier_uniform_(self.proj.weight)  # no use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj((x @ self.q.weight.t()) * torch.matmul(x, self.k.weight))


def test_layers_whose_weight_is_used_without_them() -> None:
    x = torch.randn(2, 8, 64)
    never = "never called: its weight is multiplied without it, as in F.linear(x, layer.weight)"
    # The code of their parents shows it.
    report = hot.convert(OnlyPast()).hot_report
    assert (names(report), reasons_of(report)) == (["proj"], {"q": never, "k": never})
    # The code calls it in a branch: only a forward pass can tell which.
    report = hot.convert(Past()).hot_report
    assert names(report) == ["qkv", "proj"]
    assert "may be used without being called: qkv; convert(..., inputs=...)" in str(report)
    model = Past()
    report = hot.convert(model, inputs=x).hot_report
    assert reasons_of(report) == {"qkv": never}
    assert type(model.qkv) is nn.Linear and "may be used" not in str(report)
    report = hot.convert(Past(separate=True), inputs=x).hot_report
    assert names(report) == ["qkv", "proj"]
    assert not [layer.note for layer in report.converted if layer.note]
    # Both, in a way that the parent's code does not show, and not at all.
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)})
    model.forward = lambda x: model["used"](x)
    used = model["used"]
    model.register_forward_hook(lambda m, args, y: y + nn.functional.linear(args[0], used.weight))
    notes = {layer.name: layer.note for layer in hot.convert(model, inputs=x).hot_report.converted}
    plain = "its weight is also multiplied without it, plain"
    assert notes == {"used": plain, "unused": "not called with these inputs"}


@pytest.mark.parametrize(
    ("name", "part"), [("swinv2_tiny_window8_256", "qkv"), ("beit_base_patch16_224", "qkv")]
)
def test_timms_models_that_use_weights_without_layers(name: str, part: str) -> None:
    models.mend_torchvision()
    timm = pytest.importorskip("timm")
    sizes = {"depths": (1, 1), "num_heads": (2, 4)} if "swin" in name else {"depth": 2}
    pixels = {"swinv2_tiny_window8_256": 64, "beit_base_patch16_224": 32}[name]
    more = {"window_size": 4} if "swin" in name else {"patch_size": 8, "num_heads": 2}
    more |= {"img_size": pixels, "embed_dim": 64, "num_classes": 10}
    model = timm.create_model(name, **sizes, **more).train()
    x = torch.randn(2, 3, pixels, pixels)
    blind = hot.convert(copy.deepcopy(model)).hot_report
    report = hot.convert(model, inputs=x).hot_report
    called: set[str] = set()
    for fqn, module in model.named_modules():
        if isinstance(module, hot.HotLinear):
            module.register_forward_hook(lambda *_, fqn=fqn: called.add(fqn))
    model(x).sum().backward()
    assert {layer.name for layer in report.converted if not layer.note} == called
    skipped = {layer.name for layer in report.skipped if layer.reason.startswith("never called")}
    assert skipped and all(fqn.endswith(part) for fqn in skipped)
    # Without inputs they are left out, or said to be in doubt.
    sure = {layer.name for layer in blind.skipped if layer.reason.startswith("never called")}
    assert sure == skipped or all(fqn in str(blind) for fqn in skipped)


def test_weights_without_memory_of_values_stay_plain() -> None:
    """torchao's quantised weights, whose first backward would end in an unknown operator."""
    weight = torch.randn(64, 64)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[0].weight = nn.Parameter(TwoTensor(weight, weight))
    model[1].weight = nn.Parameter(weight.to_sparse_csr())
    report = hot.convert(model, filter_fn=every).hot_report
    assert [row.name for row in report.converted] == ["2"]
    reasons = [row.reason for row in report.skipped]
    assert "TwoTensor" in reasons[0] and "torch.sparse_csr" in reasons[1]


def test_hooks_of_load_state_dict_follow_the_layer() -> None:
    """torch keeps a weak reference to the module that they were registered on."""
    model, found = nn.Sequential(nn.Linear(64, 64)), []
    model[0].register_load_state_dict_pre_hook(lambda module, *_: found.append(module))
    for change in (functools.partial(hot.convert, filter_fn=every), hot.revert):
        change(model)
        gc.collect()
        model.load_state_dict(model.state_dict())
        assert found.pop() is model[0]


def test_a_dry_run_leaves_no_trace() -> None:
    model = ConvNet()
    model.norm = nn.BatchNorm2d(3)
    forward = model.forward
    model.forward = lambda x: forward(model.norm(x))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    hot.convert(model, inputs=torch.randn(2, 3, 32, 32, generator=torch.Generator()))
    assert torch.equal(torch.rand(()), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_dry_run_compiles_nothing() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    tokens = torch.randint(50, (2, 20))
    whole = torch.compile(Model(), backend=backend)
    blocks = Model()
    for block in blocks.blocks:
        block.compile(backend=backend)
    for model in (whole, blocks):
        report = hot.convert(model, inputs=tokens).hot_report
        assert len(report.converted) == 4 and not any(layer.note for layer in report.converted)
    assert not graphs
    blocks(tokens).sum().backward()
    assert graphs


def test_shares_of_parameters_and_multiply_adds() -> None:
    model = Model()
    every = sum(p.numel() for p in model.parameters())
    report = hot.convert(model, inputs=torch.randint(50, (2, 20))).hot_report
    tokens, block = 40, 64 * 192 + 64 * 64
    assert report.parameter_count == every
    assert report.parameter_share == 2 * (block + 192 + 64) / every
    total = tokens * (2 * (block + 64 * 8) + 64 * 50)
    assert (report.macs, report.mac_share) == (total, tokens * 2 * block / total)
    share = f"{report.parameter_share:.1%} of the model's parameters and do {report.mac_share:.1%}"
    assert f"they hold {share} of its forward pass's multiply-adds" in str(report)
    assert report.converted[0].macs == tokens * 64 * 192
    assert hot.convert(Model()).hot_report.mac_share is None


def test_inputs_as_the_model_takes_them() -> None:
    tokens = torch.randint(50, (2, 20))
    for inputs in (tokens, (tokens,), {"tokens": tokens}):
        assert hot.convert(Model(), inputs=inputs).hot_report.mac_share > 0.8
    report = hot.convert(ConvNet(), inputs=torch.randn(2, 3, 32, 32)).hot_report
    macs = {layer.name: layer.macs for layer in report.layers}
    assert macs["stem"] == 2 * 64 * 16 * 16 * 3 * 49
    assert macs["down"] == 2 * 96 * 8 * 8 * 64
    assert macs["grouped"] == 2 * 96 * 8 * 8 * 24 * 9
    assert sum(macs.values()) == report.macs


def test_attention_counts() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.proj(y.transpose(1, 2).flatten(2))

    report = hot.convert(Attention(), inputs=torch.randn(2, 32, 64)).hot_report
    products = 2 * 2 * 4 * 32 * 32 * 16  # q k^T and p v
    assert report.macs == 2 * 32 * 64 * 256 + products


def test_matrices_that_are_not_taken() -> None:
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.randn(4, 128, 64))
    experts.position = nn.Parameter(torch.randn(1, 197, 64))  # no stack
    layers = {"experts": experts, "lstm": nn.LSTM(64, 96), "up": nn.ConvTranspose2d(64, 96, 2)}
    layers |= {"line": nn.Conv1d(64, 96, 3), "plain": nn.Linear(64, 64)}
    report = hot.convert(nn.ModuleDict(layers)).hot_report
    rows = {row.name: row for row in report.unsupported}
    assert list(rows) == ["experts.gate_up_proj", "lstm", "up", "line"]
    assert "a stack of 4 matrices in one Parameter (experts)" in rows["experts.gate_up_proj"].reason
    assert (rows["lstm"].in_features, rows["lstm"].out_features) == (64, 96)
    assert rows["line"].reason == "nn.Conv1d is not a kind of layer that HOT supports"
    assert all(name in str(report) for name in rows)
    with pytest.raises(ValueError, match=r"(?s)no layer.*no nn.Linear.*0  LSTM .*nn.LSTM is not"):
        hot.convert(nn.Sequential(nn.LSTM(64, 64)))


def test_experts_of_transformers() -> None:
    models.mend_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_local_experts=4,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    model = transformers.MixtralModel(config)
    report = hot.convert(model).hot_report
    stacks = [row for row in report.unsupported if "(experts)" in row.reason]
    layers = [layer for layer in report.layers if "expert" in layer.name]
    assert len(stacks) >= 2 or len(layers) >= 8  # fused, or layers of their own (older versions)
    assert 0 < report.parameter_share < 0.5


def test_the_last_layer_of_a_sequential_is_its_head() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.Softmax(-1))
    report = hot.convert(model).hot_report
    assert reasons_of(report) == {"2": "the output head"}
    # One that keeps the width is a body, which the report says.
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    report = hot.convert(model).hot_report
    assert not report.skipped
    assert "no output head was recognised: the last layer, 2, is converted" in str(report)
    assert "no output head" not in str(hot.convert(Model()).hot_report)


def test_heads_side_by_side_and_out_at_the_top() -> None:
    for heads in (("head", "head_dist"), ("out",)):
        model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("body", *heads)})
        assert names(hot.convert(model).hot_report) == ["body"]
    inner = nn.ModuleDict({"q": nn.Linear(64, 64), "out": nn.Linear(64, 64)})
    model = nn.ModuleDict({"attention": inner})
    assert len(hot.convert(model).hot_report.converted) == 2


def test_eval_mode_is_said() -> None:
    model = Model().eval()
    report = hot.convert(model).hot_report
    assert "the model is in eval mode, where every layer is plain" in str(report)
    assert "\n0 of 7 layers run HOT, default; 4 more after .train()" in str(report)
    assert report.in_eval_mode == report.to_dict()["in_eval_mode"] == CONVERTED
    model = Model()
    model.blocks[0].eval()
    text = str(hot.convert(model).hot_report)
    assert "\n2 of 7 layers run HOT, default; 2 more after .train()" in text
    assert "in eval mode, hence plain until .train(): blocks.0.qkv, blocks.0.proj" in text
    assert "eval mode" not in str(hot.convert(Model()).hot_report)


def test_report_as_data() -> None:
    model = Model()
    report = hot.convert(model, "fast", inputs=torch.randint(50, (2, 20))).hot_report
    content = report.to_dict()
    assert json.loads(report.to_json()) == content
    assert content["recipe"] == "fast"
    assert HotConfig.from_json(json.dumps(content["config"])) == HotConfig.recipe("fast")
    assert [layer["name"] for layer in content["layers"]] == [x.name for x in report.layers]
    first, *_, head = content["layers"]
    assert first["converted"] and first["recipe"] == "fast" and first["macs"] == 40 * 64 * 192
    assert not head["converted"] and head["reason"] == "the output head"
    assert content["mac_share"] == report.mac_share


def test_the_report_goes_along_with_the_model() -> None:
    model = hot.convert(Model(), "fast")
    report = model.hot_report
    assert not any("hot_report" in key for key in model.state_dict())
    assert "hot_report" not in dict(model.named_modules()) | dict(model.named_buffers())
    copied = copy.deepcopy(model)
    assert copied.hot_report == report and copied.hot_report is not report
    assert pickle.loads(pickle.dumps(model)).hot_report == report
    assert torch.compile(model).hot_report is hot.report(nn.Sequential(model)) is report
    refused(lambda: hot.report(Model()), r"model: it has no report; call hot.convert\(model\)")
    assert torch.nn.utils.parametrize.is_parametrized(model) is False
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert averaged.module.hot_report == report
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.randint(50, (2, 20))).sum().backward()
    again = hot.convert(hot.revert(model), filter_fn=lambda module, name: name == "blocks.0.qkv")
    assert [layer.name for layer in again.hot_report.converted] == ["blocks.0.qkv"]
    assert not hasattr(hot.revert(again), "hot_report")


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="got list; convert each of them, or .* nn.ModuleList"):
        hot.convert([nn.Linear(64, 64)])
    with pytest.raises(TypeError, match="got the class Linear; make an object of it first"):
        hot.convert(nn.Linear)
    refused(lambda: hot.convert("model"), "expected a torch.nn.Module, got str", TypeError)
    lazy = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    refused(lambda: hot.convert(lazy), "model: 1 is a LazyLinear, whose weights have no shapes")
    lazy(torch.randn(2, 64))
    assert len(hot.convert(lazy, filter_fn=lambda *_: True).hot_report.converted) == 2


def test_a_wrong_token_grid_names_the_layer() -> None:
    config = HotConfig.recipe("paper", token_grid=(4, 4), prefix_tokens=1)
    tokens = torch.randint(50, (2, 20))
    given = r"\(4, 4\) with 1 prefix .* 17 tokens; layer blocks.0.qkv is given 40"
    refused(lambda: hot.convert(Model(), config, inputs=tokens), given)
    model = hot.convert(Model(), config)
    assert 0.5 < hot.report(model).converted[0].bytes_per_value < 0.54
    refused(lambda: model(tokens), "layer blocks.0.qkv: .*x has 40 tokens")
    conv = hot.convert(ConvNet())
    with pytest.raises(ValueError, match="layer conv: x: dtype float64"):
        conv.conv(torch.randn(1, 64, 4, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="^layer blocks.1.qkv: .*mat1 and mat2 shapes"):
        model.blocks[1].qkv(torch.randn(17, 32))  # torch's own
    # Not in layers of their own, nor once they are plain again.
    refused(lambda: hot.HotLinear(64, 64, config=config)(torch.randn(20, 64)), r"^low_rank")
    assert "layer_name" not in vars(hot.revert(model).blocks[0].qkv)


# ---- The rule on CUDA, asked for on the CPU ----


def test_convolutions_stay_plain_on_cuda() -> None:
    none = "no layer is converted; all 3 .* slower.* on CUDA; slower=True"
    with pytest.warns(UserWarning, match=none):
        report = hot.convert(ConvNet(), device="cuda").hot_report
    reasons = reasons_of(report)
    assert not report.converted
    assert reasons["conv"].startswith("slower on CUDA: x is compressed and restored")
    assert reasons["down"].startswith("slower on CUDA: ")
    assert reasons["depthwise"] == f"fewer than {MIN_FEATURES} features"  # not expected to be slow
    assert "3 layers stay plain: slower on CUDA, by one H100" in str(report)
    # Asked for in three ways.
    assert len(hot.convert(ConvNet(), device="cuda:0", slower=True).hot_report.converted) == 3
    assert len(hot.convert(ConvNet(), device="cpu").hot_report.converted) == 3
    report = hot.convert(ConvNet(), device="cuda", overrides={"conv": "fast"}).hot_report
    assert names(report) == ["conv"]
    # A pattern changes what, not whether.
    with pytest.warns(UserWarning, match="no layer is converted"):
        hot.convert(ConvNet(), device="cuda", overrides={"c*": "fast"})
    every = hot.convert(ConvNet(), device="cuda", filter_fn=lambda module, fqn: True).hot_report
    assert len(every.converted) == 7  # a filter is the caller's own rule


def linears(*sizes: tuple[int, int]) -> nn.ModuleList:
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(ins, outs) for ins, outs in sizes)


def test_linear_layers_by_features_on_cuda() -> None:
    sizes = ((128, 512), (384, 1536), (512, 512), (768, 768), (768, 3072), (4096, 14336))
    report = hot.convert(linears(*sizes), device="cuda").hot_report
    assert [layer.out_features for layer in report.converted] == [3072, 14336]
    small, *rest = [layer.expected_time for layer in report.layers]
    assert rest == sorted(rest, reverse=True) and rest[0] > 1.05 and rest[-1] < 0.8
    assert "fewer than 256 features the host limits the speed" in report.skipped[0].reason
    words = f"with 16,384 tokens: expected to take {rest[0]:.2f} of plain torch's time"
    assert words in str(report)
    assert re.search(r"expected on CUDA: .* 0\.7\d of plain torch's time; by one H100", str(report))
    assert f"{rest[3]:.2f} of the time" in str(report)
    fast = hot.convert(linears(*sizes), "fast", device="cuda").hot_report
    assert len(fast.converted) >= 2
    pairs = zip(fast.converted[-2:], report.converted, strict=True)
    assert all(a.expected_time < b.expected_time for a, b in pairs)
    every = hot.convert(linears(*sizes), device="cuda", slower=True).hot_report
    assert [bool(layer.note) for layer in every.converted] == [True] * 4 + [False] * 2
    # Known tokens decide.
    for tokens, kept in ((256, 0), (16384, 1)):
        x = torch.empty(tokens, 2048, device="meta")
        layer = linears((2048, 2048))[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = hot.convert(layer, device="cuda", inputs=x).hot_report
        assert len(report.converted) == kept
        assert kept or "with 256 tokens: expected to take" in str(report)
    empty = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 0), nn.Linear(0, 2048))
    x = torch.empty(2, 8192, 2048, device="meta")
    report = hot.convert(empty.to("meta"), slower=True, device="cuda", inputs=x).hot_report
    without = hot.convert(linears((2048, 2048)), device="cuda").hot_report  # assumes 16,384 tokens
    assert report.layers[0].expected_time == without.layers[0].expected_time
    # On the CPU and on meta as before.
    report = hot.convert(linears(*sizes)).hot_report
    assert len(report.converted) == len(sizes)
    assert report.expected_time is None and "CUDA" not in str(report)


def test_frozen_layers_on_cuda() -> None:
    model = linears((512, 512), (4096, 1024), (4096, 4096)).requires_grad_(False)
    report = hot.convert(model, device="cuda").hot_report
    assert [layer.out_features for layer in report.converted] == [1024, 4096]  # g_x alone
    trained = hot.convert(linears((4096, 4096)), device="cuda").hot_report
    assert report.converted[-1].expected_time > trained.converted[0].expected_time


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch name a GPU."""

    def is_here(name: str, *capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return is_here


def test_the_rule_takes_the_devices_rate(gpu: Callable[..., None]) -> None:
    sizes = ((512, 512), (768, 768), (4096, 14336))
    times = {}
    for name, capability, kept in (
        ("NVIDIA H200", (9, 0), 1), ("NVIDIA L40S", (8, 9), 1), ("GeForce RTX 4090", (8, 9), 2),
    ):  # fmt: skip
        gpu(name, *capability)
        report = hot.convert(linears(*sizes), device="cuda:0").hot_report
        assert len(report.converted) == kept
        said = re.search(r"by one H100, bf16(.*) \(hotcore", str(report))[1]
        assert said.startswith(", and INT8 at " if name != "NVIDIA H200" else "")
        assert ("derived: " in said) == (name != "NVIDIA H200")
        times[name] = report.expected_time
    assert times["NVIDIA H200"] == times["NVIDIA L40S"]
    assert times["GeForce RTX 4090"] < 0.82 * times["NVIDIA H200"]
    report = hot.convert(linears(*sizes), device="cuda").hot_report  # another process's GPU
    assert "4 times" in str(report)


@pytest.mark.parametrize(
    ("name", "capability", "why"),
    [
        ("NVIDIA B200", (10, 0), "tcgen05 alone"),
        ("NVIDIA B300 SXM6 AC", (10, 3), "GB300: 157 TOPS"),
        ("NVIDIA Rubin", (10, 7), "Rubin"),
        ("NVIDIA X1", (13, 0), "NVIDIA X1 of sm_130 is not known"),
    ],
)
def test_a_device_without_fast_int8(
    gpu: Callable[..., None], name: str, capability: tuple[int, int], why: str
) -> None:
    gpu(name, *capability)
    reason = "device has no fast INT8"
    with pytest.warns(UserWarning, match=rf"no layer is converted.* \({reason}\).*slower=True"):
        report = hot.convert(linears((4096, 4096), (768, 3072)), device="cuda").hot_report
    assert {row.reason for row in report.skipped} == {reason}
    assert why in report.notes[0] and "stay plain: no fast INT8" in report.notes[0]
    every = hot.convert(linears((64, 96)), filter_fn=lambda *_: True, device="cuda").hot_report
    assert [row.note for row in every.converted] == [reason]  # a filter overrules
    assert hot.convert(linears((64, 96)), device="cuda", slower=True).hot_report.converted
    assert hot.convert(linears((64, 96)), device="cpu").hot_report.converted


@pytest.mark.skipif(hotcore._core.built_with_cuda(), reason="built with CUDA")
def test_a_model_on_cuda_without_the_backend_is_refused_at_once() -> None:
    model = linears((64, 64), (64, 64))
    with FakeTensorMode():
        model[1].weight = nn.Parameter(torch.empty(64, 64, device="cuda"))
    before = [type(module) for module in model.modules()]
    why = "model: it is on cuda:0; .*no CUDA backend.*HOT_CUDA=ON pip install"
    refused(lambda: hot.convert(model), why, NotImplementedError)
    assert [type(module) for module in model.modules()] == before
    # One that is still on the CPU may be looked at.
    assert "no CUDA backend" in str(hot.convert(linears((4096, 4096)), device="cuda").hot_report)
    assert "CUDA" not in str(hot.convert(linears((4096, 4096))).hot_report)


# ---- layers whose calls run another forward than their class's ----


def trained_by(model: nn.Module) -> str:
    """The arithmetic of a model's gradients."""
    x = torch.randn(96, 64)
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().sum().backward()
    twin = stack()
    state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    twin.load_state_dict(state)
    twin(x).square().sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    same = all(torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-4) for p, q in pairs)
    return "plain" if same else "HOT"


def stack() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def hooked(model: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    for layer in (model[1], model[3]):
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    return model


def unhooked(model: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.remove_hook_from_module(hooked(model), recurse=True)
    return model


def dispatched(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


CALLS_THE_CLASS = [hooked, unhooked, dispatched]


@pytest.mark.parametrize("change", CALLS_THE_CLASS)
def test_accelerates_hooks_stay(change: Any, seeded: None) -> None:
    """Before and after convert, through revert, freeze_int8 and thaw; they are still called."""
    model = change(stack())
    assert len(hot.convert(model, "fast", every).hot_report.converted) == 2
    assert type(model[1]) is hot.HotLinear and trained_by(model) == "HOT"
    assert calls_of_hooks(model) == (0 if change is unhooked else 1)
    hot.revert(model)
    assert type(model[1]) is nn.Linear and trained_by(model) == "plain"
    assert calls_of_hooks(model) == (0 if change is unhooked else 1)

    hot.convert(model := stack(), "fast", every)
    change(model)
    assert trained_by(model) == "HOT"
    hot.freeze_int8(model)
    expected = model[1].dequantized()
    x = torch.randn(5, 64)
    y = model[1](x)
    assert torch.allclose(y, nn.functional.linear(x, expected, model[1].bias), atol=1e-5)
    assert calls_of_hooks(model) == (0 if change is unhooked else 1)
    hot.thaw(model)
    model[1].weight.data.zero_()  # the new Parameter is the one that is used
    assert torch.equal(model[1](x), model[1].bias.expand(5, 64))
    hot.revert(model.requires_grad_(True))
    assert type(model[1]) is nn.Linear and trained_by(model) == "plain"
    model[1].weight = nn.Parameter(torch.ones(64, 64))
    assert torch.allclose(model[1](x), x.sum(1, keepdim=True) + model[1].bias, atol=1e-4)


def calls_of_hooks(model: nn.Module) -> int:
    hook = getattr(model[1], "_hf_hook", None)
    if hook is None:
        return 0
    kind, before = type(hook), type(hook).pre_forward
    with mock.patch.object(kind, "pre_forward", autospec=True, side_effect=before) as called:
        model[1](torch.randn(2, 64))
    assert all(call.args[1] is model[1] for call in called.call_args_list)
    return called.call_count


def test_converted_from_an_offloaded_model(seeded: None) -> None:
    """A hook that brings the weights for each call finds them in the new layer."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(stack(), torch.device("cpu"))
    x = torch.randn(9, 64)
    expected = model(x)
    hot.convert(model, "fast", every)
    assert torch.equal(model(x), expected)
    hot.revert(model)
    assert torch.equal(model(x), expected)


def patched(model: nn.Module) -> nn.Module:
    for layer in (model[1], model[3]):
        layer.forward = types.MethodType(
            lambda self, x: nn.functional.linear(x, self.weight, self.bias), layer
        )
    return model


def of_a_function(model: nn.Module) -> nn.Module:
    for layer in (model[1], model[3]):
        layer.forward = functools.partial(nn.functional.linear, weight=layer.weight)
    return model


def compiled(model: nn.Module) -> nn.Module:
    for layer in (model[1], model[3]):
        layer.compile(backend="eager")
    return model


def wrapped(model: nn.Module) -> nn.Module:
    for index in (1, 3):
        model[index] = torch.compile(model[index], backend="eager")
    return model


def recomputed(model: nn.Module) -> nn.Module:
    hot.recompute([model[1], model[3], nn.Sequential(nn.GELU())])
    return model


def hooked_and_patched(model: nn.Module) -> nn.Module:
    return hooked(patched(model))


OWN_FORWARD = [patched, of_a_function, recomputed, hooked_and_patched]


@pytest.mark.parametrize("change", OWN_FORWARD)
def test_layers_that_would_go_on_plain_are_reported_so(change: Any, seeded: None) -> None:
    model = nn.ModuleDict({"changed": change(stack()), "other": nn.Linear(64, 64)})
    report = hot.convert(model, "fast", every).hot_report
    assert names(report) == ["other"]
    reasons = {layer.reason for layer in report.skipped}
    assert len(report.skipped) == 2 and all("a forward of its own" in why for why in reasons)
    assert ("recompute was called before; handle.remove()" in str(report)) == (change is recomputed)
    if change is not of_a_function:  # it leaves out the bias
        assert trained_by(model["changed"]) == "plain"
    with pytest.raises(ValueError, match="module: it has a forward of its own"):
        hot.HotLinear.from_linear(model["changed"][1])


@pytest.mark.parametrize("change", OWN_FORWARD)
def test_reverting_names_layers_that_would_go_on_as_hot(change: Any, seeded: None) -> None:
    hot.convert(model := stack(), "fast", every)
    change(model)
    refused(lambda: hot.revert(model), "model: 1: it has a forward of its own.*before revert")
    assert all(type(model[index]) is hot.HotLinear for index in (1, 3))
    refused(lambda: hot.freeze_int8(model), "it has a forward of its own")


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("change", [compiled, wrapped, whole])
def test_compiled_before_or_after(change: Any, seeded: None, compiled_afresh: None) -> None:
    """Graphs are guarded by their layers' classes."""
    for before in (True, False):
        model = change(stack()) if before else change(hot.convert(stack(), "fast", every))
        if before:
            assert trained_by(model) == "plain"
            assert len(hot.convert(model, "fast", every).hot_report.converted) == 2
        assert trained_by(model) == "HOT"
        hot.revert(model)
        assert trained_by(model) == "plain"


def test_the_text_of_layers_that_torchao_has_quantised() -> None:
    """quantize_ keeps the layer's extra_repr, in a bound partial."""
    hot.convert(model := stack(), "fast", every)
    text = functools.partial(lambda own, layer: f"{own()}, more", model[1].extra_repr)
    model[1].extra_repr = types.MethodType(text, model[1])
    assert "config=fast, more" in repr(model)
    hot.revert(model)
    assert "Linear(in_features=64, out_features=64, bias=True, more)" in repr(model)


HOLDERS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], nn.Module]]] = {
    "list": (lambda layer: [layer], lambda held: held[0]),
    "partial": (lambda layer: functools.partial(layer), lambda held: held),
    "closure": (lambda layer: lambda x: layer(x), lambda held: held),
    "call": (lambda layer: layer.__call__, lambda held: held),
}


class Holder(nn.Module):
    """Calls its layer through another object."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hold, self.find = HOLDERS[kind]
        self.layer = nn.Linear(64, 64)
        object.__setattr__(self, "held", hold(self.layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.find(self.held)(x)


@pytest.mark.parametrize("kind", HOLDERS)
def test_layers_reached_through_other_objects(kind: str, seeded: None) -> None:
    """Whatever holds a layer sees convert, loads, freeze_int8, thaw and revert."""
    model, x = Holder(kind), torch.randn(96, 64)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return model.layer.weight.grad

    plain, layer = gradient(), model.layer
    report = hot.convert(model, "fast", every, inputs=x).hot_report
    assert [row.note for row in report.converted] == [""]  # it was called
    assert model.layer is layer and not torch.equal(gradient(), plain)
    weight, bias = torch.randn(64, 64), torch.randn(64)
    expected = nn.functional.linear(x, weight, bias)
    model.load_state_dict({"layer.weight": weight.clone(), "layer.bias": bias}, assign=True)
    assert torch.equal(model(x), expected)
    hot.freeze_int8(model)
    model.load_state_dict({"layer.weight": -weight, "layer.bias": -bias})
    assert (model(x) + expected).norm() < 0.02 * expected.norm()
    hot.thaw(model)
    model.layer.weight.data.zero_()
    assert torch.equal(model(x), model.layer.bias.expand(96, 64))
    hot.revert(model)
    model.load_state_dict({"layer.weight": weight, "layer.bias": -model.layer.bias})
    assert type(layer) is nn.Linear and torch.equal(model(x), expected)


BOUND: dict[str, Callable[[nn.Module], Any]] = {
    "method": lambda layer: layer.forward,
    "list": lambda layer: [layer.forward],
    "partial": lambda layer: functools.partial(layer.forward),
    "closure": lambda layer: (lambda forward: lambda x: forward(x))(layer.forward),
    "deque": lambda layer: collections.deque([layer.forward]),
}


@pytest.mark.parametrize("kind", BOUND)
def test_bound_forwards_are_named(kind: str, seeded: None) -> None:
    """They go on to run the class that they were taken from."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model.held = BOUND[kind](model[0])
    report = hot.convert(model, "fast", every).hot_report
    assert names(report) == ["1"] and "holds its bound forward" in report.skipped[0].reason
    why = "model: 1: a .* holds its bound forward, .*; undo that before "
    model.held = BOUND[kind](model[1])
    refused(lambda: hot.revert(model), rf"{why}revert\(\)")
    refused(lambda: hot.freeze_int8(model), "no layer can be frozen: 1 .a .* holds its bound")
    assert type(model[0]) is nn.Linear and type(model[1]) is hot.HotLinear
    del model.held
    hot.freeze_int8(model)
    model.held = BOUND[kind](model[1])
    refused(lambda: hot.thaw(model), rf"{why}thaw\(\)")
    assert model[1].weight_codes is not None
    del model.held
    assert hot.thaw(model) == 1 and type(hot.revert(model)[1]) is nn.Linear
    outside = {"anywhere": BOUND[kind](model[0])}
    assert names(hot.convert(model, "fast", every).hot_report) == ["1"] and outside


def test_bound_forwards_of_a_traceback_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(RuntimeError) as error:
        model(torch.randn(3, 5))
    assert names(hot.convert(model, "fast", every).hot_report) == ["0"]
    assert error.tb


def test_what_torch_puts_around_layers(seeded: None) -> None:
    """Weights that hooks or parametrisations compute stay plain; a traced graph's do not."""
    model = stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        nn.utils.weight_norm(model[1])
        nn.utils.spectral_norm(model[3])
    refused(lambda: hot.convert(model, "fast", every), "its weight is computed, not a Parameter")
    model = stack()
    nn.utils.parametrizations.weight_norm(model[1])
    report = hot.convert(model, "fast", every).hot_report
    assert names(report) == ["3"]
    assert "a subclass of Linear" in report.skipped[0].reason
    graph = torch.fx.symbolic_trace(stack())
    assert len(hot.convert(graph, "fast", every).hot_report.converted) == 2
    assert trained_by(graph) == "HOT" and trained_by(hot.revert(graph)) == "plain"


def test_a_class_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.t() + self.bias)
    with pytest.raises(ValueError, match=r"the forward of Linear was replaced by .*test_convert"):
        hot.convert(stack(), "fast", every)
