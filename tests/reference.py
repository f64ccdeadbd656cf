"""What hotcore computes, in readable NumPy: docs/numerics.md line by line, to the bit.

Written for reading and for the tests, not for speed, and independent of libhot: it imports NumPy
and nothing else. Every float32 operation below is one IEEE operation rounded to nearest even, which
is what NumPy does with float32 arrays (``_f32`` marks the constants that must not widen them).

NumPy has no bfloat16. A bfloat16 *input* is given as the float32 array of the same values (widening
is exact); a result asked for in ``"bfloat16"`` comes as a float32 array of values that bfloat16 can
hold (:func:`bf16_bits` has their 16 bits).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]  # float32 or float16 in; float32 where it comes out of an inner step
Codes = NDArray[np.int8]
ConfigLike = Any  # Config, hotcore.HotConfig, or anything else with their fields

_f32 = np.float32
_u32 = np.uint32
_u64 = np.uint64

PURPOSE_QUANTIZE = 0
PURPOSE_GX_GRADIENT = 1
PURPOSE_GX_WEIGHT = 2  # w is rounded to nearest, so nothing is ever drawn for it
PURPOSE_GW_ACTIVATION = 3
PURPOSE_GW_GRADIENT = 4
PURPOSE_SKETCH = 5
PURPOSE_REQUANTIZE = 6
PURPOSE_SIGNS = 7

INT4_GROUP = 64  # tokens that share a scale when x is kept as INT4
ROTATED_BLOCK = 64  # tokens of rht2 that are transformed together and share a scale
TOKEN_GROUP = 32  # features of a token4 or token2 that share a ratio
TOKEN_STORAGES = ("token8", "token4", "token2")  # numerics.md: "One code a value"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _quiet(function: _Function) -> _Function:
    """Run without NumPy's warnings: overflow to Inf and NaN are results here, not accidents."""
    return np.errstate(all="ignore")(function)


class Key(NamedTuple):
    """Key of the counter-based random numbers: 64-bit seed and offset, stream below 8192.

    ``counter`` is 0: an address in a device's memory (``hotcore.Key``), of which a model in NumPy
    knows nothing.

    Source: docs/numerics.md, "Random bits".
    """

    seed: int
    offset: int = 0
    stream: int = 0
    counter: int = 0


KeyLike = Key | int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of ``hotcore.HotConfig``, unchecked; ``Config()`` is the recipe ``"default"``.

    Source: docs/numerics.md; docs/recipes.md.
    """

    hadamard_block: int = 16
    gx_bits: int = 8
    gx_scale: str = "token"
    weight_scale: str = "channel"
    gx_rounding: str = "stochastic"
    basis: str = "full"
    rank: int = 16
    block: int = 16
    rows: tuple[int, ...] | None = None
    token_grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    gw_scale: str = "channel"
    gw_rounding: str = "stochastic"
    storage: str = "int4"
    x_scale: str = "channel"
    x_rounding: str = "stochastic"
    equalize_tokens: bool = False
    forward: str = "plain"
    forward_block: int = 64
    forward_in_eval: bool = False


def recipe(name: str, **overrides: Any) -> Config:
    """Return the named recipe (docs/recipes.md) with some fields replaced."""
    fields: dict[str, dict[str, Any]] = {
        "default": {},
        "fast": {"basis": "sketch", "rank": 8, "storage": "int8"},
        "paper": {
            "gx_bits": 4,
            "gx_scale": "tensor",
            "weight_scale": "tensor",
            "basis": "lowpass",
            "rank": 8,
            "gw_scale": "tensor",
            "storage": "int8",
            "x_scale": "tensor",
        },
        "accurate": {"storage": "int8"},
        "compact": {"storage": "rht2", "equalize_tokens": True},
    }
    return Config(**{**fields[name], **overrides})


# ---------------------------------------------------------------------------- Floating-point types


@_quiet
def round_bf16(values: Floats) -> NDArray[np.float32]:
    """Round float32 to bfloat16, nearest even; float32 of the same shape. NaN becomes 0x7fc0.

    Source: docs/numerics.md, "Integer GEMM and dequantisation" (rounding to the output type).
    """
    words = _words(values)
    rounded = words + _u32(0x7FFF) + ((words >> _u32(16)) & _u32(1))
    return _bf16_from_upper_half(values, rounded)


@_quiet
def round_up_bf16(values: Floats) -> NDArray[np.float32]:
    """Round float32 up: the smallest bfloat16 that is not below; float32 of the same shape.

    Source: docs/numerics.md, "INT4".
    """
    words = _words(values)
    negative = words >> _u32(31) == 1
    finite = np.isfinite(values)
    # Truncation goes towards zero: that is up for negative values, and positive ones go past it.
    rounded = words + np.where(negative | ~finite, _u32(0), _u32(0xFFFF)).astype(_u32)
    return _bf16_from_upper_half(values, rounded)


def bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """The 16 bits of float32 values that bfloat16 can hold (the upper half of theirs)."""
    return (_words(values) >> _u32(16)).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bit patterns: the reverse of :func:`bf16_bits`."""
    return (np.asarray(bits).astype(_u32) << _u32(16)).view(_f32)


# -------------------------------------------------------------------------------------- Random bits


def philox4x32(counter: NDArray[Any], key: NDArray[Any]) -> NDArray[np.uint32]:
    """Philox4x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3".

    Args:
        counter: 32-bit words, ``[..., 4]``.
        key: 32-bit words, ``[..., 2]``; leading dimensions broadcast against the counter's.

    Returns:
        uint32 ``[..., 4]``.

    Source: docs/numerics.md, "Random bits".
    """
    low = _u64(0xFFFFFFFF)
    high = _u64(32)
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter).astype(_u64), -1, 0)
    k0, k1 = np.moveaxis(np.asarray(key).astype(_u64), -1, 0)
    for _ in range(7):
        product0 = c0 * _u64(0xD2511F53)
        product1 = c2 * _u64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> high) ^ c1 ^ k0,
            product1 & low,
            (product0 >> high) ^ c3 ^ k1,
            product0 & low,
        )
        k0 = (k0 + _u64(0x9E3779B9)) & low
        k1 = (k1 + _u64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(_u32)


def random_words(blocks: NDArray[Any], key: KeyLike, purpose: int) -> NDArray[np.uint32]:
    """The four random words of each block number below 2**48: uint32 ``[..., 4]``.

    Source: docs/numerics.md, "Random bits".
    """
    seed, offset, stream, _ = _key(key)
    number = np.asarray(blocks).astype(_u64)
    low = _u64(0xFFFFFFFF)
    counter = np.empty((*number.shape, 4), _u64)
    counter[..., 0] = number & low
    counter[..., 1] = (number >> _u64(32)) & _u64(0xFFFF) | _u64((stream * 8 + purpose) << 16)
    counter[..., 2] = _u64(offset & 0xFFFFFFFF)
    counter[..., 3] = _u64(offset >> 32)
    return philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], _u64))


def random_bytes(rows: int, cols: int, key: KeyLike, purpose: int) -> NDArray[np.uint8]:
    """One random byte for each element of a matrix: uint8 ``[rows, cols]``.

    ``cols`` counts the padding of K-contiguous operands. Source: docs/numerics.md, "Random bits".
    """
    per_row = _ceil_div(cols, 16)
    words = random_words(np.arange(rows * per_row), key, purpose)
    return words.astype("<u4").view(np.uint8).reshape(rows, per_row * 16)[:, :cols].copy()


# --------------------------------------------------------------------------------------------- FWHT


