"""Python blocks of the README and of every page run unchanged."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OTHERS = {"docs/jax.md"}  # tests/with_jax/test_examples.py


def _pages() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [page.relative_to(ROOT).as_posix() for page in pages if BLOCK.search(page.read_text())]
    return [name for name in names if name not in OTHERS]


@pytest.mark.parametrize("page", _pages())
def test_code_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page}
    for block in BLOCK.finditer(text):
        # Blank lines give a traceback the page's line numbers.
        lines = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines + block.group(1), str(ROOT / page), "exec"), names)


def test_pages_with_code_are_found() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/torch.md", "docs/paper.md"} <= set(_pages())
