"""Time the backward of linear layers: hotcore beside torch and torchao, in one run.

    python benchmarks/bench_backward.py [--device cpu|cuda] [--part PART ...] [--recipe NAME ...]

Parts, by default all, on the CPU "layers":

  layers   backward passes and compress_activation, sums of the groups, and the floor
  paper    the paper's 16 layers, one image, in a CUDA graph
  stages   time of each stage: quantising g_y and w, the products, the rest
  forward  HotLinear's forward in training against a plain linear layer's
  host     host time of one backward of the torch adapter
  rule     layers of many sizes in a CUDA graph, and the fit of which convert decides (alone only)

hotcore's rows are whole backward passes from a compressed x; compressing has its own row. "torch
bf16" is the same work. "bf16 products" and the rows of INT8 and FP8 are the two products alone,
whose operands are ready. Rows that end in "both" are a layer's forward (with a bias) and backward.
timing.py describes the clock.
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import hotcore
import hotcore.torch as hot
import kernel_classes
import timing
import torch
from evidence import doc_tables, rivals
from hotcore.torch.ops import linear
from layers import CPU_GROUPS, CUDA_GROUPS, PAPER, Shape, floor_ms
from timing import Call, Row
from training import RECIPES

PARTS = ("layers", "paper", "stages", "forward", "host")
RULE_TOKENS = (2048, 8192, 32768)
RULE_SIZES = (
    *((size, size) for size in (256, 384, 512, 768, 1024, 1536, 2048, 4096)),
    (1536, 512), (512, 1536), (2304, 768), (3072, 768), (768, 3072), (4096, 1024), (1024, 4096),
    (8192, 2048), (2048, 8192),
)  # fmt: skip
"""Out and in features of the part `rule`."""
ALL = ("gx", "gw", "gb")
BOTH = ("default", "fast")
"""Recipes whose forward and backward are timed together."""
HOST_BAR_US = 60.0
LEAST_STAGE_ROUNDS = 4
PROFILED_CALLS, BURSTS = 5, 15
TOY: Shape = (64, 64, 64)
PRODUCT = re.compile("cutlass|gemm|product", re.IGNORECASE)  # in names of kernels
Groups = dict[str, dict[str, Shape]]


def tensors(shape: Shape, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Draw gy, w and x of a layer."""
    tokens, outs, ins = shape
    sizes = ((tokens, outs), (outs, ins), (tokens, ins))
    return tuple(torch.randn(size, device=device).to(dtype) for size in sizes)


def working_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def hot_backward(
    gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, recipe: str, need: Sequence[str] = ALL
) -> Call:
    """Return a call of backward_linear. x is compressed here, outside of the call."""
    config = hotcore.HotConfig.recipe(recipe)
    saved = hotcore.compress_activation(x, config, key=1) if "gw" in need else None
    weight = w if "gx" in need else None
    return lambda: hotcore.backward_linear(gy, weight, saved, config=config, need=need, key=1)


def hot_compress(x: torch.Tensor, recipe: str) -> Call:
    config = hotcore.HotConfig.recipe(recipe)
    return lambda: hotcore.compress_activation(x, config, key=1)


def hot_both(arrays: Sequence[torch.Tensor], bias: torch.Tensor, recipe: str, int8: bool) -> Call:
    """Return a call of a layer's forward, which compresses x, and of its backward."""
    gy, w, x = arrays
    config, rounded = hotcore.HotConfig.recipe(recipe), bias.to(x.dtype)

    def call() -> object:
        if int8:
            codes, saved = hotcore.quantize_forward_input(x, config, keep=True, key=1)
            y = hotcore.forward_linear(codes, w, bias, config=config)
        else:
            y = torch.nn.functional.linear(x, w, rounded)
            saved = hotcore.compress_activation(x, config, key=1)
        return y, hotcore.backward_linear(gy, w, saved, config=config, need=ALL, key=1)

    return call


