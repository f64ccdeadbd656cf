"""hotcore.jax.linear: jnp's forward product, and a backward with the bits of hotcore."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import hotcore
import numpy as np
import pytest
from hotcore import selftest
from support import all_equal_bits, data, equal_bits, refused, running, same_on_every_path

hot = pytest.importorskip("hotcore.jax", exc_type=ImportError)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from hotcore.jax import calls  # noqa: E402

RECIPES = ("default", "fast", "paper", "accurate")
SEED = 2**40 + 7
Layer = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def layer(rng: np.random.Generator, *leading: int, outs: int = 40, ins: int = 48) -> Layer:
    """gy, x, w, b."""
    shapes = ((*leading, outs), (*leading, ins), (outs, ins), (outs,))
    gy, x, w, b = (data(rng, shape) for shape in shapes)
    return gy, x, w, b


def key_of(number: int) -> jax.Array:
    return jax.random.wrap_key_data(jnp.array([number >> 32, number & 0xFFFFFFFF], jnp.uint32))


def weighted(
    gy: Any, x: Any, w: Any, b: Any, key: Any, config: Any = "default"
) -> tuple[jax.Array, jax.Array]:
    """A loss whose gradient of y is gy, and y."""
    y = hot.linear(x, w, b, key=key, config=config)
    return jnp.sum(y.astype(jnp.float32) * gy.astype(jnp.float32)), y


def gradients(gy: Any, x: Any, w: Any, b: Any, key: Any, config: Any = "default") -> Any:
    """g_x, g_w and g_b under jit, and y."""
    loss = functools.partial(weighted, config=config)
    found, y = jax.jit(jax.grad(loss, (1, 2, 3), has_aux=True))(gy, x, w, b, key)
    return (*found, y)


def numpy_of(value: Any) -> np.ndarray:
    return np.asarray(value, np.float32) if value.dtype == jnp.bfloat16 else np.asarray(value)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("leading", "dtype"),
    [
        *(((130,), dtype) for dtype in ("float32", "float16", "bfloat16")),
        *((leading, "float32") for leading in ((3, 50), (2, 3, 5, 7), (1,))),
    ],
)
def test_bits_of_hotcore(
    rng: np.random.Generator, recipe: Any, leading: tuple[int, ...], dtype: str
) -> None:
    """Gradients of 16-bit inputs are those of the fp32 values, rounded once."""
    arrays = [jnp.asarray(array, dtype) for array in layer(rng, *leading)]
    *found, y = gradients(*arrays, key_of(SEED), recipe)
    gy, x, w, b = (np.asarray(array, np.float32) for array in arrays)
    if dtype == "float32":
        np.testing.assert_allclose(y, jnp.matmul(x, w.T) + b, rtol=1e-5, atol=1e-4)
    flat = gy.reshape(-1, gy.shape[-1]), w, x.reshape(-1, x.shape[-1])
    key = hotcore.Key(0, offset=SEED)
    wanted = hotcore.backward_linear(*flat, config=recipe, need=("gx", "gw", "gb"), key=key)
    for name, got, expected in zip(("gx", "gw", "gb"), found, wanted, strict=True):
        assert got.dtype == dtype
        rounded = jnp.asarray(expected.reshape(got.shape), dtype)
        equal_bits(numpy_of(got), numpy_of(rounded), name)


def test_gradients_have_the_dtypes_of_their_arrays(rng: np.random.Generator) -> None:
    gy, x, w, b = layer(rng, 30)
    mixed = jnp.asarray(x, jnp.bfloat16), w, jnp.asarray(b, jnp.float16)
    gx, gw, gb, y = gradients(gy, *mixed, key_of(1))
    assert (gx.dtype, gw.dtype, gb.dtype, y.dtype) == ("bfloat16", "float32", "float16", "float32")
    rounded = np.asarray(mixed[0], np.float32)
    key = hotcore.Key(0, offset=1)
    wanted = hotcore.backward_linear(gy, w, rounded, need=("gx", "gw"), key=key)
    equal_bits(np.asarray(gw), wanted.gw)
    equal_bits(numpy_of(gx), numpy_of(jnp.asarray(wanted.gx, jnp.bfloat16)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_forward_is_the_product_of_jnp(rng: np.random.Generator, dtype: str) -> None:
    x, w, b = (jnp.asarray(array, dtype) for array in layer(rng, 3, 50)[1:])
    ours = functools.partial(hot.linear, key=key_of(1))
    for run in (jax.jit, lambda function: function):
        got, wanted = run(ours)(x, w, b), run(lambda x, w, b: jnp.matmul(x, w.T) + b)(x, w, b)
        assert got.dtype == wanted.dtype == dtype
        alone = run(ours)(x, w), run(jnp.matmul)(x, w.T)
        all_equal_bits(map(numpy_of, (got, alone[0])), map(numpy_of, (wanted, alone[1])))


def test_keys_of_every_kind_stand_for_their_number(rng: np.random.Generator) -> None:
    arrays = layer(rng, 30)
    wanted = gradients(*arrays, key_of(7))
    for key in (
        jax.random.key(7), jax.random.PRNGKey(7), np.array([0, 7], np.uint32), np.int64(7),
        np.array(7, np.uint8), jnp.int32(7), jnp.uint32(7),
    ):  # fmt: skip
        all_equal_bits(map(np.asarray, gradients(*arrays, key)), map(np.asarray, wanted), repr(key))
    got = jax.grad(lambda w: weighted(*arrays[:2], w, arrays[3], np.int64(SEED))[0])(arrays[2])
    equal_bits(np.asarray(got), np.asarray(gradients(*arrays, key_of(SEED))[1]), "64 bits")
    other = gradients(*arrays, key_of(8))
    assert not np.array_equal(other[0], wanted[0]) and not np.array_equal(other[1], wanted[1])


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_implementations(rng: np.random.Generator, impl: str) -> None:
    """Keys of other implementations draw 64 bits; typed keys and their words are equal."""
    arrays = layer(rng, 50)
    key = jax.random.key(7, impl=impl)
    low, high = (int(word) for word in jax.random.bits(key, (2,), np.uint32))
    wanted = gradients(*arrays, key_of(high << 32 | low))
    for same in (key, jax.random.key_data(key), np.asarray(jax.random.key_data(key))):
        all_equal_bits(map(np.asarray, gradients(*arrays, same)), map(np.asarray, wanted), impl)
    other = gradients(*arrays, jax.random.fold_in(key, 1))
    assert not np.array_equal(other[1], wanted[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block", [1, 16, 64, 256])
def test_8_bit_forward(rng: np.random.Generator, dtype: Any, block: int) -> None:
    """The bits of hotcore.forward_linear; gradients are those of the plain forward."""
    gy, *arrays = layer(rng, 3, 50, outs=40, ins=72)
    x, w, b = (jnp.asarray(array, dtype) for array in arrays)
    config = hotcore.HotConfig(forward="int8", forward_block=block)
    for bias in (b, None):
        y = jax.jit(functools.partial(hot.linear, config=config))(x, w, bias, key=key_of(3))
        wide = [None if v is None else np.asarray(v, np.float32) for v in (x, w, bias)]
        wanted = jnp.asarray(hotcore.forward_linear(*wide, config=config)).astype(dtype)
        assert y.dtype == dtype and y.shape == (3, 50, 40)
        equal_bits(numpy_of(y), numpy_of(wanted), "y")
    *found, _ = gradients(gy, x, w, b, key_of(3), config)
    *plain, _ = gradients(gy, x, w, b, key_of(3))
    all_equal_bits(map(numpy_of, found), map(numpy_of, plain))


def test_8_bit_forward_under_transformations(rng: np.random.Generator) -> None:
    _, x, w, b = layer(rng, 4, 24)
    config = hotcore.HotConfig(forward="int8")
    one = functools.partial(hot.linear, w=w, b=b, key=key_of(3), config=config)
    mapped = jax.vmap(one)(x)
    for i in range(4):
        equal_bits(np.asarray(mapped[i]), np.asarray(one(x[i])))
    equal_bits(np.asarray(one(x)), np.asarray(mapped))  # a scale for each token
    assert one(x[:0]).shape == (0, 24, 40) and one(x[0, 0]).shape == (40,)
    scanned = jax.lax.scan(lambda carry, row: (carry, jax.checkpoint(one)(row)), 0, x)[1]
    equal_bits(np.asarray(scanned), np.asarray(mapped))


def test_a_key_is_an_operand(rng: np.random.Generator) -> None:
    """Steps have new random numbers without a new compilation."""
    gy, x, w, b = layer(rng, 30)
    traced = []

    def loss(w: Any, key: Any) -> Any:
        traced.append(key)
        return weighted(gy, x, w, b, key)[0]

    step = jax.jit(jax.grad(loss))
    keys = jax.random.split(jax.random.key(0), 3)
    gradients = [np.asarray(step(w, key)) for key in keys]
    assert len(traced) == 1
    assert not any(np.array_equal(*gradients[i : i + 2]) for i in range(2))
    equal_bits(np.asarray(step(w, keys[0])), gradients[0])


def count(name: str, function: Callable[..., Any], *arguments: Any) -> int:
    return str(jax.make_jaxpr(function)(*arguments)).count(f"target_name=hotcore_{name}")


def test_what_is_not_differentiated_is_not_kept(rng: np.random.Generator) -> None:
    gy, x, w, b = layer(rng, 512, ins=256)
    key = jax.random.key(0)
    x_bytes, w_bytes = x.nbytes, w.nbytes

    def kept(function: Callable[..., Any], *arguments: Any) -> int:
        leaves = jax.tree.leaves(jax.vjp(function, *arguments)[1])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf is not key)

    def all_of_it(x: Any, w: Any, b: Any) -> Any:
        return hot.linear(x, w, b, key=key)

    assert w_bytes < kept(all_of_it, *map(jnp.asarray, (x, w, b))) < w_bytes + 0.15 * x_bytes
    frozen = [
        (lambda w: hot.linear(x, w, b, key=key), w, 1, 0, 0.15 * x_bytes),
        (lambda x: hot.linear(x, w, b, key=key), x, 0, w_bytes, w_bytes + 100),
        (lambda b: hot.linear(x, w, b, key=key), b, 0, 0, 100),
    ]
    for function, argument, compressed, least, most in frozen:
        assert least <= kept(function, jnp.asarray(argument)) <= most
        gradient = jax.grad(lambda a, function=function: (function(a) * gy).sum())
        assert count("compress_activation", gradient, argument) == compressed
        assert count("backward_linear", gradient, argument) == 1
    assert count("", lambda x: hot.linear(x, w, b, key=key), x) == 0  # forward alone

    *wanted, _ = gradients(gy, x, w, b, key)
    expectations = wanted[1], wanted[0], wanted[2]
    for (function, argument, *_), expected in zip(frozen, expectations, strict=True):
        gradient = jax.jit(jax.grad(lambda a, function=function: (function(a) * gy).sum()))
        equal_bits(np.asarray(gradient(argument)), np.asarray(expected))


def test_vmap_is_one_call_after_another(rng: np.random.Generator) -> None:
    gy, x, w, b = layer(rng, 3, 33)
    keys = jax.random.split(jax.random.key(5), 3)
    gradient = jax.grad(lambda gy, x, w, b, key: weighted(gy, x, w, b, key)[0], (1, 2, 3))
    together = jax.jit(jax.vmap(gradient, (0, 0, None, None, 0)))(gy, x, w, b, keys)
    for i in range(3):
        for got, wanted in zip(together, gradients(gy[i], x[i], w, b, keys[i]), strict=False):
            equal_bits(np.asarray(got[i]), np.asarray(wanted))

    def summed(x: Any, w: Any) -> Any:  # the gradient of a vmap
        ys = jax.vmap(lambda x, key: hot.linear(x, w, b, key=key))(x, keys)
        return (ys * gy).sum()

    gx, gw = jax.jit(jax.grad(summed, (0, 1)))(x, w)
    equal_bits(np.asarray(gx), np.asarray(together[0]))
    np.testing.assert_allclose(gw, np.asarray(together[1]).sum(0), rtol=1e-5, atol=1e-5)


def test_checkpoint_and_scan(rng: np.random.Generator) -> None:
    gy, x, w, _ = layer(rng, 33, outs=48)
    keys = jax.random.split(jax.random.key(5), 2)

    def straight(w: Any) -> Any:
        return (hot.linear(hot.linear(x, w, key=keys[0]), w, key=keys[1]) * gy).sum()

    def scanned(w: Any, wrap: Callable[[Any], Any]) -> Any:
        step = wrap(lambda x, key: (hot.linear(x, w, key=key), None))
        return (jax.lax.scan(step, jnp.asarray(x), keys)[0] * gy).sum()

    wanted = jax.jit(jax.grad(straight))(w)
    for wrap in (lambda step: step, jax.checkpoint):
        got = jax.jit(jax.grad(functools.partial(scanned, wrap=wrap)))(w)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_adds_up_what_devices_share(rng: np.random.Generator, check: bool) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("JAX found its devices before this test could ask for two")
    gy, x, w, b = layer(rng, 64)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])
    shared, parted = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    keys = jax.random.split(jax.random.key(5), 2)

    def step(gy: Any, x: Any, w: Any, b: Any, key: Any) -> Any:
        gx, gw, gb = jax.grad(lambda *a: weighted(gy, *a, key[0])[0], (0, 1, 2))(x, w, b)
        return gx, *((gw, gb) if check else jax.lax.psum((gw, gb), "data"))

    specs = (parted, parted, shared, shared, parted)
    out = {"out_specs": (parted, shared, shared), "check_vma": check}
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, **out)
    gx, gw, gb = jax.jit(sharded)(gy, x, w, b, keys)
    parts = zip((slice(32), slice(32, 64)), keys, strict=True)
    halves = [gradients(gy[p], x[p], w, b, k) for p, k in parts]
    equal_bits(np.asarray(gx), np.concatenate([half[0] for half in halves]))
    np.testing.assert_allclose(gw, halves[0][1] + halves[1][1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gb, halves[0][2] + halves[1][2], rtol=1e-5, atol=1e-5)


def test_explicit_axes_are_refused(rng: np.random.Generator) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("JAX found its devices before this test could ask for two")
    gy, x, w, b = layer(rng, 64)
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=explicit, devices=jax.devices()[:2])
    parted = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x, config = jax.device_put(x, parted), hotcore.HotConfig(forward="int8")
    calls = (
        lambda: gradients(gy, x, w, b, key_of(1)),
        lambda: hot.linear(x, w, b, key=key_of(1), config=config),
        lambda: hot.linear(x.reshape(2, 32, -1), w, b, key=key_of(1), config=config),
    )
    with jax.set_mesh(mesh):
        assert hot.linear(x, w, b, key=key_of(1)).shape == (64, len(w))
        for call in calls:  # gradients, and the 8-bit product of 2-D and 3-D x
            refused(call, "x: sharded over explicit", NotImplementedError)


def test_threads_and_instruction_sets(rng: np.random.Generator) -> None:
    arrays = layer(rng, 130)
    step = jax.jit(jax.grad(lambda *a: weighted(*a)[0], (1, 2, 3)))
    same_on_every_path(lambda: tuple(map(np.asarray, step(*arrays, key_of(3)))))


def test_threads_are_those_of_hotcore(rng: np.random.Generator) -> None:
    """XLA's calls follow set_num_threads, also in a program that was compiled before."""
    arrays = layer(rng, 256)
    step = jax.jit(jax.grad(lambda *a: weighted(*a)[0], (1, 2, 3)))

    def threads() -> int:
        jax.block_until_ready(step(*arrays, key_of(3)))
        return len(os.listdir("/proc/self/task"))

    threads()  # XLA starts threads
    with running(6):
        six = threads()
    # hotcore keeps the six threads of its calls; the threads of XLA's calls have ended.
    with running(1):
        assert threads() <= six - 5


