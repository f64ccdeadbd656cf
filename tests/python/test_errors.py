"""Bad input: every case is a clear error that names the argument, and nothing is written.

``tests/errors.txt`` has the cases that C++, C and Python share.
"""

import ctypes
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hotcore
import numpy as np
import pytest
from c_api import CONSTANTS, CApi, HotError, aligned, make, tensor
from hotcore import HotConfig, Key, _core
from hotcore.config import RECIPES
from support import read_only, refused, swapped, torch, unaligned


class Case(NamedTuple):
    call: Callable[[], object]
    says: str
    error: type[Exception] = ValueError


F = np.float32
X = np.ones((32, 16), F)
W = np.ones((24, 16), F)
GY = np.ones((32, 24), F)
Q = np.ones((4, 16), np.int8)
P = np.ones((4, 8), np.uint8)
ONE = np.ones(1, F)

TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i32": "int32"}
TABLE = (Path(__file__).resolve().parents[1] / "errors.txt").read_text()


def table() -> Iterator[tuple[str, str, str, str]]:
    """Yield the call, its good arguments, the changes of a row, and the rest of the row."""
    name = good = ""
    for line in TABLE.splitlines():
        if line.startswith("["):
            name, good = line[1:].split("] ")
            yield name, good, "", ""
        elif line and not line.startswith("#"):
            broken, _, says = line.partition(" | ")
            yield name, good, broken, says


