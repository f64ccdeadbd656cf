"""``advise``: run whole steps under the few settings that matter, and say which line to write."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import ConfigLike, HotConfig, as_config
from . import _compat, gains
from .clocks import Clock, Measured, Step, device_name, spread, whole
from .convert import convert, decide
from .head import attach, detach
from .memory import allocator_peak, kept_bytes, unallocated_in_pools
from .modules import HotModule
from .probe import LossFn, check_training, loss_of, preserve_state
from .recompute import recompute
from .report import REPORT, aligned, listed
from .selection import Filter, candidates, rate_of

_PLAIN = "plain"
_GOALS = {
    "time": ("least time", math.inf, math.inf, 0.97),
    "memory": ("least memory, at up to 1.5 of plain's time", 1.5, math.inf, 0.99),
    "both": ("least time × memory, neither above plain's", 1.0, 1.0, 0.97),
}
"""In words; the largest time and bytes as multiples of plain torch's; and what share of a figure is
no less than the figure: times are the machine's, too."""
_ALLOW: tuple[ConfigLike, ...] = (
    *(HotConfig.recipe("default", forward="int8"), "default"),
    *(HotConfig.recipe("fast", forward="int8"), "fast"),
)
_BUDGETS = (0.5, 0.7, 0.3)  # torch's activation_memory_budget
_GRAPHS = "reduce-overhead"
_ROUNDS, _TIMED_MS, _BURST_MS = 15, 1500.0, 100.0
_VISITS = 3  # in eager mode, in turns: slow moments of the machine hit all settings

Way = Mapping[str, Any] | None
"""Options of torch.compile; None: eager."""

