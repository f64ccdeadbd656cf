"""Stages compress_activation and backward_linear: the reference's bits, bounds, expectations."""

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hotcore
import numpy as np
import pytest
import reference
from hotcore import HotConfig, Key, _core
from hotcore.config import RECIPES
from hypothesis import given
from hypothesis import strategies as st
from support import (
    ALL,
    FLOATS,
    KEY,
    KINDS,
    OTHER_KEY,
    all_equal_bits,
    array,
    check_against_reference,
    data,
    equal_bits,
    given_as,
    keys,
    layer,
    parted_key,
    poison,
    refused,
    rounded,
    running,
    torch,
    widened,
)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

Sizes = tuple[int, ...]
CONFIGS = {name: HotConfig.recipe(name) for name in RECIPES}


def gw_of(gy: Any, x: Any, config: Any = None, key: Any = 3) -> Any:
    return hotcore.backward_linear(gy, None, x, config=config, need="gw", key=key).gw


def is_the_mean(draw: Callable[[int], np.ndarray], exact: np.ndarray, room: float) -> None:
    """Check the mean of 3000 draws.

    ``room`` allows for the bias of eight random bits: up to 1/512 of a step on each token.
    """
    draws = np.stack([draw(i) for i in range(3000)]).astype(np.float64)
    error = draws.std(0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - exact) < 5 * error + room).all()


every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@st.composite
def configs(draw: st.DrawFn) -> HotConfig:
    rounding = st.sampled_from(["nearest", "stochastic", "pseudo_stochastic"])
    block = draw(st.sampled_from([2, 4, 8, 16, 32, 64]))
    basis = draw(st.sampled_from(["full", "lowpass", "sequency", "sketch"]))
    rank = draw(st.integers(1, block))
    rows = None
    if basis == "sketch":
        rank = max(2 ** (rank.bit_length() - 1), 2, block // 16)
    elif basis == "lowpass" and draw(st.booleans()):
        rows = tuple(draw(st.sets(st.integers(0, block - 1), min_size=1)))
    storage = draw(st.sampled_from(["int4", "int8"])) if basis == "full" else "int8"
    return HotConfig(
        hadamard_block=draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256])),
        gx_bits=draw(st.sampled_from([4, 8])),
        gx_scale=draw(st.sampled_from(["token", "tensor"])),
        gx_rounding=draw(rounding),
        basis=basis,
        rank=rank,
        block=block,
        rows=rows,
        gw_scale=draw(st.sampled_from(["channel", "tensor", "token"])),
        gw_rounding=draw(rounding),
        storage=storage,
        equalize_tokens=draw(st.booleans()),
    )


@given(
    config=configs(),
    sizes=st.tuples(st.integers(0, 150), st.integers(0, 200), st.integers(0, 200)),
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(FLOATS if torch is not None else FLOATS[:2]),
    key=keys(), same_key=st.booleans(),
)  # fmt: skip
def test_any_config_equals_reference(
    config: HotConfig, sizes: Sizes, kind: str, dtype: str, key: Key, same_key: bool
) -> None:
    drawn_layer = layer(np.random.default_rng(key.seed % 2**32), *sizes, kind)
    arrays = [array(values, dtype) for values in drawn_layer]
    check_against_reference(*arrays, config, key, key if same_key else OTHER_KEY)


@pytest.mark.parametrize("recipe", ["fast", "paper"])
@pytest.mark.parametrize(
    ("grid", "prefix"), [((14, 14), 1), ((7, 7), 0), ((3, 5), 2), ((4, 4), 4), ((1, 1), 1)]
)
def test_token_grids_equal_reference(
    rng: np.random.Generator, recipe: str, grid: tuple[int, int], prefix: int
) -> None:
    config = HotConfig.recipe(recipe, token_grid=grid, prefix_tokens=prefix)
    for samples in (0, 1, 3):
        arrays = layer(rng, samples * (grid[0] * grid[1] + prefix), 18, 20)
        check_against_reference(*arrays, config, what=f"{samples} samples")


@pytest.mark.parametrize("dtype", FLOATS)
@every_config
def test_output_dtypes(rng: np.random.Generator, config: HotConfig, dtype: str) -> None:
    arrays = layer(rng, 50, 20, 24)
    wide = hotcore.backward_linear(*arrays, config=config, need=ALL)
    options = {"config": config, "need": ALL, "out_dtype": dtype}
    narrow = hotcore.backward_linear(*given_as(dtype, *arrays), **options)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert str(ours.dtype).endswith(dtype)
        equal_bits(widened(ours), rounded(theirs, dtype))


