"""``PrecisionSchedule``: g_x in 8 bits at first, then in fewer.

Source: the paper's supplement B (25 epochs of 200 in INT8); docs/paper.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import nn

from ..config import HotConfig

Bits = Literal[4, 8]


class PrecisionSchedule:
    """Makes the HOT layers of a model compute g_x in 8 bits for a while, then in 4.

    As a callback; its unit (steps or epochs) is whatever calls of ``step()`` count::

        schedule = paper.PrecisionSchedule(model, 25)
        for epoch in range(200):
            train(model)
            schedule.step()

    As a context, which restores the layers' own configurations at its end::

        with paper.PrecisionSchedule(model, 1000) as schedule:
            for batch in batches:
                train(model, batch)
                schedule.step()

    Layers keep every other field of their configuration. Parameters and state_dicts of the model do
    not change. Put :meth:`state_dict` into a checkpoint to resume a run.

    Args:
        model: a converted model; layers that are converted later are not part of the schedule.
        warmup: number of calls of ``step()`` with ``bits``; 0: ``then_bits`` from the start.
        bits: bits of g_x at first, 8 or 4.
        then_bits: bits of g_x after that, 8 or 4; None: those of each layer's own configuration.

    Raises:
        ValueError: no layer of the model is converted, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        warmup: int,
        *,
        bits: Bits = 8,
        then_bits: Bits | None = 4,
    ) -> None:
        """Set the first phase's bits."""
        if isinstance(warmup, bool) or not isinstance(warmup, int):
            raise TypeError(f"warmup: expected an int, got {warmup!r}")
        if warmup < 0:
            raise ValueError(f"warmup: {warmup} is negative")
        for name, value in (("bits", bits), ("then_bits", then_bits)):
            if value not in (4, 8) and not (name == "then_bits" and value is None):
                raise ValueError(f"{name}: {value!r}; expected 8 or 4")
        # A Hugging Face model has another config.
        modules: list[Any] = [m for m in model.modules() if hasattr(m, "config")]
        self._layers = [(m, m.config) for m in modules if isinstance(m.config, HotConfig)]
        if not self._layers:
            raise ValueError("model: no layer of it is converted; call hot.convert(model) first")
        self._warmup, self._bits, self._then_bits = warmup, bits, then_bits
        self._count = 0
        self._apply()

    @property
    def bits(self) -> Bits | None:
        """Bits of g_x in the current phase; None: each layer's own."""
        return self._bits if self._count < self._warmup else self._then_bits

    @property
    def count(self) -> int:
        """Number of calls of ``step()``."""
        return self._count

    def step(self) -> None:
        """Count one step or epoch, and change the configurations when the warmup ends."""
        self._count += 1
        if self._count == self._warmup:
            self._apply()

    def close(self) -> None:
        """Restore every layer's configuration from before the schedule."""
        for module, config in self._layers:
            module.config = config

    def __enter__(self) -> PrecisionSchedule:
        """Return the schedule, which is in force since its construction."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close, see :meth:`close`."""
        self.close()

    def state_dict(self) -> dict[str, int]:
        """How far the schedule is."""
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from :meth:`state_dict`."""
        self._count = int(state["count"])
        self._apply()

    def _apply(self) -> None:
        bits = self.bits
        for module, own in self._layers:
            module.config = own if bits is None else dataclasses.replace(own, gx_bits=bits)
