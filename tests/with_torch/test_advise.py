"""advise: whole steps under each setting, a model that stays as it was, and code that runs."""

import copy
import importlib
import itertools
import json
import re
import sys
from typing import Any

import hotcore
import hotcore.torch as hot
import pytest
import torch
from hotcore.torch.tools.clocks import Measured
from support import refused, without_broken_torchvision
from torch import nn
from torch_graphs import causal

pytestmark = pytest.mark.usefixtures("one_thread")
advising = sys.modules["hotcore.torch.advise"]  # hotcore.torch.advise is the function
WIDTH, BATCH = 128, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.act, self.down = nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def advise(*args: Any, **options: Any) -> Any:
    return hot.advise(*args, progress=False, **options)


def names(advice: Any) -> list[str]:
    return [row.name for row in advice.rows]


EAGER = [
    *("plain", "default+int8", "default+int8, recompute", "plain, recompute"),
    *("default+int8, recompute half", "plain, recompute half"),
    *("default", "fast+int8", "fast"),
]


@pytest.fixture(scope="module")
def every() -> Any:
    """The advice on all settings, with the model that it is for, and its inputs."""
    before = hotcore.num_threads(), torch.get_num_threads()
    hotcore.set_num_threads(1), torch.set_num_threads(1)
    model, x = Net(), torch.randn(BATCH, WIDTH)
    yield advise(model, x), model, x
    hotcore.set_num_threads(before[0]), torch.set_num_threads(before[1])


# ---- what is tried, and what stays ----


class Counting(torch.optim.AdamW):
    """Keeps a count among its settings, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_the_optimizer_of_a_scheduler_is_as_before(x: torch.Tensor) -> None:
    """A scheduler replaces ``optimizer.step`` by a function, which is no method."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(x).sum().backward()
    optimizer.step()
    scheduler.step()
    before = copy.deepcopy(optimizer.state_dict())
    for step in (optimizer.step, lambda: optimizer.step()):
        advise(model, x, allow=["default"], goal="time", step=step)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_the_optimizer_is_as_before(x: torch.Tensor) -> None:
    """And the model, of which test_measuring.py has the rest; its hooks run in all settings."""
    model = Net()
    calls: list[int] = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    hooks = [module._forward_hooks for module in model.modules()]
    optimizer = Counting(model.parameters(), lr=0.1)
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state[model.head.weight]["own"] = own = torch.ones(3)
    state = copy.deepcopy(model.state_dict())
    advise(model, x, allow=["default"], goal="time", step=optimizer.step)
    assert calls and [module._forward_hooks for module in model.modules()] == hooks
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert list(optimizer.state) == [model.head.weight]
    assert optimizer.state[model.head.weight] == {"own": own}
    assert optimizer.param_groups == groups


def test_steps_are_training_steps(x: torch.Tensor) -> None:
    """Each has one update, with gradients, and the next begins without."""
    model, seen = Net(), []

    def update() -> None:
        seen.append({name for name, p in model.named_parameters() if p.grad is not None})
        model.head.weight.data.add_(1)

    before = model.head.weight.detach().clone()
    advise(model, x, goal="time", allow=["default"], step=update)
    assert len(seen) >= 2 * 4
    assert all(len(one) == len(list(model.parameters())) for one in seen)
    assert torch.equal(model.head.weight, before)


def test_what_is_kept(every: Any) -> None:
    """The bytes of memory_report, and the less the further it goes."""
    advice, model, x = every
    assert names(advice) == EAGER and all(row.measured for row in advice.rows)
    assert advice.memory == "kept"
    kept = {row.name: row.measured.kept_bytes for row in advice.rows}
    report = hot.memory_report(model, x, hot.HotConfig.recipe("default", forward="int8"))
    assert (kept["plain"], kept["default+int8"]) == (report.before, report.after)
    assert report.after < report.before
    assert kept["plain, recompute"] < kept["plain, recompute half"] < kept["plain"]
    plain = next(row for row in advice.rows if row.name == "plain, recompute")
    assert "attention" in plain.note  # what the figure lacks


def test_goal_time_tries_less(x: torch.Tensor) -> None:
    advice = advise(Net(), x, goal="time", allow=["fast", hot.HotConfig(gx_bits=4)])
    rows = [(row.name, row.noisy) for row in advice.rows]
    assert rows == [("plain", False), ("fast", True), ("custom 1", False)]


def test_autocast(x: torch.Tensor) -> None:
    kinds = set()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        kinds.add(y.dtype)
        return y.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        advise(Net(), x, loss, goal="time", allow=["default"])
        assert torch.is_autocast_enabled("cpu")
    assert kinds == {torch.bfloat16}


