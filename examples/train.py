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
RECIPES = ("fp32", "default", "fast", "paper", "accurate")
DEFAULT_RECIPES = ("fp32", "default", "fast", "paper")
FORWARDS = ("plain", "int8")


def _recipes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown recipe {', '.join(map(repr, unknown)) or repr(text)}; "
            f"choose from {', '.join(RECIPES)}"
        )
    return names


def _forwards(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in FORWARDS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown forward {', '.join(map(repr, unknown))}; choose from {', '.join(FORWARDS)}"
        )
    return names


def _at_least(low: int, high: int | None = None):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {value}")
        return value

    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of cpu, cuda, cuda:0, cuda:1, ...")
    return text


def _output(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file; a folder is wanted")
    return path


def _available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked before anything heavy is imported."""
    parser = argparse.ArgumentParser(
        prog="train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", choices=(*TASKS, "both"), default="both", help="what to train (default: both)"
    )
    parser.add_argument(
        "--recipe",
        type=_recipes,
        action="append",
        metavar="NAME[,NAME...]",
        help=f"which to compare, of {', '.join(RECIPES)}; may be given several times "
        f"(default: {','.join(DEFAULT_RECIPES)})",
    )
    parser.add_argument(
        "--forward",
        type=_forwards,
        default=["plain"],
        metavar="NAME[,NAME]",
        help="of HOT's runs: plain, int8 (shown as RECIPE+int8), or both (default: plain)",
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
        # The models are small: more threads would only wait for each other.
        default=min(4, _available_cpus()),
        help="CPU threads (default: what there is, at most 4)",
    )
    parser.add_argument(
        "--out",
        type=_output,
        default=ROOT / "out",
        metavar="FOLDER",
        help="where train.png and train.json go (default: out, in the repository)",
    )
    # For scripts/train.sh: report a wrong option before minutes of building.
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    wanted = [name for group in options.recipe or [DEFAULT_RECIPES] for name in group]
    options.recipe = [
        name if forward == "plain" else f"{name}+int8"
        for name in RECIPES
        if name in wanted  # each once, fp32 first
        for forward in FORWARDS
        if forward in (options.forward if name != "fp32" else ["plain"])
    ]
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
        return _fail(
            f"{missing}. `bash scripts/train.sh` makes an environment that has all it takes."
        )
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return _fail("--device cuda: this torch sees no CUDA device; leave the option out for cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return _fail(f"--device {device}: there are only {torch.cuda.device_count()} CUDA devices")
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
        results, tasks = [], []
        for name in options.task:
            task = training.load_task(name)
            tasks.append(task)
            print(f"{name}: {task.data.description}", flush=True)
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
