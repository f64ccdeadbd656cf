"""benchmarks/evidence/lease.py: a share that outlives its call; several.py with two processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for needed in ("sklearn", "tqdm", "tokenizers"):
    pytest.importorskip(needed)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plans  # noqa: E402
from evidence import lease, several  # noqa: E402

REPORT = """import json, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
time.sleep(float(words["--wait"]))
rows = json.load(open(words["--json"])) if words["--wait"] == "0" else {}
json.dump({**rows, words["--wait"]: float(words["--budget"])}, open(words["--json"], "w"))
"""


def test_a_share_outlives_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The call ends before its commands do. The next one waits for them, a third begins anew."""
    (tmp_path / "report.py").write_text(REPORT)
    commands = {f"{tmp_path}/report.py --wait {wait}": "a" for wait in "30"}
    monkeypatch.setitem(lease.SHARES, "several-8b", commands)
    folders = ["--out", str(tmp_path / "out"), "--folder", str(tmp_path)]
    words = ["several-8b", *folders, "--lease", "40"]
    lease.main([*words, "--seconds", "0.1"])
    assert "goes on, repeat this call; exit codes [] of 2" in capsys.readouterr().out
    assert not (tmp_path / "out/cuda-a.json").exists()
    lease.main(words)
    assert "ended; exit codes [0, 0] of 2" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/cuda-a.json").read_text())
    assert 30 < report["0"] < report["3"] <= 40
    lease.main([*words, "--seconds", "0"])
    assert "exit codes [] of 2" in capsys.readouterr().out
    lease.main(words)


def cut_and_resumed(rank: int, device: str, *, folder: str) -> None:
    """Losses of three steps are those of one, a checkpoint and two more, to the bit."""
    for model in several.MODELS:
        name, cache = "default int8-forward", Path(folder)
        run = several.Run(model, name, 2, 2, quick=True, layers=1, steps=3, cache=cache)
        whole = several.trained(run, torch.device(device))
        run = dataclasses.replace(run, steps=1, checkpoint=Path(folder) / model)
        cut = several.trained(run, torch.device(device))
        run = dataclasses.replace(run, steps=3, first=1)
        rest = several.trained(run, torch.device(device))
        assert len(rest) == 2 and cut + rest == whole, (model, cut, rest, whole)


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_run_on_two_processes_resumes_to_the_same_bits(tmp_path: Path) -> None:
    plans.spawn(functools.partial(cut_and_resumed, folder=str(tmp_path)))