def test_no_cast_of_another_weight_stays(x: torch.Tensor) -> None:
    """Autocast keeps a weight's cast until its context ends: not that of a trial's update."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    with torch.autocast("cpu", torch.bfloat16):
        advise(model, x, goal="time", allow=["default"], step=optimizer.step)
        found = model.eval()(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, model(x))


def test_a_layer_alone(x: torch.Tensor) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    assert names(advise(layer, x)) == [name for name in EAGER if "recompute" not in name]
    assert type(layer) is nn.Linear


def test_batch_norms_are_not_recomputed(x: torch.Tensor) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
                            for _ in range(2)))  # fmt: skip
    advice = advise(model, x, allow=["default"], filter_fn=lambda module, name: True)
    assert not any("recompute" in name for name in names(advice))


# ---- failures ----


def test_failures_are_rows(x: torch.Tensor) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        config = getattr(model.blocks[0].up, "config", None)
        if config == hot.HotConfig():
            raise RuntimeError("no luck\nat all")
        if config == hot.HotConfig.recipe("fast"):
            model.blocks[0].up = nn.Linear(WIDTH, 256)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x).square().mean()

    model = Net()
    up = model.blocks[0].up
    advice = advise(model, x, loss, goal="time", allow=["default", "fast", "accurate"])
    notes = {row.name: row.note for row in advice.rows if not row.measured}
    assert notes == {"default": "RuntimeError: no luck at all", "fast": "out of memory"}
    assert model.blocks[0].up is up
    assert names(advice) == ["plain", "default", "fast", "accurate"]
    assert "out of memory" in str(advice)
    json.loads(advice.to_json())


def test_a_plain_model_without_memory(x: torch.Tensor) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(model.blocks[0].up, hot.HotLinear):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x).mean()

    advice = advise(Net(), x, loss, allow=["default"])
    assert advice.rows[0].note == advice.rows[3].note == "out of memory"
    assert advice.best is not None and not advice.best.plain
    assert " - " in str(advice) and "hot.convert(model, 'default'" in str(advice)

    def nothing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    advice = advise(Net(), x, nothing)
    assert advice.best is None and str(advice).endswith("nothing could be measured")
    assert json.loads(advice.to_json())["best"] is None


def test_errors_of_the_model_itself_are_raised(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|normalized_shape"):
        advise(Net(), x[:, :100])


def test_bad_arguments(x: torch.Tensor) -> None:
    model = Net()
    for options, message in (
        ({"goal": "speed"}, "goal: 'speed' is not one of 'time', 'memory', 'both'"),
        ({"budget": 0}, "budget: 0 seconds; expected more than 0"),
        ({"budget": float("nan")}, "budget: nan seconds"),
        ({"allow": []}, "allow: empty"),
        ({"allow": ["quick"]}, r"allow\[0\]: 'quick' is not one of"),
        ({"compiled": 3}, "compiled: 3; expected True, False, a mode"),
    ):
        with pytest.raises(ValueError, match=message):
            advise(model, x, **options)
    with pytest.raises(TypeError, match="inputs: list; expected a Tensor, a tuple or a dict"):
        advise(model, [x])
    with pytest.raises(ValueError, match="model: no layer can be converted"):
        advise(nn.Sequential(nn.LayerNorm(WIDTH)), x)
    compiled = Net()
    compiled.blocks[0].compile(backend="eager")
    refused(lambda: advise(compiled, x), "model: compiled; pass it before")


# ---- time ----


def test_budget(x: torch.Tensor) -> None:
    advice = advise(Net(), x, allow=["default"], budget=1e-9)
    assert [row.name for row in advice.rows if row.measured] == ["plain"]
    assert {row.note for row in advice.rows[1:]} == {"not tried: the budget of 1e-09 s"}
    assert re.match(r"only \d steps timed", advice.rows[0].note)


def test_times_that_others_disturb(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advising.os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    times = itertools.chain([1.0], itertools.cycle([1.0, 2.0]))
    monkeypatch.setattr(advising, "milliseconds", lambda *_: next(times))
    with pytest.warns(UserWarning, match="load, 1000.0, exceeds its .* cores: times are unsteady"):
        advice = advise(Net(), x, goal="time", allow=["default"])
    assert re.match(r"unsteady, ± (50|25)%", advice.rows[1].note)
    assert "load, 1000.0, exceeds" in str(advice)


# ---- choosing, and what is printed ----


def tried(name: str, ms: float, size: int, spread: float = 0.0, **about: Any) -> Any:
    fields = {"code": f"# {name}", "plain": name.startswith("plain"), "noisy": False} | about
    own = Measured(ms, ms - spread, ms + spread, size)
    return advising.Tried(name, measured=own, **fields)


PLAIN = tried("plain", 10, 1000)


@pytest.mark.parametrize(
    ("goal", "others", "choice"),
    [
        ("time", [("a", 9, 1000), ("b", 8, 1000)], "b"),
        ("time", [("a", 9.8, 100)], "a"),  # as fast, but smaller
        ("time", [("a", 9.8, 1000)], "plain"),  # within the margin
        ("time", [("a", 9, 1000, 1.2)], "plain"),  # within the spread
        ("time", [("plain, budget", 5, 1000), ("a", 6, 10)], "plain, budget"),
        ("memory", [("a", 14, 500), ("b", 16, 100)], "a"),  # b is too slow
        ("memory", [("a", 12, 500), ("b", 8, 504)], "b"),  # of equal size, the faster one
        ("memory", [("a", 12, 500), ("plain, again", 12, 500)], "plain, again"),
        ("both", [("a", 9, 900), ("b", 12, 100)], "a"),  # b is slower than plain
        ("both", [("a", 5, 1200)], "plain"),  # larger
        ("both", [("a", 8, 900), ("b", 9, 500)], "b"),
    ],
)
def test_choice(goal: str, others: list[tuple[Any, ...]], choice: str) -> None:
    rows = (PLAIN, *(tried(*other) for other in others))
    advice = advising.Advice(rows, goal, "peak", "a machine")
    assert advice.best.name == choice
    text = str(advice)
    assert f": {choice}" in text and ("plain torch wins" in text) == choice.startswith("plain")


def test_noisy_settings_stand_aside() -> None:
    rows = (PLAIN, tried("default", 9, 800), tried("fast", 7, 800, noisy=True))
    advice = advising.Advice(rows, "time", "peak", "a machine")
    assert advice.best.name == "default"
    assert str(advice).endswith("fast gains more, with noise in the gradient that costs steps: for "
                                "short trainings, fine-tuning\n# fast")  # fmt: skip


def test_table_and_json() -> None:
    failed = advising.Tried("b", "# b", False, False, note="out of memory")
    rows = (PLAIN, tried("plain, budget", 9, 500), tried("a", 9.5, 600), failed)
    advice = advising.Advice(rows, "both", "peak", "a machine")
    lines = str(advice).splitlines()
    assert lines[0].split() == ["setting", "ms", "of", "plain", "peak", "MiB", "of", "plain"]
    assert lines[2].split() == ["plain,", "budget", "*", "9", "0.900", "0.00047684", "0.500"]
    assert lines[3].endswith("0.600  plain, budget is as fast and as small")
    assert lines[4].split() == ["b", "out", "of", "memory"]
    assert [row.name for row in advice.pareto] == ["plain, budget"]
    content = json.loads(advice.to_json())
    assert (content["best"], content["memory"]) == ("plain, budget", "peak")
    assert content["pareto"] == ["plain, budget"]
    measured = [row["measured"] for row in content["rows"]]
    assert measured[2]["kept_bytes"] == 600 and measured[3] is None


@pytest.mark.parametrize(
    ("gpus", "processes", "apart", "words"),
    [
        (1, 1, (), ""),
        (4, 1, (), "4 GPUs with peer access: hot.int8_gradients .* save no time over NVLink"),
        (4, 4, [(3, 1)], "4 GPUs, not all with peer access: use hot.int8_gradients .*int8_weights"),
        (4, 8, (), "8 processes, 4 GPUs visible here: .* pay on a slow connection"),
    ],
)
def test_a_byte_on_the_wire(
    gpus: int, processes: int, apart: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = []

    def reaches(a: int, b: int) -> bool:
        pairs.append((a, b))
        return (a, b) not in apart

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: processes)
    wire = advising.wire_advice()
    assert re.fullmatch(f"{words}.*" if words else "", wire)
    assert ((3, 1) in pairs) == (1 < gpus >= processes)
    text = str(advising.Advice((PLAIN,), "time", "peak", "a machine", wire))
    assert text.endswith(f"\n\n{wire}") == bool(wire)


def test_progress(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotcore.torch.progress.now", map(float, range(100)).__next__)
    for terminal, progress in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        hot.advise(Net(), x, goal="time", allow=["default"], progress=progress)
        out = capsys.readouterr()
        shown = "\radvise: plain, 3 of 6, 14 s left\033[K" in out.err
        assert shown == (terminal and progress) and bool(out.err) == shown and not out.out


# ---- the code ----


def run(code: str, model: nn.Module, **names: Any) -> nn.Module:
    space = {"hot": hot, "torch": torch, "model": model, **names}
    exec(code, space)
    return space["model"]


def test_the_code_runs(every: Any) -> None:
    """Each row's, and it makes the model that was measured."""
    advice, _, x = every
    for row in advice.rows:
        model = run(row.code, Net())
        model(x).mean().backward()
        assert isinstance(model.blocks[0].up, hot.HotLinear) != row.plain
        taken = ["forward" in vars(block) for block in model.blocks]
        assert taken == ["recompute" in row.name, row.name.endswith("recompute")]
        report = getattr(model, "hot_report", None)
        if report:
            recipe, forward = row.name.split(",")[0].removesuffix("+int8"), "int8" in row.name
            config = hot.HotConfig.recipe(recipe, forward="int8" if forward else "plain")
            assert {layer.config for layer in report.converted} == {config}
    assert advice.rows[0].code == ""


