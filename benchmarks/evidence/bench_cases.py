"""Relative error of g_w by recipe, on ten cases in which tokens differ in size.

    python -m benchmarks.evidence.bench_cases [--json PATH]

A minute on any CPU: libhot's own recipes on synthetic tensors, beside exact products. A test holds
the errors that the report has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hotcore
import numpy as np
import timing
from numpy.typing import NDArray

Array = NDArray[np.float64]
TOKENS, OUT, IN = 1024, 128, 192


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


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "default, equalize_tokens": ("default", {"equalize_tokens": True}),
    "accurate": ("accurate", {}),
    "accurate, equalize_tokens": ("accurate", {"equalize_tokens": True}),
    "fast": ("fast", {}),
    "fast, equalize_tokens": ("fast", {"equalize_tokens": True}),
}
"""Title -> recipe and what is changed of it."""


def recipe_error(case: tuple[Array, Array], title: str, keys: int) -> float:
    """Relative error of g_w, root of the mean square over so many keys."""
    gy, x = (v.astype(np.float32) for v in case)
    exact = gy.astype(np.float64).T @ x
    name, changes = RECIPES[title]
    config = hotcore.HotConfig.recipe(name, **changes)
    square = 0.0
    for key in range(keys):
        got = hotcore.backward_linear(gy, None, x, config=config, need="gw", key=key).gw
        square += float(((got - exact) ** 2).sum())
    return float(np.sqrt(square / keys / (exact**2).sum()))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = timing.error_arguments(__doc__, "recipe-cases", keys=20)
    args = parser.parse_args(argv)
    found: dict[str, dict[str, float]] = {}
    for name, case in cases(np.random.default_rng(0)).items():
        found[name] = {title: recipe_error(case, title, args.keys) for title in RECIPES}
        print(f"{name:52} {'  '.join(f'{title} {e:.3f}' for title, e in found[name].items())}")
    settings = {"keys": args.keys, "recipes": list(RECIPES)}
    timing.write(args, "recipe-cases", {**settings, "cases": found})


if __name__ == "__main__":
    main()
