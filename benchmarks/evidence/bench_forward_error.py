"""Error of y = x w^T in 8 bits: INT8 after a Hadamard transform, by its block, beside FP8.

    python -m benchmarks.evidence.bench_forward_error [--seeds 5] [--json PATH]

Seconds on a CPU, and the same figures on any: INT8 products are ``hotcore.forward_linear``'s, whose
bits are those of CUDA. FP8 (E4M3) is simulated: operands scaled to its largest number, cast and
multiplied exactly, as tensor cores do but for their sums. So is bf16, likewise with exact sums. The
error is that of all of y, ``|y - exact| / |exact|``, the exact product in fp64.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import hotcore
import timing
import torch
from torch import Generator, Tensor

TOKENS, OUTS, WIDTHS = 256, 192, (768, 4096)
BLOCKS = (1, 16, 32, 64, 128, 256)
E4M3_LARGEST = 448.0


def normal(*shape: int, of: Generator) -> Tensor:
    return torch.randn(shape, generator=of)


def student(*shape: int, of: Generator) -> Tensor:
    """Student's t with 3 degrees of freedom: heavy tails."""
    return normal(*shape, of=of) / normal(3, *shape, of=of).square().mean(0).sqrt()


def with_outliers(factor: float, share: float = 0.005) -> Callable[..., Tensor]:
    """Gauss, with that share of the channels so many times as large in every token."""

    def make(tokens: int, width: int, of: Generator) -> Tensor:
        x = normal(tokens, width, of=of)
        x[:, torch.randperm(width, generator=of)[: max(1, round(share * width))]] *= factor
        return x

    return make


def token_sizes(tokens: int, width: int, of: Generator) -> Tensor:
    """Gauss, with log-normal sizes of the tokens."""
    return normal(tokens, width, of=of) * normal(tokens, 1, of=of).mul(1.5).exp()


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "Gauss": normal,
    "heavy tails (Student, 3)": student,
    "tokens of different size": token_sizes,
    "channels x30": with_outliers(30),
    "channels x100": with_outliers(100),
}


def fp8(values: Tensor, dim: int | None) -> Tensor:
    """The nearest E4M3 numbers under one scale a row (``dim`` 1) or for all (None)."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = E4M3_LARGEST / largest.clamp_min(1e-30)
    return (values * scale).to(torch.float8_e4m3fn).double() / scale.double()


def products() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Name -> x, w -> y."""

    def int8(block: int) -> Callable[[Tensor, Tensor], Tensor]:
        config = hotcore.HotConfig(forward_block=block)
        return lambda x, w: hotcore.forward_linear(x, w, config=config)

    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bf16": lambda x, w: x.bfloat16().double() @ w.bfloat16().double().T
    }
    found |= {f"INT8, {block}": int8(block) for block in BLOCKS}
    found["FP8 rowwise"] = lambda x, w: fp8(x, 1) @ fp8(w, 1).T
    found["FP8 tensorwise"] = lambda x, w: fp8(x, None) @ fp8(w, None).T
    return found


def errors(seeds: int) -> list[dict[str, Any]]:
    """A row for each kind of activation and width: every product's error, mean over the seeds."""
    rows = []
    for name, make in ACTIVATIONS.items():
        for width in WIDTHS:
            found: dict[str, list[float]] = {}
            for seed in range(seeds):
                of = Generator().manual_seed(seed)
                x, w = make(TOKENS, width, of=of), normal(OUTS, width, of=of)
                exact = x.double() @ w.double().T
                for product, run in products().items():
                    error = (run(x, w).double() - exact).norm() / exact.norm()
                    found.setdefault(product, []).append(error.item())
            mean = {product: statistics.mean(values) for product, values in found.items()}
            spread = {product: max(values) - min(values) for product, values in found.items()}
            rows.append({"activation": name, "width": width, "error": mean, "spread": spread})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = timing.error_arguments(__doc__, "forward-error", seeds=5).parse_args(argv)
    rows = errors(args.seeds)
    for row in rows:
        print(f"{row['activation']}, {row['width']} in features")
        for product, error in row["error"].items():
            spread = row["spread"][product]
            print(f"  {product:16s} {error:.5f}  (largest less smallest {spread:.5f})")
    settings = {"tokens": TOKENS, "outs": OUTS, "seeds": args.seeds}
    timing.write_errors(args, "forward-error", settings=settings, rows=rows)


if __name__ == "__main__":
    main()
