"""Error and bias of ways to keep x between forward and backward, on synthetic tensors.

    python -m benchmarks.evidence.bench_storage [--draws N] [--json PATH]

A minute or two on any machine: NumPy alone, on models of the forms in fp64. What was chosen from
these figures is fixed to the bit in docs/numerics.md ("x kept as rht2"). Two tables:

* ``blocks``: blocks of 64, 32 and 16 tokens of x, each form's relative error and its relative bias
  (length of the mean error over the draws, less what so many draws leave by chance).
* ``cases``: relative error of one g_w, g_y in INT8 per channel and x brought to INT8 per channel,
  for ten cases in which tokens differ in size: plain, and equalised by three measures of a
  token's size.

    python -m benchmarks.evidence.bench_storage --recipes [--json PATH]

The same ten cases by libhot's own recipes, into recipe-cases.json; a test holds these errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import timing
from layers import HALF_OF_TOKENS, TOKEN_SETTINGS
from numpy.typing import NDArray
from timing import RESULTS

Array = NDArray[np.float64]
LEVELS = {4: (6, 18, 30, 44, 58, 75, 96, 127), 2: (38, 127)}
"""The 2**bits Lloyd-Max levels of a normal distribution, in 127ths of the largest."""
LARGEST = {4: 2.7326, 2: 1.510}
"""That level, in standard deviations."""
STEPS = {4: 0.3352, 2: 0.9957}
"""Distance of the best uniform levels, likewise."""
FORMS = (
    "int4", "codebook", "uniform", "stochastic", "dither", "dither 2.2", "dither 1.75",
    "dither 1.5",
)  # fmt: skip
TOKENS, OUT, IN = 1024, 128, 192
BLOCKS = (64, 32, 16)
MEASURES = ("rms", "mean", "largest")
"""Of a token's size: root mean square, mean magnitude, largest magnitude."""


def hadamard(n: int) -> Array:
    """The Sylvester matrix of order n."""
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    return h


def nearest_level(z: Array, levels: Array) -> Array:
    """The nearest of the levels and their negatives."""
    middles = (levels[1:] + levels[:-1]) / 2
    found = levels[np.searchsorted(middles, np.abs(z), side="right")]
    return np.where(z < 0, -found, found)


def eden(y: Array, q: Array) -> Array:
    """q in the length that makes <y, q> what <y, y> is, of every column."""
    along = (y * q).sum(axis=-2, keepdims=True)
    whole = (y * y).sum(axis=-2, keepdims=True)
    return q * np.divide(whole, along, out=np.zeros_like(whole), where=along > 0)


def kept(y: Array, form: str, bits: int, rng: np.random.Generator) -> Array:
    """What a form keeps of transformed blocks ``[..., n, C]``, one scale a block and column.

    ``"codebook"`` and ``"uniform"``: nearest level, EDEN's scale. ``"stochastic"``: symmetric
    codes to the largest value, rounded at random. ``"dither [c]"``: 2**bits uniform levels up to
    the largest value, or up to c standard deviations with EDEN's scale; one random number for each
    row is added before rounding and subtracted after.
    """
    largest = np.abs(y).max(axis=-2, keepdims=True)
    spread = np.sqrt((y * y).mean(axis=-2, keepdims=True))
    if form in ("codebook", "uniform"):
        levels = np.array(LEVELS[bits]) / 127 * LARGEST[bits]
        if form == "uniform":
            levels = (np.arange(1 << (bits - 1)) + 0.5) * STEPS[bits]
        return eden(y, nearest_level(y / np.where(spread > 0, spread, 1), levels) * spread)
    if form in ("int4", "stochastic"):
        q = (1 << (bits - 1)) - 1
        step = np.where(largest > 0, largest, 1) / q
        return np.asarray(np.floor(y / step + rng.random(y.shape)) * step)
    limit = form.removeprefix("dither").strip()
    reach = np.minimum(largest, float(limit) * spread) if limit else largest
    half = 1 << (bits - 1)
    step = np.where(reach > 0, reach, 1) / (half - 0.5)
    dither = rng.random((*y.shape[:-1], 1)) - 0.5
    code = np.clip(np.floor(y / step + dither), -half, half - 1)
    result = (code + 0.5 - dither) * step
    return eden(y, result) if limit else result


