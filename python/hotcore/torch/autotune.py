"""``autotune``: time every layer plain and with each recipe, and choose per layer.

One forward pass under hooks records how each layer is called: shape and dtype of x, autocast,
memory format. Equal calls are measured once, forward and backward, in turns with plain torch. A
choice has to win by more than its spread.

Clocks: on the CPU the host's. On CUDA the kernels of a small layer can take less time than the host
needs to queue them, and the rest of the model decides which of the two counts. So the whole step is
timed first. If the device limits it, layers are timed by events behind enough queued work to keep
the host ahead; if the host limits it, by bursts of calls on the host's clock.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import RECIPES, ConfigLike, HotConfig, as_config
from ._compat import is_compiled
from .bitsandbytes import is_8bit
from .clocks import MIN_ROUNDS, Clock, DeviceClock, Step, device_name, in_turns, spread, whole
from .convert import convert, decide
from .memory import kept_bytes
from .modules import HotModule
from .plan import PLAIN, LayerPlan, Measured, Plan
from .probe import (
    Call,
    LayerUse,
    LossFn,
    Watch,
    autocast_dtype,
    check_training,
    eagerly,
    loss_of,
    preserve_state,
)
from .report import listed
from .selection import Filter, hot_class

ACCURACY = ("accurate", "default", "compact", "fast", "paper")
"""Recipes, the most accurate first (cosine with the fp32 gradient: docs/results.md)."""

OBJECTIVES = ("time", "memory")
HOST_SHARE = 0.8
"""The device limits a CUDA step if the host queues it in less than this share of its time."""


def autotune(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None = None,
    objective: Literal["time", "memory"] = "time",
    *,
    allow: Sequence[ConfigLike] = ("accurate", "default"),
    filter_fn: Filter | None = None,
    compiled: bool | Mapping[str, Any] | None = None,
    slowdown: float = 1.1,
    rounds: int = 15,
    budget_ms: float = 400.0,
    verify: bool = True,
    clock: str | None = None,
) -> Plan:
    """Measure every layer plain and with each allowed recipe, and choose.

    Wrap the call in ``torch.autocast`` if the training loop uses it. Parameters, ``.grad``, buffers
    and torch's random state do not change. ``hot.convert(model, overrides=plan.overrides())``
    applies the plan (with the same ``filter_fn``, if there is one).

    Args:
        model: plain, in training mode, on the device that it trains on.
        inputs: a Tensor, a tuple of positional arguments or a dict of keyword arguments for the
            model, of the size of the training; with ``loss_fn`` any argument of it.
        loss_fn: ``loss_fn(model, inputs)`` -> loss, a scalar; by default the mean of every floating
            output.
        objective: ``"time"`` chooses the fastest, which has to beat plain torch by more than the
            spread; among choices within the spread, the most accurate one. ``"memory"`` chooses
            what keeps the least for backward at up to ``slowdown`` times plain torch's time.
        allow: allowed recipes (:data:`ACCURACY` orders them) or HotConfigs (listed with the most
            accurate first).
        filter_fn: selects layers as for :func:`convert`; the default is convert's default filter
            without the rule for layers that are slower on CUDA.
        compiled: measure layers under ``torch.compile``; a mapping holds its options. None: if
            ``model`` or a part of it is compiled.
        slowdown: for ``"memory"``: the largest time of a layer, as a multiple of plain torch's.
        rounds: turns of each choice.
        budget_ms: time after which a choice takes no more turns; it always takes at least 5.
        verify: time forward and backward of the whole model, plain and as planned, for
            :attr:`Plan.steps`. A compiled model is compiled for both.
        clock: on CUDA ``"device"`` or ``"host"``; None: whichever limits the whole step.

    Returns:
        A :class:`Plan` with every layer that :func:`convert` supports, the times of all choices,
        the choice, and why a layer stays plain. ``nn.MultiheadAttention`` is not measured: the rule
        of :func:`convert` applies to it.

    Raises:
        ValueError: a bad argument; a model that is converted, in eval mode or on the meta device;
            no layer to choose for; or a loss without a gradient.
    """
    configs = allowed_configs(allow)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: {objective!r} is not one of 'time', 'memory'")
    if slowdown < 1:
        raise ValueError(f"slowdown: {slowdown} is below 1")
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds: {rounds}; expected at least {MIN_ROUNDS}")
    if clock not in (None, "device", "host"):
        raise ValueError(f"clock: {clock!r} is not one of 'device', 'host', None")
    device = plain_device(model, "autotune")
    if compiled is None:
        compiled = any(is_compiled(module) for module in model.modules())
    options = dict(compiled) if isinstance(compiled, Mapping) else {} if compiled else None
    found: dict[Any, dict[str, Measured]] = {}
    with preserve_state(model):
        watch = Watch(_layers(model, filter_fn))
        with eagerly(), watch.on():
            loss_of(model, inputs, loss_fn)
        step = whole(model, inputs, loss_fn)
        timer, words = _clock(step, device, clock)

        def times_of(layer: nn.Module, call: Call) -> dict[str, Measured]:
            key = _key(layer, call)
            if key not in found:
                kept, steps = _contenders(layer, call, configs, options)
                times = in_turns(steps, timer, rounds, budget_ms)
                found[key] = {name: spread(values, kept[name]) for name, values in times.items()}
            return found[key]

        choose = fastest if objective == "time" else partial(smallest, slowdown=slowdown)
        plans = []
        for name, layer in watch.modules.items():
            use = watch.uses[name]
            times = _sum_calls([times_of(layer, call) for call in use.calls], use)
            plans.append(_plan(name, layer, use, times, configs, choose))
        how = "compiled" if options is not None else "eager"
        machine = f"{device_name(device)}, torch {torch.__version__}, {how}, {words}"
        plan = Plan(tuple(plans), next(iter(configs.values())), objective, machine)
        # A model that is itself the layer has been measured.
        if not verify or all(row.fields is None or row.name == "" for row in plans):
            return plan

        @contextmanager
        def planned() -> Iterator[None]:
            with preserve_state(model):
                convert(model, overrides=plan.overrides(), filter_fn=filter_fn)
                yield

        both = {PLAIN: step, "planned": step}
        steps = in_turns(both, Clock(device, 1), MIN_ROUNDS, settings={"planned": planned})
    return dataclasses.replace(plan, steps={name: spread(row, 0) for name, row in steps.items()})


# ---- Measured configurations and layers ----


def allowed_configs(allow: Sequence[ConfigLike]) -> dict[str, HotConfig]:
    """Name -> configuration, the most accurate first."""
    # A single name is a sequence of letters.
    given: Sequence[Any] = [allow] if isinstance(allow, str | HotConfig) else allow
    if not given:
        raise ValueError("allow: empty; expected recipes or HotConfigs, e.g. ('default', 'fast')")
    found: dict[str, HotConfig] = {}
    for i, entry in enumerate(given):
        config = as_config(entry, f"allow[{i}]")
        found[name_of(config, i)] = config
    if all(name in ACCURACY for name in found):
        return {name: found[name] for name in ACCURACY if name in found}
    return found


def name_of(config: HotConfig, place: int) -> str:
    """The recipe's, with what its forward is; else its place among those that are allowed."""
    backward = dataclasses.replace(config, forward="plain", forward_in_eval=False)
    if backward.name == "custom":
        return f"custom {place}"
    return backward.name if config.forward == "plain" else f"{backward.name}+int8"


