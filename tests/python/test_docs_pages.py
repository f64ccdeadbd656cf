"""Lengths, links and drawings of the pages, and references to them in code. The site's build
(scripts/docs.sh) checks every internal link and anchor."""

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
    assert len(text_of(ROOT / "README.md").splitlines()) <= 80
    results = [ROOT / "docs/results.md", *(ROOT / "docs/results").glob("*.md")]
    assert len(results) == 5 and sum(len(text_of(page).split()) for page in results) <= 6700
    assert len(text_of(ROOT / "docs/paper.md").split()) <= 1700
    guide = text_of(ROOT / "docs/torch.md")
    assert len(guide.splitlines()) <= 150
    assert "<!-- table: " not in guide  # docs/results.md has measurements


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
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
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*")]
    code = [path for path in paths if path.suffix in SUFFIXES and path != Path(__file__)]
    return [path for path in code if "_deps" not in path.parts]


def test_what_code_says_of_pages() -> None:
    seen = 0
    for path in code_files():
        for match in re.finditer(r'docs/([\w/]+\.md)(?:(?:,|:) "([^"\n]+)")?', text_of(path)):
            page, section = ROOT / "docs" / match[1], match[2]
            seen += 1
            assert page.is_file(), f"{name(path)}: {match[0]}"
            assert section is None or section in text_of(page), f"{name(path)}: {match[0]}"
    assert seen > 50


def test_public_headers_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    sys.modules.pop("headers", None)
    import headers

    text = headers.markdown()
    assert "<!-- headers -->" in text_of(ROOT / "docs/api/cpp.md")
    paths = list((ROOT / "cpp/include/hot").glob("*.h"))
    assert len(paths) > 10
    for header in paths:
        assert f"{{literalinclude}} ../../cpp/include/hot/{header.name}\n" in text
        row = re.search(rf"^\| \[`hot/{re.escape(header.name)}`\].*\| (.+) \|.*\|$", text, re.M)
        assert row and row[1].endswith("."), header.name
    assert "| [`hot/pack.h`](#packh) |" in text and "`pack_int4`, `unpack_int4` |" in text
    assert "`hot_expand_weight_int4`, `hot_dequantize_weight` |" in text


def test_drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails: run python docs/draw.py."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    sys.modules.pop("draw", None)
    import draw

    for file, make in draw.DRAWINGS.items():
        assert text_of(ROOT / "docs/img" / file) == make().svg()


def exported(module: str) -> list[str]:
    (names,) = re.findall(r"^__all__ = \[(.*?)\]", text_of(ROOT / module), re.M | re.S)
    return re.findall(r'"(\w+)"', names)


def test_the_page_of_names_has_all_in_order() -> None:
    text = text_of(ROOT / "docs/torch/names.md")
    names = exported("python/hotcore/torch/__init__.py")
    assert re.findall(r"^\| [\w ]*\| `(\w+)` \|", text.split("\n## ")[0], re.M) == names
    assert len(names) == 22 and names[0] == "convert"
    assert f"these {len(names)} names" in text
    assert text.count("\n") <= 150
    for name in exported("python/hotcore/paper/__init__.py"):
        assert f"`{name}`" in text


# The page of a package, and the names that a reader looks for first.
API = {
    "docs/api/hotcore.rst": ("python/hotcore/__init__.py", "backward_linear"),
    "docs/api/torch.rst": ("python/hotcore/torch/__init__.py", "convert"),
    "docs/api/jax.rst": ("python/hotcore/jax/__init__.py", "linear"),
    "docs/api/paper.rst": ("python/hotcore/paper/__init__.py", "published"),
}


@pytest.mark.parametrize("page", API)
def test_api_pages_name_what_is_public(page: str) -> None:
    """The page has each public name once, in the order of use."""
    module, first = API[page]
    public = set(exported(module)) - {"__version__"}
    if page != "docs/api/hotcore.rst":
        public.discard("HotConfig")  # has its entry under hotcore
    entry = r"^\.\. auto(?:function|class|module):: (?:hotcore\.[\w.]+\.(?=policies))?(\w+)$"
    shown = re.findall(entry, text_of(ROOT / page), re.M)
    assert shown[0] == first
    assert sorted(shown) == sorted(public)
