"""Make the golden vectors in this folder: from ``tests/reference.py`` alone, no build needed.

    python tests/golden/make_golden.py            # writes <stage>.txt
    python tests/golden/make_golden.py --check    # compares with the files, exit status 1 if not

A file holds the cases of a stage, for Python (``load`` below) and C++ (tests/cpp/golden.h), in
words that blanks and line ends separate (``std::ifstream >> word``):

    case <name>                                         the lines below belong to it
    param <name> <count> <value>...                     decimal integers or names
    array <name> <dtype> <ndim> <size>... <hex>         row-major

``<dtype>`` is f32, f16, bf16, i8, u8, i32 or u32; ``<hex>`` is one word: the bit patterns of the
elements, 8, 4 or 2 hexadecimal digits each (most significant digit first), nothing between them,
``-`` where there are none. The first line is a comment, which starts with ``#``.

Everything is compared bit for bit, with any NaN equal to any other, except ``gb``, which has a
bound (docs/numerics.md). A param ``input`` names the case that holds the arrays not found in a case
itself. What params and arrays mean stands beside each stage below.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
REFERENCE = FOLDER.parent / "reference.py"

Case = dict[str, Any]
Cases = dict[str, Case]


def load_reference() -> ModuleType:
    """``tests/reference.py``, which needs neither the package nor its extension."""
    name = "hotcore_reference_source"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REFERENCE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


ref = load_reference()
f32 = np.float32
KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210, 4711)  # every counter and key word in use
SKETCH_KEY = (77, 1 << 40, 3)


# ------------------------------------------------------------------------------------------- Inputs


def bell(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Bell-shaped float32 values, |v| < 4, with full mantissas; the same with any NumPy."""
    count = int(np.prod(shape))
    words = ref.random_words(np.arange(count), (seed, 0, 0), 7).astype(np.int64)
    return ((words.sum(axis=1) - (1 << 33)).astype(f32) * f32(2.0**-31)).reshape(shape)