def torch_both(arrays: Sequence[torch.Tensor], bias: torch.Tensor) -> Call:
    gy, w, x = arrays
    backward, rounded = rivals.backward(gy, w, x), bias.to(x.dtype)
    return lambda: (torch.nn.functional.linear(x, w, rounded), backward())


# ---- layers ----


def torch_rivals(shape: Shape, device: str) -> dict[str, Call]:
    arrays = tensors(shape, device, torch.float32)
    halves = [array.bfloat16() for array in arrays]
    kinds: dict[str, tuple[Any, bool | None]] = {"fp32": (arrays, None), "bf16": (halves, None)}
    if device == "cuda":
        kinds = {"fp32": (arrays, False), "tf32": (arrays, True), "bf16": (halves, None)}
    out: dict[str, Call] = {}
    for kind, (operands, tf32) in kinds.items():
        out[f"torch {kind}"] = rivals.backward(*operands, tf32=tf32)
        out[f"{kind} products"] = rivals.products(*operands, tf32=tf32)
    fits = all(size % 16 == 0 for size in shape)
    if device == "cuda" and fits:
        out["fp8 products"] = rivals.fp8_products(*shape)
    if device == "cpu" or fits:
        out["int8 products"] = rivals.int8_products(*shape, device)
    return out


def layer_rows(
    shape: Shape, recipes: Sequence[str], args: argparse.Namespace, with_torchao: bool
) -> dict[str, Row]:
    device = args.device
    contenders = torch_rivals(shape, device)
    arrays = gy, w, x = tensors(shape, device, working_dtype(device))
    torchao = ""
    if with_torchao:
        try:
            calls, torchao = rivals.torchao_calls(gy, w, x)
            contenders |= calls
        except rivals.TorchaoMissing as error:
            print(f"  torchao: none: {error}")
    duplicate = torch.empty_like(x)
    contenders["copy of x"] = lambda: duplicate.copy_(x)
    for recipe in recipes:
        contenders[f"hotcore {recipe}"] = hot_backward(gy, w, x, recipe)
        contenders[f"compress {recipe}"] = hot_compress(x, recipe)
    bias = torch.randn(shape[1], device=device)  # fp32, as parameters under autocast
    if device == "cpu":
        contenders["torch fp32 both"] = torch_both(arrays, bias)
    contenders["torch bf16 both"] = torch_both([array.bfloat16() for array in arrays], bias)
    for recipe in recipes:
        if recipe in BOTH:
            contenders[f"{recipe} both"] = hot_both(arrays, bias, recipe, False)
            contenders[f"{recipe} int8 both"] = hot_both(arrays, bias, recipe, True)
    rows = timing.steadied(contenders, args.rounds, device)
    if "torchao both" in rows:
        parts = [rows["torchao both"], rows["torchao forward"]]
        difference: Row = {"median_ms": parts[0]["median_ms"] - parts[1]["median_ms"]}
        if any(row.get("unsteady") for row in parts):
            difference["unsteady"] = True
        rows["torchao both - forward"] = difference
    for name, row in rows.items():
        if name.startswith("torchao"):
            row["version"] = torchao
    for recipe in recipes:
        rows[f"compress {recipe}"]["of a copy"] = ratio(rows, f"compress {recipe}", "copy of x")
        rows[f"hotcore {recipe}"]["floor_ms"] = floor_ms(shape, recipe)
    return rows


def ratio(rows: dict[str, Row], above: str, below: str) -> float:
    return float(rows[above]["median_ms"] / rows[below]["median_ms"])


def is_rival(name: str) -> bool:
    """Whether a row is another's backward."""
    if name == "torchao forward" or name.endswith("both"):
        return False
    return name.startswith("torch") or name.endswith("products")


