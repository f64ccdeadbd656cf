"""Check without the GPU whether libhot's kernels fit a GPU's limits.

    python -m benchmarks.evidence.device_limits LIBHOT [--cuobjdump PROGRAM]

LIBHOT is a libhot.so that is built with a release's CUDAARCHS. ``cuobjdump --dump-resource-usage``,
from the toolkit or Triton's package, gives registers, stack and static shared memory of every
kernel. ``hotcore.explain`` gives threads and dynamic shared memory of every launch of LAYERS under
every setting. The instance of a kernel with the most registers counts. No kernel runs here: one
that does not fit would fail, and one that fits is not tested.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hotcore
import timing
from hotcore.config import RECIPES, HotConfig
from layers import LLAMA, VIT


@dataclass(frozen=True)
class Device:
    """Limits of a compute capability (CUDA Programming Guide, Compute Capabilities)."""

    block_kb: int
    """Shared memory of a thread block in KiB."""
    sm_kb: int
    """Shared memory of a multiprocessor in KiB; the system takes one KiB per thread block."""
    threads: int
    blocks: int
    """Threads and thread blocks that a multiprocessor can hold."""


DEVICES = {
    "sm_80": Device(163, 164, 2048, 32),
    "sm_86": Device(99, 100, 1536, 16),
    "sm_89": Device(99, 100, 1536, 24),
    "sm_120": Device(99, 100, 1536, 24),
}
REGISTERS = 65536
"""Registers of a multiprocessor and of a thread block, allocated per warp in units of 256."""
LAYERS = (
    *(*VIT.values(), *LLAMA.values()),
    *((197, 768, 768), (512, 64, 1024), (25216, 3072, 770), (25215, 1000, 768), (17, 33, 65)),
)
"""Tokens, out features and in features: large, small and odd sizes."""
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Compiled:
    """Highest figures of a kernel's instances for one architecture."""

    registers: int
    stack: int
    shared: int
    """Static shared memory in bytes."""


@dataclass(frozen=True)
class Launch:
    """Largest launch figures of a kernel."""

    threads: int
    shared: int
    """Dynamic shared memory in bytes."""


def compiled(text: str) -> dict[str, dict[str, Compiled]]:
    """Read cuobjdump's report into figures by architecture and by ``explain``'s kernel name."""
    kernels: dict[str, dict[str, Compiled]] = defaultdict(dict)
    arch = kernel = ""
    for line in text.split("\n"):
        if match := re.match(r"arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            kernel = kernel_of(match[1])
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            registers, stack, shared = map(int, match.groups())
            if int(arch[3:]) >= 90:
                shared -= min(shared, 1024)  # from sm_90 on the report includes the system's part
            before = kernels[arch].get(kernel, Compiled(0, 0, 0))
            kernels[arch][kernel] = Compiled(
                max(registers, before.registers),
                max(stack, before.stack),
                max(shared, before.shared),
            )
    return dict(kernels)


def kernel_of(mangled: str) -> str:
    """Return ``rows16_kernel``, or ``tile_kernel 128x256x64`` for tiles, or the mangled name."""
    for match in re.finditer(r"(?=(\d\d)[a-z])", mangled):  # the length of a name, then the name
        name = mangled[match.start() + 2 :][: int(match[1])]
        if re.fullmatch(r"[a-z]\w*_kernel", name):
            tile = re.search(r"_gemm_sm80_(\w+?)_cu_", mangled)
            return f"{name} {tile[1]}" if tile and name == "tile_kernel" else name
    return mangled


def launches(device: str) -> dict[str, Launch]:
    """Return the largest launch figures of each kernel over all settings."""
    largest: dict[str, Launch] = {}
    for step in steps(device):
        kernel = step.kernel.split(",")[0]
        if step.blocks:
            before = largest.get(kernel, Launch(0, 0))
            largest[kernel] = Launch(
                max(step.threads, before.threads), max(step.shared_bytes, before.shared)
            )
    return largest


def steps(device: str) -> Iterator[Any]:
    need = {"y", "x", "gx", "gw", "gb"}
    for recipe, forward in itertools.product(RECIPES, ("plain", "int8")):
        config = HotConfig.recipe(recipe, forward=forward)
        for layer, dtype in itertools.product(LAYERS, DTYPES):
            yield from hotcore.explain(*layer, config, device=device, dtype=dtype, need=need).steps
    for layer, int4 in itertools.product(LAYERS, (False, True)):
        yield from hotcore.explain_gemm(*layer, device=device, int4=int4).steps


def resident(device: Device, code: Compiled, launch: Launch) -> int:
    """Return how many thread blocks a multiprocessor holds; 0 if a launch would fail."""
    shared, warps = code.shared + launch.shared, -(-launch.threads // 32)
    if shared > 1024 * device.block_kb:
        return 0
    of_a_warp = -(-32 * code.registers // 256) * 256
    by_registers = REGISTERS // of_a_warp // 4 * 4 // warps  # warps are allocated in fours
    by_shared = 1024 * device.sm_kb // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, device.threads // (32 * warps), device.blocks)


def checked(code: Mapping[str, Mapping[str, Compiled]]) -> dict[str, dict[str, Any]]:
    """Return figures by architecture and kernel. Raises ValueError if code is missing."""
    out: dict[str, dict[str, Any]] = {}
    for arch in DEVICES:
        if arch not in code:
            raise ValueError(f"library: has no code for {arch}, only {', '.join(sorted(code))}")
        out[arch] = {}
        for kernel, launch in sorted(launches(arch).items()):
            if kernel not in code[arch]:
                raise ValueError(f"library: has no {kernel} for {arch}")
            mine = code[arch][kernel]
            out[arch][kernel] = {
                "registers": mine.registers,
                "stack": mine.stack,
                "threads": launch.threads,
                "shared": mine.shared + launch.shared,
                "resident": resident(DEVICES[arch], mine, launch),
            }
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.error_arguments(__doc__, "limits")
    parser.add_argument("library", type=Path)
    parser.add_argument("--cuobjdump", default=shutil.which("cuobjdump"))
    args: argparse.Namespace = parser.parse_args(argv)
    if args.cuobjdump is None:
        parser.error("--cuobjdump: none on the path")
    command = [args.cuobjdump, "--dump-resource-usage", str(args.library)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures = checked(compiled(report))
    for arch, kernels in figures.items():
        print(f"\n{arch}: kernel, registers, stack, threads, shared bytes, resident thread blocks")
        for kernel, row in kernels.items():
            print(f"  {kernel:28s}", *(f"{value:7d}" for value in row.values()))
    digest = hashlib.sha256(args.library.read_bytes()).hexdigest()
    timing.write(args, "limits", {"library": digest, "limits": figures})
    failing = [
        f"{a} {k}" for a, rows in figures.items() for k, r in rows.items() if not r["resident"]
    ]
    if failing:
        sys.exit(f"cannot be launched: {', '.join(failing)}")


if __name__ == "__main__":
    main()
