"""CONTRIBUTING.md's rules on the places of code, checked in the files."""

import re
import sys
from pathlib import Path

import pytest
from support import ran

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("cuda", "cpp")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
)
DEVICE_CODE = re.compile(r"__global__|__device__|__shared__|<<<|#include \"cut(lass|e)/")


def code_of(path: Path) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^#include ["<]([^">]+)[">]', code_of(path), re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_device_code_has_a_device_suffix(path: Path) -> None:
    templates = any(name.endswith(".cuh") for name in includes_of(path))
    device = templates or bool(DEVICE_CODE.search(code_of(path)))
    assert device == (path.suffix in {".cu", ".cuh"})


def test_device_folder_knows_no_backend() -> None:
    for path in SOURCES:
        if path.parent.name == "device" and path.suffix == ".cuh":
            ours = ("cuda/device/", "hot/", "cuda_", "cooperative_groups")
            headers = {name for name in includes_of(path) if name.endswith((".h", ".cuh"))}
            strangers = {name for name in headers if not name.startswith(ours)}
            assert strangers <= {"operands.h", "random_key.h", "token_order.h"}, path


def test_the_cpu_includes_no_device_code() -> None:
    for path in SOURCES:
        if path.suffix in {".cpp", ".h"}:
            assert not [name for name in includes_of(path) if name.endswith(".cuh")], path
        if path.parts[0] == "cpp":
            assert not [name for name in includes_of(path) if name.startswith("cuda/")], path


def test_public_headers_include_no_framework() -> None:
    headers = [path for path in SOURCES if "include" in path.parts]
    assert len(headers) > 8
    for path in headers:
        strangers = re.compile(r"cuda|torch|Python|nanobind|ATen")
        assert not [name for name in includes_of(path) if strangers.search(name)], path


# Folders that pytest or a script puts on the path, or their children.
PYTHON = ("tests", "benchmarks", "examples")


def top_level_names() -> set[str]:
    """The first word of every import in Python files there, functions' and strings' included."""
    names: set[str] = set()
    for folder in PYTHON:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            words = re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)
            names |= {*words, *re.findall(r"(?:importorskip|import_module)\(\s*\"(\w+)", text)}
    return names


def strangers(names: set[str]) -> set[str]:
    ours = {path.stem for folder in PYTHON for path in (ROOT / folder).rglob("*.py")}
    ours |= {path.parent.name for folder in PYTHON for path in (ROOT / folder).rglob("__init__.py")}
    others = {"torch", "numpy", "jax", "transformers", "timm", "peft", "hotcore"}
    return (names - ours) | others | (names & sys.stdlib_module_names)


def found_instead(folder: Path, names: set[str]) -> list[str]:
    """Return files and folders that Python could import in place of another package.

    A folder without ``__init__.py`` is a namespace package. Python imports it if nothing else has
    the name: ``tests/torch`` was imported as torch on a machine without torch.
    """
    paths = (path for path in folder.rglob("*") if path.is_dir() or path.suffix == ".py")
    found = (path for path in paths if (path.name if path.is_dir() else path.stem) in names)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def test_nothing_is_imported_in_a_packages_place(tmp_path: Path) -> None:
    names = strangers(top_level_names())
    assert {"torch", "numpy", "pytest", "hotcore", "subprocess", "sklearn"} <= names
    assert not {"support", "rivals", "models", "c_api"} & names  # the repository's modules
    for folder in PYTHON:
        assert found_instead(ROOT / folder, names) == [], folder
    for there in ("torch", "deep/torch", "jax"):
        (tmp_path / there).mkdir(parents=True)
    (tmp_path / "pytest.py").touch()
    assert found_instead(tmp_path, names) == ["deep/torch", "jax", "pytest.py", "torch"]


def test_a_browser_measures_pages(tmp_path: Path) -> None:
    for name, width in (("narrow", 300), ("wide", 600)):
        page = f'<!doctype html><div style="width: {width}px">text</div>'
        (tmp_path / f"{name}.html").write_text(page)
    done = ran(sys.executable, ROOT / "scripts/check_pages.py", tmp_path)
    if "no browser" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 1 and "wide.html is 6" in done.stdout, done
    assert "narrow.html" not in done.stdout