@_quiet
def fwht(
    x: Floats, *, axis: int = -1, block: int = 16, out_dtype: str | None = None
) -> NDArray[Any]:
    """Unnormalised Walsh-Hadamard transform, natural order, of consecutive blocks along one axis.

    Args:
        x: float32 or float16, any shape; its length along ``axis`` is a multiple of ``block``.
        axis: the transformed axis.
        block: power of two, 1 to 32768.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; x's unless given.

    Returns:
        The shape of x. Computed in fp32, rounded once at the end.

    Source: docs/numerics.md, "FWHT".
    """
    values = np.moveaxis(_widen(x), axis, -1)
    blocks = values.reshape(values.size // block, block)
    result = np.moveaxis(_butterflies(blocks).reshape(values.shape), -1, axis)
    return _store(result, _dtype_name(x, out_dtype))


def _butterflies(v: NDArray[np.float32]) -> NDArray[np.float32]:
    """FWHT of every row of ``v [R, n]``."""
    count, n = v.shape
    h = 1
    while h < n:
        pairs = v.reshape(count, n // (2 * h), 2, h)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        v = np.stack([low + high, low - high], axis=2).reshape(count, n)
        h *= 2
    return v


# ----------------------------------------------------------------------------------------- Low rank


class LowRank(NamedTuple):
    """Which rows of the projection are kept: the low-rank fields of a configuration."""

    basis: str = "sketch"
    rank: int = 8
    block: int = 16
    rows: Sequence[int] | None = None
    token_grid: tuple[int, int] | None = None
    prefix_tokens: int = 0

    def kept(self) -> int:
        """Rows kept of a block (not for ``full``)."""
        return self.rank if self.rows is None else len(self.rows)


def sequency(k: int, bits: int) -> int:
    """Number of sign changes of row ``k`` of the Sylvester matrix of order ``2**bits``.

    Source: docs/numerics.md, "Low rank".
    """
    reversed_k = sum((k >> i & 1) << (bits - 1 - i) for i in range(bits))
    for shift in (1, 2, 4, 8, 16):
        reversed_k ^= reversed_k >> shift
    return reversed_k


def basis_order(basis: str, block: int = 16) -> list[int]:
    """Row order of ``"lowpass"`` or ``"sequency"``: its first r entries are kept at rank r.

    Source: docs/numerics.md, "Low rank".
    """
    m = block.bit_length() - 1
    if basis == "sequency":
        return sorted(range(block), key=lambda k: sequency(k, m))
    vertical, horizontal = m // 2, m - m // 2

    def rank_of(k: int) -> tuple[int, int, int]:
        a = sequency(k >> horizontal, vertical)
        b = sequency(k & ((1 << horizontal) - 1), horizontal)
        return a + b, -max(a, b), sequency(k, m)

    return sorted(range(block), key=rank_of)


def token_order(tokens: int, spec: LowRank) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which tokens the transform takes, in its order, and which prefix tokens are appended.

    Together they are every token index of ``range(tokens)`` once.
    Source: docs/numerics.md, "Token layout".
    """
    index = np.arange(tokens, dtype=np.intp)
    if spec.token_grid is None:
        return index, index[:0]
    h, w = spec.token_grid
    per_sample = spec.prefix_tokens + h * w
    samples = index.reshape(tokens // per_sample, per_sample)
    prefix = samples[:, : spec.prefix_tokens].reshape(-1)
    m = spec.block.bit_length() - 1
    tile_h, tile_w = 1 << m // 2, 1 << (m - m // 2)
    down, across = h // tile_h, w // tile_w
    raster = np.arange(h * w).reshape(h, w)
    tiles = (
        raster[: down * tile_h, : across * tile_w]
        .reshape(down, tile_h, across, tile_w)
        .transpose(0, 2, 1, 3)
        .reshape(-1)
    )
    left_over = np.ones((h, w), bool)
    left_over[: down * tile_h, : across * tile_w] = False
    grid = samples[:, spec.prefix_tokens :]
    body = np.concatenate([grid[:, tiles].reshape(-1), grid[:, raster[left_over]].reshape(-1)])
    return body, prefix


def sketch_folds(
    blocks: int, block: int, rank: int, key: KeyLike, purpose: int = PURPOSE_SKETCH
) -> NDArray[np.int64]:
    """The non-zero ``a`` of every fold of every block of tokens: int64 ``[blocks, log2(n/r)]``.

    Source: docs/numerics.md, "Low rank", sketch.
    """
    words = random_words(np.arange(blocks), key, purpose).astype(_u64)
    folds = (block // rank).bit_length() - 1
    shifts = np.empty((blocks, folds), np.int64)
    for j in range(folds):
        length = block >> j
        shifts[:, j] = 1 + ((words[:, j] * _u64(length - 1)) >> _u64(32)).astype(np.int64)
    return shifts


@_quiet
def fold(v: NDArray[np.float32], a: NDArray[np.int64]) -> NDArray[np.float32]:
    """Fold token t onto token ``t xor a`` in every block: ``[B, N, C]`` -> ``[B, N/2, C]``.

    Args:
        v: float32 ``[B, N, C]``, N a power of two.
        a: ``[B]``, ``0 < a < N``.

    Source: docs/numerics.md, "Low rank", sketch.
    """
    half = np.arange(v.shape[1] // 2)
    result = np.empty((v.shape[0], half.size, v.shape[2]), _f32)
    for b, shift in enumerate(a.tolist()):
        top = shift.bit_length() - 1
        t = (half >> top << (top + 1)) | (half & ((1 << top) - 1))  # bit `top` clear, ascending
        result[b] = v[b, t] + v[b, t ^ shift]
    return result


def hla(
    x: Floats,
    *,
    side: str = "activation",
    key: KeyLike = 0,
    out_dtype: str = "float32",
    **spec: Any,
) -> NDArray[Any]:
    """Hadamard low-rank approximation along the tokens: ``P x``, ``rank`` rows of each block.

    Args:
        x: ``[L, C]`` float32 or float16.
        side: ``"activation"`` or ``"gradient"``, which carries the sketch's weights.
        key: random key of the sketch.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        spec: fields of :class:`LowRank`.

    Returns:
        ``[K, C]``; ``(P_gradient g)^T (P_activation x) / block`` is the (approximate) product.

    Source: docs/numerics.md, "Low rank".
    """
    return _store(_project(_widen(x), LowRank(**spec), side, key), out_dtype)


@_quiet
def _project(x: NDArray[np.float32], spec: LowRank, side: str, key: KeyLike) -> NDArray[np.float32]:
    if spec.basis == "full":
        return x.copy()
    n = spec.block
    body, prefix = token_order(x.shape[0], spec)
    channels = x.shape[1]
    blocks = _ceil_div(body.size, n)
    filled = np.zeros((blocks * n, channels), _f32)
    filled[: body.size] = x[body]
    tokens = filled.reshape(blocks, n, channels)

    if spec.basis == "sketch":
        kept = _sketch(tokens, spec.rank, side, key)
    else:
        rows = basis_order(spec.basis, n)[: spec.rank] if spec.rows is None else spec.rows
        kept = _transform_tokens(tokens)[:, sorted(rows)]

    m = n.bit_length() - 1
    factor = _f32(1 << (m // 2 if side == "activation" else m - m // 2))
    return np.concatenate([kept.reshape(blocks * kept.shape[1], channels), x[prefix] * factor])


def _transform_tokens(tokens: NDArray[np.float32]) -> NDArray[np.float32]:
    """FWHT along axis 1 of ``[B, n, C]``."""
    blocks, n, channels = tokens.shape
    lines = tokens.transpose(0, 2, 1).reshape(blocks * channels, n)
    return _butterflies(lines).reshape(blocks, channels, n).transpose(0, 2, 1)


def _sketch(tokens: NDArray[np.float32], rank: int, side: str, key: KeyLike) -> NDArray[np.float32]:
    blocks, n, _ = tokens.shape
    shifts = sketch_folds(blocks, n, rank, key)
    for j in range(shifts.shape[1]):
        tokens = fold(tokens, shifts[:, j])
    kept = _transform_tokens(tokens)
    if side == "gradient":
        weight = _f32(n - 1) / _f32(rank - 1)
        kept = np.concatenate([kept[:, :1], kept[:, 1:] * weight], axis=1)
    return kept


# ------------------------------------------------------------------------------ Scales and rounding


@_quiet
def scale_of(
    amax: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``scale`` and ``inv`` of sets with these largest magnitudes, both float32 of amax's shape.

    NaN and 0 where amax is not finite, 0 and 0 where it is below 2**-100.
    Source: docs/numerics.md, "Scales".
    """
    q = _f32(_largest_code(bits))
    finite = np.isfinite(amax)
    used = finite & (amax >= _f32(2.0**-100))
    scale = np.where(used, amax / q, _f32(0))
    inv = np.where(used, q / amax, _f32(0))
    return np.where(finite, scale, _f32(np.nan)), inv


@_quiet
def round_codes(
    values: NDArray[np.float32],
    inv: NDArray[np.float32] | np.float32,
    bits: int,
    rounding: str,
    u: NDArray[np.uint8] | None = None,
) -> Codes:
    """Codes of ``values * inv`` in ``[-127, 127]`` (8 bits) or ``[-7, 7]`` (4 bits).

    Args:
        values: float32, finite.
        inv: float32, broadcasts against ``values``.
        bits: 8 or 4.
        rounding: ``"nearest"``, ``"stochastic"`` or ``"pseudo_stochastic"``.
        u: random bytes of the shape of ``values``, ``"stochastic"`` only.

    Source: docs/numerics.md, "Rounding".
    """
    q = _largest_code(bits)
    if rounding == "pseudo_stochastic":
        return _round_pseudo_stochastic(values * inv, bits)
    exact = values.astype(np.float64) * np.asarray(inv, np.float64)  # 48 bits of 53
    if rounding == "nearest":
        codes = np.rint(exact).astype(np.int64)
    else:
        assert u is not None
        codes = _round_sum(256 * exact, u.astype(np.int64)) >> 8
    return np.clip(codes, -q, q).astype(np.int8)


def _round_sum(exact: NDArray[np.float64], whole: NDArray[np.int64]) -> NDArray[np.int64]:
    """``exact + whole`` to the nearest integer, half to even, as if the sum were exact."""
    nearest = np.rint(exact)
    rest = exact - nearest  # exact, unlike exact + whole
    total = nearest.astype(np.int64) + whole
    below = total - (rest < 0)  # of a half's two neighbours
    return np.where(np.abs(rest) == 0.5, below + below % 2, total)


def _round_pseudo_stochastic(v: NDArray[np.float32], bits: int) -> Codes:
    a = np.abs(v)
    whole = np.floor(a)
    fraction = a - whole  # exact
    h = 10 if bits == 4 else 8
    digits = np.floor(fraction * _f32(1 << (2 * h + 1))).astype(np.int64)
    probability = digits >> (h + 1)
    draw = digits & ((1 << (h + 1)) - 1)
    up = (2 * probability + 1 > draw) & (digits != 0)
    magnitude = np.minimum(whole.astype(np.int64) + up, _largest_code(bits))
    return np.asarray(np.where(v < 0, -magnitude, magnitude), np.int8)


def quantize(
    x: Floats,
    *,
    bits: int = 8,
    scale: str = "token",
    rounding: str = "stochastic",
    key: KeyLike = 0,
    purpose: int = PURPOSE_QUANTIZE,
    packed: bool = False,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Symmetric quantisation.

    Args:
        x: ``[R, C]`` float32 or float16.
        bits: 8 or 4.
        scale: what shares a scale: ``"token"``, ``"channel"`` or ``"tensor"``.
        rounding: ``"nearest"``, ``"stochastic"`` or ``"pseudo_stochastic"``.
        key: random key of stochastic rounding.
        purpose: stream purpose of the random bytes (docs/numerics.md, "Shapes").
        packed: 4 bits only: two codes a byte.

    Returns:
        Codes int8 ``[R, C]`` (packed: uint8 ``[R, ceil(C/2)]``) and float32 scales ``[R]``, ``[C]``
        or ``[1]``.

    Source: docs/numerics.md, "Scales" and "Rounding".
    """
    values = _widen(x)
    axis = {"token": 1, "channel": 0, "tensor": None}[scale]
    scales, inv = scale_of(_amax(values, axis), bits)
    codes = _round_scaled(values, inv, bits, rounding, key, purpose)
    return (pack_int4(codes) if packed else codes), scales.reshape(-1)


@_quiet
def dequantize(
    q: NDArray[Any],
    scale: NDArray[np.float32],
    *,
    granularity: str = "token",
    dtype: str = "float32",
    packed: bool = False,
    columns: int | None = None,
) -> NDArray[Any]:
    """``q * scale``, rounded to fp32 and then to ``dtype``.

    Args:
        q: int8 ``[R, C]``, or with ``packed`` uint8 ``[R, ceil(C/2)]``.
        scale: float32 ``[R]`` (``"token"``), ``[C]`` (``"channel"``) or ``[1]`` (``"tensor"``).
        granularity: which of the three.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        packed: q holds two INT4 codes a byte.
        columns: C of a packed q; ``2 * q.shape[1]`` unless given.

    Returns:
        ``[R, C]``.

    Source: docs/numerics.md, "Scales".
    """
    codes = unpack_int4(q, columns) if packed else q
    wide = scale[:, None] if granularity == "token" else scale[None, :]
    return _store(codes.astype(_f32) * wide, dtype)


def _amax(values: NDArray[np.float32], axis: int | None) -> NDArray[np.float32]:
    """Largest magnitude along ``axis``, dimension kept, as a bit pattern: NaN beats Inf."""
    magnitudes = _words(values) & _u32(0x7FFFFFFF)
    largest = np.max(magnitudes, axis=axis, keepdims=True, initial=0)
    return np.asarray(largest, _u32).view(_f32)


@_quiet
def _round_scaled(
    values: NDArray[np.float32],
    inv: NDArray[np.float32],
    bits: int,
    rounding: str,
    key: KeyLike,
    purpose: int,
) -> Codes:
    """Codes of ``values * inv`` for a matrix; 0 wherever inv is 0, whatever stands there."""
    rows, cols = values.shape
    u = random_bytes(rows, cols, key, purpose) if rounding == "stochastic" else None
    return round_codes(np.where(inv == 0, _f32(0), values), inv, bits, rounding, u)


# --------------------------------------------------------------------------------------------- INT4


def pack_int4(q: Codes) -> NDArray[np.uint8]:
    """Pack int8 ``[R, C]`` codes two a byte, low nibble first: uint8 ``[R, ceil(C/2)]``.

    Two's complement; values outside [-8, 7] lose their upper bits.
    Source: docs/numerics.md, "INT4".
    """
    rows, cols = q.shape
    nibbles = np.zeros((rows, cols + cols % 2), np.uint8)
    nibbles[:, :cols] = q.astype(np.uint8) & np.uint8(15)
    packed: NDArray[np.uint8] = nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)
    return packed


def unpack_int4(packed: NDArray[np.uint8], columns: int | None = None) -> Codes:
    """Undo :func:`pack_int4`: int8 ``[R, columns]``, ``2 * packed.shape[1]`` unless given.

    Source: docs/numerics.md, "INT4".
    """
    rows, width = packed.shape
    nibbles = np.empty((rows, 2 * width), np.int16)
    nibbles[:, 0::2] = packed & 15
    nibbles[:, 1::2] = packed >> 4
    codes = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)
    return codes if columns is None else codes[:, :columns].copy()


def pack_int2(q: Codes) -> NDArray[np.uint8]:
    """Pack codes 0 to 3 ``[R, C]``, four to a byte, the first in its lowest bits.

    Source: docs/numerics.md, "x kept as rht2".
    """
    rows, cols = q.shape
    fields = q.astype(np.uint8).reshape(rows, cols // 4, 4)
    shifted = fields << (2 * np.arange(4, dtype=np.uint8))
    return np.asarray(np.bitwise_or.reduce(shifted, axis=2), np.uint8)


# -------------------------------------------------------------------- Integer GEMM, dequantisation


def gemm_int8(
    a: Codes,
    b: Codes,
    a_scale: NDArray[np.float32] | None = None,
    b_scale: NDArray[np.float32] | None = None,
    *,
    divisor: int = 1,
    out_dtype: str = "float32",
    out: Floats | None = None,
    accumulate: bool = False,
) -> NDArray[Any]:
    """``a b^T`` of INT8 codes, summed exactly, times ``a_scale[m] * b_scale[n] / divisor``.

    Args:
        a: int8 ``[M, K]``.
        b: int8 ``[N, K]``.
        a_scale: float32 ``[M]`` or ``[1]``; without scales the result is the sums.
        b_scale: float32 ``[N]`` or ``[1]``.
        divisor: power of two.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        out: ``[M, N]``, what ``accumulate`` adds to. It is read, not written.
        accumulate: add to ``out``.

    Returns:
        ``[M, N]`` in ``out_dtype``; without scales int32 (K up to 131,071).

    Source: docs/numerics.md, "Integer GEMM and dequantisation".
    """
    sums = integer_product(a, b)
    if a_scale is None or b_scale is None:
        return sums.astype(np.int32)
    result = _dequantize_product(sums, a_scale, b_scale, divisor)
    return _finish(result, out if accumulate else None, out_dtype)


def gemm_int4(
    a: NDArray[np.uint8], b: NDArray[np.uint8], *scales: Any, k: int | None = None, **options: Any
) -> NDArray[Any]:
    """:func:`gemm_int8` of packed operands, uint8 ``[M, ceil(K/2)]`` and ``[N, ceil(K/2)]``.

    Source: docs/numerics.md, "INT4" and "Integer GEMM and dequantisation".
    """
    return gemm_int8(unpack_int4(a, k), unpack_int4(b, k), *scales, **options)


def integer_product(a: Codes, b: Codes) -> NDArray[np.int64]:
    """``a b^T`` for int8 ``[M, K]`` and ``[N, K]``: exact int64 ``[M, N]``.

    Source: docs/numerics.md, "Integer GEMM and dequantisation".
    """
    # Every partial sum is an integer far below 2**53, so fp64 adds them exactly in any order.
    product: NDArray[np.float64] = a.astype(np.float64) @ b.astype(np.float64).T
    return product.astype(np.int64)


@_quiet
def _dequantize_product(
    sums: NDArray[np.int64],
    a_scale: NDArray[np.float32],
    b_scale: NDArray[np.float32],
    divisor: int,
) -> NDArray[np.float32]:
    right = sums.astype(_f32) * b_scale[None, :]
    return right * (a_scale / _f32(divisor))[:, None]


@_quiet
def _token_scaled_product(
    a: Codes, b: Codes, k_scale: NDArray[np.float32], b_scale: NDArray[np.float32], divisor: int
) -> NDArray[np.float32]:
    """The product whose first operand has a scale for each k: summed in fp32, k ascending."""
    left = a.astype(_f32) * k_scale[None, :]
    right = b.astype(_f32)
    acc = np.zeros((a.shape[0], b.shape[0]), _f32)
    for k in range(a.shape[1]):
        acc = acc + left[:, k, None] * right[None, :, k]
    return (acc * b_scale[None, :]) / _f32(divisor)


@_quiet
def _finish(result: NDArray[np.float32], before: Floats | None, out_dtype: str) -> NDArray[Any]:
    """The end of every product: add what is there, round to the output type, once."""
    if before is not None:
        result = _widen(before) + result
    return _store(result, out_dtype)


# -------------------------------------------------------------------------------- The linear layer


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """A compressed activation in logical form, as :func:`compress_activation` makes it.

    ``codes`` is int8 ``[I, Kp]``, for INT4 storage ``[I, roundup(L, 32)]``, for rht2
    ``[I, roundup(L, 64)]``; ``scales`` float32 ``[I]`` or ``[1]``, for the packed storages the
    uint16 bits of bfloat16 ``[I, ceil(L/64)]``; ``packed`` their stored bytes, uint8
    ``[I, bytes]``, otherwise None; ``exponents`` those of the tokens' sizes, uint8 ``[L]``, None
    where tokens are not equalised.

    Storages token8, token4 and token2 keep rows of tokens, of ``I' = roundup(I, feature_block(I))``
    features: ``codes`` int8 ``[L, I']``, for token2 0 to 3; ``scales`` float32 ``[L]``, for token4
    and token2 the uint16 bits of bfloat16; ``packed`` uint8 ``[L, I'/2]`` for token4, ``[L, I'/4]``
    for token2, otherwise None; ``ratios`` uint8 ``[L, ceil(I'/32)]`` for both, otherwise None;
    ``sizes`` uint8 ``[I]``, the exponents e of the features' sizes plus 127.
    :func:`saved_bytes_of` puts them in the order of their storage.
    """

    codes: Codes
    scales: NDArray[Any]
    packed: NDArray[np.uint8] | None
    tokens: int
    in_features: int
    config: ConfigLike
    key: Key
    exponents: NDArray[np.uint8] | None = None
    ratios: NDArray[np.uint8] | None = None
    sizes: NDArray[np.uint8] | None = None


class Gradients(NamedTuple):
    """Gradients of :func:`backward_linear`; None where not asked for."""

    gx: NDArray[Any] | None
    gw: NDArray[Any] | None
    gb: NDArray[Any] | None


def quantize_gradient_rows(
    gy: Floats, config: ConfigLike, key: KeyLike = 0
) -> tuple[Codes, NDArray[np.float32]]:
    """g_y ``[..., O]`` for g_x: codes int8 ``[L, Kp]`` and scales ``[L]`` or ``[1]``.

    Source: docs/numerics.md, "Shapes", purpose 1.
    """
    operand = _transform_features(_flat(gy), config.hadamard_block)
    return quantize(
        operand,
        bits=config.gx_bits,
        scale=config.gx_scale,
        rounding=config.gx_rounding,
        key=key,
        purpose=PURPOSE_GX_GRADIENT,
    )


def quantize_weight(w: Floats, config: ConfigLike) -> tuple[Codes, NDArray[np.float32]]:
    """W ``[O, I]`` for g_x: codes int8 ``[I, Kp]`` and scales ``[I]`` or ``[1]``; to nearest.

    Source: docs/numerics.md, "Shapes", purpose 2.
    """
    operand = _transform_features(_widen(w).T, config.hadamard_block)
    return quantize(
        operand,
        bits=config.gx_bits,
        scale="token" if config.weight_scale == "channel" else "tensor",
        rounding="nearest",
        purpose=PURPOSE_GX_WEIGHT,
    )


def quantize_gradient_columns(
    gy: Floats,
    config: ConfigLike,
    key: KeyLike = 0,
    sketch_key: KeyLike | None = None,
    exponents: NDArray[np.uint8] | None = None,
) -> tuple[Codes, NDArray[np.float32]]:
    """g_y ``[..., O]`` for g_w: codes int8 ``[O, Kp]`` and scales ``[O]``, ``[1]`` or ``[Kp]``.

    ``key`` rounds; ``sketch_key`` (``key`` unless given) is the one that x was compressed with, and
    ``exponents`` are the tokens' sizes that were found then.
    Source: docs/numerics.md, "Shapes", purpose 4, and "Token equalisation".
    """
    # The operand is transposed: its rows are channels.
    scale = {"channel": "token", "tensor": "tensor", "token": "channel"}
    subspaces = key if sketch_key is None else sketch_key
    rows = _along_tokens(_resized(_flat(gy), exponents), config, "gradient", subspaces)
    return quantize(
        _pad_columns(rows.T, 16),
        scale=scale[config.gw_scale],
        rounding=config.gw_rounding,
        key=key,
        purpose=PURPOSE_GW_GRADIENT,
    )


def compress_activation(x: Floats, config: ConfigLike = None, *, key: KeyLike = 0) -> Saved:
    """Keep x ``[..., I]`` compressed for the backward pass.

    Args:
        x: float32 or float16, leading dimensions collapse to L.
        config: settings; None: ``Config()``.
        key: random key of the rounding and of the sketch.

    Returns:
        A :class:`Saved`.

    Source: docs/numerics.md, "Shapes" (purpose 3), "INT4" and "One code a value".
    """
    settings = Config() if config is None else config
    if settings.storage in TOKEN_STORAGES:
        return _keep_tokens(_flat(x), settings, _key(key))
    values = _flat(x)
    tokens, width = values.shape
    exponents = token_exponents(values) if settings.equalize_tokens else None
    values = _resized(values, exponents, divide=True)
    rest = (tokens, width, settings, _key(key), exponents)
    if settings.storage == "int4":
        codes, scales = _quantize_groups(values.T, settings.x_rounding, key)
        return Saved(codes, scales, pack_int4(codes), *rest)
    rows = _along_tokens(values, settings, "activation", key)
    if settings.storage == "rht2":
        codes, scales = _quantize_rotated(rows.T, key)
        return Saved(codes, scales, pack_int2(codes), *rest)
    codes, scale = quantize(
        _pad_columns(rows.T, 16),
        scale="token" if settings.x_scale == "channel" else "tensor",
        rounding=settings.x_rounding,
        key=key,
        purpose=PURPOSE_GW_ACTIVATION,
    )
    return Saved(codes, scale, None, *rest)


@_quiet
def token_exponents(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Biased exponents of the powers of two t that the tokens of ``x [L, I]`` are divided by.

    Source: docs/numerics.md, "Token equalisation".
    """
    exponent = _words(_amax(x, 1)) >> _u32(23)  # of the largest magnitude: [L, 1]
    usual = (exponent >= 27) & (exponent < 255)
    clear = np.where(usual, exponent, _u32(127))
    unit = ((_u32(268) - clear) << _u32(23)).view(_f32)  # the largest becomes 2**14 to 2**15
    whole = np.where(usual, np.rint(np.abs(x) * unit), _f32(0)).astype(np.int64)
    mean = whole.sum(axis=1, keepdims=True).astype(_f32) / _f32(max(1, x.shape[1]))
    found = clear.astype(np.int64) + (_words(mean) >> _u32(23)).astype(np.int64) - 141
    result = np.where(usual, np.clip(found, 27, 227), np.where(exponent == 255, 127, 27))
    return result.reshape(-1).astype(np.uint8)


@_quiet
def _resized(
    values: NDArray[np.float32], exponents: NDArray[np.uint8] | None, *, divide: bool = False
) -> NDArray[np.float32]:
    """Rows of ``values [L, C]`` times their t, or divided by it: one multiplication."""
    if exponents is None:
        return values
    biased = exponents.astype(_u32)
    power = ((_u32(254) - biased if divide else biased) << _u32(23)).view(_f32)
    return values * power[:, None]


def rotation_signs(blocks: int, key: KeyLike) -> NDArray[np.float32]:
    """The signs of the tokens of so many blocks of 64: -1 or 1, float32 ``[64 * blocks]``.

    Source: docs/numerics.md, "x kept as rht2".
    """
    words = random_words(np.arange(blocks), key, PURPOSE_SIGNS)[:, :2]
    bits = words[:, :, None] >> np.arange(32, dtype=_u32) & _u32(1)
    return _f32(1) - _f32(2) * bits.reshape(-1).astype(_f32)


@_quiet
def _along_tokens(
    values: NDArray[np.float32], config: ConfigLike, side: str, key: KeyLike
) -> NDArray[np.float32]:
    """What is done to ``[L, C]`` along the tokens for g_w: ``[K, C]``."""
    if config.storage != "rht2":
        return _project(values, _low_rank_of(config), side, key)
    padded = _pad_columns(values.T, ROTATED_BLOCK).T
    blocks = padded.shape[0] // ROTATED_BLOCK
    signed = padded * rotation_signs(blocks, key)[:, None]
    tokens = signed.reshape(blocks, ROTATED_BLOCK, values.shape[1])
    return _transform_tokens(tokens).reshape(padded.shape)


def _divisor(config: ConfigLike) -> int:
    """Of the product of g_w."""
    if config.storage == "rht2":
        return ROTATED_BLOCK
    return 1 if config.basis == "full" else int(config.block)


@_quiet
def _quantize_rotated(
    rotated: NDArray[np.float32], key: KeyLike
) -> tuple[Codes, NDArray[np.uint16]]:
    """Codes int8 of ``rotated [I, K]`` and the bf16 scales of its blocks ``[I, K/64]``."""
    channels, depth = rotated.shape
    blocks = depth // ROTATED_BLOCK
    y = rotated.reshape(channels, blocks, ROTATED_BLOCK)
    u = random_bytes(1, depth, key, PURPOSE_GW_ACTIVATION).reshape(blocks, ROTATED_BLOCK)
    codes, scale = _cut_off(y, u, _whole_byte(u), _f32(ROTATED_BLOCK))
    stored = np.where(np.isfinite(_amax(y, -1)), round_bf16(scale), _f32(np.nan))
    return codes.reshape(channels, depth), bf16_bits(stored).reshape(channels, blocks)


@_quiet
def _cut_off(
    y: NDArray[np.float32],
    u: NDArray[np.uint8],
    off: NDArray[np.float32],
    count: NDArray[np.float32] | np.float32,
) -> tuple[Codes, NDArray[np.float32]]:
    """2-bit codes of ``y [..., N]`` and the fp32 scales ``[..., 1]`` of the groups of N.

    u are random bytes, ``off`` what comes off of them in steps; ``count`` the values of a group,
    fewer than N where zeros are behind them.
    Codes and scale are 0 where a value is not finite, or all are below ``2**-100``.
    Source: docs/numerics.md, "x kept as rht2" ("Codes", "Scales"), "x kept as token2".
    """
    amax = _amax(y, -1)
    used = np.isfinite(amax) & (amax >= _f32(2.0**-100))
    exponent = _words(np.where(used, amax, _f32(1))) >> _u32(23)
    y = y * ((_u32(255) - exponent) << _u32(23)).view(_f32)  # the largest is in [2, 4)
    squares = _sum_pairs(y * y)
    spread = np.sqrt(squares / count)
    reach = np.minimum(_amax(y, -1), _f32(1.75) * spread)
    codes = _dithered(y, _f32(1.5) / reach, u)
    along = _sum_pairs(y * _code_values(codes - 2, off))
    scale = (squares / along) * ((exponent - _u32(1)) << _u32(23)).view(_f32)
    return np.where(used, codes, 0).astype(np.int8), np.where(used, scale, _f32(0))


def _dithered(
    y: NDArray[np.float32], inv: NDArray[np.float32], u: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Codes 0 to 3 of ``y * inv`` after the random bytes u have been added."""
    exact = np.nan_to_num(256 * (y.astype(np.float64) * inv), posinf=0, neginf=0)
    half = 128 * 3
    return (np.clip(np.rint(exact).astype(np.int64), -half, half) + u + half) >> 8


def _code_values(codes: NDArray[Any], off: NDArray[np.float32]) -> NDArray[np.float32]:
    """What codes stand for, in steps, when their dither comes off. Exact."""
    return codes.astype(_f32) + (_f32(1) - off)


def _whole_byte(u: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What comes off of the random bytes of rht2, in steps."""
    return (u.astype(_f32) + _f32(0.5)) / _f32(256)


def _upper_half(u: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What comes off of the random bytes of token4 and token2, in steps."""
    return ((u >> 4).astype(_f32) + _f32(0.5)) / _f32(16)


def _sum_pairs(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums along the last axis, a power of two: neighbours first. ``[..., 1]``."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values


def _rotated_values(saved: Saved) -> NDArray[np.float32]:
    """What the codes of rht2 stand for, in units of their block's scale: ``[I, K]``."""
    u = random_bytes(1, saved.codes.shape[1], saved.key, PURPOSE_GW_ACTIVATION)
    return _code_values(saved.codes - 2, _whole_byte(u))


@_quiet
def _quantize_groups(
    x: NDArray[np.float32], rounding: str, key: KeyLike
) -> tuple[Codes, NDArray[np.uint16]]:
    """INT4 codes of ``x [I, L]`` padded to ``[I, roundup(L, 32)]``, bf16 scales of its groups."""
    channels, tokens = x.shape
    padded = _pad_columns(x, INT4_GROUP)
    groups = padded.shape[1] // INT4_GROUP
    grouped = padded.reshape(channels * groups, INT4_GROUP)
    amax = _amax(grouped, 1).reshape(channels, groups)
    finite = np.isfinite(amax)
    used = finite & (amax >= _f32(2.0**-100))
    scale = np.where(used, round_up_bf16(amax / _f32(7)), _f32(0))
    inv = np.where(used, _f32(1) / scale, _f32(0))
    stored = bf16_bits(np.where(finite, scale, _f32(np.nan)))

    width = _round_up(tokens, 16)
    per_token = np.repeat(inv, INT4_GROUP, axis=1)[:, :width]
    codes = _round_scaled(padded[:, :width], per_token, 4, rounding, key, PURPOSE_GW_ACTIVATION)
    return _pad_columns(codes, 32), stored


@_quiet
def decompress_activation(
    saved: Saved, first: int = 0, last: int | None = None
) -> NDArray[np.float32]:
    """Tokens ``first`` to ``last`` (None: all) of an x of basis ``"full"``: ``[last - first, I]``.

    Source: docs/numerics.md, "INT4" and "One code a value" ("Back to x").
    """
    if saved.config.storage in TOKEN_STORAGES:
        values = _unrotated_tokens(saved)
    elif saved.config.storage == "rht2":
        scales = np.repeat(bf16_values(saved.scales), ROTATED_BLOCK, axis=1)
        rotated = (_rotated_values(saved) * scales).T
        blocks = rotated.shape[0] // ROTATED_BLOCK
        signed = _transform_tokens(rotated.reshape(blocks, ROTATED_BLOCK, saved.in_features))
        signs = rotation_signs(blocks, saved.key) / _f32(ROTATED_BLOCK)
        values = (signed.reshape(rotated.shape) * signs[:, None])[: saved.tokens]
    else:
        scales = saved.scales.reshape(-1, 1)
        if saved.packed is not None:
            scales = np.repeat(bf16_values(saved.scales), INT4_GROUP, axis=1)[:, : saved.tokens]
        values = (saved.codes[:, : saved.tokens].astype(_f32) * scales).T
    return np.ascontiguousarray(_resized(values, saved.exponents)[first:last])


@_quiet
def requantize(saved: Saved, key: KeyLike | None = None) -> tuple[Codes, NDArray[np.float32]]:
    """Bring a packed storage to INT8: codes int8 ``[I, Kp]`` and scales float32 ``[I]``.

    ``key`` (that of ``saved`` unless given) rounds. Source: docs/numerics.md, "Back to INT8".
    """
    groups = bf16_values(saved.scales)
    if saved.config.storage == "int4":
        width, largest = _round_up(saved.tokens, 16), _f32(7)
        values = saved.codes[:, :width].astype(_f32)
    else:
        values = _rotated_values(saved)
        width, largest = values.shape[1], _f32(2)
    scale, inv = scale_of(largest * _amax(groups, 1), 8)
    factor = np.where(inv == 0, _f32(0), groups * inv)
    codes = _round_scaled(
        values,
        np.repeat(factor, INT4_GROUP, axis=1)[:, :width],
        8,
        "stochastic" if saved.config.x_rounding == "stochastic" else "nearest",
        saved.key if key is None else key,
        PURPOSE_REQUANTIZE,
    )
    return codes, scale.reshape(-1)


def backward_linear(
    gy: Floats,
    w: Floats | None,
    saved_or_x: Saved | Floats | None,
    *,
    config: ConfigLike = None,
    need: Collection[str] = ("gx", "gw"),
    key: KeyLike | None = None,
    out_dtype: str | None = None,
    gw_out: Floats | None = None,
    gb_out: Floats | None = None,
    accumulate: bool = False,
    quantized_weight: bool = False,
) -> Gradients:
    """Backward of ``y = x w^T + b``: ``gx = gy w``, ``gw = gy^T x``, ``gb`` = sums of gy.

    Args:
        gy: ``[..., O]`` float32 or float16; leading dimensions collapse to L.
        w: ``[O, I]``; None where ``"gx"`` is not needed.
        saved_or_x: a :class:`Saved`, or x ``[..., I]``, which is then compressed first with
            ``key``; None where ``"gw"`` is not needed.
        config: settings; None: those of ``saved_or_x``, or ``Config()``.
        need: which of ``"gx"``, ``"gw"``, ``"gb"`` to compute.
        key: random key of the rounding here; None: that of ``saved_or_x``, or 0. The sketch's
            subspaces always come from the key that x was compressed with.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"`` of the results; None: gy's.
        gw_out: ``[O, I]``, what ``accumulate`` adds to. It is read, not written.
        gb_out: ``[O]``, likewise.
        accumulate: add to ``gw_out`` and ``gb_out``.
        quantized_weight: storages token8, token4 and token2 only: compute what backward computes
            where w was quantised beforehand, by ``quantize_token_weight(w, out_factors(gy, key,
            quantized_weight=True), config)``: no sizes of out features, and their signs are fixed.

    Returns:
        :class:`Gradients`: gx ``[..., I]``, gw ``[O, I]``, gb ``[O]``.

    Source: docs/numerics.md.
    """
    grad = _flat(gy)
    dtype = _dtype_name(gy, out_dtype)
    saved: Saved | None = saved_or_x if isinstance(saved_or_x, Saved) else None
    settings = config if config is not None else saved.config if saved else Config()
    if saved is None and "gw" in need:
        saved = compress_activation(np.asarray(saved_or_x), settings, key=0 if key is None else key)
    if key is None:
        key = saved.key if saved else 0
    one_code = settings.storage in TOKEN_STORAGES

    gx = gw = gb = None
    if one_code:
        gx, gw = _one_code_products(grad, w, saved, settings, need, key, quantized_weight)
        gx = None if gx is None else _finish(gx, None, dtype).reshape(*gy.shape[:-1], gx.shape[1])
        gw = None if gw is None else _finish(gw, gw_out if accumulate else None, dtype)
    elif "gx" in need:
        assert w is not None, "w: needed for gx"
        product = gemm_int8(
            *_pairs(quantize_gradient_rows(gy, settings, key), quantize_weight(w, settings)),
            divisor=settings.hadamard_block,
            out_dtype=dtype,
        )
        gx = product.reshape(*gy.shape[:-1], w.shape[1])
    if "gw" in need and not one_code:
        assert saved is not None
        gw = _finish(
            _weight_gradient(gy, saved, settings, key), gw_out if accumulate else None, dtype
        )
    if "gb" in need:
        gb = _finish(bias_gradient(grad), gb_out if accumulate else None, dtype)
    return Gradients(gx, gw, gb)


def _weight_gradient(
    gy: Floats, saved: Saved, config: ConfigLike, key: KeyLike
) -> NDArray[np.float32]:
    left, left_scale = quantize_gradient_columns(gy, config, key, saved.key, saved.exponents)
    if saved.packed is None:
        right, right_scale = saved.codes, saved.scales
    else:
        right, right_scale = requantize(saved, key)
    divisor = _divisor(config)
    if config.gw_scale == "token":
        return _token_scaled_product(left, right, left_scale, right_scale, divisor)
    return _dequantize_product(integer_product(left, right), left_scale, right_scale, divisor)


@_quiet
def bias_gradient(gy: Floats) -> NDArray[np.float32]:
    """g_b: the column sums of g_y ``[L, O]``, float32 ``[O]``.

    Blocks of 16 tokens add up as row 0 of the FWHT does, runs of 64 blocks in fp32, runs in fp64.
    Source: docs/numerics.md, "g_b".
    """
    values = _widen(gy)
    width = values.shape[1]
    padded = _pad_columns(values.T, 16)
    blocks = _butterflies(padded.reshape(width * padded.shape[1] // 16, 16))[:, 0]
    sums = blocks.reshape(width, padded.shape[1] // 16)
    total = np.zeros(width, np.float64)
    for start in range(0, sums.shape[1], 64):
        run = np.zeros(width, _f32)
        for index in range(start, min(start + 64, sums.shape[1])):
            run = run + sums[:, index]
        total = total + run
    return total.astype(_f32)


# -------------------------------------------------------------------------------- One code a value


def feature_block(width: int, hadamard_block: int = 64) -> int:
    """n(C): features that are transformed together where there are ``width``: 16, 32 or 64.

    Source: docs/numerics.md, "One code a value" ("Blocks").
    """
    for n in (64, 32, 16):
        if n <= hadamard_block and _round_up(width, n) <= width + width // 8:
            return n
    return 16


def feature_signs(count: int, key: KeyLike) -> NDArray[np.float32]:
    """The signs of so many features: -1 or 1, float32 ``[count]``.

    Source: docs/numerics.md, "One code a value" ("Signs").
    """
    return rotation_signs(_ceil_div(count, 64), key)[:count]  # 64 features to a pair of words, too


@_quiet
def feature_sizes(values: Floats) -> NDArray[np.int64]:
    """Exponents e of the powers of two that stand for the features' sizes: int64 ``[C]``.

    Args:
        values: ``[L, C]`` float32 or float16, of which up to 512 tokens are looked at.

    Returns:
        -30 to 30; 0 for features of about the usual size.

    Source: docs/numerics.md, "One code a value" ("Sizes of features").
    """
    wide = _widen(values)
    tokens = wide.shape[0]
    looked_at = min(tokens, 512)
    rows = wide[np.arange(looked_at) * tokens // max(1, looked_at)]
    exponent = _words(_amax(rows, 1)).reshape(-1) >> _u32(23)
    rows = rows[(exponent >= 27) & (exponent < 255)]
    z = _resized(rows, token_exponents(rows), divide=True)
    squares = np.minimum((z * z) * _f32(2.0**24), _f32(2.0**44))
    sums = np.rint(squares).astype(np.int64).sum(axis=0)
    seen = sums > 0
    eighths = (_words(sums.astype(_f32)) >> _u32(20)).astype(np.int64)
    distance = eighths - int(eighths[seen].sum()) // max(1, int(seen.sum()))
    usual = (np.abs(distance) < 32) | ~seen
    return np.where(usual, 0, np.clip((distance + 16) >> 5, -30, 30))


def out_factors(
    gy: Floats, key: KeyLike = 0, *, quantized_weight: bool = False
) -> NDArray[np.float32]:
    """``sigma_o c_o`` of g_y ``[..., O]``: signs times powers of two, float32 ``[O]``.

    ``key`` is that of backward; where w comes quantised it does not count, nor does g_y.
    Source: docs/numerics.md, "One code a value" ("Signs", "Sizes of features").
    """
    values = _flat(gy)
    if quantized_weight:
        return feature_signs(values.shape[1], 0)
    return feature_signs(values.shape[1], key) * _powers_of_two(feature_sizes(values))


def in_factors(saved: Saved) -> NDArray[np.float32]:
    """``sigma_i d_i`` of an x kept as token8, token4 or token2: float32 ``[I]``.

    Source: docs/numerics.md, "One code a value" ("Signs", "Sizes of features").
    """
    assert saved.sizes is not None
    signs = _in_signs(saved.in_features, saved.config, saved.key)
    return signs * _powers_of_two(saved.sizes.astype(np.int64) - 127)


def _in_signs(count: int, config: ConfigLike, key: KeyLike) -> NDArray[np.float32]:
    """Signs of in features of an x kept with ``key``, which only those of token2 come from."""
    return feature_signs(count, key if config.storage == "token2" else 0)


def quantize_token_gradient(
    gy: Floats, factors: NDArray[np.float32], config: ConfigLike, key: KeyLike = 0
) -> tuple[Codes, NDArray[np.float32]]:
    """g_y ``[..., O]`` for both products: codes q int8 ``[L, O']`` and scales s float32 ``[L]``.

    ``factors`` are :func:`out_factors`; g_y is divided by them.
    Source: docs/numerics.md, "One code a value" ("Rows").
    """
    return quantize(
        _rotate_features(_flat(gy), _f32(1) / factors, config.hadamard_block),
        bits=8,
        scale="token",
        rounding=config.gx_rounding,
        key=key,
        purpose=PURPOSE_GX_GRADIENT,
    )


def quantize_token_weight(
    w: Floats, factors: NDArray[np.float32], config: ConfigLike
) -> tuple[Codes, NDArray[np.float32]]:
    """W ``[O, I]`` for g_x: codes int8 ``[I, O']`` and scales float32 ``[I]``; to nearest.

    ``factors`` are :func:`out_factors`; w is multiplied by them.
    Source: docs/numerics.md, "One code a value" ("Rows").
    """
    operand = _rotate_features(_widen(w).T, factors, config.hadamard_block)
    return quantize(operand, bits=8, scale="token", rounding="nearest")


def tile_bytes(rows: int, cols: int, key: KeyLike, purpose: int) -> NDArray[np.uint8]:
    """Random bytes of a matrix, 16 of them to a tile of 16 x 16: uint8 ``[rows, cols]``.

    A row of a tile has one random byte; each of its columns adds another multiple of 16 to it.
    Source: docs/numerics.md, "One code a value" ("x kept as token4", "x kept as token2", "g_w").
    """
    down, across = _ceil_div(rows, 16), _ceil_div(cols, 16)
    words = random_words(np.arange(down * across), key, purpose).astype("<u4")
    drawn = words.view(np.uint8).reshape(down, across, 16).transpose(0, 2, 1)
    reversed_bits = np.array([int(f"{column:04b}"[::-1], 2) for column in range(16)], np.uint8)
    shifted = drawn[..., None] + np.uint8(16) * reversed_bits  # modulo 256
    return np.ascontiguousarray(shifted.reshape(down * 16, across * 16)[:rows, :cols])


def saved_bytes_of(saved: Saved) -> NDArray[np.uint8]:
    """The bytes that a storage token8, token4 or token2 keeps, in their order: uint8 ``[bytes]``.

    Source: docs/numerics.md, "One code a value" ("Stored").
    """
    assert saved.sizes is not None
    codes = saved.codes.view(np.uint8) if saved.packed is None else saved.packed
    ratios = np.zeros(0, np.uint8) if saved.ratios is None else saved.ratios
    rows = np.concatenate([codes.reshape(-1), ratios.reshape(-1)])
    padding = np.zeros(-rows.size % 4, np.uint8)
    scales = saved.scales.astype(saved.scales.dtype.newbyteorder("<")).view(np.uint8)
    return np.concatenate([rows, padding, scales, saved.sizes])


@_quiet
def contributions(
    saved: Saved,
    gradient_scales: NDArray[np.float32],
    drawn: NDArray[np.int64] | None = None,
    weights: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """X: what is kept of x times the scales s ``[L]`` of g_y's rows, float32 ``[L, I']``.

    With the tokens ``drawn [K]`` (-1: none) and their ``weights``, as :func:`draw_tokens` gives
    them, ``[K, I']``. Source: docs/numerics.md, "One code a value" ("g_w").
    """
    values, steps = _token_values(saved)
    factors = steps * gradient_scales[:, None]
    if drawn is None or weights is None:
        return values * factors
    taken: NDArray[np.float32] = values[drawn] * (factors[drawn] * weights[:, None])
    return np.where((drawn >= 0)[:, None], taken, _f32(0))


@_quiet
def draw_tokens(
    saved: Saved, gradient_scales: NDArray[np.float32], config: ConfigLike, key: KeyLike = 0
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The tokens that g_w takes with basis ``"sketch"``, by slots ``[K]``, and their weights.

    -1: the slot stays empty. Source: docs/numerics.md, "One code a value" ("A share of the
    tokens").
    """
    slots = _ceil_div(saved.tokens, config.block) * int(config.rank)
    kept = saved.scales if saved.config.storage == "token8" else bf16_values(saved.scales)
    sizes = np.abs(gradient_scales * kept)
    sizes = np.where(np.isnan(sizes), _f32(np.inf), sizes)
    levels = [int(level) for level in _words(sizes) >> _u32(20)]
    top = max(levels, default=0)

    def weight(level: int) -> int:
        shift = 28 + (level >> 3) - (top >> 3)
        mantissa = 8 + (level & 7)
        return max(1, mantissa << shift if shift >= 0 else mantissa >> -shift)

    mass = sum(weight(level) for level in levels if level > 0)
    left, whole = slots, set()
    for level in sorted(set(levels) - {0}, reverse=True):
        count = levels.count(level)
        if left * weight(level) < mass:
            break
        whole.add(level)
        left -= count
        mass -= count * weight(level)
    share = float(left) * 2.0**32 / float(mass) if mass else 0.0
    drawn, weights = np.full(slots, -1, np.int64), np.zeros(slots, _f32)
    total = int(random_words(np.arange(1), key, PURPOSE_SKETCH)[0, 0])
    for token, level in enumerate(levels):
        if level == 0:
            continue
        part = 1 << 32
        if level not in whole:
            part = min(part, int(float(weight(level)) * share))
        slot, total = total >> 32, total + part
        if total >> 32 > slot and slot < slots:
            drawn[slot], weights[slot] = token, _f32(2.0**32 / float(part))
    return drawn, weights


@_quiet
def requantize_contributions(
    values: NDArray[np.float32], config: ConfigLike, key: KeyLike = 0
) -> tuple[Codes, NDArray[np.float32]]:
    """X ``[L, I']`` in INT8: codes int8 ``[I', Kp]`` and scales float32 ``[I']``.

    Source: docs/numerics.md, "One code a value" ("g_w").
    """
    rows = _pad_columns(values.T, 16)
    scale, inv = scale_of(_amax(rows, 1), 8)
    u = None
    if config.gw_rounding == "stochastic":
        u = tile_bytes(rows.shape[0], rows.shape[1], key, PURPOSE_REQUANTIZE)
    codes = round_codes(np.where(inv == 0, _f32(0), rows), inv, 8, config.gw_rounding, u)
    return codes, scale.reshape(-1)


def _one_code_products(
    gy: NDArray[np.float32],
    w: Floats | None,
    saved: Saved | None,
    config: ConfigLike,
    need: Collection[str],
    key: KeyLike,
    quantized_weight: bool,
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """g_x ``[L, I]`` and g_w ``[O, I]``, where needed."""
    gx = gw = None
    factors = out_factors(gy, key, quantized_weight=quantized_weight)
    n = feature_block(gy.shape[1], config.hadamard_block)
    q, scales = quantize_token_gradient(gy, factors, config, key)
    if "gx" in need:
        assert w is not None, "w: needed for gx"
        weight, weight_scales = quantize_token_weight(w, factors, config)
        gx = _dequantize_product(integer_product(q, weight), scales, weight_scales, n)
    if "gw" in need and gy.shape[0] == 0:
        assert saved is not None
        gw = np.zeros((gy.shape[1], saved.in_features), _f32)
    elif "gw" in need:
        assert saved is not None
        taken, parts = q, contributions(saved, scales)
        if config.basis == "sketch":
            drawn, weights = draw_tokens(saved, scales, config, key)
            taken = np.where((drawn >= 0)[:, None], q[drawn], 0).astype(np.int8)
            parts = contributions(saved, scales, drawn, weights)
        added, added_scales = requantize_contributions(parts, config, key)
        sums = integer_product(np.ascontiguousarray(_pad_columns(taken.T, 16)), added)
        gw = _undo_rotations(sums, added_scales, factors, n, saved)
    return gx, gw


@_quiet
def _undo_rotations(
    sums: NDArray[np.int64],
    scales: NDArray[np.float32],
    factors: NDArray[np.float32],
    n: int,
    saved: Saved,
) -> NDArray[np.float32]:
    """From ``acc [O', I']`` to g_w ``[O, I]``: both transforms once more, signs and sizes."""
    n_in = feature_block(saved.in_features, saved.config.hadamard_block)
    along_in = fwht(sums.astype(_f32) * scales[None, :], block=n_in)
    along_out = fwht(along_in, axis=0, block=n)
    product: NDArray[np.float32] = along_out[: factors.size, : saved.in_features]
    along: NDArray[np.float32] = product * (in_factors(saved) / _f32(n_in))
    return along * (factors / _f32(n))[:, None]


@_quiet
def _rotate_features(
    values: NDArray[np.float32], factors: NDArray[np.float32], hadamard_block: int
) -> NDArray[np.float32]:
    """Columns of ``[R, C]`` times their factors, then FWHT along them: ``[R, C']``."""
    n = feature_block(values.shape[1], hadamard_block)
    rotated: NDArray[np.float32] = fwht(_pad_columns(values * factors, n), block=n)
    return rotated


def _keep_tokens(x: NDArray[np.float32], config: ConfigLike, key: Key) -> Saved:
    """``x [L, I]`` kept as token8, token4 or token2."""
    tokens, width = x.shape
    sizes = feature_sizes(x)
    factors = _in_signs(width, config, key) / _powers_of_two(sizes)
    rotated = _rotate_features(x, factors, config.hadamard_block)
    ratios = packed = None
    scales: NDArray[Any]
    if config.storage == "token8":
        codes, scales = quantize(
            rotated, rounding=config.x_rounding, key=key, purpose=PURPOSE_GW_ACTIVATION
        )
    elif config.storage == "token4":
        codes, scales, ratios = _quantize_tokens(rotated, key)
        packed = pack_int4(codes)
    else:
        codes, scales, ratios = _cut_off_tokens(rotated, key)
        packed = pack_int2(codes)
    biased = (sizes + 127).astype(np.uint8)
    return Saved(codes, scales, packed, tokens, width, config, key, ratios=ratios, sizes=biased)


@_quiet
def _quantize_tokens(
    rotated: NDArray[np.float32], key: KeyLike
) -> tuple[Codes, NDArray[np.uint16], NDArray[np.uint8]]:
    """token4 of ``rotated [L, I']``: codes, bf16 bits of T ``[L]``, R ``[L, ceil(I'/32)]``."""
    tokens, width = rotated.shape
    groups = _ceil_div(width, TOKEN_GROUP)
    grouped = _pad_columns(rotated, TOKEN_GROUP).reshape(tokens * groups, TOKEN_GROUP)
    group_amax = _amax(grouped, 1).reshape(tokens, groups)
    amax = _amax(rotated, 1)
    finite = np.isfinite(amax)
    used = finite & (amax >= _f32(2.0**-100))
    scale = np.where(used, round_up_bf16(amax / _f32(7.5)), _f32(0))
    stored = bf16_bits(np.where(finite, scale, _f32(np.nan))).reshape(-1)

    rho = np.where(used, (group_amax / _f32(7.5)) / scale, _f32(0))
    rounded_up = ((_words(rho) + _u32(0x7FFFF)) >> _u32(19)).astype(np.int64) - 1777
    ratios = np.where(used & (group_amax != 0), np.clip(rounded_up, 1, 255), 0).astype(np.uint8)
    inv = np.where(ratios == 0, _f32(0), _f32(1) / _token_steps(ratios, scale))
    inv = np.repeat(inv, TOKEN_GROUP, axis=1)[:, :width]
    exact = 256 * (np.where(inv == 0, _f32(0), rotated).astype(np.float64) * inv)  # 48 bits of 53
    dither = tile_bytes(tokens, width, key, PURPOSE_GW_ACTIVATION).astype(np.int64)
    codes = (np.rint(exact).astype(np.int64) + dither - 128) >> 8
    return np.where(inv == 0, 0, codes).astype(np.int8), stored, ratios


@_quiet
def _cut_off_tokens(
    rotated: NDArray[np.float32], key: KeyLike
) -> tuple[Codes, NDArray[np.uint16], NDArray[np.uint8]]:
    """token2 of ``rotated [L, I']``: codes, bf16 bits of T ``[L]``, R ``[L, ceil(I'/32)]``."""
    tokens, width = rotated.shape
    groups = _ceil_div(width, TOKEN_GROUP)
    shape = tokens, groups, TOKEN_GROUP
    u = _pad_columns(tile_bytes(tokens, width, key, PURPOSE_GW_ACTIVATION), TOKEN_GROUP)
    u = u.reshape(shape)
    count = np.minimum(TOKEN_GROUP, width - TOKEN_GROUP * np.arange(groups)).astype(_f32)
    codes, found = _cut_off(
        _pad_columns(rotated, TOKEN_GROUP).reshape(shape), u, _upper_half(u), count[:, None]
    )
    finite = np.isfinite(_amax(rotated, 1))
    group_scale = np.where(finite, found[:, :, 0], _f32(0))
    used = group_scale != 0  # what is left of a token below 2**-100 is T = 0
    scale = round_bf16(np.max(group_scale, axis=1, keepdims=True, initial=0))
    bits = _words(np.where(used, group_scale / scale, _f32(0)))
    rounded = ((bits + _u32(0x3FFFF) + (bits >> _u32(19) & _u32(1))) >> _u32(19)).astype(np.int64)
    ratios = np.where(used, np.clip(rounded - 1777, 1, 255), 0).astype(np.uint8)
    kept = np.where(finite, codes.reshape(tokens, groups * TOKEN_GROUP)[:, :width], 0)
    stored = bf16_bits(np.where(finite, scale, _f32(np.nan))).reshape(-1)
    return kept.astype(np.int8), stored, ratios


def _token_steps(ratios: NDArray[np.uint8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """The steps of ``ratios [L, G]`` beside T ``[L, 1]``; R = 0 is a step of 0, NaN beside NaN."""
    stands_for = ((ratios.astype(_u32) + _u32(1777)) << _u32(19)).view(_f32)
    return np.where(ratios == 0, _f32(0), stands_for) * scale


def _token_values(saved: Saved) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What codes stand for in units of their steps, and the steps: ``[L, I']``, the latter or
    ``[L, 1]``.
    """
    codes = saved.codes
    if saved.ratios is None:
        return codes.astype(_f32), saved.scales[:, None]
    tokens, width = codes.shape
    u = tile_bytes(tokens, width, saved.key, PURPOSE_GW_ACTIVATION)
    least = -2 if saved.config.storage == "token2" else 0
    values = _code_values(codes + least, _upper_half(u))
    steps = _token_steps(saved.ratios, bf16_values(saved.scales)[:, None])
    used = np.repeat(saved.ratios != 0, TOKEN_GROUP, axis=1)[:, :width]
    return np.where(used, values, _f32(0)), np.repeat(steps, TOKEN_GROUP, axis=1)[:, :width]


def _unrotated_tokens(saved: Saved) -> NDArray[np.float32]:
    """Back to x: ``[L, I]``."""
    n = feature_block(saved.in_features, saved.config.hadamard_block)
    values, steps = _token_values(saved)
    blocks = fwht(values * steps, block=n)[:, : saved.in_features]
    return np.asarray(blocks * (in_factors(saved) / _f32(n)))


def _powers_of_two(exponents: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.ldexp(_f32(1), exponents.astype(np.int32)).astype(_f32)


# -------------------------------------------------------------------------------- The 8-bit forward


def quantize_forward_operand(values: Floats, block: int = 64) -> tuple[Codes, NDArray[np.float32]]:
    """x ``[..., I]`` or w ``[O, I]`` for y: codes int8 ``[R, Kp]``, scales ``[R]``; to nearest.

    Source: docs/numerics.md, "Forward".
    """
    operand = _transform_features(_flat(values), block)
    return quantize(operand, bits=8, scale="token", rounding="nearest")


def forward_linear(
    x: Floats,
    w: Floats,
    bias: Floats | None = None,
    *,
    config: ConfigLike = None,
    out_dtype: str | None = None,
) -> NDArray[Any]:
    """``y = x w^T + bias`` in INT8, whatever ``config.forward`` says.

    Args:
        x: ``[..., I]`` float32 or float16.
        w: ``[O, I]``.
        bias: ``[O]`` or None.
        config: settings, of which ``forward_block`` counts; None: ``Config()``.
        out_dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; None: x's.

    Returns:
        ``[..., O]``.

    Source: docs/numerics.md, "Forward".
    """
    settings = Config() if config is None else config
    left, token_scale = quantize_forward_operand(x, settings.forward_block)
    right, row_scale = quantize_forward_operand(w, settings.forward_block)
    sums = integer_product(left, right)
    product = _dequantize_product(sums, token_scale, row_scale, settings.forward_block)
    if bias is not None:
        product = _add_bias(product, _widen(bias))
    return _store(product, _dtype_name(x, out_dtype)).reshape(*x.shape[:-1], w.shape[0])


@_quiet
def _add_bias(product: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    return product + bias[None, :]


# --------------------------------------------------------------------------------------------------


def _transform_features(values: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """``[R, C]`` -> ``[R, Kp]``: FWHT of blocks of n along C, then zeros up to 16 columns."""
    return _pad_columns(fwht(_pad_columns(values, n), block=n), 16)


def _pairs(
    a: tuple[Codes, NDArray[np.float32]], b: tuple[Codes, NDArray[np.float32]]
) -> tuple[Codes, Codes, NDArray[np.float32], NDArray[np.float32]]:
    """Two (codes, scale) pairs in the argument order of :func:`gemm_int8`."""
    return a[0], b[0], a[1], b[1]


# ------------------------------------------------------------------------------------ Small helpers


def _widen(values: Floats) -> NDArray[np.float32]:
    """To float32, exactly."""
    assert values.dtype in (np.float32, np.float16), values.dtype
    return values.astype(_f32)


def _flat(values: Floats) -> NDArray[np.float32]:
    """``[..., C]`` as float32 ``[L, C]``."""
    wide = _widen(values)
    return wide.reshape(int(np.prod(wide.shape[:-1], dtype=np.int64)), wide.shape[-1])


@_quiet
def _store(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Round float32 to the output type, once."""
    if dtype == "bfloat16":
        return round_bf16(values)
    return np.ascontiguousarray(values, dtype=np.dtype(dtype))


def _dtype_name(like: Floats, given: str | None) -> str:
    return like.dtype.name if given is None else given


def _words(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, dtype=_f32).view(_u32).reshape(np.shape(values))


def _bf16_from_upper_half(values: Floats, words: NDArray[np.uint32]) -> NDArray[np.float32]:
    upper = words & _u32(0xFFFF0000)
    return np.where(np.isnan(values), _u32(0x7FC00000), upper).astype(_u32).view(_f32)


def _pad_columns(values: NDArray[Any], multiple: int) -> NDArray[Any]:
    rows, cols = values.shape
    padded = np.zeros((rows, _round_up(cols, multiple)), values.dtype)
    padded[:, :cols] = values
    return padded


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


def _largest_code(bits: int) -> int:
    return 7 if bits == 4 else 127


def _key(key: KeyLike) -> Key:
    full = Key(*key) if isinstance(key, tuple) else Key(int(key))
    assert full.counter == 0, "the reference reads no memory"
    return full


def _low_rank_of(config: ConfigLike) -> LowRank:
    return LowRank(*(getattr(config, name) for name in LowRank._fields))
