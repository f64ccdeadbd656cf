"""autotune: the measurements, the choice, and the effect of a plan."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hotcore.config import HotConfig

torch = pytest.importorskip("torch")
import hotcore  # noqa: E402
import hotcore.torch as hot  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hotcore.torch.plan import PLAIN, Measured  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
tuning = sys.modules["hotcore.torch.autotune"]  # hotcore.torch.autotune is the function
WIDTH, BATCH = 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.gelu(self.up(self.q(y) * self.k(y))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.past = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(F.linear(x, self._modules["past"].weight))  # not seen in the code


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


Times = Callable[..., None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Milliseconds of a layer by contender, instead of a clock's; the steps still run once."""
    original = tuning.in_turns

    def fake(**times: float | list[float]) -> None:
        def in_turns(steps: Mapping[str, Callable[[], object]], *rest: Any, **whole: Any) -> dict:
            if whole:
                return original(steps, *rest, **whole)
            for step in steps.values():
                step()
            rows = {name: times[name] for name in steps}
            return {n: v if isinstance(v, list) else [v] * 5 for n, v in rows.items()}

        monkeypatch.setattr(tuning, "in_turns", in_turns)

    return fake


def row(median: float, spread: float = 0.0, kept: int = 0) -> Measured:
    return Measured(median, median - spread, median + spread, kept)


# ---- choosing ----


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({"default": row(9), "fast": row(8)}, "fast"),
        ({"default": row(9, 0.6), "fast": row(8, 0.6)}, "default"),  # within the spread
        ({"default": row(9.9, 0.2), "fast": row(10.5)}, PLAIN),  # a win within the spread
        ({"default": row(12), "fast": row(11)}, PLAIN),
        ({"accurate": row(8), "default": row(8), "fast": row(8)}, "accurate"),
        ({"default": row(11), "fast": row(8)}, "fast"),  # the more accurate one does not win
    ],
)
def test_fastest(times: dict[str, Measured], choice: str) -> None:
    got, reason = tuning.fastest({PLAIN: row(10), **times})
    assert got == choice
    assert "of" in reason


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({"default": row(9, kept=500), "fast": row(12, kept=400)}, "default"),
        ({"default": row(9, kept=500), "fast": row(11, kept=400)}, "fast"),
        ({"accurate": row(9, kept=400), "default": row(9, kept=400)}, "accurate"),
        ({"default": row(12, kept=1), "fast": row(12, kept=1)}, PLAIN),
        ({"default": row(5, kept=1000)}, PLAIN),  # keeps no less
    ],
)
def test_smallest(times: dict[str, Measured], choice: str) -> None:
    assert tuning.smallest({PLAIN: row(10, kept=1000), **times}, 1.1)[0] == choice


def test_reasons_say_how_much_would_be_lost() -> None:
    assert tuning.fastest({PLAIN: row(10), "default": row(12), "fast": row(13)})[1] == (
        "default takes 1.20 of its time"
    )
    assert "within the spread" in tuning.fastest({PLAIN: row(10, 1), "default": row(9.9, 1)})[1]
    assert tuning.smallest({PLAIN: row(10, kept=9), "default": row(15, kept=1)}, 1.1)[1] == (
        "default takes 1.50 of its time"
    )


# ---- the whole ----


def test_plan_for_time(x: torch.Tensor, measured: Times) -> None:
    measured(plain=10.0, default=8.0, fast=6.0)
    model = Net()
    plan = hot.autotune(model, x, allow=("fast", "default"), verify=False)
    rows = {layer.name: layer for layer in plan.layers}
    assert list(rows["blocks.0.q"].times) == [PLAIN, "default", "fast"]  # by accuracy
    assert {row.choice for name, row in rows.items() if name.startswith("blocks")} == {"fast"}
    assert rows["unused"].fields is None and "never called" in rows["unused"].reason
    assert rows["past"].fields is None and "multiplied without it" in rows["past"].reason
    assert "head" not in rows
    report = hot.convert(model, overrides=plan.overrides(model=model)).hot_report
    assert [layer.name for layer in report.converted] == [n for n in rows if "blocks" in n]
    assert {layer.config for layer in report.converted} == {HotConfig.recipe("fast")}
    model(x).sum().backward()


