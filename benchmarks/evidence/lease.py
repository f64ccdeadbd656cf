"""Carry out a share of the plans of docs/dev/evidence.md on a lent machine with several GPUs.

    python -m benchmarks.evidence.lease gpt-25M --out "$OUT"      # the same call goes on

The first call starts the share's commands in a session of their own, which outlives the call. Every
call waits until they end or ``--seconds`` have passed, and copies reports and ends of logs to
``--out``. No run starts that would end after the lease of ``--lease`` seconds. The next lease goes
on from the reports, which lie in benchmarks/results by then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from evidence import RESULTS, ROOT

GPT = ("benchmarks/bench_gpt.py", "--device", "cuda", "--size", "25M", "--tokens-per-parameter",
       "20", "--graph", "--validation-batches", "50", "--points", "30", "--epochs", "8",
       "--devices", "0")  # fmt: skip
IMAGES = ("benchmarks/bench_training.py", "--table", "supplement", "--device", "cuda", "--tf32",
          "--batch", "128", "--seeds", "0,1,2", "--devices", "0")  # fmt: skip
SEVERAL = ("-m", "benchmarks.evidence.several", "--device", "cuda", "--gpus", "4")
MODELS = ("benchmarks/bench_models.py", "--device", "cuda", "--runs", "3", "--rounds", "2")
CIFAR = "folder:.carry/cifar10"

SHARES: dict[str, list[tuple[str, ...]]] = {
    "gpt-25M": [
        ("cuda-gpt-25M-20.json", *GPT, "--seeds", "0", "1", "2", "3", "--contenders", "bf16",
         "default", "default int8-forward", "FP8 tensorwise"),
        ("cuda-gpt-25M-20.json", *GPT, "--seeds", "0", "1", "--contenders", "fast"),
    ],
    **{
        f"images-{name}": [
            (f"cuda-cifar10-{name}.json", *IMAGES, "--tasks", f"images-{name}", "--images", CIFAR,
             "--epochs", epochs, "--jobs", jobs)
        ]
        for name, epochs, jobs in (
            ("resnet18", "20", "12"), ("vit-s", "30", "8"), ("efficientformer", "10", "8")
        )
    },
    "several-8b": [("cuda-several.json", *SEVERAL, "--model", "llama_8b")],
    "several-vit": [
        ("cuda-several.json", *SEVERAL, "--model", "vit_l", "--seeds", "0", "1", "2", "--images",
         CIFAR)
    ],
    "rows": [
        ("cuda-convolution.json", *MODELS, "--models", "resnet50_last"),
        ("cuda-rows.json", *MODELS, "--models", "llama_blocks_2k", "vit_b", "--contenders",
         "bf16 *", "default int8-forward *", "default eager*"),
    ],
}  # fmt: skip
"""Report and command of each share; --json and --budget are added."""
LAST_LINES = 30


def work(folder: Path) -> None:
    """Run the commands of ``folder``/share.json one after the other."""
    share = json.loads((folder / "share.json").read_text())
    codes = share["codes"]
    for number, (report, *words) in enumerate(share["commands"]):
        path, left_s = folder / report, share["ends"] - time.time()
        if not path.exists() and (RESULTS / report).exists():
            shutil.copy(RESULTS / report, path)
        command = [sys.executable, *words, "--json", str(path), "--budget", f"{left_s:.0f}"]
        with open(folder / f"{number}.log", "w") as log:
            log.write(f"{' '.join(command)}\n")
            log.flush()
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
        codes.append(done.returncode)
        (folder / "share.json").write_text(json.dumps(share))
    (folder / "ended").touch()


def begin(folder: Path, commands: Sequence[Sequence[str]], lease_s: float) -> None:
    """Start :func:`work` in a session of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    share = {"ends": time.time() + lease_s, "commands": commands, "codes": []}
    (folder / "ended").unlink(missing_ok=True)
    (folder / "share.json").write_text(json.dumps(share))
    words = [sys.executable, "-m", "benchmarks.evidence.lease", "--work", str(folder)]
    subprocess.Popen(words, cwd=ROOT, start_new_session=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("share", nargs="?", choices=SHARES)
    parser.add_argument("--out", type=Path, help="folder for reports and ends of logs")
    parser.add_argument("--seconds", type=float, default=570, help="longest wait of this call")
    parser.add_argument("--lease", type=float, default=1600, help="seconds from the first call")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/lease")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work is not None:
        return work(args.work)
    if args.share is None or args.out is None:
        parser.error("a share and --out are needed")
    folder, until = args.folder / args.share, time.time() + args.seconds
    if not (folder / "share.json").exists() or (folder / "ended").exists():
        begin(folder, SHARES[args.share], args.lease)
    while not (folder / "ended").exists() and time.time() < until:
        time.sleep(0.2)
    args.out.mkdir(parents=True, exist_ok=True)
    codes = json.loads((folder / "share.json").read_text())["codes"]
    for path in sorted(folder.glob("*.json")):
        if path.name != "share.json":
            shutil.copy(path, args.out)
    lines = [line for path in sorted(folder.glob("*.log"))
             for line in path.read_text(errors="replace").splitlines()[-LAST_LINES:]]  # fmt: skip
    (args.out / "logs.txt").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    ended = "ended" if (folder / "ended").exists() else "goes on: repeat this call"
    print(f"{args.share}: {ended}; exit codes {codes} of {len(SHARES[args.share])} commands")


if __name__ == "__main__":
    main()
