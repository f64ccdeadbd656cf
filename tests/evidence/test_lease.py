"""benchmarks/evidence/lease.py: a share that outlives its call; several.py with two processes."""

from __future__ import annotations

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
    commands = [("a.json", str(tmp_path / "report.py"), "--wait", wait) for wait in ("3", "0")]
    monkeypatch.setitem(lease.SHARES, "rows", commands)
    words = ["rows", "--out", str(tmp_path / "out"), "--folder", str(tmp_path), "--lease", "40"]
    lease.main([*words, "--seconds", "0.1"])
    assert "goes on: repeat this call; exit codes [] of 2" in capsys.readouterr().out
    assert not (tmp_path / "out/a.json").exists()
    lease.main(words)
    assert "ended; exit codes [0, 0] of 2" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/a.json").read_text())
    assert 30 < report["0"] < report["3"] <= 40
    lease.main([*words, "--seconds", "0"])
    assert "exit codes [] of 2" in capsys.readouterr().out
    lease.main(words)


def cut_and_resumed(rank: int, device: str, *, folder: str) -> None:
    """Losses of four steps are those of two, a checkpoint and two more, to the bit."""
    for model in several.EACH:
        words = ["--quick", "--gpus", "2", "--model", model, "--contenders",
                 "default int8-forward", "--cache", folder]  # fmt: skip
        args = several.parser_of().parse_args([*words, "--steps", "4"])
        whole = several.trained(args, torch.device(device))["losses"]
        args.steps, args.checkpoint = 2, Path(folder) / model
        cut = several.trained(args, torch.device(device))["losses"]
        args.steps, args.first = 4, 2
        rest = several.trained(args, torch.device(device))["losses"]
        assert len(rest) == 2 and cut + rest == whole, (model, cut, rest, whole)


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_run_on_two_processes_resumes_to_the_same_bits(tmp_path: Path) -> None:
    plans.spawn(functools.partial(cut_and_resumed, folder=str(tmp_path)))
