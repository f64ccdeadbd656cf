"""advise, memory_report and calibrate leave a model as it was."""

import copy
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hotcore.torch as hot
import pytest
import torch
import torch.nn.functional as F
from hotcore import paper
from support import refused
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A buffer that forward makes anew, dropout, batch norm, and layers held outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.listed, self.called = [self.up], {"down": functools.partial(self.down)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.head(self.norm(x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


MEASURES: dict[str, Callable[..., Any]] = {
    "advise": functools.partial(hot.advise, goal="time", allow=["default"], progress=False),
    "memory_report": lambda model, x, loss: hot.memory_report(model, x, "fast", loss_fn=loss),
    "calibrate": lambda model, x, loss: paper.calibrate(model, [x, x], loss),
}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(20, 64)


@pytest.mark.parametrize("fails", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("name", "converted"),
    [*((name, False) for name in MEASURES), ("memory_report", True), ("calibrate", True)],
)
def test_nothing_is_changed(name: str, converted: bool, fails: int, x: torch.Tensor) -> None:
    """Nor by a call of the loss that fails half-way."""
    model, steps = Net(), []
    report = hot.convert(model).hot_report if converted else None
    model.down.weight.register_post_accumulate_grad_hook(lambda p: steps.append(p.data.add_(1)))
    model.up.weight.grad = ones = torch.ones(96, 64)
    state, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    kinds, content = [type(m) for m in modules], [set(vars(m)) for m in modules]
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    calls = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = loss_of(model, x)
        if calls == fails:
            raise RuntimeError("half-way")
        return found

    with suppress(RuntimeError):
        MEASURES[name](model, x, loss)
    assert torch.equal(torch.rand(()), expected)
    assert calls and not steps
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(model.modules()) == modules and [type(m) for m in modules] == kinds
    assert [set(vars(m)) for m in modules] == content
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    assert getattr(model, "hot_report", None) is report
    assert model.listed[0] is model.up and model.called["down"].func is model.down
    assert model.up.weight.grad is ones and torch.equal(ones, torch.ones(96, 64))
    assert all(p.grad is None for p in model.parameters() if p is not model.up.weight)
    loss_of(model, x).backward()
    assert len(steps) == 1


@pytest.mark.parametrize("name", MEASURES)
def test_bad_use(name: str, x: torch.Tensor) -> None:
    measure = MEASURES[name]
    with torch.no_grad(), pytest.raises(ValueError, match=f"{name}: gradients are off"):
        measure(Net(), x, loss_of)
    with pytest.raises(ValueError, match="loss_fn: returned nothing that requires grad"):
        measure(Net(), x, lambda model, x: loss_of(model, x).detach())
    if name != "calibrate":
        refused(lambda: measure(Net().eval(), x, loss_of), "eval mode")
    if name == "advise":
        with torch.device("meta"), pytest.raises(ValueError, match="meta device; advise measures"):
            measure(Net(), x, loss_of)
        with pytest.raises(ValueError, match=r"already converted \(up, down\); revert"):
            measure(hot.convert(Net()), x, loss_of)