_now = time.monotonic


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting; its ``measured.kept_bytes`` are what the advice's ``memory`` says.

    ``code`` is what to write for a plain ``model``, ``plain`` whether that is torch's alone,
    ``noisy`` whether g_w is a sketch (``fast``), ``note`` why nothing was measured, or what lacks.
    """

    name: str
    code: str
    plain: bool
    noisy: bool
    measured: Measured | None = None
    note: str = ""

    def dominates(self, other: Tried) -> bool:
        """Whether it is as fast and as small, and one of the two is better."""
        if self.measured is None or other.measured is None:
            return False
        a, b = ((row.median_ms, row.kept_bytes) for row in (self.measured, other.measured))
        return a != b and a[0] <= b[0] and a[1] <= b[1]


@dataclasses.dataclass(frozen=True)
class Advice:
    """The result of :func:`~hotcore.torch.advise`; print it for a table and the code to write.

    ``rows`` are in the order of trial, the plain model first. ``memory`` is ``"peak"``, of the CUDA
    allocator over a step with all that is on the device, or on the CPU ``"kept"`` for backward.
    """

    rows: tuple[Tried, ...]
    goal: str
    memory: str
    machine: str

    @property
    def best(self) -> Tried | None:
        """The choice, without what is noisy; None if nothing could be measured."""
        return self._best([row for row in self.rows if not row.noisy])

    @property
    def pareto(self) -> list[Tried]:
        """Measured rows that no other dominates."""
        rows = [row for row in self.rows if row.measured]
        return [row for row in rows if not any(other.dominates(row) for other in rows)]

    def _best(self, rows: Sequence[Tried]) -> Tried | None:
        found = [(row, row.measured) for row in rows if row.measured]
        base, (_, slower, larger, _) = self.rows[0].measured, _GOALS[self.goal]
        if base is not None:
            most = slower * (base.median_ms + base.spread_ms), 1.01 * larger * base.kept_bytes
            found = [(row, m) for row, m in found if m.kept_bytes <= most[1]]
            found = [(row, m) for row, m in found if m.median_ms - m.spread_ms <= most[0]]
        # Of what cannot be told apart by the goal, the best for both; of that, torch's own.
        for goal in (self.goal, "both"):
            least = min((own for _, own in found), key=functools.partial(_cost, goal), default=None)
            if least is not None:
                share, most_cost = _GOALS[goal][-1], _cost(goal, least, 1)
                found = [pair for pair in found if share * _cost(goal, pair[1], -1) <= most_cost]
        found.sort(key=lambda pair: (not pair[0].plain, _cost("both", pair[1])))
        return found[0][0] if found else None

    def __str__(self) -> str:
        """The table, the choice, and what to write for it."""
        table = [["setting", "ms", "of plain", f"{self.memory} MiB", "of plain", ""]]
        for row in self.rows:
            rival = next((r.name for r in self.rows if r.plain and r.dominates(row)), "")
            beaten = f"{rival} is as fast and as small" if rival and not row.plain else ""
            mark = " *" if row in self.pareto else ""
            notes = "; ".join(filter(None, (row.note, beaten)))
            table.append([row.name + mark, *self._figures(row), notes])
        lines = aligned(table, left=1, last_left=True)
        lines.append(f"*: no other is at once as fast and as small; {self.machine}")
        best, further = self.best, self._best(self.rows)
        if best is None:
            return "\n".join([*lines, "nothing could be measured"])
        verdict = f"for {self.goal} ({_GOALS[self.goal][0]}): {best.name}"
        verdict += "; plain torch wins, HOT gains no more than a margin" if best.plain else ""
        lines += ["", verdict, best.code or "# nothing to write: leave the model as it is"]
        if further is not None and further.noisy:
            lines += ["", f"{further.name} gains more, with noise in the gradient that costs steps:"
                      " for short trainings, fine-tuning", further.code]  # fmt: skip
        return "\n".join(lines)

    def _figures(self, row: Tried) -> list[str]:
        own, base = row.measured, self.rows[0].measured
        if own is None:
            return [""] * 4
        times, sizes = ((m.median_ms, m.kept_bytes) for m in (own, base or own))
        of = [f"{a / b:.3f}" if base and b else "-" for a, b in zip(times, sizes, strict=True)]
        return [f"{own.median_ms:.4g}", of[0], f"{own.kept_bytes / 2**20:.5g}", of[1]]

    def to_json(self) -> str:
        """All figures, in milliseconds and bytes, as JSON."""
        best, pareto = self.best, [row.name for row in self.pareto]
        content = {**dataclasses.asdict(self), "best": best and best.name, "pareto": pareto}
        return json.dumps(content, indent=1)


def advise(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None = None,
    goal: Literal["time", "memory", "both"] = "both",
    *,
    compiled: bool | str | Mapping[str, Any] | None = None,
    step: Step | None = None,
    allow: Sequence[ConfigLike] = _ALLOW,
    filter_fn: Filter | None = None,
    slower: bool = False,
    budget: float = 240.0,
    progress: bool = True,
) -> Advice:
    """Time whole training steps, plain and under HOT's settings, and say which line to write.

    Tried are plain torch, ``allow``, for transformers' causal LM models with a ``loss_fn``
    ``head=True`` with both, and for memory torch's ``activation_memory_budget`` and
    :func:`recompute`. Wrap the call in ``torch.autocast`` if the training loop uses it. Weights,
    ``.grad``, buffers, hooks and torch's random state are as before afterwards; what this process
    has compiled is compiled anew when it is next called.
    Optimizers in backward (``register_post_accumulate_grad_hook``) do not run; what else the loss
    depends on gets gradients.

    Args:
        model: plain, in training mode, not compiled, on the device that it trains on.
        inputs: a Tensor, a tuple of positional arguments or a dict of keyword arguments for the
            model, of the size of the training; with ``loss_fn`` any argument of it.
        loss_fn: ``loss_fn(model, inputs)`` -> loss, a scalar; by default the mean of every floating
            output.
        goal: ``"time"``; ``"memory"``, at up to 1.5 times plain torch's time; or ``"both"``: the
            least product of the two, where neither is above plain torch's.
        compiled: False: eager; True: blocks compiled one by one (the whole model if no list of
            alike blocks is found); or a mode or a mapping of options of torch.compile. None: on
            the CPU False, on CUDA True and ``"reduce-overhead"``.
        step: called after each backward pass, inside of the time: ``optimizer.step``. The state of
            a torch optimizer is put back as the weights are, that of anything else is not.
        allow: recipes or HotConfigs, the most promising first; memory's settings take the first.
        filter_fn: as for :func:`convert`.
        slower: as for :func:`convert`.
        budget: seconds. A setting that would not be done by then, judged by the one before, is a
            row that says so. The plain model is always measured.
        progress: a bar of tqdm; without tqdm a line on stderr for each setting.

    Returns:
        An :class:`.Advice`. What fails, by lack of memory or otherwise, is a row with the reason.

    Raises:
        TypeError: ``inputs`` of another type, without ``loss_fn``.
        ValueError: a bad argument; a model that is converted, compiled, in eval mode, on the meta
            device or without a layer to convert; or a loss without a gradient. Errors of the plain
            model are raised as they are, but for a lack of memory.

    Source: docs/torch/advise.md.
    """
    if goal not in _GOALS:
        raise ValueError(f"goal: {goal!r} is not one of 'time', 'memory', 'both'")
    if not budget > 0:
        raise ValueError(f"budget: {budget!r} seconds; expected more than 0")
    if loss_fn is None and not isinstance(inputs, Tensor | tuple | Mapping):
        kind = type(inputs).__name__
        raise TypeError(f"inputs: {kind}; expected a Tensor, a tuple or a dict, or a loss_fn")
    device, configs = _plain_device(model), _configs(allow)
    if any(_compat.is_compiled(module) for module in model.modules()):
        raise ValueError("model: compiled; pass it before torch.compile, and say how by compiled=")
    decide(model, filter_fn=filter_fn, slower=slower)  # raises where there is nothing to convert
    ways = _ways(compiled, device)
    visits = _VISITS if ways == [None] else 1  # to compile again takes longest
    trial = _Trial(model, inputs, loss_fn, step, device, filter_fn, slower, visits)
    contenders = trial.contenders(goal, configs, ways)
    begun, took = _now(), 0.0
    with _restored(model, step):
        for contender in _shown(contenders * visits, progress):
            start = _now()
            if trial.sizes and start - begun + took > budget:
                trial.notes.setdefault(contender.name, f"not tried: the budget of {budget:g} s")
            elif contender.name not in trial.notes:
                trial.run(contender)
                took = _now() - start
    words = "eager" if ways == [None] else "compiled " + ("by blocks" if trial.lists else "whole")
    machine = f"{device_name(device)}, torch {torch.__version__}, {words}"
    if device.type == "cuda":
        machine += f"; {rate_of(device)}"
    memory = "peak" if device.type == "cuda" else "kept"
    return Advice(tuple(map(trial.row, contenders)), goal, memory, machine)


def _configs(allow: Sequence[ConfigLike]) -> dict[str, HotConfig]:
    """Name -> configuration."""
    # A single name is a sequence of letters.
    given: Sequence[Any] = [allow] if isinstance(allow, str | HotConfig) else allow
    if not given:
        raise ValueError("allow: empty; expected recipes or HotConfigs, e.g. ('default', 'fast')")
    configs = [as_config(entry, f"allow[{i}]") for i, entry in enumerate(given)]
    return {_name_of(config, place): config for place, config in enumerate(configs)}


def _name_of(config: HotConfig, place: int) -> str:
    """The recipe's, with what its forward is; else its place among those that are allowed."""
    backward = dataclasses.replace(config, forward="plain", forward_in_eval=False)
    if backward.name == "custom":
        return f"custom {place}"
    return backward.name if config.forward == "plain" else f"{backward.name}+int8"


