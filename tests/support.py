"""Helpers of the test files: data, dtypes, poisoned outputs, runs with several settings."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hotcore
import numpy as np
import pytest
import reference
from hotcore import HotConfig, Key, _core

# Tests of NumPy arrays run without torch.
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None

FLOATS = ("float32", "float16", "bfloat16")
SIZES = (0, 1, 2, 3, 5, 13, 16, 17, 31, 64, 97, 197)
ALL = ("gx", "gw", "gb")
KEY = Key(0x1234_5678_9ABC_DEF0, 0xFEDC_BA98_7654_3210, 8191)
OTHER_KEY = Key(42, 43, 44)
SHORT_TEXT = [("one", f"def f{i}(a, b):\n    return a * {i} + b\n" * 40) for i in range(60)]
"""Package and text of each file, for bench_gpt.py."""
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None
    and not (Path(__file__).parents[1] / "third_party/torchao").is_dir(),
    reason="no torchao",  # one whose import fails is a failure
)


@contextmanager
def without_broken_torchvision() -> Iterator[None]:
    """Import transformers and peft inside: a torchvision for another torch breaks their import.

    They need no torchvision, so one that cannot be imported is hidden. Their warnings are ignored.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError):
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            sys.modules["torchvision"] = None  # find_spec and import then find none
            try:
                yield
            finally:
                del sys.modules["torchvision"]
        else:
            yield