def test_all_plain_is_no_error(x: torch.Tensor, measured: Times) -> None:
    measured(plain=1.0, default=2.0)
    model = Net()
    plan = hot.autotune(model, x, allow=["default"])
    assert all(layer.fields is None for layer in plan.layers)
    assert "default takes 2.00 of its time" in str(plan)
    assert not plan.steps  # nothing to compare with
    with pytest.warns(UserWarning, match="no layer is converted; all 10 .* overrides"):
        report = hot.convert(model, overrides=plan.overrides()).hot_report
    assert not report.converted


def test_equal_layers_are_measured_once(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = tuning.in_turns

    def in_turns(steps: Mapping[str, Callable[[], object]], *rest: object) -> object:
        seen.append(list(steps))
        return original(steps, *rest)

    monkeypatch.setattr(tuning, "in_turns", in_turns)
    plan = hot.autotune(Net(), x, allow=["default"], rounds=5, verify=False)
    assert seen == [[PLAIN, "default"]] * 3  # q and k, up, down
    times = {layer.name: layer.times for layer in plan.layers}
    assert times["blocks.0.q"] == times["blocks.1.k"]
    for layer in plan.layers:
        for row in layer.times.values():
            assert 0 < row.q1_ms <= row.median_ms <= row.q3_ms


def test_bytes(x: torch.Tensor, measured: Times) -> None:
    # q and k share an x; that of down is GELU's result, which GELU does not keep.
    measured(plain=10.0, default=10.0)
    plan = hot.autotune(Net(), x, allow=["default"], objective="memory", verify=False)
    rows = {layer.name: layer for layer in plan.layers}
    assert rows["blocks.0.q"].times[PLAIN].kept_bytes == 4 * BATCH * WIDTH / 2
    assert rows["blocks.0.down"].times[PLAIN].kept_bytes == 4 * BATCH * 128
    config = HotConfig()
    kept = hotcore.saved.saved_layout(BATCH, 128, config).bytes
    # and the seed
    assert kept <= rows["blocks.0.down"].times["default"].kept_bytes <= kept + 16
    assert rows["blocks.0.down"].choice == "default"


def test_what_something_else_keeps_is_no_gain(measured: Times) -> None:
    class Relu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))  # relu keeps its result

    measured(plain=10.0, default=10.0)
    plan = hot.autotune(Relu(), torch.randn(BATCH, WIDTH), objective="memory", allow="default")
    rows = {layer.name: layer for layer in plan.layers}
    assert rows["last"].times[PLAIN].kept_bytes == 0
    assert rows["last"].choice == PLAIN and "something else keeps x" in rows["last"].reason
    assert rows["first"].choice == "default"


def test_autocast_and_formats_are_seen(measured: Times) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 64, 3)
            self.conv = nn.Conv2d(64, 64, 3, padding=1)
            self.point = nn.Conv2d(64, 96, 1, stride=2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.point(self.conv(self.stem(x)))

    measured(plain=1.0, default=2.0)
    model = Images().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 10, 10).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        plan = hot.autotune(model, x, allow=["default"])
    shapes = {layer.name: layer.shape for layer in plan.layers}
    assert shapes == {
        "conv": "Conv2d 3x3 64 x 64, x [2, 64, 8, 8] bfloat16",
        "point": "Conv2d 1x1 96 x 64, x [2, 64, 8, 8] bfloat16",
    }
    watch = tuning.Watch({"point": model.point})
    with watch.on(), torch.autocast("cpu", torch.bfloat16):
        model(x)
    (call,) = watch.uses["point"].calls
    assert call.channels_last and call.requires_grad and call.autocast == torch.bfloat16
    layer = tuning._alone(model.point)
    assert tuning._key(layer, call) == tuning._key(model.point, call)
    assert tuning._key(nn.Conv2d(64, 96, 1, bias=False), call) != tuning._key(model.point, call)


def test_frozen_weights_and_several_calls(measured: Times) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.layer.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    measured(plain=3.0, default=2.0)
    inputs = torch.randn(BATCH, WIDTH)
    (layer,) = hot.autotune(Twice(), inputs, allow=["default"], verify=False).layers
    assert layer.times[PLAIN].median_ms == 6.0  # both calls
    assert layer.times["default"].kept_bytes <= 32  # seeds alone
    assert "2 calls" in layer.shape


