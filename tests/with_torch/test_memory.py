"""memory_report: counts the bytes that autograd keeps, and changes nothing."""

import copy
import gc
import json
import weakref
from typing import Any

import hotcore.torch as hot
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hotcore.torch.tools.memory import MemoryReport
from torch import nn

BATCH, WIDTH = 256, 64
UP = 4 * WIDTH
VALUES = BATCH * WIDTH


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, UP), nn.Linear(UP, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.batch_norm(x + self.down(F.gelu(self.up(self.norm(x))))))


@pytest.fixture
def x(rng: np.random.Generator) -> torch.Tensor:
    torch.manual_seed(int(rng.integers(2**31)))
    return torch.randn(BATCH, WIDTH)


def by_name(report: MemoryReport) -> dict[str, tuple[int, int]]:
    return {module.name: (module.before, module.after) for module in report.modules}


def test_bytes_of_every_module(x: torch.Tensor) -> None:
    report = hot.memory_report(Net(), x)
    sizes = by_name(report)
    assert sizes["norm"] == (4 * (VALUES + 2 * BATCH),) * 2  # x, mean, 1/std
    assert (sizes["up"][0], sizes["down"][0]) == (4 * VALUES, 4 * 4 * VALUES)
    assert sizes[""] == (4 * 4 * VALUES,) * 2  # gelu's input, in the forward of the model itself
    assert sizes["head"] == (4 * VALUES,) * 2
    for name, values in (("up", VALUES), ("down", 4 * VALUES)):
        # half a byte and a bfloat16 for 64 values, and the seed
        assert sizes[name][1] == values * (1 / 2 + 2 / 64) + 8
    totals = [sum(column) for column in zip(*sizes.values(), strict=True)]
    assert [report.before, report.after] == totals and report.peak_before is None


def test_shared_storages_count_once(x: torch.Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x[: BATCH // 2]).sum()

    report = hot.memory_report(Twice(), x)
    assert by_name(report)["q"][0] == 4 * VALUES
    assert "k" not in by_name(report) or by_name(report)["k"][0] == 0


def test_converted_model(x: torch.Tensor) -> None:
    model = Net()
    plain = hot.memory_report(model, x, "fast")
    hot.convert(model, "fast")
    modules = list(model.modules())
    report = hot.memory_report(model, x)
    assert list(model.modules()) == modules
    assert by_name(report) == by_name(plain)
    assert report.changes == "as converted"


class Odd(nn.Module):
    """Buffers that are expanded, of inference mode or alive in a graph; TorchScript; a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, UP), nn.Linear(UP, WIDTH)
        self.act = torch.jit.script(nn.ReLU())
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(1, WIDTH).expand(8, WIDTH))
        self.register_buffer("scale", torch.full([WIDTH], 2.0))
        with torch.inference_mode():
            self.register_buffer("count", torch.zeros(3))
        self.adjacent = torch.eye(BATCH).to_sparse()
        self.head = hot.LinearCrossEntropy(WIDTH, 7, config="accurate")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(self.adjacent, self.down(self.act(self.up(x))))
        y = self.batch_norm(x) * self.mask[:1] * self.scale
        return self.head(y, torch.zeros(BATCH, dtype=torch.long))


def test_state_of_every_kind_is_restored(x: torch.Tensor) -> None:
    """A plain model is converted for the report, although its head has a configuration."""
    model = Odd()
    model(x).backward()
    loss = model(x)
    grad, state = model.up.weight.grad, copy.deepcopy(model.state_dict())
    report = hot.memory_report(model, x, filter_fn=lambda *_: True)
    assert "convert(" in report.changes and report.after < report.before
    hot.convert(model, filter_fn=lambda *_: True, inputs=x)
    assert model.up.weight.grad is grad
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    loss.backward()  # no buffer was written
    hot.revert(model)


def test_inputs_and_losses(x: torch.Tensor) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, object]:
            return {"logits": self.net(a + b), "hidden": (a, None)}

    reports = [
        hot.memory_report(Two(), (x, x)),
        hot.memory_report(Two(), {"a": x, "b": x}),
        hot.memory_report(Two(), x, loss_fn=lambda m, v: m(v, v)["logits"].mean()),
    ]
    assert len({(report.before, report.after) for report in reports}) == 1


def test_autocast(x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = hot.memory_report(Net(), x)
    sizes = by_name(report)
    assert sizes[""] == (2 * 4 * VALUES,) * 2
    assert sizes["down"][0] >= 2 * 4 * VALUES


def test_overrides(x: torch.Tensor) -> None:
    report = hot.memory_report(Net(), x, "default", overrides={"down": "accurate"})
    assert by_name(report)["down"][1] == 4 * VALUES + 4 * UP + 8
    report = hot.memory_report(Net(), x, filter_fn=lambda module, name: name == "up")
    assert by_name(report)["down"][1] == 16 * VALUES


def test_table_and_json(x: torch.Tensor) -> None:
    report = hot.memory_report(Net(), x)
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["module", "type"]
    (row,) = (line.split() for line in lines if line.startswith("down "))
    assert row[1] == "Linear" and row[2] == f"{16 * VALUES / 2**20:.2f}"
    assert float(row[4]) == pytest.approx(0.133, abs=1e-3)
    assert lines[-2].startswith("kept for backward")
    assert "convert(HotConfig.recipe('default'))" in lines[-1]
    content = json.loads(report.to_json())
    assert content["before"] == report.before and content["after"] == report.after
    assert sum(module["after"] for module in content["modules"]) == report.after


def test_long_table() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(60)))
    text = str(hot.memory_report(model, torch.randn(4, 64)))
    assert len(text.splitlines()) == 1 + 40 + 1 + 2
    assert "20 more" in text


def test_bad_use(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="config: None, and the model is plain: there is nothing"):
        hot.memory_report(Net(), x, None)
    with pytest.raises(ValueError, match="holds no tensor with a gradient"):
        hot.memory_report(Net().requires_grad_(False), x)


def test_nothing_outlives_the_report() -> None:
    layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 1)]
    model = nn.Sequential(*layers, nn.GELU(), nn.Flatten(), nn.Linear(64 * 36, 64))
    kept: list[weakref.ref[torch.Tensor]] = []
    original = torch.autograd.graph.saved_tensors_hooks

    class Watched(original):
        def __init__(self, pack: Any, unpack: Any) -> None:
            def watched(tensor: torch.Tensor) -> Any:
                kept.append(weakref.ref(tensor))
                return pack(tensor)

            super().__init__(watched, unpack)

    images = torch.randn(2, 3, 8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "saved_tensors_hooks", Watched)
        hot.memory_report(model, images)
    gc.collect()
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), images)}
    assert kept
    assert not [t for t in (ref() for ref in kept) if t is not None and t.data_ptr() not in own]


@pytest.mark.cuda
def test_cuda_peak() -> None:
    model = Net().cuda()
    x = torch.randn(64 * BATCH, WIDTH, device="cuda")
    report = hot.memory_report(model, x, slower=True)
    assert report.peak_before is not None and report.peak_after is not None
    assert report.peak_before > report.before
    # At this size the peak is backward's own scratch as much as what was kept.
    assert report.peak_after < 0.95 * report.peak_before
    assert "allocator's peak" in str(report)
