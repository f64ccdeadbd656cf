"""The examples run at toy size: examples/lora.py in this process, ddp.py under torchrun."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_ddp(options: tuple[str, ...]) -> None:
    pytest.importorskip("sklearn")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / "ddp.py"), "--steps", "21", "--batch", "16", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (.*)$", done.stdout, re.M)]
    assert len(losses) == 3 and losses[2] < 0.8 * losses[0]
    assert f"2 processes, {'FSDP2' if options else 'DDP'}, gloo" in done.stdout
    assert "6 of 8 layers run HOT" in done.stdout