def sums(of_shapes: dict[str, dict[str, Row]], recipes: Sequence[str]) -> dict[str, Any]:
    """Sum the medians of a group's layers, and divide each rival's sum by hotcore's."""
    tables = list(of_shapes.values())
    total = timing.summed(tables)

    def faster(name: str, rivals: Sequence[str]) -> dict[str, Any]:
        mine = total[name]
        return {"sum_ms": mine, "faster than": {rival: total[rival] / mine for rival in rivals}}

    out: dict[str, Any] = {"sum_ms": total, "recipes": {}}
    for recipe in recipes:
        if not {f"hotcore {recipe}", f"compress {recipe}", "copy of x"} <= total.keys():
            print(f"  {recipe}: no sums, since a row was not steady")
            continue
        floor = sum(rows[f"hotcore {recipe}"]["floor_ms"] for rows in tables)
        out["recipes"][recipe] = faster(f"hotcore {recipe}", list(filter(is_rival, total))) | {
            "floor_ms": floor,
            "times the floor": total[f"hotcore {recipe}"] / floor,
            "compress of a copy": total[f"compress {recipe}"] / total["copy of x"],
        }
    whole = [name for name in total if name.endswith(" both")]
    theirs = [name for name in whole if name.startswith("torch")]
    out["both"] = {name: faster(name, theirs) for name in whole if name not in theirs}
    return out


