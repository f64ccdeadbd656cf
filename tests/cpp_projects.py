"""Helpers for tests of C and C++ projects that build on the installed package."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hotcore import _core

ROOT = Path(__file__).resolve().parents[1]
CONSUMER = ROOT / "tests" / "consumer"
TRAINER = ROOT / "examples" / "cpp_trainer"
INSTALLED = Path(_core.__file__).parent  # hotcore/ in site-packages, with lib/ and include/


def tool(*names: str) -> str:
    """Return the first of these programs that exists; skip the test without one."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"needs {' or '.join(names)}")


def run(*command: object, **options: Any) -> str:
    """Run a command that must succeed; return its standard output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(source: Path, folder: Path, **definitions: object) -> Path:
    """Configure and build a CMake project that finds hotcore in the package; return its folder."""
    cmake = tool("cmake")
    if not (INSTALLED / "include").exists():  # test_package.py requires it of a wheel
        pytest.skip(f"needs an installed hotcore; {INSTALLED} has no headers")
    options = {"CMAKE_BUILD_TYPE": "Release", "CMAKE_PREFIX_PATH": INSTALLED, **definitions}
    run(cmake, "-S", source, "-B", folder, *(f"-D{key}={value}" for key, value in options.items()))
    run(cmake, "--build", folder, "--parallel", max(2, (os.cpu_count() or 1) // 4))
    return folder


def curves(text: str) -> list[list[float]]:
    """Rows of cpp_trainer's output per epoch: train, test, accuracy of fp32, then of HOT."""
    rows = re.findall(r"^ +(\d+) \|(.*)$", text, re.MULTILINE)
    assert [int(epoch) for epoch, _ in rows] == list(range(1, len(rows) + 1))
    return [[float(word) for word in re.findall(r"[\d.]+", row)] for _, row in rows]


def check_curves(rows: list[list[float]]) -> None:
    """Check that both learn, and HOT as well as fp32, after six epochs or more."""
    first, last = rows[0], rows[-1]
    for train, test in ((0, 1), (3, 4)):
        assert last[train] < 0.2 * first[train] and last[test] < 0.4 * first[test]
    assert min(last[2], last[5]) > 94 and abs(last[3] - last[0]) < 0.02
    assert last[3:] != last[:3]  # the backward differs