def arguments(words: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words.removeprefix("* ").split():
        name, value = word.split("=")
        shape = re.fullmatch(r"(\w+)\((.*)\)", value)
        if shape:
            sizes = tuple(map(int, shape[2].split(",")))
            packed = shape[1] == "i4x2"
            values[name] = np.full(sizes, 60, np.uint8 if packed else TYPES[shape[1]])
        else:
            values[name] = value if name.startswith("spec.") or "." in name else int(value)
    return values


def call_c(api: CApi, name: str, good: str, broken: str) -> None:
    operands = arguments(good)
    spec = api.spec("default")

    def set_spec(field: str, text: str) -> None:
        api.call("hot_spec_set", spec, field.removeprefix("spec.").encode(), text.encode())

    for field in [field for field in operands if field.startswith("spec.")]:
        set_spec(field, operands.pop(field))
    rows, width = operands.get("tokens", 20), operands.get("in_features", 12)
    saved, layout = make("hot_saved"), make("hot_saved_layout")
    api.call("hot_saved_layout_of", rows, width, spec, layout)
    room = {"saved": aligned(layout.bytes), "workspace": aligned(1 << 14)}
    _, kept = api.compress_activation(np.ones((rows, width), np.float32), spec)
    operands.setdefault("format", kept.format)
    forward = api.forward_spec(operands.get("block", 16))
    _, made, _, _ = api.quantize_forward_input(np.ones((1, 1), np.float32), forward)
    operands.setdefault("input_format", made.format)
    int4, weight = make("hot_weight"), make("hot_weight")
    if "group" in operands:
        codes, one = aligned(operands["block"] * 34), operands["block"] * 2
        arguments_of_int4 = tensor(np.ones((1, one), np.float32)), None, forward, operands["group"]
        count = api.number("hot_weight_int4_bytes", 1, one, forward, operands["group"])
        api.on("hot_quantize_weight_int4", *arguments_of_int4, codes.ctypes.data, count, int4)
        operands.setdefault("int4_format", int4.format)
    arrays = {n: v for n, v in operands.items() if isinstance(v, np.ndarray)} | room
    memory = aligned(len(arrays) << 16)  # each array has its own part, as in test_errors.cpp
    for part, (array, values) in zip(memory.reshape(-1, 1 << 16), arrays.items(), strict=True):
        arrays[array] = part[: values.nbytes].view(values.dtype).reshape(values.shape)
        arrays[array][...] = values
    views = {n: tensor(v.view(np.int8) if n in room else v) for n, v in arrays.items()}
    for change, value in arguments(broken).items():
        array, _, part = change.partition(".")
        if array == "spec":
            set_spec(part, value)
        elif not part:
            operands[change] = value
        elif part == "dtype":
            views[array].dtype = CONSTANTS[f"HOT_{value.upper()}"]
        elif part == "device":
            views[array].device_type, views[array].device_index = 1, int(value)
        elif part == "ndim":
            views[array].ndim = int(value)
        elif part == "data":
            other, _, more = value.partition("+")
            place = None if value == "null" else views[other or array].data + int(more or 0)
            views[array].data = place
        else:
            numbers = getattr(views[array], part[:-1])
            base = numbers[int(part[-1])] if value.startswith("+") else 0
            numbers[int(part[-1])] = base + int(value)
    for field in ("tokens", "in_features", "format"):
        setattr(saved, field, operands.get(field, 0))
        if field != "format":
            setattr(made, field, operands.get(field, 0))
    saved.data, saved.bytes = views["saved"].data, views["saved"].shape[0]
    forward.hadamard_block, made.format = operands.get("block", 16), operands["input_format"]
    if "codes" in views:
        made.data, made.bytes = views["codes"].data, views["codes"].shape[0]
        int4.data, int4.bytes = made.data, made.bytes
    for field in ("out_features", "in_features"):
        setattr(int4, field, operands.get(field, 0))
    int4.format = operands.get("int4_format", 0)
    work = views["workspace"].data, views["workspace"].shape[0]
    v, g, before = views, operands, [bytes(one) for one in arrays.values()]
    scales = [v[n] for n in ("a_scale", "b_scale") if n in v]
    last = {
        "fwht": lambda: (v["x"], g["axis"], g["block"], v["out"]),
        "hla": lambda: (v["x"], spec, CONSTANTS["HOT_SIDE_ACTIVATION"], v["out"]),
        "quantize": lambda: (
            *(v["x"], g["bits"], g["granularity"], g["rounding"]), v["q"], v["scale"],
        ),
        "dequantize": lambda: (v["q"], v["scale"], g["granularity"], v["out"]),
        "pack_int4": lambda: (v["q"], v["out"]),
        "unpack_int4": lambda: (v["packed"], v["out"]),
        "encode_blocks": lambda: (v["x"], g["rounding"], v["wire"]),
        "sum_blocks": lambda: (v["wire"], g["factor"], v["out"]),
        "gemm_int8": lambda: (v["a"], v["b"], *scales, g["divisor"], 0, v["out"], *work),
        "gemm_int4": lambda: (v["a"], v["b"], g["k"], *scales, g["divisor"], 0, v["out"], *work),
        "compress_activation": lambda: (
            v["x"], spec, saved.data, saved.bytes, None, 0, make("hot_saved"),
        ),
        "decompress_activation": lambda: (saved, g["first"], g["last"], spec, v["out"]),
        "forward_linear": lambda: (v["x"], v["w"], v["bias"], forward, v["y"], *work),
        "forward_linear_input": lambda: (
            made, v["w"], None, v["bias"], forward, v["y"], *work,
        ),
        "quantize_forward_input": lambda: (
            *(v["x"], forward, made.data, made.bytes, make("hot_input"), spec),
            *(saved.data, saved.bytes, *work, make("hot_saved")),
        ),
        "quantize_forward_input_scaled": lambda: (
            *(v["x"], v["exponents"], forward, made.data, made.bytes, make("hot_input"), spec),
            *(saved.data, saved.bytes, *work, make("hot_saved")),
        ),
        "quantize_weight_int4": lambda: (
            v["w"], v["exponents"], forward, g["group"], made.data, made.bytes, weight,
        ),
        "expand_weight_int4": lambda: (
            int4, forward, g["group"], v["out"].data, v["out"].shape[0], weight,
        ),
        "backward_linear": lambda: (v["gy"], v["w"], saved, spec, gradients, *work),
    }  # fmt: skip
    parts = {n: ctypes.addressof(v[n]) for n in ("gx", "gw", "gb") if n in v}
    gradients = make("hot_gradients", **parts)
    if name == "forward_linear" and "codes" in v:
        name = "forward_linear_input"
    if name == "quantize_forward_input" and "exponents" in v:
        name = "quantize_forward_input_scaled"
    try:
        api.on(f"hot_{name}", *last[name]())
    except HotError:
        assert [bytes(one) for one in arrays.values()] == before, "written before the error"
        raise


def call_python(name: str, good: str, broken: str) -> None:
    operands = arguments(good)
    for change, value in arguments(broken).items():
        array, _, part = change.partition(".")
        if array == "spec" or not part:
            operands[change] = value
        elif part == "ndim":
            operands[array] = operands[array][0] if value == "1" else operands[array][:, None]
        else:
            sizes = list(operands[array].shape)
            sizes[int(part[-1])] = int(value)
            operands[array] = np.ones(sizes, operands[array].dtype)
    fields = {n.removeprefix("spec."): v for n, v in operands.items() if n.startswith("spec.")}
    for field, text in fields.items():
        numbers = tuple(map(int, re.findall(r"\d+", text)))
        if field in ("basis", "storage"):
            continue
        fields[field] = numbers if field == "token_grid" else numbers[0]
    operands = {n: v for n, v in operands.items() if not n.startswith("spec.")}
    if name == "hla":
        del fields["storage"]
        hotcore.hla(**operands, **fields)
    elif name == "quantize":
        hotcore.quantize(operands["x"], bits=operands["bits"])
    elif name == "dequantize":
        hotcore.dequantize(operands["q"], operands["scale"])
    elif name == "compress_activation":
        hotcore.compress_activation(operands["x"], HotConfig(**fields))
    elif name == "decompress_activation":
        kept = hotcore.compress_activation(np.ones((20, 12), np.float32))
        hotcore.decompress_activation(kept, operands["first"], operands["last"])
    elif name == "quantize_weight_int4":
        config = HotConfig(forward_block=operands["block"])
        more = {n: operands[n] for n in ("group", "exponents")}
        hotcore.quantize_weight_int4(operands["w"], config, **more)
    else:
        getattr(hotcore, name)(**operands)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in table()))