def ran(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its status."""
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def output_of(*arguments: str, folder: Path, timeout: float) -> str:
    """Return the output of a Python program that must succeed without messages on stderr.

    It imports from the paths of this process and from `folder`.
    """
    paths = [str(Path(hotcore.__file__).parents[1]), str(folder), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # Python 3.12 and newer warn of every fork beside threads.
    environment["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"
    done = ran(sys.executable, *arguments, env=environment, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(
    call: Callable[..., object], says: str, error: Any = ValueError, *arguments: Any, **options: Any
) -> None:
    """Check that a call with these arguments raises an error whose message has this pattern."""
    __tracebackhide__ = True
    with pytest.raises(error, match=says):
        call(*arguments, **options)


def report_of(script: Any, path: Path, *words: str) -> Any:
    """Run a script of benchmarks/ and return the report that it has written there."""
    script.main([*words, "--json", str(path)])
    return json.loads(path.read_text())


def isas() -> list[str]:
    names = []
    for name in ("plain", "avx2", "avx512", "amx"):
        try:
            _core.CoreContext(1, name)
        except NotImplementedError:
            continue
        names.append(name)
    return names


@contextmanager
def running(threads: int = 0, isa: str | None = None) -> Iterator[None]:
    """Run hotcore with these threads and this instruction set, then restore the settings."""
    before = hotcore.num_threads()
    try:
        hotcore.set_num_threads(threads)
        hotcore.set_isa(isa)
        yield
    finally:
        hotcore.set_isa(None)
        hotcore.set_num_threads(before)


def same_on_every_path(call: Callable[[], Any]) -> None:
    """Assert that 1 and 8 threads and every instruction set give the bits of the plain path."""
    with running(1, "plain"):
        expected = flat(call())
    for isa in isas():
        for threads in (1, 3, 8):
            with running(threads, isa):
                for got, wanted in zip(flat(call()), expected, strict=True):
                    equal_bits(got, wanted, f"{isa}, {threads} threads")


def flat(result: Any) -> list[np.ndarray]:
    if isinstance(result, hotcore.Saved):
        return [numpy_of(result.data)]
    if isinstance(result, tuple):
        return [array for item in result if item is not None for array in flat(item)]
    return [numpy_of(result)]


def array(values: np.ndarray, dtype: str) -> Any:
    """``values`` as an array of ``dtype``: NumPy, or a torch tensor for bfloat16."""
    if dtype == "bfloat16":
        if torch is None:
            pytest.skip("bfloat16 needs torch")
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).bfloat16()
    with np.errstate(over="ignore"):  # overflows to Inf
        return values.astype(dtype)


def given_as(dtype: str, *arrays: np.ndarray) -> list[Any]:
    """Return the arrays in a framework with ``dtype``: torch tensors for bfloat16."""
    if dtype != "bfloat16":
        return list(arrays)
    if torch is None:
        pytest.skip("bfloat16 needs torch")
    return [torch.from_numpy(values) for values in arrays]


def read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.flags.writeable = False
    return values


def swapped(values: np.ndarray) -> np.ndarray:
    return values.astype(values.dtype.newbyteorder())


def unaligned(values: np.ndarray) -> np.ndarray:
    raw = np.zeros(values.nbytes + 1, np.uint8)
    view = raw[1:].view(values.dtype).reshape(values.shape)
    view[...] = values
    return view


def array_functions(dtype: str) -> tuple[Callable[[Any], Any], ...]:
    """Every stage as a function from a matrix of ``dtype`` to an array of its kind."""
    return (
        hotcore.fwht,
        lambda x: hotcore.hla(x, key=3),
        lambda x: hotcore.quantize(x, bits=4, packed=True, key=3)[0],
        lambda x: hotcore.quantize(x, scale="channel", key=3)[1],
        lambda x: hotcore.dequantize(*hotcore.quantize(x, key=3), dtype=dtype),
        lambda x: hotcore.gemm_int8(hotcore.quantize(x)[0], hotcore.quantize(x)[0]),
        lambda x: hotcore.unpack_int4(hotcore.pack_int4(hotcore.quantize(x, bits=4)[0])),
        lambda x: hotcore.compress_activation(x, key=3).data,
        lambda x: hotcore.decompress_activation(hotcore.compress_activation(x, key=3), 1),
        lambda x: hotcore.quantize_weight(x).data,
        lambda x: hotcore.quantize_forward_weight(x).data,
        lambda x: hotcore.quantize_forward_input(x).data,
        lambda x: hotcore.quantize_forward_input(x, keep=True, key=3)[1].data,
        lambda x: hotcore.forward_linear(x, x, x[:, 0].copy()),
        lambda x: hotcore.forward_linear(hotcore.quantize_forward_input(x), x),
    )


def numpy_of(value: Any) -> np.ndarray:
    """A NumPy array of the same values; bfloat16 is widened to float32."""
    if isinstance(value, np.ndarray):
        return value
    if value.dtype == torch.bfloat16:
        return value.float().numpy()
    return value.numpy()


def widened(value: Any) -> np.ndarray:
    """Widen to float32, which is exact for all three dtypes."""
    return numpy_of(value).astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded once to ``dtype``, as float32."""
    return widened(array(values, dtype))


def poison(shape: tuple[int, ...], dtype: str) -> Any:
    """An array of bytes that no call writes, so that unwritten elements show."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4}[dtype]
    raw = np.full(int(np.prod(shape, dtype=np.int64)) * size, 0xA5, dtype=np.uint8)
    if dtype == "bfloat16":
        return torch.from_numpy(raw).view(torch.bfloat16).reshape(shape)
    return raw.view(dtype).reshape(shape)


def equal_bits(got: Any, wanted: Any, what: str = "") -> None:
    """Assert equal shape, dtype and bits; every NaN counts as the same."""
    a, b = numpy_of(got), numpy_of(wanted)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype}, expected {b.dtype}"
    same = a == b
    if a.dtype.kind == "f":  # tells -0 from 0, too
        same = (bits(a) == bits(b)) | (np.isnan(a) & np.isnan(b))
    if not same.all():
        where = tuple(int(i) for i in np.argwhere(~same)[0])
        count = int((~same).sum())
        raise AssertionError(
            f"{what}: {count} of {a.size} differ, first at {where}: {a[where]!r}, "
            f"expected {b[where]!r}"
        )


def all_equal_bits(got: Iterable[Any], wanted: Iterable[Any], what: str = "") -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        equal_bits(ours, theirs, what)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def data(rng: np.random.Generator, shape: tuple[int, ...], kind: str = "normal") -> np.ndarray:
    """float32 test data of several kinds."""
    values = rng.standard_normal(shape).astype(np.float32)
    if kind == "outliers":
        values *= np.where(rng.random(shape) < 0.02, np.float32(100), np.float32(1))
    elif kind == "wide":
        values *= np.exp2(rng.integers(-30, 30, shape)).astype(np.float32)
    elif kind == "integers":
        values = np.rint(values * 4).astype(np.float32)
    elif kind == "halves":  # ties of rounding
        values = (np.rint(values * 8) / 2).astype(np.float32)
    elif kind == "tiny":
        values *= np.float32(2.0**-104)
    elif kind == "zeros":
        values *= 0
    elif kind == "special":
        bad = np.array([np.nan, np.inf, -np.inf, -0.0, 2.0**-149, 3e38], np.float32)
        values = np.where(rng.random(shape) < 0.05, rng.choice(bad, shape), values)
    elif kind == "sparse":
        values *= rng.random(shape) < 0.1
    else:
        assert kind == "normal", kind
    return values


KINDS = ("normal", "outliers", "wide", "integers", "halves", "tiny", "zeros", "sparse", "special")


def layer(
    rng: np.random.Generator, tokens: int, outs: int, ins: int, kind: str = "normal"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """g_y, w and x."""
    shapes = (tokens, outs), (outs, ins), (tokens, ins)
    gy, w, x = (data(rng, shape, kind) for shape in shapes)
    return gy, w, x


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


def same_saved(got: hotcore.Saved, wanted: reference.Saved, what: str = "") -> None:
    """Check codes, scales and exponents of a compressed x against the reference."""
    if wanted.exponents is not None:
        equal_bits(got.exponents(), wanted.exponents, f"{what} exponents")
    else:
        assert got.exponents() is None
    if wanted.packed is not None:
        equal_bits(got.codes(), wanted.packed, f"{what} codes")
        # Padding of the last group's columns is in the codes, not in the scales.
        expected = reference.bf16_values(wanted.scales)
    else:
        equal_bits(got.codes(), wanted.codes, f"{what} codes")
        expected = wanted.scales
    equal_bits(got.scales(), expected, f"{what} scales")


def check_against_reference(
    gy: Any, w: Any, x: Any, config: HotConfig, key: Key = KEY, back_key: Key = KEY, what: str = ""
) -> None:
    """Return every array of forward and backward, for comparisons to the bit."""
    saved = hotcore.compress_activation(x, config, key=key)
    model = reference.compress_activation(widened(x), config, key=key)
    same_saved(saved, model, what)
    parts = {"need": ALL, "key": back_key, "out_dtype": "float32"}
    got = hotcore.backward_linear(gy, w, saved, **parts)
    wide = (widened(gy), widened(w), model)
    expected = reference.backward_linear(*wide, config=config, **parts)
    for name, ours, theirs in zip(ALL, got, expected, strict=True):
        equal_bits(ours, theirs, f"{what} {name}")


def strided(values: Any) -> Any:
    """Return the values in an array with gaps and, in NumPy, a negative stride."""
    if isinstance(values, np.ndarray):
        big = np.zeros(tuple(2 * n + 1 for n in values.shape), values.dtype)
        view = big[tuple(slice(2 * n - 1 if n else 0, None, -2) for n in values.shape)]
        view = view[tuple(slice(0, n) for n in values.shape)]
    else:
        big = torch.zeros(tuple(2 * n + 1 for n in values.shape), dtype=values.dtype)
        view = big[tuple(slice(0, 2 * n, 2) for n in values.shape)]
    view[...] = values
    return view


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = (np.asarray(values, np.float64).ravel() for values in (a, b))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


@contextmanager
def saved_tensors(leaves: bool = False) -> Iterator[list[torch.Tensor]]:
    """Collect tensors that autograd saves inside; leaves (parameters, inputs) only on request."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if leaves or not (tensor.is_leaf and tensor.requires_grad):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def storage_bytes(kept: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> dict[int, int]:
    others = {tensor.untyped_storage()._cdata for tensor in but}
    sizes = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in kept)}
    return {key: size for key, size in sizes.items() if key not in others}


def nbytes(kept: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def keys() -> Any:
    """A hypothesis strategy: keys of every kind, without a counter.

    Imported here: the GPU machine's tests share this file, and it has no hypothesis.
    """
    from hypothesis import strategies as st

    words = st.integers(0, 2**64 - 1)
    # The counter is fixed, too: hypothesis would invent an address.
    return st.builds(Key, words, words, st.integers(0, 8191), st.just(0))


def parted_key(rng: np.random.Generator) -> tuple[Key, Key, np.ndarray]:
    """Return a key, an equal key with part of its offset in a counter, and the counter."""
    seed, offset, value = (int(n) for n in rng.integers(1 << 64, size=3, dtype=np.uint64))
    counter = np.array([value], np.uint64)
    stream, address = int(rng.integers(8192)), counter.ctypes.data
    parted = Key(seed, (offset - value) % (1 << 64), stream, address)
    return Key(seed, offset, stream), parted, counter
