"""``advise``: run whole steps under the few settings that matter, and say which line to write."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import statistics
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import ConfigLike, HotConfig, as_config
from .. import _compat
from .. import progress as progress_of
from ..conversion import gains
from ..conversion.convert import convert, decide
from ..conversion.probe import LossFn, check_training, kept_for_backward, loss_of, preserve_state
from ..conversion.report import REPORT, aligned
from ..conversion.selection import Filter, candidates, rate_of
from ..layers.head import attach, detach
from .clocks import Measured, Step, allocator_peak, milliseconds, unallocated_in_pools, whole
from .recompute import recompute

_GOALS = {
    "time": ("least time", math.inf, math.inf, 0.97),
    "memory": ("least memory, at up to 1.5 of plain's time", 1.5, math.inf, 0.99),
    "both": ("least time × memory, neither above plain's", 1.0, 1.0, 0.97),
}
"""Goal -> words, the largest time and bytes over plain torch's, and a margin. A cost is no better
than another one if it is at least the margin times that cost, because times vary."""
_ALLOW: tuple[ConfigLike, ...] = (
    *(HotConfig.recipe("default", forward="int8"), "default"),
    *(HotConfig.recipe("fast", forward="int8"), "fast"),
)
_BUDGETS = (0.5, 0.7, 0.3)  # torch's activation_memory_budget
_GRAPHS = "reduce-overhead"
_ROUNDS, _TIMED_MS, _BURST_MS = 15, 1500.0, 100.0
_VISITS = 3  # of each setting in eager mode, in turns: slow moments of the machine hit all
_UNSTEADY = 0.1  # spread over median from which a row says that its times vary

Mode = Mapping[str, Any] | None
"""Options of torch.compile; None: eager."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A setting and its measurement; the advice's ``memory`` says which bytes are counted.

    ``code`` is the text to write for a plain ``model``. ``plain`` is true without any part of HOT,
    ``noisy`` if g_w is a sketch (``fast``). ``note`` says why nothing was measured, that times are
    unsteady, or what the bytes lack.
    """

    name: str
    code: str
    plain: bool
    noisy: bool
    measured: Measured | None = None
    note: str = ""

    def dominates(self, other: Tried) -> bool:
        """Whether this row is as fast and as small as another, and one of the two is better."""
        if self.measured is None or other.measured is None:
            return False
        a, b = ((row.median_ms, row.kept_bytes) for row in (self.measured, other.measured))
        return a != b and a[0] <= b[0] and a[1] <= b[1]


@dataclasses.dataclass(frozen=True)
class Advice:
    """The result of :func:`~hotcore.torch.advise`; print it for a table and the code to write.

    ``rows`` are in the order of trial, the plain model first. ``memory`` is ``"peak"`` on CUDA, the
    allocator's over a step with all that is on the device. On the CPU it is ``"kept"``: the bytes
    that are kept for backward. ``wire`` is one line about gradients and weights in INT8 between the
    visible GPUs; empty for a single GPU and on the CPU.
    """

    rows: tuple[Tried, ...]
    goal: str
    memory: str
    machine: str
    wire: str = ""

    @property
    def best(self) -> Tried | None:
        """The choice among rows that are not noisy; None if nothing could be measured."""
        return self._best([row for row in self.rows if not row.noisy])

    @property
    def pareto(self) -> list[Tried]:
        """Measured rows that no other dominates."""
        rows = [row for row in self.rows if row.measured]
        return [row for row in rows if not any(other.dominates(row) for other in rows)]

    def _best(self, rows: Sequence[Tried]) -> Tried | None:
        left = [(row, row.measured) for row in rows if row.measured]
        base, (_, slower, larger, _) = self.rows[0].measured, _GOALS[self.goal]
        if base is not None:
            limits = slower * (base.median_ms + base.spread_ms), 1.01 * larger * base.kept_bytes
            left = [(row, m) for row, m in left if m.kept_bytes <= limits[1]]
            left = [(row, m) for row, m in left if m.median_ms - m.spread_ms <= limits[0]]
        # Among rows that the goal cannot tell apart, "both" decides; after that, torch's own wins.
        for goal in (self.goal, "both"):
            least = min((m for _, m in left), key=functools.partial(_cost, goal), default=None)
            if least is not None:
                margin, highest = _GOALS[goal][-1], _cost(goal, least, 1)
                left = [(row, m) for row, m in left if margin * _cost(goal, m, -1) <= highest]
        left.sort(key=lambda pair: (not pair[0].plain, _cost("both", pair[1])))
        return left[0][0] if left else None

    def __str__(self) -> str:
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
        lines += ["", self.wire] if self.wire else []
        return "\n".join(lines)

    def _figures(self, row: Tried) -> list[str]:
        if row.measured is None:
            return [""] * 4
        figures = row.measured.median_ms, row.measured.kept_bytes
        base = self.rows[0].measured
        plain = (base.median_ms, base.kept_bytes) if base else (0, 0)
        share = [f"{a / b:.3f}" if b else "-" for a, b in zip(figures, plain, strict=True)]
        return [f"{figures[0]:.4g}", share[0], f"{figures[1] / 2**20:.5g}", share[1]]

    def to_json(self) -> str:
        """Return all figures, in milliseconds and bytes, as JSON."""
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

    Wrap the call in ``torch.autocast`` if the training loop uses it. Weights, ``.grad``, buffers,
    hooks and torch's random state do not change. Functions that were compiled before are compiled
    again when they are next called. Optimizers in backward
    (``register_post_accumulate_grad_hook``) do not run.

    Args:
        model: plain, in training mode, not compiled, on the device that it trains on.
        inputs: arguments for the model, of the size of the training: a Tensor, a tuple, or a dict
            of keyword arguments. With ``loss_fn`` any argument of it.
        loss_fn: ``loss_fn(model, inputs)`` -> loss, a scalar; by default the mean of every floating
            output.
        goal: ``"time"``; ``"memory"``, at up to 1.5 times plain torch's time; or ``"both"``.
        compiled: False: eager. True: blocks compiled one by one, or the whole model if it has no
            list of alike blocks. A mode or a mapping: options of torch.compile. None: on the CPU
            False, on CUDA True and ``"reduce-overhead"``.
        step: called after each backward pass, inside of the time: ``optimizer.step``. The state of
            a torch optimizer is restored, that of any other object is not.
        allow: recipes or HotConfigs, the most promising first. Settings for memory use the first.
        filter_fn: as for :func:`convert`, also ``slower``.
        slower: see ``filter_fn``.
        budget: seconds. A setting is not tried if it would end later; the plain model always is.
        progress: show on a terminal which setting runs, and the time left.

    Returns:
        An :class:`.Advice`. A setting that fails has the reason in its row. A UserWarning says that
        other processes make the times unsteady.

    Raises:
        TypeError: ``inputs`` has another type, and there is no ``loss_fn``.
        ValueError: an argument is bad, or the loss has no gradient. The model is converted,
            compiled, in eval mode or on the meta device, or it has no layer to convert. Errors of
            the plain model are raised unchanged, except a lack of memory.

    Source: docs/torch/advise.md.
    """
    if goal not in _GOALS:
        raise ValueError(f"goal: {goal!r} is not one of 'time', 'memory', 'both'")
    if not budget > 0:
        raise ValueError(f"budget: {budget!r} seconds; expected more than 0")
    if loss_fn is None and not isinstance(inputs, Tensor | tuple | Mapping):
        kind = type(inputs).__name__
        raise TypeError(f"inputs: {kind}; expected a Tensor, a tuple or a dict, or a loss_fn")
    check_training(model, "advise")
    configs = _configs(allow)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise ValueError("model: on the meta device; advise measures, so it needs a real one")
    if any(_compat.is_compiled(module) for module in model.modules()):
        raise ValueError("model: compiled; pass it before torch.compile, and say how by compiled=")
    decide(model, filter_fn=filter_fn, slower=slower)  # raises where there is nothing to convert
    modes = _modes(compiled, device)
    visits = _VISITS if modes == [None] else 1  # to compile again takes longest
    trial = _Trial(model, inputs, loss_fn, step, device, filter_fn, slower, visits)
    contenders = trial.contenders(goal, configs, modes)
    load = _excess_load()
    if load:
        warnings.warn(f"hotcore.torch.advise: {load}: times are unsteady", stacklevel=2)
    begun, took = progress_of.now(), 0.0
    with _restored(model, step):
        turns = contenders * visits
        names = progress_of.shown([t.name for t in turns], "advise: {}", progress, budget)
        for _, contender in zip(names, turns, strict=True):
            start = progress_of.now()
            if trial.sizes and start - begun + took > budget:
                trial.notes.setdefault(contender.name, f"not tried: the budget of {budget:g} s")
            elif contender.name not in trial.notes:
                trial.run(contender)
                took = progress_of.now() - start
    words = "eager" if modes == [None] else "compiled " + ("by blocks" if trial.lists else "whole")
    cuda, threads = device.type == "cuda", f"{torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if cuda else f"{device.type}, {threads}"
    rate = str(rate_of(device)) if cuda else ""
    machine = filter(None, (f"{name}, torch {torch.__version__}, {words}", rate, load))
    rows, memory = tuple(map(trial.row, contenders)), "peak" if cuda else "kept"
    return Advice(rows, goal, memory, "; ".join(machine), wire_advice() if cuda else "")


