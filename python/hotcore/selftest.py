"""A self-test of a GPU: products and roundings, whose bits have to be the CPU's.

A class of GPUs on which nobody has measured hotcore (:data:`hotcore.gpus.MEASURED` holds the
others) is tested when a process first uses it. A class with other bits is refused from then on.
``python -m hotcore.info --self-test`` tests every GPU. Source: docs/gpus.md.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from . import gpus
from .config import HotConfig, Key

Results = Mapping[str, Any]
"""Name -> NumPy array."""

KEY = Key(0, 7)
CONFIG = HotConfig.recipe("default", forward="int8")


class Way(NamedTuple):
    """A way to a device: a framework that uses it already. (XLA captures no stream in Python.)"""

    name: str
    is_capturing: Callable[[], bool]
    """Whether the caller's stream is being captured into a graph."""
    results: Callable[[], Results]
    """Computes some of the arrays of :func:`results`, on the device."""


def layer(tokens: int, out_features: int, in_features: int) -> tuple[Any, Any, Any]:
    """x, w and g_y of a layer, float32."""
    rng = np.random.default_rng(46)
    sizes = ((tokens, in_features), (out_features, in_features), (tokens, out_features))
    x, w, gy = (rng.standard_normal(size, np.float32) for size in sizes)
    return x, w, gy


SIZES = ((325, 136, 200), (2053, 40, 72))
"""Tokens, out and in features. The second layer is quantised by the kernels of large ones."""


def results(put: Callable[[Any], Any] = np.asarray, get: Callable[[Any], Any] = np.asarray) -> Any:
    """The self-test's products and roundings.

    Args:
        put: NumPy array -> array on the device; by default the CPU.
        get: array on the device -> NumPy array.

    Returns:
        Name -> NumPy array, equal bit for bit on every backend.
    """
    from . import functions as hot

    made = {}
    for sizes in SIZES:
        x, w, gy = map(put, layer(*sizes))
        saved = hot.compress_activation(x, CONFIG, key=KEY)
        gradients = hot.backward_linear(gy, w, saved, config=CONFIG, need=("gx", "gw"), key=KEY)
        of = f" of {sizes[0]} tokens"
        made["compress_activation" + of] = saved.data
        made["g_x" + of], made["g_w" + of] = gradients.gx, gradients.gw
        made["forward_linear" + of] = hot.forward_linear(x, w, config=CONFIG)
        made["quantize" + of], scales = hot.quantize(x, key=KEY)
        codes, other_scales = hot.quantize(w, rounding="nearest")
        made["gemm_int8" + of] = hot.gemm_int8(made["quantize" + of], codes, scales, other_scales)
    large = put((np.arange(2048 * 128) * 2654435761 >> 7).astype(np.int8).reshape(2048, 128))
    scale = put(np.full(1, 2.0**-6, np.float32))
    product = hot.gemm_int8(large, large, scale, scale, out_dtype="float16")
    made["gemm_int8 of 2048 tokens"] = product
    return {name: get(array) for name, array in made.items()}


def mismatches(found: Results, expected: Results) -> list[str]:
    """Names of the arrays in ``found`` whose bits differ from those expected."""

    def bits(array: Any) -> Any:
        return array.dtype, array.shape, array.tobytes()

    return [name for name, array in found.items() if bits(array) != bits(expected[name])]


def way_of(device: int, start: bool = False) -> Way | None:
    """A way to a CUDA device by a framework that this process uses; None if there is none.

    Args:
        device: its number.
        start: also import a framework, and let it start its use of CUDA.
    """
    return next(filter(None, (find(device, start) for find in (_torch, _cupy, _jax))), None)


def _module(name: str, start: bool) -> Any:
    if start:
        try:
            importlib.import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)


def _torch(device: int, start: bool) -> Way | None:
    torch = _module("torch", start)
    if torch is None or not torch.cuda.is_available():
        return None
    if not (start or torch.cuda.is_initialized()):
        return None
    where = f"cuda:{device}"

    def put(array: Any) -> Any:
        return torch.from_numpy(array).to(where)

    def is_capturing() -> bool:
        with torch.cuda.device(device):
            return bool(torch.cuda.is_current_stream_capturing())

    made = functools.partial(results, put, lambda tensor: tensor.cpu().numpy())
    return Way("torch", is_capturing, made)