def _plain_device(model: nn.Module) -> torch.device:
    """The device of a plain model that can be measured. Raises ValueError for another."""
    check_training(model, "advise")
    hot = [name for name, module in model.named_modules() if isinstance(module, HotModule)]
    if hot:
        raise ValueError(f"model: converted already ({listed(hot)}); revert() it first")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise ValueError("model: on the meta device; advise measures, so it needs a real one")
    return device


@dataclasses.dataclass(frozen=True)
class _Contender:
    name: str
    config: HotConfig | None = None
    way: Way = None
    budget: float | None = None
    recomputed: float = 0.0
    """Share of the blocks of each list, the first ones."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of convert."""

    def but(self, words: str, **changes: Any) -> _Contender:
        return dataclasses.replace(self, name=f"{self.name}, {words}", **changes)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Runs contenders on one model."""

    model: nn.Module
    inputs: Any
    loss_fn: LossFn | None
    update: Step | None
    device: torch.device
    filter_fn: Filter | None
    slower: bool
    visits: int
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a contender is not measured, or not any more."""

    @functools.cached_property
    def lists(self) -> dict[str, list[nn.Module]]:
        """The outermost lists of blocks of one class, if most layers are in them.

        None in a model with batch norms: one that is recomputed would count every batch twice, and
        convolutions are compiled as a whole.
        """
        if any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in self.model.modules()):
            return {}
        found: dict[str, list[nn.Module]] = {}

        def inside(name: str) -> bool:
            return any(not outer or name.startswith(f"{outer}.") for outer in found)

        for name, module in self.model.named_modules():
            children = list(module.children())
            alike = len(children) > 1 and len({type(child) for child in children}) == 1
            listed = isinstance(module, nn.ModuleList | nn.Sequential) and not inside(name)
            if alike and listed and any(True for _ in children[0].children()):
                found[name] = children
        layers = [inside(name) for name, _ in candidates(self.model)]
        return found if 2 * sum(layers) >= len(layers) else {}

    def recomputed(self, contender: _Contender) -> list[list[nn.Module]]:
        """The blocks of each list that are recomputed."""
        return [own[: math.ceil(contender.recomputed * len(own))] for own in self.lists.values()]

    def contenders(
        self, goal: str, configs: Mapping[str, HotConfig], ways: Sequence[Way]
    ) -> list[_Contender]:
        """What to try, the most promising first."""
        plain, (first, *others) = _Contender(_PLAIN), [_Contender(*own) for own in configs.items()]
        found, alone = [plain, first], plain
        config = next(iter(configs.values()))
        if decide(self.model, config, self.filter_fn, slower=self.slower).slow:
            # Left plain by a rule that knows one kind of GPU.
            found.append(first.but("all layers", options={"slower": True}))
        if self.loss_fn is not None and not attach(self.model):
            detach(self.model)
            heads = [each.but("head", options={"head": True}) for each in (plain, first)]
            alone, first = heads
            found += heads
        if goal != "time":
            half, *budgets = [plain.but(f"budget {b}", budget=b) for b in _BUDGETS]
            found.append(half)
            if self.lists:
                for words, share in (("recompute", 1.0), ("recompute half", 0.5)):
                    found += [each.but(words, recomputed=share) for each in (first, alone)]
            others += [*budgets, first.but(f"budget {half.budget}", budget=half.budget)]
        return [
            dataclasses.replace(each, way=way) if way is ways[0] else each.but(_GRAPHS, way=way)
            for each in [*found, *others]
            # The budget is the compiler's, and one way is enough for it.
            for way in (ways if each.budget is None else [w for w in ways[:1] if w is not None])
        ]

    def row(self, contender: _Contender) -> Tried:
        """Of what was measured."""
        name, config = contender.name, contender.config
        noisy = config is not None and config.basis != "full"
        plain = config is None and not contender.options
        about = (name, self.code(contender), plain, noisy)
        if name not in self.times:
            return Tried(*about, note=self.notes[name])
        uncounted = contender.recomputed and self.device.type == "cpu"
        note = "without attention's results and the block in work" if uncounted else ""
        return Tried(*about, spread(self.times[name], self.sizes[name]), note)

    def run(self, contender: _Contender) -> None:
        """Measure; the error of what fails is raised if it is the first."""
        try:
            self.measure(contender)
        except torch.OutOfMemoryError:
            self.notes[contender.name] = "out of memory"
        except Exception as error:
            if not self.times and not self.notes:
                raise
            words = f"{type(error).__name__}: {error}".split()
            self.notes[contender.name] = " ".join(words)[:120]
        finally:
            if self.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()

    def measure(self, contender: _Contender) -> None:
        """Steps under this setting; the model is afterwards as before."""
        model, name, way = self.model, contender.name, contender.way
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the table says what matters
            stack.enter_context(preserve_state(model))
            if contender.budget is not None:
                stack.enter_context(_compat.memory_budget(contender.budget))
            blocks = [block for own in self.lists.values() for block in own]
            if contender.config is not None or contender.options:
                how: dict[str, Any] = {"slower": self.slower, **contender.options}
                only = self.filter_fn if contender.config is not None else lambda *_: False
                convert(model, contender.config or "default", only, **how)
                report = vars(model)[REPORT]
                if not report.converted and not contender.options:
                    no_int8 = any(row.reason == gains.NO_INT8 for row in report.skipped)
                    why = gains.NO_INT8 if no_int8 else "all would be slower"
                    raise ValueError(f"no layer converted: {why} (slower=True)")
            if contender.recomputed:
                recompute([block for own in self.recomputed(contender) for block in own])
            if way is not None:
                torch.compiler.reset()
                stack.callback(torch.compiler.reset)
                for module in blocks or [model]:
                    module.compile(**way)
            step = whole(model, self.inputs, self.loss_fn, self.update)
            for _ in range(1 if way is None else 3):  # compiles, chooses, records graphs
                step()
            once = Clock(self.device, 1).measure(step)
            clock = Clock(self.device, max(1, min(8, int(_BURST_MS / once))))
            rounds = max(2, min(_ROUNDS, int(_TIMED_MS / once)) // self.visits)
            times = [clock.measure(step) for _ in range(rounds)]
            if self.device.type == "cuda":
                size = allocator_peak(self.device, step)
                snapshot: Any = torch.cuda.memory_snapshot
                size += unallocated_in_pools(snapshot())
            else:
                size = kept_bytes(model, lambda: loss_of(model, self.inputs, self.loss_fn))
        self.sizes[name] = size
        self.times.setdefault(name, []).extend(times)

    def code(self, contender: _Contender) -> str:
        """What to write."""
        lines, blocks = [], [_expression(name) for name in self.lists]
        every = _all_of(blocks)
        if contender.config is not None:
            config = repr(contender.config)
            recipe = config.removeprefix("HotConfig.recipe(")[:-1]
            words = ["model", f"hot.{config}" if "," in recipe else recipe]
            words += ["filter_fn=filter_fn"] if self.filter_fn else []
            words += ["slower=True"] if self.slower else []
            words += [f"{name}={value}" for name, value in contender.options.items()]
            lines.append(f"model = hot.convert({', '.join(words)})")
        elif contender.options:
            lines.append("model = hot.convert(model, filter_fn=lambda *_: False, head=True)")
        if contender.recomputed:
            some = blocks
            if contender.recomputed < 1:
                parts = zip(blocks, self.recomputed(contender), strict=True)
                some = [f"{name}[:{len(own)}]" for name, own in parts]
            lines.append(f"hot.recompute({_all_of(some)})")
        if contender.budget is not None:
            lines.append("import torch._functorch.config")
            lines.append(f"torch._functorch.config.activation_memory_budget = {contender.budget}")
        if contender.way is not None:
            options = ", ".join(f"{name}={value!r}" for name, value in contender.way.items())
            loop = [f"for block in {every}:", f"    block.compile({options})"]
            lines += loop if blocks else [f"model.compile({options})"]
        return "\n".join(lines)


def _all_of(lists: Sequence[str]) -> str:
    """An expression of the blocks in these."""
    return lists[0] if len(lists) == 1 else f"[{', '.join('*' + name for name in lists)}]"


def _expression(name: str) -> str:
    parts = name.split(".") if name else []
    if all(part.isidentifier() for part in parts):
        return ".".join(["model", *parts])
    return f"model.get_submodule({name!r})"


def _ways(compiled: bool | str | Mapping[str, Any] | None, device: torch.device) -> list[Way]:
    if compiled is None:
        return [{}, {"mode": _GRAPHS}] if device.type == "cuda" else [None]
    if isinstance(compiled, bool):
        return [{} if compiled else None]
    if not isinstance(compiled, str | Mapping):
        raise ValueError(f"compiled: {compiled!r}; expected True, False, a mode, a mapping or None")
    return [{"mode": compiled} if isinstance(compiled, str) else dict(compiled)]


@contextmanager
def _restored(model: nn.Module, step: Step | None) -> Iterator[None]:
    """Put back what ``step`` changes: the weights, and the state of its optimizer."""
    weights = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters() if step]
    owner = getattr(step, "__self__", None)
    optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
    if optimizer is not None:
        state, optimizer.state = optimizer.state, collections.defaultdict(dict)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
        torch.clear_autocast_cache()  # casts of the weights that were
        if optimizer is not None:
            optimizer.state = state


def _shown(contenders: Sequence[_Contender], progress: bool) -> Iterator[_Contender]:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        for i, contender in enumerate(contenders, 1):
            if progress:
                print(f"advise {i}/{len(contenders)}: {contender.name}", file=sys.stderr)
            yield contender
        return
    for contender in (bar := tqdm(contenders, "advise", unit="setting", disable=not progress)):
        bar.set_postfix_str(contender.name)
        yield contender


def _cost(goal: str, own: Measured, spreads: int = 0) -> float:
    ms = max(0.0, own.median_ms + spreads * own.spread_ms)
    return ms ** (goal != "memory") * float(own.kept_bytes) ** (goal != "time")
