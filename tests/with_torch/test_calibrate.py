"""paper.calibrate and its Selection: measured errors, the choice, applying, refusing."""

import builtins
import copy
import dataclasses
import pickle
from pathlib import Path

import hotcore
import hotcore.torch as hot
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hotcore import paper
from hotcore.config import HotConfig
from hotcore.paper.lqs import LayerErrors, Selection
from support import refused
from torch import nn
from torch_graphs import conv1d

pytestmark = pytest.mark.usefixtures("seeded")


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
def batches() -> list[torch.Tensor]:
    return [torch.randn(4, 20, 64) for _ in range(2)]


@pytest.fixture
def plan(batches: list[torch.Tensor]) -> Selection:
    return paper.calibrate(Net(), batches, loss_of)


class Weighted(nn.Module):
    """Layer with a prescribed g_y: the loss is its product with the output."""

    def __init__(self, gy: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(64, gy.shape[1])
        self.gy = gy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.gy).sum()


def calibrated(gy: torch.Tensor, **options: object) -> LayerErrors:
    x = torch.randn(gy.shape[0], 64)
    (layer,) = paper.calibrate(Weighted(gy), [x], lambda m, b: m(b), **options).layers
    return layer


def test_layers_are_those_that_convert_takes(plan: Selection) -> None:
    assert [layer.name for layer in plan.layers] == ["up", "down"]
    assert (plan.batches, plan.config) == (2, HotConfig.recipe("paper"))
    for layer in plan.layers:
        assert set(layer.gx_error) == {"tensor", "token"}
        assert set(layer.gw_error) == {"tensor", "channel", "token"}
        assert 0 < layer.gx_error["token"] < layer.gx_error["tensor"] < 1
        assert all(0 < error < 0.1 for error in layer.gw_error.values())


def test_errors_are_those_of_the_real_backward() -> None:
    # libhot's g_x against g_y w. Its rounding of w adds a little.
    gy = torch.randn(64, 96) * torch.where(torch.rand(64, 1) < 0.1, 30.0, 1.0)
    model = Weighted(gy)
    x = torch.randn(64, 64)
    exact = gy @ model.layer.weight.detach()
    for scale in ("tensor", "token"):
        config = HotConfig.recipe("default", gx_scale=scale)
        (layer,) = paper.calibrate(model, [x], lambda m, b: m(b), config).layers
        operands = gy, model.layer.weight.detach(), None
        gx, _, _ = hotcore.backward_linear(*operands, config=config, need="gx", key=1)
        real = float((gx - exact).square().sum() / exact.square().sum())
        assert 0.4 * real < layer.gx_error[scale] < 1.3 * real


@pytest.mark.parametrize("scale", ["tensor", "channel", "token"])
def test_gw_errors_are_those_of_equalised_tokens(scale: str) -> None:
    gy, x = torch.randn(64, 96), torch.randn(64, 64)
    x *= torch.where(torch.rand(64, 1) < 0.15, 100.0, 1.0)
    config = HotConfig.recipe("accurate", equalize_tokens=True, gw_scale=scale)
    (layer,) = paper.calibrate(Weighted(gy), [x], lambda m, b: m(b), config).layers
    saved = hotcore.compress_activation(x, config)
    exact = gy.T @ hotcore.decompress_activation(saved)
    gw = hotcore.backward_linear(gy, None, saved, need="gw").gw
    real = float((gw - exact).square().sum() / exact.square().sum())
    assert 0.7 * real < layer.gw_error[scale] < 1.4 * real


def test_outlier_tokens_ask_for_finer_scales() -> None:
    even = torch.randn(64, 96)
    tokens = even.clone()
    tokens[5] *= 20
    layer = calibrated(tokens)
    assert layer.fields == {"gx_scale": "token", "gw_scale": "token"}
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


def test_gw_error_is_against_the_same_basis() -> None:
    # LQS ignores the loss of rank: at rank 1 the error must not contain it.
    gy = torch.randn(64, 96)
    config = HotConfig.recipe("paper", rank=1)
    assert max(calibrated(gy, config=config).gw_error.values()) < 0.01


def test_x_by_keyword_and_written_afterwards(batches: list[torch.Tensor]) -> None:
    def written(model: Net, x: torch.Tensor) -> torch.Tensor:
        h = x + 0
        y = model.down(input=model.up(input=h))
        h.zero_()
        return y.sum()

    with pytest.raises(RuntimeError, match="layer up: its x was written in place"):
        paper.calibrate(Net(), batches, written)


