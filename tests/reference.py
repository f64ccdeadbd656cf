"""Reference of hotcore in readable NumPy: docs/numerics.md line by line, to the bit.

It is for reading and for the tests, not for speed. It imports only NumPy, and so is independent of
libhot. Every float32 operation is one IEEE operation rounded to nearest even, as in NumPy's float32
arrays. ``_f32`` marks the constants that must not widen them.

NumPy has no bfloat16. A bfloat16 *input* is the float32 array of the same values; widening is
exact. A ``"bfloat16"`` result is a float32 array of values that bfloat16 can hold.
:func:`bf16_bits` has their 16 bits. A quoted source is a heading of docs/numerics.md.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]  # float32 or float16; float32 for results of inner steps
Codes = NDArray[np.int8]
Singles = NDArray[np.float32]
Bytes = NDArray[np.uint8]
ConfigLike = Any  # Config, hotcore.HotConfig, or an object with their fields

_f32 = np.float32
_u32 = np.uint32
_u64 = np.uint64

PURPOSE_QUANTIZE = 0
PURPOSE_GX_GRADIENT = 1
PURPOSE_GX_WEIGHT = 2  # w is rounded to nearest, without random numbers
PURPOSE_GW_ACTIVATION = 3
PURPOSE_GW_GRADIENT = 4
PURPOSE_SKETCH = 5
PURPOSE_REQUANTIZE = 6

INT4_GROUP = 64  # tokens that share a scale of an INT4 x

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _quiet(function: _Function) -> _Function:
    """Run without NumPy's warnings: Inf and NaN are expected results here."""
    return np.errstate(all="ignore")(function)


class Key(NamedTuple):
    """Key of the random numbers: 64-bit seed and offset, stream below 8192. Source: "Random bits".

    ``counter`` is 0: an address in a device's memory, which a model in NumPy cannot read.
    """

    seed: int
    offset: int = 0
    stream: int = 0
    counter: int = 0


KeyLike = Key | int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of ``hotcore.HotConfig``, unchecked; ``Config()`` is the recipe ``"default"``."""

    hadamard_block: int = 16
    gx_bits: int = 8
    gx_scale: str = "token"
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
    equalize_tokens: bool = False
    forward: str = "plain"
    forward_block: int = 64
    forward_in_eval: bool = False


def recipe(name: str, **overrides: Any) -> Config:
    """The named recipe (docs/recipes.md) with some fields replaced."""
    one_scale = {"gx_scale": "tensor", "gw_scale": "tensor"}
    fields: dict[str, dict[str, Any]] = {
        "default": {},
        "fast": {"basis": "sketch", "rank": 8, "storage": "int8"},
        "paper": {"gx_bits": 4, "basis": "lowpass", "rank": 8, "storage": "int8", **one_scale},
        "accurate": {"storage": "int8"},
    }
    return Config(**{**fields[name], **overrides})


@_quiet
def round_bf16(values: Floats) -> Singles:
    """To bfloat16, nearest even. NaN becomes 0x7fc0. "Integer GEMM and dequantisation"."""
    words = _words(values)
    rounded = words + _u32(0x7FFF) + ((words >> _u32(16)) & _u32(1))
    return _bf16_from_upper_half(values, rounded)


@_quiet
def round_up_bf16(values: Floats) -> Singles:
    """To the smallest bfloat16 that is not below. Source: "INT4"."""
    words = _words(values)
    negative = words >> _u32(31) == 1
    finite = np.isfinite(values)
    # Truncation rounds towards zero: up for negative values, so positive values take the next one.
    rounded = words + np.where(negative | ~finite, _u32(0), _u32(0xFFFF)).astype(_u32)
    return _bf16_from_upper_half(values, rounded)


def bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """Return the upper 16 bits of float32 values, which bfloat16 can hold."""
    return (_words(values) >> _u32(16)).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> Singles:
    """Return the float32 values of bfloat16 bit patterns; reverses :func:`bf16_bits`."""
    return (np.asarray(bits).astype(_u32) << _u32(16)).view(_f32)


def philox4x32(counter: NDArray[Any], key: NDArray[Any]) -> NDArray[np.uint32]:
    """Philox4x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
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
    """Four words of each block number below 2**48: ``[..., 4]``. "Random bits"."""
    seed, offset, stream, _ = _key(key)
    number = np.asarray(blocks).astype(_u64)
    low = _u64(0xFFFFFFFF)
    counter = np.empty((*number.shape, 4), _u64)
    counter[..., 0] = number & low
    counter[..., 1] = (number >> _u64(32)) & _u64(0xFFFF) | _u64((stream * 8 + purpose) << 16)
    counter[..., 2] = _u64(offset & 0xFFFFFFFF)
    counter[..., 3] = _u64(offset >> 32)
    return philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], _u64))


