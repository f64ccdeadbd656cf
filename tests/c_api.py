"""hot/hot_c.h through ctypes: its structs, constants and prototypes, read from the header.

:class:`CApi` has functions of the names and arguments of ``hotcore``'s own, for NumPy arrays.
"""

import ctypes
import functools
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import hotcore
import numpy as np
import pytest
from hotcore import HotConfig, Key, info

HEADER = Path(__file__).resolve().parents[1] / "cpp/include/hot/hot_c.h"
NUMBERS: dict[str, Any] = {
    f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("int32", "int64", "uint32", "uint64")
}
NUMBERS |= {"size_t": ctypes.c_size_t, "float": ctypes.c_float}
NUMBERS |= {"hot_status": ctypes.c_int32, "hot_run": ctypes.c_void_p}
Array = np.ndarray
Struct = ctypes.Structure


def _text() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def constants() -> dict[str, int]:
    values = re.findall(r"\b(HOT_\w+) = (\d+)", _text())
    return {name: int(value) for name, value in values}


CONSTANTS = constants()


def _type(words: str) -> Any:
    if words.endswith("*"):
        return ctypes.c_char_p if words == "const char*" else ctypes.c_void_p
    return NUMBERS[words.removeprefix("const ")]


def structs() -> dict[str, type[ctypes.Structure]]:
    """Every struct of the header, in the order of its members."""
    classes: dict[str, type[ctypes.Structure]] = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", _text(), re.DOTALL):
        fields = []
        for member in filter(None, map(str.strip, body.split(";"))):
            kind, names = re.fullmatch(r"((?:const )?\w+\*?)\s+(.+)", member, re.DOTALL).groups()
            for field in names.split(","):
                base, _, count = field.strip().rstrip("]").partition("[")
                one = _type(kind)
                fields.append((base.strip(" *"), one * CONSTANTS[count] if count else one))
        classes[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return classes


STRUCTS = structs()


def prototypes() -> dict[str, tuple[str, list[str]]]:
    """Every exported function: its result type and argument types."""
    functions_of_c = {}
    for result, name, arguments in re.findall(
        r"^HOT_API ([\w ]+?\*?) (\w+)\(([^)]*)\);", _text(), re.MULTILINE
    ):
        kinds = [re.sub(r"\s*\w+$", "", one.strip()) for one in arguments.split(",")]
        functions_of_c[name] = (result, [] if arguments == "void" else kinds)
    return functions_of_c


@functools.cache
def library() -> ctypes.CDLL:
    """libhot with the header's prototypes; skip the test if the extension contains libhot."""
    path = info.collect()["library"]
    if path is None:
        pytest.skip("libhot is inside the extension")
    lib = ctypes.CDLL(path)
    for name, (result, arguments) in prototypes().items():
        function = getattr(lib, name)
        function.restype = None if result == "void" else _type(result)
        function.argtypes = [
            ctypes.c_char_p if kind == "const char*" else _type(kind) for kind in arguments
        ]
    return lib


class HotError(Exception):
    """A call that did not return HOT_OK: its status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


DTYPES = dict(float32="F32", float16="F16", bfloat16="BF16", int8="I8", int32="I32", uint8="I4X2")


def make(name: str, **fields: Any) -> Struct:
    """A struct with its size and these fields."""
    return STRUCTS[name](**{"struct_size": ctypes.sizeof(STRUCTS[name]), **fields})


def tensor(array: Array) -> Struct:
    view = make("hot_tensor", data=array.ctypes.data, ndim=array.ndim)
    view.dtype = CONSTANTS["HOT_" + DTYPES[array.dtype.name]]
    for axis in range(array.ndim):
        view.shape[axis] = array.shape[axis]
        view.stride[axis] = array.strides[axis] // array.itemsize
    return view


def aligned(count: int) -> Array:
    """``count`` bytes, 16-byte aligned."""
    memory = np.full(count + 16, 0xA5, np.uint8)
    return memory[-memory.ctypes.data % 16 :][:count]


def room(memory: Array) -> tuple[int, int]:
    return memory.ctypes.data, memory.size


class CApi:
    """The stages through the C ABI, on the CPU, with a context of their own."""

    def __init__(self, threads: int = 2) -> None:
        self.lib = library()
        self._context = ctypes.c_void_p()
        self.call("hot_context_cpu", threads, ctypes.byref(self._context))

    def close(self) -> None:
        self.lib.hot_context_destroy(self._context)
        self._context = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status; structs are passed by address."""
        passed = [ctypes.byref(one) if isinstance(one, Struct) else one for one in arguments]
        status = getattr(self.lib, name)(*passed)
        if status != CONSTANTS["HOT_OK"]:
            raise HotError(status, self.lib.hot_last_error().decode())

    def on(self, name: str, *arguments: Any) -> None:
        """Call such a function with the context as the first argument."""
        self.call(name, self._context, *arguments)

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_size_t) -> int:
        """Return the value that a function writes to its last argument."""
        out = kind()
        self.call(name, *arguments, ctypes.byref(out))
        return out.value

    def key(self, key: Key | int) -> None:
        self.on("hot_context_set_key", *(key if isinstance(key, tuple) else Key(key)))

    def spec(self, config: HotConfig | str) -> Struct:
        """Make a spec from the name of a recipe or the fields of a configuration."""
        struct = make("hot_spec")
        if isinstance(config, str):
            self.call("hot_spec_recipe", config.encode(), struct)
            return struct
        for name in ("hadamard_block", "gx_bits", "rank", "block", "prefix_tokens"):
            setattr(struct, name, getattr(config, name))
        struct.gx_scale = CONSTANTS[f"HOT_SCALE_{config.gx_scale.upper()}"]
        struct.gw_scale = CONSTANTS[f"HOT_GW_SCALE_{config.gw_scale.upper()}"]
        for name in ("gx_rounding", "gw_rounding"):
            setattr(struct, name, CONSTANTS[f"HOT_{getattr(config, name).upper()}"])
        struct.basis = CONSTANTS[f"HOT_BASIS_{config.basis.upper()}"]
        struct.storage = CONSTANTS[f"HOT_STORAGE_{config.storage.upper()}"]
        struct.equalize_tokens = config.equalize_tokens
        struct.grid_h, struct.grid_w = config.token_grid or (0, 0)
        if config.rows:
            struct.kept_rows = np.array(config.rows, np.int32)  # lives as long as the struct
            struct.rows, struct.row_count = struct.kept_rows.ctypes.data, len(config.rows)
        return struct

    def fwht(self, x: Array, *, axis: int = -1, block: int = 16) -> Array:
        out = np.empty(x.shape, x.dtype)
        self.on("hot_fwht", tensor(x), axis, block, tensor(out))
        return out

    def basis_order(self, basis: str, block: int) -> list[int]:
        order, kind = np.full(max(block, 1), -1, np.int32), CONSTANTS[f"HOT_BASIS_{basis.upper()}"]
        self.call("hot_basis_order", kind, block, order.ctypes.data)
        return order.tolist()

    def hla(
        self, x: Array, *, side: str = "activation", key: Key | int = 0, **options: Any
    ) -> Array:
        spec = self.spec(HotConfig(storage="int8", **options))
        self.key(key)
        rows = self.number("hot_hla_rows", x.shape[0], spec, kind=ctypes.c_int64)
        out = np.empty((rows, x.shape[1]), np.float32)
        self.on("hot_hla", tensor(x), spec, CONSTANTS[f"HOT_SIDE_{side.upper()}"], tensor(out))
        return out

    def quantize(
        self, x: Array, *, bits: int = 8, scale: str = "token", rounding: str = "stochastic",
        key: Key | int = 0, packed: bool = False,
    ) -> tuple[Array, Array]:  # fmt: skip
        rows, columns = x.shape
        q = np.empty((rows, (columns + 1) // 2 if packed else columns), np.int8)
        q = q.view(np.uint8) if packed else q
        scales = np.empty({"token": rows, "channel": columns, "tensor": 1}[scale], np.float32)
        kinds = CONSTANTS[f"HOT_SCALE_{scale.upper()}"], CONSTANTS[f"HOT_{rounding.upper()}"]
        self.key(key)
        self.on("hot_quantize", tensor(x), bits, *kinds, tensor(q), tensor(scales))
        return q, scales

    def dequantize(self, q: Array, scale: Array, *, granularity: str = "token") -> Array:
        out = np.empty(q.shape, np.float32)
        which = CONSTANTS[f"HOT_SCALE_{granularity.upper()}"]
        self.on("hot_dequantize", tensor(q), tensor(scale), which, tensor(out))
        return out

    def pack_int4(self, q: Array) -> Array:
        out = np.empty((q.shape[0], (q.shape[1] + 1) // 2), np.uint8)
        self.on("hot_pack_int4", tensor(q), tensor(out))
        return out

    def unpack_int4(self, packed: Array, columns: int) -> Array:
        out = np.empty((packed.shape[0], columns), np.int8)
        self.on("hot_unpack_int4", tensor(packed), tensor(out))
        return out

    def gemm(
        self, a: Array, b: Array, *scales: Array, divisor: int = 1, out: Array | None = None,
        accumulate: bool = False,
    ) -> Array:  # fmt: skip
        """gemm_int8, or with uint8 operands gemm_int4."""
        packed = a.dtype == np.uint8
        name, depth = ("hot_gemm_int4", [2 * a.shape[1]]) if packed else ("hot_gemm_int8", [])
        k = a.shape[1] * (2 if packed else 1)
        workspace = aligned(self.number("hot_gemm_workspace", self._context, len(a), len(b), k))
        if out is None:
            out = np.empty((len(a), len(b)), np.float32 if scales else np.int32)
        views = [tensor(scale) for scale in scales] or [None, None]
        rest = divisor, int(accumulate), tensor(out), *room(workspace)
        self.on(name, tensor(a), tensor(b), *depth, *views, *rest)
        return out

    def compress_activation(
        self, x: Array, spec: Struct, *, key: Key | int = 0
    ) -> tuple[Array, Struct]:
        """Return the bytes, and the hot_saved that describes them."""
        sizes = math.prod(x.shape[:-1]), x.shape[-1]
        layout, saved = make("hot_saved_layout"), make("hot_saved")
        self.call("hot_saved_layout_of", *sizes, spec, layout)
        size = self.number("hot_compress_activation_workspace", self._context, *sizes, spec)
        memory, workspace = aligned(layout.bytes), aligned(size)
        self.key(key)
        rooms = *room(memory), *room(workspace)
        self.on("hot_compress_activation", tensor(x), spec, *rooms, saved)
        return memory, saved

    def decompress_activation(self, saved: Struct, first: int, last: int, spec: Struct) -> Array:
        out = np.empty((max(0, last - first), saved.in_features), np.float32)
        self.on("hot_decompress_activation", saved, first, last, spec, tensor(out))
        return out

    def quantize_weight(self, w: Array, spec: Struct) -> tuple[Array, Struct]:
        memory = aligned(self.number("hot_quantized_weight_bytes", *w.shape, spec))
        size = self.number("hot_quantize_weight_workspace", self._context, *w.shape, spec)
        workspace, weight = aligned(size), make("hot_weight")
        rooms = *room(memory), *room(workspace)
        self.on("hot_quantize_weight", tensor(w), spec, *rooms, weight)
        return memory, weight

    def forward_spec(self, block: int) -> Struct:
        return make("hot_forward_spec", hadamard_block=block)

    def quantize_forward_weight(self, w: Array, spec: Struct) -> tuple[Array, Struct]:
        memory = aligned(self.number("hot_forward_weight_bytes", *w.shape, spec))
        weight = make("hot_weight")
        self.on("hot_quantize_forward_weight", tensor(w), spec, *room(memory), weight)
        return memory, weight

    def quantize_forward_input(
        self, x: Array, spec: Struct, kept: Struct | None = None, *, key: Key | int = 0
    ) -> tuple[Array, Struct, Array, Struct]:
        """Return codes and the hot_input; with ``kept`` also the compressed x and the hot_saved."""
        sizes = math.prod(x.shape[:-1]), x.shape[-1]
        memory = aligned(self.number("hot_forward_input_bytes", *sizes, spec))
        made, saved, layout = (make(f"hot_{name}") for name in ("input", "saved", "saved_layout"))
        size = 0
        if kept is not None:
            self.call("hot_saved_layout_of", *sizes, kept, layout)
            size = self.number("hot_compress_activation_workspace", self._context, *sizes, kept)
        bytes_of_x, workspace = aligned(layout.bytes), aligned(size)
        self.key(key)
        rooms = *room(bytes_of_x), *room(workspace)
        into = *room(memory), made
        self.on("hot_quantize_forward_input", tensor(x), spec, *into, kept, *rooms, saved)
        return memory, made, bytes_of_x, saved

    def forward_linear(
        self, x: Array | Struct, w: Array | Struct, bias: Array | None, spec: Struct
    ) -> Array:
        """Return y in fp32; x and w are arrays or quantised ahead."""
        quantized = isinstance(w, Struct)
        outs = w.out_features if quantized else w.shape[0]
        added = None if bias is None else tensor(bias)
        if isinstance(x, Struct):
            name, shape = "hot_forward_linear_input", (x.tokens, outs, x.in_features)
            operands = (x, None, w) if quantized else (x, tensor(w), None)
        else:
            name, shape = "hot_forward_linear", (len(x), outs, x.shape[1])
            name += "_quantized" if quantized else ""
            operands = (tensor(x), w if quantized else tensor(w))
        ask = name.removesuffix("_quantized") + "_workspace"
        workspace = aligned(self.number(ask, self._context, *shape, spec, int(quantized)))
        y = np.full(shape[:2], np.nan, np.float32)
        self.on(name, *operands, added, spec, tensor(y), *room(workspace))
        return y

    def backward_linear(
        self, gy: Array, w: Array | Struct | None, saved: Struct | None, spec: Struct, *,
        in_features: int, need: Collection[str] = ("gx", "gw"), key: Key | int = 0,
        outputs: dict[str, Array] | None = None, accumulate: bool = False,
    ) -> hotcore.Gradients:  # fmt: skip
        tokens, outs = gy.shape
        shapes = {"gx": (tokens, in_features), "gw": (outs, in_features), "gb": (outs,)}
        out = {name: np.empty(shapes[name], gy.dtype) for name in need} | (outputs or {})
        views = {name: tensor(array) for name, array in out.items()}
        gradients = make("hot_gradients", accumulate=int(accumulate))
        for name, one in views.items():
            setattr(gradients, name, ctypes.addressof(one))
        sizes = tokens, outs, in_features, spec, int("gx" in out), int("gw" in out)
        workspace = aligned(self.number("hot_backward_linear_workspace", self._context, *sizes))
        name = "hot_backward_linear" + ("_quantized" if isinstance(w, Struct) else "")
        operand = tensor(w) if isinstance(w, Array) else w
        self.key(key)
        self.on(name, tensor(gy), operand, saved, spec, gradients, *room(workspace))
        return hotcore.Gradients(*(out.get(name) for name in shapes))