def test_grid_of_tokens(rng: np.random.Generator) -> None:
    gy, x, w, b = layer(rng, 2, 1 + 16)
    config = hotcore.HotConfig.recipe("paper", token_grid=(4, 4), prefix_tokens=1)
    gx, gw, *_ = gradients(gy, x, w, b, key_of(3), config)
    key = hotcore.Key(0, offset=3)
    flat = (gy.reshape(34, -1), w, x.reshape(34, -1))
    wanted = hotcore.backward_linear(*flat, config=config, key=key)
    equal_bits(np.asarray(gx).reshape(34, -1), wanted.gx)
    equal_bits(np.asarray(gw), wanted.gw)
    rows = hotcore.HotConfig.recipe("paper", rows=(0, 1, 4))
    gw = gradients(gy, x, w, b, key_of(3), rows)[1]
    equal_bits(np.asarray(gw), hotcore.backward_linear(*flat, config=rows, key=key).gw)
    refused(gradients, "token", ValueError, gy[:, :9], x[:, :9], w, b, key_of(3), config)


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_no_tokens(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    _, _, w, b = layer(rng, 1)
    gy, x = np.zeros((*shape[:-1], 40), np.float32), np.zeros(shape, np.float32)
    gx, gw, gb, y = gradients(gy, x, w, b, key_of(3))
    assert gx.shape == shape and y.shape == gy.shape
    assert not gw.any() and gw.shape == w.shape and not gb.any()
    alone = jax.jit(jax.grad(lambda x: weighted(gy, x, w, b, key_of(3))[0]))(x)
    assert alone.shape == shape


X, W, B = np.zeros((5, 8), np.float32), np.zeros((6, 8), np.float32), np.zeros(6, np.float32)
KEY = np.uint32(1)


class Scalar:
    """A number of another framework, like torch.tensor(3)."""

    dtype, shape = "torch.int64", ()


class Doubles:
    """A matrix of another framework, like torch.randn(8, 8, dtype=torch.float64)."""

    dtype = "torch.float64"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return W.astype(np.float64)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((X.astype(np.int32), W), {}, ValueError, "x: dtype int32; expected float32, float16 or b"),
        ((X.astype(np.int64), W), {}, ValueError, "x: dtype int64"),
        ((X.astype(np.float64), W), {}, ValueError, "x: dtype float64; expected float32, float16"),
        ((X, W.astype(np.int8)), {}, ValueError, "w: dtype int8"),
        ((X, Doubles()), {}, ValueError, "w: dtype float64; expected float32, float16"),
        ((X, W, B.astype(np.int8)), {}, ValueError, "b: dtype int8"),
        (("text", W), {}, TypeError, "x: "),
        ((None, W), {}, ValueError, "x: None is not"),
        ((X, [[1.0], [1.0, 2.0]]), {}, ValueError, "w: .*inhomogeneous"),
        ((X[0, 0], W), {}, ValueError, "x: shape ()"),
        ((X, W.T), {}, ValueError, r"w: shape \(8, 6\); expected \[O, 8\]"),
        ((X, W[0]), {}, ValueError, r"w: shape \(8,\)"),
        ((X, W, B[:5]), {}, ValueError, r"b: shape \(5,\); w has 6 out features"),
        ((X, W), {"key": 7}, TypeError, "key: expected jax.random.key.*got int"),
        ((X, W), {"key": Scalar()}, TypeError, "key: expected .*got Scalar"),
        ((X, W), {"key": np.float32(7)}, ValueError, r"key: expected .*got float32 \(\)"),
        ((X, W), {"key": np.zeros((3, 2), np.uint32)}, ValueError, r"key: .*got uint32 \(3, 2\)"),
        ((X, W), {"config": "best"}, ValueError, "'best' is not one of"),
        ((X, W), {"config": 8}, TypeError, "config: expected a HotConfig"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    refused(lambda: hot.linear(*arguments, **{"key": KEY, **options}), message, kind)


@pytest.mark.parametrize("argument", range(3))
def test_a_configuration_that_does_not_fit_is_refused_when_traced(argument: int) -> None:
    config = hotcore.HotConfig.recipe("paper", token_grid=(2, 2))
    step = jax.jit(jax.grad(lambda *a: hot.linear(*a, key=KEY, config=config).sum(), argument))
    refused(lambda: step.lower(X, W, B), r"x has 5 tokens.*multiple of .* = 4")


@pytest.mark.parametrize(
    ("sizes", "argument", "forward", "message"),
    [
        ("b, 8; 6, 8", None, "plain", None),
        ("b, 8; 6, 8", 0, "plain", r"y: .* got shape \(b, 6\)"),
        ("b, 8; 6, 8", 1, "plain", r"x: .* got shape \(b, 8\)"),
        ("b, 8; 6, 8", None, "int8", r"x: .* got shape \(b, 8\)"),
        ("5, 8; o, 8", None, "int8", r"w: .* got shape \(o, 8\)"),
        ("5, 8; o, 8", 1, "plain", r"y: .* got shape \(5, o\)"),
    ],
)
def test_symbolic_sizes_are_named(sizes: str, argument: Any, forward: Any, message: Any) -> None:
    config = hotcore.HotConfig.recipe("default", forward=forward)

    def loss(x: Any, w: Any) -> Any:
        return hot.linear(x, w, key=KEY, config=config).sum()

    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(size, scope=scope) for size in sizes.split(";")]
    step = jax.export.export(jax.jit(loss if argument is None else jax.grad(loss, argument)))
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    if message is None:  # only jnp's product
        step(*arguments)
        return
    refused(lambda: step(*arguments), message, NotImplementedError)


def test_an_exported_gradient(rng: np.random.Generator) -> None:
    """jax.export needs the names of custom calls, whose stability JAX does not know."""
    _, x, w, _ = layer(rng, 5)
    step = jax.jit(jax.grad(lambda x, w: hot.linear(x, w, key=KEY).sum(), (0, 1)))
    names = ("hotcore_compress_activation", "hotcore_backward_linear")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = jax.export.export(step, disabled_checks=checks)(x, w)
    all_equal_bits(map(np.asarray, exported.call(x, w)), map(np.asarray, step(x, w)))


def test_several_random_keys_are_refused() -> None:
    for impl in ("threefry2x32", "rbg"):
        with pytest.raises(ValueError, match=r"key: .*got key<\w+> \(3,\)"):
            hot.linear(X, W, key=jax.random.split(jax.random.key(1, impl=impl), 3))


def test_double_precision_is_refused() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="x: dtype float64"):
        hot.linear(X.astype(np.float64), W, key=KEY)


