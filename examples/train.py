"""Train a small ViT and a small GPT in fp32 and with HOT, and compare them.

`bash scripts/train.sh` makes an environment and runs this script with the same options. The data
is already on the machine: scikit-learn's digits, and the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("vit", "gpt")
HOT = ("default", "fast", "paper", "accurate")
RECIPES = ("fp32", *HOT, *(f"{name}+int8" for name in HOT))
DEFAULT_RECIPES = ("fp32", "default", "default+int8", "paper")
STEP_SECONDS = 0.03
"""Time of a step with its share of validation on two idle cores."""


def _names(*allowed: str):
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in allowed:
                known = ", ".join(allowed)
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; choose from {known}")
        return names

    return parse


def _at_least(low: int, high: int | None = None):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {value}")
        return value

    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda, cuda:0, cuda:1, ..., got {text!r}")
    return text


def _output(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text}")
    return path


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line, before anything heavy is imported."""
    parser = argparse.ArgumentParser(
        prog="train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", choices=(*TASKS, "both"), default="both", help="what to train (default: both)"
    )
    parser.add_argument(
        "--recipe",
        type=_names(*RECIPES),
        action="append",
        metavar="NAME[,NAME...]",
        help=f"recipes to compare, of {', '.join(RECIPES)} (default: {','.join(DEFAULT_RECIPES)})",
    )
    parser.add_argument(
        "--forward",
        type=_names("plain", "int8"),
        metavar="NAME[,NAME]",
        help="forward pass of every recipe without +int8: plain, int8, or both (default: plain)",
    )
    parser.add_argument("--device", type=_device, default="cpu", help="cpu (default) or cuda[:N]")
    parser.add_argument(
        "--steps", type=_at_least(1), metavar="N", help="training steps (default: vit 350, gpt 300)"
    )
    parser.add_argument(
        "--seed", type=_at_least(0, 2**63 - 1), default=0, metavar="N", help="default: 0"
    )
    parser.add_argument(
        "--threads",
        type=_at_least(1),
        metavar="N",
        # More threads would only wait for each other, because the models are small.
        default=min(4, len(os.sched_getaffinity(0))),
        help="CPU threads (default: the available CPUs, at most 4)",
    )
    parser.add_argument(
        "--out",
        type=_output,
        default=ROOT / "out",
        metavar="FOLDER",
        help="folder for train.png and train.json (default: out, in the repository)",
    )
    # scripts/train.sh reports a wrong option before it builds for minutes.
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = [name for group in options.recipe or [DEFAULT_RECIPES] for name in group]
    if options.forward:
        int8 = [f"{name}+int8" for name in chosen if name in HOT and "int8" in options.forward]
        chosen = [n for n in chosen if n not in HOT or "plain" in options.forward] + int8
    options.recipe = sorted(set(chosen), key=lambda name: (name != "fp32", name))
    options.task = list(TASKS) if options.task == "both" else [options.task]
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit status is 0, 1 for a run that failed, or 2 for a bad option."""
    options = parse_options(arguments)
    if options.check_options:
        return 0
    try:
        import hotcore
        import hotcore.torch
        import torch
        from train_lib import report, training
    except ImportError as missing:
        return _fail(f"{missing}. `bash scripts/train.sh` makes an environment with all libraries.")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return _fail("--device cuda: torch sees no CUDA device; leave the option out for cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return _fail(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(options.threads)
        hotcore.set_num_threads(options.threads)
        print(
            f"hotcore {hotcore.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}; {device}, {options.threads} threads, "
            f"seed {options.seed}"
        )
        began = time.perf_counter()
        results, tasks = [], [training.load_task(name) for name in options.task]
        if device.type == "cpu":
            steps = len(options.recipe) * sum(options.steps or task.steps for task in tasks)
            runs = len(options.recipe) * len(tasks)
            print(f"{runs} trainings: about {steps * STEP_SECONDS:.0f} s on two idle cores")
        for task in tasks:
            print(f"{task.name}: {task.data.description}", flush=True)
            for recipe in options.recipe:
                results.append(
                    training.train(task, recipe, options.seed, options.steps or task.steps, device)
                )
        minutes, seconds = divmod(round(time.perf_counter() - began), 60)
        print(f"\n{report.table(results)}\n")
        about = {
            "hotcore": hotcore.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": str(device),
            "threads": options.threads,
            "data": {task.name: task.data.description for task in tasks},
        }
        report.write_json(results, about, options.out / "train.json")
        report.plot(results, tasks, options.out / "train.png")
    except (OSError, RuntimeError, NotImplementedError) as error:
        return _fail(str(error))
    print(f"{minutes} min {seconds:02d} s. Curves: {options.out / 'train.png'}")
    print(f"All figures: {options.out / 'train.json'}")
    return 0


def _fail(message: str) -> int:
    print(f"train: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