def test_names_of_blocks(x: torch.Tensor) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Net()
            self.stages = nn.ModuleDict({"a-b": nn.Sequential(Block(), Block())})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stages["a-b"](x).mean() + self.first(x)

    def taken(row: Any) -> bool:
        return row.name == "plain, recompute"

    rows = advise(model := Two(), x, allow=["default"]).rows
    (row,) = filter(taken, rows)
    assert row.code == "hot.recompute([*model.first.blocks, *model.get_submodule('stages.a-b')])"
    run(row.code, model)
    assert all("forward" in vars(block) for block in model.modules() if type(block) is Block)
    half = next(row for row in rows if row.name == "plain, recompute half")
    parts = "*model.first.blocks[:1], *model.get_submodule('stages.a-b')[:1]"
    assert half.code == f"hot.recompute([{parts}])"
    run(half.code, Two())
    (row,) = filter(taken, advise(nn.Sequential(Block(), Block()), x, allow=["default"]).rows)
    assert row.code == "hot.recompute(model)"


@pytest.mark.long
@pytest.mark.parametrize("blocks", [True, False])
def test_compiled(blocks: bool, x: torch.Tensor) -> None:
    """Settings run compiled, each from nothing, and leave nothing behind."""
    model: nn.Module = Net() if blocks else Block()
    before = [set(vars(module)) for module in model.modules()]
    advice = advise(model, x, compiled={"backend": "aot_eager"}, allow=["default"])
    assert names(advice)[:3] == ["plain", "default", "plain, budget 0.5"]
    assert names(advice)[-1] == "default, budget 0.5"
    assert all(row.measured for row in advice.rows), advice
    assert [set(vars(module)) for module in model.modules()] == before
    assert ("by blocks" if blocks else "whole") in advice.machine
    kept = {row.name: row.measured.kept_bytes for row in advice.rows}
    assert kept["default"] < kept["plain"]
    config = importlib.import_module("torch._functorch.config")
    assert config.activation_memory_budget == 1
    for row in advice.rows:
        with config.patch(activation_memory_budget=1.0):
            changed = run(row.code, copy.deepcopy(model))
            assert config.activation_memory_budget == (0.5 if "0.5" in row.name else
                                                       0.7 if "0.7" in row.name else
                                                       0.3 if "0.3" in row.name else 1)  # fmt: skip
            compiled = [m for m in changed.modules() if hotcore.torch._compat.is_compiled(m)]
            assert compiled == (list(changed.blocks) if blocks else [changed])


