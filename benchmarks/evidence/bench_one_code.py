"""One code a value: error and bias of g_w and g_x, and of what else each choice could have been.

    python -m benchmarks.evidence.bench_one_code [--quick] [--json PATH]

About five minutes on two idle cores: torch alone, fake-quantised in fp32 on models of the forms
(docs/numerics.md, "One code a value"). Three kinds of tensors:

* ten cases of bench_storage.py and five more (``cases``);
* every linear layer of the README's small GPT and ViT, trained to the middle of a short run;
* the GPT's layers with outlier features and massive first tokens (``with_outliers``).

``token4`` and ``token8`` are the form as it was chosen, x in 4 and in 8 bits. Every entry of
``CHOICES`` differs from one of them in one thing. ``default`` and ``accurate`` are models of what
the recipes of these names do without it. Of each: relative error of all of the gradient, of its
rows (out features; of g_x: tokens) and of its columns (in features), by median, 95 % and largest;
of some the bias, the length of the mean error over many draws less what so many draws leave.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence import bench_gradients, bench_storage, small_tasks
from timing import RESULTS, rounded, write_json
from torch import Tensor

Draw = Callable[[], Tensor]
"""One gradient; another at every call."""
Layer = tuple[Tensor, Tensor, Tensor]
"""g_y ``[L, O]``, w ``[O, I]``, x ``[L, I]``."""


@dataclass(frozen=True)
class Form:
    """One code a value; the defaults are what was chosen for x in 4 bits."""

    bits: int = 4
    """Of x as it is kept: 8, 4 or 2."""
    x_rounding: str = "nearest"
    """With 8 bits, or ``"stochastic"``. Fewer are dithered."""
    group: int = 32
    """Features that share a scale of x."""
    scale: str = "byte"
    """A byte relative to the token's scale, or ``"bf16"``."""
    dither: str = "upper half"
    """Of a byte for 16 features with offsets, what comes off; ``"byte"``: all of it. ``"nibble"``:
    half a byte goes in and comes off. ``"independent"``, ``"continuous"``.
    """
    contributions: str = "byte"
    """Their rounding: a byte for 16 tokens with offsets; ``"nearest"``, ``"independent"``."""
    block: int = 0
    """Of the transform; 0: by the rule."""
    sizes: str = "band"
    """Of features: ``"none"``, ``"round"``, ``"truncate"``, ``"absolute"``, ``"absolute band"``."""
    sample: int = 512
    """Tokens that sizes are taken from."""
    exponent: float = 0.5
    """Of a size, in what a feature is divided by: 1/2 or 1."""
    signs: str = "fresh"
    """Of out features, or ``"fixed"``."""
    gy_rounding: str = "nearest"
    """Or ``"stochastic"``."""
    half: bool = False
    """Half of the tokens alone, the larger contributions more often."""


