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
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from evidence import RESULTS, ROOT

CIFAR = "folder:build/cifar10"
GPT = (
    "benchmarks/bench_gpt.py --device cuda --size 25M --tokens-per-parameter 20 --graph "
    "--validation-batches 50 --points 30 --epochs 8 --devices 0"
)
# Runs side by side end together, and a lease's end cuts those that run.
IMAGES = (
    "benchmarks/bench_training.py --table supplement --device cuda --tf32 --seeds 0,1,2 "
    f"--devices 0 --jobs {max(1, (os.cpu_count() or 1) // 4)} --images {CIFAR}"
)
SEVERAL = "-m benchmarks.evidence.several --device cuda --gpus"
SHARES = {
    "gpt-25M": {
        f"{GPT} --seeds 0 1 2 3 --contenders bf16 default 'default int8-forward' 'FP8 tensorwise'":
        "gpt-25M-20",
        f"{GPT} --seeds 0 1 --contenders fast": "gpt-25M-20",
    },
    **{
        f"images-{model}": {
            f"{IMAGES} --tasks images-{model} --batch {batch} --epochs {epochs}": f"cifar10-{model}"
        }
        for model, batch, epochs in (
            ("resnet18", 256, 15), ("vit-s", 256, 10), ("efficientformer", 128, 3)
        )
    },
    "several-8b": {
        f"{SEVERAL} {part} --model llama_8b --contenders bf16 'FP8 tensorwise' "
        "'default int8-forward'": "several"
        for part in ("4 --part losses", "2 --part resume one")
    },
    "several-vit": {
        f"{SEVERAL} 2 --model vit_l --each 128 --images {CIFAR} {part}": "several"
        for part in ("--part losses --seeds 0 1 2", "--part resume one")
    },
    "wire-10M": {f"{SEVERAL} 2 --model gpt_10m --each 32 --seeds 0 1 2": "wire-10M"},
    "wire-91M": {f"{SEVERAL} 2 --model gpt_91m --seeds 0 1 2": "wire-91M"},
}  # fmt: skip
"""Commands of each share and their reports; --json and --budget are added."""


def work(folder: Path) -> None:
    """Run the commands of ``folder``/share.json one after the other."""
    share = json.loads((folder / "share.json").read_text())
    for number, (words, name) in enumerate(share["commands"].items()):
        report, left_s = f"cuda-{name}.json", share["ends"] - time.time()
        if not (folder / report).exists() and (RESULTS / report).exists():
            shutil.copy(RESULTS / report, folder)
        command = [sys.executable, *shlex.split(words), "--json", str(folder / report)]
        command += ["--budget", f"{left_s:.0f}"]
        with open(folder / f"{number}.log", "w") as log:
            print(*command, file=log, flush=True)
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
        with open(folder / "codes", "a") as codes:
            print(done.returncode, file=codes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("share", choices=SHARES)
    parser.add_argument("--out", type=Path, required=True, help="for reports and ends of logs")
    parser.add_argument("--seconds", type=float, default=570, help="longest wait of this call")
    parser.add_argument("--lease", type=float, default=1600, help="seconds from the first call")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/lease")
    args = parser.parse_args(argv)
    folder, until = args.folder / args.share, time.time() + args.seconds
    commands, codes = SHARES[args.share], folder / "codes"
    if not codes.exists() or len(codes.read_text().split()) == len(commands):
        folder.mkdir(parents=True, exist_ok=True)
        share = {"ends": time.time() + args.lease, "commands": commands}
        (folder / "share.json").write_text(json.dumps(share))
        codes.write_text("")
        code = f"from benchmarks.evidence import lease; lease.work(lease.Path({str(folder)!r}))"
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    while len(ended := codes.read_text().split()) < len(commands) and time.time() < until:
        time.sleep(0.2)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("cuda-*.json"):
        shutil.copy(path, args.out)
    lines = [line for path in sorted(folder.glob("*.log"))
             for line in path.read_text(errors="replace").splitlines()[-30:]]  # fmt: skip
    (args.out / "logs.txt").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))
    state = "ended" if len(ended) == len(commands) else "goes on, repeat this call"
    print(f"{args.share}: {state}; exit codes [{', '.join(ended)}] of {len(commands)} commands")


if __name__ == "__main__":
    main()
