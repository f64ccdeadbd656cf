"""``PrecisionSchedule``: g_x in 8 bits at first, then in fewer.

Source: the paper's supplement B (25 epochs of 200 in INT8); docs/paper.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from ..config import HotConfig, as_size
from ..torch.layers.modules import HotModule, hot_layers

Bits = Literal[4, 8]


class PrecisionSchedule:
    """Makes the HOT layers of a model compute g_x in 8 bits for a while, then in 4.

    Call ``step()`` after each step or epoch, the unit of ``warmup``. The end of ``with schedule:``
    restores these bits. A closed schedule only counts, until it is entered again. Layers keep every
    other field of their configuration. Put :meth:`state_dict` into a checkpoint to resume a run.

    Args:
        model: a converted model; later conversions are not part of the schedule.
        warmup: number of calls of ``step()`` with ``bits``; 0: ``then_bits`` from the start.
        bits: bits of g_x at first, 8 or 4.
        then_bits: bits of g_x after that, 8 or 4; None: those of each layer's configuration.

    Raises:
        ValueError: no layer of the model is converted, or a number is out of range.
    """

    def __init__(
        self, model: nn.Module, warmup: int, *, bits: Bits = 8, then_bits: Bits | None = 4
    ) -> None:
        as_size(warmup, "warmup", 64)
        if bits not in (4, 8):
            raise ValueError(f"bits: expected 8 or 4, got {bits!r}")
        if then_bits not in (4, 8, None):
            raise ValueError(f"then_bits: expected 8, 4 or None, got {then_bits!r}")
        self._layers = [(layer, layer.config) for layer in hot_layers(model)]
        if not self._layers:
            raise ValueError("model: no layer is converted; call hot.convert(model) first")
        self._warmup, self._bits, self._then_bits = warmup, bits, then_bits
        self.count = 0
        """Number of calls of ``step()``."""
        self._closed = False
        self._apply()

    @property
    def bits(self) -> Bits | None:
        """Bits of g_x in the current phase; None: those of each layer's configuration."""
        return self._bits if self.count < self._warmup else self._then_bits

    def step(self) -> None:
        """Count one step or epoch, and change the configurations when the warmup ends."""
        self.count += 1
        if self.count == self._warmup:
            self._apply()

    def close(self) -> None:
        """Restore the bits of g_x that every layer had before the schedule."""
        self._closed = True
        self._set(None)

    def __enter__(self) -> PrecisionSchedule:
        self._closed = False
        self._apply()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps as a dict."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from :meth:`state_dict`."""
        self.count = int(state["count"])
        self._apply()

    def _converted(self) -> Iterator[tuple[HotModule, HotConfig]]:
        # hot.revert makes plain layers of the same modules, which have no configuration.
        return ((m, config) for m, config in self._layers if isinstance(m, HotModule))

    def _apply(self) -> None:
        if not self._closed:
            self._set(self.bits)

    def _set(self, bits: Bits | None) -> None:
        for module, config in self._converted():
            gx_bits = bits or config.gx_bits
            module.config = dataclasses.replace(module.config, gx_bits=gx_bits)
