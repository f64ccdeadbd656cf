"""hot.advise on CUDA: peaks of the allocator, compiled blocks, CUDA graphs, lack of memory."""

import copy
import re
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from support_gpu import Block  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.cuda
WIDTH, HEADS = 1024, 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH, HEADS) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def advise(model: nn.Module, tokens: int = 512, **options: object) -> object:
    generator = torch.Generator("cuda").manual_seed(0)  # the test compares torch's own state
    x = torch.randn(32, tokens, WIDTH, device="cuda", generator=generator)
    with torch.autocast("cuda", torch.bfloat16):
        return hot.advise(model, x, loss, progress=False, **options)


@pytest.mark.parametrize("compiled", [False, True, "reduce-overhead"])
def test_peaks(compiled: bool | str) -> None:
    """Every setting runs, recomputing and HOT have smaller peaks, the model is unchanged."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state, random = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    held = torch.cuda.memory_allocated()
    options = {"allow": ["default"], "budget": 900.0, "step": optimizer.step}
    goal = "time" if compiled == "reduce-overhead" else "memory"  # fewer settings to compile
    advice = advise(model, compiled=compiled, goal=goal, **options)
    print(advice)
    assert advice.memory == "peak"
    rows = {row.name: row for row in advice.rows}
    assert not [row.note for row in advice.rows if row.measured is None]
    peak = {name: row.measured.kept_bytes for name, row in rows.items()}
    assert held < peak["plain"] > peak["default"]
    if goal == "memory":
        assert peak["default, recompute"] < peak["default"]
        assert peak["plain, recompute"] < peak["plain"]
    if compiled is True:
        assert peak["plain, budget 0.3"] < peak["plain"]
    assert all(0 < row.measured.median_ms < 1e3 for row in advice.rows)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert not any(hot._compat.is_compiled(module) for module in model.modules())
    # All memory of a setting is freed, such as graphs' pools and optimizer states.
    assert torch.cuda.memory_allocated() <= held + 2**28  # cuBLAS keeps workspaces


def test_both_ways_by_default() -> None:
    advice = advise(Net().cuda(), goal="time", allow=["default"], budget=900.0)
    print(advice)
    settings = ("plain", "default", "default, all layers")  # the rule leaves small ones plain
    assert [row.name for row in advice.rows] == [
        name for setting in settings for name in (setting, f"{setting}, reduce-overhead")
    ]
    assert all(row.measured for row in advice.rows)


def test_lack_of_memory_is_a_row() -> None:
    """Plain torch does not fit. Settings with smaller peaks still run, unaffected."""
    model = Net().cuda()
    roomy = advise(model, compiled=False, allow=["default"], budget=900.0)
    peak = {row.name: row.measured.kept_bytes for row in roomy.rows}
    between = (peak["plain"] + peak["default, recompute"]) / 2
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(between / total)
    try:
        tight = advise(model, compiled=False, allow=["default"], budget=900.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(tight)
    rows = {row.name: row for row in tight.rows}
    assert rows["plain"].note == "out of memory" and rows["default, recompute"].measured is not None
    assert tight.best is not None
    assert not any(isinstance(module, hot.HotLinear) for module in model.modules())


def test_layers_that_would_be_slower() -> None:
    """The rule for CUDA leaves layers plain. Settings that save memory are still measured."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).cuda()
    x, options = torch.randn(64, 64, device="cuda"), {"compiled": False, "progress": False}
    notes = {row.name: row.note for row in hot.advise(model, x, budget=900.0, **options).rows}
    assert "no layer converted: all would be slower (slower=True)" in notes["default"]
    for name in ("plain", "default+int8, all layers"):
        assert re.fullmatch(r"(unsteady, ± \d+%)?", notes[name]), name
    options |= {"goal": "time", "allow": ["default"], "slower": True}
    ours = hot.advise(model, x, **options).rows[1]
    assert ours.measured and "'default', slower=True)" in ours.code
