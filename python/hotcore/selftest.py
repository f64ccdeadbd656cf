"""Self-test of a GPU: its products and roundings must have the CPU's bits.

Classes of GPUs outside of :data:`hotcore.gpus.MEASURED` are tested when a process first uses one. A
class with other bits is refused from then on. ``python -m hotcore.info --self-test`` tests every
GPU. Source: docs/gpus.md.
"""

from __future__ import annotations

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


class Access(NamedTuple):
    """Access to a device through a framework that already uses it."""

    name: str
    is_capturing: Callable[[], bool]
    """Whether the caller's stream is being captured into a graph."""
    results: Callable[[], Results]
    """Function that computes some of the arrays of :func:`results` on the device."""


def layer(tokens: int, out_features: int, in_features: int) -> tuple[Any, Any, Any]:
    """Return x, w and g_y of a layer, float32."""
    rng = np.random.default_rng(46)
    sizes = ((tokens, in_features), (out_features, in_features), (tokens, out_features))
    x, w, gy = (rng.standard_normal(size, np.float32) for size in sizes)
    return x, w, gy


SIZES = ((325, 136, 200), (2053, 40, 72))
"""Tokens, out and in features. The second layer runs the quantisers of large layers."""


def results(put: Callable[[Any], Any] = np.asarray, get: Callable[[Any], Any] = np.asarray) -> Any:
    """Compute the self-test's products and roundings.

    Args:
        put: NumPy array -> array on the device; by default the CPU.
        get: array on the device -> NumPy array.

    Returns:
        Name -> NumPy array, equal bit for bit on every backend.
    """
    from . import functions as hot

    arrays: dict[str, Any] = {}
    for sizes in SIZES:
        x, w, gy = map(put, layer(*sizes))
        saved = hot.compress_activation(x, CONFIG, key=KEY)
        gradients = hot.backward_linear(gy, w, saved, config=CONFIG, need=("gx", "gw"), key=KEY)
        codes, scales = hot.quantize(x, key=KEY)
        w_codes, w_scales = hot.quantize(w, rounding="nearest")
        outputs = {
            "compress_activation": saved.data,
            "g_x": gradients.gx,
            "g_w": gradients.gw,
            "forward_linear": hot.forward_linear(x, w, config=CONFIG),
            "quantize": codes,
            "gemm_int8": hot.gemm_int8(codes, w_codes, scales, w_scales),
        }
        arrays |= {f"{name} of {sizes[0]} tokens": array for name, array in outputs.items()}
    large = put((np.arange(2048 * 128) * 2654435761 >> 7).astype(np.int8).reshape(2048, 128))
    scale = put(np.full(1, 2.0**-6, np.float32))
    product = hot.gemm_int8(large, large, scale, scale, out_dtype="float16")
    arrays["gemm_int8 of 2048 tokens"] = product
    return {name: get(array) for name, array in arrays.items()}


def mismatches(computed: Results, expected: Results) -> list[str]:
    """Return the names of the computed arrays whose bits differ from those expected."""

    def bits(array: Any) -> Any:
        return array.dtype, array.shape, array.tobytes()

    return [name for name, array in computed.items() if bits(array) != bits(expected[name])]


def access_of(device: int, start: bool = False) -> Access | None:
    """Return the access to a CUDA device by a framework of this process; None: there is none.

    Args:
        device: its number.
        start: import the framework if necessary, and let it start CUDA.
    """
    return next(filter(None, (find(device, start) for find in (_torch, _cupy, _jax))), None)


def _module(name: str, start: bool) -> Any:
    if start:
        try:
            importlib.import_module(name)
        except ImportError:
            return None
    return sys.modules.get(name)