@pytest.mark.long
def test_head_of_transformers() -> None:
    with without_broken_torchvision():
        pytest.importorskip("transformers", minversion="5")
    model = causal("GPT2", vocab_size=512, n_embd=128)
    tokens = torch.randint(512, (4, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    allow = ["default"]
    advice = advise(model, batch, lambda model, batch: model(**batch).loss, allow=allow)
    rows = {row.name: row for row in advice.rows}
    assert "head=True)" in rows["default, head"].code
    kept = {name: row.measured.kept_bytes for name, row in rows.items() if row.measured}
    assert kept["default, head"] < kept["default"] and kept["plain, head"] < kept["plain"]
    assert not rows["plain, head"].plain
    exec(rows["plain, head"].code, {"model": (own := copy.deepcopy(model)), "hot": hot})
    assert own.hot_report.head and not own.hot_report.converted
    assert model(**batch).logits.shape == (4, 32, 512)  # as it was
    advice = advise(model, batch, allow=allow)  # its logits are used
    assert not any("head" in name for name in names(advice))


def test_one_line_of_convert_is_enough(x: torch.Tensor) -> None:
    """With the caller's filter."""

    def keep(module: nn.Module, name: str) -> bool:
        return name.endswith("up")

    advice = advise(Net(), x, goal="time", allow=["default"], filter_fn=keep)
    code = advice.rows[1].code
    assert code == "model = hot.convert(model, 'default', filter_fn=filter_fn)"
    model = run(code, Net(), filter_fn=keep)
    assert len(model.hot_report.converted) == 2
