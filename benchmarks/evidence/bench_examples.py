"""The examples at a real size: time of a step and peak memory, plain beside HOT.

    python -m benchmarks.evidence.bench_examples --device cuda   # goes on with its report
    python -m benchmarks.evidence.bench_examples --quick         # as they run by default; CPU too

The scripts in examples/ run as they are, each contender in a process of its own. Weights are random
(what they have learned does not change a step's time), images are scikit-learn's digits, texts
Python's library. The contenders of an example compile side by side, then take the GPU in turns:
WARM steps, then MEASURED, by events at the end of each optimizer step, without synchronisation.
LoRA's processes may allocate 24 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from evidence import ROOT, doc_tables
from hotcore.torch.memory import unallocated_in_pools
from models import mend_torchvision
from torch.optim.optimizer import register_optimizer_step_post_hook

GIB = 2**30
FIRST, WARM, MEASURED = 3, 5, 20
"""Steps: before the GPU is a process's own, after it and not measured, measured."""
PLAIN = ("--recipe", "none")
INT8 = ("--forward", "int8")
ALL = {"plain": PLAIN, "default": (), "default, 8-bit forward": INT8}


@dataclass(frozen=True)
class Example:
    """How an example runs on a GPU; ``{folder}`` is where ``prepare`` has put its inputs."""

    words: str
    a_step: int
    unit: str
    contenders: dict[str, tuple[str, ...]]
    limit_gib: float | None = None


EXAMPLES = {
    "finetune_vit": Example(
        "--model vit_base_patch16_224 --data {folder}/images --batch 128 --workers 16 "
        "--compile reduce-overhead",
        128,
        "images",
        ALL,
    ),
    "continue_llama": Example(
        "--model {folder}/llama-1b --batch 4 --context 2048 --checkpoint --compile",
        4 * 2048,
        "tokens",
        ALL,
    ),
    "lora": Example(
        "--model {folder}/llama-8b --batch 2 --context 2048 --rank 16 --checkpoint --compile",
        2 * 2048,
        "tokens",
        {
            "plain": PLAIN,
            "default, 8-bit forward": INT8,
            "default, 8-bit forward, frozen in a byte": (*INT8, "--freeze"),
        },
        limit_gib=24,
    ),
    "diffusion": Example(
        "--data {folder}/digits.pt --width 768 --depth 12 --batch 128 --compile",
        128,
        "images",
        ALL,
    ),
    "clip": Example(
        "--model {folder}/clip --data {folder}/captions --batch 128 --compile",
        128,
        "images",
        ALL,
    ),
}
QUICK = {name: "--steps 32" for name in EXAMPLES} | {"lora": "--steps 32 --base-steps 0"}


# ---- what the examples read ----