TOKEN4, TOKEN8 = Form(), Form(bits=8)
CHOICES: dict[str, dict[str, Form]] = {
    "scales": {
        "groups of 64, bf16": replace(TOKEN4, group=64, scale="bf16"),
        "groups of 32, bf16": replace(TOKEN4, scale="bf16"),
        "groups of 16, a byte": replace(TOKEN4, group=16),
    },
    "dither": {
        "256 levels, shared by 16 features": replace(TOKEN4, dither="byte"),
        "16 levels, shared by 16 features": replace(TOKEN4, dither="nibble"),
        "256 levels, independent": replace(TOKEN4, dither="independent"),
        "continuous, independent": replace(TOKEN4, dither="continuous"),
    },
    "contributions": {
        "`token4`, independent bytes": replace(TOKEN4, contributions="independent"),
        "`token4`, nearest": replace(TOKEN4, contributions="nearest"),
        "`token8`, independent bytes": replace(TOKEN8, contributions="independent"),
        "`token8`, nearest": replace(TOKEN8, contributions="nearest"),
    },
    "x in 8 bits": {"`token8`, x stochastic": replace(TOKEN8, x_rounding="stochastic")},
    "blocks": {
        "64 everywhere": replace(TOKEN4, block=64),
        "32 everywhere": replace(TOKEN4, block=32),
        "16 everywhere": replace(TOKEN4, block=16),
    },
    "sizes": {
        "none": replace(TOKEN4, sizes="none"),
        "rounded everywhere": replace(TOKEN4, sizes="round"),
        "truncated": replace(TOKEN4, sizes="truncate"),
        "absolute, with the band": replace(TOKEN4, sizes="absolute band"),
        "absolute, rounded everywhere": replace(TOKEN4, sizes="absolute"),
        "from 128 tokens": replace(TOKEN4, sample=128),
        "exponent 1": replace(TOKEN4, exponent=1),
    },
    "signs": {
        "fresh signs, g_y stochastic": replace(TOKEN4, gy_rounding="stochastic"),
        "fixed signs, g_y nearest": replace(TOKEN4, signs="fixed"),
        "fixed signs, g_y stochastic": replace(TOKEN4, signs="fixed", gy_rounding="stochastic"),
        "`token8`, fixed signs, g_y nearest": replace(TOKEN8, signs="fixed"),
    },
    "not built": {
        "x in 2 bits": replace(TOKEN4, bits=2),
        "x in 4 bits, half of the tokens": replace(TOKEN4, half=True),
    },
}
"""What is chosen -> what else it could be, each alone."""
CHOSEN = {"token4": TOKEN4, "token8": TOKEN8}
TODAY = {"default": 4, "accurate": 8}
"""Recipes without one code a value -> bits of x."""
UNBIASED = ("dither", "contributions", "x in 8 bits", "signs", "not built")
"""Choices that are a matter of bias: many draws of them."""
INPUT_FORMS: dict[str, Form | None] = {
    "today": None,
    "one code": TOKEN4,
    "sizes: none": replace(TOKEN4, sizes="none"),
    "fresh signs, g_y stochastic": replace(TOKEN4, gy_rounding="stochastic"),
    "frozen w: fixed signs, no sizes, g_y stochastic": replace(
        TOKEN4, sizes="none", signs="fixed", gy_rounding="stochastic"
    ),
    "the same, g_y nearest": replace(TOKEN4, sizes="none", signs="fixed"),
}
"""Of g_x."""
FIXED = torch.randint(0, 2, (1 << 10,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
"""Signs that no call changes."""
REVERSED = torch.tensor([int(f"{i:04b}"[::-1], 2) for i in range(16)], dtype=torch.int32)
"""Four bits, reversed: what 16 neighbours add to the byte that they share, in sixteenths."""
SETS = ("GPT", "ViT", "GPT, outliers")


# ---- rounding -----------------------------------------------------------------------------------


def positive(values: Tensor) -> Tensor:
    """1 for 0, so that one may divide."""
    return torch.where(values > 0, values, torch.ones_like(values))


def stochastic(values: Tensor) -> Tensor:
    """To integers by a random byte each."""
    return ((values * 256).round() + torch.randint(0, 256, values.shape)).div(256).floor()


def row_codes(v: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Integers up to 127, and each row's scale ``[rows, 1]``."""
    scale = v.abs().amax(1, keepdim=True) / 127
    scaled = v / positive(scale)
    return (stochastic(scaled) if rounding == "stochastic" else scaled.round()), scale


def rounded_up(values: Tensor, bits: int) -> Tensor:
    """Numbers from 0, in fp32, with so many bits fewer."""
    return ((values.view(torch.int32) + (1 << bits) - 1) >> bits << bits).view(torch.float32)


def shared_bytes(rows: int, columns: int) -> Tensor:
    """A random byte for 16 columns of a row; each column adds its own sixteenths to it."""
    own = torch.randint(0, 256, (rows, -(-columns // 16), 1), dtype=torch.int32) + 16 * REVERSED
    return own.view(rows, -1)[:, :columns] & 255


def dither(rows: int, columns: int, kind: str) -> tuple[Tensor, Tensor]:
    """From -1/2 to 1/2, what is added before rounding and what is subtracted after it."""
    if kind == "continuous":
        both = torch.rand(rows, columns) - 0.5
    elif kind == "independent":
        both = (torch.randint(0, 256, (rows, columns)) + 0.5) / 256 - 0.5
    else:
        byte = shared_bytes(rows, columns)
        both = (byte + 0.5) / 256 - 0.5
        coarse = ((byte >> 4) + 0.5) / 16 - 0.5
        if kind != "byte":
            return (coarse if kind == "nibble" else both), coarse
    return both, both


def groups_of(u: Tensor, size: int) -> Tensor:
    """``[L, groups, size]``, the last group filled with zeros."""
    return torch.nn.functional.pad(u, (0, -u.shape[1] % size)).view(u.shape[0], -1, size)


def kept(u: Tensor, form: Form) -> Tensor:
    """u as it comes back from what is kept of it."""
    if form.bits == 8:
        codes, scale = row_codes(u, form.x_rounding)
        return codes * scale
    if form.bits == 2:
        return kept2(u, form)
    b = groups_of(u, form.group)
    step = b.abs().amax(-1, keepdim=True) / 7.5
    if form.scale == "bf16":
        step = rounded_up(step, 16)
    else:
        token = rounded_up(step.amax(1, keepdim=True), 16)
        ratio = rounded_up(step / positive(token), 19).clamp_min(2.0**-15)
        step = torch.where(step > 0, ratio * token, 0)
    d, off = (part.view_as(b) for part in dither(u.shape[0], b[0].numel(), form.dither))
    codes = (b / positive(step) + d).floor().clamp(-8, 7)
    return ((codes + 0.5 - off) * step).view(u.shape[0], -1)[:, : u.shape[1]]


def kept2(u: Tensor, form: Form) -> Tensor:
    """Four levels up to 1.75 standard deviations, and the length that makes <u, kept> <u, u>."""
    b = groups_of(u, form.group)
    limit = 1.75 * b.square().mean(-1, keepdim=True).sqrt()
    step = positive(torch.minimum(b.abs().amax(-1, keepdim=True), limit)) / 1.5
    d, off = (part.view_as(b) for part in dither(u.shape[0], b[0].numel(), form.dither))
    found = ((b / step + d).floor().clamp(-2, 1) + 0.5 - off) * step
    along = (b * found).sum(-1, keepdim=True)
    found = found * b.square().sum(-1, keepdim=True) / positive(along)
    return found.view(u.shape[0], -1)[:, : u.shape[1]]


def contributions(x: Tensor, kind: str) -> Tensor:
    """``[I', L]`` in 8 bits, a scale a row."""
    scale = positive(x.abs().amax(1, keepdim=True)) / 127
    v = x / scale
    if kind == "nearest":
        return v.round() * scale
    if kind == "independent":
        return stochastic(v) * scale
    return ((v * 256).round() + shared_bytes(*x.shape)).div(256).floor() * scale


# ---- the form -----------------------------------------------------------------------------------


def block_of(width: int, form: Form) -> int:
    """The widest that adds at most an eighth to the features."""
    if form.block:
        return form.block
    return next((n for n in (64, 32) if -(-width // n) * n <= width + width // 8), 16)


def transform(v: Tensor, n: int) -> Tensor:
    """Blocks of n along the rows, orthonormal."""
    h = torch.from_numpy(bench_storage.hadamard(n) / math.sqrt(n)).to(v.dtype)
    return (v.reshape(-1, n) @ h).view(v.shape)


def rotated(v: Tensor, signs: Tensor, n: int) -> Tensor:
    """Rows, filled to blocks of n, with these signs, transformed."""
    v = torch.nn.functional.pad(v, (0, -v.shape[1] % n))
    return transform(v * signs[: v.shape[1]], n)


def turned_back(v: Tensor, signs: Tensor, n: int, width: int) -> Tensor:
    """The other way."""
    return (transform(v, n) * signs[: v.shape[1]])[:, :width]


def feature_sizes(v: Tensor, form: Form) -> Tensor:
    """The powers of two that features are divided by, as docs/numerics.md has them."""
    width = v.shape[1]
    if form.sizes == "none":
        return torch.ones(width)
    if v.shape[0] > form.sample:
        v = v[torch.arange(form.sample) * v.shape[0] // form.sample]
    v = v[v.abs().amax(1) >= 2.0**-100]
    exponent = torch.frexp(v.abs().mean(1, keepdim=True))[1] - 1
    z = torch.ldexp(v, -exponent)
    sums = (z * z).double().mul(2.0**32).clamp_max(2.0**52).round().to(torch.int64).sum(0)
    seen = sums > 0
    if not bool(seen.any()):
        return torch.ones(width)

    def eighths(whole: Tensor) -> Tensor:
        return whole.to(torch.float32).view(torch.int32) >> 20

    found = eighths(sums)
    if form.sizes.startswith("absolute"):
        middle = int(eighths(torch.tensor(v.shape[0] << 32)))
    else:
        middle = math.floor(found[seen].double().mean())
    d = found - middle
    shift = 5 if form.exponent == 0.5 else 4
    e = (d + (1 << (shift - 1))) >> shift
    if form.sizes == "truncate":
        e = d.sign() * (d.abs() >> shift)
    elif form.sizes.endswith("band"):
        e = torch.where(d.abs() < 32, 0, e)
    return torch.exp2(torch.where(seen, e, 0).clamp(-30, 30).float())


def out_signs(form: Form) -> Tensor:
    return FIXED if form.signs == "fixed" else torch.randint(0, 2, FIXED.shape) * 2.0 - 1


def half_of(codes: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the tokens, each with the probability of its contribution, over which it is divided.

    Systematic sampling in a random order: the number of tokens is fixed.
    """
    size = codes.norm(dim=1) * x.norm(dim=1)
    share = (size > 0).float()
    count = size.shape[0] // 2
    if int(share.sum()) > count:
        low, high = 0.0, count / float(size[size > 0].min())
        for _ in range(60):
            middle = (low + high) / 2
            if float((size * middle).clamp_max(1).sum()) < count:
                low = middle
            else:
                high = middle
        share = (size * high).clamp_max(1)
    order = torch.randperm(size.shape[0])
    end = share[order].double().cumsum(0) + torch.rand(1).double()
    picked = order[end.floor() > (end - share[order]).floor()]
    return codes[picked], x[picked] / share[picked, None]


def one_code(form: Form, gy: Tensor, x: Tensor) -> Draw:
    """g_w ``[O, I]``."""
    outs, ins = gy.shape[1], x.shape[1]
    n_out, n_in = block_of(outs, form), block_of(ins, form)
    c, d = feature_sizes(gy, form), feature_sizes(x, form)
    gy, u = gy / c, rotated(x / d, FIXED, n_in)

    def draw() -> Tensor:
        signs = out_signs(form)
        codes, scale = row_codes(rotated(gy, signs, n_out), form.gy_rounding)
        part = kept(u, form) * scale
        if form.half:
            codes, part = half_of(codes, part)
        found = contributions(part.T.contiguous(), form.contributions) @ codes
        found = turned_back(found, signs, n_out, outs).T.contiguous()
        return c[:, None] * turned_back(found, FIXED, n_in, ins) * d

    return draw


def one_code_input(form: Form, gy: Tensor, w: Tensor) -> Draw:
    """g_x ``[L, I]``."""
    n = block_of(gy.shape[1], form)
    c = feature_sizes(gy, form)
    gy, w_t = gy / c, (w * c[:, None]).T.contiguous()

    def draw() -> Tensor:
        signs = out_signs(form)
        codes, scale = row_codes(rotated(gy, signs, n), form.gy_rounding)
        weight, column = row_codes(rotated(w_t, signs, n), "nearest")
        return (codes * scale) @ (weight * column).T

    return draw


# ---- today's numerics ---------------------------------------------------------------------------


def today(bits: int, gy: Tensor, x: Tensor) -> Draw:
    """g_w of basis full: g_y in INT8 a channel, x kept as int4 in groups of 64 tokens, or int8."""
    gy_t, x_t = gy.T.contiguous(), x.T.contiguous()
    b = groups_of(x_t, 64)
    step = rounded_up(b.abs().amax(-1, keepdim=True) / 7, 16)

    def draw() -> Tensor:
        left, left_scale = row_codes(gy_t, "stochastic")
        if bits == 8:
            right, right_scale = row_codes(x_t, "stochastic")
        else:
            back = (stochastic(b / positive(step)).clamp(-7, 7) * step).flatten(1)
            right_scale = 7 * step.amax(1) / 127
            right = stochastic(back[:, : x_t.shape[1]] / positive(right_scale))
        return (left * left_scale) @ (right * right_scale).T

    return draw


def today_input(gy: Tensor, w: Tensor) -> Draw:
    """g_x: blocks of 16 without signs, g_y stochastic."""
    plain = torch.ones(gy.shape[1] + 16)
    left, w_t = rotated(gy, plain, 16), w.T.contiguous()
    weight, column = row_codes(rotated(w_t, plain, 16), "nearest")

    def draw() -> Tensor:
        codes, scale = row_codes(left, "stochastic")
        return (codes * scale) @ (weight * column).T

    return draw


# ---- tensors ------------------------------------------------------------------------------------


def cases(generator: torch.Generator) -> dict[str, Layer]:
    """Those of bench_storage.py and five more, with a Gaussian w."""
    shape = bench_storage.TOKENS, bench_storage.OUT, bench_storage.IN
    tokens, outs, ins = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def student(*size: int) -> Tensor:
        return normal(*size) / normal(3, *size).square().mean(0).sqrt()

    found = {
        name: (torch.from_numpy(gy).float(), torch.from_numpy(x).float())
        for name, (gy, x) in bench_storage.cases(np.random.default_rng(0)).items()
    }
    found["Student t, 3 degrees"] = student(tokens, outs), student(tokens, ins)
    found["ReLU x"] = normal(tokens, outs), normal(tokens, ins).relu()
    gy, x = normal(tokens, outs), normal(tokens, ins)
    large = torch.rand(tokens, 1, generator=generator) < 0.03
    found["3 % of tokens with 100 times the gradient"] = torch.where(large, 100 * gy, gy), x
    for name in ("features log-normal 1.5", "the same, a massive token without gradient"):
        gy = normal(tokens, outs) * normal(1, outs).mul(1.5).exp()
        x = normal(tokens, ins) * normal(1, ins).mul(1.5).exp()
        found[name] = gy, x
    gy[100], x[100] = 0, 1000 * x[100]
    return {name: (gy, normal(outs, ins), x) for name, (gy, x) in found.items()}


def captured(task: str, at: int, steps: int, blocks: int) -> dict[str, Layer]:
    """Every linear layer of the first blocks of a small model in training."""
    ((_, model, batch, _),) = bench_gradients.run(task, 0, steps, [at])
    return {
        name: (gy.flatten(0, -2), w, x.flatten(0, -2))
        for name, (x, w, gy) in bench_gradients.captured(model, batch).items()
        if int(name.split(".")[1]) < blocks
    }


def with_outliers(layers: Mapping[str, Layer], length: int) -> dict[str, Layer]:
    """One feature in 16 of x × 30 to 100, one in 16 of g_y × 10.

    In fc2 the first token of every sequence × 1000 and without gradient, as the massive
    activations of trained language models are.
    """
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, (gy, w, x) in layers.items():
        gy, x = gy.clone(), x.clone()
        some = torch.randperm(x.shape[1], generator=generator)[: x.shape[1] // 16]
        x[:, some] *= 30 * (100 / 30) ** torch.rand(len(some), generator=generator)
        gy[:, torch.randperm(gy.shape[1], generator=generator)[: gy.shape[1] // 16]] *= 10
        if name.endswith("fc2"):
            x[::length] *= 1000
            gy[::length] = 0
        found[name] = gy, w, x
    return found


# ---- measuring ----------------------------------------------------------------------------------


FIGURES = (
    "all", "rows: median", "rows: 95 %", "rows: largest",
    "columns: median", "columns: 95 %", "columns: largest", "bias",
)  # fmt: skip
"""Of a form, in this order; the bias only where it was measured."""


def spread(lengths: Tensor, exact: Tensor) -> list[float]:
    """Median, 95 % and largest of relative errors, where there is something."""
    of = (lengths / exact)[exact > 0]
    return [float(of.median()), float(of.quantile(0.95)), float(of.max())]


def measured(draw: Draw, exact: Tensor, draws: int) -> list[float]:
    """FIGURES of one product, root mean squares over the draws, but the square of the bias."""
    square, total = torch.zeros_like(exact), torch.zeros_like(exact)
    for _ in range(draws):
        error = draw().double() - exact
        square += error * error
        total += error
    square, mean = square / draws, total / draws
    whole = float(exact.square().sum())
    mean_square, error_square = float(mean.square().sum()), float(square.sum())
    # The mean of unbiased draws has 1/draws of their variance: taken off, the rest may be below 0.
    bias = mean_square - (error_square - mean_square) / (draws - 1)
    return [
        math.sqrt(error_square / whole),
        *spread(square.sum(1).sqrt(), exact.norm(dim=1)),
        *spread(square.sum(0).sqrt(), exact.norm(dim=0)),
        bias / whole,
    ]


def together(found: Sequence[Sequence[float]], bias: bool) -> list[float]:
    """Means over the layers, the largest of the largest; root mean square of the biases."""
    mean = [sum(part) / len(found) for part in zip(*found, strict=True)]
    for place in (3, 6):
        mean[place] = max(row[place] for row in found)
    return mean[:7] + ([max(0.0, mean[7]) ** 0.5] if bias else [])


def forms() -> Iterator[tuple[str, str, Callable[[Tensor, Tensor], Draw]]]:
    """Every form of g_w: what it belongs to, its name, and what makes draws of g_y and x."""
    for name, bits in TODAY.items():
        yield "today", name, partial(today, bits)
    chosen = {"chosen": CHOSEN, **CHOICES}
    for choice, those in chosen.items():
        for name, form in those.items():
            yield choice, name, partial(one_code, form)


@dataclass(frozen=True)
class Job:
    """A layer, or a case, and how much of it is measured."""

    title: str
    """Of the set of layers, or of the case."""
    name: str
    layer: Layer
    draws: int
    many: int
    """Draws where the bias is measured."""
    biased: Sequence[str]
    """Choices of which it is."""
    with_input: bool
    """g_x, too."""


def measure_job(job: Job) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """Figures of g_w, by choice and form, and of g_x, by form."""
    gy, w, x = job.layer
    weight: dict[str, dict[str, list[float]]] = {}
    inputs = {}

    def seed(*words: str) -> None:
        torch.manual_seed(zlib.crc32("/".join((job.title, job.name, *words)).encode()))

    with torch.no_grad():
        exact = gy.double().T @ x.double()
        for choice, name, make in forms():
            seed(choice, name)
            count = job.many if choice in job.biased else job.draws
            weight.setdefault(choice, {})[name] = measured(make(gy, x), exact, count)
        exact = gy.double() @ w.double()
        for name, form in INPUT_FORMS.items() if job.with_input else ():
            seed("g_x", name)
            draw = today_input(gy, w) if form is None else one_code_input(form, gy, w)
            inputs[name] = measured(draw, exact, job.many)
    return weight, inputs


def in_processes(jobs: Sequence[Job], processes: int) -> list[Any]:
    """What measure_job says of each; a thread a process, because the products are small."""
    if processes == 1:
        return list(map(measure_job, jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        return list(pool.map(measure_job, jobs))


INPUT_CASES = (
    "Gauss", "Student t, 3 degrees", "3 % of tokens with 100 times the gradient",
    "features log-normal 1.5",
)  # fmt: skip
"""That g_x is measured on."""
QUICK_CASES = ("Gauss", "features log-normal 1.5")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    began = time.perf_counter()
    gpt = captured("gpt", args.at, args.steps, args.blocks)
    vit = captured("vit", args.at, args.steps, args.blocks)
    length = small_tasks.load_task("gpt").data.batch(1, torch.Generator())[0].shape[-1]
    sets = dict(zip(SETS, (gpt, vit, with_outliers(gpt, length)), strict=True))
    synthetic = cases(torch.Generator().manual_seed(7))
    input_cases: Sequence[str] = INPUT_CASES
    if args.quick:
        input_cases = QUICK_CASES
        synthetic = {name: synthetic[name] for name in QUICK_CASES}
    jobs = [
        Job(title, name, layer, args.draws, args.many, ("today", "chosen", *UNBIASED), True)
        for title, layers in sets.items()
        for name, layer in layers.items()
    ]
    jobs += [
        Job(title, "", layer, args.draws, args.many, ("chosen",), title in input_cases)
        for title, layer in synthetic.items()
    ]
    found: dict[str, list[Any]] = {}
    for job, result in zip(jobs, in_processes(jobs, args.processes), strict=True):
        found.setdefault(job.title, []).append(result)
    report: dict[str, Any] = {
        "benchmark": "one-code",
        "device": platform.processor() or platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__},
        "settings": {
            "at": args.at, "steps": args.steps, "draws": args.draws, "draws for bias": args.many,
        },
        "figures": FIGURES, "layers": {}, "cases": {}, "gx": {},
    }  # fmt: skip
    for title, results in found.items():
        weights, inputs = zip(*results, strict=True)
        biased = ("today", "chosen", *UNBIASED) if title in sets else ("chosen",)
        report["layers" if title in sets else "cases"][title] = {
            choice: {
                name: together([of[choice][name] for of in weights], choice in biased)
                for name in names
            }
            for choice, names in weights[0].items()
        }
        if inputs[0]:
            report["gx"][title] = {
                name: together([of[name] for of in inputs], True) for name in inputs[0]
            }
    report["seconds"] = round(time.perf_counter() - began)
    four_digits: dict[str, Any] = rounded(report, 4)
    return four_digits


def line(name: str, row: Sequence[float]) -> str:
    rows, columns = (" ".join(f"{value:7.3f}" for value in row[at : at + 3]) for at in (1, 4))
    bias = f"  bias {row[7]:.4f}" if len(row) > 7 else ""
    return f"  {name:50s} all {row[0]:.4f}  rows {rows}  columns {columns}{bias}"


def print_tables(report: Mapping[str, Any]) -> None:
    """Everything."""
    for title, choices in {**report["layers"], **report["cases"]}.items():
        print(f"\ng_w: {title}")
        for choice, rows in choices.items():
            for name, row in rows.items():
                print(line(name if choice in ("today", "chosen") else f"{choice}: {name}", row))
    for title, rows in report["gx"].items():
        print(f"\ng_x: {title}")
        for name, row in rows.items():
            print(line(name, row))
    print(f"\n{report['seconds']} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=24, help="for errors")
    parser.add_argument("--many", type=int, default=200, help="draws where bias is measured")
    parser.add_argument("--at", type=int, default=150, help="step to capture the layers at")
    parser.add_argument("--steps", type=int, default=300, help="that the schedule is made for")
    parser.add_argument("--blocks", type=int, default=2, help="of each model")
    parser.add_argument("--quick", action="store_true", help="few steps, layers, cases and draws")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS / "one-code.json")
    args = parser.parse_args(argv)
    if args.quick:
        args.draws, args.many, args.at, args.blocks = 2, 4, 5, 1
    if min(args.draws, args.many) < 2 or args.processes < 1 or not 0 <= args.at < args.steps:
        parser.error("--draws, --many: from 2; --processes: from 1; --at: below --steps")
    small_tasks.use_threads(1)
    report = measure(args)
    print_tables(report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
