"""Arrays of other frameworks on CUDA, through DLPack."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hotcore  # noqa: E402  (after the skip: hotcore itself needs no torch)
from support import array_functions, refused  # noqa: E402
from support_gpu import RECIPES  # noqa: E402

pytestmark = pytest.mark.cuda


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


def numpy_layer(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((130, 48), (48, 64), (130, 64))
    gy, w, x = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return gy, w, x


def expected(arrays: tuple[np.ndarray, ...], recipe: str) -> Any:
    gy, w, x = arrays
    return hotcore.backward_linear(gy, w, x, config=recipe, need=("gx", "gw", "gb"), key=5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_cupy(cupy: Any, recipe: str, rng: np.random.Generator) -> None:
    arrays = numpy_layer(rng)
    wanted = expected(arrays, recipe)
    gy, w, x = map(cupy.asarray, arrays)
    got = hotcore.backward_linear(gy, w, x, config=recipe, need=("gx", "gw", "gb"), key=5)
    for name in ("gx", "gw"):
        result = getattr(got, name)
        assert isinstance(result, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(result), getattr(wanted, name), name)
    np.testing.assert_allclose(cupy.asnumpy(got.gb), wanted.gb, rtol=1e-4, atol=1e-4)


def test_cupy_on_its_current_stream(cupy: Any, rng: np.random.Generator) -> None:
    arrays = numpy_layer(rng)
    wanted = expected(arrays, "default")
    slow = cupy.ones((4096, 4096), dtype=cupy.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = [cupy.zeros_like(cupy.asarray(array)) for array in arrays]
        sources = [cupy.asarray(array) for array in arrays]
        for _ in range(8):  # the values arrive late, on this stream only
            slow = slow @ slow * cupy.float32(1e-4)
        for target, source in zip(late, sources, strict=True):
            target[...] = source
        gy, w, x = late
        got = hotcore.backward_linear(gy, w, x, need=("gx", "gw"), key=5)
    stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(got.gx), wanted.gx)
    np.testing.assert_array_equal(cupy.asnumpy(got.gw), wanted.gw)


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_cupy_stages(cupy: Any, dtype: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((48, 32)).astype(dtype)
    for function in (
        *array_functions(dtype),
        lambda x: hotcore.compress_activation(x, key=3).codes(),
        lambda x: hotcore.compress_activation(x, key=3).scales(),
    ):
        got = function(cupy.asarray(x))
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(got), function(x))


def test_cupy_arrays_are_written(cupy: Any, rng: np.random.Generator) -> None:
    gy, w, x = map(cupy.asarray, numpy_layer(rng))
    alone = hotcore.backward_linear(gy, w, x, need="gw", key=5).gw
    total = cupy.ones_like(alone)
    got = hotcore.backward_linear(gy, w, x, need="gw", key=5, gw_out=total, accumulate=True)
    assert got.gw is total
    np.testing.assert_array_equal(cupy.asnumpy(total), cupy.asnumpy(alone) + np.float32(1))
    out = cupy.empty(x.shape, cupy.float16)
    assert hotcore.fwht(x, out=out) is out
    np.testing.assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(hotcore.fwht(x)).astype("f2"))
    codes, other = hotcore.quantize(x), np.empty(x.shape, np.float32)
    refused(lambda: hotcore.fwht(x, out=other), "out: a numpy array; x is a cupy array")
    refused(lambda: hotcore.dequantize(*codes, dtype="bfloat16"), "dtype: CuPy has no bfloat16")


@pytest.mark.parametrize("recipe", ("default", "fast"))
def test_jax(jax: Any, recipe: str, rng: np.random.Generator) -> None:
    arrays = numpy_layer(rng)
    wanted = expected(arrays, recipe)
    device = jax.devices("gpu")[0]
    gy, w, x = (jax.device_put(array, device) for array in arrays)
    got = hotcore.backward_linear(gy * 1, w, x, config=recipe, need=("gx", "gw", "gb"), key=5)
    for name in ("gx", "gw"):
        result = getattr(got, name)
        assert isinstance(result, jax.Array) and result.devices() == {device}
        np.testing.assert_array_equal(np.asarray(result), getattr(wanted, name), name)
    np.testing.assert_allclose(np.asarray(got.gb), wanted.gb, rtol=1e-4, atol=1e-4)


def test_jax_bfloat16(jax: Any, rng: np.random.Generator) -> None:
    gy, w, x = (jax.numpy.asarray(array, dtype=jax.numpy.bfloat16) for array in numpy_layer(rng))
    got = hotcore.backward_linear(gy, w, x, need=("gx", "gw"), key=5)
    on_cpu = [torch.from_numpy(np.asarray(a, dtype=np.float32)).bfloat16() for a in (gy, w, x)]
    wanted = hotcore.backward_linear(*on_cpu, need=("gx", "gw"), key=5)
    for a, b in ((got.gx, wanted.gx), (got.gw, wanted.gw)):
        assert a.dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(np.asarray(a, dtype=np.float32), b.float().numpy())
