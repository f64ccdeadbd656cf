"""The Python of the documentation runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["paper.md", "python.md", "quickstart.md", "torch.md"])
def test_code_runs(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    names: dict[str, object] = {"__name__": page}
    for block in blocks:
        # Blank lines in front, so that a traceback has the page's own line numbers.
        lines = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines + block.group(1), str(DOCS / page), "exec"), names)
