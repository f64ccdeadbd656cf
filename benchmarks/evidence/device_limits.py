"""Whether a GPU that is not here can hold the kernels that libhot would run on it.

    python -m benchmarks.evidence.device_limits LIBHOT [--cuobjdump PROGRAM]

LIBHOT: a libhot.so of a build with CUDAARCHS of a release. The compiled code says registers, stack
and static shared memory of every kernel (``cuobjdump --dump-resource-usage``; the toolkit has it,
and Triton's package), ``hotcore.explain`` the threads and the dynamic shared memory of every launch
of LAYERS under every setting. No GPU takes part and nothing is timed: what does not fit would fail,
what fits has not run. Of a kernel's instances the one with the most registers counts.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hotcore
import timing
from hotcore.config import HotConfig
from layers import LLAMA, VIT


@dataclass(frozen=True)
class Device:
    """Limits of a compute capability (CUDA Programming Guide, Compute Capabilities)."""

    block_kb: int
    """Shared memory of a thread block."""
    sm_kb: int
    """Of a multiprocessor; each thread block takes one more for the system."""
    threads: int
    blocks: int
    """Both resident on a multiprocessor."""


DEVICES = {
    "sm_80": Device(163, 164, 2048, 32),
    "sm_86": Device(99, 100, 1536, 16),
    "sm_89": Device(99, 100, 1536, 24),
    "sm_120": Device(99, 100, 1536, 24),
}
REGISTERS = 65536
"""Of a multiprocessor and of a thread block; a warp gets them by 256."""
LAYERS = (
    *(*VIT.values(), *LLAMA.values()),
    *((197, 768, 768), (512, 64, 1024), (25216, 3072, 770), (25215, 1000, 768), (17, 33, 65)),
)
"""Tokens, out features, in features: large, small, of odd sizes."""
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Compiled:
    """The worst of a kernel's instances for one architecture."""

    registers: int
    stack: int
    shared: int
    """Static, bytes."""


@dataclass(frozen=True)
class Launch:
    """The largest launches of a kernel."""

    threads: int
    shared: int
    """Dynamic, bytes."""


def compiled(text: str) -> dict[str, dict[str, Compiled]]:
    """Architecture -> kernel, as ``explain`` calls it -> what it takes, from cuobjdump's report."""
    found: dict[str, dict[str, Compiled]] = defaultdict(dict)
    arch = kernel = ""
    for line in text.split("\n"):
        if match := re.match(r"arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            kernel = kernel_of(match[1])
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            registers, stack, shared = map(int, match.groups())
            if int(arch[3:]) >= 90:
                shared -= min(shared, 1024)  # there the system's part is in the report
            before = found[arch].get(kernel, Compiled(0, 0, 0))
            found[arch][kernel] = Compiled(
                max(registers, before.registers),
                max(stack, before.stack),
                max(shared, before.shared),
            )
    return dict(found)


def kernel_of(mangled: str) -> str:
    """``rows16_kernel``; of the products' tiles ``tile_kernel 128x256x64``; else as it is."""
    for match in re.finditer(r"(?=(\d\d)[a-z])", mangled):  # a name's length, and the name
        name = mangled[match.start() + 2 :][: int(match[1])]
        if re.fullmatch(r"[a-z]\w*_kernel", name):
            tile = re.search(r"_gemm_sm80_(\w+?)_cu_", mangled)
            return f"{name} {tile[1]}" if tile and name == "tile_kernel" else name
    return mangled


def launches(device: str, layers: Iterable[Sequence[int]] = LAYERS) -> dict[str, Launch]:
    """Kernel -> its largest launches, over all settings."""
    found: dict[str, Launch] = {}
    for step in steps(device, layers):
        kernel = step.kernel.split(",")[0]
        if step.blocks:
            before = found.get(kernel, Launch(0, 0))
            found[kernel] = Launch(
                max(step.threads, before.threads), max(step.shared_bytes, before.shared)
            )
    return found


def steps(device: str, layers: Iterable[Sequence[int]]) -> Iterator[Any]:
    settings = [{"recipe": name} for name in ("default", "fast", "accurate", "paper")]
    need = {"y", "x", "gx", "gw", "gb"}
    for fields, forward in itertools.product(settings, ("plain", "int8")):
        others = {key: value for key, value in fields.items() if key != "recipe"}
        config = HotConfig.recipe(fields["recipe"], **others, forward=forward)
        for layer, dtype in itertools.product(layers, DTYPES):
            yield from hotcore.explain(*layer, config, device=device, dtype=dtype, need=need).steps
    for layer, int4 in itertools.product(layers, (False, True)):
        yield from hotcore.explain_gemm(*layer, device=device, int4=int4).steps


def resident(device: Device, code: Compiled, launch: Launch) -> int:
    """Thread blocks on a multiprocessor; 0: it cannot be launched."""
    shared, warps = code.shared + launch.shared, -(-launch.threads // 32)
    if shared > 1024 * device.block_kb:
        return 0
    of_a_warp = -(-32 * code.registers // 256) * 256
    by_registers = REGISTERS // of_a_warp // 4 * 4 // warps  # warps come by four
    by_shared = 1024 * device.sm_kb // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, by_shared, device.threads // (32 * warps), device.blocks)


def checked(
    code: Mapping[str, Mapping[str, Compiled]], devices: Iterable[str] = DEVICES
) -> dict[str, dict[str, Any]]:
    """Architecture -> kernel -> its figures. Raises ValueError where code is missing."""
    out: dict[str, dict[str, Any]] = {}
    for arch in devices:
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
    found = checked(compiled(report))
    for arch, kernels in found.items():
        print(f"\n{arch}: kernel, registers, stack, threads, shared bytes, resident thread blocks")
        for kernel, row in kernels.items():
            print(f"  {kernel:28s}", *(f"{value:7d}" for value in row.values()))
    digest = hashlib.sha256(args.library.read_bytes()).hexdigest()
    timing.write(args, "limits", {"library": digest, "limits": found})
    failing = [
        f"{a} {k}" for a, rows in found.items() for k, r in rows.items() if not r["resident"]
    ]
    if failing:
        sys.exit(f"cannot be launched: {', '.join(failing)}")


if __name__ == "__main__":
    main()
