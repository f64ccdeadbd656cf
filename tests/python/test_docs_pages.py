"""The pages: their lengths, links and drawings, and what code says of them. The site's build
(scripts/docs.sh) checks every internal link and anchor."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = ("benchmarks", "cmake", "cpp", "cuda", "examples", "python", "scripts", "tests")
SUFFIXES = {".c", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".in", ".py", ".sh", ".txt"}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_pages_that_must_be_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 100
    guide = text_of(ROOT / "docs/torch.md")
    assert len(guide.splitlines()) <= 150
    assert "<!-- table: " not in guide  # measurements are in docs/results.md


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    """Files that links lead to exist; addresses elsewhere are addresses."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "`code`", prose)):
        address = urlsplit(target)
        if address.scheme or address.netloc:
            assert address.scheme == "https" and "." in address.netloc, target
            continue
        assert not target.startswith("/"), target
        path = page.parent / address.path if address.path else page
        assert path.is_file(), f"{name(page)}: {target}"


def code_files() -> list[Path]:
    found = [path for folder in CODE for path in (ROOT / folder).rglob("*")]
    return [
        path
        for path in found
        if path.suffix in SUFFIXES and "_deps" not in path.parts and path != Path(__file__)
    ]


def test_what_code_says_of_pages() -> None:
    """A page that a comment names is there, and has the words that are quoted with it."""
    seen = 0
    for path in code_files():
        for match in re.finditer(r'docs/([\w/]+\.md)(?:(?:,|:) "([^"\n]+)")?', text_of(path)):
            page, section = ROOT / "docs" / match[1], match[2]
            seen += 1
            assert page.is_file(), f"{name(path)}: {match[0]}"
            assert section is None or section in text_of(page), f"{name(path)}: {match[0]}"
    assert seen > 50


def test_public_headers_are_listed() -> None:
    page = text_of(ROOT / "docs/api/cpp.md")
    headers = sorted((ROOT / "cpp/include/hot").glob("*.h"))
    assert headers
    for header in headers:
        found = re.search(rf"^\| \[`hot/{re.escape(header.name)}`\].*$", page, re.MULTILINE)
        assert found, f"docs/api/cpp.md has no row for hot/{header.name}"
        row = found[0]
        assert f"{{literalinclude}} ../../cpp/include/hot/{header.name}\n" in page
        functions = re.findall(r"^HOT_API [^;{]*?(\w+)\(", text_of(header), re.MULTILINE)
        missing = [function for function in functions if f"`{function}`" not in row]
        assert not missing, f"docs/api/cpp.md, {header.name}: {missing}"


def test_drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale: run python docs/draw.py."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    sys.modules.pop("draw", None)
    import draw

    for file, make in draw.DRAWINGS.items():
        assert text_of(ROOT / "docs/img" / file) == make().svg()