def full_configs() -> list[HotConfig]:
    """Every configuration whose codes restore x."""
    full = {"basis": "full", "rows": None}
    recipes = [dataclasses.replace(HotConfig.recipe(name), **full) for name in RECIPES]
    more = [HotConfig.recipe("accurate", gw_scale="tensor"), HotConfig(equalize_tokens=True)]
    return [*recipes, *more]


@given(
    shape=st.tuples(st.integers(0, 300), st.integers(0, 150)),
    ends=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    config=st.sampled_from(full_configs()), kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["float32", "float16"]), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_tokens_decompress(
    shape: Sizes, ends: Sizes, config: HotConfig, kind: str, dtype: str, seed: int
) -> None:
    x = data(np.random.default_rng(seed), shape, kind)
    first, last = sorted(min(end, shape[0]) for end in ends)
    saved = hotcore.compress_activation(x, config, key=seed)
    model = reference.compress_activation(x, config, key=seed)
    expected = reference.decompress_activation(model, first, last)
    out = poison((last - first, shape[1]), dtype)
    assert hotcore.decompress_activation(saved, first, last, out=out) is out
    equal_bits(widened(out), rounded(expected, dtype))


KNOWN_ERRORS = json.loads((BENCHMARKS / "results/recipe-cases.json").read_text())["cases"]
"""Bounds of g_w for tokens of unequal size: case -> title -> error (evidence/bench_cases.py)."""


@pytest.mark.parametrize("case", KNOWN_ERRORS)
def test_errors_of_recipes(case: str) -> None:
    # Where a recipe is bad it is so by its method, and not worse; what helps goes on helping
    # (docs/recipes.md).
    pytest.importorskip("torch", reason="bench_cases needs torch")
    from evidence import bench_cases  # benchmarks/ is on the path

    drawn = bench_cases.cases(np.random.default_rng(0))[case]
    for title, known in KNOWN_ERRORS[case].items():
        # With so few keys the error of "fast" changes by a third.
        if title in bench_cases.RECIPES and title != "fast":
            assert bench_cases.recipe_error(drawn, title, keys=3) == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize("tokens", [1, 15, 16, 197, 1024, 1040, 5000])
def test_gb_equals_reference(rng: np.random.Generator, tokens: int) -> None:
    gy = data(rng, (tokens, 33), "outliers")
    got = hotcore.backward_linear(gy, None, None, need="gb").gb
    equal_bits(got, reference.bias_gradient(gy))


UNBIASED = {name: CONFIGS[name] for name in ("default", "fast", "accurate")}
for _name in ("fast", "default"):
    UNBIASED[f"{_name}, equalised"] = HotConfig.recipe(_name, equalize_tokens=True)


@pytest.mark.parametrize("recipe", UNBIASED.values(), ids=UNBIASED)
def test_expectation_is_the_plain_product(rng: np.random.Generator, recipe: HotConfig) -> None:
    # Recipes without a fixed basis: the mean of g_w over keys is g_y^T x.
    gy, w, x = layer(rng, 40, 3, 4)
    exact = gy.astype(np.float64).T @ x
    is_the_mean(lambda i: gw_of(gy, x, recipe, Key(7, i)), exact, 2e-3)


def test_gx_expectation(rng: np.random.Generator) -> None:
    # The mean of g_x over keys is g_y times the rounded w, so its error is that of w alone.
    gy, w, _ = layer(rng, 3, 40, 5)
    config = HotConfig(gx_bits=4)
    codes, scale = reference.quantize_weight(w, config)
    rounded_w = reference.fwht(codes.astype(np.float32) * scale[:, None]).T[:40] / 16
    exact = gy.astype(np.float64) @ rounded_w

    def draw(i: int) -> np.ndarray:
        return hotcore.backward_linear(gy, w, None, config=config, need="gx", key=Key(9, i)).gx

    is_the_mean(draw, exact, 5e-3)


