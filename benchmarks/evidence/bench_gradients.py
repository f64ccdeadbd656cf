"""Measure the quality of every method's gradients during a training run.

    python -m benchmarks.evidence.bench_gradients [--plot]    # minutes on a CPU; continues a report

It trains the README's small ViT and GPT in fp32. At some steps every method computes g_x and g_w
many times from the x, w and g_y of each linear layer. They are compared with the exact products:

* error: root mean square of ``|g' - g| / |g|``; cosine: mean over the draws
* noise: spread of the draws around their mean, over ``|g|``
* bias: ``|mean - g| / |g|``, without the noise that remains in a mean of that many draws. A bias
  below the noise over the square root of the draws is not significant.
* batch: spread of the layer's exact g_w over batches, over the norm of its mean; every training has
  this noise

Cost is bit operations of the backward pass over full precision's. Bytes are those that a layer
keeps per value of x. LoRA takes no part, because it has no gradients of these weights.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hotcore
import timing
import torch
from evidence import ROOT, rivals, small_tasks
from evidence.evidence_tables import gradient_quality
from evidence.rivals.methods import power_of_two_factor, triangle_rows
from evidence.small_tasks import Contender, training
from hotcore.paper.compute import FULL_PRECISION, backward_bops
from torch import Tensor, nn
from tqdm import tqdm

KINDS = ("gx", "gw")
Capture = tuple[Tensor, Tensor, Tensor]
"""Tensors x, w and g_y of a layer."""
SIMULATED_BYTES = {"naive_int4": 0.5}
"""Bytes per value of methods whose simulation keeps one byte per code."""


def layer_of(contender: Contender, w: Tensor) -> nn.Sequential:
    """Build a converted layer that holds a copy of w."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight = nn.Parameter(w.clone())
    model = nn.Sequential(layer)
    rivals.convert(model, contender.method, lambda *_: True, **contender.settings)
    return model


def draw(contender: Contender, capture: Capture) -> dict[str, Tensor]:
    """Compute g_x and g_w once."""
    x, w, gy = capture
    model = layer_of(contender, w)
    leaf = x.clone().requires_grad_()
    model(leaf).backward(gy)
    weight = next(iter(model.parameters()))
    assert leaf.grad is not None and weight.grad is not None
    return {"gx": leaf.grad, "gw": weight.grad}


def bytes_a_value(contender: Contender, capture: Capture) -> float:
    """Measure the bytes kept per value of x, as the difference between two batch sizes."""
    if contender.method in SIMULATED_BYTES:
        return SIMULATED_BYTES[contender.method]
    x, w, _ = capture
    model = layer_of(contender, w)
    sizes = []
    for samples in (x, torch.cat([x, x])):
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(samples.clone().requires_grad_())
        del y
        sizes.append(sum(saved.values()))
    return (sizes[1] - sizes[0]) / x.numel()


def quality(contender: Contender, capture: Capture, draws: int) -> dict[str, Any]:
    """Compute error, cosine, noise and bias of both gradients, and bytes per value."""
    x, w, gy = (tensor.double() for tensor in capture)
    exact = {"gx": gy @ w, "gw": gy.flatten(0, -2).t() @ x.flatten(0, -2)}
    sums = {kind: torch.zeros_like(value) for kind, value in exact.items()}
    squares, cosines = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    first: dict[str, Tensor] = {}
    for count in range(1, draws + 1):
        gradients = draw(contender, capture)
        for kind in KINDS:
            value = gradients[kind].double()
            error = value - exact[kind]
            sums[kind] += error
            squares[kind] += float(error.square().sum())
            norm = value.norm() * exact[kind].norm()
            cosines[kind] += float((value * exact[kind]).sum() / norm) if norm else 0.0
        if count == 1:
            first = gradients
        elif count == 2 and all(torch.equal(first[kind], gradients[kind]) for kind in KINDS):
            break  # the method has no randomness
    out: dict[str, Any] = {"draws": count, "bytes": bytes_a_value(contender, capture)}
    for kind in KINDS:
        norm = float(exact[kind].norm())
        mean = float((sums[kind] / count).square().sum())
        # Unbiased sum of the elements' variances; equal draws have none.
        variance = max(0.0, (squares[kind] - count * mean) / (count - 1)) if count > 1 else 0.0
        out[kind] = {
            "error": (squares[kind] / count) ** 0.5 / norm,
            "cosine": cosines[kind] / count,
            "noise": variance**0.5 / norm,
            "bias": max(0.0, mean - variance / count) ** 0.5 / norm,
        }
    return out


