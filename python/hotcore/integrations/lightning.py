"""``HotCallback`` for Lightning's ``Trainer``. Imports lightning, or pytorch_lightning."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .loop import LoopCallback, Scalars, scalar_logger


def _callback_class() -> Any:
    """Return the Callback class of the imported Lightning, one of two packages."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if names[0] not in sys.modules and names[1] in sys.modules:
        names.reverse()
    try:
        return importlib.import_module(names[0]).Callback
    except ModuleNotFoundError as error:
        if error.name not in (names[0], names[0].split(".")[0]):
            raise  # the package exists, but one of its imports fails
        return importlib.import_module(names[1]).Callback


class HotCallback(LoopCallback, _callback_class()):  # type: ignore[misc]  # untyped base
    """:class:`hotcore.integrations.HotLoop` for Lightning's ``Trainer``.

    Steps of the first optimizer count.

    Args:
        **options: options of :class:`~hotcore.integrations.HotLoop`, except ``start``. Without
            ``log`` scalars go to the Trainer's loggers.

    Raises:
        TypeError: an option that HotLoop does not have.

    Source: docs/torch/integrations.md, "Lightning".
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the loop."""
        loggers = [scalar_logger(logger) for logger in trainer.loggers]

        def log(scalars: Scalars, step: int) -> None:
            for send in loggers:
                send(scalars, step)

        self._enter(pl_module, trainer.optimizers[0], trainer.global_step, log)

    on_exception = LoopCallback.on_train_end