def plain_device(model: nn.Module, who: str) -> torch.device:
    """The device of a plain model that can be measured. Raises ValueError for another."""
    check_training(model, who)
    hot = [name for name, module in model.named_modules() if isinstance(module, HotModule)]
    if hot:
        raise ValueError(f"model: converted already ({listed(hot)}); revert() it first")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise ValueError(f"model: on the meta device; {who} measures, so it needs a real one")
    return device


def _layers(model: nn.Module, filter_fn: Filter | None) -> dict[str, nn.Module]:
    """The layers that convert would convert."""
    modules = dict(model.named_modules())
    report = decide(model, "default", filter_fn, slower=True).report
    found = {layer.name: modules[layer.name] for layer in report.converted}
    return {
        name: module
        for name, module in found.items()
        if not isinstance(module, nn.MultiheadAttention) and not is_8bit(module)
    }


def _key(layer: nn.Module, call: Call) -> Any:
    """Everything that a measurement depends on; layers of equal keys share one."""
    own = [(name, p) for name, p in layer._parameters.items() if p is not None]
    about = [(name, p.shape, p.stride(), p.dtype, p.device, p.requires_grad) for name, p in own]
    return type(layer), layer.extra_repr(), tuple(about), call


def _alone(layer: nn.Module) -> nn.Module:
    """The layer without hooks and wrappers, also on its Parameters, whose memory it shares."""
    new = copy.copy(layer)
    new._parameters = {
        name: p if p is None else nn.Parameter(p.detach(), p.requires_grad)
        for name, p in layer._parameters.items()
    }
    for name in ("forward", "_old_forward"):  # accelerate's
        vars(new).pop(name, None)
    return new


