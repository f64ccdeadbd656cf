"""The stages as functions of arrays.

Every function takes NumPy, torch (detached) or CuPy arrays, or any other array with
``__dlpack__``. It allocates its result in the framework of its first array, and works on the
caller's current stream on a GPU. No input is converted or copied. An unusable argument raises
ValueError, an object that is no array TypeError, and a call that this build or device cannot run
NotImplementedError. Each names the argument. docs/numerics.md defines shapes, rounding and bits.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    get_args,
    overload,
)

import numpy as np

from . import _core, arrays, contexts
from .arrays import FLOATS, Array, Operand, operand, output
from .config import (
    Basis,
    ConfigLike,
    HotConfig,
    Key,
    Rounding,
    as_config,
    as_int,
    as_ints,
    as_key,
    check_ints,
    check_type,
)
from .saved import (
    QuantizedForwardWeight,
    QuantizedInput,
    QuantizedWeight,
    QuantizedWeightInt4,
    Saved,
    check_fields,
    saved_layout,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

KeyLike = Key | int
Granularity = Literal["token", "channel", "tensor"]
Need = Literal["gx", "gw", "gb"]


def fwht(x: Array, *, axis: int = -1, block: int = 16, out: Array | None = None) -> Array:
    """Unnormalised Walsh-Hadamard transform of consecutive blocks along one axis.

    Args:
        x: float32, float16 or bfloat16, 1 to 4 dimensions, any strides.
        axis: transformed axis; its length is a multiple of ``block``.
        block: power of two, 1 to 32768.
        out: array to write, of x's shape (any of the three dtypes); x itself is allowed.

    Returns:
        ``out``, or a new array with x's shape and dtype. Computed in fp32, rounded once.

    Source: docs/numerics.md, "FWHT".
    """
    source = operand(x, "x")
    target = source.empty(source.shape, source.dtype) if out is None else output(out, "out", source)
    check_ints(axis=axis, block=block)
    _core.fwht(source.context(), source.dlpack, axis, block, target.dlpack)
    return _result(source, target, out)


def hla(
    x: Array,
    *,
    rank: int = 8,
    basis: Basis = "sketch",
    block: int = 16,
    rows: Sequence[int] | None = None,
    token_grid: tuple[int, int] | None = None,
    prefix_tokens: int = 0,
    side: Literal["activation", "gradient"] = "activation",
    key: KeyLike = 0,
    out: Array | None = None,
) -> Array:
    """Hadamard low-rank approximation along the tokens: ``P x``, ``rank`` rows of each block.

    Args:
        x: ``[L, C]`` float32, float16 or bfloat16, any strides.
        rank: kept rows of a block; ignored for basis ``"full"`` and with ``rows``.
        basis: ``"full"``, ``"lowpass"``, ``"sequency"`` or ``"sketch"``.
        block: tokens of a block, power of two, 2 to 64.
        rows: natural-order rows to keep, for ``"lowpass"``.
        token_grid: (height, width) of a sample's patches, taken in tiles.
        prefix_tokens: class tokens in front of each sample's grid.
        side: ``"activation"`` or ``"gradient"`` (which carries the sketch's weights).
        key: random key of the sketch.
        out: ``[K, C]`` array to write.

    Returns:
        ``[K, C]``, float32 unless ``out`` says otherwise.

    Source: docs/numerics.md, "Low rank".
    """
    source = _matrix(operand(x, "x"))
    check_ints(rank=rank, block=block, prefix_tokens=prefix_tokens)
    check_type(str, basis=basis, side=side)
    grid = (0, 0) if token_grid is None else token_grid
    grid_h, grid_w = as_ints(grid, "token_grid", "(height, width)", 2)
    row_list = () if rows is None else as_ints(rows, "rows", "ints")
    if rows is not None and not row_list:
        raise ValueError("rows: an empty list")
    low_rank = (basis, block, rank, row_list, grid_h, grid_w, prefix_tokens)
    if out is None:
        count = _core.hla_rows(source.shape[0], *low_rank)
        target = source.empty((count, source.shape[1]), "float32")
    else:
        target = output(out, "out", source)
    _core.hla(source.context(), source.dlpack, *low_rank, side, as_key(key), target.dlpack)
    return _result(source, target, out)


def basis_order(basis: Literal["lowpass", "sequency"], block: int = 16) -> list[int]:
    """Row order of ``"lowpass"`` or ``"sequency"``; rank r keeps its first r entries."""
    check_type(str, basis=basis)
    check_ints(block=block)
    return _core.basis_order(basis, block)


def quantize(
    x: Array,
    *,
    bits: Literal[4, 8] = 8,
    scale: Granularity = "token",
    rounding: Rounding = "stochastic",
    key: KeyLike = 0,
    packed: bool = False,
) -> tuple[Array, Array]:
    """Symmetric quantisation: codes in [-127, 127] (8 bits) or [-7, 7] (4 bits) and scales.

    Args:
        x: ``[R, C]`` float32, float16 or bfloat16, any strides.
        bits: 8 or 4.
        scale: ``"token"`` (one per row), ``"channel"`` (one per column) or ``"tensor"``.
        rounding: ``"stochastic"``, ``"nearest"`` or ``"pseudo_stochastic"``.
        key: random key of stochastic rounding.
        packed: 4 bits only: two codes a byte.

    Returns:
        Codes (int8 ``[R, C]``, packed uint8 ``[R, ceil(C/2)]``) and float32 scales ``[R]``,
        ``[C]`` or ``[1]``. A set with NaN or Inf gets scale NaN and codes 0.

    Source: docs/numerics.md, "Scales", "Rounding".
    """
    source = _matrix(operand(x, "x"))
    check_ints(bits=bits)
    check_type(str, scale=scale, rounding=rounding)
    height, width = source.shape
    counts = {"token": height, "channel": width, "tensor": 1}
    if packed and bits != 4:
        raise ValueError(f"packed: True requires bits=4, got {bits}")
    shape = (height, (width + 1) // 2) if packed else (height, width)
    q = source.empty(shape, "uint8" if packed else "int8")
    scales = source.empty((counts.get(scale, 1),), "float32")
    _core.quantize(
        source.context(), source.dlpack, bits, scale, rounding, as_key(key), q.dlpack, scales.dlpack
    )
    return _result(source, q), _result(source, scales)


def dequantize(
    q: Array,
    scale: Array,
    *,
    granularity: Granularity = "token",
    dtype: Any = "float32",
    packed: bool = False,
    columns: int | None = None,
) -> Array:
    """``q * scale``.

    Args:
        q: int8 ``[R, C]``, or with ``packed`` uint8 ``[R, ceil(C/2)]``; C contiguous.
        scale: contiguous float32 vector of R, C or 1 elements.
        granularity: ``"token"`` (R scales), ``"channel"`` (C) or ``"tensor"`` (1).
        dtype: float32, float16 or bfloat16.
        packed: q holds two INT4 codes a byte.
        columns: C of a packed q; None: ``2 * q.shape[1]``.

    Returns:
        ``[R, C]`` in ``dtype``.

    Source: docs/numerics.md, "Scales".
    """
    source = _matrix(operand(q, "q", ("uint8",) if packed else ("int8",)))
    scales = operand(scale, "scale", ("float32",))
    check_type(str, granularity=granularity)
    width = _columns(source, columns) if packed else source.shape[1]
    if columns not in (None, width):
        raise ValueError(f"columns: {columns}; q has {width}")
    target = source.empty((source.shape[0], width), source.float_dtype(dtype, "dtype"))
    _core.dequantize(source.context(), source.dlpack, scales.dlpack, granularity, target.dlpack)
    return _result(source, target)


def pack_int4(q: Array) -> Array:
    """Pack int8 ``[R, C]`` codes in [-8, 7] two a byte, low nibble first: uint8 ``[R, ceil(C/2)]``.

    C is contiguous. Codes outside of that range lose their upper bits. Source: docs/numerics.md,
    "INT4".
    """
    source = _matrix(operand(q, "q", ("int8",)))
    target = source.empty((source.shape[0], (source.shape[1] + 1) // 2), "uint8")
    _core.pack_int4(source.context(), source.dlpack, target.dlpack)
    return _result(source, target)


def unpack_int4(packed: Array, columns: int | None = None) -> Array:
    """Undo :func:`pack_int4`: int8 ``[R, columns]``; None: ``2 * packed.shape[1]`` columns.

    The bytes of a row are contiguous. Source: docs/numerics.md, "INT4".
    """
    source = _matrix(operand(packed, "packed", ("uint8",)))
    target = source.empty((source.shape[0], _columns(source, columns)), "int8")
    _core.unpack_int4(source.context(), source.dlpack, target.dlpack)
    return _result(source, target)


def gemm_int8(
    a: Array,
    b: Array,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    *,
    divisor: int = 1,
    out_dtype: Any = "float32",
    out: Array | None = None,
    accumulate: bool = False,
) -> Array:
    """``a b^T`` of INT8 codes, summed exactly, times ``a_scale[m] * b_scale[n] / divisor``.

    Args:
        a: int8 ``[M, K]``, K contiguous.
        b: int8 ``[N, K]``, K contiguous.
        a_scale: float32 ``[M]`` or ``[1]``, contiguous.
        b_scale: float32 ``[N]`` or ``[1]``, contiguous.
        divisor: power of two.
        out_dtype: float32, float16 or bfloat16.
        out: ``[M, N]`` array to write.
        accumulate: add to ``out`` instead.

    Returns:
        ``[M, N]`` in ``out_dtype``; without scales the sums, int32 (K up to 131,071).

    Source: docs/numerics.md, "Integer GEMM and dequantisation".
    """
    operands = (a, b, a_scale, b_scale)
    return _gemm(_core.gemm_int8, operands, None, divisor, out_dtype, out, accumulate)


def gemm_int4(
    a: Array,
    b: Array,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    *,
    k: int | None = None,
    divisor: int = 1,
    out_dtype: Any = "float32",
    out: Array | None = None,
    accumulate: bool = False,
) -> Array:
    """:func:`gemm_int8` on packed operands; see there for the other arguments and the result.

    Args:
        a: uint8 ``[M, ceil(K/2)]``.
        b: uint8 ``[N, ceil(K/2)]``.
        k: K; None: ``2 * a.shape[1]``.

    Source: docs/numerics.md, "INT4".
    """
    operands = (a, b, a_scale, b_scale)
    return _gemm(_core.gemm_int4, operands, k, divisor, out_dtype, out, accumulate)


def compress_activation(x: Array, config: ConfigLike | None = None, *, key: KeyLike = 0) -> Saved:
    """Compress x ``[..., I]`` for the backward pass.

    Args:
        x: float32, float16 or bfloat16, 2 to 4 dimensions whose leading ones collapse.
        config: a :class:`HotConfig` or a recipe's name; None: ``HotConfig()``.
        key: random key of the rounding and the sketch.

    Returns:
        A :class:`Saved`: one uint8 vector, about 0.53 bytes per value with recipe ``"default"``.
    """
    settings = HotConfig() if config is None else as_config(config)
    source = _matrix(operand(x, "x"), at_least=True)
    tokens, width = math.prod(source.shape[:-1]), source.shape[-1]
    full_key = as_key(key)
    data = source.empty((saved_layout(tokens, width, settings).bytes,), "uint8")
    spec, sizes = settings.spec, (tokens, width)
    workspace = source.workspace(_core.compress_activation_workspace, *sizes, spec)
    _core.compress_activation(
        source.context(), source.dlpack, spec, full_key, data.dlpack, workspace
    )
    return Saved(_result(source, data), tokens, width, settings, full_key)


def decompress_activation(
    saved: Saved,
    first: int = 0,
    last: int | None = None,
    dtype: Any = "float32",
    *,
    out: Array | None = None,
) -> Array:
    """Decode tokens ``first`` to ``last`` of a compressed x of basis ``"full"`` to floats.

    Args:
        saved: from :func:`compress_activation`, with a configuration of basis ``"full"``.
        first: first token, 0 to ``saved.tokens``.
        last: one past the last token, ``first`` to ``saved.tokens``; None: ``saved.tokens``.
        dtype: float32, float16 or bfloat16.
        out: ``[last - first, I]`` array to write, of any of the three dtypes (``dtype`` is then
            ignored).

    Returns:
        ``out``, or a new ``[last - first, I]`` in ``dtype``: computed in fp32, rounded once. A
        scale of NaN gives NaN.

    Raises:
        NotImplementedError: another basis, which keeps projected rows and not x.

    Source: docs/numerics.md, "Back to x".
    """
    source = _codes_of(saved, Saved, "saved")
    first = as_int(first, "first", 64)  # NumPy's narrow integers overflow below
    end = as_int(saved.tokens if last is None else last, "last", 64)
    if out is None:
        count = min(max(0, end - first), saved.tokens)  # more are refused below
        target = source.empty((count, saved.in_features), source.float_dtype(dtype, "dtype"))
    else:
        target = output(out, "out", source)
    about = (saved.tokens, saved.in_features, saved.key, first, end, saved.config.spec)
    _core.decompress_activation(source.context(), source.dlpack, *about, target.dlpack)
    return _result(source, target, out)


def quantize_weight(w: Array, config: ConfigLike | None = None) -> QuantizedWeight:
    """Quantise w ``[O, I]`` once for several calls of :func:`backward_linear`, with the same bits.

    Args:
        w: float32, float16 or bfloat16, any strides.
        config: a :class:`HotConfig` or a recipe's name; None: ``HotConfig()``.

    Returns:
        A :class:`QuantizedWeight`: about one byte per value, valid until w changes.
    """
    settings = HotConfig() if config is None else as_config(config)
    source = _matrix(operand(w, "w"))
    rows, columns = source.shape
    spec = settings.spec
    data = source.empty((_core.quantized_weight_bytes(rows, columns, spec),), "uint8")
    workspace = source.workspace(_core.quantize_weight_workspace, rows, columns, spec)
    _core.quantize_weight(source.context(), source.dlpack, spec, data.dlpack, workspace)
    return QuantizedWeight(_result(source, data), rows, columns, settings)


def quantize_forward_weight(w: Array, config: ConfigLike | None = None) -> QuantizedForwardWeight:
    """Quantise w ``[O, I]`` once for several calls of :func:`forward_linear`, with the same bits.

    Args:
        w: float32, float16 or bfloat16, any strides.
        config: a :class:`HotConfig` or a recipe's name; only ``forward_block`` matters. None:
            ``HotConfig()``.

    Returns:
        A :class:`QuantizedForwardWeight`: about one byte a value.

    Source: docs/numerics.md, "Forward".
    """
    settings = HotConfig() if config is None else as_config(config)
    source = _matrix(operand(w, "w"))
    rows, columns = source.shape
    spec = settings.forward_spec
    data = source.empty((_core.forward_weight_bytes(rows, columns, spec),), "uint8")
    _core.quantize_forward_weight(source.context(), source.dlpack, spec, data.dlpack)
    return QuantizedForwardWeight(_result(source, data), rows, columns, settings)


def quantize_weight_int4(
    w: Array, config: ConfigLike | None = None, *, group: int = 32, exponents: Array | None = None
) -> QuantizedWeightInt4:
    """Quantise w ``[O, I]`` to INT4 for the 8-bit forward: half a byte a value.

    :func:`expand_weight_int4` makes the INT8 codes that :func:`forward_linear` takes.

    Args:
        w: float32, float16 or bfloat16, any strides. A row with NaN or Inf gets scale NaN.
        config: a :class:`HotConfig` or a recipe's name; only ``forward_block`` matters. None:
            ``HotConfig()``.
        group: values along I with a common step, 32 or 64. It divides I after padding to whole
            blocks of ``forward_block``.
        exponents: int8 ``[I]`` or None. In feature i of w is multiplied by
            ``2**(exponents[i] / 4)`` and that of x is divided by it, which makes features of x
            alike in size. The result refers to this array: do not change it.

    Returns:
        A :class:`QuantizedWeightInt4`.

    Source: docs/numerics.md, "INT4 weights".
    """
    settings = HotConfig() if config is None else as_config(config)
    source = _matrix(operand(w, "w"))
    check_ints(group=group)
    powers = _exponents(exponents)
    rows, columns = source.shape
    spec = settings.forward_spec
    data = source.empty((_core.weight_int4_bytes(rows, columns, spec, group),), "uint8")
    _core.quantize_weight_int4(source.context(), source.dlpack, powers, spec, group, data.dlpack)
    return QuantizedWeightInt4(_result(source, data), rows, columns, settings, group, exponents)


def expand_weight_int4(w: QuantizedWeightInt4) -> QuantizedForwardWeight:
    """Expand a weight in INT4 to INT8 codes with a scale a row, in integers.

    Returns:
        A :class:`QuantizedForwardWeight` with the exponents of ``w``.

    Source: docs/numerics.md, "INT4 weights".
    """
    source = _codes_of(w, QuantizedWeightInt4, "w")
    sizes, spec = (w.out_features, w.in_features), w.config.forward_spec
    data = source.empty((_core.forward_weight_bytes(*sizes, spec),), "uint8")
    arguments = (source.dlpack, *sizes, spec, w.group, data.dlpack)
    _core.expand_weight_int4(source.context(), *arguments)
    return QuantizedForwardWeight(_result(source, data), *sizes, w.config, w.exponents)


def dequantize_weight(w: QuantizedForwardWeight, out_dtype: Any = "float32") -> Array:
    """Make floats ``[O, I]`` of a weight's INT8 codes, with the inverse of their transform.

    Args:
        w: result of :func:`quantize_forward_weight` or :func:`expand_weight_int4`. Features are
            divided by the powers of its exponents.
        out_dtype: float32, float16 or bfloat16, a name or a dtype of w's library.

    Source: docs/numerics.md, "Forward".
    """
    source = _codes_of(w, QuantizedForwardWeight, "w")
    sizes = (w.out_features, w.in_features)
    out = source.empty(sizes, source.float_dtype(out_dtype, "out_dtype"))
    arguments = (source.dlpack, *sizes, w.config.forward_spec, out.dlpack)
    with _renaming(exponents="w.exponents"):
        _core.dequantize_weight(source.context(), *arguments, _exponents(w.exponents))
    return _result(source, out)


def _exponents(exponents: Array | None) -> Any:
    """Exponents of in features as an argument of libhot."""
    return None if exponents is None else operand(exponents, "exponents", ("int8",)).dlpack


def _equal_exponents(x: Array | None, w: Array | None) -> bool:
    """Whether two operands have the same exponents. Values are read on the CPU alone."""
    if x is w or x is None or w is None:
        return x is w
    of_x, of_w = operand(x, "x.exponents", ("int8",)), operand(w, "w.exponents", ("int8",))
    return of_x.device == of_w.device == -1 and np.array_equal(of_x.array, of_w.array)


if TYPE_CHECKING:

    class _InputOptions(TypedDict, total=False):
        key: KeyLike
        exponents: Array | None


@overload
def quantize_forward_input(
    x: Array,
    config: ConfigLike | None = None,
    *,
    keep: Literal[False] = False,
    **options: Unpack[_InputOptions],
) -> QuantizedInput: ...
@overload
def quantize_forward_input(
    x: Array,
    config: ConfigLike | None = None,
    *,
    keep: Literal[True],
    **options: Unpack[_InputOptions],
) -> tuple[QuantizedInput, Saved]: ...
@overload
def quantize_forward_input(
    x: Array, config: ConfigLike | None = None, *, keep: bool, **options: Unpack[_InputOptions]
) -> QuantizedInput | tuple[QuantizedInput, Saved]: ...
def quantize_forward_input(
    x: Array,
    config: ConfigLike | None = None,
    *,
    keep: bool = False,
    key: KeyLike = 0,
    exponents: Array | None = None,
) -> QuantizedInput | tuple[QuantizedInput, Saved]:
    """Quantise x ``[..., I]`` once for several calls of :func:`forward_linear`, with the same bits.

    With ``keep`` it also compresses x for backward, with the bits of :func:`compress_activation`.
    On a GPU this can read x fewer times. Source: docs/numerics.md, "Forward".

    Args:
        x: float32, float16 or bfloat16, 2 to 4 dimensions whose leading ones collapse; any strides.
        config: a :class:`HotConfig` or a recipe's name. ``forward_block`` matters, and with
            ``keep`` also the fields of the compression. None: ``HotConfig()``.
        keep: also compress x for the backward pass.
        key: random key of the compression; the codes for the product need none.
        exponents: int8 ``[I]``, those of :func:`quantize_weight_int4`, or None. Feature i is
            divided by ``2**(exponents[i] / 4)``; the compressed x is not.

    Returns:
        A :class:`QuantizedInput`, about one byte a value, or with ``keep`` a pair of it and a
        :class:`Saved`.
    """
    settings = HotConfig() if config is None else as_config(config)
    source = _matrix(operand(x, "x"), at_least=True)
    sizes = (math.prod(source.shape[:-1]), source.shape[-1])
    spec = settings.forward_spec
    data = source.empty((_core.forward_input_bytes(*sizes, spec),), "uint8")
    compression: dict[str, Any] = {"exponents": _exponents(exponents)}
    if keep:
        full_key, backward = as_key(key), settings.spec
        saved = source.empty((saved_layout(*sizes, settings).bytes,), "uint8")
        workspace = source.workspace(_core.compress_activation_workspace, *sizes, backward)
        compression |= {"kept": backward, "key": full_key, "saved": saved.dlpack}
        compression["workspace"] = workspace
    _core.quantize_forward_input(source.context(), source.dlpack, spec, data.dlpack, **compression)
    codes = QuantizedInput(_result(source, data), source.shape, source.dtype, settings, exponents)
    return (codes, Saved(_result(source, saved), *sizes, settings, full_key)) if keep else codes


def forward_linear(
    x: Array | QuantizedInput,
    w: Array | QuantizedForwardWeight,
    bias: Array | None = None,
    *,
    config: ConfigLike | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """``y = x w^T + bias`` as an INT8 product, for every value of ``config.forward``.

    Both operands are transformed in blocks along I and rounded to nearest. x has a scale for each
    token, w for each out feature. The result is deterministic. A row of x (of w) with NaN or Inf
    makes that row (column) of y NaN. Source: docs/numerics.md, "Forward".

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16, 2 to 4 dimensions; leading ones collapse. A
            result of :func:`quantize_forward_input` with the same block also works.
        w: ``[O, I]``, or the result of :func:`quantize_forward_weight` or
            :func:`expand_weight_int4` with the same block. A quantised x has equal exponents; on a
            GPU, where a comparison would wait for the device, both hold one array.
        bias: ``[O]`` or None; added in fp32 before the one rounding.
        config: a :class:`HotConfig` or a recipe's name; only ``forward_block`` matters. None: that
            of a quantised x or w, or ``HotConfig()``.
        out_dtype: dtype of a new result; None: x's.
        out: ``[L, O]`` or ``[..., O]`` array to write.

    Returns:
        ``out``, or a new ``[..., O]``.
    """
    if isinstance(w, QuantizedWeight):
        raise TypeError("w: quantised for g_x (quantize_weight); use quantize_forward_weight")
    powers = w.exponents if isinstance(w, QuantizedForwardWeight) else None
    if powers is not None and not isinstance(x, QuantizedInput):
        with _renaming(exponents="w.exponents"):
            x = quantize_forward_input(x, w.config if config is None else config, exponents=powers)
    coded: dict[str, Any] = {}
    if isinstance(x, QuantizedInput):
        if not _equal_exponents(x.exponents, powers):
            raise ValueError(
                "x: quantised with other exponents than w; pass w.exponents to "
                "quantize_forward_input. On a GPU both must hold one array"
            )
        coded["x"] = x
    if isinstance(w, QuantizedForwardWeight):
        coded["w"] = w
    for name, codes in coded.items():
        check_fields(codes, name)
        config = codes.config if config is None else as_config(config)
        if codes.config.forward_block != config.forward_block:
            raise ValueError(
                f"{name}: quantised with forward_block = {codes.config.forward_block}; expected "
                f"{config.forward_block}"
            )
    settings = HotConfig() if config is None else as_config(config)
    if isinstance(x, QuantizedInput):
        source, x_shape, x_dtype = operand(x.data, "x.data", ("uint8",)), x.shape, x.dtype
    else:
        source = _matrix(operand(x, "x"), at_least=True)
        x_shape, x_dtype = source.shape, source.dtype
    weight, shape = _weight(w, QuantizedForwardWeight, source)
    if shape[1] != x_shape[-1]:
        raise ValueError(f"w: shape {shape}; x has {x_shape[-1]} in features")
    added = None if bias is None else operand(bias, "bias")
    tokens, in_features = math.prod(x_shape[:-1]), x_shape[-1]
    expected = (*x_shape[:-1], shape[0])
    if out is None:
        wanted = (x_dtype, "x.dtype") if out_dtype is None else (out_dtype, "out_dtype")
        dtype = source.float_dtype(*wanted)
        target = source.empty(expected, dtype)
    else:
        target = output(out, "out", source)
        if target.shape not in (expected, (tokens, shape[0])):
            raise ValueError(f"out: shape {target.shape}; expected {expected}")
    spec = settings.forward_spec
    sizes = (tokens, *shape, spec, "w" in coded, "x" in coded)
    with _renaming(y="out", quantized_weight="w", quantized_input="x"):
        _core.forward_linear(
            source.context(),
            None if "x" in coded else source.dlpack,
            None if "w" in coded else weight.dlpack,
            None if added is None else added.dlpack,
            spec,
            target.dlpack,
            source.workspace(_core.forward_linear_workspace, *sizes),
            weight.dlpack if "w" in coded else None,
            source.dlpack if "x" in coded else None,
            in_features,
        )
    return _result(source, target, out)


if TYPE_CHECKING:
    # Type checkers know which of the three are None. Python 3.10 has no generic NamedTuple at run
    # time.
    _Gx = TypeVar("_Gx")
    _Gw = TypeVar("_Gw")
    _Gb = TypeVar("_Gb")
    _Pair = tuple[Literal["gx"], Literal["gw"]]
    _All = tuple[Literal["gx"], Literal["gw"], Literal["gb"]]
    _Some = Need | Collection[Need]

    class Gradients(NamedTuple, Generic[_Gx, _Gw, _Gb]):
        """Result of :func:`backward_linear`."""

        gx: _Gx
        gw: _Gw
        gb: _Gb

    class _Options(TypedDict, total=False):
        config: ConfigLike | None
        key: KeyLike | None
        out_dtype: Any
        gw_out: Array | None
        gb_out: Array | None
        accumulate: bool

else:
    Gradients = NamedTuple("Gradients", [(name, Any) for name in get_args(Need)])
    Gradients.__doc__ = """Result of :func:`backward_linear`: gx ``[..., I]``, gw ``[O, I]``,
    gb ``[O]``; None for a gradient that was not requested."""


@overload
def backward_linear(
    gy: Array, w: Array, saved_or_x: Array, *, need: Literal["gx"], **options: Unpack[_Options]
) -> Gradients[Array, None, None]: ...
@overload
def backward_linear(
    gy: Array, w: Array, saved_or_x: Array, *, need: Literal["gw"], **options: Unpack[_Options]
) -> Gradients[None, Array, None]: ...
@overload
def backward_linear(
    gy: Array, w: Array, saved_or_x: Array, *, need: _Pair = ..., **options: Unpack[_Options]
) -> Gradients[Array, Array, None]: ...
@overload
def backward_linear(
    gy: Array, w: Array, saved_or_x: Array, *, need: _All, **options: Unpack[_Options]
) -> Gradients[Array, Array, Array]: ...
@overload
def backward_linear(
    gy: Array, w: Array, saved_or_x: Array, *, need: _Some, **options: Unpack[_Options]
) -> Gradients[Array | None, Array | None, Array | None]: ...
def backward_linear(
    gy: Array,
    w: Array | QuantizedWeight | None,
    saved_or_x: Saved | Array | None,
    *,
    config: ConfigLike | None = None,
    need: Need | Collection[Need] = ("gx", "gw"),
    key: KeyLike | None = None,
    out_dtype: Any = None,
    gw_out: Array | None = None,
    gb_out: Array | None = None,
    accumulate: bool = False,
) -> Gradients[Array | None, Array | None, Array | None]:
    """Backward of ``y = x w^T + b``: ``gx = gy w``, ``gw = gy^T x``, ``gb`` = sums of gy.

    Args:
        gy: ``[..., O]`` float32, float16 or bfloat16, 2 to 4 dimensions; leading ones collapse.
        w: ``[O, I]``, or the result of :func:`quantize_weight` with the same configuration; None if
            ``"gx"`` is not needed.
        saved_or_x: the result of :func:`compress_activation`, or x ``[..., I]``, which is then
            compressed first; None if ``"gw"`` is not needed.
        config: a :class:`HotConfig` or a recipe's name; None: that of ``saved_or_x``, or
            ``HotConfig()``.
        need: one or several of ``"gx"``, ``"gw"``, ``"gb"``: the gradients to compute.
        key: random key; None: that of ``saved_or_x``, or 0.
        out_dtype: dtype of new results; None: gy's.
        gw_out: ``[O, I]`` array to write, if ``"gw"`` is needed.
        gb_out: ``[O]`` array to write, if ``"gb"`` is needed.
        accumulate: add to ``gw_out`` and ``gb_out`` instead.

    Returns:
        :class:`Gradients`; gx has gy's leading dimensions.
    """
    grad = _matrix(operand(gy, "gy"), at_least=True)
    wanted = arrays.needed(need, get_args(Need))
    check_type(bool, accumulate=accumulate)
    tokens, out_features = math.prod(grad.shape[:-1]), grad.shape[-1]
    saved = None
    if isinstance(saved_or_x, Saved):
        saved = saved_or_x
        check_fields(saved, "saved_or_x")
    elif "gw" in wanted:
        if saved_or_x is None:
            raise TypeError("saved_or_x: expected a Saved or an array for 'gw', got None")
        _matrix(operand(saved_or_x, "saved_or_x"), at_least=True)  # for the name in messages
        saved = compress_activation(saved_or_x, config, key=0 if key is None else key)
    if saved is not None and saved.tokens != tokens:
        raise ValueError(f"saved_or_x: {saved.tokens} tokens; gy has {tokens}")
    settings = as_config(config) if config is not None else saved.config if saved else HotConfig()
    if saved is not None and settings != saved.config:
        raise ValueError(f"config: {settings}; saved_or_x was made with {saved.config}")
    full_key = as_key(key) if key is not None else saved.key if saved else Key(0)

    weight: Operand | None = None
    quantized = isinstance(w, QuantizedWeight)
    in_features = saved.in_features if saved else 0
    if "gx" in wanted:
        weight, shape = _weight(w, QuantizedWeight, grad)
        if isinstance(w, QuantizedWeight):
            check_fields(w, "w")
            if w.config != settings:
                raise ValueError(f"w: quantised with {w.config}; expected {settings}")
        if shape[0] != out_features:
            raise ValueError(f"w: shape {shape}; gy has {out_features} out features")
        if saved is not None and shape[1] != in_features:
            raise ValueError(f"w: shape {shape}; x has {in_features} in features")
        in_features = shape[1]

    outputs = {"gx": None, "gw": gw_out, "gb": gb_out}
    if accumulate and wanted == {"gx"}:
        raise ValueError("accumulate: requires 'gw' or 'gb' in need")
    dtype = grad.dtype if out_dtype is None else grad.float_dtype(out_dtype, "out_dtype")
    shapes = {
        "gx": (*grad.shape[:-1], in_features),
        "gw": (out_features, in_features),
        "gb": (out_features,),
    }
    targets: dict[str, Operand] = {}
    for name, array in outputs.items():
        if array is not None:
            if name not in wanted:
                raise ValueError(f"{name}_out: requires {name!r} in need")
            targets[name] = output(array, f"{name}_out", grad)
        elif name in wanted:
            if accumulate and name != "gx":
                raise ValueError(f"accumulate: requires {name}_out")
            targets[name] = grad.empty(shapes[name], dtype)
    gx, gw, gb = (targets[name].dlpack if name in targets else None for name in outputs)
    x_bytes = _bytes(saved.data, "saved_or_x", grad) if saved and "gw" in wanted else None
    sizes = (tokens, out_features, in_features, settings.spec, "gx" in wanted, "gw" in wanted)
    workspace = grad.workspace(_core.backward_linear_workspace, *sizes)
    with _renaming(gw="gw_out", gb="gb_out", quantized_weight="w"):
        _core.backward_linear(
            grad.context(),
            grad.dlpack,
            weight.dlpack if weight and not quantized else None,
            x_bytes.dlpack if x_bytes else None,
            tokens,
            in_features,
            saved.key if saved else full_key,
            settings.spec,
            full_key,
            gx,
            gw,
            gb,
            accumulate,
            workspace,
            weight.dlpack if weight and quantized else None,
        )
    return Gradients(
        *(_result(grad, targets[n], outputs[n]) if n in targets else None for n in outputs)
    )


def supported(
    tokens: int,
    out_features: int,
    in_features: int,
    config: ConfigLike | None = None,
    device: Any = "cpu",
) -> tuple[bool, str]:
    """Whether this build and device can run a layer's products, and the reason if they cannot.

    The backward products count, and with ``forward="int8"`` the forward product. On CUDA the build
    must have kernels for that GPU.

    Args:
        tokens: L, rows of x.
        out_features: O.
        in_features: I.
        config: a :class:`HotConfig` or a recipe's name; None: ``HotConfig()``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a torch device.

    Returns:
        ``(True, "")``, or False and the reason.
    """
    settings = HotConfig() if config is None else as_config(config)
    where, _, index = str(device).partition(":")
    if where not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:<number>', got {device!r}")
    check_ints(64, tokens=tokens, out_features=out_features, in_features=in_features)
    number = as_int(int(index or 0), "device")
    try:
        context = contexts.cpu() if where == "cpu" else contexts.cuda(number, 0)
    except (RuntimeError, ValueError) as error:  # ValueError: no such device
        return False, str(error)
    sizes = (tokens, out_features, in_features)
    runs, why = _core.supported(context, *sizes, settings.spec)
    if runs and settings.forward == "int8":
        runs, why = _core.forward_supported(context, *sizes, settings.forward_spec)
    return runs, why


@contextlib.contextmanager
def _renaming(**names: str) -> Iterator[None]:
    """Replace names of arguments in errors: libhot's by Python's, or a field's by the caller's."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise type(error)(text) from None


def _result(source: Operand, target: Operand, out: Array | None = None) -> Array:
    """Return the caller's ``out``, or else a new array of the caller's framework."""
    if out is None:
        return source.kind.result(target.array)
    target.kind.written(out)
    return out


def _matrix(array: Operand, at_least: bool = False) -> Operand:
    """Refuse an array without 2 dimensions, or without 2 to 4. Raises ValueError."""
    if not 2 <= len(array.shape) <= (4 if at_least else 2):
        expected = "2 to 4 dimensions" if at_least else "2 dimensions"
        raise ValueError(f"{array.name}: shape {array.shape}; expected {expected}")
    return array


def _codes_of(codes: Any, kind: type[Any], name: str) -> Operand:
    """Read the codes of an argument that is nothing else. Raises TypeError, ValueError."""
    if not isinstance(codes, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {type(codes).__name__}")
    check_fields(codes, name)
    return operand(codes.data, f"{name}.data", ("uint8",))


def _weight(
    w: Any, coded: type[QuantizedWeight | QuantizedForwardWeight], like: Operand
) -> tuple[Operand, tuple[int, ...]]:
    """Return a weight or its codes, and its shape ``[O, I]``."""
    if isinstance(w, coded):
        return _bytes(w.data, "w", like), (w.out_features, w.in_features)
    weight = _matrix(operand(w, "w"))
    return weight, weight.shape


def _bytes(data: Array, name: str, like: Operand) -> Operand:
    """Read the codes of an argument, and check their device, which libhot does not see."""
    codes = operand(data, f"{name}.data", ("uint8",))
    if codes.device != like.device:
        raise ValueError(f"{name}: on another device than {like.name}")
    return codes


def _columns(packed: Operand, columns: int | None) -> int:
    if columns is None:
        return 2 * packed.shape[1]
    columns = as_int(columns, "columns", 64)
    if columns < 0 or (columns + 1) // 2 != packed.shape[1]:
        raise ValueError(
            f"columns: {columns} values do not fill the {packed.shape[1]} bytes of a row of "
            f"{packed.name}"
        )
    return columns


def _gemm(
    product: Any,
    operands: tuple[Array, Array, Array | None, Array | None],
    k: int | None,
    divisor: int,
    out_dtype: Any,
    out: Array | None,
    accumulate: bool,
) -> Array:
    packed = product is _core.gemm_int4
    a, b, a_scale, b_scale = operands
    dtypes = ("uint8",) if packed else ("int8",)
    left, right = _matrix(operand(a, "a", dtypes)), _matrix(operand(b, "b", dtypes))
    check_ints(divisor=divisor)
    check_type(bool, accumulate=accumulate)
    depth = left.shape[1] * (2 if packed else 1) if k is None else k
    check_ints(64, k=depth)
    scales = {"a_scale": a_scale, "b_scale": b_scale}
    missing = [name for name, scale in scales.items() if scale is None]
    if len(missing) == 1:
        raise ValueError(f"{missing[0]}: missing; give both scales or none")
    shape = (left.shape[0], right.shape[0])
    if out is not None:
        target = output(out, "out", left, ("int32",) if missing else FLOATS)
    elif accumulate:
        raise ValueError("accumulate: requires out")
    else:
        dtype = "int32" if missing else left.float_dtype(out_dtype, "out_dtype")
        target = left.empty(shape, dtype)
    product(
        left.context(),
        left.dlpack,
        right.dlpack,
        *((depth,) if packed else ()),
        *(
            None if missing else operand(scale, name, ("float32",)).dlpack
            for name, scale in scales.items()
        ),
        divisor,
        accumulate,
        target.dlpack,
        left.workspace(_core.gemm_workspace, *shape, depth),
    )
    return _result(left, target, out)
