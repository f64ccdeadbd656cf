"""``HotLoop``: HOT's tools for a training loop, driven by its optimizer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import hotcore.torch as hot

from ..torch.probe import autocast_dtype, eagerly, loss_of

_MIB = 2**20
Scalars = Mapping[str, float]


class HotLoop:
    """A precision schedule, shared micro-batches and measurements.

    ::

        hot.convert(model, "default")
        with HotLoop(model, optimizer, warmup=1000, noise_every=100, log=writer):
            ...  # the loop as it is, with accelerate, Fabric or neither

    A hook counts the optimizer's steps; the loop only calls :meth:`end_epoch` if
    ``unit="epoch"``. Steps that a GradScaler skips do not count.

    Args:
        model: a converted model, or a DistributedDataParallel around it.
        optimizer: the optimizer whose steps count, or accelerate's wrapper around it.
        warmup: steps (or epochs) with g_x in 8 bits, after which it has 4; or a
            :class:`hotcore.torch.PrecisionSchedule`. None: no schedule. Leaving restores the
            layers' own configurations.
        unit: unit of the schedule, ``"step"`` or ``"epoch"``.
        accumulate: :func:`hotcore.torch.gradient_accumulation` around the whole loop.
        memory: at the first step, measure the bytes each module keeps for backward, plain and with
            HOT, by :func:`hotcore.torch.memory_report` on the step's own inputs: :attr:`memory`.
        noise_every: steps between measurements of the noise to gradient ratio; 0: none.
        noise_layers: name patterns of the layers to measure.
        log: target of scalars, see :func:`scalar_logger`. None: no logging.
        start: steps (or epochs) trained before, for a run that resumes.

    Raises:
        ValueError: no layer of the model is converted, or a bad argument.
        RuntimeError: entered twice, or inside another ``gradient_accumulation()``.

    Source: docs/torch/integrations.md, "Integrations".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        warmup: int | hot.PrecisionSchedule | None = None,
        unit: Literal["step", "epoch"] = "step",
        accumulate: bool = False,
        memory: bool = False,
        noise_every: int = 0,
        noise_layers: str | Sequence[str] = "*",
        log: Any = None,
        start: int = 0,
    ) -> None:
        """Check the arguments; nothing changes before the loop is entered."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        if unit not in ("step", "epoch"):
            raise ValueError(f"unit: {unit!r} is not one of 'step', 'epoch'")
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {kind}")
        self._model, self._optimizer = model, optimizer
        self._warmup, self._unit = warmup, unit
        self._accumulate = accumulate
        self._wants_memory = memory
        self._noise = hot.NoiseMonitor(model, noise_every, noise_layers) if noise_every else None
        self._log = scalar_logger(log)
        self._count = start  # in units of the schedule
        self._steps = start if unit == "step" else 0
        self._bits: int | None = None
        self._measuring = False
        self._stack: ExitStack | None = None
        self._inputs: tuple[Any, Any, Any] | None = None
        self.schedule: hot.PrecisionSchedule | None = None
        """The schedule inside the loop; None without ``warmup``."""
        self.memory: hot.MemoryReport | None = None
        """The memory report of the first step, with ``memory=True``."""
        self.scalars: dict[str, float] = {}
        """The scalars that were logged last."""

    def __enter__(self) -> HotLoop:
        """Begin."""
        if self._stack is not None:
            raise RuntimeError("HotLoop: entered already")
        with ExitStack() as stack:  # closed if one of them fails
            if self._warmup is not None:
                schedule = self._warmup
                if isinstance(schedule, int):
                    schedule = hot.PrecisionSchedule(self._model, schedule)
                self.schedule = stack.enter_context(schedule)
                schedule.load_state_dict({"count": self._count or schedule.count})
            if self._accumulate:
                stack.enter_context(hot.gradient_accumulation())
            if self._wants_memory:
                hook = self._model.register_forward_pre_hook(self._keep_inputs, with_kwargs=True)
                stack.callback(hook.remove)
            if self._noise is not None:
                self._noise.begin()
                stack.callback(self._noise.close)
            stack.callback(self._optimizer.register_step_post_hook(self._stepped).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """End, see :meth:`close`."""
        self.close()

    def close(self) -> None:
        """Undo everything; a closed loop may be entered again."""
        stack, self._stack, self._inputs = self._stack, None, None
        if stack is not None:
            stack.close()

    @property
    def steps(self) -> int:
        """Number of steps; with ``unit="step"`` including ``start``."""
        return self._steps

    def end_epoch(self) -> None:
        """Count an epoch in the schedule if ``unit="epoch"``."""
        if self._unit == "epoch":
            self._advance()

    def _advance(self) -> None:
        self._count += 1
        if self.schedule is not None:
            self.schedule.step()

    def _keep_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        wanted = self._wants_memory and not self._measuring and not torch.compiler.is_compiling()
        if wanted and module.training and torch.is_grad_enabled():
            device = next((p.device.type for p in module.parameters()), "cpu")
            self._inputs = (args, kwargs, (device, autocast_dtype(device)))

    def _stepped(self, *_: Any) -> None:
        scalars: dict[str, float] = {}
        if self._noise is not None:
            scalars.update(self._noise.end())
        if self._inputs is not None:
            scalars.update(self._measure_memory(*self._inputs))
        elif self._wants_memory:
            self._wants_memory = False
            warnings.warn(
                "HotLoop: no memory report: the step did not call the model itself, in training "
                "mode and outside of a compiled graph; call hot.memory_report",
                stacklevel=2,
            )
        self._steps += 1
        if self.schedule is not None and self.schedule.bits not in (None, self._bits):
            self._bits = self.schedule.bits
            scalars["hot/gx_bits"] = float(self._bits or 0)
        if self._unit == "step":
            self._advance()
        if scalars:
            self.report(scalars)
        if self._noise is not None and self._stack is not None:
            self._noise.begin()

    def report(self, scalars: Scalars) -> None:
        """Log ``scalars`` at the current step."""
        self.scalars = dict(scalars)
        self._log(self.scalars, self._steps)

    def _measure_memory(self, args: Any, kwargs: Any, cast: Any) -> Scalars:
        device, dtype = cast

        def loss_fn(model: nn.Module, inputs: Any) -> torch.Tensor:
            called: Any = functools.partial(model, **inputs[1])
            with torch.autocast(device, dtype, enabled=dtype is not None):
                return loss_of(called, inputs[0], None)

        return self.measure_memory((args, kwargs), loss_fn)

    def measure_memory(
        self, inputs: Any, loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    ) -> Scalars:
        """Make :attr:`memory` from ``loss_fn(model, inputs)``; a failure becomes a warning."""
        self._wants_memory, self._inputs, self._measuring = False, None, True
        try:
            with eagerly():
                self.memory = hot.memory_report(self._model, inputs, None, loss_fn=loss_fn)
        except (ValueError, RuntimeError, TypeError) as error:
            warnings.warn(f"HotLoop: no memory report: {error}", stacklevel=2)
            return {}
        finally:
            self._measuring = False
        found = self.memory
        scalars = {"hot/kept_plain_mib": found.before / _MIB, "hot/kept_mib": found.after / _MIB}
        if found.peak_before is not None and found.peak_after is not None:
            scalars["hot/peak_plain_mib"] = found.peak_before / _MIB
            scalars["hot/peak_mib"] = found.peak_after / _MIB
        return scalars


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """A callback's options: the loop's, except ``start``. Raises TypeError for others."""
    known = set(HotLoop.__init__.__kwdefaults__ or {}) - {"start"}
    if unknown := sorted(set(options) - known):
        expected = ", ".join(sorted(known))
        raise TypeError(f"HotCallback: no option {', '.join(unknown)}; expected some of {expected}")
    return options


def scalar_logger(target: Any) -> Callable[[Scalars, int], None]:
    """``log(scalars, step)`` for common loggers.

    Args:
        target: TensorBoard's ``SummaryWriter`` (``add_scalar``), a logger of Lightning
            (``log_metrics``), a ``Fabric`` (``log_dict``), a run of W&B or an ``Accelerator``
            (``log``), any function of (scalars, step), or None for no logging.

    Raises:
        TypeError: it is none of these.
    """
    if target is None:
        return lambda scalars, step: None
    if hasattr(target, "add_scalar"):

        def write(scalars: Scalars, step: int) -> None:
            for name, value in scalars.items():
                target.add_scalar(name, value, step)

        return write
    for method in ("log_metrics", "log_dict", "log"):
        if hasattr(target, method):
            return lambda scalars, step: getattr(target, method)(dict(scalars), step=step)
    if callable(target):
        return lambda scalars, step: target(dict(scalars), step)
    raise TypeError(
        f"log: {type(target).__name__} is no logger; expected a SummaryWriter, something with .log "
        "or .log_metrics, or a function of (scalars, step)"
    )
