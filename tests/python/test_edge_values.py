"""Values at the edges, for every recipe: a bound, or the result in docs/reliability.md.

That libhot has the bits of the reference for such values is in test_backward_linear.py (KINDS).
``python tests/python/test_edge_values.py`` prints the table of docs/reliability.md.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import hotcore
import numpy as np
import pytest
from hotcore import HotConfig, forward_linear
from hotcore.config import RECIPES

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script
from bounds import Matrix, forward_bound, gw_bound, gx_bound
from support import ALL, all_equal_bits, equal_bits, same_on_every_path, torch
from support import layer as data_of_a_layer

SAMPLES, GRID = 4, (4, 4)
TOKENS, OUTS, INS = SAMPLES * (1 + GRID[0] * GRID[1]), 48, 40
KEY = 3
Bound = tuple[Matrix, Matrix]
Edge = Callable[[Matrix, Matrix, Matrix, np.random.Generator], None]


def config_of(recipe: str) -> HotConfig:
    """The recipe, with the class token for recipes that combine tokens."""
    config = HotConfig.recipe(recipe)
    if config.basis == "full":
        return config
    return HotConfig.recipe(recipe, token_grid=GRID, prefix_tokens=1)


def layer(seed: int = 5) -> tuple[Matrix, Matrix, Matrix]:
    return data_of_a_layer(np.random.default_rng(seed), TOKENS, OUTS, INS)


def run(gy: Matrix, w: Matrix, x: Matrix, config: HotConfig) -> hotcore.Gradients:
    return hotcore.backward_linear(gy, w, x, config=config, need=ALL, key=KEY)


def bounds(gy: Matrix, w: Matrix, x: Matrix, config: HotConfig) -> tuple[Bound, Bound]:
    """Exact values and bounds of the error of g_x and of g_w."""
    return gx_bound(gy, w, config), gw_bound(gy, x, config, KEY)


def within(got: Matrix, bound: Bound) -> np.ndarray:
    return np.abs(got - bound[0]) <= bound[1]


def denormals(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
    for values in (gy, w, x):
        values[rng.random(values.shape) < 0.5] *= np.float32(2.0**-135)


def scaled(*powers: int) -> Edge:
    def change(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
        for values, power in zip((gy, w, x), powers, strict=True):
            values *= np.float32(2.0**power)

    return change


def wide(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
    gy *= np.exp2(rng.integers(-30, 31, (TOKENS, 1))).astype(np.float32)


def outlier(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
    gy[20, 7] = x[21, 3] = w[5, 9] = 1e6


def zero_block(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
    gy[17:49] = 0
    x[30:64] = 0
    w[16:32] = 0


def only(tokens: Callable[[np.random.Generator], object]) -> Edge:
    def change(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
        kept = np.zeros(TOKENS, bool)
        kept[tokens(rng)] = True
        gy[~kept] = 0

    return change


def one_hot(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
    gy[:] = 0
    gy[23, 7] = 1


def one_hot_rows(gy: Matrix, w: Matrix, x: Matrix, rng: np.random.Generator) -> None:
    gy[:] = 0
    gy[np.arange(TOKENS), rng.integers(0, OUTS, TOKENS)] = 1


EDGES: dict[str, Edge] = {
    "normal numbers": scaled(0, 0, 0),
    "half of all values denormal": denormals,
    "g_y times 2^-90": scaled(-90, 0, 0),
    "g_y times 2^110": scaled(110, 0, 0),
    "g_y times 2^80, w and x times 2^-80": scaled(80, -80, -80),
    "tokens of g_y from 2^-30 to 2^30": wide,
    "one value of 10^6 in each operand": outlier,
    "all-zero blocks in each operand": zero_block,
    "g_y all zero": only(lambda rng: []),
    "loss-masked tokens, 80 % of g_y's rows zero": only(lambda rng: rng.random(TOKENS) >= 0.8),
    "one token with a gradient": only(lambda rng: 23),
    "one value of g_y": one_hot,
    "a one-hot g_y for each token": one_hot_rows,
    "class tokens alone with a gradient": only(lambda rng: np.arange(TOKENS) % 17 == 0),
}


def edge(name: str) -> tuple[Matrix, Matrix, Matrix]:
    gy, w, x = layer()
    EDGES[name](gy, w, x, np.random.default_rng(7))
    return gy, w, x


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_within_bound(recipe: str, name: str) -> None:
    config, (gy, w, x) = config_of(recipe), edge(name)
    got = run(gy, w, x, config)
    for ours, bound in zip(got, bounds(gy, w, x, config), strict=False):
        assert np.isfinite(ours).all() and within(ours, bound).all()
    sums = np.abs(gy.astype(np.float64)).sum(0)
    assert (np.abs(got.gb - gy.astype(np.float64).sum(0)) <= 68 * 2.0**-24 * sums).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_rows_give_zero(recipe: str) -> None:
    # Exactly +0 for any other rows and random numbers: a masked token gets no gradient.
    for name in EDGES:
        gy, w, x = edge(name)
        got = run(gy, w, x, config_of(recipe))
        for ours, zero in ((got.gx, ~gy.any(1)), (got.gw, ~gy.any(0))):
            equal_bits(ours[zero], np.zeros((zero.sum(), INS), np.float32), name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_power_of_two_changes_exponents_alone(recipe: str) -> None:
    # The codes do not depend on the scale between the limits tested below.
    config, (gy, w, x) = config_of(recipe), layer()
    expected = run(gy, w, x, config)
    for a, b, c in ((-90, 0, 0), (110, 0, 0), (0, -90, -90), (60, -50, -70), (-60, 50, 60)):
        scaled = (v * np.float32(2.0**e) for v, e in zip((gy, w, x), (a, b, c), strict=True))
        got = run(*scaled, config)
        for ours, theirs, power in zip(got, expected, (a + b, a + c, a), strict=True):
            equal_bits(ours, theirs * np.float32(2.0**power), f"{a} {b} {c}")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("power", [-115, -128, -140])
def test_too_small_for_a_scale_is_zero(recipe: str, power: int) -> None:
    # Values below 2^-100 after the transform are 0. g_b has no scale and keeps denormals, and
    # equalised tokens of x have ordinary sizes.
    config = config_of(recipe)
    for operand in range(3):
        values = list(layer())
        values[operand] = np.ldexp(values[operand], power)
        got = run(*values, config)
        if operand != 2:
            assert not got.gx.any()
        if operand == 0 or (operand == 2 and not config.equalize_tokens):
            assert not got.gw.any()
        gy = values[0].astype(np.float64)
        error = 68 * 2.0**-24 * np.abs(gy).sum(0) + 2.0**-149
        assert got.gb.all() and (np.abs(got.gb - gy.sum(0)) <= error).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_smallest_scale(recipe: str) -> None:
    gy, w, x = layer()
    limit = np.float32(2.0**-100)
    for value, kept in ((limit, True), (np.nextafter(limit, np.float32(0)), False)):
        gy[:] = 0
        gy[23, 7] = value  # one value: the transform leaves its magnitude
        got = run(gy, w, x, config_of(recipe))
        assert got.gx.any() == kept
        if config_of(recipe).basis == "full" and not config_of(recipe).equalize_tokens:
            assert got.gw.any() == kept


@pytest.mark.parametrize("recipe", RECIPES)
def test_denormal_results_are_rounded_not_flushed(recipe: str) -> None:
    config, (gy, w, x) = config_of(recipe), layer()
    expected = run(gy, w, x, config)
    small = [np.ldexp(v, e) for v, e in zip((gy, w, x), (-72, -66, -66), strict=True)]
    got = run(*small, config)
    # Equalised tokens multiply g_y by x's exponents before its scale: 0 below 2^-100.
    assert got.gw.any() != config.equalize_tokens
    pairs = ((got.gx, expected.gx), (got.gw, expected.gw))
    for ours, theirs in pairs[: 1 if config.equalize_tokens else 2]:
        exact = np.ldexp(theirs.astype(np.float64), -138)
        assert (np.abs(ours - exact) <= 2 * 2.0**-149).all()
        assert ours.any() and np.abs(ours).max() < 2.0**-126
    same_on_every_path(lambda: run(*small, config))


def test_a_caller_that_flushes_denormals_changes_nothing() -> None:
    if torch is None or not torch.set_flush_denormal(False):
        pytest.skip("set_flush_denormal needs torch, and a processor that can")
    gy, w, x = (np.ldexp(v, -69) for v in layer())
    expected = {recipe: run(gy, w, x, config_of(recipe)) for recipe in RECIPES}
    torch.set_flush_denormal(True)
    try:
        for recipe, wanted in expected.items():
            same_on_every_path(lambda recipe=recipe: run(gy, w, x, config_of(recipe)))
            for ours, theirs in zip(run(gy, w, x, config_of(recipe)), wanted, strict=True):
                bits = ours.view(np.uint32), theirs.view(np.uint32)  # NumPy flushes denormals
                np.testing.assert_array_equal(*bits)
    finally:
        torch.set_flush_denormal(False)


def of_forward(name: str) -> tuple[Matrix, Matrix]:
    """x and w of an edge. The edges are named after g_y; here x has its values."""
    gy, _, w = layer()
    w = np.ascontiguousarray(w[:40].repeat(2, 1)[:, : gy.shape[1]])
    unused = np.ones((64, 64), np.float32)
    EDGES[name](gy, w, unused, np.random.default_rng(7)) if name not in TWO else TWO[name](gy, w)
    return gy, w


def forward_outlier(x: Matrix, w: Matrix) -> None:
    x[20, 7] = w[5, 9] = 1e6


def forward_zero_block(x: Matrix, w: Matrix) -> None:
    x[17:49] = 0
    w[16:32] = 0


def forward_denormals(x: Matrix, w: Matrix) -> None:
    x[::2] *= np.float32(2.0**-135)
    w[:, ::3] *= np.float32(2.0**-135)


TWO: dict[str, Callable[[Matrix, Matrix], None]] = {
    "half of all values denormal": forward_denormals,
    "one value of 10^6 in each operand": forward_outlier,
    "all-zero blocks in each operand": forward_zero_block,
}
"""Edges that also exist for x and w."""


@pytest.mark.parametrize("name", EDGES)
def test_forward_within_bound(name: str) -> None:
    x, w = of_forward(name)
    got = forward_linear(x, w)
    assert np.isfinite(got).all() and within(got, forward_bound(x, w)).all()
    # A zero token or out feature gives exactly +0, or the bias.
    zero = ~x.any(1)[:, None] | ~w.any(1)
    equal_bits(got[zero], np.zeros(zero.sum(), np.float32))
    bias = np.linspace(-3, 3, w.shape[0]).astype(np.float32)
    equal_bits(forward_linear(x, w, bias)[zero], np.broadcast_to(bias, zero.shape)[zero])
    same_on_every_path(lambda: forward_linear(x, w, bias))


def test_forward_of_scaled_numbers() -> None:
    x, w = of_forward("normal numbers")
    expected = forward_linear(x, w)
    for a, b in ((-90, 0), (110, 0), (60, -50), (-60, 50), (-60, -40)):
        got = forward_linear(x * np.float32(2.0**a), w * np.float32(2.0**b))
        equal_bits(got, expected * np.float32(2.0 ** (a + b)), f"{a} {b}")
    # Values below 2^-100 after the transform have no scale: 0. Results below 2^-126 are rounded.
    for power in (-115, -140):
        assert not forward_linear(np.ldexp(x, power), w).any()
        assert not forward_linear(x, np.ldexp(w, power)).any()
    small = forward_linear(np.ldexp(x, -72), np.ldexp(w, -66))
    exact = np.ldexp(expected.astype(np.float64), -138)
    assert (np.abs(small - exact) <= 2 * 2.0**-149).all()
    assert small.any() and np.abs(small).max() < 2.0**-126


def test_forward_of_the_largest_numbers() -> None:
    # Sums of 64 values are within the bound up to 2^118 in x and 2^108 in w. Above, a token whose
    # transform overflows is NaN, and a product that overflows is Inf.
    x, w = (np.clip(v, -2, 2) / 2 for v in of_forward("normal numbers"))
    for power, other in ((118, 0), (0, 108)):
        large, wide = np.ldexp(x, power), np.ldexp(w, other)
        got = forward_linear(large, wide)
        assert np.isfinite(got).all() and within(got, forward_bound(large, wide)).all()
    ones = np.full_like(x[:1], 2.0**123)
    assert np.isnan(forward_linear(ones, w)).all()
    y = forward_linear(np.ldexp(x, 100), np.ldexp(w, 60))
    assert not np.isnan(y).any() and np.isinf(y).any()
    y = forward_linear(np.ldexp(x, 9), np.ldexp(w, 9), out_dtype="float16")
    exact = np.ldexp(forward_linear(x, w), 18)
    assert (np.isinf(y) == (np.abs(exact) >= 65520)).all()


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("recipe", ["default", "accurate"])
def test_equalised_within_bound(recipe: str, name: str) -> None:
    config = HotConfig.recipe(recipe, equalize_tokens=True)
    gy, w, x = edge(name)
    got = run(gy, w, x, config)
    assert np.isfinite(got.gw).all() and within(got.gw, gw_bound(gy, x, config, KEY)).all()
    equal_bits(got.gx, run(gy, w, x, HotConfig.recipe(recipe)).gx)


def rows(which: int) -> Callable[[Matrix], Matrix]:
    return lambda like: (np.arange(len(like)) == which)[:, None] | nowhere(like)


def columns(which: int) -> Callable[[Matrix], Matrix]:
    return lambda like: rows(which)(like.T).T


def everywhere(like: Matrix) -> Matrix:
    return np.ones(like.shape, bool)


def nowhere(like: Matrix) -> Matrix:
    return np.zeros(like.shape, bool)


# Places of a non-finite value in g_x and g_w. Recipes have a scale per row or channel, "paper" has
# one per tensor.
SPREAD = {
    "gy": ((rows(13), rows(7)), (everywhere, everywhere)),
    "w": ((columns(5), nowhere), (everywhere, nowhere)),
    "x": ((nowhere, columns(3)), (nowhere, everywhere)),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", SPREAD)
@pytest.mark.parametrize("recipe", RECIPES)
def test_where_it_is_nan(recipe: str, operand: str, bad: float) -> None:
    values = dict(zip(("gy", "w", "x"), layer(), strict=True))
    place = {"gy": (13, 7), "w": (4, 5), "x": (22, 3)}[operand]
    values[operand][place] = bad
    got = run(*values.values(), config_of(recipe))
    by_tensor = config_of(recipe).gx_scale == "tensor"
    for ours, expected in zip(got, SPREAD[operand][by_tensor], strict=False):
        np.testing.assert_array_equal(np.isnan(ours), expected(ours))
        assert not np.isinf(ours).any()
    # g_b is a plain sum.
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isfinite(got.gb), np.isfinite(values["gy"].sum(0)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_x_that_is_nan_under_a_mask_shows(recipe: str) -> None:
    # In a plain product 0 * NaN does the same: padding must hold numbers.
    gy, w, x = edge("loss-masked tokens, 80 % of g_y's rows zero")
    token = int(np.flatnonzero(~gy.any(1))[0])
    x[token, 3] = np.nan
    got = run(gy, w, x, config_of(recipe))
    assert np.isnan(got.gw[:, 3]).all() and np.isfinite(got.gx).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_largest_numbers(recipe: str) -> None:
    # A transform adds up to 16 values, and a sketch multiplies by 15/7: safe below 2^122. The scale
    # of w or x multiplies sums of codes first, up to 127^2 K: their limit is 127 * 16 * K lower.
    config, (gy, w, x) = config_of(recipe), layer()
    top, down, less = (np.float32(2.0**power) for power in (122, -90, 108))
    for values in (gy, w, x):
        values[:] = np.sign(values)
        values[:, ::3] = 1
    for scaled in ((gy * top, w * down, x * down), (gy * down, w * less, x * less)):
        for ours, bound in zip(run(*scaled, config), bounds(*scaled, config), strict=False):
            assert within(ours, bound).all()

    # Above, an overflowing intermediate product is Inf, never a wrong number.
    values = gy * down, w * top, x * top
    got = run(*values, config)
    for name, ours, bound in zip(ALL, got, bounds(*values, config), strict=False):
        assert np.isinf(ours).any() or (name == "gw" and config.equalize_tokens)
        assert within(ours, bound)[np.isfinite(ours)].all()

    # An overflowing sum before the scale is NaN.
    gy, w, x = layer()
    gy[13] = 3e38
    got = run(gy, w, x, config)
    expected = (everywhere if config.gx_scale == "tensor" else rows(13))(got.gx)
    np.testing.assert_array_equal(np.isnan(got.gx), expected)
    if config.basis == "sketch":  # 15/7 times it is Inf
        assert np.isnan(got.gw).all()
    else:
        finite = np.isfinite(got.gw)
        assert finite.any() and not np.isnan(got.gw).any()
        assert within(got.gw, gw_bound(gy, x, config, KEY))[finite].all()
    gy[16:32] = 3e38  # a whole tile: recipes that combine tokens add them up
    got = run(gy, w, x, config)
    assert np.isnan(got.gw).all() == (config.basis != "full")


@pytest.mark.parametrize("recipe", RECIPES)
def test_half_precision(recipe: str) -> None:
    # Denormal halves are ordinary fp32 numbers. A result too large for a half is Inf, rounded once.
    config, (gy, w, x) = config_of(recipe), layer()
    small = np.ldexp(gy, -22).astype(np.float16)
    assert (np.abs(small) < 2.0**-14).all() and small.any(1).all()
    for inputs in ((small, w, x), (gy * 1024, w * 64, x * 64)):
        halves = [v.astype(np.float16) for v in inputs]
        got = run(*halves, config)
        with np.errstate(over="ignore"):
            wide = run(*(v.astype(np.float32) for v in halves), config)
            all_equal_bits(got, (v.astype(np.float16) for v in wide))
    assert np.isinf(got.gx).any() and not np.isnan(got.gx).any()


def relative(ours: Matrix, exact: Matrix) -> float:
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(ours - exact) / norm) if norm else float(np.abs(ours).max())


def table() -> str:
    """Relative errors (Frobenius) to the plain products, by recipe: g_x, g_w; mean of ten keys."""
    lines = ["| | " + " | ".join(f"`{recipe}`" for recipe in RECIPES) + " |"]
    lines.append("|---" * (len(RECIPES) + 1) + "|")
    for name in EDGES:
        gy, w, x = edge(name)
        exact = gy.astype(np.float64) @ w, gy.T.astype(np.float64) @ x
        cells = []
        for recipe in RECIPES:
            errors = []
            for key in range(10):
                got = hotcore.backward_linear(gy, w, x, config=config_of(recipe), key=key)
                errors.append([relative(a, b) for a, b in zip(got, exact, strict=False)])
            cells.append(", ".join(f"{value:.2g}" for value in np.mean(errors, 0)))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