def wire_advice() -> str:
    """Return one line: is a byte on the wire worth it between the GPUs that this process sees?"""
    gpus = torch.cuda.device_count()
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    byte = "hot.int8_gradients (DDP, FSDP2) and hot.int8_weights (FSDP2)"
    if processes > gpus:
        return f"{processes} processes, {gpus} GPUs visible here: {byte} pay on a slow connection"
    if gpus < 2:
        return ""
    pairs = itertools.permutations(range(gpus), 2)
    if all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        return f"{gpus} GPUs with peer access: {byte} save no time over NVLink; measure over PCIe"
    return f"{gpus} GPUs, not all with peer access: use {byte}, where the wire decides"


def _configs(allow: Sequence[ConfigLike]) -> dict[str, HotConfig]:
    """Name -> configuration: the recipe and its forward, otherwise the place in ``allow``."""
    entries: Sequence[Any] = [allow] if isinstance(allow, str | HotConfig) else allow
    if not entries:
        raise ValueError("allow: empty; expected recipes or HotConfigs, e.g. ('default', 'fast')")
    configs = {}
    for place, entry in enumerate(entries):
        config = as_config(entry, f"allow[{place}]")
        recipe = dataclasses.replace(config, forward="plain", forward_in_eval=False).name
        int8 = "" if config.forward == "plain" else "+int8"
        configs[f"custom {place}" if recipe == "custom" else recipe + int8] = config
    return configs