def test_whole_steps_are_compared(x: torch.Tensor, measured: Times) -> None:
    measured(plain=10.0, default=5.0)
    plan = hot.autotune(Net(), x, allow=["default"])
    assert list(plan.steps) == [PLAIN, "planned"]
    assert all(row.median_ms > 0 for row in plan.steps.values())
    assert "whole forward and backward: plain" in str(plan)


@pytest.mark.long
def test_compiled_layers(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    plan = hot.autotune(
        Net(),
        x,
        allow=["accurate", "default"],
        rounds=5,
        compiled={"backend": backend},
        verify=False,
    )
    assert len(graphs) == 9  # three works, plain and two recipes: none fell back to eager
    assert "compiled" in plan.machine
    seen = []
    monkeypatch.setattr(
        tuning, "compile_layer", lambda layer, options: seen.append(1) or layer.forward
    )
    hot.autotune(torch.compile(Net()), x, allow=["default"], rounds=5, verify=False)
    assert len(seen) == 6
    model = Net()
    model.blocks[1].compile()
    hot.autotune(model, x, allow=["default"], rounds=5, verify=False)
    assert len(seen) == 12
    hot.autotune(Net(), x, allow=["default"], rounds=5, verify=False)
    assert len(seen) == 12


def test_custom_configs(x: torch.Tensor, measured: Times) -> None:
    own = HotConfig(gx_rounding="nearest")
    measured(**{PLAIN: 10.0, "custom 0": 5.0, "default": 5.0})
    model = Net()
    plan = hot.autotune(model, x, allow=[own, "default"], verify=False)
    assert plan.layers[0].choice == "custom 0"
    assert plan.overrides("paper")["blocks.0.q"] == own
    # A recipe's fields are put into the caller's: its token grid stays.
    measured(plain=10.0, default=5.0)
    plan = hot.autotune(model, x, allow="default", verify=False)
    base = HotConfig.recipe("paper", token_grid=(4, 4), gx_rounding="nearest")
    expected = HotConfig(token_grid=(4, 4), gx_rounding="nearest")
    assert plan.overrides(base)["blocks.0.q"] == expected


def test_save_load_and_plot(x: torch.Tensor, measured: Times, tmp_path: Path) -> None:
    measured(plain=[1.0, 2.0, 3.0, 4.0, 5.0], default=[0.1] * 5)
    plan = hot.autotune(Net(), x, allow=["default"])
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = hot.Plan.load(path)
    assert loaded == plan
    assert str(loaded) == str(plan)
    changed = loaded.override("past", gx_bits=4)
    assert changed.overrides()["past"].gx_bits == 4
    assert dataclasses.replace(changed, layers=plan.layers) == plan
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_table_groups_what_is_alike(x: torch.Tensor, measured: Times) -> None:
    measured(plain=10.0, default=5.0)
    lines = str(hot.autotune(Net(), x, allow=["default"], verify=False)).splitlines()
    assert "plain, ms (MB)" in lines[0] and "default, ms (MB)" in lines[0]
    assert [line.split("  ")[0] for line in lines[1:7]] == [
        *("blocks.*.q (2)", "blocks.*.k (2)", "blocks.*.up (2)", "blocks.*.down (2)"),
        *("unused", "past"),
    ]
    assert "for time: 8 of 10 layers run HOT" in lines[7]
    assert "sum of the layers: plain 80 ms" in lines[8]


def test_bad_arguments(x: torch.Tensor) -> None:
    model = Net()
    for options, message in (
        ({"objective": "speed"}, "objective: 'speed' is not one of 'time', 'memory'"),
        ({"allow": []}, "allow: empty"),
        ({"allow": ["quick"]}, "recipe: 'quick' is not one of"),
        ({"slowdown": 0.9}, "slowdown: 0.9 is below 1"),
        ({"rounds": 2}, "rounds: 2; expected at least 5"),
        ({"clock": "sun"}, "clock: 'sun'"),
    ):
        with pytest.raises(ValueError, match=message):
            hot.autotune(model, x, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("clock", ["device", "host", None])
def test_on_cuda(clock: str | None, rng: np.random.Generator) -> None:
    model = Net().cuda()
    x = torch.randn(4096, WIDTH, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        plan = hot.autotune(model, x, allow=("default", "fast"), clock=clock)
    timed = [layer for layer in plan.layers if layer.times]
    assert len(timed) == 8
    for layer in timed:
        assert all(0 < row.median_ms < 100 for row in layer.times.values())
        assert "bfloat16" in layer.shape
