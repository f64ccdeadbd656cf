"""The rules of CONTRIBUTING.md on where code lies, as far as a reader of files can check them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("cuda", "cpp")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
)
DEVICE_CODE = re.compile(r"__global__|__device__|__shared__|<<<|#include \"cut(lass|e)/")


def code_of(path: Path) -> str:
    """A source without its comments."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^#include ["<]([^">]+)[">]', code_of(path), re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_device_code_has_a_device_suffix(path: Path) -> None:
    assert bool(DEVICE_CODE.search(code_of(path))) == (path.suffix in {".cu", ".cuh"})


def test_device_folder_knows_no_backend() -> None:
    for path in SOURCES:
        if path.parent.name == "device" and path.suffix == ".cuh":
            strangers = {
                name
                for name in includes_of(path)
                if name.endswith((".h", ".cuh"))
                and not name.startswith(("cuda/device/", "hot/", "cuda_", "cooperative_groups"))
            }
            assert strangers <= {"operands.h", "random_key.h", "token_order.h"}, path


def test_the_cpu_includes_no_device_code() -> None:
    for path in SOURCES:
        if path.suffix in {".cpp", ".h"}:
            assert not [name for name in includes_of(path) if name.endswith(".cuh")], path


def test_public_headers_include_no_framework() -> None:
    headers = [path for path in SOURCES if "include" in path.parts]
    assert len(headers) > 8
    for path in headers:
        strangers = re.compile(r"cuda|torch|Python|nanobind|ATen")
        assert not [name for name in includes_of(path) if strangers.search(name)], path
