"""Measure the relative error of g_w by recipe, on ten cases with tokens of different sizes.

    python -m benchmarks.evidence.bench_cases [--json PATH]

It compares libhot's recipes with exact products on synthetic tensors, in a minute on any CPU. A
test checks the report's errors.
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
    """Draw g_y ``[TOKENS, OUT]`` and x ``[TOKENS, IN]`` of every case, by name."""
    tokens = np.arange(TOKENS)

    def pair() -> tuple[Array, Array]:
        return rng.standard_normal((TOKENS, OUT)), rng.standard_normal((TOKENS, IN))

    arrays = {"Gauss": pair()}
    size = np.exp(rng.standard_normal((TOKENS, 1)))
    gy, x = pair()
    arrays["log-normal token sizes"] = gy, x * size
    gy, x = pair()
    arrays["token sizes of x and g_y opposite"] = gy / size**2, x * size**2
    gy, x = pair()
    x[100] *= 1000
    gy[64:128] = np.where(tokens[64:128, None] == 100, 0, gy[64:128])
    arrays["one token × 1000, without gradient"] = gy, x
    gy, x = pair()
    first = tokens % 77 == 0
    x[first] *= 100
    gy[first] = 0
    arrays["first of 77 tokens × 100, without gradient"] = gy, x
    gy, x = pair()
    first = tokens % 64 == 0
    x[first] *= 0.1
    gy[~first] = 0
    arrays["gradient at class tokens alone, a tenth of the others"] = gy, x
    gy, x = pair()
    x[:, 7] *= 1000
    arrays["one channel × 1000"] = gy, x
    gy, x = pair()
    arrays["x of mean 10, g_y adding up to 0"] = gy - gy.mean(0), x + 10
    gy, x = pair()
    x = x * np.abs(rng.standard_normal((TOKENS, IN)))
    first = tokens % 128 == 0
    x[first] *= 1000 * (rng.random(IN) < 0.03) + 1
    gy[first] = 0
    arrays["SwiGLU-like, massive first tokens without gradient"] = gy, x
    gy, x = pair()
    x[100] *= 1000
    arrays["one token × 1000, with its gradient"] = gy, x
    return arrays


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}{suffix}": (name, changes)
    for name in ("default", "accurate", "fast")
    for suffix, changes in (("", {}), (", equalize_tokens", {"equalize_tokens": True}))
}
"""Recipe and its changed fields, by title."""


def recipe_error(case: tuple[Array, Array], title: str, keys: int) -> float:
    """Compute the relative error of g_w, root mean square over ``keys`` random keys."""
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
    errors: dict[str, dict[str, float]] = {}
    for name, case in cases(np.random.default_rng(0)).items():
        errors[name] = {title: recipe_error(case, title, args.keys) for title in RECIPES}
        print(f"{name:52} {'  '.join(f'{title} {e:.3f}' for title, e in errors[name].items())}")
    settings = {"keys": args.keys, "recipes": list(RECIPES)}
    timing.write(args, "recipe-cases", {**settings, "cases": errors})


if __name__ == "__main__":
    main()