def print_layer(title: str, rows: dict[str, Row]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        notes = [f"{row['of a copy']:.2f} copies"] if "of a copy" in row else []
        for rival in ("torch fp32", "torch bf16", "bf16 products"):
            if rival in rows and name.startswith("hotcore"):
                notes.append(f"{rival} {ratio(rows, rival, name):.2f}x")
        if row.get("unsteady"):
            notes.append("NOT STEADY: no figure")
        if "q1_ms" in row:
            print(timing.line(name, row, "  ".join(notes)))


def part_layers(args: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for group, shapes in groups.items():
        with_torchao = args.device == "cuda" and (not args.short or group == "Llama-3-8B")
        tables: dict[str, dict[str, Row]] = {}
        for name, shape in shapes.items():
            tables[name] = layer_rows(shape, args.recipe, args, with_torchao)
            print_layer(f"{group} {name}: L, O, I = {shape}; us, median [quartiles]", tables[name])
        layers = {name: {"shape": shapes[name], "rows": tables[name]} for name in shapes}
        out[group] = {"layers": layers, **sums(tables, args.recipe)}
    return out


# ---- the paper's layers ----


def paper_calls(shape: Shape, recipes: Sequence[str], device: str) -> dict[str, Call]:
    """Return each contender's call for g_x and g_w, with its own arrays."""
    arrays = tensors(shape, device, torch.float32)
    halves = tuple(array.to(working_dtype(device)) for array in arrays)
    out = {"fp32": rivals.products(*arrays, tf32=None if device == "cpu" else False)}
    if device == "cuda":
        out["bf16"] = rivals.products(*halves)
    for recipe in recipes:
        out[f"hotcore {recipe}"] = hot_backward(*halves, recipe, need=("gx", "gw"))
    if device == "cuda" and "paper" in recipes:
        call = hot_backward(*arrays, "paper", need=("gx", "gw"))
        out["hotcore paper, fp32 arrays"] = call
    return out


def paper_bytes(shape: Shape) -> int:
    """Return the bytes of g_y, w and x in bf16, the dtype of most of paper_calls' contenders."""
    tokens, outs, ins = shape
    return 2 * (tokens * outs + outs * ins + tokens * ins)


def part_paper(args: argparse.Namespace) -> dict[str, Any]:
    """Time copies of the arrays in turn, more than the L2 holds. Returns rows and their means."""
    tables: dict[str, Any] = {}
    speeds: list[dict[str, float]] = []
    print("\nThe paper's layers, g_x and g_w, us; (times faster than fp32)")
    for shape, published in (PAPER if args.device == "cuda" else {TOY: 1.0}).items():
        make = partial(paper_calls, shape, args.recipe, args.device)
        rows = timing.in_graphs(make, paper_bytes(shape), args.rounds, args.device)
        speeds.append(speeds_of(rows))
        print(f"  {shape!s:18s} paper {published:.1f}  {in_words(rows)}", flush=True)
        for name, speed in speeds[-1].items():
            rows[name]["faster than fp32"] = speed
        table = {"shape": shape, "published": published, "rows": rows}
        tables[",".join(map(str, shape))] = table
    means = means_of(speeds)
    published_mean = statistics.geometric_mean([t["published"] for t in tables.values()])
    return {"rotating": {"shapes": tables, "means": means, "published geomean": published_mean}}


def speeds_of(rows: dict[str, Any]) -> dict[str, float]:
    """Return speeds in units of fp32's; a call that cannot be captured has a reason as its row."""
    return {n: ratio(rows, "fp32", n) for n, row in rows.items() if not isinstance(row, str)}


def in_words(rows: dict[str, Any]) -> str:
    """Format microseconds and speed of each call, or the reason for no figure."""
    words = [f"{n}: {row}" for n, row in rows.items() if isinstance(row, str)]
    speeds = speeds_of(rows).items()
    words += [f"{n} {rows[n]['median_ms'] * 1e3:.1f} ({speed:.2f})" for n, speed in speeds]
    return "  ".join(words)


def means_of(speeds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Compute geometric mean and minimum of speeds by layer, for names that every layer has."""
    names = [name for name in speeds[0] if all(name in layer for layer in speeds)]
    values = {name: [layer[name] for layer in speeds] for name in names}
    return {
        n: {"geomean": statistics.geometric_mean(v), "worst": min(v)} for n, v in values.items()
    }


# ---- stages ----


def kernel_times(call: Call) -> list[dict[str, Any]]:
    """Profile the kernels of one call: name, microseconds, launches; longest first."""
    call()
    events = kernel_classes.profiled_events(call, PROFILED_CALLS)
    return [
        {"kernel": name[:160], "us": us, "launches": launches}
        for name, us, launches in kernel_classes.by_name(events, PROFILED_CALLS)
    ]


def split(kernels: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Sum the microseconds of products, and of all other kernels."""
    in_products = sum(kernel["us"] for kernel in kernels if PRODUCT.search(kernel["kernel"]))
    return in_products, sum(kernel["us"] for kernel in kernels) - in_products


def cuda_stages(arrays: Sequence[torch.Tensor], recipe: str, total_us: float) -> dict[str, Any]:
    """Measure the paper's Fig. 1 for one layer, in microseconds.

    A kernel's name tells whether it is a product. The other kernels of a call with almost no g_y
    quantise w and unpack x.
    """
    gy, w, x = arrays
    whole = kernel_times(hot_backward(gy, w, x, recipe))
    for_gx = kernel_times(hot_backward(gy, w, x, recipe, need=("gx",)))
    for_gw = kernel_times(hot_backward(gy, w, x, recipe, need=("gw",)))
    few_tokens = kernel_times(hot_backward(gy[:16].clone(), w, x[:16].clone(), recipe, ("gx",)))
    few_outs = kernel_times(hot_backward(gy[:, :16].clone(), w, x, recipe, need=("gw",)))
    products, others = split(whole)
    w_us, x_us = split(few_tokens)[1], split(few_outs)[1]
    return {
        "stages": {
            "quantise g_y, g_b": max(0.0, others - w_us - x_us),
            "quantise w": w_us,
            "unpack x": x_us,
            "product g_x": split(for_gx)[0],
            "product g_w": split(for_gw)[0],
            "between kernels": max(0.0, total_us - products - others),
        },
        "products together": products,
        "launches": sum(kernel["launches"] for kernel in whole),
        "kernels": whole,
        "compress": kernel_times(hot_compress(x, recipe)),
    }


def part_stages(args: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for group, shapes in groups.items():
        out[group] = {}
        for name, shape in shapes.items():
            if args.short and name not in ("fc1", "up"):
                continue
            arrays = tensors(shape, args.device, working_dtype(args.device))
            out[group][name] = {"shape": shape, "recipes": {}}
            for recipe in args.recipe:
                needs = {"all": ALL, "gx": ("gx",), "gw": ("gw",), "gb": ("gb",)}
                calls = {key: hot_backward(*arrays, recipe, need) for key, need in needs.items()}
                rounds = max(LEAST_STAGE_ROUNDS, args.rounds // 2)
                figures: dict[str, Any] = {"calls": timing.in_turns(calls, rounds, args.device)}
                total_us = figures["calls"]["all"]["median_ms"] * 1e3
                if args.device == "cuda":
                    figures |= cuda_stages(arrays, recipe, total_us)
                out[group][name]["recipes"][recipe] = figures
                print_stages(f"{group} {name} {shape}, {recipe}", figures)
    return out


def print_stages(title: str, figures: dict[str, Any]) -> None:
    calls = "  ".join(f"{k} {row['median_ms'] * 1e3:.1f}" for k, row in figures["calls"].items())
    print(f"\n{title}: us by what is needed: {calls}")
    for stage, us in figures.get("stages", {}).items():
        print(f"  {stage:18s} {us:8.1f}")
    for kernel in (*figures.get("kernels", ()), *figures.get("compress", ())):
        print(f"    {kernel['us']:8.1f} us  {kernel['launches']:4.1f} x  {kernel['kernel'][:90]}")


# ---- forward ----


def part_forward(args: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    """Time the training forward that compresses x, and F.linear, which keeps x."""
    out: dict[str, Any] = {}
    for group, shapes in groups.items():
        layers: dict[str, Any] = {}
        for name, shape in shapes.items():
            _, w, x = tensors(shape, args.device, working_dtype(args.device))
            w.requires_grad_()
            x.requires_grad_()
            contenders: dict[str, Call] = {"plain": partial(torch.nn.functional.linear, x, w)}
            for recipe in args.recipe:
                contenders[recipe] = partial(
                    hot.linear, x, w, None, hotcore.HotConfig.recipe(recipe)
                )
            rows = timing.in_turns(contenders, args.rounds, args.device)
            layers[name] = {"shape": shape, "rows": rows}
        total = timing.summed([layer["rows"] for layer in layers.values()])
        extra = {key: total[key] / total["plain"] - 1 for key in args.recipe}
        out[group] = {"layers": layers, "extra": extra}
        words = "  ".join(f"{key} {100 * value:+.1f} %" for key, value in extra.items())
        print(f"\nForward, {group}, sum, beside a plain linear layer: {words}")
    return out


# ---- host ----


def host_bursts(
    call: Call, device: str, clocks: Sequence[Callable[[], float]], bursts: int = BURSTS
) -> list[list[float]]:
    """Time one call by each clock, in bursts between synchronisations. Returns milliseconds."""
    calls = 40
    for _ in range(calls // 2):
        call()
    values: list[list[float]] = [[] for _ in clocks]
    for _ in range(bursts):
        timing.synchronize(device)
        starts = [clock() for clock in clocks]
        for _ in range(calls):
            call()
        ends = [clock() for clock in clocks]
        for times, start, end in zip(values, starts, ends, strict=True):
            times.append((end - start) * 1e3 / calls)
    timing.synchronize(device)
    return values


def host_turns(calls: dict[str, Call], device: str) -> dict[str, Row]:
    """Time the host of each call while the device lags behind; bursts of calls take turns."""
    values: dict[str, list[float]] = {name: [] for name in calls}
    for name in list(calls) * BURSTS:
        values[name] += host_bursts(calls[name], device, (time.perf_counter,), bursts=1)[0]
    return {name: timing.spread(times) for name, times in values.items()}


def layer_step(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Call:
    """Return a call of a layer's forward and backward, as in a model."""
    leaves = (x, *layer.parameters())
    return lambda: torch.autograd.grad(layer(x), leaves, gy)


def inside_us(call: Call, device: str) -> Row:
    """Time the host of hotcore.torch's backward, from the autograd engine's call to its return.

    ``call`` runs one backward. The time excludes autograd's own work; "whole_ms" is the median that
    includes it, of the same bursts.
    """
    layer = linear.Linear
    backward, spent = layer.backward, 0.0

    def timed(ctx: Any, gy: torch.Tensor | None) -> Any:
        nonlocal spent
        start = time.perf_counter()
        out = backward(ctx, gy)
        spent += time.perf_counter() - start
        return out

    clocks = (time.perf_counter, lambda: spent)
    with mock.patch.object(layer, "backward", staticmethod(timed)):
        whole, inside = host_bursts(call, device, clocks)
    return timing.spread(inside) | {"whole_ms": statistics.median(whole)}


def part_host(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the host beside its bar: 60 us from the engine's call of a backward to its return.

    Plain torch and HOT also have the whole call of autograd.grad.
    """
    device = args.device
    gy, w, x = tensors(TOY, device, working_dtype(device))
    w.requires_grad_()
    x.requires_grad_()

    def grads(y: torch.Tensor) -> Call:
        return lambda: torch.autograd.grad(y, (x, w), gy, retain_graph=True)

    plain = torch.nn.Linear(TOY[2], TOY[1], device=device, dtype=x.dtype)
    steps = "{}, forward and backward"
    calls: dict[str, Call] = {
        "plain backward": grads(torch.nn.functional.linear(x, w)),
        "plain forward": partial(torch.nn.functional.linear, x, w),
        steps.format("nn.Linear"): layer_step(plain, x, gy),
    }
    for recipe in args.recipe:
        config = hotcore.HotConfig.recipe(recipe)
        calls[f"adapter backward {recipe}"] = grads(hot.linear(x, w, None, config))
        calls[f"adapter forward {recipe}"] = partial(hot.linear, x, w, None, config)
        arrays = hot_backward(gy, w.detach(), x.detach(), recipe, need=("gx", "gw"))
        calls[f"backward_linear {recipe}"] = arrays
        layer = hot.HotLinear.from_linear(copy.deepcopy(plain), recipe)
        calls[steps.format(f"HotLinear {recipe}")] = layer_step(layer, x, gy)
    rows = host_turns(calls, device)
    for recipe in args.recipe:
        name = f"adapter backward {recipe}"
        rows[f"inside {name}"] = inside_us(calls[name], device)
        name = steps.format(f"HotLinear {recipe}")
        rows[name]["of nn.Linear"] = ratio(rows, name, steps.format("nn.Linear"))
    print(f"\nHost time of one call at {TOY}, us (bar inside the adapter's: {HOST_BAR_US:g})")
    for name, row in rows.items():
        share = f"of nn.Linear's: {row['of nn.Linear']:.2f}" if "of nn.Linear" in row else ""
        print(timing.line(name, row, share))
    return {"shape": TOY, "bar_us": HOST_BAR_US, "rows": rows}


# ---- the rule of convert ----


def rule_calls(shape: Shape, device: str) -> dict[str, Call]:
    """Return forward and backward of a trained layer, and of a frozen one (no g_w and g_b)."""
    gy, w, x = arrays = tensors(shape, device, working_dtype(device))
    bias = torch.randn(shape[1], device=device)
    rounded, config = bias.to(x.dtype), hotcore.HotConfig()
    linear = partial(torch.nn.functional.linear, x, w, rounded)
    calls = {"plain": torch_both(arrays, bias), "frozen plain": lambda: (linear(), gy @ w)}
    for recipe in ("accurate", "default", "fast"):
        calls[recipe] = hot_both(arrays, bias, recipe, False)
    calls["default int8"] = hot_both(arrays, bias, "default", True)

    def gx() -> object:
        return hotcore.backward_linear(gy, w, None, config=config, need=("gx",), key=1)

    calls["frozen"] = lambda: (linear(), gx())
    calls["frozen int8"] = lambda: (hotcore.forward_linear(x, w, bias, config=config), gx())
    return calls


def part_rule(args: argparse.Namespace) -> dict[str, Any]:
    """Time the calls, and fit each kind's time. Returns rows by shape, and the fit."""
    shapes = [(t, o, i) for t in RULE_TOKENS for o, i in RULE_SIZES]
    if args.device == "cpu":
        shapes = [(t, o, i) for t in (64, 128) for o in (16, 32) for i in (16, 32)]
    tables: dict[Shape, dict[str, Row]] = {}
    for shape in shapes:
        tokens, outs, ins = shape
        nbytes = 2 * (2 * tokens * (outs + ins) + 3 * outs * ins)
        make = partial(rule_calls, shape, args.device)
        rows = tables[shape] = timing.in_graphs(make, nbytes, args.rounds, args.device)
        words = "  ".join(f"{k} {row['median_ms'] * 1e3:.1f}" for k, row in rows.items())
        print(f"  {shape!s:20s} us: {words}", flush=True)
    fits = {name: fitted(name, tables) for name in tables[shapes[0]]}
    for name, fit in fits.items():
        print(f"  {name:14s} {fit['terms']} worst error {fit['worst error']:.3f}")
    return {"shapes": {",".join(map(str, s)): rows for s, rows in tables.items()}, "fit": fits}


def fitted(name: str, tables: Mapping[Shape, Mapping[str, Row]]) -> dict[str, Any]:
    """Fit a kind's time by least squares of the relative errors.

    The terms are those of gains.py, in picoseconds. Per token: in x out feature, in feature, out
    feature, constant. Per call: constant, in x out feature.
    """
    times = torch.tensor([rows[name]["median_ms"] * 1e9 for rows in tables.values()]).double()
    terms = torch.tensor([(t * o * i, t * i, t * o, t, 1, o * i) for t, o, i in tables]).double()
    matrix = terms / times[:, None]
    sizes = matrix.norm(dim=0)
    least = torch.linalg.lstsq(matrix / sizes, torch.ones_like(times[:, None])).solution[:, 0]
    errors = (matrix / sizes) @ least - 1
    return {"terms": (least / sizes).tolist(), "worst error": float(errors.abs().max())}


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "backward", "shape")
    parser.add_argument("--group", action="append", help="of layers; repeatable")
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--part", action="append", choices=(*PARTS, "rule"))
    parser.add_argument("--short", action="store_true", help="fewer shapes, for gpu_check")
    parser.add_argument("--isa", help="instruction set on the CPU (default: the best)")
    args = timing.begin(parser, argv, lambda args: hotcore.set_isa(args.isa))
    args.recipe = args.recipe or ["default", "fast", "paper"]
    groups: Groups = CPU_GROUPS if args.device == "cpu" else CUDA_GROUPS
    groups = {n: groups[n] for n in timing.fitting(parser, list(groups), args.group, "--group")}
    if args.shape:
        groups = {"given": {",".join(map(str, shape)): shape for shape in args.shape}}
    parts = args.part or (["layers"] if args.device == "cpu" else PARTS)
    out: dict[str, Any] = {"recipes": args.recipe, "failed": {}}
    run: dict[str, Callable[[], Any]] = {
        "layers": lambda: part_layers(args, groups),
        "paper": lambda: part_paper(args),
        "stages": lambda: part_stages(args, groups),
        "forward": lambda: part_forward(args, groups),
        "host": lambda: part_host(args),
        "rule": lambda: part_rule(args),
    }
    for part in (part for part in run if part in parts):
        try:
            out[part] = run[part]()
        except Exception as error:  # named here and at the end; the others go on
            traceback.print_exc()
            out["failed"][part] = f"{type(error).__name__}: {error}"
    report, kinds = {"bench_backward": out}, doc_tables
    reports = [kinds.layers, kinds.both, kinds.floor] if "layers" in out else []
    reports += [kinds.small] if "paper" in out else []
    for table in reports:
        print("\n" + "\n".join(table(report)))
    timing.write(args, "backward", out)
    if out["failed"]:
        sys.exit(f"failed: {out['failed']}")


if __name__ == "__main__":
    main()