@dataclasses.dataclass(frozen=True)
class _Contender:
    name: str
    config: HotConfig | None = None
    mode: Mode = None
    budget: float | None = None
    recomputed: float = 0.0
    """Share of the blocks of each list, the first ones."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of convert."""

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
    """Reasons why contenders are not measured, or not again."""

    @functools.cached_property
    def lists(self) -> dict[str, list[nn.Module]]:
        """The outermost lists of blocks of one class, if most layers are in them.

        A model with batch norms has none: a recomputed one would count every batch twice, and
        convolutions are compiled as a whole.
        """
        if any(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in self.model.modules()):
            return {}
        lists: dict[str, list[nn.Module]] = {}

        def inside(name: str) -> bool:
            return any(not outer or name.startswith(f"{outer}.") for outer in lists)

        for name, module in self.model.named_modules():
            children = list(module.children())
            alike = len(children) > 1 and len({type(child) for child in children}) == 1
            outermost = isinstance(module, nn.ModuleList | nn.Sequential) and not inside(name)
            if alike and outermost and any(True for _ in children[0].children()):
                lists[name] = children
        layers = [inside(name) for name, _ in candidates(self.model)]
        return lists if 2 * sum(layers) >= len(layers) else {}

    def recomputed(self, contender: _Contender) -> list[list[nn.Module]]:
        """The blocks of each list that are recomputed."""
        lists = self.lists.values()
        return [blocks[: math.ceil(contender.recomputed * len(blocks))] for blocks in lists]

    def contenders(
        self, goal: str, configs: Mapping[str, HotConfig], modes: Sequence[Mode]
    ) -> list[_Contender]:
        """Settings to try, the most promising first."""
        plain = bare = _Contender("plain")
        first, *others = [_Contender(name, config) for name, config in configs.items()]
        early = [plain, first]
        if decide(self.model, first.config or "default", self.filter_fn, slower=self.slower).slow:
            # The rule that leaves layers plain was fitted on one kind of GPU.
            early.append(first.but("all layers", options={"slower": True}))
        if self.loss_fn is not None and not attach(self.model):
            detach(self.model)
            bare, first = [each.but("head", options={"head": True}) for each in (plain, first)]
            early += [bare, first]
        if goal != "time":
            half, *budgets = [plain.but(f"budget {b}", budget=b) for b in _BUDGETS]
            early.append(half)
            if self.lists:
                for words, share in (("recompute", 1.0), ("recompute half", 0.5)):
                    early += [each.but(words, recomputed=share) for each in (first, bare)]
            others += [*budgets, first.but(f"budget {half.budget}", budget=half.budget)]
        return [
            dataclasses.replace(each, mode=m) if m is modes[0] else each.but(_GRAPHS, mode=m)
            for each in [*early, *others]
            # The budget is the compiler's; one mode is enough for it.
            for m in (modes if each.budget is None else [m for m in modes[:1] if m is not None])
        ]

    def row(self, contender: _Contender) -> Tried:
        """The contender's row of the advice."""
        name, config = contender.name, contender.config
        noisy = config is not None and config.basis != "full"
        plain = config is None and not contender.options
        about = (name, self.code(contender), plain, noisy)
        if name not in self.times:
            return Tried(*about, note=self.notes[name])
        times, notes = self.times[name], []
        q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
        measured = Measured(median, q1, q3, self.sizes[name])
        if name in self.notes or len(times) < 4:
            notes.append(f"only {len(times)} steps timed")
        if measured.spread_ms > _UNSTEADY * median:
            notes.append(f"unsteady, ± {measured.spread_ms / median:.0%}")
        if contender.recomputed and self.device.type == "cpu":
            notes.append("bytes without attention's results and the running block")
        return Tried(*about, measured, "; ".join(notes))

    def run(self, contender: _Contender) -> None:
        """Measure a contender; raise its error only if it is the first one."""
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
        """Time steps under a setting; the model does not change."""
        model, name, mode = self.model, contender.name, contender.mode
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the table says what matters
            stack.enter_context(preserve_state(model))
            if contender.budget is not None:
                stack.enter_context(_compat.memory_budget(contender.budget))
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
                recompute(itertools.chain.from_iterable(self.recomputed(contender)))
            if mode is not None:
                torch.compiler.reset()
                stack.callback(torch.compiler.reset)
                for module in itertools.chain(*self.lists.values()) if self.lists else [model]:
                    module.compile(**mode)
            step = whole(model, self.inputs, self.loss_fn, self.update)
            for _ in range(1 if mode is None else 3):  # compiles, chooses, records graphs
                step()
            once, cuda = milliseconds(step, self.device), self.device.type == "cuda"
            calls = max(1, min(8, int(_BURST_MS / once))) if cuda else 1
            rounds = max(2, min(_ROUNDS, int(_TIMED_MS / once)) // self.visits)
            times = [milliseconds(step, self.device, calls) for _ in range(rounds)]
            if cuda:
                size = allocator_peak(self.device, step)
                snapshot: Any = torch.cuda.memory_snapshot
                size += unallocated_in_pools(snapshot())
            else:
                besides = (*model.parameters(), *model.buffers())
                loss = functools.partial(loss_of, model, self.inputs, self.loss_fn)
                size = sum(kept_for_backward({}, besides, loss).values())
        self.sizes[name] = size
        self.times.setdefault(name, []).extend(times)

    def code(self, contender: _Contender) -> str:
        """Text to write for a plain ``model``."""
        lines, blocks = [], [_expression(name) for name in self.lists]
        if contender.config is not None:
            words = ["model", repr(contender.config).removeprefix("HotConfig.recipe(")[:-1]]
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
                some = [f"{name}[:{len(part)}]" for name, part in parts]
            lines.append(f"hot.recompute({_all_of(some)})")
        if contender.budget is not None:
            lines.append("import torch._functorch.config")
            lines.append(f"torch._functorch.config.activation_memory_budget = {contender.budget}")
        if contender.mode is not None:
            options = ", ".join(f"{name}={value!r}" for name, value in contender.mode.items())
            loop = [f"for block in {_all_of(blocks)}:", f"    block.compile({options})"]
            lines += loop if blocks else [f"model.compile({options})"]
        return "\n".join(lines)


def _all_of(lists: Sequence[str]) -> str:
    """Python expression of the blocks in all lists."""
    return lists[0] if len(lists) == 1 else f"[{', '.join('*' + name for name in lists)}]"


def _expression(name: str) -> str:
    parts = name.split(".") if name else []
    if all(part.isidentifier() for part in parts):
        return ".".join(["model", *parts])
    return f"model.get_submodule({name!r})"


def _modes(compiled: bool | str | Mapping[str, Any] | None, device: torch.device) -> list[Mode]:
    if compiled is None:
        return [{}, {"mode": _GRAPHS}] if device.type == "cuda" else [None]
    if isinstance(compiled, bool):
        return [{} if compiled else None]
    if not isinstance(compiled, str | Mapping):
        raise ValueError(f"compiled: {compiled!r}; expected True, False, a mode, a mapping or None")
    return [{"mode": compiled} if isinstance(compiled, str) else dict(compiled)]


def _optimizer_of(step: Step | None) -> torch.optim.Optimizer | None:
    """The optimizer of a method, or of a function that holds it: a scheduler's, a lambda."""
    held = [getattr(step, "__self__", None)]
    for cell in getattr(step, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    held = [one() if isinstance(one, weakref.ref) else one for one in held]
    return next((one for one in held if isinstance(one, torch.optim.Optimizer)), None)


@contextmanager
def _restored(model: nn.Module, step: Step | None) -> Iterator[None]:
    """Restore the weights, and the state of the optimizer that ``step`` calls."""
    weights = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters() if step]
    optimizer = _optimizer_of(step)
    if optimizer is not None:
        state, optimizer.state = optimizer.state, collections.defaultdict(dict)
        groups = [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
        torch.clear_autocast_cache()  # it holds casts of the other weights
        if optimizer is not None:
            optimizer.state = state
            for group, values in groups:
                group.clear()
                group.update(values)


def _excess_load() -> str:
    """The machine's load in words if it exceeds its cores; otherwise empty."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"the machine's load, {load:.1f}, exceeds its {cores} cores" if load > cores else ""


def _cost(goal: str, measured: Measured, spreads: int = 0) -> float:
    ms = max(0.0, measured.median_ms + spreads * measured.spread_ms)
    return ms ** (goal != "memory") * float(measured.kept_bytes) ** (goal != "time")
