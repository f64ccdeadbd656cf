"""benchmarks/evidence/device_limits.py: reading of compiled code, and the limits of GPUs."""

import json

import pytest

pytest.importorskip("torch")  # the benchmarks' modules need it

from evidence import RESULTS, device_limits  # noqa: E402
from evidence.device_limits import DEVICES, Compiled, Launch, resident  # noqa: E402

TILE = "_ZN3hot6detail60_GLOBAL__N__e0e78bd6_21_gemm_sm80_64x64x64_cu_cd6fd76d_18362"
REPORT = f"""
Fatbin elf code:
================
arch = sm_86
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function {TILE}11tile_kernelINS0_7MmaInt8EEEv:
  REG:128 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:424 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {TILE}11tile_kernelINS0_7MmaInt4EEEv:
  REG:126 STACK:8 SHARED:64 LOCAL:0 CONSTANT[0]:424 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {TILE}12fixup_kernelINS0_7MmaInt8EEEv:
  REG:162 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:424 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
arch = sm_120
 Function _ZN3hot6detail39_GLOBAL__N__a7fd7997_7_bias_cu_7f2f4f0616final_sum_kernelEPKfb:
  REG:32 STACK:0 SHARED:3072 LOCAL:0 CONSTANT[0]:425 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN7cutlass13device_kernelI4GemmEEvT_:
  REG:168 STACK:0 SHARED:1024 LOCAL:0
"""


def test_the_worst_instance_of_a_kernel_counts() -> None:
    assert device_limits.compiled(REPORT) == {
        "sm_86": {
            "tile_kernel 64x64x64": Compiled(128, 8, 64),
            "fixup_kernel": Compiled(162, 0, 0),
        },
        "sm_120": {
            "final_sum_kernel": Compiled(32, 0, 2048),  # without the system's kilobyte
            "device_kernel": Compiled(168, 0, 0),
        },
    }


@pytest.mark.parametrize(
    ("arch", "code", "launch", "expected"),
    [
        ("sm_86", Compiled(254, 0, 0), Launch(128, 50176), 2),  # limited by both
        ("sm_86", Compiled(254, 0, 0), Launch(128, 50177), 1),
        ("sm_86", Compiled(32, 0, 0), Launch(256, 99 * 1024), 1),
        ("sm_86", Compiled(32, 0, 1), Launch(256, 99 * 1024), 0),
        ("sm_80", Compiled(32, 0, 1), Launch(256, 99 * 1024), 1),
        ("sm_89", Compiled(254, 0, 0), Launch(256, 0), 1),
        ("sm_89", Compiled(254, 0, 0), Launch(288, 0), 0),  # 9 warps of 8192 registers
        ("sm_86", Compiled(16, 0, 0), Launch(32, 0), 16),  # thread blocks
        ("sm_80", Compiled(16, 0, 0), Launch(1024, 0), 2),  # threads
        ("sm_120", Compiled(16, 0, 0), Launch(1024, 0), 1),
    ],
)
def test_resident_thread_blocks(arch: str, code: Compiled, launch: Launch, expected: int) -> None:
    assert resident(DEVICES[arch], code, launch) == expected


def test_the_report_is_of_these_plans() -> None:
    """A plan whose figures grew needs a new check with the current library."""
    report = json.loads((RESULTS / "limits.json").read_text())["limits"]
    assert set(report) == set(DEVICES)
    for arch, rows in report.items():
        assert all(row["resident"] > 0 for row in rows.values()), arch
        for kernel, launch in device_limits.launches(arch).items():
            code = rows[kernel]
            assert launch.threads <= code["threads"], (arch, kernel)
            assert launch.shared <= code["shared"], (arch, kernel)
