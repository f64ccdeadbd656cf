"""The examples run at toy size: examples/lora.py in this process, ddp.py under torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support import without_broken_torchvision

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 900  # seconds; about 6 on an idle machine


def test_lora(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with without_broken_torchvision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("example_lora", EXAMPLES / "lora.py")
    lora = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lora)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert lora.main(["--steps", "12", "--base-steps", "25"]) == 0
    finally:
        torch.set_num_threads(before)
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(plain LoRA|HOT default) +(.*)$", printed, re.MULTILINE))
    plain, ours = ([float(value) for value in rows[name].split()] for name in rows)
    assert plain[0] == ours[0]  # the same model, the same forward
    assert plain[1] < 0.9 * plain[0]  # it learns
    assert ours[1] != plain[1] and ours[1] == pytest.approx(plain[1], rel=0.05)
    assert ours[2] == pytest.approx(plain[2], abs=0.02)  # frozen weights keep nothing
    assert "10 layers run HOT" in printed


def output_of(command: list[str]) -> str:
    """What a launcher printed; asked to end on time-out, since killed it leaves its workers."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            printed, errors = process.communicate(timeout=LIMIT)
        except BaseException:
            process.terminate()
            raise
    assert process.returncode == 0, errors
    return printed


@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_ddp(options: tuple[str, ...]) -> None:
    pytest.importorskip("sklearn")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = output_of(
        [*launcher, str(EXAMPLES / "ddp.py"), "--steps", "21", "--batch", "16", *options]
    )
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (.*)$", printed, re.M)]
    assert len(losses) == 3 and losses[2] < 0.8 * losses[0]
    assert f"2 processes, {'FSDP2' if options else 'DDP'}, gloo" in printed
    assert "6 of 8 layers run HOT" in printed


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
def test_distributed_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "gloo.json"
    script = EXAMPLES.parent / "benchmarks/bench_distributed.py"
    options = ["--quick", "--threads", "1", "--steps", "8", "--json", str(path)]
    printed = output_of([sys.executable, str(script), *options])
    report = json.loads(path.read_text())
    assert report["backend"] == "gloo" and report["processes"] == 2
    assert report["faults"] == {"DDP": [], "FSDP2": []} and "FAULT" not in printed
    for way in ("DDP", "FSDP2"):
        rows = report[way]
        assert set(rows) == {"plain", "default", "fast"}
        assert rows["plain"]["loss"][0] == pytest.approx(rows["fast"]["loss"][0], rel=1e-5)
        assert rows["plain"]["loss"][1] != rows["default"]["loss"][1] < rows["default"]["loss"][0]
