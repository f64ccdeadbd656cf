"""What is installed: version, stubs, and the CMake package that the wheel carries."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import hotcore
import pytest
from hotcore import _core

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(_core.__file__).parent  # hotcore/ in site-packages


def test_one_version() -> None:
    declared = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert hotcore.__version__ == declared[1]
    assert _core.version() == declared[1]
    assert importlib.metadata.version("hotcore") == declared[1]


def test_needs_numpy_alone() -> None:
    required = importlib.metadata.requires("hotcore") or []
    names = [re.match(r"[\w-]+", entry)[0] for entry in required if "extra ==" not in entry]
    assert names == ["numpy"]


def test_wheel_holds_what_it_should() -> None:
    files = {str(path) for path in importlib.metadata.files("hotcore") or []}
    for name in (
        "hotcore/py.typed",
        "hotcore/_core.pyi",
        "hotcore/include/hot/hot.h",
        "hotcore/lib/libhot.so." + ".".join(hotcore.__version__.split(".")[:2]),
        "hotcore/lib/cmake/hotcore/hotcoreConfig.cmake",
    ):
        assert name in files, name
    known = re.compile(r"(hotcore|hotcore-[\d.]+\.dist-info)/")
    assert [name for name in files if not known.match(name)] == []
    assert [name for name in files if "test" in name.lower()] == []


def test_stub_names_what_the_module_has() -> None:
    stub = (INSTALLED / "_core.pyi").read_text()
    declared = set(re.findall(r"^(?:def|class) ([A-Za-z]\w*)", stub, re.MULTILINE))
    actual = {name for name in dir(_core) if not name.startswith("_")}
    assert declared == actual


def test_the_library_has_a_versioned_soname() -> None:
    # The name that _core and other programs ask the loader for is the one file's, in the wheel.
    (library,) = (INSTALLED / "lib").glob("libhot.so*")
    wanted = "libhot.so." + ".".join(hotcore.__version__.split(".")[:2])
    assert library.name == wanted
    for binary in (library, Path(_core.__file__)):
        assert wanted.encode() + b"\0" in binary.read_bytes()


def test_find_package_from_the_wheel(tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    # The way scikit-build-core finds it: the entry point names the module that is the prefix.
    (point,) = importlib.metadata.entry_points(group="cmake.prefix", name="hotcore")
    assert point.value == "hotcore"

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    source = ROOT / "tests" / "consumer"
    prefix = f"-DCMAKE_PREFIX_PATH={INSTALLED}"
    run(cmake, "-S", str(source), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=Release", prefix)
    run(cmake, "--build", str(tmp_path))
    assert f"libhot {hotcore.__version__}" in run(str(tmp_path / "consumer"))