def cost(contender: Contender, shape: tuple[int, int, int], samples: int) -> float | None:
    """Return the backward's bit operations over those in full precision, or None if unknown."""
    tokens, outs, ins = shape
    gy, w, x, product = tokens * outs, outs * ins, tokens * ins, tokens * outs * ins
    plain, method = backward_bops(*shape, FULL_PRECISION), contender.method
    if method in hotcore.config.RECIPES:
        config = hotcore.HotConfig.recipe(method, **contender.settings)
        return backward_bops(*shape, config) / plain
    names = {
        "naive_int4": "naive INT4",
        "luq": "LUQ",
        "lbp_wht": "LBP-WHT",
        "lbp_wht_flat": "LBP-WHT",
    }
    if method in names:
        return backward_bops(*shape, names[method]) / plain
    scaled = (2 * gy + 2 * w + 2 * x) * 1024  # rounds both products' operands, scales the results
    if method == "authors_hot":
        n, side = power_of_two_factor(tokens // samples), power_of_two_factor(outs, 16)
        share = len(triangle_rows(n)) / n
        transforms = (gy + w) * (side.bit_length() - 1) + (gy + x) * (n.bit_length() - 1)
        rounding = gy + w + (gy + x) * share + w + x
        return ((transforms + rounding) * 1024 + product * (16 + 32 * share)) / plain
    known = {
        "bf16": 2 * product * 16 * 16,
        "torchao_fp8": 2 * product * 8 * 8 + scaled,
        "torchao_int8": 2 * product * 8 * 8 + scaled,
        "actnn_2bit": plain + 2 * x * 1024,
    }
    return known[method] / plain if method in known else None


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and training.in_blocks(module, name)
    }


def captured(model: nn.Module, batch: Any) -> dict[str, Capture]:
    """Capture x, w and g_y of every layer of the blocks on one batch, and clear gradients."""
    seen: dict[str, list[Tensor]] = {name: [] for name in layers_of(model)}
    hooks = []
    for name, layer in layers_of(model).items():

        def hook(_: nn.Module, args: Any, y: Tensor, into: list[Tensor] = seen[name]) -> None:
            into.append(args[0].detach())
            y.register_hook(lambda g: into.append(g.detach()))

        hooks.append(layer.register_forward_hook(hook))
    training.loss_of(model, batch).backward()
    for handle in hooks:
        handle.remove()
    model.zero_grad(set_to_none=True)
    weights = {name: layer.weight.detach().clone() for name, layer in layers_of(model).items()}
    return {name: (x, weights[name], gy) for name, (x, gy) in seen.items()}