def test_rows_of_every_language(api: CApi, name: str) -> None:
    for call, good, broken, rest in table():
        if call != name:
            continue
        if not broken:
            call_c(api, name, good, "")
            continue
        says, _, status = rest.partition(" | ")
        with pytest.raises(HotError) as refused:
            call_c(api, name, good, broken)
        assert refused.value.status == CONSTANTS[f"HOT_{(status or 'invalid_argument').upper()}"]
        texts = [str(refused.value)]
        if broken.startswith("* "):
            with pytest.raises(ValueError) as raised:
                call_python(name, good, broken)
            texts.append(str(raised.value))
        for text in texts:
            assert all(word.strip() in text for word in says.split(";")), (broken, text)


def field_view(values: np.ndarray) -> np.ndarray:
    """View whose strides are no multiple of the item size."""
    record = np.zeros(values.shape, np.dtype([("pad", np.uint8), ("x", values.dtype)]))
    record["x"] = values
    return record["x"]


def saved(**changes: Any) -> hotcore.Saved:
    kept = hotcore.compress_activation(X)
    fields = dict(data=kept.data, tokens=32, in_features=16, config=kept.config, key=kept.key)
    return hotcore.Saved(**{**fields, **changes})


def back(**changes: Any) -> object:
    arguments = {"gy": GY, "w": W, "saved_or_x": X, **changes}
    return hotcore.backward_linear(**arguments)


fwht, hla, quantize, dequantize = hotcore.fwht, hotcore.hla, hotcore.quantize, hotcore.dequantize
compress, decompress = hotcore.compress_activation, hotcore.decompress_activation
pack, unpack = hotcore.pack_int4, hotcore.unpack_int4
gemm8, gemm4 = hotcore.gemm_int8, hotcore.gemm_int4
SHORT, SIZE = np.zeros(10, np.uint8), saved().nbytes
SHARED = np.lib.stride_tricks.as_strided(np.zeros(16, F), (4, 16), (0, 4))


def zeros(more: int) -> np.ndarray:
    """More bytes than x takes when it is kept."""
    return np.zeros(SIZE + more, np.uint8)


def back_of(data: np.ndarray) -> object:
    return back(saved_or_x=saved(data=data))


# Arrays that every function refuses for every float argument.
FLOAT_ARGUMENTS: dict[str, tuple[str, Callable[[Any], object], np.ndarray]] = {
    "fwht": ("x", lambda x: fwht(x), X),
    "hla": ("x", lambda x: hla(x), X),
    "quantize": ("x", lambda x: quantize(x), X),
    "compress_activation": ("x", lambda x: hotcore.compress_activation(x), X),
    "backward_linear gy": ("gy", lambda gy: back(gy=gy), GY),
    "backward_linear w": ("w", lambda w: back(w=w), W),
    "backward_linear x": ("saved_or_x", lambda x: back(saved_or_x=x), X),
}