class InPlace(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h *= 2  # written in place: a view, since x has three dimensions
        y = self.down(F.gelu(h))
        y += x
        return self.head(self.norm(y.flatten(0, 1)))


def test_outputs_written_in_place(batches: list[torch.Tensor]) -> None:
    model = InPlace()
    plain = paper.calibrate(model, batches, loss_of).layers
    assert [layer.name for layer in plain] == ["up", "down"]
    converted = hot.convert(copy.deepcopy(model), "paper", lambda _, name: name != "head")
    seen = paper.calibrate(converted, batches, loss_of).layers
    assert [layer.name for layer in seen] == ["up", "down"]


def test_a_compiled_model_that_has_run(batches: list[torch.Tensor]) -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    loss_of(compiled, batches[0]).backward()
    plain, seen = (paper.calibrate(m, batches, loss_of).layers for m in (model, compiled))
    assert [layer.gw_error for layer in seen] == [layer.gw_error for layer in plain]


@pytest.mark.parametrize("recipe", ["paper", "default"])
def test_convolutions(recipe: str) -> None:
    # A 1x1 kernel as a linear layer over its pixels; others quantise no g_y.
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
    assert 0 < found.gx_error["token"] < found.gx_error["tensor"] < 1
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
    # The layer's place in the model changes its random numbers: near, not equal.
    assert found.gx_error == pytest.approx(same.gx_error, rel=0.15)
    assert found.gw_error == pytest.approx(same.gw_error, rel=0.15)


def test_a_convolution_of_one_image_without_a_batch() -> None:
    model, image = nn.Conv2d(64, 96, 1), torch.randn(64, 8, 8)
    options = {"filter_fn": lambda module, name: True}
    one, batched = (
        paper.calibrate(model, [x], lambda m, b: m(b).square().mean(), **options).layers
        for x in (image, image[None])
    )
    assert one == batched


def test_conv1d_of_transformers() -> None:
    model = nn.Sequential(conv1d(64, 96), conv1d(96, 64))
    plan = paper.calibrate(model, [torch.randn(4, 20, 64)], lambda m, b: m(b).square().mean())
    assert [layer.name for layer in plan.layers] == ["0", "1"]
    report = hot.convert(model, "paper", overrides=plan.overrides("paper", model)).hot_report
    scales = [layer.fields["gx_scale"] for layer in plan.layers]
    assert [layer.config.gx_scale for layer in report.converted] == scales


def test_selection_is_applied(plan: Selection) -> None:
    model = Net()
    hot.convert(model, "paper", overrides=plan.overrides("paper", model))
    assert model.up.config == plan.overrides("paper")["up"]
    assert model.down.config.gx_scale == plan.layers[1].fields["gx_scale"]
    # Without the model, convert finds that no name matches.
    with pytest.raises(ValueError, match="up"):
        hot.convert(nn.Sequential(nn.Linear(64, 64)), "paper", overrides=plan.overrides("paper"))


def test_same_seed_same_plan(batches: list[torch.Tensor]) -> None:
    model = Net()
    plans = [paper.calibrate(model, batches, loss_of, seed=seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_converted_model_and_filter(batches: list[torch.Tensor]) -> None:
    model = hot.convert(Net(), filter_fn=lambda module, name: name == "down")
    assert [layer.name for layer in paper.calibrate(model, batches, loss_of).layers] == ["down"]
    plan = paper.calibrate(Net(), batches, loss_of, filter_fn=lambda module, name: name == "head")
    assert [layer.name for layer in plan.layers] == ["head"]


def test_frozen(plan: Selection) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batches = 3
    with pytest.raises(TypeError):
        plan.layers[0].gx_error["token"] = 0.0


def test_copied_and_pickled(plan: Selection) -> None:
    for same in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert same == plan and same.overrides() == plan.overrides()


def test_plan_for_another_model(plan: Selection) -> None:
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"another model; 2 of its 2 layers .*: up, down .* 0, 1"):
        plan.overrides("paper", other)


def test_table(plan: Selection) -> None:
    lines = str(plan).splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert [line.split()[0] for line in lines[1:3]] == ["up", "down"]
    shown = [float(cell) for cell in lines[1].split()[1:6]]
    errors = [*plan.layers[0].gx_error.values(), *plan.layers[0].gw_error.values()]
    assert shown == pytest.approx([error**0.5 for error in errors], abs=1e-4)
    assert "gx_scale=" in lines[1]
    assert "2 layers over 2 batches" in lines[-1]


def test_pattern_shows_outlier_tokens() -> None:
    gy = torch.rand(64, 96)
    gy[10] *= 50
    pattern = np.array(calibrated(gy).pattern)
    assert pattern.shape == (32, 32)
    assert pattern.max(axis=1).argmax() == 5
    assert pattern.max() == gy.max()


def test_plot(plan: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

    real = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(lambda: plan.plot(tmp_path / "plan.png"), "pip install matplotlib", ImportError)


def test_without_gradients(batches: list[torch.Tensor]) -> None:
    refused(lambda: paper.calibrate(Net(), batches, lambda m, b: loss_of(m, b).item()), "loss_fn: ")
    with pytest.raises(ValueError, match="no gradient reached up, down"):
        paper.calibrate(Net(), batches, lambda m, b: m.head(b).sum())


def test_gradients_that_are_not_finite(batches: list[torch.Tensor]) -> None:
    model = Net()
    with torch.no_grad():
        model.down.weight[3] = torch.inf  # g_x of down, and g_y of up
    with pytest.raises(ValueError, match="calibrate: NaN or Inf in .* up, down"):
        paper.calibrate(model, batches, loss_of)


def test_bad_arguments(batches: list[torch.Tensor]) -> None:
    for model, data, options, message in (
        (Net(), [], {}, "batches: empty"),
        (Net(), batches, {"gw_fine": "row"}, "gw_fine: 'row'"),
        (Net(), batches, {"gain": 1.5}, "gain: .*got 1.5"),
        (Net(), batches, {"seed": -1}, "^seed: seed = -1 is outside"),
        (nn.ReLU(), batches, {}, "no "),
    ):
        with pytest.raises(ValueError, match=message):
            paper.calibrate(model, data, loss_of, **options)
