"""Plan: the choice of each layer, applied, changed, saved, read back strictly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hotcore.config import HotConfig

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from hotcore.torch.plan import LayerPlan, Measured  # noqa: E402
from torch import nn  # noqa: E402


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)


@pytest.fixture
def plan() -> hot.Plan:
    times = {"plain": Measured(2.0, 1.9, 2.2, 4096), "default": Measured(1.0, 0.9, 1.1, 512)}
    layers = [LayerPlan(name, {}, times, "default", "", "Linear") for name in ("up", "down")]
    return hot.Plan(tuple(layers), HotConfig(), "time", "a machine")


def test_plan_is_applied(plan: hot.Plan) -> None:
    plan = plan.override("up", basis="sketch", rank=4, storage="int8").override("down", gx_bits=4)
    model = Net()
    hot.convert(model, overrides=plan.overrides(model=model))
    assert model.up.config == plan.overrides()["up"]
    assert (model.up.config.basis, model.up.config.rank) == ("sketch", 4)
    assert (model.down.config.basis, model.down.config.gx_bits) == ("full", 4)
    # Without the model at hand, convert itself finds that nothing matches.
    with pytest.raises(ValueError, match="up"):
        hot.convert(nn.Sequential(nn.Linear(64, 64)), overrides=plan.overrides())


def test_rank_and_basis_by_layer(plan: hot.Plan) -> None:
    changed = plan.override("d*", basis="sketch", rank=4, storage="int8")
    assert changed.overrides()["down"].basis == "sketch"
    assert changed.overrides()["down"].rank == 4
    assert changed.overrides()["up"] == plan.overrides()["up"]
    assert plan.overrides()["down"].basis == "full"  # the plan itself is frozen
    with pytest.raises(ValueError, match=r"pattern: 'x\*' matches none of up, down"):
        plan.override("x*", rank=4)
    with pytest.raises(ValueError, match="fields: HotConfig has no field 'ranks'"):
        plan.override("down", ranks=4)
    with pytest.raises(ValueError, match="rank: 17"):
        plan.override("down", basis="sketch", rank=17, storage="int8")


def test_save_and_load(plan: hot.Plan, tmp_path: Path) -> None:
    plan = plan.override("up", basis="lowpass", storage="int8", rows=(0, 1, 2))
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = hot.Plan.load(path)
    assert loaded.overrides() == plan.overrides()
    assert loaded == plan
    assert str(loaded) == str(plan)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ("[]", "is no plan"), ('{"format": 1}', "is no plan")]
)
def test_load_something_else(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        hot.Plan.load(path)


STEP = {"median_ms": 2.0, "q1_ms": 1.0, "q3_ms": 3.0, "kept_bytes": 0}


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
        ("config", ..., "'config' is missing"),
        ("config", [], "config: expected an object, got a list"),
        ("config.rank", 400000000000, "config: rank: 400000000000 does not fit"),
        ("config.speed", 1, "config: HotConfig has no field 'speed'"),
        ("layers", {}, "layers: expected a list, got an object"),
        ("layers.0", 5, r"layers\[0\]: expected a JSON object, got an integer"),
        ("layers.0.name", None, r"layers\[0\]: name: expected a text, got null"),
        ("layers.0.speed", 1, r"layers\[0\]: unknown field 'speed'"),
        ("objective", "speed", "objective: 'speed' is neither"),
        ("layers.0.times.plain.q1_ms", ..., "plain: 'q1_ms' is missing"),
        ("layers.0.times.plain.q1_ms", "0", "plain: q1_ms: expected an integer or a number"),
        ("layers.0.times.plain.kept_bytes", True, "kept_bytes: expected an integer, got a bool"),
        ("layers.0.times.plain.kept_bytes", -1, "kept_bytes: -1 is negative"),
        ("layers.0.times.plain", ..., "times: expected 'plain'"),
        ("layers.0.choice", "other", "the choice, 'other'"),
        ("layers.0.times.plain.speed", 1, "unknown field 'speed'"),
        ("layers.0.times.plain.median_ms", 0, "plain: expected 0 < q1_ms <= median_ms <= q3_ms"),
        ("layers.0.times.plain.q1_ms", 2.1, r"expected .*, got 2\.1, 2\.0, 2\.2"),
        ("layers.0.times.default.q3_ms", math.nan, r"times: default: expected .*, 1\.0, nan"),
        ("layers.0.times.default.q3_ms", math.inf, r"got 0\.9, 1\.0, inf"),
        ("steps", {"plain": {**STEP, "q1_ms": 0}, "planned": STEP}, "steps: plain: expect"),
        ("steps", {"plain": STEP}, "steps: expected 'plain' and 'planned'"),
        ("layers.0.fields", {"speed": 1}, "HotConfig has no field 'speed'"),
        ("layers.0.fields", {"gx_bits": 5}, "fields: gx_bits: 5"),
        ("layers.0.fields", {"gx_bits": "8"}, "fields: gx_bits: expected an int"),
        ("layers.0.times", [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]], "nested deeper than 16"),
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
    file.write_text('{"format": "hotcore plan 3", "format": "hotcore plan 3"}')
    with pytest.raises(ValueError, match="'format' occurs twice"):
        hot.Plan.load(file)


def test_plan_for_another_model(plan: hot.Plan) -> None:
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(
        ValueError, match=r"another model; 2 of its 2 layers .*: up, down \(.* 0, 1"
    ):
        plan.overrides(model=other)


def test_json_is_readable(plan: hot.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["format"] == "hotcore plan 3"
    assert [layer["name"] for layer in content["layers"]] == ["up", "down"]