@pytest.mark.parametrize("which", FLOAT_ARGUMENTS)
def test_every_float_argument(which: str) -> None:
    name, call, good = FLOAT_ARGUMENTS[which]
    call(good)  # only the argument is wrong
    for bad, says in (
        (good.astype(np.float64), "float64.*float32, float16 or bfloat16"),
        (good.astype(np.int32), "int32.*float32"),
        (good.astype(np.complex64), "complex64"),
        (good.astype(bool), "bool"),
        (swapped(good), "byte-swapped dtype >f4"),
        (unaligned(good), "aligned"),
        (field_view(good), "aligned"),
        (np.ma.masked_array(good, good > 0), "masked"),
    ):
        refused(call, f"{name}: .*{says}", ValueError, bad)
    for bad in (None, 1.0, good.tolist(), "x", object(), np.float32(1), good.tobytes()):
        refused(call, rf"{name}: expected", TypeError, bad)
    if torch is not None:
        for bad, error, says in (
            (torch.from_numpy(good).double(), ValueError, "float64"),
            (torch.from_numpy(good).to_sparse(), ValueError, "layout"),
            (torch.from_numpy(good).requires_grad_(), ValueError, "requires grad"),
            (torch.from_numpy(good).to("meta"), NotImplementedError, "device meta"),
            (torch.imag(torch.from_numpy(good * 1j).conj()), ValueError, "negated"),
        ):
            refused(call, f"{name}: .*{says}", error, bad)


class Elsewhere:
    """An array on a device that is not the CPU."""

    def __dlpack__(self, **options: object) -> object:
        raise AssertionError("never asked")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)