def random_bytes(rows: int, cols: int, key: KeyLike, purpose: int) -> Bytes:
    """One random byte for each element of ``[rows, cols]``, padding included. "Random bits"."""
    per_row = _ceil_div(cols, 16)
    words = random_words(np.arange(rows * per_row), key, purpose)
    return words.astype("<u4").view(np.uint8).reshape(rows, per_row * 16)[:, :cols].copy()


@_quiet
def fwht(
    x: Floats, *, axis: int = -1, block: int = 16, out_dtype: str | None = None
) -> NDArray[Any]:
    """Unnormalised transform of consecutive blocks along ``axis``, natural order. "FWHT".

    Computed in fp32 and rounded once, to x's type unless ``out_dtype`` is given.
    """
    values = np.moveaxis(_widen(x), axis, -1)
    blocks = values.reshape(values.size // block, block)
    result = np.moveaxis(_butterflies(blocks).reshape(values.shape), -1, axis)
    return _store(result, _dtype_name(x, out_dtype))


def _butterflies(v: Singles) -> Singles:
    """FWHT of every row of ``v [R, n]``."""
    count, n = v.shape
    h = 1
    while h < n:
        pairs = v.reshape(count, n // (2 * h), 2, h)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        v = np.stack([low + high, low - high], axis=2).reshape(count, n)
        h *= 2
    return v


class LowRank(NamedTuple):
    """Low-rank fields of a configuration: the kept rows of the projection."""

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
    """Sign changes of row ``k`` of the Sylvester matrix of order ``2**bits``. "Low rank"."""
    reversed_k = sum((k >> i & 1) << (bits - 1 - i) for i in range(bits))
    for shift in (1, 2, 4, 8, 16):
        reversed_k ^= reversed_k >> shift
    return reversed_k


def basis_order(basis: str, block: int = 16) -> list[int]:
    """Row order of ``"lowpass"`` or ``"sequency"``: rank r keeps the first r. "Low rank"."""
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
    """Tokens in the transform's order, and prefix tokens, which are appended. "Token layout"."""
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
    whole = raster[: down * tile_h, : across * tile_w].reshape(down, tile_h, across, tile_w)
    tiles = whole.transpose(0, 2, 1, 3).reshape(-1)
    left_over = np.ones((h, w), bool)
    left_over[: down * tile_h, : across * tile_w] = False
    grid = samples[:, spec.prefix_tokens :]
    body = np.concatenate([grid[:, tiles].reshape(-1), grid[:, raster[left_over]].reshape(-1)])
    return body, prefix


def sketch_folds(blocks: int, block: int, rank: int, key: KeyLike) -> NDArray[np.int64]:
    """Non-zero ``a`` of every fold of every block: ``[blocks, log2(n/r)]``. "Low rank", sketch."""
    words = random_words(np.arange(blocks), key, PURPOSE_SKETCH).astype(_u64)
    folds = (block // rank).bit_length() - 1
    shifts = np.empty((blocks, folds), np.int64)
    for j in range(folds):
        length = block >> j
        shifts[:, j] = 1 + ((words[:, j] * _u64(length - 1)) >> _u64(32)).astype(np.int64)
    return shifts


@_quiet
def fold(v: Singles, a: NDArray[np.int64]) -> Singles:
    """Fold token t onto token ``t xor a`` in every block: ``[B, N, C]`` -> ``[B, N/2, C]``."""
    half = np.arange(v.shape[1] // 2)
    result = np.empty((v.shape[0], half.size, v.shape[2]), _f32)
    for b, shift in enumerate(a.tolist()):
        top = shift.bit_length() - 1
        t = (half >> top << (top + 1)) | (half & ((1 << top) - 1))  # bit `top` clear, ascending
        result[b] = v[b, t] + v[b, t ^ shift]
    return result


def hla(
    x: Floats, *, side: str = "activation", key: KeyLike = 0, out_dtype: str = "float32",
    **spec: Any,
) -> NDArray[Any]:  # fmt: skip
    """Low-rank approximation along the tokens of ``[L, C]``: ``P x``, ``rank`` rows of each block.

    ``(P_gradient g)^T (P_activation x) / block`` is the (approximate) product; a sketch's weights
    are on the gradient's side. ``spec``: fields of :class:`LowRank`. Source: "Low rank".
    """
    return _store(_project(_widen(x), LowRank(**spec), side, key), out_dtype)


@_quiet
def _project(x: Singles, spec: LowRank, side: str, key: KeyLike) -> Singles:
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


def _transform_tokens(tokens: Singles) -> Singles:
    """FWHT along axis 1 of ``[B, n, C]``."""
    blocks, n, channels = tokens.shape
    lines = tokens.transpose(0, 2, 1).reshape(blocks * channels, n)
    return _butterflies(lines).reshape(blocks, channels, n).transpose(0, 2, 1)


def _sketch(tokens: Singles, rank: int, side: str, key: KeyLike) -> Singles:
    blocks, n, _ = tokens.shape
    shifts = sketch_folds(blocks, n, rank, key)
    for j in range(shifts.shape[1]):
        tokens = fold(tokens, shifts[:, j])
    kept = _transform_tokens(tokens)
    if side == "gradient":
        weight = _f32(n - 1) / _f32(rank - 1)
        kept = np.concatenate([kept[:, :1], kept[:, 1:] * weight], axis=1)
    return kept


@_quiet
def scale_of(amax: Singles, bits: int) -> tuple[Singles, Singles]:
    """``scale`` and ``inv`` of sets with these largest magnitudes. Source: "Scales".

    NaN and 0 where amax is not finite, 0 and 0 where it is below 2**-100.
    """
    q = _f32(_largest_code(bits))
    finite = np.isfinite(amax)
    used = finite & (amax >= _f32(2.0**-100))
    scale = np.where(used, amax / q, _f32(0))
    inv = np.where(used, q / amax, _f32(0))
    return np.where(finite, scale, _f32(np.nan)), inv


@_quiet
def round_codes(
    values: Singles, inv: Singles | np.float32, bits: int, rounding: str, u: Bytes | None = None
) -> Codes:
    """Codes of ``values * inv``, at most 127 or 7 in size. Source: "Rounding".

    ``u``: random bytes of the shape of ``values``, for ``"stochastic"``.
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


def _round_pseudo_stochastic(v: Singles, bits: int) -> Codes:
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
    x: Floats, *, bits: int = 8, scale: str = "token", rounding: str = "stochastic",
    key: KeyLike = 0, purpose: int = PURPOSE_QUANTIZE, packed: bool = False,
) -> tuple[NDArray[Any], Singles]:  # fmt: skip
    """Symmetric codes of ``[R, C]`` and fp32 scales by token, channel or tensor.

    ``purpose``: of the random bytes ("Shapes"). ``packed``: two INT4 codes a byte. Source: "Scales"
    and "Rounding".
    """
    values = _widen(x)
    axis = {"token": 1, "channel": 0, "tensor": None}[scale]
    scales, inv = scale_of(_amax(values, axis), bits)
    codes = _round_scaled(values, inv, bits, rounding, key, purpose)
    return (pack_int4(codes) if packed else codes), scales.reshape(-1)


@_quiet
def dequantize(
    q: NDArray[Any], scale: Singles, *, granularity: str = "token", dtype: str = "float32",
    packed: bool = False, columns: int | None = None,
) -> NDArray[Any]:  # fmt: skip
    """``q * scale``, rounded to fp32 and then to ``dtype``. Source: "Scales".

    ``columns``: C of a packed q, twice its bytes unless given.
    """
    codes = unpack_int4(q, columns) if packed else q
    wide = scale[:, None] if granularity == "token" else scale[None, :]
    return _store(codes.astype(_f32) * wide, dtype)


def _amax(values: Singles, axis: int | None) -> Singles:
    """Largest magnitude along ``axis``, dimension kept, as a bit pattern: NaN beats Inf."""
    magnitudes = _words(values) & _u32(0x7FFFFFFF)
    largest = np.max(magnitudes, axis=axis, keepdims=True, initial=0)
    return np.asarray(largest, _u32).view(_f32)


@_quiet
def _round_scaled(
    values: Singles, inv: Singles, bits: int, rounding: str, key: KeyLike, purpose: int
) -> Codes:
    """Codes of ``values * inv`` for a matrix; 0 wherever inv is 0, for every value."""
    rows, cols = values.shape
    u = random_bytes(rows, cols, key, purpose) if rounding == "stochastic" else None
    return round_codes(np.where(inv == 0, _f32(0), values), inv, bits, rounding, u)


def pack_int4(q: Codes) -> Bytes:
    """Two codes a byte, low nibble first: uint8 ``[R, ceil(C/2)]``. Source: "INT4".

    Two's complement; values outside [-8, 7] lose their upper bits.
    """
    rows, cols = q.shape
    nibbles = np.zeros((rows, cols + cols % 2), np.uint8)
    nibbles[:, :cols] = q.astype(np.uint8) & np.uint8(15)
    packed: Bytes = nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)
    return packed


def unpack_int4(packed: Bytes, columns: int | None = None) -> Codes:
    """Undo :func:`pack_int4`: int8 ``[R, columns]``, twice the bytes unless given."""
    rows, width = packed.shape
    nibbles = np.empty((rows, 2 * width), np.int16)
    nibbles[:, 0::2] = packed & 15
    nibbles[:, 1::2] = packed >> 4
    codes = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)
    return codes if columns is None else codes[:, :columns].copy()


def gemm_int8(
    a: Codes, b: Codes, a_scale: Singles | None = None, b_scale: Singles | None = None, *,
    divisor: int = 1, out_dtype: str = "float32", out: Floats | None = None,
    accumulate: bool = False,
) -> NDArray[Any]:  # fmt: skip
    """``a b^T`` of codes, summed exactly, times ``a_scale[m] * b_scale[n] / divisor``.

    Scales ``[M]`` or ``[1]``; without them the result is the int32 sums (K up to 131,071).
    ``out`` is read, not written. Source: "Integer GEMM and dequantisation".
    """
    sums = integer_product(a, b)
    if a_scale is None or b_scale is None:
        return sums.astype(np.int32)
    result = _dequantize_product(sums, a_scale, b_scale, divisor)
    return _finish(result, out if accumulate else None, out_dtype)


def gemm_int4(
    a: Bytes, b: Bytes, *scales: Any, k: int | None = None, **options: Any
) -> NDArray[Any]:
    """:func:`gemm_int8` of packed operands."""
    return gemm_int8(unpack_int4(a, k), unpack_int4(b, k), *scales, **options)


def integer_product(a: Codes, b: Codes) -> NDArray[np.int64]:
    """``a b^T`` for int8 ``[M, K]`` and ``[N, K]``: exact int64 ``[M, N]``."""
    # Every partial sum is an integer far below 2**53, so fp64 adds them exactly in any order.
    product: NDArray[np.float64] = a.astype(np.float64) @ b.astype(np.float64).T
    return product.astype(np.int64)


@_quiet
def _dequantize_product(
    sums: NDArray[np.int64], a_scale: Singles, b_scale: Singles, divisor: int
) -> Singles:
    right = sums.astype(_f32) * b_scale[None, :]
    return right * (a_scale / _f32(divisor))[:, None]


@_quiet
def _token_product(a: Codes, b: Codes, k_scale: Singles, b_scale: Singles, divisor: int) -> Singles:
    """Product whose first operand has a scale for each k, summed in fp32 with k ascending."""
    left = a.astype(_f32) * k_scale[None, :]
    right = b.astype(_f32)
    acc = np.zeros((a.shape[0], b.shape[0]), _f32)
    for k in range(a.shape[1]):
        acc = acc + left[:, k, None] * right[None, :, k]
    return (acc * b_scale[None, :]) / _f32(divisor)


@_quiet
def _finish(result: Singles, before: Floats | None, out_dtype: str) -> NDArray[Any]:
    """Finish a product: add the existing values, and round once to the output type."""
    if before is not None:
        result = _widen(before) + result
    return _store(result, out_dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """A compressed activation in logical form, as :func:`compress_activation` makes it.

    ``codes``: int8 ``[I, Kp]``, for INT4 ``[I, roundup(L, 32)]``. ``scales``: float32 ``[I]`` or
    ``[1]``, for INT4 uint16 bits of bfloat16 ``[I, ceil(L/64)]``. ``packed``: the stored bytes of
    INT4, uint8 ``[I, bytes]``, or None. ``exponents``: those of the tokens' sizes, uint8 ``[L]``,
    or None if tokens are not equalised.
    """

    codes: Codes
    scales: NDArray[Any]
    packed: Bytes | None
    tokens: int
    in_features: int
    config: ConfigLike
    key: Key
    exponents: Bytes | None = None


class Gradients(NamedTuple):
    """Gradients of :func:`backward_linear`; None if not requested."""

    gx: NDArray[Any] | None
    gw: NDArray[Any] | None
    gb: NDArray[Any] | None


def quantize_gradient_rows(
    gy: Floats, config: ConfigLike, key: KeyLike = 0
) -> tuple[Codes, Singles]:
    """g_y for g_x: codes ``[L, Kp]``, scales ``[L]`` or ``[1]``. "Shapes", purpose 1."""
    operand = _transform_features(_flat(gy), config.hadamard_block)
    options = {"bits": config.gx_bits, "scale": config.gx_scale, "rounding": config.gx_rounding}
    return quantize(operand, key=key, purpose=PURPOSE_GX_GRADIENT, **options)


def quantize_weight(w: Floats, config: ConfigLike) -> tuple[Codes, Singles]:
    """W for g_x: codes ``[I, Kp]``, scales ``[I]`` or ``[1]``; to nearest. "Shapes", purpose 2."""
    operand = _transform_features(_widen(w).T, config.hadamard_block)
    options = {"bits": config.gx_bits, "scale": config.gx_scale, "rounding": "nearest"}
    return quantize(operand, purpose=PURPOSE_GX_WEIGHT, **options)


def quantize_gradient_columns(
    gy: Floats, config: ConfigLike, key: KeyLike = 0, sketch_key: KeyLike | None = None,
    exponents: Bytes | None = None,
) -> tuple[Codes, Singles]:  # fmt: skip
    """g_y for g_w: codes ``[O, Kp]``, scales ``[O]``, ``[1]`` or ``[Kp]``. "Shapes", purpose 4.

    ``key`` rounds; ``sketch_key`` (``key`` unless given) is the one that x was compressed with, and
    ``exponents`` are the tokens' sizes of then ("Token equalisation").
    """
    # The operand is transposed: its rows are channels.
    scale = {"channel": "token", "tensor": "tensor", "token": "channel"}
    subspaces = key if sketch_key is None else sketch_key
    rows = _project(_resized(_flat(gy), exponents), _low_rank_of(config), "gradient", subspaces)
    options = {"scale": scale[config.gw_scale], "rounding": config.gw_rounding}
    return quantize(_pad_columns(rows.T, 16), key=key, purpose=PURPOSE_GW_GRADIENT, **options)


def compress_activation(x: Floats, config: ConfigLike = None, *, key: KeyLike = 0) -> Saved:
    """Keep x ``[..., I]`` compressed. Source: "Shapes" (purpose 3), and "INT4"."""
    settings = Config() if config is None else config
    values = _flat(x)
    tokens, width = values.shape
    exponents = token_exponents(values) if settings.equalize_tokens else None
    values = _resized(values, exponents, divide=True)
    rest = (tokens, width, settings, _key(key), exponents)
    if settings.storage == "int4":
        codes, scales = _quantize_groups(values.T, key)
        return Saved(codes, scales, pack_int4(codes), *rest)
    rows = _project(values, _low_rank_of(settings), "activation", key)
    options = {"scale": "token" if settings.gw_scale == "channel" else "tensor", "key": key}
    codes, scale = quantize(_pad_columns(rows.T, 16), purpose=PURPOSE_GW_ACTIVATION, **options)
    return Saved(codes, scale, None, *rest)


@_quiet
def token_exponents(x: Singles) -> Bytes:
    """Biased exponents of the powers of two t that divide the tokens. "Token equalisation"."""
    exponent = _words(_amax(x, 1)) >> _u32(23)  # exponents of the largest magnitude: [L, 1]
    usual = (exponent >= 27) & (exponent < 255)
    clear = np.where(usual, exponent, _u32(127))
    unit = ((_u32(268) - clear) << _u32(23)).view(_f32)  # the largest becomes 2**14 to 2**15
    whole = np.where(usual, np.rint(np.abs(x) * unit), _f32(0)).astype(np.int64)
    mean = whole.sum(axis=1, keepdims=True).astype(_f32) / _f32(max(1, x.shape[1]))
    exponents = clear.astype(np.int64) + (_words(mean) >> _u32(23)).astype(np.int64) - 141
    result = np.where(usual, np.clip(exponents, 27, 227), np.where(exponent == 255, 127, 27))
    return result.reshape(-1).astype(np.uint8)


@_quiet
def _resized(values: Singles, exponents: Bytes | None, *, divide: bool = False) -> Singles:
    """Multiply or divide rows of ``values [L, C]`` by their t, with one multiplication."""
    if exponents is None:
        return values
    biased = exponents.astype(_u32)
    power = ((_u32(254) - biased if divide else biased) << _u32(23)).view(_f32)
    return values * power[:, None]


@_quiet
def _quantize_groups(x: Singles, key: KeyLike) -> tuple[Codes, NDArray[np.uint16]]:
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
    codes = _round_scaled(padded[:, :width], per_token, 4, "stochastic", key, PURPOSE_GW_ACTIVATION)
    return _pad_columns(codes, 32), stored


@_quiet
def decompress_activation(saved: Saved, first: int = 0, last: int | None = None) -> Singles:
    """Tokens ``first`` to ``last`` of an x of basis ``"full"``. Source: "INT4"."""
    scales = saved.scales.reshape(-1, 1)
    if saved.packed is not None:
        scales = np.repeat(bf16_values(saved.scales), INT4_GROUP, axis=1)[:, : saved.tokens]
    values = (saved.codes[:, : saved.tokens].astype(_f32) * scales).T
    return np.ascontiguousarray(_resized(values, saved.exponents)[first:last])


@_quiet
def requantize(saved: Saved, key: KeyLike | None = None) -> tuple[Codes, Singles]:
    """INT8 codes ``[I, Kp]`` and scales ``[I]`` of an INT4 x. Source: "Back to INT8"."""
    groups = bf16_values(saved.scales)
    width = _round_up(saved.tokens, 16)
    scale, inv = scale_of(_f32(7) * _amax(groups, 1), 8)
    factor = np.where(inv == 0, _f32(0), groups * inv)
    values = saved.codes[:, :width].astype(_f32)
    per_token = np.repeat(factor, INT4_GROUP, axis=1)[:, :width]
    new_key = saved.key if key is None else key
    codes = _round_scaled(values, per_token, 8, "stochastic", new_key, PURPOSE_REQUANTIZE)
    return codes, scale.reshape(-1)


def backward_linear(
    gy: Floats, w: Floats | None, saved_or_x: Saved | Floats | None, *, config: ConfigLike = None,
    need: Collection[str] = ("gx", "gw"), key: KeyLike | None = None, out_dtype: str | None = None,
    gw_out: Floats | None = None, gb_out: Floats | None = None, accumulate: bool = False,
) -> Gradients:  # fmt: skip
    """Backward of ``y = x w^T + b``: ``gx = gy w``, ``gw = gy^T x``, ``gb`` = sums of gy.

    An x is compressed first. Settings and key are those of ``saved_or_x`` unless given; the
    sketch's subspaces always come from the key that x was compressed with. ``gw_out`` and
    ``gb_out`` are read if ``accumulate``, not written.
    """
    grad = _flat(gy)
    dtype = _dtype_name(gy, out_dtype)
    saved: Saved | None = saved_or_x if isinstance(saved_or_x, Saved) else None
    settings = config if config is not None else saved.config if saved else Config()
    if saved is None and "gw" in need:
        saved = compress_activation(np.asarray(saved_or_x), settings, key=0 if key is None else key)
    if key is None:
        key = saved.key if saved else 0

    gx = gw = gb = None
    if "gx" in need:
        assert w is not None, "w: needed for gx"
        a, a_scale = quantize_gradient_rows(gy, settings, key)
        b, b_scale = quantize_weight(w, settings)
        options = {"divisor": settings.hadamard_block, "out_dtype": dtype}
        product = gemm_int8(a, b, a_scale, b_scale, **options)
        gx = product.reshape(*gy.shape[:-1], w.shape[1])
    if "gw" in need:
        assert saved is not None
        product = _weight_gradient(gy, saved, settings, key)
        gw = _finish(product, gw_out if accumulate else None, dtype)
    if "gb" in need:
        gb = _finish(bias_gradient(grad), gb_out if accumulate else None, dtype)
    return Gradients(gx, gw, gb)


def _weight_gradient(gy: Floats, saved: Saved, config: ConfigLike, key: KeyLike) -> Singles:
    left, left_scale = quantize_gradient_columns(gy, config, key, saved.key, saved.exponents)
    if saved.packed is None:
        right, right_scale = saved.codes, saved.scales
    else:
        right, right_scale = requantize(saved, key)
    divisor = 1 if config.basis == "full" else int(config.block)
    if config.gw_scale == "token":
        return _token_product(left, right, left_scale, right_scale, divisor)
    return _dequantize_product(integer_product(left, right), left_scale, right_scale, divisor)


@_quiet
def bias_gradient(gy: Floats) -> Singles:
    """Column sums of g_y ``[L, O]``. Source: "g_b".

    Blocks of 16 tokens add up as row 0 of the FWHT does, runs of 64 blocks in fp32, runs in fp64.
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


@_quiet
def quantize_forward_operand(
    values: Floats, block: int = 64, exponents: Codes | None = None
) -> tuple[Codes, Singles]:
    """x or w for y: codes ``[R, Kp]``, scales ``[R]``; to nearest. Source: "Forward".

    ``exponents``: those of a weight in INT4, for x.
    """
    operand = _transform_features(_scaled_features(_flat(values), exponents, -1), block)
    return quantize(operand, bits=8, scale="token", rounding="nearest")


@_quiet
def quantize_weight_int4(
    w: Floats, block: int = 64, group: int = 32, exponents: Codes | None = None
) -> tuple[Bytes, Singles, Bytes]:
    """Packed codes ``[O, Kp/2]``, scales ``[O]``, steps ``[O, Kp/group]``. "INT4 weights"."""
    operand = _transform_features(_scaled_features(_flat(w), exponents, 1), block)
    scales, inv = scale_of(_amax(operand, 1), 8)
    values = np.where(np.isnan(scales), _f32(0), operand * (inv * _f32(64)))
    fixed = np.rint(values).astype(np.int64).reshape(-1, group)
    full = (np.abs(fixed).max(1, initial=0) + 59) // 60
    best = np.full(len(fixed), np.iinfo(np.int64).max)
    codes, steps = np.zeros_like(fixed), np.zeros_like(full)
    for index in range(32):
        step = np.minimum((full * (68 - index) + 32) >> 6, 135)
        factor = np.where(step > 0, _f32(1) / (8 * step).astype(_f32), _f32(0)).astype(_f32)
        position = fixed.astype(_f32) * factor[:, None] + _f32(8)
        tried = np.clip(position, 0, 15).astype(np.int64) - 8
        error = np.square(fixed - 64 * _expanded(tried, step)).sum(1)
        better = error < best
        best = np.where(better, error, best)
        steps = np.where(better, step, steps)
        codes = np.where(better[:, None], tried, codes)
    packed = pack_int4(codes.astype(np.int8).reshape(operand.shape))
    groups = (len(operand), operand.shape[1] // group)
    return packed, scales.ravel(), steps.astype(np.uint8).reshape(groups)


def expand_weight_int4(packed: Bytes, steps: Bytes, group: int = 32) -> Codes:
    """INT8 codes ``[O, Kp]`` of a weight in INT4. Source: "INT4 weights"."""
    codes = unpack_int4(packed).astype(np.int64)
    return _expanded(codes.reshape(-1, group), steps.ravel()).reshape(codes.shape).astype(np.int8)


@_quiet
def dequantize_weight(
    codes: Codes, scales: Singles, block: int, columns: int, exponents: Codes | None = None
) -> Singles:
    """Floats ``[O, I]`` of codes, before they are rounded to another type. "Forward"."""
    width = -(-columns // block) * block
    sums = fwht(codes[:, :width].astype(_f32), block=block)  # integers
    values = sums * (scales.reshape(-1, 1) / _f32(block))
    return _scaled_features(values[:, :columns], exponents, -1)


def _expanded(codes: NDArray[np.int64], step: NDArray[Any]) -> NDArray[np.int64]:
    odd = (2 * codes + 1) * step[:, None].astype(np.int64)
    return np.sign(odd) * ((np.abs(odd) + 8) >> 4)


def _scaled_features(values: Singles, exponents: Codes | None, sign: int) -> Singles:
    """Values of in features times ``2**(sign * exponent / 4)``."""
    if exponents is None:
        return values
    powers = sign * exponents.astype(np.int32)
    roots = np.exp2(np.arange(4) / 4).astype(_f32)
    return values * np.ldexp(roots[powers % 4], powers // 4)


def forward_linear(
    x: Floats, w: Floats, bias: Floats | None = None, *, config: ConfigLike = None,
    out_dtype: str | None = None,
) -> NDArray[Any]:  # fmt: skip
    """``y = x w^T + bias`` in INT8, for every value of ``config.forward``. Source: "Forward"."""
    settings = Config() if config is None else config
    left = quantize_forward_operand(x, settings.forward_block)
    right = quantize_forward_operand(w, settings.forward_block)
    product = forward_product(left, right, bias, settings.forward_block)
    return _store(product, _dtype_name(x, out_dtype)).reshape(*x.shape[:-1], w.shape[0])


def forward_product(
    x: tuple[Codes, Singles], w: tuple[Codes, Singles], bias: Floats | None, block: int
) -> Singles:
    """``y [L, O]`` in fp32 from the codes and scales of both operands."""
    product = _dequantize_product(integer_product(x[0], w[0]), x[1], w[1], block)
    with np.errstate(all="ignore"):
        return product if bias is None else product + _widen(bias)[None, :]


def _transform_features(values: Singles, n: int) -> Singles:
    """``[R, C]`` -> ``[R, Kp]``: FWHT of blocks of n along C, then zeros up to 16 columns."""
    return _pad_columns(fwht(_pad_columns(values, n), block=n), 16)


def _widen(values: Floats) -> Singles:
    """To float32, exactly."""
    assert values.dtype in (np.float32, np.float16), values.dtype
    return values.astype(_f32)


def _flat(values: Floats) -> Singles:
    """``[..., C]`` as float32 ``[L, C]``."""
    wide = _widen(values)
    return wide.reshape(int(np.prod(wide.shape[:-1], dtype=np.int64)), wide.shape[-1])


@_quiet
def _store(values: Singles, dtype: str) -> NDArray[Any]:
    """Round float32 to the output type, once."""
    if dtype == "bfloat16":
        return round_bf16(values)
    return np.ascontiguousarray(values, dtype=np.dtype(dtype))


def _dtype_name(like: Floats, given: str | None) -> str:
    return like.dtype.name if given is None else given


def _words(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, dtype=_f32).view(_u32).reshape(np.shape(values))


def _bf16_from_upper_half(values: Floats, words: NDArray[np.uint32]) -> Singles:
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
