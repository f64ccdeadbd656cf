"""``HotLoop``: HOT's tools for a training loop, driven by its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer

import hotcore.torch as hot

from ..config import as_size

Scalars = Mapping[str, float]


class HotLoop:
    """Noise monitor with a log, driven by the optimizer: ``with HotLoop(model, optimizer): ...``.

    A hook counts the optimizer's steps; steps that a GradScaler skips do not count.

    Args:
        model: a converted model, or a DistributedDataParallel around it.
        optimizer: the optimizer whose steps count, or accelerate's wrapper around it.
        noise_every: steps between measurements of the noise to gradient ratio; 0: none.
        noise_layers: name patterns of the layers to measure.
        log: target of scalars, see :func:`scalar_logger`. None: no logging.
        start: steps before this run; the log continues from there.

    Raises:
        ValueError, TypeError: a bad argument, or no converted layer matches ``noise_layers``.
        RuntimeError: entered twice.

    Source: docs/torch/integrations.md, "Integrations".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        noise_every: int = 0,
        noise_layers: str | Sequence[str] = "*",
        log: Any = None,
        start: int = 0,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {kind}")
        self._model, self._optimizer = model, optimizer
        self._noise = hot.NoiseMonitor(model, noise_every, noise_layers) if noise_every else None
        self._log = scalar_logger(log)
        self.steps = as_size(start, "start", 64)
        """Number of steps, ``start`` included."""
        self._stack: ExitStack | None = None
        self.scalars: dict[str, float] = {}
        """The last logged scalars."""

    def __enter__(self) -> HotLoop:
        if self._stack is not None:
            raise RuntimeError("HotLoop: entered already")
        with ExitStack() as stack:  # closed if one of them fails
            if self._noise is not None:
                self._noise.begin()
                stack.callback(self._noise.close)
            stack.callback(self._optimizer.register_step_post_hook(self._stepped).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Undo everything; a closed loop may be entered again."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        if self._noise is None:
            return
        if scalars := self._noise.end():
            self.scalars = scalars
            self._log(scalars, self.steps)
        if self._stack is not None:
            self._noise.begin()


class LoopCallback:
    """Base of the trainers' callbacks, with the loop of a training."""

    def __init__(self, **options: Any) -> None:
        """Keep the loop's options, except ``start``. Raises TypeError or ValueError."""
        known = set(HotLoop.__init__.__kwdefaults__ or {}) - {"start"}
        unknown = sorted(options.keys() - known)
        if unknown:
            expected = ", ".join(sorted(known))
            raise TypeError(f"HotCallback: expected options {expected}, got {', '.join(unknown)}")
        self._options = options
        self.loop: HotLoop | None = None
        """The loop of the current training, or of the last one."""

    def _enter(
        self, model: nn.Module, optimizer: Optimizer, start: int, log: Callable[..., object]
    ) -> None:
        """Enter a loop that logs to the option ``log``, or else to this argument."""
        options = {"log": None, **self._options, "start": start}
        if options["log"] is None:
            options["log"] = log
        self.loop = HotLoop(model, optimizer, **options).__enter__()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the loop."""
        self.close()

    def close(self) -> None:
        """Undo everything, also after a training that ended with an error."""
        if self.loop is not None:
            self.loop.close()


def scalar_logger(target: Any) -> Callable[[Scalars, int], object]:
    """Return ``log(scalars, step)`` for a common logger.

    Args:
        target: TensorBoard's ``SummaryWriter``, a logger or a ``Fabric`` of Lightning, a run of
            W&B, an ``Accelerator``, or any function of (scalars, step). None logs nothing.

    Raises:
        TypeError: another target.
    """
    if target is None:
        return lambda scalars, step: None
    if hasattr(target, "add_scalar"):
        return lambda scalars, step: [target.add_scalar(n, v, step) for n, v in scalars.items()]
    for method in ("log_metrics", "log_dict", "log"):
        if hasattr(target, method):
            return lambda scalars, step: getattr(target, method)(dict(scalars), step=step)
    if callable(target):
        return lambda scalars, step: target(dict(scalars), step)
    raise TypeError(
        "log: expected a SummaryWriter, an object with .log or .log_metrics, or a function of "
        f"(scalars, step), got {type(target).__name__}"
    )
