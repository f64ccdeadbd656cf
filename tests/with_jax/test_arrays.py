"""JAX arrays in hotcore's own functions, outside of jit: through DLPack, on the CPU."""

from typing import Any

import hotcore
import numpy as np
import pytest
from support import array_functions, data, equal_bits, refused

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_stages(rng: np.random.Generator, dtype: str) -> None:
    x = data(rng, (48, 32)).astype(dtype)
    for function in array_functions(dtype):
        got = function(jnp.asarray(x))
        assert isinstance(got, jax.Array)
        equal_bits(np.asarray(got), function(x))


@pytest.mark.parametrize("recipe", ["default", "fast", "paper"])
def test_a_layer(rng: np.random.Generator, recipe: str) -> None:
    gy, w, x = data(rng, (3, 33, 20)), data(rng, (20, 24)), data(rng, (3, 33, 24))
    wanted = hotcore.backward_linear(gy, w, x, config=recipe, need=("gx", "gw", "gb"), key=2)
    saved = hotcore.compress_activation(jnp.asarray(x), recipe, key=2)
    jaxs = (jnp.asarray(gy), hotcore.quantize_weight(jnp.asarray(w), recipe))
    got = hotcore.backward_linear(*jaxs, saved, need=("gx", "gw", "gb"))
    for ours, theirs in zip(got, wanted, strict=True):
        assert isinstance(ours, jax.Array)
        equal_bits(np.asarray(ours), theirs)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_a_traced_array_is_sent_to_hotcore_jax(transform: Any) -> None:
    x = jnp.ones((4, 16, 16))
    with pytest.raises(TypeError, match=r"x: traced by JAX; .* hotcore\.jax\.linear"):
        transform(lambda x: hotcore.fwht(x).sum())(x)


def test_what_is_not_taken() -> None:
    x = jnp.ones((4, 16))
    refused(lambda: hotcore.fwht(x.astype(jnp.bfloat16)), "x: NumPy cannot read this ArrayImpl")
    with pytest.raises(ValueError, match="x: NumPy arrays of bfloat16 are not supported"):
        hotcore.fwht(np.asarray(x.astype(jnp.bfloat16)))
    refused(lambda: hotcore.fwht(x, out=x), "out: only NumPy, torch and CuPy arrays can be written")
    gone = jnp.array(x)
    gone.delete()
    refused(lambda: hotcore.fwht(gone), "x: a .*ArrayImpl on no one device")


def test_arrays_of_several_devices_are_not_taken() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("JAX found its devices before this test could ask for two")
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    parted = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    with pytest.raises(ValueError, match="x: a .*ArrayImpl on no one device: .*unsharded"):
        hotcore.fwht(jax.device_put(jnp.ones((4, 16)), parted))


def test_results_lie_on_the_device_of_the_first_array() -> None:
    device = jax.devices()[-1]
    x = jax.device_put(jnp.ones((4, 16)), device)
    assert (x + hotcore.fwht(x)).device == device  # JAX refuses a sum over two devices
    assert hotcore.compress_activation(x).data.device == device