CASES: dict[str, list[Case]] = {
    "fwht": [
        Case(lambda: fwht(np.array(1, F)), "x has 0 dimensions; expected 1 to 4"),
        Case(lambda: fwht(np.ones((1, 1, 1, 1, 16), F)), "x: 5 dimensions"),
        Case(lambda: fwht(Elsewhere()), "x: expected an array on the CPU", NotImplementedError),
        Case(lambda: fwht(X, out=X.astype(np.float64)), "out: dtype float64"),
        Case(lambda: fwht(X, out=X.astype(np.int8)), "out: dtype int8"),
        Case(lambda: fwht(X, out=read_only(X)), "out: the array is read-only"),
        Case(lambda: fwht(X, out=swapped(X)), "out: byte-swapped"),
        Case(lambda: fwht(X, out=[0.0] * 16), "out: expected an array", TypeError),
        Case(lambda: fwht(X[:4], out=SHARED), "out has strides"),
    ],
    "hla": [
        Case(lambda: hla(X[0]), r"x: shape \(16,\); expected 2 dimensions"),
        Case(lambda: hla(X, basis="high"), "basis: 'high' is not one of 'full'"),
        Case(lambda: hla(X, side="left"), "side: 'left' is not one of"),
        Case(lambda: hla(X, basis="lowpass", rows=[1, 1]), "rows contains 1 twice"),
        Case(lambda: hla(X, basis="lowpass", rows=[16]), r"rows\[0\] is 16"),
        Case(lambda: hla(X, basis="lowpass", rows=[]), "rows: "),
        Case(lambda: hla(X, rows=[1]), "rows was given with basis sketch"),
        Case(lambda: hla(X, token_grid=(0, 5)), "token_grid is"),
        Case(lambda: hla(X, token_grid=4), r"token_grid: expected \(height, width\)", TypeError),
        Case(lambda: hla(X, token_grid=(4,)), r"token_grid: expected \(h.*got \(4,\)", TypeError),
        Case(lambda: hla(X, token_grid=(4.0, 4)), "token_grid: expected", TypeError),
        Case(lambda: hla(X, token_grid=(2**40, 4)), "token_grid: 1099.*32 bits"),
        Case(lambda: hla(X, basis="lowpass", rows=3), "rows: expected ints, got 3", TypeError),
        Case(lambda: hla(X, basis="lowpass", rows="ab"), "rows: expected ints", TypeError),
        Case(lambda: hla(X, basis="lowpass", rows=[2**40]), "rows: 1099.*32 bits"),
        Case(lambda: hla(X, key=-1), "key: seed = -1"),
        Case(lambda: hla(X, key=1 << 64), "key: seed"),
        Case(lambda: hla(X, key=Key(0, 0, 8192)), "key: stream = 8192"),
        Case(lambda: hla(X, key=1.5), "key: expected", TypeError),
    ],
    "quantize": [
        Case(lambda: quantize(X[None]), "x: shape .*2 dimensions"),
        Case(lambda: quantize(X, scale="row"), "scale: 'row' is not one of"),
        Case(lambda: quantize(X, rounding="up"), "rounding: 'up' is not one of"),
        Case(lambda: quantize(X, packed=True), "packed: "),
    ],
    "dequantize": [
        Case(lambda: dequantize(X, ONE), "q: dtype float32; expected int8"),
        Case(lambda: dequantize(Q, ONE, packed=True), "q: dtype int8.*uint8"),
        Case(lambda: dequantize(Q, np.ones(4)), "scale: dtype float64"),
        Case(lambda: dequantize(Q, np.ones(4, F), granularity="rows"), "granularity: 'rows'"),
        Case(lambda: dequantize(Q, np.ones(4, F), dtype="int8"), "dtype: 'int8'"),
        Case(lambda: dequantize(Q, np.ones(4, F), dtype=np.float64), "dtype: "),
        Case(lambda: dequantize(Q, np.ones(4, F), dtype="bfloat16"), "^dtype: .*no bfloat16"),
        Case(lambda: dequantize(P, np.ones(4, F), packed=True, columns=14), "columns: 14"),
        Case(lambda: dequantize(Q, np.ones(4, F), columns=14), "columns: 14; q has 16"),
    ],
    "pack_int4": [
        Case(lambda: pack(X), "q: dtype float32; expected int8"),
        Case(lambda: pack(P), "q: dtype uint8"),
        Case(lambda: pack(Q[0]), "q: shape"),
        Case(lambda: pack(Q[:, ::2]), "q has stride 2.*contiguous"),
    ],
    "unpack_int4": [
        Case(lambda: unpack(Q), "packed: dtype int8; expected uint8"),
        Case(lambda: unpack(P, 17), "columns: 17"),
        Case(lambda: unpack(P, -1), "columns: -1"),
        Case(lambda: unpack(P[:, ::2]), "packed has stride 2"),
    ],
    "gemm_int8": [
        Case(lambda: gemm8(X, Q), "a: dtype float32; expected int8"),
        Case(lambda: gemm8(Q, X), "b: dtype float32"),
        Case(lambda: gemm8(P, P), "a: dtype uint8"),
        Case(lambda: gemm8(Q[0], Q), "a: shape"),
        Case(lambda: gemm8(Q.T, Q[:, :4]), "a has stride"),
        Case(lambda: gemm8(Q, Q, ONE), "b_scale: missing"),
        Case(lambda: gemm8(Q, Q, np.ones(1), ONE), "a_scale: dtype float64"),
        Case(lambda: gemm8(Q, Q, ONE, ONE, out_dtype="int32"), "out_dtype: 'int32'"),
        Case(lambda: gemm8(Q, Q, ONE, ONE, out_dtype="bfloat16"), "^out_dtype: NumPy has no bf"),
        Case(lambda: gemm8(Q, Q, ONE, ONE, out=np.ones((4, 4), np.int32)), "out: "),
        Case(lambda: gemm8(Q, Q, out=np.ones((4, 4), F)), "out: .*int32"),
        Case(lambda: gemm8(Q, Q, ONE, ONE, accumulate=True), "accumulate: "),
        Case(lambda: gemm8(Q, Q, divisor=2), "divisor 1"),
    ],
    "gemm_int4": [Case(lambda: gemm4(Q, Q), "a: dtype int8; expected uint8")],
    "compress_activation": [
        Case(lambda: compress(X[0]), "x: shape .*2 to 4"),
        Case(lambda: compress(X[None, None, None]), "x: shape .*expected 2 to 4 dimensions"),
        Case(lambda: compress(np.ones((4, 9, 16), F)[:, ::2]), "x of shape .*collapse"),
        Case(lambda: compress(X, 8), "config: ", TypeError),
        Case(lambda: compress(X, "best"), "config: 'best'"),
    ],
    "backward_linear": [
        Case(lambda: back(need=("gx", "gz")), "need: 'gz'"),
        Case(lambda: back(need=5), "need: expected .*'gx'.*got 5", TypeError),
        Case(lambda: back(need=[["gx"]]), r"need: expected .*got \[\['gx'\]\]", TypeError),
        Case(lambda: back(need=(1, "gz")), "need: "),
        Case(lambda: back(w=W[:23]), r"w: shape \(23, 16\); gy has 24"),
        Case(lambda: back(w=W[:, :15]), "w: shape .*x has 16 in features"),
        Case(lambda: back(w=W[0]), "w: shape"),
        Case(lambda: back(w=None), "w: expected an array", TypeError),
        Case(lambda: back(saved_or_x=None), "saved_or_x: ", TypeError),
        Case(lambda: back(saved_or_x=X[:31]), "saved_or_x: 31 tokens; gy has 32"),
        Case(lambda: back(gy=GY[0]), "gy: shape"),
        Case(lambda: back(gy=np.ones((8, 5, 24), F)[:, :4]), "gy of shape .*collapse"),
        Case(lambda: back(saved_or_x=saved(), config="fast"), "config: .*made with"),
        Case(lambda: back_of(SHORT), "saved has 10 bytes; expected"),
        Case(lambda: back_of(X), r"saved_or_x.data: dtype float32"),
        Case(lambda: back_of(zeros(17)[1:-16]), "saved is not aligned to 16 bytes"),
        Case(lambda: back_of(zeros(SIZE)[::2]), "saved: expected a contiguous uint8 vector"),
        Case(lambda: back(out_dtype="int8"), "out_dtype: 'int8'"),
        Case(lambda: back(out_dtype="bfloat16"), "^out_dtype: NumPy has no bfloat16"),
        Case(lambda: back(accumulate=True), "accumulate: requires gw_out"),
        Case(lambda: back(gw_out=np.ones((16, 24), F)), "gw_out has shape"),
        Case(lambda: back(gw_out=np.ones((24, 16))), "gw_out: dtype float64"),
        Case(lambda: back(gw_out=read_only(W)), "gw_out: the array is read-only"),
        Case(lambda: back(gw_out=swapped(W)), "gw_out: byte-swapped"),
        Case(lambda: back(gw_out=unaligned(W)), "gw_out: .*not aligned"),
        Case(lambda: back(gw_out=field_view(W)), "gw_out: .*not aligned"),
        Case(lambda: back(gw_out=W), "gw_out overlaps w"),
        Case(lambda: back(gw_out=GY[:24, :16]), "gw_out overlaps gy"),
        Case(lambda: back(need="gx", gw_out=np.zeros_like(W)), "gw_out: requires"),
        Case(lambda: back(gb_out=np.zeros(24, F)), "gb_out: requires"),
        Case(lambda: back(need="gx", accumulate=True), "accumulate: requires"),
        Case(lambda: back(need="gb", gb_out=np.ones(23, F)), r"gb_out has shape \(23,\)"),
    ],
    "decompress_activation": [
        Case(lambda: decompress(X), "saved: expected a .*ndarray", TypeError),
        Case(lambda: decompress(saved(), dtype="int8"), "dtype: 'int8'"),
        Case(lambda: decompress(saved(), dtype="bfloat16"), "no bfloat16"),
        Case(lambda: decompress(saved(), out=X[:31]), r"out has shape \(31, 16\)"),
        Case(lambda: decompress(saved(), out=X.astype(np.int8)), "out: dtype int8"),
        Case(lambda: decompress(saved(), out=read_only(X)), "out: .*read"),
        Case(
            lambda: decompress(saved(), 0, 4, out=SHARED),
            "out has strides by which elements share memory",
        ),
        Case(lambda: decompress(saved(data=SHORT)), "saved has 10 bytes;"),
        Case(lambda: decompress(saved(data=X)), "saved.data: dtype float32"),
        Case(
            lambda: decompress(compress(X, "fast")),
            "saved has basis sketch.*expected basis full",
            NotImplementedError,
        ),
    ],
    "supported": [
        Case(lambda: hotcore.supported(1, 1, 1, device="tpu"), "device: expected .*, got 'tpu'"),
        Case(lambda: hotcore.supported(1, 1, 1, device="cuda:\u00b2"), "device: .*, got 'cuda:"),
        Case(lambda: hotcore.supported(1, 1, 1, device=f"cuda:{2**40}"), "device: 1099.*32 bits"),
    ],
    "settings of the CPU": [
        Case(lambda: hotcore.set_num_threads(-1), "threads: -1 is negative"),
        Case(lambda: hotcore.set_num_threads(True), "threads: expected .*got True", TypeError),
        Case(lambda: hotcore.set_isa("sse"), "isa: 'sse' is not one of"),
        Case(lambda: hotcore.set_isa(5), "name: expected a str or None, got int", TypeError),
    ],
}