def _contenders(
    layer: nn.Module,
    call: Call,
    configs: Mapping[str, HotConfig],
    options: Mapping[str, Any] | None,
) -> tuple[dict[str, int], dict[str, Step]]:
    """Plain and every configuration: bytes kept for backward, and forward and backward."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    x = torch.randn(call.shape, device=weight.device).to(call.dtype)
    if call.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_(call.requires_grad)
    kept, steps = {}, {}
    for name, config in {PLAIN: None, **configs}.items():
        own: Any = _alone(layer)
        if config is not None:
            own = hot_class(own).from_plain(own, config)
        with _casting(x, call.autocast):
            kept[name] = kept_bytes(own, partial(own.forward, x))
        forward = own.forward if options is None else compile_layer(own, options)
        steps[name] = _step(own, forward, x, call.autocast)
    return kept, steps


def _step(
    layer: nn.Module,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    autocast: torch.dtype | None,
) -> Step:
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    with _casting(x, autocast):
        gy = torch.randn_like(forward(x))

    def step() -> None:
        with _casting(x, autocast):
            y = forward(x)
        if wanted:
            torch.autograd.grad(y, wanted, gy)

    return step


def compile_layer(layer: nn.Module, options: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The layer's forward under torch.compile, with its own cache. Tests replace it.

    Dynamo keeps a few graphs per code object and then silently falls back to eager. Layers of one
    class share a code object, so each gets a copy of it.
    """

    def call(x: Tensor) -> Tensor:
        result: Tensor = layer.forward(x)
        return result

    own = types.FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__
    )
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, **options)
    return compiled


def _casting(x: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    if dtype is None and autocast_dtype(x.device.type) is None:
        return nullcontext()
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None)


def _clock(step: Step, device: torch.device, wanted: str | None) -> tuple[Clock, str]:
    """The clock for layers, and its name."""
    if device.type != "cuda":
        return Clock(device), "the host's clock"
    words = {"device": "device time", "host": "host and device"}
    if wanted is None:
        shares = []
        for _ in range(4):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            step()
            queued = time.perf_counter() - start
            torch.cuda.synchronize(device)
            shares.append(queued / (time.perf_counter() - start))
        share = min(shares[1:])  # the first compiles and chooses algorithms
        wanted = "device" if share < HOST_SHARE else "host"
        words = {
            "device": f"device time (the host needs {share:.0%} of the step)",
            "host": f"host and device ({share:.0%} of the step is the host's)",
        }
    return (DeviceClock if wanted == "device" else Clock)(device), words[wanted]


# ---- Choosing ----


