"""Compile torchao's FP8 layers into inductor's cache, for later runs of bench_backward.py.

python -m benchmarks.evidence.compile_torchao [GROUP...]    # of layers.CUDA_GROUPS; default all
"""

from __future__ import annotations

import sys

import torch
from evidence import rivals
from layers import CUDA_GROUPS


def main() -> None:
    for group in sys.argv[1:] or CUDA_GROUPS:
        for tokens, outs, ins in CUDA_GROUPS[group].values():
            gy, w, x = (
                torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((tokens, outs), (outs, ins), (tokens, ins))
            )
            calls, version = rivals.torchao_calls(gy, w, x)
            for call in calls.values():
                call()
    torch.cuda.synchronize()
    print(f"torchao {version} compiled")


if __name__ == "__main__":
    main()