def _cupy(device: int, start: bool) -> Way | None:
    cupy = _module("cupy", start)
    if cupy is None:
        return None

    def on_device() -> Results:
        with cupy.cuda.Device(device):
            found: Results = results(cupy.asarray, cupy.asnumpy)
            return found

    return Way("CuPy", lambda: cupy.cuda.get_current_stream().is_capturing(), on_device)


def _jax(device: int, start: bool) -> Way | None:
    calls = _module("hotcore.jax.calls", start)
    if calls is None or not calls.has_cuda():
        return None
    return Way("JAX", lambda: False, calls.self_test)


class Gate:
    """Tests classes of GPUs once, and refuses those whose bits differ. Threads wait for a test."""

    def __init__(self, way: Callable[[int], Way | None] = way_of) -> None:
        """Nothing is tested yet. ``way`` finds the way to a device."""
        self._way = way
        self._lock = threading.Lock()
        self._failures: dict[gpus.Capability, list[str]] = {}
        self._tester: int | None = None

    def admits(self, device: int, capability: gpus.Capability) -> bool:
        """Whether the device's class has passed; False: it is to be asked for again.

        Raises:
            NotImplementedError: the class has failed.
            RuntimeError: the class is not tested yet, and the stream is being captured. A graph
                would be replayed without any later call that could test it.
        """
        if capability in gpus.MEASURED:
            return True
        if threading.get_ident() == self._tester:  # the test's own calls
            return False
        name = f"cuda:{device}: compute capability {capability[0]}.{capability[1]}"
        with self._lock:
            if capability not in self._failures:
                way = self._way(device)
                if way is None:
                    return False
                if way.is_capturing():
                    raise RuntimeError(
                        f"{name} is tested at its first use, which must not be inside of a stream "
                        "capture; call hotcore once before it (hot.convert of a model on the GPU "
                        "does)"
                    )
                self._failures[capability] = self.mismatches(way)[0]
        if failed := self._failures[capability]:
            raise NotImplementedError(
                f"{name} fails hotcore's self-test: not the CPU's bits in {', '.join(failed)}; "
                "hotcore refuses it. Please report what `python -m hotcore.info --self-test` prints"
            )
        return True

    def mismatches(self, way: Way) -> tuple[list[str], str]:
        """Names of the arrays whose bits differ, and what was done; tested anew with every call."""

        # A thread of its own has no dispatch mode, no autocast, no trace and the default stream.
        def run() -> tuple[list[str], str]:
            self._tester = threading.get_ident()
            try:
                begin = time.perf_counter()
                found = way.results()
                ms = 1e3 * (time.perf_counter() - begin)
            finally:
                self._tester = None
            return mismatches(found, results()), f"{len(found)} arrays, {ms:.0f} ms, {way.name}"

        with ThreadPoolExecutor(1, "hotcore-self-test") as pool:
            return pool.submit(run).result()


gate = Gate()
"""The one of this process."""


def report(
    devices: Iterable[tuple[int, str]], way: Callable[[int], Way | None] | None = None
) -> tuple[bool, list[str]]:
    """Test CUDA devices, given by number and name; whether all passed, and a line for each."""
    lines, passed = [], True
    for device, name in devices:
        found = way_of(device, start=True) if way is None else way(device)
        verdict = "not tested: no torch, CuPy or JAX that sees the GPU"
        if found is not None:
            try:
                failed, done = gate.mismatches(found)
                names = ", ".join(failed)
                verdict = f"FAILED: not the CPU's bits in {names}" if failed else f"passed ({done})"
            except Exception as error:  # of a kernel that does not run, say
                verdict = f"FAILED: {type(error).__name__}: {error}"
        passed = passed and verdict.startswith("passed")
        lines.append(f"cuda:{device} {name}: {verdict}")
    return passed, lines