def rotated(x: Array, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Blocks ``[..., n, C]`` after random signs and a Hadamard transform, and the signs."""
    signs = rng.choice((-1.0, 1.0), (*x.shape[:-1], 1))
    return hadamard(n) @ (signs * x) / np.sqrt(n), signs


def stored(x: Array, form: str, bits: int, n: int, rng: np.random.Generator) -> Array:
    """Blocks ``[..., n, C]`` as they come back."""
    if form == "int4":
        return kept(x, form, 4, rng)
    y, signs = rotated(x, n, rng)
    return np.asarray(signs * (hadamard(n) @ kept(y, form, bits, rng)) / np.sqrt(n))


def inputs(n: int, rng: np.random.Generator) -> dict[str, Array]:
    """One block ``[n, 32]`` of each kind."""
    gauss = rng.standard_normal((n, 32))
    one = {f"one token × {size}": gauss.copy() for size in (3, 10, 30)}
    for size, x in zip((3, 10, 30), one.values(), strict=True):
        x[5] *= size
    return {
        "Gauss": gauss,
        "Student t, 3 degrees": rng.standard_t(3, (n, 32)),
        "Student t, 1.5 degrees": rng.standard_t(1.5, (n, 32)),
        "log-normal values": gauss * np.exp(1.5 * rng.standard_normal((n, 32))),
        **one,
        "mean 10": gauss + 10,
        "ReLU": np.maximum(gauss, 0),
        "one value in 16": gauss * (rng.random((n, 32)) < 1 / 16) + 1e-9,
    }


def error_and_bias(
    x: Array, draw: Callable[[Array], Array], draws: int, at_once: int = 50
) -> tuple[float, float]:
    """Of ``draw(x repeated)``: relative error of a draw, and relative length of the mean error."""
    square, total = 0.0, np.zeros_like(x)
    for _ in range(draws // at_once):
        error = draw(np.broadcast_to(x, (at_once, *x.shape))) - x
        square += float((error**2).sum())
        total += error.sum(axis=0)
    square /= draws
    bias = float(((total / draws) ** 2).sum()) - square / draws
    whole = float((x * x).sum())
    return float(np.sqrt(square / whole)), float(np.sqrt(max(0.0, bias) / whole))


def blocks(draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Every form on every input, by bits and tokens of a block."""
    rows = []
    for n in BLOCKS:
        for bits in (4, 2):
            for name, x in inputs(n, rng).items():
                found = {}
                for form in FORMS if bits == 4 else FORMS[1:]:

                    def draw(x: Array, form: str = form, bits: int = bits, n: int = n) -> Array:
                        return stored(x, form, bits, n, rng)

                    if form == "stochastic" and bits == 2:
                        continue  # three levels
                    error, bias = error_and_bias(x, draw, draws)
                    found[form] = {"error": error, "bias": bias}
                rows.append({"block": n, "bits": bits, "bytes": bits / 8 + 2 / n, "input": name,
                             "forms": found})  # fmt: skip
    return rows


# ---- ten cases ---------------------------------------------------------------------------------


def cases(rng: np.random.Generator) -> dict[str, tuple[Array, Array]]:
    """g_y ``[TOKENS, OUT]`` and x ``[TOKENS, IN]`` of the cases, by name."""
    tokens = np.arange(TOKENS)

    def pair() -> tuple[Array, Array]:
        return rng.standard_normal((TOKENS, OUT)), rng.standard_normal((TOKENS, IN))

    found = {"Gauss": pair()}
    size = np.exp(rng.standard_normal((TOKENS, 1)))
    gy, x = pair()
    found["log-normal token sizes"] = gy, x * size
    gy, x = pair()
    found["token sizes of x and g_y opposite"] = gy / size**2, x * size**2
    gy, x = pair()
    x[100] *= 1000
    gy[64:128] = np.where(tokens[64:128, None] == 100, 0, gy[64:128])
    found["one token × 1000, without gradient"] = gy, x
    gy, x = pair()
    first = tokens % 77 == 0
    x[first] *= 100
    gy[first] = 0
    found["first of 77 tokens × 100, without gradient"] = gy, x
    gy, x = pair()
    first = tokens % 64 == 0
    x[first] *= 0.1
    gy[~first] = 0
    found["gradient at class tokens alone, a tenth of the others"] = gy, x
    gy, x = pair()
    x[:, 7] *= 1000
    found["one channel × 1000"] = gy, x
    gy, x = pair()
    found["x of mean 10, g_y adding up to 0"] = gy - gy.mean(0), x + 10
    gy, x = pair()
    x = x * np.abs(rng.standard_normal((TOKENS, IN)))
    first = tokens % 128 == 0
    x[first] *= 1000 * (rng.random(IN) < 0.03) + 1
    gy[first] = 0
    found["SwiGLU-like, massive first tokens without gradient"] = gy, x
    gy, x = pair()
    x[100] *= 1000
    found["one token × 1000, with its gradient"] = gy, x
    return found


def token_sizes(x: Array, measure: str) -> Array:
    """A power of two for each token ``[L, 1]``, by its root mean square, mean or largest value."""
    magnitude = np.abs(x)
    size = {
        "rms": lambda: np.sqrt((x * x).mean(axis=1)),
        "mean": lambda: magnitude.mean(axis=1),
        "largest": lambda: magnitude.max(axis=1),
    }[measure]()
    return np.asarray(np.exp2(np.floor(np.log2(np.where(size > 0, size, 1))))[:, None])


def to_int8(y: Array, rng: np.random.Generator) -> Array:
    """``[K, C]`` by INT8 codes with one scale a column, rounded at random."""
    step = np.abs(y).max(axis=0) / 127
    step = np.where(step > 0, step, 1)
    return np.asarray(np.floor(y / step + rng.random(y.shape)) * step)


def weight_gradient(gy: Array, x: Array, form: str, bits: int, rng: np.random.Generator) -> Array:
    """g_w with x kept as a form, or INT8 per channel."""
    if form == "int8":
        return np.asarray(to_int8(gy, rng).T @ to_int8(x, rng))
    wide, blocked = gy, x.reshape(-1, 64, IN)
    if form != "int4":
        blocked, signs = rotated(blocked, 64, rng)
        wide = (hadamard(64) @ (signs * gy.reshape(-1, 64, OUT)) / 8).reshape(TOKENS, OUT)
    back = kept(blocked, form, bits, rng).reshape(TOKENS, IN)
    return np.asarray(to_int8(wide, rng).T @ to_int8(back, rng))


KEPT = {
    "int8": ("int8", 8),
    "int4": ("int4", 4),
    "codebook, 4 bits": ("codebook", 4),
    "dither, 4 bits": ("dither", 4),
    "codebook, 2 bits": ("codebook", 2),
    "rht2": ("dither 1.75", 2),
}
"""Name in the table -> form, bits."""


def case_rows(draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Error of g_w by case, by form; plain and equalised by each measure.

    x comes in another size at every draw, so that no measure has luck with the powers of two.
    """
    rows = []
    for name, (gy, x) in cases(rng).items():
        exact = gy.T @ x
        length = float(np.sqrt((exact**2).sum()))
        found: dict[str, dict[str, float]] = {}
        for label, (form, bits) in KEPT.items():
            square = dict.fromkeys(("plain", *MEASURES), 0.0)
            for draw in range(draws):
                wide = x * 2 ** (draw / draws)
                for measure in square:
                    t = token_sizes(wide, measure) if measure != "plain" else np.ones((TOKENS, 1))
                    got = weight_gradient(gy * t, wide / t, form, bits, rng) / 2 ** (draw / draws)
                    square[measure] += float(((got - exact) ** 2).sum())
            found[label] = {m: float(np.sqrt(sum_ / draws)) / length for m, sum_ in square.items()}
        rows.append({"case": name, "forms": found})
    return rows


# ---- the same by libhot --------------------------------------------------------------------------

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "default, equalize_tokens": ("default", {"equalize_tokens": True}),
    "accurate": ("accurate", {}),
    "accurate, equalize_tokens": ("accurate", {"equalize_tokens": True}),
    "fast": ("fast", {}),
    "fast, equalize_tokens": ("fast", {"equalize_tokens": True}),
    "compact": ("compact", {}),
    **{name: ("default", settings) for name, settings in TOKEN_SETTINGS.items()},
    "token4, half of the tokens": (
        "default",
        {**TOKEN_SETTINGS["token4"], **HALF_OF_TOKENS},
    ),
}
"""Title -> recipe and what is changed of it."""


def recipe_error(case: tuple[Array, Array], title: str, keys: int) -> float:
    """Relative error of g_w, root of the mean square over so many keys."""
    import hotcore  # what is above needs NumPy alone

    gy, x = (v.astype(np.float32) for v in case)
    exact = gy.astype(np.float64).T @ x
    name, changes = RECIPES[title]
    config = hotcore.HotConfig.recipe(name, **changes)
    square = 0.0
    for key in range(keys):
        got = hotcore.backward_linear(gy, None, x, config=config, need="gw", key=key).gw
        square += float(((got - exact) ** 2).sum())
    return float(np.sqrt(square / keys / (exact**2).sum()))


def recipe_cases(keys: int) -> dict[str, Any]:
    """Every case by every recipe."""
    found = cases(np.random.default_rng(0))
    return {
        "date": timing.today(),
        "keys": keys,
        "recipes": list(RECIPES),
        "cases": {
            name: {title: recipe_error(case, title, keys) for title in RECIPES}
            for name, case in found.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = timing.error_arguments(__doc__, "storage", draws=2000)
    parser.add_argument("--recipes", action="store_true", help="by libhot's recipes")
    parser.set_defaults(json=None)
    args = parser.parse_args(argv)
    if args.recipes:
        timing.write_json(args.json or RESULTS / "recipe-cases.json", recipe_cases(20))
        return
    rng = np.random.default_rng(0)
    by_block, by_case = blocks(args.draws, rng), case_rows(max(1, args.draws // 200), rng)
    for row in (*by_block, *by_case):
        title = f"{row['block']:2} {row['bits']} {row['input']}" if "block" in row else row["case"]
        forms = row["forms"].items()
        figures = (f"{n} " + "/".join(f"{e:.3f}" for e in f.values()) for n, f in forms)
        print(f"{title:52} {'  '.join(figures)}")
    report = {"date": timing.today(), "draws": args.draws, "blocks": by_block, "cases": by_case}
    timing.write_json(args.json or RESULTS / "storage.json", report)


if __name__ == "__main__":
    main()
