"""hotcore.jax.flax: linen's and nnx's layers, with flax itself."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

hot = pytest.importorskip("hotcore.jax", exc_type=ImportError)
pytest.importorskip("flax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import errors, linen, nnx  # noqa: E402
from hotcore.jax.flax import HotDense, HotLinear  # noqa: E402
from support import cosine, equal_bits, refused  # noqa: E402

X = jax.random.normal(jax.random.key(0), (4, 50, 64))
KEY = jax.random.key(3)


class Net(linen.Module):
    kind: Any
    options: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        more = dict(self.options or {})
        x = linen.gelu(self.kind(128, name="up", **more)(x))
        return self.kind(64, name="down", **more)(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [True, False])
def test_linen(dtype: Any, use_bias: bool) -> None:
    """The same parameters and forward as Dense; HOT's gradients."""
    options = {"use_bias": use_bias, "dtype": dtype}
    plain, ours = Net(linen.Dense, options), Net(HotDense, options)
    params = ours.init(jax.random.key(1), X)
    shapes = jax.tree.map(jnp.shape, plain.init(jax.random.key(1), X))
    assert jax.tree.map(jnp.shape, params) == shapes

    def loss(model: Any, params: Any, **more: Any) -> Any:
        return (model.apply(params, X, **more).astype(jnp.float32) ** 2).mean()

    y = ours.apply(params, X, rngs={"hot": KEY})
    assert y.dtype == dtype
    np.testing.assert_allclose(
        *(np.asarray(v, np.float32) for v in (y, plain.apply(params, X))), rtol=1e-4, atol=1e-5
    )
    exact = jax.grad(lambda p: loss(plain, p))(params)
    gradients = jax.jit(jax.grad(lambda p, key: loss(ours, p, rngs={"hot": key})))(params, KEY)
    for got, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert got.dtype == wanted.dtype and cosine(got, wanted) > 0.99
    kernels = [tree["params"]["up"]["kernel"] for tree in (gradients, exact)]
    assert not np.array_equal(*kernels)  # HOT's backward
    other = jax.grad(lambda p: loss(ours, p, rngs={"hot": jax.random.key(4)}))(params)
    assert not np.array_equal(other["params"]["up"]["kernel"], kernels[0])


IN_EVAL = hot.HotConfig(forward="int8", forward_in_eval=True)


def test_linen_in_eval_and_errors() -> None:
    params = Net(HotDense).init(jax.random.key(1), X)
    quiet = Net(HotDense, {"deterministic": True})
    plain = Net(linen.Dense).apply(params, X)
    np.testing.assert_allclose(quiet.apply(params, X), plain, rtol=1e-5, atol=1e-6)
    refused(lambda: Net(HotDense).apply(params, X), "hot", errors.InvalidRngError)
    for more in ({}, {"deterministic": True}):
        for options, message in (
            ({"precision": "highest"}, "precision: HOT replaces"),
            ({"config": "best"}, "'best' is not one of"),
            ({"config": IN_EVAL}, "config: expected forward_in_eval"),
        ):
            with pytest.raises(ValueError, match=message):
                Net(HotDense, {**options, **more}).apply(params, X, rngs={"hot": KEY})


class Step(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return HotDense(64, name="layer")(x), None


def test_linen_scan_and_remat() -> None:
    """Layers under scan and remat have different keys; backward uses the forward's keys."""
    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "hot": True}}
    stack = linen.scan(linen.remat(Step), length=3, **over)()
    params = stack.init(jax.random.key(1), X, None)
    assert params["params"]["layer"]["kernel"].shape == (3, 64, 64)

    def loss(params: Any, x: Any) -> Any:
        return (stack.apply(params, x, None, rngs={"hot": KEY})[0] ** 2).mean()

    def plain(params: Any, x: Any) -> Any:
        layers = map(params["params"]["layer"].get, ("kernel", "bias"))
        for kernel, bias in zip(*layers, strict=True):
            x = x @ kernel + bias
        return (x**2).mean()

    found, exact = (jax.tree.leaves(jax.grad(f)(params, X)) for f in (loss, plain))
    for got, wanted in zip(found, exact, strict=True):
        assert 0.98 < cosine(got, wanted) < 1 - 1e-9


class Mlp(nnx.Module):
    def __init__(self, kind: Any, rngs: nnx.Rngs, **options: Any) -> None:
        sizes = ((64, 128), (128, 64))
        self.up, self.down = (kind(*size, rngs=rngs, **options) for size in sizes)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.gelu(self.up(x)))


@pytest.mark.parametrize("use_bias", [True, False])
def test_nnx(use_bias: bool) -> None:
    plain = Mlp(nnx.Linear, nnx.Rngs(0), use_bias=use_bias)
    ours = Mlp(HotLinear, nnx.Rngs(0, hot=1), use_bias=use_bias, config="accurate")
    nnx.update(ours, nnx.state(plain, nnx.Param))
    np.testing.assert_allclose(ours(X), plain(X), rtol=1e-4, atol=1e-5)

    @nnx.jit
    def gradient(model: Any, x: Any) -> Any:
        return nnx.grad(lambda model: (model(x) ** 2).mean())(model)

    exact, first, second = gradient(plain, X), gradient(ours, X), gradient(ours, X)
    leaves = [jax.tree.leaves(nnx.state(g, nnx.Param)) for g in (exact, first, second)]
    for wanted, one, two in zip(*leaves, strict=True):
        assert cosine(one, wanted) > 0.99 and cosine(two, wanted) > 0.99
    assert not np.array_equal(first.up.kernel[...], second.up.kernel[...])  # the stream continues
    ours.eval()
    equal_bits(np.asarray(ours(X)), np.asarray(plain(X)))
    again = gradient(ours, X)
    np.testing.assert_allclose(again.up.kernel[...], exact.up.kernel[...], rtol=1e-4, atol=1e-7)
    ours.train()
    assert not np.allclose(gradient(ours, X).up.kernel[...], exact.up.kernel[...], rtol=1e-4)


def test_nnx_trains_with_the_8_bit_forward_and_rbg_keys() -> None:
    optax = pytest.importorskip("optax")
    config = hot.HotConfig(forward="int8")
    with jax.default_prng_impl("rbg"):
        model = Mlp(HotLinear, nnx.Rngs(0, hot=1), config=config)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: ((model(X) - X) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_code_of_the_page_runs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/jax.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/jax.md", "exec"), {"jax": jax, "x": X})


def test_nnx_errors() -> None:
    for name, value, message in (
        ("precision", "highest", "precision: HOT replaces"),
        ("preferred_element_type", jnp.float32, "preferred_element_type: HOT replaces"),
        ("config", "best", "'best' is not one of"),
        ("config", IN_EVAL, "config: expected forward_in_eval"),
    ):
        refused(HotLinear, message, ValueError, 64, 64, rngs=nnx.Rngs(0), **{name: value})
    with pytest.raises(ValueError, match="out_sharding: expected None"):
        HotLinear(64, 64, rngs=nnx.Rngs(0))(X, out_sharding=1)
