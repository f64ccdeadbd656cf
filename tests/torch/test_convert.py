"""convert and revert: which layers, in place, with a report."""

from __future__ import annotations

import copy
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
    def __init__(self, width: int = 32, tied: bool = False) -> None:
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
    with pytest.raises(ValueError, match="filter_fn matched no nn.Linear"):
        hot.convert(Model(), filter_fn=lambda module, fqn: False)
    with pytest.raises(ValueError, match="no nn.Linear can be converted"):
        hot.convert(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="0: fewer than 16 features"):
        hot.convert(nn.Sequential(nn.Linear(4, 4)))


def test_twice_is_reported() -> None:
    model = Model()
    hot.convert(model, "fast")
    modules = list(model.modules())
    report = hot.convert(model, "default")
    assert not report.converted
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["blocks.0.qkv"] == "already converted, HotConfig.recipe('fast')"
    assert list(model.modules()) == modules
    assert model.blocks[0].qkv.config == HotConfig.recipe("fast")


def test_weight_tied_to_an_embedding() -> None:
    model = Model(tied=True)
    report = hot.convert(model)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["head"] in ("the output head", "its weight is an embedding's")
    model = Model(tied=True)
    model.final = nn.Linear(32, 32)  # the head is no longer the last layer
    report = hot.convert(model)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["head"] == "its weight is an embedding's"
    assert model.head.weight is model.embed.weight
    assert "final" in [layer.name for layer in report.converted]


@pytest.mark.parametrize("name", sorted(HEAD_NAMES))
def test_head_names(name: str) -> None:
    for build in (
        lambda: nn.Linear(32, 32),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(32, 32)),
    ):
        model = nn.Module()
        model.body = nn.Linear(32, 32)
        setattr(model, name, build())
        report = hot.convert(model)
        assert [layer.name for layer in report.converted] == ["body"]
    # The same name earlier in the model is no head.
    model = nn.Module()
    setattr(model, name, nn.Linear(32, 32))
    model.body = nn.Linear(32, 32)
    assert len(hot.convert(model).converted) == 2


def test_subclasses_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    attention = nn.MultiheadAttention(32, 4)
    model = nn.ModuleDict(
        {
            "special": Special(32, 32),
            "attention": attention,
            "plain": nn.Linear(32, 32),
        }
    )
    for filter_fn in (None, lambda module, fqn: True):
        report = hot.convert(copy.deepcopy(model), filter_fn=filter_fn)
        reasons = {layer.name: layer.reason for layer in report.skipped}
        assert reasons["special"] == "a subclass of nn.Linear (Special)"
        assert "subclass of nn.Linear" in reasons["attention.out_proj"]
        assert [layer.name for layer in report.converted] == ["plain"]


def test_computed_weights_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[1])
    report = hot.convert(model)
    assert [layer.name for layer in report.converted] == ["2"]
    assert len(report.skipped) == 2
    model(torch.randn(4, 32)).sum().backward()


def test_float64_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32).double(), nn.Linear(32, 32))
    report = hot.convert(model)
    assert [layer.reason for layer in report.skipped] == ["its weight is float64"]
    assert type(model[0]) is nn.Linear


def test_shared_module_is_replaced_everywhere() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = hot.convert(model)
    assert len(report.converted) == 1
    assert model[0] is model[2] and type(model[0]) is hot.HotLinear
    hot.revert(model)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


def test_root_linear() -> None:
    layer = nn.Linear(32, 32)
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
    text = str(hot.convert(model, "default"))
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "in", "->", "out", "x", "is", "kept", "in"]
    assert re.search(r"blocks\.0\.qkv +32 -> 96 +nothing \(weight frozen\)", text)
    assert re.search(r"blocks\.1\.qkv +32 -> 96 +0\.53 bytes a value \(fp32 / 7\.5\)", text)
    assert re.search(r"head +32 -> 50 +skipped: the output head", text)
    assert lines[-1] == "4 of 7 linear layers run HOT, HotConfig.recipe('default')"
    columns = [line.index("->") for line in lines[:-1]]
    assert len(set(columns)) == 1 or max(columns) - min(columns) <= 4


def test_report_with_a_token_grid() -> None:
    config = HotConfig.recipe("paper", token_grid=(14, 14), prefix_tokens=1)
    report = hot.convert(Model(), config)
    assert 0.5 < report.converted[0].bytes_per_value < 0.52


def test_bad_config() -> None:
    with pytest.raises(TypeError, match="config: "):
        hot.convert(Model(), 3)
    with pytest.raises(ValueError, match="recipe: 'quick'"):
        hot.convert(Model(), "quick")
