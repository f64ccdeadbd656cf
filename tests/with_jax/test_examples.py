"""examples/train_jax.py at toy size, and the Python of docs/jax.md."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import hotcore.jax  # noqa: F401
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]


def test_train_jax(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", ["train_jax.py", "--steps", "60", "--recipe", "fast"])
    runpy.run_path(str(ROOT / "examples/train_jax.py"))
    rows = re.findall(
        r"^(\w+) +step +(\d+)  loss (\S+)  accuracy (\S+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert [(name, int(step)) for name, step, *_ in rows] == [
        (name, step) for name in ("fp32", "fast") for step in (15, 30, 45, 60)
    ]
    fp32, ours = ([float(row[2]) for row in part] for part in (rows[:4], rows[4:]))
    assert fp32[3] < 0.5 * fp32[0] and float(rows[3][3]) > 0.8
    assert ours != fp32  # HOT's backward trains here
    assert ours[3] == pytest.approx(fp32[3], rel=0.1)


def test_code_of_the_page_runs() -> None:
    """Runs in another process: it sets variables that JAX reads at its start."""
    text = (ROOT / "docs/jax.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    path = os.pathsep.join(map(str, sys.path))
    subprocess.run(
        [sys.executable, "-c", "".join(blocks)], check=True, env={**os.environ, "PYTHONPATH": path}
    )
