"""Error and time of g_x where the weight is kept as INT8 codes of the forward (freeze_int8).

    python -m benchmarks.evidence.bench_frozen_error [--seeds 3] [--steps 200] [--json PATH]

Minutes on a CPU; the errors are the same on any. Weights and g_y are synthetic, or those of the
linear layers of a small GPT (examples/train_lib) after training. Ways to compute g_x = g_y w:

  weight       w itself, quantised along O with a scale a column, as a layer that is not frozen
  two copies   its codes for g_x, made of w once and kept beside those of the forward: the same bits
  dequantised  the forward's codes, brought back to bf16 and quantised along O in every backward
  folded       the forward's codes as they are: (g_y s) q, s the scales of w's rows, without a
               transform of g_y along O, and back from the transform along I
  bf16         a plain product with the forward's codes, brought back to bf16

The error is ``|g_x - exact| / |exact|`` in fp64: of the gradient with w, and of that with the
weight that the codes stand for, which is what the frozen model's own gradient is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hotcore
import timing
import torch
from evidence.bench_forward_error import normal, student, token_sizes, with_outliers
from evidence.small_tasks import load_task, training, use_threads
from hotcore.torch.ops.codes import Frozen, dequantize, quantize_forward_weight
from torch import Generator, Tensor
from train_lib.models import SmallGPT

CONFIG = hotcore.HotConfig()
TOKENS, SHAPE = 512, (1024, 4096)
GPT = {"width": 128, "depth": 2, "heads": 4}
TIMED = (788, 3072, 768)
"""L, O, I."""
BYTES = {"weight": 2, "two copies": 2, "dequantised": 1, "folded": 1, "bf16": 1}
"""A value, with w in bf16; beside "weight" the 8-bit forward keeps codes of a frozen w, 1 more."""

WEIGHTS: dict[str, Callable[..., Tensor]] = {"Gauss": normal, "heavy tails": student}
GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "Gauss": normal,
    "tokens of different size": token_sizes,
    "out features x30": with_outliers(30),
}


def frozen(w: Tensor, dtype: torch.dtype = torch.bfloat16) -> Frozen:
    """The codes of a weight that is kept in ``dtype``."""
    codes = quantize_forward_weight(w, CONFIG)
    return Frozen(codes, CONFIG.forward_block, *w.shape, dtype)


def ways(w: Tensor) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Name -> g_y, key -> g_x; everything that is kept of w is made before."""
    codes, copy = frozen(w), hotcore.quantize_weight(w, CONFIG)
    outs, ins = w.shape
    q = codes.codes[: -4 * outs].view(torch.int8).view(outs, -1)
    scales = codes.codes[-4 * outs :].view(torch.float32)
    ones = torch.ones(q.shape[1])

    def backward(gy: Tensor, matrix: Any, key: int) -> Tensor:
        return hotcore.backward_linear(gy, matrix, None, config=CONFIG, need="gx", key=key).gx

    def folded(gy: Tensor, key: int) -> Tensor:
        rows, row_scales = hotcore.quantize(gy * scales, scale="token", key=key)
        product = hotcore.gemm_int8(rows, q.t().contiguous(), row_scales, ones)
        return hotcore.fwht(product, block=codes.block)[:, :ins] / codes.block

    return {
        "weight": lambda gy, key: backward(gy, w, key),
        "two copies": lambda gy, key: backward(gy, copy, key),
        "dequantised": lambda gy, key: backward(gy, dequantize(codes), key),
        "folded": folded,
        "bf16": lambda gy, key: (gy.bfloat16() @ dequantize(codes)).float(),
    }


def trained(steps: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, w and g_y of every linear layer in a small GPT's blocks after so many steps."""
    torch.manual_seed(seed)
    task = load_task("gpt")
    model = SmallGPT(task.data.VOCAB, context=task.data.CONTEXT, **GPT)
    order = Generator().manual_seed(seed)
    optimizer, schedule = training.optimizer_of(task, model, steps)
    gradients: dict[str, Tensor] = {}
    for step in range(steps + 1):
        for name, layer in model.blocks.named_modules() if step == steps else ():
            if isinstance(layer, torch.nn.Linear):

                def keep(_: Any, __: Any, gy: Any, name: str = name) -> None:
                    gradients[name] = gy[0].flatten(0, 1)

                layer.register_full_backward_hook(keep)
        loss = training.loss_of(model, task.data.batch(task.batch_size, order))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if step < steps:
            optimizer.step()
            schedule.step()
    print(f"small GPT: loss {loss.item():.3f} after {steps} steps", flush=True)
    for name, gy in gradients.items():
        yield name, model.blocks.get_submodule(name).weight.detach(), gy


def errors_of(w: Tensor, gy: Tensor, key: int) -> dict[str, dict[str, float]]:
    """Way -> its error beside the gradient with w, and with the weight that the codes stand for."""
    kept = dequantize(frozen(w, torch.float32))
    exact, own = (gy.double() @ matrix.double() for matrix in (w, kept))
    found = {}
    for name, way in ways(w).items():
        gx = way(gy, key).double()
        found[name] = {
            "weight": ((gx - exact).norm() / exact.norm()).item(),
            "codes": ((gx - own).norm() / own.norm()).item(),
        }
    return found


def mean(rows: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        way: {of: statistics.mean(row[way][of] for row in rows) for of in ("weight", "codes")}
        for way in rows[0]
    }


def synthetic(seeds: int) -> Iterator[dict[str, Any]]:
    for kind, make_w in WEIGHTS.items():
        for like, make_gy in GRADIENTS.items():
            rows = []
            for seed in range(seeds):
                of = Generator().manual_seed(seed)
                w, gy = make_w(*SHAPE, of=of), make_gy(TOKENS, SHAPE[0], of=of)
                rows.append(errors_of(w, gy, seed))
            yield {"weights": kind, "gradient": like, "shape": list(SHAPE), "error": mean(rows)}


def main(argv: Sequence[str] | None = None) -> None:
    defaults = {"seeds": 3, "steps": 200, "rounds": 10, "threads": 1}
    args = timing.error_arguments(__doc__, "frozen-error", **defaults).parse_args(argv)
    use_threads(args.threads)
    rows = list(synthetic(args.seeds))
    for name, w, gy in trained(args.steps, 0):
        found = mean([errors_of(w, gy, seed) for seed in range(args.seeds)])
        facts = {"weights": f"trained GPT, {name}", "gradient": "its own", "shape": list(w.shape)}
        rows.append({**facts, "error": found})
    for row in rows:
        print(f"{row['weights']}, {row['shape']}, g_y: {row['gradient']}")
        for way, error in row["error"].items():
            print(f"  {way:12s} {error['weight']:.5f}  {error['codes']:.5f}")
    tokens, outs, ins = TIMED
    w, gy = torch.randn(outs, ins), torch.randn(tokens, outs)
    calls = {name: lambda way=way: way(gy, 1) for name, way in ways(w).items()}
    times = timing.in_turns(calls, args.rounds, "cpu", budget_ms=4000.0)
    for name, row in times.items():
        print(timing.line(name, row))
    settings = {"tokens": TOKENS, "seeds": args.seeds, "steps": args.steps}
    measured = {"shape": list(TIMED), "rows": times}
    timing.write_errors(args, "frozen-error", threads=args.threads, settings=settings,
                        bytes=BYTES, rows=rows, time=measured)  # fmt: skip


if __name__ == "__main__":
    main()
