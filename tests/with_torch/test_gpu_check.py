"""scripts/gpu_check.py: two calls can share a check."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check  # noqa: E402  (after its folder is on the path)

HALVES: dict[str, Any] = {
    "architecture": lambda: gpu_check.HOPPER,
    "build_all": lambda *_: {"built before": 0},
    "compile_torchao": lambda log: None,
    "package": lambda build: build,
    "sanitize": lambda *_: {"memcheck": "clean"},
    "test_all": lambda *_: {"Python": {"passed": 3, "failed": 0, "skipped": 1}},
    "bench_all": lambda *_: ({"bench_gemm": 0}, {"gemm": {}}),
}


def test_halves_of_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, function in HALVES.items():
        monkeypatch.setattr(gpu_check, name, function)
    monkeypatch.setattr(gpu_check.targets, "rows", lambda *_: [])
    for name, value in {"is_available": True, "device_count": 1, "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    out = tmp_path / "report.json"

    def check(*options: str) -> tuple[int, int, bool]:
        words = ["gpu_check.py", "--out", str(out), "--build", str(tmp_path / "build"), *options]
        monkeypatch.setattr(sys, "argv", words)
        code = gpu_check.main()
        report = json.loads(out.read_text())
        return code, report["passed"], "bench_gemm" in report

    assert check("--skip-bench") == (1, 3, False)
    assert check("--skip-tests") == (0, 3, True)
    assert check("--skip-bench") == (0, 3, True)
    out.write_text(json.dumps(json.loads(out.read_text()) | {"source_hash": "another"}))
    assert check("--skip-tests") == (1, 0, True)