def digits(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits, ``[N, 1, side, side]`` from -1 to 1, and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = torch.nn.functional.interpolate(images, (side, side), mode="bilinear")
    return images, torch.tensor(found.target)


def prepare(name: str, folder: Path) -> None:
    """The inputs of an example: images, latents, configurations and tokenizers."""
    if name == "diffusion":
        torch.save(digits(32), folder / "digits.pt")
    elif name in ("finetune_vit", "clip"):
        from PIL import Image

        images, classes = digits(64)
        for index, (image, target) in enumerate(zip(images, classes, strict=True)):
            picture = Image.fromarray(((image[0] + 1) * 127).byte().numpy()).convert("RGB")
            if name == "finetune_vit":
                (folder / f"images/{target}").mkdir(parents=True, exist_ok=True)
                picture.save(folder / f"images/{target}/{index}.png")
            elif index < 640:
                (folder / "captions").mkdir(exist_ok=True)
                picture.save(folder / f"captions/{index}.png")
                (folder / f"captions/{index}.txt").write_text(f"the digit {target}")
        if name == "clip":
            _clip(folder / "clip")
    else:
        _llama(folder / ("llama-1b" if name == "continue_llama" else "llama-8b"))


def _clip(folder: Path) -> None:
    """CLIP ViT-B/16's configuration; a tokenizer of single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPProcessor, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77
    )
    CLIPProcessor(CLIPImageProcessor(), tokenizer).save_pretrained(folder)
    CLIPConfig(
        text_config={"eos_token_id": words.index("<|endoftext|>")},
        vision_config={"patch_size": 16},
    ).save_pretrained(folder)


def _llama(folder: Path) -> None:
    """Llama 3's configuration of 1B or 8B; a tokenizer of the bytes."""
    import tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    one = folder.name == "llama-1b"
    LlamaConfig(
        vocab_size=128256,
        hidden_size=2048 if one else 4096,
        intermediate_size=8192 if one else 14336,
        num_hidden_layers=16 if one else 32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=one,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(folder)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    table = {letter: i for i, letter in enumerate(sorted(letters))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(table, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def random_weights(device: str) -> None:
    """``from_pretrained`` makes a model of a folder's configuration, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, CLIPModel

    def causal(folder: str, dtype: torch.dtype) -> Any:
        with torch.device(device):  # where drawing 8 billion numbers takes no time
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.cpu()

    # Replaced on purpose, in this process alone: the examples call them as they would for files.
    AutoModelForCausalLM.from_pretrained = causal  # type: ignore[method-assign]  # see above
    CLIPModel.from_pretrained = lambda folder: CLIPModel(AutoConfig.from_pretrained(folder))  # type: ignore[method-assign]  # see above


# ---- one process ----


class Steps:
    """Called after each step of an optimizer; holds the GPU from step FIRST on."""

    def __init__(self, folder: Path, name: str, device: str) -> None:
        self.folder, self.name, self.device = folder, name, device
        self.count = 0
        self.marks = timing.Marks(device)
        self.peak: float | None = None

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self.count == FIRST:
            self.wait()
        if self.count >= FIRST + WARM and len(self.marks) <= MEASURED:
            self.marks.mark()
            if self.device == "cuda" and len(self.marks) == MEASURED + 1:
                # A CUDA graph's memory is its own while it replays: the allocator sees none of it.
                pools = unallocated_in_pools(torch.cuda.memory_snapshot())
                self.peak = (torch.cuda.max_memory_allocated() + pools) / GIB

    def wait(self) -> None:
        """Until all have compiled, and the GPU is free. It stays this process's to its end."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        (self.folder / f"ready {self.name}").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.05)
        self.lock = (self.folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()


def child(name: str, contender: str, folder: Path, device: str, *, quick: bool) -> None:
    """Runs an example; writes what was measured into ``folder``."""
    mend_torchvision()
    example = EXAMPLES[name]
    words = (QUICK[name] if quick else example.words.format(folder=folder)).split()
    words += [*example.contenders[contender], "--device", device]
    if not quick:
        random_weights(device)
        words += ["--steps", str(FIRST + WARM + MEASURED + 2)]
    if device == "cuda" and example.limit_gib is not None:
        whole = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(min(1.0, example.limit_gib / whole))
    steps = Steps(folder, contender, device)
    register_optimizer_step_post_hook(steps)
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        result = importlib.import_module(name).main(words)
    except torch.OutOfMemoryError as error:
        found: dict[str, Any] = {"left out": f"out of memory: {error!s:.120}"}
    else:
        times = steps.marks.milliseconds()
        found = {"result": result, "peak_gib": steps.peak, "steps": steps.count}
        if times:
            found["step_ms"] = statistics.median(times)
            if not quick:
                found["a_second"] = example.a_step / found["step_ms"] * 1e3
    (folder / f"{contender}.json").write_text(json.dumps(found))


# ---- all of them ----


def run(name: str, device: str, *, quick: bool, limit_s: float) -> dict[str, Any]:
    """The contenders of an example, by name."""
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        if not quick:
            prepare(name, folder)
        children = {}
        for contender in EXAMPLES[name].contenders:
            command = [sys.executable, "-m", "benchmarks.evidence.bench_examples", "--device"]
            command += [device, "--child", name, contender, made, *(["--quick"] if quick else [])]
            log = stack.enter_context((folder / f"{contender}.log").open("w"))
            children[contender] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            ends = time.monotonic() + limit_s
            while time.monotonic() < ends:
                left = [key for key, process in children.items() if process.poll() is None]
                if all((folder / f"ready {key}").exists() for key in left):
                    (folder / "go").touch()
                if not left:
                    break
                time.sleep(0.1)
        finally:
            for process in children.values():
                process.kill()
                process.wait()
        return {key: _found(folder, key) for key in children}


def _found(folder: Path, contender: str) -> dict[str, Any]:
    path = folder / f"{contender}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    tail = (folder / f"{contender}.log").read_text()[-600:]
    return {"left out": f"it failed or took too long: {tail}"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "examples", "quick")
    parser.add_argument("--examples", nargs="+", choices=tuple(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument("--limit", type=float, default=300, help="seconds of an example at most")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = timing.begin(parser, argv)
    if args.child:
        name, contender, folder = args.child
        child(name, contender, Path(folder), args.device, quick=args.quick)
        return
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu: only with --quick; the sizes are a GPU's")
    settings = {"device": args.device, "quick": args.quick, "steps": [FIRST, WARM, MEASURED]}
    path = args.json or timing.RESULTS / f"{args.device}-examples.json"
    report = timing.resumed(path, settings)
    found: dict[str, Any] = {}
    if report and report["device"] == timing.machine(args.device)["device"]:
        found = report["examples"]
    for name in args.examples:
        example = EXAMPLES[name]
        words = f"examples/{name}.py {QUICK[name] if args.quick else example.words}"
        before = found.get(name, {"command": ""})
        whole = not any("left out" in row for row in before.get("contenders", {}).values())
        if before["command"] == words and whole:
            continue
        contenders = run(name, args.device, quick=args.quick, limit_s=args.limit)
        found[name] = {"command": words, "unit": example.unit, "contenders": contenders}
        print(*doc_tables.gallery({"examples": {name: found[name]}}), sep="\n", flush=True)
        timing.write(args, "examples", {"settings": settings, "examples": found})


if __name__ == "__main__":
    main()