@pytest.mark.parametrize("dtype", FLOATS)
@every_config
def test_accumulates_on_request(rng: np.random.Generator, config: HotConfig, dtype: str) -> None:
    gy, w, x = layer(rng, 33, 20, 18)
    first = hotcore.backward_linear(gy, w, x, config=config, need=ALL)
    gy, w, x = given_as(dtype, gy, w, x)
    before = [array(rng.standard_normal(value.shape), dtype) for value in first[1:]]
    sums = [rounded(widened(old) + new, dtype) for old, new in zip(before, first[1:], strict=True)]
    out = {"gw_out": before[0], "gb_out": before[1], "accumulate": True}
    got = hotcore.backward_linear(gy, w, x, config=config, need=ALL, **out)
    assert got.gw is before[0] and got.gb is before[1]
    all_equal_bits(map(widened, got), (first.gx, *sums))


@every_config
def test_each_output_alone(rng: np.random.Generator, config: HotConfig) -> None:
    gy, w, x = layer(rng, 50, 21, 35)
    everything = hotcore.backward_linear(gy, w, x, config=config, need=ALL, key=4)
    arguments = {"gx": (gy, w, None), "gw": (gy, None, x), "gb": (gy, None, None)}
    for name, three in arguments.items():
        got = hotcore.backward_linear(*three, config=config, need=name, key=4)
        equal_bits(getattr(got, name), getattr(everything, name))
        assert [value is None for value in got] == [other != name for other in ALL]
    for nothing in ((), [], set()):
        with pytest.raises(ValueError, match="need: expected at least one of"):
            hotcore.backward_linear(gy, None, None, config=config, need=nothing)


@every_config
def test_empty_sizes(rng: np.random.Generator, config: HotConfig) -> None:
    for tokens, outs, ins in ((0, 6, 7), (5, 0, 7), (5, 6, 0), (0, 0, 0)):
        gy, w, x = layer(rng, tokens, outs, ins)
        got = hotcore.backward_linear(gy, w, x, config=config, need=ALL)
        assert [part.shape for part in got] == [(tokens, ins), (outs, ins), (outs,)]
        assert not got.gx.any() and not got.gw.any() and (not got.gb.any() or tokens)
        if torch is not None:
            tensors = map(torch.from_numpy, (gy, w, x))
            all_equal_bits(hotcore.backward_linear(*tensors, config=config, need=ALL), got)
    # No tokens: nothing is added, and the values stay.
    gy, w, x = layer(rng, 0, 4, 3)
    gw, gb = np.full((4, 3), 2, np.float32), np.full(4, 3, np.float32)
    out = {"gw_out": gw, "gb_out": gb, "accumulate": True}
    hotcore.backward_linear(gy, w, x, config=config, need=("gw", "gb"), **out)
    assert (gw == 2).all() and (gb == 3).all()


def test_saved_bytes() -> None:
    x = np.ones((197 * 16, 768), np.float32)
    bounds = {"default": 0.54, "fast": 0.505, "paper": 0.505, "accurate": 1.01}
    for recipe, bound in bounds.items():
        assert hotcore.compress_activation(x, recipe).nbytes / x.size <= bound, recipe


def test_outputs_are_written_whole_and_nothing_else(rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 24, 18, 20)
    expected = hotcore.backward_linear(gy, w, x, need=("gw", "gb"))
    memory, gb = poison((18, 30), "float32"), poison((18,), "float32")
    kept = memory.copy().view(np.uint32)
    hotcore.backward_linear(gy, w, x, need=("gw", "gb"), gw_out=memory[:, 4:24], gb_out=gb)
    all_equal_bits((np.ascontiguousarray(memory[:, 4:24]), gb), expected[1:])
    for margin in (slice(0, 4), slice(24, 30)):
        np.testing.assert_array_equal(memory.view(np.uint32)[:, margin], kept[:, margin])


def test_callers_come_and_go(rng: np.random.Generator) -> None:
    recipes = ("default", "fast", "paper", "accurate")
    sizes = rng.integers(16, 100, (8, 3)).tolist()
    layers = [(layer(rng, *size), recipes[i % 4]) for i, size in enumerate(sizes)]
    alone = [hotcore.backward_linear(*arrays, config=recipe).gw for arrays, recipe in layers]

    def run(index: int) -> None:
        arrays, recipe = layers[index]
        for turn in range(10):
            if index % 2 == 1:  # a new thread pool for later calls
                hotcore.set_num_threads(1 + (turn + index) % 3)
            equal_bits(hotcore.backward_linear(*arrays, config=recipe).gw, alone[index])

    with running(hotcore.num_threads()), ThreadPoolExecutor(len(layers)) as pool:
        list(pool.map(run, range(len(layers))))