GEMM = {"a_scale": ONE, "b_scale": ONE, "out": np.ones((4, 4), F)}
EXPLAIN = {"tokens": 64, "out_features": 64, "in_features": 64}
# A call, and its arguments that are ints, names and bools.
SCALARS: dict[str, tuple[Callable[..., object], str, str, str]] = {
    "fwht": (lambda **o: fwht(X, **o), "axis block", "", ""),
    "hla": (lambda **o: hla(X, **o), "rank block prefix_tokens", "basis side", ""),
    "basis_order": (lambda **o: hotcore.basis_order(**{"basis": "lowpass", **o}),
                    "block", "basis", ""),
    "quantize": (lambda **o: quantize(X, **o), "bits", "scale rounding", ""),
    "dequantize": (lambda **o: dequantize(P, ONE, packed=True, **o), "columns", "granularity", ""),
    "unpack_int4": (lambda **o: unpack(P, **o), "columns", "", ""),
    "gemm_int8": (lambda **o: gemm8(Q, Q, **GEMM, **o), "divisor", "", "accumulate"),
    "gemm_int4": (lambda **o: gemm4(P, P, **GEMM, **o), "divisor k", "", "accumulate"),
    "decompress": (lambda **o: decompress(saved(), **o), "first last", "", ""),
    "decompress out": (lambda **o: decompress(saved(), out=X[:4], **o), "first last", "", ""),
    "backward_linear": (lambda **o: back(gw_out=np.ones((24, 16), F), **o), "", "", "accumulate"),
    "supported": (lambda **o: hotcore.supported(**{**EXPLAIN, **o}), " ".join(EXPLAIN), "", ""),
    "explain": (lambda **o: hotcore.explain(**{**EXPLAIN, **o}),
                " ".join(EXPLAIN), "", "accumulate quantized_weight wgmma"),
    "explain_gemm": (lambda **o: hotcore.explain_gemm(**{"m": 4, "n": 4, "k": 4, **o}),
                     "m n k", "", "int4 accumulate wgmma"),
    "set_num_threads": (lambda **o: hotcore.set_num_threads(**{"threads": 0, **o}),
                        "threads", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_another_type(name: str) -> None:
    call, ints, names, bools = SCALARS[name]
    for kind, words, bad_values in (
        ("an int", ints, ("1", 1.5, [1])),
        ("a str", names, (1, b"x", ["x"])),
        ("a bool", bools, (1, "yes", [True])),
    ):
        for argument, bad in itertools.product(words.split(), bad_values):
            refused(call, f"^{argument}: expected {kind}, got ", TypeError, **{argument: bad})
    for argument in ints.split():
        refused(call, f"{argument}\\b.*{2**70}", ValueError, **{argument: 2**70})


QX = hotcore.quantize_forward_input(X)
# A result of a call, its next use, and fields that it cannot have.
KEPT: dict[str, tuple[Any, Callable[[Any], object], dict[str, tuple[object, ...]]]] = {
    "saved_or_x": (
        hotcore.compress_activation(X),
        lambda kept: back(saved_or_x=kept),
        dict(
            tokens=("32", 32.0, -1),
            in_features=(None, 16.0),
            config=("default", None),
            key=(5, "5"),
        ),
    ),
    "saved": (
        hotcore.compress_activation(X),
        decompress,
        dict(tokens=("32", -1), in_features=(None, -1), config=("default", {}), key=(Key(-1),)),
    ),
    "w of backward": (
        hotcore.quantize_weight(W),
        lambda kept: back(w=kept),
        dict(out_features=("24", 24.0), in_features=(None, 16.0), config=("default",)),
    ),
    "w of forward": (
        hotcore.quantize_forward_weight(W),
        lambda kept: hotcore.forward_linear(X, kept),
        dict(out_features=("24", 24.0, -1), in_features=(None, 16.0), config=(None,)),
    ),
    "x": (
        QX,
        lambda kept: hotcore.forward_linear(kept, W),
        dict(
            shape=(None, (), (16,), (32.0, 16), (-32, 16), (1, 1, 1, 32, 16)),
            dtype=("float64", None),
            config=("default",),
        ),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_fields_of_what_was_kept(name: str) -> None:
    """Fields that were set by hand or changed in a file."""
    kept, use, fields = KEPT[name]
    use(kept)
    for field, bad in ((field, bad) for field, values in fields.items() for bad in values):
        changed = dataclasses.replace(kept, **{field: bad})
        refused(use, rf"^{name.split()[0]}\.{field}: ", (TypeError, ValueError), changed)


@pytest.mark.parametrize("table", CASES)
def test_table(table: str) -> None:
    before = hotcore.num_threads(), hotcore.isa()
    for case in CASES[table]:
        with pytest.raises(case.error, match=case.says) as caught:
            case.call()
        assert type(caught.value) is case.error, case.says
        assert (hotcore.num_threads(), hotcore.isa()) == before


def test_overlapping_output() -> None:
    line = np.zeros(40, F)
    refused(lambda: fwht(line[:32], out=line[8:]), "out overlaps x")
    memory = np.zeros((32, 40), F)
    refused(lambda: hla(memory[:, :16], out=memory[:16, 8:24]), "out overlaps x")
    hla(memory[:, :16], out=memory[:16, 16:32])  # beside each other in the rows of one matrix
    gw = np.ones(24 * 16 + 24, F)
    out = {"gw_out": gw[: 24 * 16].reshape(24, 16), "gb_out": gw[-48:-24]}
    refused(lambda: back(need=("gw", "gb"), **out), "gb_out overlaps gw_out")


def test_wrong_output_is_never_copied() -> None:
    # nanobind converts by default: it would write into a copy and drop it.
    context = _core.CoreContext(1)
    out = np.full(16, -1.0)
    refused(lambda: _core.fwht(context, X[0], -1, 16, out), "out: dtype float64")
    assert (out == -1).all()
    for bad in (read_only(X[0]), [0.0] * 16, None):
        refused(_core.fwht, "", TypeError, context, X[0], -1, 16, bad)


def test_too_small_workspace() -> None:
    # Python allocates the workspace on the CPU; a caller of _core may pass one.
    context = _core.CoreContext(1)
    kept = hotcore.compress_activation(X)
    gx = np.empty((32, 16), F)
    size = _core.backward_linear_workspace(context, 32, 24, 16, kept.config.spec, True, False)
    key = hotcore.Key(0)
    arguments = (context, GY, W, None, 32, 16, key, kept.config.spec, key, gx, None, None, False)
    small, floats = np.empty(size - 1, np.uint8), np.empty(size, F)
    says = f"workspace has {size - 1} bytes; expected {size}"
    refused(_core.backward_linear, says, RuntimeError, *arguments, small)
    says = "workspace: expected a contiguous uint8 vector"
    refused(_core.backward_linear, says, ValueError, *arguments, floats)
    _core.backward_linear(*arguments, np.empty(size, np.uint8))
    np.testing.assert_array_equal(gx, hotcore.backward_linear(GY, W, None, need="gx").gx)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_kinds_are_not_mixed_in_outputs() -> None:
    refused(lambda: fwht(X, out=torch.ones(32, 16)), "out: a torch array; x is a numpy array")
    refused(lambda: fwht(torch.ones(32, 16), out=X), "out: a numpy array; x is a torch array")


def test_supported() -> None:
    for recipe in RECIPES:
        assert hotcore.supported(197, 768, 768, recipe) == (True, "")
    paper = HotConfig.recipe("paper", token_grid=(14, 14), prefix_tokens=1)
    assert hotcore.supported(2 * 197, 768, 768, paper) == (True, "")
    for tokens, words in ((198, ("198", "197")), (-1, ("negative",))):
        ok, why = hotcore.supported(tokens, 768, 768, paper)
        assert not ok and all(word in why for word in words)


def test_every_dtype_is_checked_in_the_extension() -> None:
    context = _core.CoreContext(1)
    for dtype in ("float64", "int64", "int16", "uint16", "bool", "complex64", "int8"):
        says = "x is int8; expected float32" if dtype == "int8" else f"x: dtype {dtype}"
        more = (np.ones(16, dtype), -1, 16, np.empty(16, F))
        refused(_core.fwht, says, ValueError, context, *more)


def test_keys() -> None:
    # The package checks the rest itself; a caller of _core gets libhot's errors.
    context, spec, out = _core.CoreContext(1), hotcore.HotConfig().spec, np.empty(1 << 12, np.uint8)
    for key, part in (((0, 0, 8192, 0), "key.stream is 8192"), ((0, 0, 0, 4), "key.counter is at")):
        refused(_core.compress_activation, part, ValueError, context, X, spec, key, out, None)
    refused(lambda: compress(X, key=Key(0, counter=4)), "key: counter = 4 .*multiple of 8")
