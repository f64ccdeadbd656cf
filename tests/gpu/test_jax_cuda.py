"""hotcore.jax on CUDA: the bits of the CPU, under jit, on XLA's stream and in its memory."""

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hotcore  # noqa: E402  (after the skip)
from support_gpu import RECIPES  # noqa: E402

pytestmark = pytest.mark.cuda

SEED = 2**40 + 7


@pytest.fixture(scope="module")
def hot(jax: Any) -> Any:
    return pytest.importorskip("hotcore.jax", exc_type=ImportError)


def test_the_self_test_by_xla(hot: Any) -> None:
    from hotcore import selftest
    from hotcore.jax import calls

    assert calls.has_cuda() and selftest.mismatches(calls.self_test(), selftest.results()) == []


def layer(rng: np.random.Generator, tokens: int, outs: int, ins: int) -> list[np.ndarray]:
    """Return gy, x, w, b."""
    shapes = ((tokens, outs), (tokens, ins), (outs, ins), (outs,))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def key_of(jax: Any, number: int) -> Any:
    words = np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(words)


def loss(hot: Any, gy: Any, x: Any, w: Any, b: Any, key: Any, config: str = "default") -> Any:
    y = hot.linear(x, w, b, key=key, config=config)
    return (y.astype("float32") * gy.astype("float32")).sum()


def gradients(jax: Any, hot: Any, device: Any, arrays: Any, key: Any, config: str) -> list[Any]:
    step = jax.jit(jax.grad(functools.partial(loss, hot, config=config), (1, 2, 3)))
    return list(step(*(jax.device_put(array, device) for array in (*arrays, key))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_of_the_cpu(
    jax: Any, hot: Any, recipe: str, dtype: str, rng: np.random.Generator
) -> None:
    cpu, cuda = jax.devices("cpu")[0], jax.devices("cuda")[0]
    for sizes in ((130, 48, 64), (4096, 512, 768), (1, 16, 16)):
        arrays = [jax.numpy.asarray(array, dtype) for array in layer(rng, *sizes)]
        key = key_of(jax, SEED)
        got = gradients(jax, hot, cuda, arrays, key, recipe)
        wanted = gradients(jax, hot, cpu, arrays, key, recipe)
        assert all(result.devices() == {cuda} for result in got)
        floats = [[np.asarray(part, np.float32) for part in parts] for parts in (got, wanted)]
        for i, name in enumerate(("gx", "gw")):
            np.testing.assert_array_equal(floats[0][i], floats[1][i], f"{name} {sizes}")
        np.testing.assert_allclose(floats[0][2], floats[1][2], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [1, 64, 256])
def test_8_bit_forward(
    jax: Any, hot: Any, block: int, dtype: str, rng: np.random.Generator
) -> None:
    config = hotcore.HotConfig(forward="int8", forward_block=block)
    product = jax.jit(functools.partial(hot.linear, key=key_of(jax, SEED), config=config))
    for sizes in ((130, 48, 64), (4096, 512, 768), (1, 16, 16)):
        _, *arrays = (jax.numpy.asarray(array, dtype) for array in layer(rng, *sizes))
        got, wanted = (
            np.asarray(product(*(jax.device_put(array, device) for array in arrays)), np.float32)
            for device in (jax.devices("cuda")[0], jax.devices("cpu")[0])
        )
        np.testing.assert_array_equal(got, wanted, f"{sizes}")


def test_steps_draw_anew_and_none_waits(jax: Any, hot: Any, rng: np.random.Generator) -> None:
    """With many layers in flight, kernels read their seeds in place when they run."""
    gy, x, w, b = (jax.device_put(array) for array in layer(rng, 512, 256, 256))
    keys = jax.random.split(jax.random.key(1), 24)

    @jax.jit
    def all_steps(w: Any, keys: Any) -> Any:
        step = jax.grad(functools.partial(loss, hot), 2)
        return jax.lax.map(lambda key: step(gy, x, w, b, key), keys)

    together = np.asarray(all_steps(w, keys))
    one = jax.jit(jax.grad(functools.partial(loss, hot), 2))
    alone = [one(gy, x, w, b, key) for key in keys]  # queued, read later
    for i, result in enumerate(alone):
        np.testing.assert_array_equal(together[i], np.asarray(result), f"step {i}")
    assert len({result.tobytes() for result in together}) == len(keys)