def _plan(
    name: str,
    layer: nn.Module,
    use: LayerUse,
    times: Mapping[str, Measured],
    configs: Mapping[str, HotConfig],
    choose: Callable[[Mapping[str, Measured]], tuple[str, str]],
) -> LayerPlan:
    choice, reason = PLAIN, "never called with these inputs"
    if times:
        choice, reason = choose(times)
    elif use.bypassed:
        reason = "never called: its weight is multiplied without it"
    fields = None if choice == PLAIN else _fields(configs[choice])
    return LayerPlan(name, fields, times, choice, reason, _shape(layer, use.calls))


def _sum_calls(calls: Sequence[Mapping[str, Measured]], use: LayerUse) -> dict[str, Measured]:
    """Sum of a layer's calls in a step. Plain bytes are those the forward pass kept.

    Layers with the same x keep it once, in plain torch and, with equal configurations, in HOT.
    """
    sums = {}
    for name in calls[0] if calls else ():
        rows = [call[name] for call in calls]
        kept = use.kept_bytes
        if name != PLAIN:
            kept = sum(row.kept_bytes for row in rows) / use.sharers
        sums[name] = Measured(
            sum(row.median_ms for row in rows),
            sum(row.q1_ms for row in rows),
            sum(row.q3_ms for row in rows),
            round(kept),
        )
    return sums


def fastest(times: Mapping[str, Measured]) -> tuple[str, str]:
    """The choice for ``"time"``, and why. ``times`` has plain and recipes, most accurate first."""
    plain = times[PLAIN]
    winners = [name for name, row in times.items() if name != PLAIN and row.beats(plain)]
    if not winners:
        name, best = min(_others(times), key=lambda entry: entry[1].median_ms)
        ratio = best.median_ms / plain.median_ms
        if plain.beats(best):
            return PLAIN, f"{name} takes {ratio:.2f} of its time"
        return PLAIN, f"{name} takes {ratio:.2f} of its time, within the spread"
    best = min((times[name] for name in winners), key=lambda row: row.median_ms)
    choice = next(name for name in winners if not best.beats(times[name]))
    return choice, f"{times[choice].median_ms / plain.median_ms:.2f} of plain's time"


def smallest(times: Mapping[str, Measured], slowdown: float) -> tuple[str, str]:
    """The choice for ``"memory"``, and why."""
    plain = times[PLAIN]
    within = [n for n, row in _others(times) if row.median_ms <= slowdown * plain.median_ms]
    if not within:
        name, best = min(_others(times), key=lambda entry: entry[1].median_ms)
        return PLAIN, f"{name} takes {best.median_ms / plain.median_ms:.2f} of its time"
    choice = min(within, key=lambda name: times[name].kept_bytes)
    if times[choice].kept_bytes >= plain.kept_bytes:
        return PLAIN, f"{choice} keeps no less: something else keeps x, or nothing is kept"
    return choice, (
        f"{times[choice].kept_bytes / plain.kept_bytes:.2f} of plain's bytes, "
        f"{times[choice].median_ms / plain.median_ms:.2f} of its time"
    )


def _others(times: Mapping[str, Measured]) -> list[tuple[str, Measured]]:
    return [(name, row) for name, row in times.items() if name != PLAIN]


def _fields(config: HotConfig) -> dict[str, Any]:
    """The fields that turn any configuration into this one.

    For a recipe the fields that recipes set, so a caller's token grid and roundings stay.
    """
    own = dataclasses.asdict(config)
    if config.name == "custom":
        return own
    recipes = {field for fields in RECIPES.values() for field in fields}
    return {name: value for name, value in own.items() if name in recipes}


def _shape(layer: nn.Module, calls: Sequence[Call]) -> str:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    kind = type(layer).__name__
    if isinstance(layer, nn.Conv2d):
        kind += " " + "x".join(map(str, layer.kernel_size))
    sizes = f"{kind} {' x '.join(map(str, weight.shape[:2]))}"
    if not calls:
        return sizes
    call = calls[0]
    dtype = str(call.dtype if call.autocast is None else call.autocast).removeprefix("torch.")
    more = f", {len(calls)} calls" if len(calls) > 1 else ""
    return f"{sizes}, x {list(call.shape)} {dtype}{more}"