def test_no_second_derivative_and_no_forward_mode() -> None:
    def loss(w: Any) -> Any:
        return (hot.linear(X, w, key=KEY) ** 2).sum()

    refused(lambda: jax.jvp(loss, (W,), (W,)), "forward-mode", TypeError)
    refused(lambda: jax.grad(lambda w: jax.grad(loss)(w).sum())(W), "cannot be differentiated")


def test_an_error_of_libhot_comes_through() -> None:
    result = jax.ShapeDtypeStruct((16,), np.uint8)
    call = jax.ffi.ffi_call("hotcore_compress_activation", (result, result))
    text, seed = calls._text(hotcore.HotConfig()), np.zeros(2, np.uint32)
    for x, words, config, error in (
        (X, seed, {"config": text}, ".*saved.*16"),  # too small
        (X.astype(np.int32), seed, {"config": text}, "x: .*expected one of|is not one of"),
        (X, seed[:1], {"config": text}, "seed"),
        (X, seed, {"config": f"{text}basis=best;"}, "basis: 'best' is not one of"),
        (X, seed, {"config": text.replace("rows=;", "")}, "config: no rows"),
        (X, seed, {"config": f"{text}lines=3"}, "no field 'lines'"),
        (X, seed, {"config": ""}, "config: no "),
        (X, seed, {}, "config: "),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: {error}"):
            jax.block_until_ready(call(x, words, **config))


def imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hotcore.jax")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("hotcore.jax")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def incompatible(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("version 0.1 is incompatible")

    for owner, name, value, says in (
        (sys.modules, "jax", None, "pip install 'jax>=0.10'"),
        (jax, "__version_info__", (0, 9, 2), r"needs jax 0.10 or newer.*\(jax is"),
        (sys.modules, "hotcore._jax_ffi", None, "HOT_JAX=ON pip install"),
        (jax.ffi, "register_ffi_target", incompatible, r"does not take handlers for version 0\.\d"),
    ):
        with monkeypatch.context() as patch:
            (patch.setitem if owner is sys.modules else patch.setattr)(owner, name, value)
            if name.startswith("hotcore."):
                patch.delattr(hotcore, "_jax_ffi")
            refused(imported_anew, says, ImportError, patch)


def test_the_self_test_by_xla() -> None:
    """The CPU's bits; on CUDA selftest.access_of uses this function."""
    arrays = calls.self_test("cpu")
    assert len(arrays) == 8 and selftest.mismatches(arrays, selftest.results()) == []
