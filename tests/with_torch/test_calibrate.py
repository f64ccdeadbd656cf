"""calibrate and Plan: measured errors, the choice, saving, applying, refusing."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hotcore.config import HotConfig

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hotcore import paper  # noqa: E402
from hotcore.torch.plan import LayerPlan  # noqa: E402
from torch import nn  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x.flatten(0, 1)))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture
def batches(rng: np.random.Generator) -> list[torch.Tensor]:
    torch.manual_seed(int(rng.integers(2**31)))
    return [torch.randn(4, 20, 64) for _ in range(2)]


@pytest.fixture
def plan(batches: list[torch.Tensor]) -> hot.Plan:
    return paper.calibrate(Net(), batches, loss_of)


class Weighted(nn.Module):
    """One layer whose g_y is a given matrix: the loss is its product with the output."""

    def __init__(self, gy: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(64, gy.shape[1])
        self.gy = gy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.gy).sum()


def calibrated(gy: torch.Tensor, **options: object) -> LayerPlan:
    x = torch.randn(gy.shape[0], 64)
    (layer,) = paper.calibrate(Weighted(gy), [x], lambda m, b: m(b), **options).layers
    return layer


def test_layers_are_those_that_convert_takes(plan: hot.Plan) -> None:
    assert [layer.name for layer in plan.layers] == ["up", "down"]
    assert plan.batches == 2
    assert plan.config == HotConfig.recipe("paper")
    for layer in plan.layers:
        assert set(layer.gx_error) == {"tensor", "row"}
        assert set(layer.gw_error) == {"tensor", "channel", "token"}
        assert 0 < layer.gx_error["row"] < layer.gx_error["tensor"] < 1
        assert all(0 < error < 0.1 for error in layer.gw_error.values())


def test_errors_are_those_of_the_real_backward(rng: np.random.Generator) -> None:
    # g_x of libhot itself, against g_y w; w is rounded there, too, which adds a little.
    import hotcore

    torch.manual_seed(int(rng.integers(2**31)))
    gy = torch.randn(64, 96) * torch.where(torch.rand(64, 1) < 0.1, 30.0, 1.0)
    model = Weighted(gy)
    x = torch.randn(64, 64)
    exact = gy @ model.layer.weight.detach()
    for scale in ("tensor", "row"):
        config = HotConfig.recipe("default", gx_scale=scale)
        (layer,) = paper.calibrate(model, [x], lambda m, b: m(b), config).layers
        gx, _, _ = hotcore.backward_linear(
            gy, model.layer.weight.detach(), None, config=config, need="gx", key=1
        )
        real = float((gx - exact).square().sum() / exact.square().sum())
        assert 0.4 * real < layer.gx_error[scale] < 1.3 * real


def test_outlier_tokens_ask_for_finer_scales(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    even = torch.randn(64, 96)
    tokens = even.clone()
    tokens[5] *= 20
    layer = calibrated(tokens)
    assert layer.fields == {"gx_scale": "row", "gw_scale": "token"}
    assert layer.gw_error["token"] < 0.5 * layer.gw_error["tensor"]
    # Tokens of equal size: a finer scale gains nothing.
    alike = even[:, :1].sign() * even[0] + 0.01 * even
    layer = calibrated(alike, config="accurate", gw_fine="token")
    assert layer.fields == {"gx_scale": "tensor", "gw_scale": "tensor"}
    # Outlier channels: a scale per channel, if that choice is offered.
    channels = even.clone()
    channels[:, 5] = 60 * channels[:, 5].sign()
    assert calibrated(channels, config="accurate", gw_fine="token").fields["gw_scale"] == "tensor"
    assert calibrated(channels, config="accurate").fields["gw_scale"] == "channel"
    assert calibrated(tokens, gain=0.999999).fields["gw_scale"] == "tensor"


def test_gw_error_is_against_the_same_basis(rng: np.random.Generator) -> None:
    # The loss of rank is not LQS's: at rank 1 the error must not jump to the share that is lost.
    torch.manual_seed(int(rng.integers(2**31)))
    gy = torch.randn(64, 96)
    config = HotConfig.recipe("paper", rank=1)
    assert max(calibrated(gy, config=config).gw_error.values()) < 0.01


def test_nothing_is_changed(batches: list[torch.Tensor]) -> None:
    model = Net()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = copy.deepcopy(model.state_dict())
    modules = list(model.modules())
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    paper.calibrate(model, batches, loss_of)
    assert torch.equal(torch.rand(()), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(model.modules()) == modules
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight))
    assert model.down.weight.grad is None
    assert not model.up._forward_hooks


@pytest.mark.parametrize("recipe", ["paper", "default"])
def test_convolutions(recipe: str, rng: np.random.Generator) -> None:
    # A 1x1 kernel as a linear layer over its pixels; others quantise no g_y.
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.Conv2d(64, 64, 3, stride=2, padding=1, padding_mode="circular"),
        nn.Conv2d(64, 96, 1, 2),
        nn.Conv2d(96, 64, (2, 3), padding="same", dilation=2),
    )
    x = torch.randn(2, 3, 34, 34)
    gys: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y = model[0](batch)
        for name in ("1", "2", "3"):
            y = model.get_submodule(name)(y)
            y.register_hook(lambda g, name=name: gys.update({name: g}))
        return y.square().mean()

    plan = paper.calibrate(model, [x], loss, recipe)
    (found,) = plan.layers
    assert found.name == "2"
    assert 0 < found.gx_error["row"] < found.gx_error["tensor"] < 1
    assert max(found.gw_error.values()) < 0.02
    converted = hot.convert(copy.deepcopy(model), recipe)
    assert [layer.name for layer in paper.calibrate(converted, [x], loss, recipe).layers] == ["2"]
    with pytest.raises(ValueError, match="no layer to measure"):
        paper.calibrate(model[:2], [x], lambda m, b: m(b).sum(), recipe)
    pointwise = model[2]
    with torch.no_grad():
        pixels = model[1](model[0](x))[:, :, ::2, ::2].permute(0, 2, 3, 1).reshape(-1, 64)
    gy = gys["2"].permute(0, 2, 3, 1).reshape(-1, 96)
    linear = Weighted(gy)
    linear.layer.weight.data = pointwise.weight.detach()[:, :, 0, 0]
    config = HotConfig.recipe(recipe, token_grid=(8, 8) if recipe == "paper" else None)
    (same,) = paper.calibrate(linear, [pixels], lambda m, b: m(b), config).layers
    # Other random numbers (the layer's place in the model): near, not equal.
    for scale, error in found.gx_error.items():
        assert error == pytest.approx(same.gx_error[scale], rel=0.15)
    for scale, error in found.gw_error.items():
        assert error == pytest.approx(same.gw_error[scale], rel=0.15)


def test_conv1d_of_transformers(rng: np.random.Generator) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(conv1d(96, 64), conv1d(64, 96))
    plan = paper.calibrate(model, [torch.randn(4, 20, 64)], lambda m, b: m(b).square().mean())
    assert [layer.name for layer in plan.layers] == ["0", "1"]
    report = hot.convert(model, "paper", overrides=plan.overrides("paper", model)).hot_report
    assert [layer.config.gx_scale for layer in report.converted] == [
        layer.fields["gx_scale"] for layer in plan.layers
    ]


def test_plan_is_applied(plan: hot.Plan) -> None:
    plan = plan.override("up", basis="sketch", rank=4).override("down", gx_bits=8)
    model = Net()
    hot.convert(model, "paper", overrides=plan.overrides("paper", model))
    assert model.up.config == plan.overrides("paper")["up"]
    assert (model.up.config.basis, model.up.config.rank) == ("sketch", 4)
    assert (model.down.config.basis, model.down.config.gx_bits) == ("lowpass", 8)
    assert model.down.config.gx_scale == plan.layers[1].fields["gx_scale"]
    # Without the model at hand, convert itself finds that nothing matches.
    with pytest.raises(ValueError, match="up"):
        hot.convert(nn.Sequential(nn.Linear(64, 64)), "paper", overrides=plan.overrides("paper"))


def test_same_seed_same_plan(batches: list[torch.Tensor]) -> None:
    model = Net()
    plans = [paper.calibrate(model, batches, loss_of, seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_converted_model_and_filter(batches: list[torch.Tensor]) -> None:
    model = Net()
    hot.convert(model, filter_fn=lambda module, name: name == "down")
    assert [layer.name for layer in paper.calibrate(model, batches, loss_of).layers] == ["down"]
    plan = paper.calibrate(Net(), batches, loss_of, filter_fn=lambda module, name: name == "head")
    assert [layer.name for layer in plan.layers] == ["head"]


def test_overrides(plan: hot.Plan) -> None:
    config = HotConfig.recipe("paper", gx_bits=8)
    overrides = plan.overrides(config, Net())
    assert list(overrides) == ["up", "down"]
    for layer in plan.layers:
        assert overrides[layer.name] == dataclasses.replace(config, **layer.fields)


def test_rank_and_basis_by_layer(plan: hot.Plan) -> None:
    changed = plan.override("d*", basis="sketch", rank=4)
    assert changed.overrides()["down"].basis == "sketch"
    assert changed.overrides()["down"].rank == 4
    assert changed.overrides()["up"] == plan.overrides()["up"]
    assert plan.overrides()["down"].basis == "lowpass"  # the plan itself is frozen
    with pytest.raises(ValueError, match=r"pattern: 'x\*' matches none of up, down"):
        plan.override("x*", rank=4)
    with pytest.raises(ValueError, match="fields: HotConfig has no field 'ranks'"):
        plan.override("down", ranks=4)
    with pytest.raises(ValueError, match="rank: 17"):
        plan.override("down", rank=17)


def test_frozen(plan: hot.Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batches = 3
    with pytest.raises(TypeError):
        plan.layers[0].gx_error["row"] = 0.0


def test_save_and_load(plan: hot.Plan, tmp_path: Path) -> None:
    plan = plan.override("up", basis="lowpass", rows=(0, 1, 2))
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = hot.Plan.load(path)
    assert loaded.overrides() == plan.overrides()
    assert loaded.layers[0].gw_error == plan.layers[0].gw_error
    assert loaded.config == plan.config
    pattern = np.array(plan.layers[0].pattern)
    np.testing.assert_allclose(np.array(loaded.layers[0].pattern), pattern, rtol=0.01)
    assert str(loaded) == str(plan)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ("[]", "is no plan"), ('{"format": 1}', "is no plan")]
)
def test_load_something_else(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        hot.Plan.load(path)


def spoil(content: Any, path: str, value: Any) -> None:
    """Put ``value`` at ``path`` ("layers.0.name"); an Ellipsis takes it out."""
    *way, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in way:
        content = content[step]
    if value is ...:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("speed", 1, "unknown field 'speed'"),
        ("objective", "time", "unknown field 'objective'"),  # of the other format
        ("config", ..., "'config' is missing"),
        ("config", [], "config: expected an object, got a list"),
        ("config.rank", 400000000000, "config: rank: 400000000000 does not fit"),
        ("config.speed", 1, "config: HotConfig has no field 'speed'"),
        ("batches", True, "batches: expected an integer, got a bool"),
        ("batches", -1, "batches: -1 is negative"),
        ("layers", {}, "layers: expected a list, got an object"),
        ("layers.0", 5, r"layers\[0\]: expected a JSON object, got an integer"),
        ("layers.0.name", None, r"layers\[0\]: name: expected a text, got null"),
        ("layers.0.speed", 1, r"layers\[0\]: unknown field 'speed'"),
        ("layers.0.gx_error.row", ..., "gx_error: 'row' is missing"),
        ("layers.0.gx_error.row", "0", "gx_error: row: expected an integer or a number"),
        ("layers.0.gw_error.token", -1.0, "gw_error: token: -1.0 is negative"),
        ("layers.0.fields", {"speed": 1}, "HotConfig has no field 'speed'"),
        ("layers.0.fields", {"gx_bits": 5}, "fields: gx_bits: 5"),
        ("layers.0.fields", {"gx_bits": "8"}, "fields: gx_bits: expected an int"),
        ("layers.0.pattern", [[1.0], [1.0, 2.0]], "pattern: its rows differ"),
        ("layers.0.pattern", [["x"]], "pattern: expected an integer or a number, got a text"),
        ("layers.0.pattern", [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]], "nested deeper than 16"),
    ],
)
def test_load_is_strict(
    plan: hot.Plan, path: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    content = json.loads(file.read_text())
    spoil(content, path, value)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        hot.Plan.load(file)
    assert str(raised.value).startswith(f"path: {file}")


def test_load_has_limits(plan: hot.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    size = file.stat().st_size
    monkeypatch.setattr("hotcore._strict_json.MAX_FILE_BYTES", size)
    assert hot.Plan.load(file).config == plan.config
    monkeypatch.setattr("hotcore._strict_json.MAX_FILE_BYTES", size - 1)
    with pytest.raises(ValueError, match=f"larger than {size - 1} bytes"):
        hot.Plan.load(file)
    file.write_text("kept")
    with pytest.raises(ValueError, match=f"plan: .* make {size} bytes"):
        plan.save(file)
    assert file.read_text() == "kept"
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is no JSON"):
        hot.Plan.load(file)
    file.write_text('{"format": "hotcore plan 1", "format": "hotcore plan 1"}')
    with pytest.raises(ValueError, match="'format' occurs twice"):
        hot.Plan.load(file)


def test_plan_for_another_model(plan: hot.Plan) -> None:
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(
        ValueError, match=r"another model; 2 of its 2 layers .*: up, down \(.* 0, 1"
    ):
        plan.overrides("paper", other)


def test_table(plan: hot.Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert [line.split()[0] for line in lines[1:3]] == ["up", "down"]
    shown = [float(cell) for cell in lines[1].split()[1:6]]
    errors = [*plan.layers[0].gx_error.values(), *plan.layers[0].gw_error.values()]
    assert shown == pytest.approx([error**0.5 for error in errors], abs=1e-4)
    assert "gx_scale=" in lines[1]
    assert "2 layers over 2 batches" in lines[-1]


def test_pattern_shows_outlier_tokens(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    gy = torch.rand(64, 96)
    gy[10] *= 50
    pattern = np.array(calibrated(gy).pattern)
    assert pattern.shape == (32, 32)
    assert pattern.max(axis=1).argmax() == 5
    assert pattern.max() == gy.max()


def test_plot(plan: hot.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

    real = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plan.plot(tmp_path / "plan.png")


def test_without_gradients(batches: list[torch.Tensor]) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are off"):
        paper.calibrate(Net(), batches, loss_of)
    with pytest.raises(ValueError, match="loss_fn: returned nothing that requires grad"):
        paper.calibrate(Net(), batches, lambda m, b: loss_of(m, b).detach())
    with pytest.raises(ValueError, match="loss_fn: "):
        paper.calibrate(Net(), batches, lambda m, b: loss_of(m, b).item())
    with pytest.raises(ValueError, match="no gradient reached up, down"):
        paper.calibrate(Net(), batches, lambda m, b: m.head(b).sum())


def test_bad_arguments(batches: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="batches: empty"):
        paper.calibrate(Net(), [], loss_of)
    with pytest.raises(ValueError, match="gw_fine: 'row'"):
        paper.calibrate(Net(), batches, loss_of, gw_fine="row")
    with pytest.raises(ValueError, match="gain: 1.5"):
        paper.calibrate(Net(), batches, loss_of, gain=1.5)
    with pytest.raises(ValueError, match="no "):
        paper.calibrate(nn.ReLU(), batches, loss_of)


def test_json_is_readable(plan: hot.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["format"] == "hotcore plan 1"
    assert [layer["name"] for layer in content["layers"]] == ["up", "down"]
