"""The installed package: version, stubs, and the CMake package of the wheel."""

import ctypes
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import hotcore
import pytest
from c_api import STRUCTS
from cpp_projects import CONSUMER, INSTALLED, ROOT, build, run, tool
from hotcore import _core

DISTRIBUTION = "hotcore-int8"
# A checkout on PYTHONPATH has no distribution; every other installation must have one.
uninstalled = pytest.mark.skipif(
    ROOT / "python" in INSTALLED.parents
    and not list(importlib.metadata.distributions(name=DISTRIBUTION)),
    reason=f"needs an installed hotcore; this one is in {INSTALLED}",
)


@uninstalled
def test_one_version() -> None:
    declared = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None and hotcore.__version__ == declared[1]
    assert _core.version() == declared[1]
    assert importlib.metadata.version(DISTRIBUTION) == declared[1]


def test_one_extra_serves_all_examples() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = " ".join(project["optional-dependencies"]["examples"])
    text = "".join(path.read_text() for path in (ROOT / "examples").rglob("*.py"))
    imports = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    known = {"hotcore", "train_lib", "numpy", "jax"} | sys.stdlib_module_names
    for name in imports - known:  # numpy comes with hotcore, and jax has its extra
        assert {"PIL": "pillow", "sklearn": "scikit-learn"}.get(name, name) in extra


@uninstalled
def test_needs_numpy_alone() -> None:
    required = importlib.metadata.requires(DISTRIBUTION) or []
    names = [re.match(r"[\w-]+", entry)[0] for entry in required if "extra ==" not in entry]
    assert names == ["numpy"]


@uninstalled
def test_wheel_holds_what_it_should() -> None:
    files = {str(path) for path in importlib.metadata.files(DISTRIBUTION) or []}
    library = "lib/libhot.so." + ".".join(hotcore.__version__.split(".")[:2])
    for name in ("py.typed", "_core.pyi", "include/hot/hot.h", "include/hot/hot_c.h", library,
                 "lib/cmake/hotcore/hotcoreConfig.cmake", "lib/pkgconfig/hotcore.pc"):  # fmt: skip
        assert f"hotcore/{name}" in files, name
    known = re.compile(r"(hotcore|hotcore_int8-[\d.]+\.dist-info)/")
    assert [name for name in files if not known.match(name)] == []
    assert [name for name in files if re.search(r"(^|[/_])tests?([/_.]|$)", name.lower())] == []


def test_the_library_has_a_versioned_soname() -> None:
    # The wheel's one file has the name that _core and other programs ask the loader for.
    (library,) = (INSTALLED / "lib").glob("libhot.so*")
    wanted = "libhot.so." + ".".join(hotcore.__version__.split(".")[:2])
    assert library.name == wanted
    for binary in (library, Path(_core.__file__)):
        assert wanted.encode() + b"\0" in binary.read_bytes()


@pytest.mark.long
@uninstalled
def test_find_package_from_the_wheel(tmp_path: Path) -> None:
    # scikit-build-core does the same: the entry point names the module whose folder is the prefix.
    (point,) = importlib.metadata.entry_points(group="cmake.prefix", name="hotcore")
    assert point.value == "hotcore"

    folder = build(CONSUMER, tmp_path)
    for program in ("consumer", "consumer_c"):
        said = run(folder / program)
        assert f"libhot {hotcore.__version__}" in said
    # A C compiler and test_c_api.py give the structs the same layout.
    sizes = re.findall(r" (hot_\w+) (\d+)", said[said.index("sizes:") :])
    assert {name: int(size) for name, size in sizes} == {
        name: ctypes.sizeof(struct) for name, struct in STRUCTS.items()
    }


def test_pkg_config_from_the_wheel(tmp_path: Path) -> None:
    pkg_config, compiler = tool("pkg-config", "pkgconf"), tool("cc")
    library = INSTALLED / "lib"
    paths = dict(PKG_CONFIG_PATH=str(library / "pkgconfig"), LD_LIBRARY_PATH=str(library))
    environment = os.environ | paths
    version = run(pkg_config, "--modversion", "hotcore", env=environment).strip()
    assert version == hotcore.__version__
    flags = run(pkg_config, "--cflags", "--libs", "hotcore", env=environment).split()
    program = tmp_path / "consumer_c"
    run(compiler, "-std=c99", CONSUMER / "main.c", "-o", program, *flags, "-lm")
    assert f"libhot {hotcore.__version__}" in run(program, env=environment)