def test_key_and_config_of_the_saved_are_the_default(rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 40, 20, 24)
    saved = hotcore.compress_activation(x, "fast", key=KEY)
    expected = hotcore.backward_linear(gy, w, saved)[:2]
    for source in (saved, x):
        all_equal_bits(hotcore.backward_linear(gy, w, source, config="fast", key=KEY)[:2], expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_weight_gives_the_same_bits(rng: np.random.Generator, recipe: str) -> None:
    gy, w, x = layer(rng, 37, 21, 35)
    saved = hotcore.compress_activation(x, recipe, key=KEY)
    codes = hotcore.quantize_weight(w, recipe)
    expected = hotcore.backward_linear(gy, w, saved, need=ALL, key=OTHER_KEY)
    all_equal_bits(hotcore.backward_linear(gy, codes, saved, need=ALL, key=OTHER_KEY), expected)
    assert codes.data.shape == (35 * (32 + 4),)  # codes [I, Kp], then I scales
    other = "accurate" if recipe == "paper" else "paper"
    for bad, says in (
        (hotcore.quantize_weight(w, other), "w: quantised with .* expected"),
        (hotcore.quantize_weight(w[:20], recipe), "w: shape .* gy has 21 out features"),
    ):
        refused(hotcore.backward_linear, says, ValueError, gy, bad, saved)
    refused(lambda: hotcore.quantize_weight(w[0], recipe), "w: shape .*expected 2 dimensions")


@every_config
def test_counter_is_added_to_the_offset(config: HotConfig, rng: np.random.Generator) -> None:
    gy, w, x = layer(rng, 70, 33, 18)
    plain, counted, counter = parted_key(rng)
    saved = hotcore.compress_activation(x, config, key=plain)
    expected = hotcore.backward_linear(gy, w, saved, key=plain)
    also = hotcore.compress_activation(x, config, key=counted)
    equal_bits(also.data, saved.data)
    for kept, key in ((also, None), (also, plain), (saved, counted)):
        all_equal_bits(hotcore.backward_linear(gy, w, kept, key=key)[:2], expected[:2])
    counter += np.uint64(1)  # each call reads it
    later = hotcore.compress_activation(x, config, key=counted)
    assert not np.array_equal(later.data, saved.data)


def test_another_spec_is_refused(rng: np.random.Generator) -> None:
    # Codes of one configuration, read with another, would give wrong gradients without an error.
    gy, w, x = layer(rng, 64, 6, 5)
    config = HotConfig.recipe("accurate")
    saved, weight = hotcore.compress_activation(x, config), hotcore.quantize_weight(w, config)
    bases = [{"basis": basis} for basis in ("lowpass", "sequency", "sketch")]
    for change in (*bases, {"gw_scale": "tensor"}):
        other = dataclasses.replace(config, **change)
        assert _core.saved_format(other.spec) != _core.saved_format(config.spec)
        says = "saved_or_x was made with"
        refused(hotcore.backward_linear, says, ValueError, gy, w, saved, config=other)
    paper = HotConfig.recipe("paper", rows=(0, 3, 5, 6))
    for change, same in (
        ({"rows": (0, 3, 5, 7)}, False),
        ({"rows": (3, 0, 5, 6)}, False),
        ({"token_grid": (8, 8)}, False),
        ({"rank": 3}, True),  # rows replace the rank
        ({"gw_scale": "channel"}, False),  # then x has a scale for each channel
        ({"gw_scale": "token"}, True),
    ):
        other = dataclasses.replace(paper, **change)
        assert (_core.saved_format(other.spec) == _core.saved_format(paper.spec)) == same, change
    for change in ({"gx_bits": 4}, {"hadamard_block": 1}, {"gx_scale": "tensor"}):
        other = dataclasses.replace(config, **change)
        assert _core.weight_format(other.spec) != _core.weight_format(config.spec)
        assert _core.saved_format(other.spec) == _core.saved_format(config.spec)
        says = "w: quantised with"
        refused(hotcore.backward_linear, says, ValueError, gy, weight, x, config=other)


def test_a_saved_buffer_of_another_length(rng: np.random.Generator) -> None:
    """Regression: a truncated buffer gave short codes and scales, or an error of NumPy."""
    saved = hotcore.compress_activation(rng.standard_normal((32, 8), np.float32), key=1)
    for change in ({"data": saved.data[:-2]}, {"tokens": 40}):
        bad = dataclasses.replace(saved, **change)
        for read in (bad.codes, bad.scales):
            refused(read, r"saved.data: shape \(\d+,\); expected \(\d+,\)")
