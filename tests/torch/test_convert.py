"""convert and revert: which layers, in place, with a report."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hotcore.config import HotConfig

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from hotcore.torch.convert import HEAD_NAMES, MIN_FEATURES  # noqa: E402
from torch import nn  # noqa: E402


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


CONVERTED = ["blocks.0.qkv", "blocks.0.proj", "blocks.1.qkv", "blocks.1.proj"]


def test_default_filter() -> None:
    model = Model()
    report = hot.convert(model, "fast")
    assert [layer.name for layer in report.converted] == CONVERTED
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons == {
        "blocks.0.small": f"fewer than {MIN_FEATURES} features",
        "blocks.1.small": f"fewer than {MIN_FEATURES} features",
        "head": "the output head",
    }
    assert report.model is model
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


def test_forward_is_bit_equal() -> None:
    model = Model()
    tokens = torch.randint(50, (2, 20))
    expected = model(tokens)
    hot.convert(model)
    assert torch.equal(model(tokens), expected)
    model.eval()
    assert torch.equal(model(tokens), expected)


def test_revert() -> None:
    model = Model()
    types = [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    hot.convert(model)
    assert hot.revert(model) is model
    assert [type(module) for module in model.modules()] == types
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert hot.revert(model) is model  # nothing to do
    assert hot.convert(model).converted


def test_filter_fn() -> None:
    model = Model()
    seen: list[str] = []

    def first_block(module: nn.Module, fqn: str) -> bool:
        assert isinstance(module, nn.Linear)
        seen.append(fqn)
        return fqn.startswith("blocks.0") or fqn == "head"

    report = hot.convert(model, filter_fn=first_block)
    names = [layer.name for layer in report.converted]
    # A filter replaces the default rules: the head and the small layer are converted.
    assert names == ["blocks.0.qkv", "blocks.0.proj", "blocks.0.small", "head"]
    assert {layer.reason for layer in report.skipped} == {"left out by filter_fn"}
    assert len(seen) == 7
    model(torch.randint(50, (2, 20))).sum().backward()


def test_filter_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match="filter_fn matched no layer"):
        hot.convert(Model(), filter_fn=lambda module, fqn: False)
    with pytest.raises(ValueError, match="no layer can be converted"):
        hot.convert(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match=f"0: fewer than {MIN_FEATURES} features"):
        hot.convert(nn.Sequential(nn.Linear(4, 4)))


def test_twice_is_refused() -> None:
    model = Model()
    hot.convert(model, "fast", filter_fn=lambda module, fqn: fqn.startswith("blocks.0"))
    modules = list(model.modules())
    with pytest.raises(
        ValueError, match=r"already converted \(blocks.0.qkv, blocks.0.proj.*revert"
    ):
        hot.convert(model, "default")
    assert list(model.modules()) == modules
    # The rest of a model is another matter.
    report = hot.convert(model, filter_fn=lambda module, fqn: fqn == "blocks.1.qkv")
    assert [layer.name for layer in report.converted] == ["blocks.1.qkv"]
    assert model.blocks[0].qkv.config == HotConfig.recipe("fast")


def test_weight_tied_to_an_embedding() -> None:
    model = Model(tied=True)
    report = hot.convert(model)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["head"] in ("the output head", "its weight is an embedding's")
    model = Model(tied=True)
    model.final = nn.Linear(64, 64)  # the head is no longer the last layer
    report = hot.convert(model)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["head"] == "its weight is an embedding's"
    assert model.head.weight is model.embed.weight
    assert "final" in [layer.name for layer in report.converted]


@pytest.mark.parametrize("name", sorted(HEAD_NAMES))
def test_head_names(name: str) -> None:
    for build in (
        lambda: nn.Linear(64, 64),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(64, 64)),
    ):
        model = nn.Module()
        model.body = nn.Linear(64, 64)
        setattr(model, name, build())
        report = hot.convert(model)
        assert [layer.name for layer in report.converted] == ["body"]
    # The same name earlier in the model is no head.
    model = nn.Module()
    setattr(model, name, nn.Linear(64, 64))
    model.body = nn.Linear(64, 64)
    assert len(hot.convert(model).converted) == 2


def test_subclasses_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    attention = nn.MultiheadAttention(64, 4)
    model = nn.ModuleDict(
        {
            "special": Special(64, 64),
            "attention": attention,
            "plain": nn.Linear(64, 64),
        }
    )
    for filter_fn in (None, lambda module, fqn: True):
        report = hot.convert(copy.deepcopy(model), filter_fn=filter_fn)
        reasons = {layer.name: layer.reason for layer in report.skipped}
        assert reasons["special"] == "a subclass of Linear (Special)"
        assert "subclass of Linear" in reasons["attention.out_proj"]
        assert [layer.name for layer in report.converted] == ["plain"]


def test_computed_weights_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[1])
    report = hot.convert(model)
    assert [layer.name for layer in report.converted] == ["2"]
    assert len(report.skipped) == 2
    model(torch.randn(4, 64)).sum().backward()


def test_float64_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64).double(), nn.Linear(64, 64))
    report = hot.convert(model)
    assert [layer.reason for layer in report.skipped] == ["its weight is float64"]
    assert type(model[0]) is nn.Linear


def test_shared_module_is_replaced_everywhere() -> None:
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = hot.convert(model)
    assert len(report.converted) == 1
    assert model[0] is model[2] and type(model[0]) is hot.HotLinear
    hot.revert(model)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


def test_root_linear() -> None:
    layer = nn.Linear(64, 64)
    report = hot.convert(layer)
    assert type(report.model) is hot.HotLinear
    assert report.model.weight is layer.weight
    assert "(root)" in str(report)
    assert type(hot.revert(report.model)) is nn.Linear


def test_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    report = hot.convert(model)
    assert len(report.converted) == 4
    assert model.blocks[0].qkv.weight.is_meta


def test_report_prints_as_a_table() -> None:
    model = Model()
    model.blocks[0].qkv.weight.requires_grad_(False)
    report = hot.convert(model, "default", overrides={"*.0.proj": "fast"})
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "kind", "in", "->", "out", "x", "is", "kept", "in"]
    for pattern in (
        r"blocks\.0\.qkv +Linear +64 -> 192 +nothing \(weight frozen\)",
        r"blocks\.0\.proj +Linear +64 -> 64 +0\.50 bytes .* HotConfig\.recipe\('fast'\)",
        r"blocks\.1\.qkv +Linear +64 -> 192 +0\.53 bytes a value \(fp32 / 7\.5\)",
        r"blocks\.1\.small +Linear +64 -> 8 +stays plain: fewer than \d+ features",
        r"head +Linear +64 -> 50 +stays plain: the output head",
    ):
        assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1, pattern
    assert [line.split()[0] for line in lines[1:8]] == [
        *("blocks.0.qkv", "blocks.0.proj", "blocks.0.small"),
        *("blocks.1.qkv", "blocks.1.proj", "blocks.1.small", "head"),
    ]
    assert lines[8] == "4 of 7 layers run HOT, HotConfig.recipe('default')"
    assert f"fewer than {MIN_FEATURES}" in lines[9]  # the rule
    ends = [re.search(r" -> \d+", line).end() for line in lines[1:8]]
    assert len(set(ends)) == 1


def test_report_with_a_token_grid() -> None:
    config = HotConfig.recipe("paper", token_grid=(14, 14), prefix_tokens=1)
    report = hot.convert(Model(), config)
    assert 0.5 < report.converted[0].bytes_per_value < 0.52


def test_bad_config() -> None:
    with pytest.raises(TypeError, match="config: "):
        hot.convert(Model(), 3)
    with pytest.raises(ValueError, match="recipe: 'quick'"):
        hot.convert(Model(), "quick")


# ---------------------------------------------------------------------------------------- Overrides


def test_overrides() -> None:
    model = Model()
    custom = HotConfig(gx_rounding="nearest")
    overrides = {
        "blocks.*": "fast",
        "*.qkv": {"gx_bits": 4},  # on top of the base configuration
        "blocks.1.proj": custom,
    }
    report = hot.convert(model, "accurate", overrides=overrides)
    configs = {layer.name: layer.config for layer in report.converted}
    int4 = HotConfig.recipe("accurate", gx_bits=4)
    assert configs == {
        "blocks.0.qkv": int4,
        "blocks.0.proj": HotConfig.recipe("fast"),
        "blocks.1.qkv": int4,
        "blocks.1.proj": custom,
    }
    for name, config in configs.items():
        assert model.get_submodule(name).config == config
    assert report.config == HotConfig.recipe("accurate")


def test_overrides_leave_out() -> None:
    model = Model()
    report = hot.convert(model, overrides={"*.proj": None, "blocks.1.*": "fast"})  # the last counts
    assert [layer.name for layer in report.converted] == [
        "blocks.0.qkv",
        *names_of("blocks.1"),
    ]
    skipped = {layer.name: layer.reason for layer in report.skipped}
    assert skipped["blocks.0.proj"] == "left out by overrides"
    assert skipped["head"] == "the output head"  # what the rule says comes first
    with pytest.raises(ValueError, match="no layer can be converted.*left out by overrides"):
        hot.convert(Model(), overrides={"blocks.*": None})
    # What is converted already may be left out of the next call.
    twin = Model()
    hot.convert(twin, overrides={"blocks.0.*": None})
    more = hot.convert(twin, "fast", overrides={"blocks.1.*": None})
    assert [layer.name for layer in more.converted] == names_of("blocks.0")


def names_of(block: str) -> list[str]:
    return [f"{block}.{part}" for part in ("qkv", "proj")]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"blocks.0.qvk": "fast"}, ValueError, "'blocks.0.qvk' matches no layer; near it: .*0.qkv"),
        ({"zz": "fast"}, ValueError, "'zz' matches no layer; layers: blocks.0.qkv, blocks.0.proj"),
        ({"head": "fast"}, ValueError, r"only layers that stay plain: head \(the output head\)"),
        ({"*.qkv": "quick"}, ValueError, "recipe: 'quick' is not one of"),
        ({"*.qkv": 3}, TypeError, r"overrides\['\*.qkv'\]: expected a HotConfig or a recipe"),
        ({"*.qkv": {"bits": 4}}, ValueError, r"overrides\['\*.qkv'\]: HotConfig has no field bits"),
        ({"*.qkv": {"gx_bits": 5}}, ValueError, "gx_bits: 5; expected 4 or 8"),
    ],
)
def test_bad_overrides(overrides: dict, error: type[Exception], message: str) -> None:
    model = Model()
    with pytest.raises(error, match=message):
        hot.convert(model, overrides=overrides)
    assert not any(isinstance(module, hot.HotLinear) for module in model.modules())


# ------------------------------------------------------------------------------------- Convolutions


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
    report = hot.convert(model)
    assert [(layer.name, layer.kind) for layer in report.converted] == [
        ("conv", "Conv2d 3x3"),
        ("down", "Conv2d 1x1"),
    ]
    assert {layer.name: layer.reason for layer in report.skipped} == {
        "stem": "the first convolution",
        "depthwise": "depthwise",
        "grouped": "a convolution in 4 groups",
        "narrow": f"fewer than {MIN_FEATURES} features",
        "fc": "the output head",
    }
    # INT4; with a stride, a 1x1 kernel meets a quarter of the pixels only.
    assert [round(layer.bytes_per_value, 2) for layer in report.converted] == [0.53, 0.13]
    assert re.search(r"conv +Conv2d 3x3 +64 -> 64 +0\.53 bytes a value", str(report))
    assert type(model.conv) is hot.HotConv2d
    y = model(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    hot.revert(model)
    assert [type(module) for module in model.modules()] == types
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x), expected)


def test_patch_embedding_is_a_first_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.Flatten(2), nn.Linear(64, 64))
    report = hot.convert(model)
    assert [layer.reason for layer in report.skipped] == ["the first convolution"]


def test_heads_side_by_side() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("body", "head", "head_dist")})
    assert [layer.name for layer in hot.convert(model).converted] == ["body"]


def test_copies_of_a_converted_model() -> None:
    model = ConvNet()
    hot.convert(model, overrides={"down": "fast"})
    x = torch.randn(2, 3, 32, 32)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.conv) is hot.HotConv2d
        assert again.down.config == HotConfig.recipe("fast")
        assert again.conv.weight is not model.conv.weight
        assert torch.equal(again(x), model(x))
        again(x).sum().backward()
        assert type(hot.revert(again).conv) is nn.Conv2d
    assert model.conv.weight.grad is None


def test_parametrised_after_convert() -> None:
    model = Model()
    hot.convert(model)
    nn.utils.parametrizations.weight_norm(model.blocks[0].qkv)
    with pytest.raises(ValueError, match="blocks.0.qkv is now a ParametrizedHotLinear; undo"):
        hot.revert(model)
    nn.utils.parametrize.remove_parametrizations(model.blocks[0].qkv, "weight")
    assert type(hot.revert(model).blocks[0].qkv) is nn.Linear


def test_data_parallel_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match="DataParallel is not supported; use.*Distributed"):
        hot.convert(nn.DataParallel(model))
    hot.convert(model)
    # What nn.parallel.replicate calls on every module (itself it wants GPUs).
    with pytest.raises(NotImplementedError, match="HotLinear.*DataParallel is not supported"):
        for module in model.modules():
            module._replicate_for_data_parallel()