def _torch(device: int, start: bool) -> Access | None:
    torch = _module("torch", start)
    if torch is None or not torch.cuda.is_available():
        return None
    if not (start or torch.cuda.is_initialized()):
        return None

    def put(array: Any) -> Any:
        return torch.from_numpy(array).to(f"cuda:{device}")

    def is_capturing() -> bool:
        with torch.cuda.device(device):
            return bool(torch.cuda.is_current_stream_capturing())

    return Access("torch", is_capturing, lambda: results(put, lambda tensor: tensor.cpu().numpy()))


def _cupy(device: int, start: bool) -> Access | None:
    cupy = _module("cupy", start)
    if cupy is None:
        return None

    def on_device() -> Any:
        with cupy.cuda.Device(device):
            return results(cupy.asarray, cupy.asnumpy)

    return Access("CuPy", lambda: cupy.cuda.get_current_stream().is_capturing(), on_device)


def _jax(device: int, start: bool) -> Access | None:
    calls = _module("hotcore.jax.calls", start)
    if calls is None or not calls.has_cuda():
        return None
    return Access("JAX", lambda: False, calls.self_test)  # XLA captures no stream in Python


class Gate:
    """Tests classes of GPUs once, and refuses those whose bits differ. Threads wait for a test."""

    def __init__(self, find: Callable[[int], Access | None] = access_of) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._failures: dict[gpus.Capability, list[str]] = {}
        self._tester: int | None = None

    def admits(self, device: int, capability: gpus.Capability) -> bool:
        """Whether the device's class has passed. False: not tested yet, ask again.

        Raises:
            NotImplementedError: the class has failed.
            RuntimeError: the class is not tested yet, and the stream is being captured: replays of
                the graph would never test it.
        """
        if capability in gpus.MEASURED:
            return True
        if threading.get_ident() == self._tester:  # the test's own calls
            return False
        name = f"cuda:{device}: compute capability {capability[0]}.{capability[1]}"
        with self._lock:
            if capability not in self._failures:
                access = self._find(device)
                if access is None:
                    return False
                if access.is_capturing():
                    raise RuntimeError(
                        f"{name} is tested at its first use, which must not be inside of a stream "
                        "capture; call hotcore or hot.convert on this GPU before the capture"
                    )
                self._failures[capability] = self.mismatches(access)[0]
        if failed := self._failures[capability]:
            raise NotImplementedError(
                f"{name} fails hotcore's self-test: not the CPU's bits in {', '.join(failed)}; "
                "hotcore refuses it. Please report what `python -m hotcore.info --self-test` prints"
            )
        return True

    def mismatches(self, access: Access) -> tuple[list[str], str]:
        """Test now; return the names of the arrays that differ, and a summary."""

        # A new thread has no dispatch mode, no autocast, no trace and the default stream.
        def run() -> tuple[list[str], str]:
            self._tester = threading.get_ident()
            try:
                begin = time.perf_counter()
                arrays = access.results()
                ms = 1e3 * (time.perf_counter() - begin)
            finally:
                self._tester = None
            return mismatches(
                arrays, results()
            ), f"{len(arrays)} arrays, {ms:.0f} ms, {access.name}"

        with ThreadPoolExecutor(1, "hotcore-self-test") as pool:
            return pool.submit(run).result()


gate = Gate()
"""This process's gate."""


def report(
    devices: Iterable[tuple[int, str]], find: Callable[[int], Access | None] | None = None
) -> tuple[bool, list[str]]:
    """Test CUDA devices by number and name; return True if all passed, and a line for each."""
    lines, passed = [], True
    for device, name in devices:
        access = access_of(device, start=True) if find is None else find(device)
        verdict = "not tested: no torch, CuPy or JAX that sees the GPU"
        if access is not None:
            try:
                failed, done = gate.mismatches(access)
                names = ", ".join(failed)
                verdict = f"FAILED: not the CPU's bits in {names}" if failed else f"passed ({done})"
            except Exception as error:  # for example a kernel that does not run
                verdict = f"FAILED: {type(error).__name__}: {error}"
        passed = passed and verdict.startswith("passed")
        lines.append(f"cuda:{device} {name}: {verdict}")
    return passed, lines