def awkward(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bell-shaped values with an outlier, a zero row, ties, and rows of very different size."""
    x = bell(shape, seed)
    x[0, 1] = 150
    x[1] = 0
    x[2] = np.rint(x[2] * 8) / 2
    x[2, 0] = 127  # scale 1: the halves stay ties
    x[3] *= f32(2.0**-30)
    x[4] *= f32(2.0**40)
    return x


def layer_input(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bell-shaped values, rows up to 16 times apart in size, an outlier and a zero row."""
    x = bell(shape, seed) * np.exp2(np.arange(shape[0]) % 5).astype(f32)[:, None]
    x[7, 1] = 90
    x[9] = 0
    return x


def special(shape: tuple[int, int], seed: int) -> np.ndarray:
    """``awkward`` with NaN, Inf and values about 2**-100, each in a row and column of its own."""
    x = awkward(shape, seed)
    x[5, 3] = np.nan
    x[6, 4] = -np.inf
    x[6, 5] = np.nan
    x[7] *= f32(2.0**-104)
    x[8] = 0
    x[8, 6] = f32(2.0**-100)  # the smallest amax that has a scale
    x[9] = 0
    x[9, 7] = np.nextafter(f32(2.0**-100), f32(0))
    return x


# ------------------------------------------------------------------------------------------- Stages


def random_stage() -> Cases:
    """philox: words = philox4x32(counter, key). bytes_*: bytes = random_bytes(rows, cols, ...)."""
    counter = np.array(
        [[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32
    )
    key = np.array([[0] * 2, [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]], np.uint32)
    cases: Cases = {
        "philox": {"counter": counter, "key": key, "words": ref.philox4x32(counter, key)}
    }
    blocks = np.array([0, 1, 2**32 - 1, 2**32 + 5, 2**48 - 1])
    cases["blocks"] = {  # words of large block numbers, low word first
        "key": KEY,
        "purpose": 6,
        "block": np.stack([blocks & 0xFFFFFFFF, blocks >> 32], axis=1).astype(np.uint32),
        "words": ref.random_words(blocks, KEY, 6),
    }
    for name, rows, cols, key3, purpose in (
        ("zero", 2, 16, (0, 0, 0), 0),
        ("odd", 3, 37, KEY, 4),
        ("last_stream", 2, 5, (1, 2, 8191), 5),
    ):
        cases[f"bytes_{name}"] = {
            "key": key3,
            "purpose": purpose,
            "bytes": ref.random_bytes(rows, cols, key3, purpose),
        }
    return cases


def hadamard_stage() -> Cases:
    """out = fwht(x, axis, block), rounded to out's dtype."""
    cases: Cases = {
        "golden": {"x": np.arange(1, 17, dtype=f32), "axis": -1, "block": 16},
        "last_axis": {"x": bell((3, 48), 1), "axis": -1, "block": 16},
        "first_axis": {"x": bell((32, 5), 2), "axis": 0, "block": 16},
        "middle_axis": {"x": bell((2, 8, 3), 3), "axis": 1, "block": 4},
        "identity": {"x": bell((2, 3), 4), "axis": 1, "block": 1},
        "pairs": {"x": bell((2, 6), 5), "axis": 1, "block": 2},
        "block_128": {"x": bell((256,), 6), "axis": 0, "block": 128},
        "half": {"x": bell((2, 64), 7).astype(np.float16), "axis": 1, "block": 64},
        "special": {"x": special((10, 16), 8), "axis": 1, "block": 16},
    }
    for case in cases.values():
        case["out"] = ref.fwht(case["x"], axis=case["axis"], block=case["block"])
    x = ref.round_bf16(bell((3, 32), 9))
    cases["bf16"] = {"x": ref.bf16_bits(x), "axis": 1, "block": 32}
    cases["bf16"]["out"] = ref.bf16_bits(ref.fwht(x, block=32, out_dtype="bfloat16"))
    # Ties, their neighbours, and what overflows, of either 16-bit type.
    words = (0x3F808000, 0x3F818000, 0x3F808001, 0xBF80FFFF, 0x7F7F8000, 0x7F7F7FFF, 0x00008000)
    words += (0x3F801000, 0x3F803000, 0x3F801001, 0xC77FF000, 0x477FEFFF, 0x33000000, 0x387FF000)
    for dtype in ("float16", "bfloat16"):
        x = np.array(words, np.uint32).view(f32)
        out = typed(ref.fwht(x, block=1, out_dtype=dtype), dtype)
        cases[f"ties_{dtype}"] = {"x": x, "axis": 0, "block": 1, "out": out}
    return cases


def lowrank_stage() -> Cases:
    """order_*: basis_order. Others: out = hla(x, ...) in fp32; rows empty, token_grid 0 0: none."""
    cases: Cases = {}
    for basis in ("lowpass", "sequency"):
        for block in (2, 4, 8, 16, 32, 64):
            order = ref.basis_order(basis, block)
            cases[f"order_{basis}_{block}"] = {"basis": basis, "block": block, "order": order}
    cases["flat_37"] = {"x": awkward((37, 3), 11)}
    cases["grid_14x14_1"] = {"x": bell((2 * 197, 1), 12)}  # tiles leave 2 rows and 2 columns over
    cases["grid_5x7_2"] = {"x": bell((3 * 37, 2), 13)}
    flat: Case = {}
    vit: Case = {"token_grid": (14, 14), "prefix_tokens": 1}
    small: Case = {"token_grid": (5, 7), "prefix_tokens": 2}
    for name, source, options in (
        ("full", "flat_37", {"basis": "full", **flat}),
        ("full_ignores_layout", "flat_37", {"basis": "full", "token_grid": (14, 14)}),
        ("lowpass_1", "flat_37", {"basis": "lowpass", "rank": 1}),
        ("lowpass_8", "flat_37", {"basis": "lowpass", "rank": 8}),
        ("lowpass_16", "flat_37", {"basis": "lowpass", "rank": 16}),
        ("lowpass_rows", "flat_37", {"basis": "lowpass", "rows": (12, 0, 3, 10, 8)}),
        ("lowpass_block_8", "flat_37", {"basis": "lowpass", "rank": 3, "block": 8}),
        ("lowpass_grid", "grid_14x14_1", {"basis": "lowpass", "rank": 8, **vit}),
        ("lowpass_small_grid", "grid_5x7_2", {"basis": "lowpass", "rank": 4, "block": 8, **small}),
        ("sequency_4", "flat_37", {"basis": "sequency", "rank": 4}),
        ("sequency_block_64", "flat_37", {"basis": "sequency", "rank": 5, "block": 64}),
        ("sequency_grid", "grid_5x7_2", {"basis": "sequency", "rank": 2, "block": 16, **small}),
        ("sketch_8", "flat_37", {"basis": "sketch", "rank": 8}),
        ("sketch_2", "flat_37", {"basis": "sketch", "rank": 2}),
        ("sketch_16", "flat_37", {"basis": "sketch", "rank": 16}),
        ("sketch_block_64", "grid_5x7_2", {"basis": "sketch", "rank": 4, "block": 64}),
        ("sketch_grid", "grid_14x14_1", {"basis": "sketch", "rank": 8, **vit}),
        ("sketch_small_grid", "grid_5x7_2", {"basis": "sketch", "rank": 4, "block": 8, **small}),
    ):
        for side in ("activation", "gradient"):
            if side == "gradient" and "sketch" not in name and "grid" not in name:
                continue  # the same as the other side
            spec = {"rank": 16, "block": 16, "rows": (), "token_grid": (0, 0), "prefix_tokens": 0}
            case: Case = {"input": source, **spec, **options, "side": side, "key": SKETCH_KEY}
            call = {k: v for k, v in case.items() if k != "input"}
            call["rows"] = call["rows"] or None
            call["token_grid"] = call["token_grid"] if any(call["token_grid"]) else None
            cases[f"{name}_{side}"] = {**case, "out": ref.hla(cases[source]["x"], **call)}
    return cases


def quantize_stage() -> Cases:
    """codes, scale = quantize(x, bits, scale_of, rounding, key); value = codes * scale."""
    cases: Cases = {"finite": {"x": awkward((5, 37), 21)}, "special": {"x": special((10, 21), 22)}}
    inputs = tuple(cases)
    for bits in (4, 8):
        # Scale 1, fractions just where the random byte decides, one float above and one below.
        limit = f32(2 ** (bits - 1) - 1)
        x = (2 * ref.random_bytes(3, 21, KEY, 0).astype(f32) + 1) / f32(512) + f32(2)
        x[1], x[2] = np.nextafter(x[1], limit), np.nextafter(x[2], f32(0))
        x[:, 0] = limit
        x[:, 1::2] *= -1
        codes, scales = ref.quantize(x, bits=bits, key=KEY)
        cases[f"edges_{bits}"] = {"x": x, "bits": bits, "scale_of": "token", "key": KEY}
        cases[f"edges_{bits}"] |= {"rounding": "stochastic", "codes": codes, "scale": scales}
    for bits in (4, 8):
        for rounding in ("nearest", "stochastic", "pseudo_stochastic"):
            for scale in ("token", "channel", "tensor"):
                for source in ("finite",) if rounding == "pseudo_stochastic" else inputs:
                    codes, scales = ref.quantize(
                        cases[source]["x"], bits=bits, scale=scale, rounding=rounding, key=KEY
                    )
                    case = {"input": source, "bits": bits, "scale_of": scale, "rounding": rounding}
                    case |= {"key": KEY, "codes": codes, "scale": scales}
                    if rounding == "nearest" and bits == 8 and source == "finite":
                        case["value"] = ref.dequantize(codes, scales, granularity=scale)
                    if bits == 4 and rounding == "stochastic" and scale == "token":
                        case["packed"] = ref.pack_int4(codes)
                    cases[f"{source}_{bits}_{scale}_{rounding}"] = case
    return cases


def pack_stage() -> Cases:
    """packed = pack_int4(codes)."""
    every = np.arange(-8, 8, dtype=np.int8)
    cases: Cases = {
        "every_pair": {"codes": np.stack([np.repeat(every, 16), np.tile(every, 16)], axis=1)},
        "odd": {"codes": np.resize(every, (3, 7))},
        "wide": {"codes": np.array([[127, -128, 8, -9]], np.int8)},
        "one": {"codes": np.array([[-1], [5]], np.int8)},
        "empty": {"codes": np.zeros((2, 0), np.int8)},
    }
    for case in cases.values():
        case["packed"] = ref.pack_int4(case["codes"])
    return cases


def gemm_stage() -> Cases:
    """out = gemm(a, b, a_scale, b_scale, divisor), c added where there is one; or the bare sums.

    a and b are packed (and the param k given) for int4_*.
    """
    size, k = (7, 9), 37

    def random_codes(rows: int, limit: int, purpose: int) -> np.ndarray:
        u = ref.random_bytes(rows, k, KEY, purpose).astype(np.int64)
        return (u * (2 * limit + 1) // 256 - limit).astype(np.int8)

    a, b = random_codes(size[0], 127, 0), random_codes(size[1], 127, 1)
    a_scale, b_scale = abs(bell((7,), 31)), abs(bell((9,), 32)) * f32(1e-3)
    shared = {"a_scale": a_scale, "b_scale": b_scale}
    cases: Cases = {"int8": {"a": a, "b": b, "sums": ref.gemm_int8(a, b), **shared}}
    a4, b4 = (ref.pack_int4(random_codes(rows, 7, 2 + i)) for i, rows in enumerate(size))
    cases["int4"] = {"a": a4, "b": b4, "k": k, "sums": ref.gemm_int4(a4, b4, k=k), **shared}
    with_nan = a_scale.copy()
    with_nan[2] = np.nan
    c = bell(size, 33)
    for name, left, right, divisor, dtype, add in (
        ("vectors", a_scale, b_scale, 16, "float32", False),
        ("scalars", a_scale[:1], b_scale[:1], 1, "float32", False),
        ("nan", with_nan, b_scale, 2, "float32", False),
        ("half", a_scale, b_scale, 64, "float16", False),
        ("bf16", a_scale, b_scale[:1], 16, "bfloat16", False),
        ("added", a_scale, b_scale, 16, "float32", True),
        ("added_half", a_scale, b_scale, 64, "float16", True),
        ("added_bf16", a_scale, b_scale, 16, "bfloat16", True),
    ):
        before = c.astype(np.float16) if dtype == "float16" else c
        before = ref.round_bf16(c) if dtype == "bfloat16" else before
        extra = {"out": before, "accumulate": True} if add else {}
        scales = {"a_scale": left, "b_scale": right}
        own = {part: value for part, value in scales.items() if value is not shared[part]}
        for kind, call in (("int8", ref.gemm_int8), ("int4", ref.gemm_int4)):
            operands = [cases[kind]["a"], cases[kind]["b"]]
            given: Case = {"divisor": divisor} | ({"k": k} if kind == "int4" else {})
            out = call(*operands, **scales, **given, out_dtype=dtype, **extra)
            case = {"input": kind, **given, **own}
            if add:
                case["c"] = typed(before, dtype)
            cases[f"{kind}_{name}"] = {**case, "out": typed(out, dtype)}
    return cases


def compress_activation_stage() -> Cases:
    """A Saved: int8: codes [I, Kp], scale. Others: packed, scale (bf16 bits), and what backward
    makes of them with the param key: codes8 [I, Kp], scale8. Where tokens are equalised: exponents.
    """
    cases: Cases = {f"x_{n}": {"x": special((10, n), 40 + n).T} for n in (21, 37, 70)}
    cases["x_197"] = {"x": layer_input((197, 3), 44).astype(np.float16)}
    grid = {"token_grid": (14, 14), "prefix_tokens": 1}
    layout = {"token_grid": (5, 7), "prefix_tokens": 2}
    for name, source, config in (
        ("int8_full_21", "x_21", ref.recipe("accurate")),
        ("int8_full_tensor_197", "x_197", ref.recipe("accurate", gw_scale="tensor")),
        ("int8_paper_197", "x_197", ref.recipe("paper")),
        ("int8_lowpass_37", "x_37", ref.recipe("fast", basis="lowpass", rank=3, block=8, **layout)),
        ("int8_lowpass_197", "x_197", ref.recipe("fast", basis="lowpass", **grid)),
        ("int8_sequency_37", "x_37", ref.recipe("fast", basis="sequency")),
        ("int8_sketch_21", "x_21", ref.recipe("fast")),
        ("int8_sketch_197", "x_197", ref.recipe("fast", rank=4, **grid)),
        ("int4_21", "x_21", ref.recipe("default")),
        ("int4_37", "x_37", ref.recipe("default")),
        ("int4_70", "x_70", ref.recipe("default")),
        ("int4_197", "x_197", ref.recipe("default")),
        ("int8_equalized_21", "x_21", ref.recipe("accurate", equalize_tokens=True)),
        ("int4_equalized_37", "x_37", ref.recipe("default", equalize_tokens=True)),
    ):
        saved = ref.compress_activation(cases[source]["x"], config, key=KEY)
        case = {"input": source, "key": KEY, **config_params(config), "scale": saved.scales}
        if saved.packed is None:
            case["codes"] = saved.codes
        else:
            case["packed"] = saved.packed
            case["codes8"], case["scale8"] = ref.requantize(saved)
        if saved.exponents is not None:
            case["exponents"] = saved.exponents
        cases[name] = case
    return cases


def backward_linear_stage() -> Cases:
    """gx, gw, gb of (gy, w, x): x compressed with the param saved_key, backward with key.

    The param need says which. Also the integers on the way: gx_a, gx_b (and _scale) are the
    operands of g_x, gw_a, gw_b those of g_w. gw_before and gb_before, where given, are accumulated
    into.
    """
    cases: Cases = {}
    for tokens, outs, ins in ((21, 18, 7), (37, 19, 5), (197, 3, 2)):
        scale = f32(2.0**-9)
        cases[f"layer_{tokens}"] = {
            "gy": layer_input((tokens, outs), 50 + tokens) * scale,
            "w": bell((outs, ins), 51 + tokens),
            "x": layer_input((tokens, ins), 52 + tokens),
        }
    cases["layer_197"] = {k: v.astype(np.float16) for k, v in cases["layer_197"].items()}
    broken = {"gy": bell((17, 6), 57), "w": bell((6, 5), 58), "x": bell((17, 5), 59)}
    broken["gy"][5, 3] = np.inf
    broken["w"][4, 2] = np.nan
    broken["x"][6, 1] = -np.inf
    cases["layer_broken"] = broken
    grid = {"token_grid": (14, 14), "prefix_tokens": 1}
    pseudo = {f"{name}_rounding": "pseudo_stochastic" for name in ("gx", "gw")}
    every, weight = ("gx", "gw", "gb"), ("gw", "gb")
    equalized = ref.recipe("default", equalize_tokens=True)
    for name, source, config, need, dtype in (
        ("default_21", "layer_21", ref.recipe("default"), every, "float32"),
        ("fast_37", "layer_37", ref.recipe("fast"), every, "float32"),
        ("int4_21", "layer_21", ref.recipe("default", gx_bits=4), ("gx",), "float32"),
        ("paper_37", "layer_37", ref.recipe("paper"), every, "float32"),
        ("accurate_37", "layer_37", ref.recipe("accurate"), weight, "float32"),
        ("default_197", "layer_197", ref.recipe("default"), every, "float32"),
        ("fast_grid_197", "layer_197", ref.recipe("fast", **grid), weight, "float32"),
        ("paper_grid_197", "layer_197", ref.recipe("paper", **grid, **pseudo), weight, "float32"),
        ("token_37", "layer_37", ref.recipe("default", gw_scale="token"), weight, "float32"),
        ("token_21", "layer_21", ref.recipe("fast", gw_scale="token"), weight, "float32"),
        ("block_32_21", "layer_21", ref.recipe("fast", hadamard_block=32), every, "float16"),
        ("block_1_37", "layer_37", ref.recipe("accurate", hadamard_block=1), every, "bfloat16"),
        ("broken", "layer_broken", ref.recipe("default"), every, "float32"),
        ("broken_fast", "layer_broken", ref.recipe("fast"), every, "float32"),
        ("fast_equal_21", "layer_21", ref.recipe("fast", equalize_tokens=True), weight, "float32"),
        ("broken_equal", "layer_broken", equalized, every, "float32"),
    ):
        gy, w, _ = layer = [cases[source][part] for part in ("gy", "w", "x")]
        before = 60 if name in ("token_37", "block_32_21", "block_1_37") else None
        saved, case, grads = backward_case(layer, config, need, dtype, before)
        if "gx" in need:
            case["gx_a"], case["gx_a_scale"] = ref.quantize_gradient_rows(gy, config, KEY)
            case["gx_b"], case["gx_b_scale"] = ref.quantize_weight(w, config)
        if "gw" in need:
            case["gw_a"], case["gw_a_scale"] = ref.quantize_gradient_columns(
                gy, config, KEY, SKETCH_KEY, saved.exponents
            )
            right = ref.requantize(saved, KEY) if saved.packed is not None else None
            case["gw_b"], case["gw_b_scale"] = right or (saved.codes, saved.scales)
        cases[name] = {"input": source, **case, **grads}
    return cases


def backward_case(
    layer: Sequence[np.ndarray],
    config: Any,
    need: tuple[str, ...],
    dtype: str,
    before_seed: int | None,
    **options: bool,
) -> tuple[Any, Case, Case]:
    """x of ``layer``, which is gy, w and x, as it is kept; the params, and the gradients needed.

    They are added to gw_before and gb_before where these have a seed. ``options``: params that
    ``ref.backward_linear`` takes.
    """
    gy, w, x = layer
    saved = ref.compress_activation(x, config, key=SKETCH_KEY)
    before: Case = {}
    if before_seed is not None:
        before = {
            "gw_out": bell((gy.shape[1], x.shape[1]), before_seed),
            "gb_out": bell(gy.shape[1:], before_seed + 1),
        }
        before = {k: rounded(v, dtype) for k, v in before.items()}
    grads = ref.backward_linear(
        gy, w, saved, config=config, need=need, key=KEY, out_dtype=dtype,
        accumulate=bool(before), **options, **before,
    )  # fmt: skip
    case = {"saved_key": SKETCH_KEY, "key": KEY, "need": need}
    case |= {**{name: int(given) for name, given in options.items()}, **config_params(config)}
    case |= {key.replace("out", "before"): typed(value, dtype) for key, value in before.items()}
    return saved, case, {part: typed(getattr(grads, part), dtype) for part in need}


def forward_linear_stage() -> Cases:
    """y = x w^T + bias in INT8: codes and scales of both operands, y; no bias where there is none.

    ``forward_block`` is the block of the transform along I.
    """
    arrays = {
        "values": (layer_input((10, 37), 61), bell((7, 37), 62)),
        "special": (special((10, 37), 63), special((10, 37), 64)),
    }
    cases: Cases = {}
    for name, kind, block, dtype, biased in (
        ("values", "values", 1, "float32", True),
        ("block_16", "values", 16, "float16", True),
        ("block_64", "values", 64, "bfloat16", True),
        ("block_256", "values", 256, "float32", False),
        ("special", "special", 64, "float32", True),
    ):
        x, w = arrays[kind]
        config = ref.Config(forward_block=block)
        case: Case = {"forward_block": block}
        shared = kind in cases and biased  # with its bias
        case |= {"input": kind} if shared else {"x": x, "w": w}
        for which, operand in (("x", x), ("w", w)):
            codes, scale = ref.quantize_forward_operand(operand, block)
            case |= {f"{which}_codes": codes, f"{which}_scale": scale}
        if biased:
            case["bias"] = bell((w.shape[0],), 65)
        y = ref.forward_linear(x, w, case.get("bias"), config=config, out_dtype=dtype)
        cases[name] = case | {"y": typed(y, dtype)}
    return cases


def config_params(config: Any) -> Case:
    """A configuration's fields, without the forward's; no rows are (), no token_grid is 0 0."""
    fields = {k: v for k, v in dataclasses.asdict(config).items() if not k.startswith("forward")}
    fields["equalize_tokens"] = int(fields["equalize_tokens"])
    return {**fields, "rows": fields["rows"] or (), "token_grid": fields["token_grid"] or (0, 0)}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values in ``dtype``, as the reference has it."""
    return ref.round_bf16(values) if dtype == "bfloat16" else values.astype(dtype)


def typed(values: np.ndarray, dtype: str) -> np.ndarray:
    """A result of the reference as it is stored: bfloat16 as its bits."""
    return ref.bf16_bits(values) if dtype == "bfloat16" else values


STAGES: dict[str, Callable[[], Cases]] = {
    "random": random_stage,
    "hadamard": hadamard_stage,
    "lowrank": lowrank_stage,
    "quantize": quantize_stage,
    "pack": pack_stage,
    "gemm": gemm_stage,
    "compress_activation": compress_activation_stage,
    "backward_linear": backward_linear_stage,
    "forward_linear": forward_linear_stage,
}

# -------------------------------------------------------------------------------------------- Files

DTYPES = {
    "float32": "f32",
    "float16": "f16",
    "uint16": "bf16",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "uint32": "u32",
}
SEQUENCES = ("key", "saved_key", "need", "order", "rows", "token_grid")
"""Params of several values, or of one that counts as several."""


def is_array(value: Any) -> bool:
    """Whether a value of a case is an array (else a param)."""
    return isinstance(value, np.ndarray) and value.dtype.name in DTYPES


def canonical(value: np.ndarray) -> np.ndarray:
    """The array in C order, with one bit pattern for NaN (its sign differs between machines)."""
    value = np.array(value, order="C")
    if value.dtype.kind == "f":
        value[np.isnan(value)] = np.nan
    return value


def load(stage: str) -> Cases:
    """The cases of a stage's file; bf16 is uint16."""
    words = iter((FOLDER / f"{stage}.txt").read_text(encoding="ascii").split("\n", 1)[1].split())
    dtypes = {short: np.dtype(name) for name, short in DTYPES.items()}
    cases: Cases = {}
    case: Case = {}
    for kind in words:
        name = next(words)
        if kind == "case":
            case = cases[name] = {}
        elif kind == "param":
            values = [next(words) for _ in range(int(next(words)))]
            read = [int(v) if v.lstrip("-").isdigit() else v for v in values]
            case[name] = read if name in SEQUENCES else read[0]
        else:
            dtype = dtypes[next(words)]
            shape = tuple(int(next(words)) for _ in range(int(next(words))))
            raw = bytes.fromhex(next(words).replace("-", ""))
            case[name] = np.frombuffer(raw, dtype.newbyteorder(">")).reshape(shape).astype(dtype)
    return cases


def text(stage: str, cases: Cases) -> str:
    """The ``.txt`` of a stage."""
    lines = [f"# Golden vectors of {stage}; made by make_golden.py, which says how to read them."]
    for case, content in cases.items():
        lines.append(f"case {case}")
        for name, value in content.items():
            if is_array(value):
                raw = canonical(value).astype(value.dtype.newbyteorder(">")).tobytes()
                words = [DTYPES[value.dtype.name], value.ndim, *value.shape, raw.hex() or "-"]
                lines.append(" ".join(map(str, ["array", name, *words])))
            else:
                values = value if isinstance(value, list | tuple) else [value]
                lines.append(" ".join(map(str, ["param", name, len(values), *values])))
    return "\n".join(lines) + "\n"


def differences(stage: str, cases: Cases) -> list[str]:
    """Names of the cases that are others than the file's; empty when all is equal."""
    wanted, found = text(stage, cases), (FOLDER / f"{stage}.txt").read_text(encoding="ascii")
    if wanted == found:
        return []
    other = set(wanted.split("\ncase ")) ^ set(found.split("\ncase "))
    return sorted({case.split("\n")[0] for case in other}) or ["their order"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or check the golden vectors.")
    parser.add_argument(
        "--check", action="store_true", help="compare with the files, write nothing"
    )
    options = parser.parse_args()
    status = 0
    for stage, make in STAGES.items():
        cases = make()
        if options.check:
            wrong = differences(stage, cases)
            status |= bool(wrong)
            print(f"{stage}: {'differs: ' + ', '.join(wrong) if wrong else 'equal'}")
            continue
        size = (FOLDER / f"{stage}.txt").write_text(text(stage, cases), encoding="ascii")
        print(f"{stage}: {len(cases)} cases, {size} bytes")
    return status


if __name__ == "__main__":
    sys.exit(main())
