"""Results of :func:`hotcore.compress_activation`, :func:`hotcore.quantize_forward_input`,
:func:`hotcore.quantize_weight`, :func:`hotcore.quantize_forward_weight` and
:func:`hotcore.quantize_weight_int4`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from . import _core, arrays
from .config import HotConfig, Key, as_ints, as_key, as_size


class Layout(NamedTuple):
    """Layout of codes and scales in the buffer (``hot::SavedLayout``)."""

    bytes: int
    channels: int
    k: int
    k_padded: int
    row_bytes: int
    scales: int
    scale_offset: int
    exponent_offset: int


def saved_layout(tokens: int, in_features: int, config: HotConfig) -> Layout:
    """Return the layout of x ``[tokens, in_features]`` under ``config``. Raises ValueError."""
    return Layout(*_core.saved_layout(tokens, in_features, config.spec))


@dataclasses.dataclass(frozen=True)
class Saved:
    """A compressed activation: one uint8 vector of the caller's framework, with its metadata.

    ``tokens`` and ``in_features`` are x's L and I; ``config`` and ``key`` are the compression's.
    Source: docs/numerics.md.
    """

    data: arrays.Array
    tokens: int
    in_features: int
    config: HotConfig
    key: Key

    @property
    def layout(self) -> Layout:
        """Layout of codes and scales in ``data``."""
        return saved_layout(self.tokens, self.in_features, self.config)

    @property
    def nbytes(self) -> int:
        """Bytes of ``data``."""
        return int(self.data.shape[0])

    def codes(self) -> Any:
        """A view of the codes: int8 ``[I, Kp]``, or packed uint8 rows of INT4.

        The columns are the contraction (tokens, or kept rows of their blocks), padded with zeros.
        """
        layout, source = self._read()
        flat = source.array[: layout.channels * layout.row_bytes]
        if self.config.storage == "int8":
            flat = source.kind.view(flat, "int8")
        return flat.reshape((layout.channels, layout.row_bytes))

    def scales(self) -> Any:
        """Scales as float32: ``[I]`` or ``[1]`` of INT8 codes, ``[I, ceil(L/64)]`` of INT4.

        A view for INT8 codes; otherwise a copy, since the scales are stored as bfloat16.
        """
        layout, source = self._read()
        plain = self.config.storage == "int8"
        kind, width = source.kind, 4 if plain else 2
        end = layout.scale_offset + width * layout.scales
        stored = source.array[layout.scale_offset : end]
        if plain:
            return kind.view(stored, "float32")
        words = kind.empty((layout.scales, 4), "uint8", source.device)
        words[:, :2] = 0
        words[:, 2:] = stored.reshape((layout.scales, 2))  # bfloat16: float32's upper half
        scales = kind.view(words.reshape((-1,)), "float32")
        groups = saved_layout(self.tokens, 1, self.config).scales  # per channel
        return scales.reshape((layout.channels, groups))

    def exponents(self) -> Any:
        """Exponents plus 127 of the tokens, a view uint8 ``[L]``; None if not equalised."""
        if not self.config.equalize_tokens:
            return None
        layout, source = self._read()
        return source.array[layout.exponent_offset :]

    def _read(self) -> tuple[Layout, arrays.Operand]:
        layout, source = self.layout, arrays.operand(self.data, "saved.data", ("uint8",))
        if source.shape != (layout.bytes,):
            raise ValueError(
                f"saved.data: shape {source.shape}; expected ({layout.bytes},) for "
                f"{self.tokens} tokens, {self.in_features} in_features and this config"
            )
        return layout, source


@dataclasses.dataclass(frozen=True)
class _Weight:
    data: arrays.Array
    out_features: int
    in_features: int
    config: HotConfig


class QuantizedWeight(_Weight):
    """w for the product of g_x: codes ``[I, Kp]`` and I scales, uint8; valid until w changes."""


@dataclasses.dataclass(frozen=True)
class QuantizedForwardWeight(_Weight):
    """w quantised for the product of y: codes of its rows and O scales in one uint8 vector.

    It is valid until w changes. ``exponents`` are those of :func:`hotcore.quantize_weight_int4`.
    """

    exponents: arrays.Array | None = None


@dataclasses.dataclass(frozen=True)
class QuantizedWeightInt4(_Weight):
    """w in INT4 for the product of y: codes, O scales and the steps of groups in one uint8 vector.

    ``exponents`` (int8 ``[I]`` or None) are the powers of two by which in features were multiplied.
    """

    group: int = 32
    exponents: arrays.Array | None = None


@dataclasses.dataclass(frozen=True)
class QuantizedInput:
    """x quantised for the product of y: codes of its tokens and L scales in one uint8 vector.

    ``shape`` and ``dtype`` are x's. ``exponents`` (int8 ``[I]`` or None) are the powers of two by
    which its features were divided.
    """

    data: arrays.Array
    shape: tuple[int, ...]
    dtype: str
    config: HotConfig
    exponents: arrays.Array | None = None

    @property
    def tokens(self) -> int:
        """L, the product of the leading dimensions."""
        return math.prod(self.shape[:-1])

    @property
    def in_features(self) -> int:
        """I, the last dimension."""
        return self.shape[-1]


def check_fields(codes: Saved | _Weight | QuantizedInput, name: str) -> None:
    """Check fields, which can come from a file. Raises TypeError, ValueError."""
    for field, value in vars(codes).items():
        full = f"{name}.{field}"
        kind: Any = {"config": HotConfig, "key": Key}.get(field, object)
        if not isinstance(value, kind):
            raise TypeError(f"{full}: expected a {kind.__name__}, got {value!r}")
        if field == "key":
            as_key(value, full)
        elif field in ("tokens", "in_features", "out_features", "group"):
            as_size(value, full, 64)
        elif field == "dtype" and value not in arrays.FLOATS:
            raise ValueError(f"{full}: {value!r} is not one of {', '.join(arrays.FLOATS)}")
        elif field == "shape":
            sizes = as_ints(value, full, "sizes", bits=64)
            if not 2 <= len(sizes) <= 4 or min(sizes) < 0:
                raise ValueError(f"{full}: {sizes}; expected 2 to 4 sizes")
