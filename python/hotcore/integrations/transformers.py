"""``HotCallback`` for transformers' ``Trainer``. Imports transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .loop import HotLoop, checked_options

# hotcore does not require transformers; the type checker runs without it.
_TrainerCallback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback


class HotCallback(_TrainerCallback):  # type: ignore[misc]
    """:class:`hotcore.integrations.HotLoop` for a ``Trainer`` of transformers.

    ::

        hot.convert(model, "default")
        trainer = Trainer(model, arguments, train_dataset=data)
        HotCallback.add_to(trainer, accumulate=True, noise_every=100)
        trainer.train()

    If an error ends the training, the next ``train()`` or :meth:`close` closes the loop.

    Args:
        **options: options of :class:`~hotcore.integrations.HotLoop`, except ``start``. Without
            ``log`` scalars go only to the Trainer's history (``trainer.state.log_history``);
            :meth:`add_to` sends them to everything that the Trainer reports to.

    Raises:
        TypeError: an option that HotLoop does not have.
    """

    def __init__(self, **options: Any) -> None:
        """Keep the options until training begins."""
        self._options = checked_options(options)
        self._send: Callable[[dict[str, float]], object] | None = None
        self._pending: dict[str, float] = {}
        self.loop: HotLoop | None = None
        """The loop of the current training, or of the last one."""

    @classmethod
    def add_to(cls, trainer: Any, **options: Any) -> HotCallback:
        """Add a callback whose scalars the Trainer logs with its own; return it."""
        callback = cls(**options)
        callback._send = trainer.log
        trainer.add_callback(callback)
        return callback

    def close(self) -> None:
        """Undo everything, after a training that an error has ended."""
        if self.loop is not None:
            self.loop.close()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any
    ) -> None:
        """Enter the loop."""
        self.close()
        options = dict(self._options)
        options["start"] = state.global_step
        if options.get("log") is None:
            options["log"] = lambda scalars, step: self._pending.update(scalars)
        self.loop = HotLoop(model, optimizer, **options)
        self.loop.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step's measurements; the Trainer has already counted the step."""
        scalars, self._pending = self._pending, {}
        if scalars and self._send is not None:
            self._send(scalars)
        elif scalars:
            state.log_history.append({**scalars, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the loop."""
        self.close()
