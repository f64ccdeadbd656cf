"""Every public function with arrays of any kind: shapes, dtypes, byte orders, strides, devices.

A call gives the bits of plain arrays of the same values, or raises an error that names the
argument. Its inputs stay as they were.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import hotcore
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import all_equal_bits, equal_bits, refused, swapped, torch, unaligned

Arrays = dict[str, np.ndarray]
Sizes = tuple[int, int, int]  # L, O, I


class Function(NamedTuple):
    arrays: Callable[[np.random.Generator, Sizes], Arrays]
    call: Callable[[Arrays], Any]


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-7, 8, shape).astype(np.int8)


def packed(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def saved_bytes(a: Arrays) -> tuple[Any, ...]:
    saved = hotcore.compress_activation(a["x"], "default", key=1)
    return saved.data, hotcore.decompress_activation(saved, 0, saved.tokens)


def input_bytes(a: Arrays) -> tuple[Any, ...]:
    codes, saved = hotcore.quantize_forward_input(a["x"], keep=True, key=1)
    return codes.data, saved.data


def int4_bytes(a: Arrays) -> tuple[Any, ...]:
    w = hotcore.quantize_weight_int4(a["w"], exponents=a["exponents"])
    x = hotcore.quantize_forward_input(a["x"], exponents=a["exponents"])
    wide = hotcore.expand_weight_int4(w)
    return w.data, wide.data, hotcore.dequantize_weight(wide), x.data


def of(**axes: str) -> Callable[[np.random.Generator, Sizes], Arrays]:
    """Arrays by name and axes: L, O and I, and B, 16 times O."""
    makers = {"packed": packed} | dict.fromkeys(("q", "a", "b", "exponents"), codes)

    def make(g: np.random.Generator, s: Sizes) -> Arrays:
        size = dict(zip("LOIB", (*s, 16 * s[1]), strict=True))
        of_name = {name: [size[axis] for axis in given] for name, given in axes.items()}
        return {name: makers.get(name, floats)(g, *shape) for name, shape in of_name.items()}

    return make


PRODUCT = of(a="LI", b="OI", a_scale="L", b_scale="O")


def packed_product(g: np.random.Generator, s: Sizes) -> Arrays:
    arrays = PRODUCT(g, (s[0], s[1], 2 * s[2]))
    return arrays | {name: hotcore.pack_int4(arrays[name]) for name in "ab"}


FUNCTIONS = {
    "fwht": Function(of(x="LB"), lambda a: hotcore.fwht(a["x"])),
    "hla": Function(of(x="LO"), lambda a: hotcore.hla(a["x"])),
    "quantize": Function(of(x="LO"), lambda a: hotcore.quantize(a["x"])),
    "dequantize": Function(of(q="LO", scale="L"), lambda a: hotcore.dequantize(*a.values())),
    "pack_int4": Function(of(q="LO"), lambda a: hotcore.pack_int4(a["q"])),
    "unpack_int4": Function(of(packed="LO"), lambda a: hotcore.unpack_int4(a["packed"])),
    "gemm_int8": Function(PRODUCT, lambda a: hotcore.gemm_int8(*a.values())),
    "gemm_int4": Function(packed_product, lambda a: hotcore.gemm_int4(*a.values())),
    "compress_activation": Function(of(x="LI"), saved_bytes),
    "quantize_weight": Function(of(w="OI"), lambda a: hotcore.quantize_weight(a["w"]).data),
    "quantize_forward_weight": Function(
        of(w="OI"), lambda a: hotcore.quantize_forward_weight(a["w"]).data
    ),
    "quantize_forward_input": Function(of(x="LI"), input_bytes),
    "weight_int4": Function(of(w="OI", x="LI", exponents="I"), int4_bytes),
    "forward_linear": Function(
        of(x="LI", w="OI", bias="O"), lambda a: hotcore.forward_linear(*a.values())
    ),
    "backward_linear": Function(
        of(gy="LO", w="OI", saved_or_x="LI"),
        lambda a: hotcore.backward_linear(*a.values(), need=("gx", "gw", "gb"), key=1),
    ),
}

sizes = st.tuples(*(st.integers(0, 40) | st.sampled_from((64, 77)) for _ in range(3)))


def results(value: Any) -> list[np.ndarray]:
    return list(value) if isinstance(value, tuple) else [value]


def restrided(values: np.ndarray, draw: Callable[[Any], Any]) -> np.ndarray:
    """View of the same values with any order, direction and distance of axes in a larger block."""
    order = draw(st.permutations(range(values.ndim)))
    turned = values.transpose(order)
    steps = [draw(st.sampled_from((1, 1, 2, 3, -1, -2))) for _ in turned.shape]
    room = [
        abs(step) * size + draw(st.integers(0, 2))
        for step, size in zip(steps, turned.shape, strict=True)
    ]
    block = np.full(room, 99, values.dtype)
    kept = zip(steps, turned.shape, strict=True)
    view = block[tuple(slice(0, abs(step) * size, abs(step)) for step, size in kept)]
    view = view[tuple(slice(None, None, -1 if step < 0 else 1) for step in steps)]
    view[...] = turned
    back = view.transpose(np.argsort(order))
    back.flags.writeable = draw(st.booleans())
    return back


def repeated(values: np.ndarray, draw: Callable[[Any], Any]) -> np.ndarray:
    """View with strides of zero: one row, column or element stands for all."""
    kept = tuple(slice(0, 1) if n and draw(st.booleans()) else slice(None) for n in values.shape)
    return np.broadcast_to(values[kept], values.shape)


def other_dtype(values: np.ndarray, draw: Callable[[Any], Any]) -> np.ndarray:
    return values.astype(draw(st.sampled_from(
        ("float64", "int32", "int64", "bool", "complex64", "uint16", "object", "S4", "U4")
    )))  # fmt: skip


def other_dimensions(values: np.ndarray, draw: Callable[[Any], Any]) -> np.ndarray:
    wide = values[None, None, None, None]
    return draw(st.sampled_from((np.zeros((), values.dtype), wide)))


# Numbers of one byte have no byte order and no alignment.
FORMS: dict[str, tuple[Callable[..., np.ndarray], bool]] = {
    "strides": (restrided, True),
    "zero strides": (repeated, True),
    "another dtype": (other_dtype, True),
    "byte-swapped": (lambda values, draw: swapped(values), False),
    "unaligned": (lambda values, draw: unaligned(values), False),
    "dimensions": (other_dimensions, True),
}
TAKEN = ("strides", "zero strides")


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data(), sizes=sizes, seed=st.integers(0, 2**32 - 1))
def test_any_array(name: str, data: st.DataObject, sizes: Sizes, seed: int) -> None:
    function = FUNCTIONS[name]
    arrays = function.arrays(np.random.default_rng(seed), sizes)
    form = data.draw(st.sampled_from(list(FORMS)))
    make, bytes_too = FORMS[form]
    able = [key for key, a in arrays.items() if bytes_too or a.itemsize > 1]
    if not able:
        return
    argument = data.draw(st.sampled_from(able))
    changed = make(arrays[argument], data.draw)
    given_arrays = {**arrays, argument: changed}
    before = {key: a.copy() for key, a in given_arrays.items()}
    small = (changed.itemsize == 1 and changed.dtype.kind in "iu") or "scale" in argument
    try:
        got = results(function.call(given_arrays))
    except (ValueError, TypeError) as error:
        assert str(error).startswith(f"{argument}:") or f" {argument} " in f" {error}", error
        # Any strides are accepted, except for codes and scales that must be contiguous.
        assert form not in TAKEN or small, error
    else:
        assert form in TAKEN or not changed.size or changed.dtype == arrays[argument].dtype
        plain = {key: np.ascontiguousarray(a) for key, a in given_arrays.items()}
        if form in TAKEN:
            all_equal_bits(got, results(function.call(plain)))
    for key, a in given_arrays.items():
        if a.dtype.kind != "O":
            np.testing.assert_array_equal(a, before[key])


OUTPUTS: dict[str, Callable[[Arrays, Any], Any]] = {
    "fwht": lambda a, out: hotcore.fwht(a["x"], out=out),
    "hla": lambda a, out: hotcore.hla(a["x"], out=out),
    "gemm_int8": lambda a, out: hotcore.gemm_int8(*a.values(), out=out),
    "gemm_int4": lambda a, out: hotcore.gemm_int4(*a.values(), out=out),
    "forward_linear": lambda a, out: hotcore.forward_linear(*a.values(), out=out),
    "backward_linear": lambda a, out: (
        hotcore.backward_linear(*a.values(), need="gw", key=1, gw_out=out).gw
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
@given(data=st.data(), sizes=sizes, seed=st.integers(0, 2**32 - 1))
def test_any_output(name: str, data: st.DataObject, sizes: Sizes, seed: int) -> None:
    arrays = FUNCTIONS[name].arrays(np.random.default_rng(seed), sizes)
    wanted = results(OUTPUTS[name](arrays, None))[0]
    form = data.draw(st.sampled_from(list(FORMS)))
    out = FORMS[form][0](np.full(wanted.shape, 5, np.float32), data.draw)
    before = out.copy()
    writeable = out.flags.writeable
    try:
        OUTPUTS[name](arrays, out)
    except (ValueError, TypeError) as error:
        assert "out" in str(error) or "gw" in str(error), error
        np.testing.assert_array_equal(out, before)  # no element is written
        assert form != "strides" or not writeable or name not in ("backward_linear",), error
    else:
        assert writeable or not out.size
        equal_bits(np.ascontiguousarray(out), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_devices(name: str) -> None:
    """A tensor without memory, or on another device than the rest, is refused by name."""
    if torch is None:
        pytest.skip("needs torch")
    arrays = FUNCTIONS[name].arrays(np.random.default_rng(0), (32, 16, 16))
    for argument in arrays:
        tensors = {key: torch.from_numpy(a) for key, a in arrays.items()}
        tensors[argument] = tensors[argument].to("meta")
        refused(FUNCTIONS[name].call, f"^{argument}: ", (NotImplementedError, ValueError), tensors)