def batch_noise(model: nn.Module, task: training.Task, seed: int, count: int) -> dict[str, float]:
    """Compute each layer's spread of the exact g_w over batches, over the norm of its mean."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    sums: dict[str, Tensor] = {}
    squares: dict[str, float] = {}
    for _ in range(count):
        training.loss_of(model, task.data.batch(task.batch_size, generator)).backward()
        for name, layer in layers_of(model).items():
            assert layer.weight.grad is not None
            grad = layer.weight.grad.double()
            sums[name] = sums.get(name, torch.zeros_like(grad)) + grad
            squares[name] = squares.get(name, 0.0) + float(grad.square().sum())
        model.zero_grad(set_to_none=True)
    out = {}
    for name, total in sums.items():
        mean = float((total / count).square().sum())
        variance = (squares[name] - count * mean) / (count - 1)
        signal = max(mean - variance / count, 0.0)  # the mean's norm without its noise
        out[name] = (variance / signal) ** 0.5 if signal else float("inf")
    return out


def run(
    task_name: str, seed: int, steps: int, at: Sequence[int]
) -> Iterator[tuple[int, Any, Any, Any]]:
    """Train in fp32, and yield step, model, batch and task at every step in ``at``."""
    task = small_tasks.load_task(task_name)
    torch.manual_seed(seed)
    model = task.build()
    order = torch.Generator().manual_seed(seed)
    optimizer, schedule = training.optimizer_of(task, model, steps)
    for step in range(max(at) + 1):
        batch = task.data.batch(task.batch_size, order)
        if step in at:
            yield step, model, batch, task
        optimizer.zero_grad(set_to_none=True)
        training.loss_of(model, batch).backward()
        optimizer.step()
        schedule.step()


def measure(
    args: argparse.Namespace,
    report: dict[str, Any],
    task_name: str,
    seed: int,
    methods: Sequence[Contender],
) -> None:
    points = report["points"]
    left = [step for step in args.at if f"{task_name}/{seed}/{step}" not in points]
    if not left:
        return
    for step, model, batch, task in run(task_name, seed, args.steps, left):
        began = time.perf_counter()
        key = f"{task_name}/{seed}/{step}"
        with torch.random.fork_rng():
            captures = captured(model, batch)
            noise = batch_noise(model, task, seed, args.batches)
            point: dict[str, Any] = {"layers": {}}
            bar = tqdm(total=len(captures) * len(methods), desc=key, mininterval=5.0)
            with bar:
                for name, capture in captures.items():
                    x, w, _ = capture
                    shape = (x.numel() // x.shape[-1], *w.shape)
                    rows: dict[str, Any] = {}
                    for contender in methods:
                        torch.manual_seed(zlib.crc32(f"{key}/{name}/{contender.name}".encode()))
                        try:
                            rows[contender.name] = quality(contender, capture, args.draws)
                        except rivals.TorchaoMissing as missing:
                            report["left out"][contender.name] = str(missing)
                            continue
                        finally:
                            bar.update()
                        rows[contender.name]["cost"] = cost(contender, shape, len(x))
                    point["layers"][name] = {
                        "shape": list(shape), "batch": noise[name], "methods": rows,
                    }  # fmt: skip
        point["seconds"] = time.perf_counter() - began
        points[key] = point
        report["seconds"] = sum(entry["seconds"] for entry in points.values())
        timing.write_json(args.json, report)


def numbers(text: str) -> list[int]:
    try:
        steps = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
    if not steps or steps[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 0")
    return steps


def main(argv: Sequence[str] | None = None) -> None:
    numbers_of = {"steps": 300, "draws": 32, "batches": 16, "threads": 1}
    parser = timing.error_arguments(__doc__, "gradients", **numbers_of)
    parser.add_argument("--tasks", default="vit,gpt")
    parser.add_argument("--methods", help="names with semicolons; default: all")
    parser.add_argument("--at", type=numbers, default=[0, 30, 100, 299], help="steps to measure at")
    parser.add_argument("--seeds", type=numbers, default=[0])
    parser.add_argument("--plot", nargs="?", type=Path, const=ROOT / "docs/img/gradients.svg")
    args = parser.parse_args(argv)
    tasks = args.tasks.split(",")
    if not set(tasks) <= set(small_tasks.README) or args.draws < 2 or args.batches < 2:
        parser.error(f"--tasks: of {', '.join(small_tasks.README)}; --draws, --batches: from 2")
    if max(args.at) >= args.steps:
        parser.error(f"--at: {max(args.at)} is past the {args.steps} --steps")
    args.json = timing.path_of(args, "gradients")
    timing.use_threads(args.threads)
    keys = ("methods", "at", "steps", "seeds", "draws", "batches")
    settings = {"tasks": tasks} | {key: getattr(args, key) for key in keys}
    try:
        methods_of = {task: small_tasks.chosen(task, args.methods, "gradients") for task in tasks}
        why = "no gradients of the layers' own weights"
        report = small_tasks.begun(
            args.json, "gradients", settings, args.threads, why, "points", methods_of
        )
    except ValueError as error:
        parser.error(str(error))
    for task in tasks:
        for seed in args.seeds:
            measure(args, report, task, seed, methods_of[task])
    print("\n".join(gradient_quality(report)))
    print(f"\n{report['seconds']:.0f} s of measuring; written: {args.json}")
    if args.plot is not None:
        from evidence.plot_evidence import plot_gradients  # needs matplotlib

        plot_gradients(report, args.plot)


if __name__ == "__main__":
    main()
