"""Wheels are checked before a release, and files with equal content agree."""

import importlib.util
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support import ran

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "manylinux_2_17_x86_64.manylinux_2_28_x86_64"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_wheel, release = script("check_wheel"), script("release")

CUDA = b"libhot.so.0.1\0.nv_fatbin" + bytes(4 << 20)
GOOD = {
    "hotcore/__init__.py": b"",
    "hotcore/_core.abi3.so": b"\x7fELF",
    "hotcore/lib/libhot.so.0.1": b"\x7fELF libhot.so.0.1\0",
    "hotcore_int8-0.1.0.dist-info/WHEEL": b"",
}


@pytest.mark.parametrize(
    ("changes", "platform", "problem"),
    [
        ({}, PLATFORM, None),
        ({}, "linux_x86_64", "is for linux_x86_64"),
        ({}, "manylinux_2_34_x86_64", "is for manylinux_2_34"),
        ({}, "manylinux_2_24_aarch64", None),
        ({}, "manylinux_2_34_aarch64", "is for manylinux_2_34"),
        ({"hotcore/lib/libhot.so": b""}, PLATFORM, r"expected hotcore/lib/libhot\.so\.0\.1 alone"),
        ({"hotcore/lib/libhot.so.0.1": b"libhot.so\0"}, PLATFORM, "another soname"),
        ({"hotcore/_core.cpython-311.so": b""}, PLATFORM, "holds 2 extension modules"),
        ({"tests/test_gemm.py": b""}, PLATFORM, "holds tests/test_gemm.py"),
        ({"hotcore/ballast": bytes(3_000_001)}, PLATFORM, "3.0 MB is more than 3, .* CPU"),
        ({"hotcore/ballast": bytes(2_990_000)}, PLATFORM, None),
        # the limit with CUDA
        ({"hotcore/lib/libhot.so.0.1": CUDA}, PLATFORM, None),
    ],
)  # fmt: skip
def test_what_a_wheel_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, bytes], platform: str, problem: str | None,
) -> None:  # fmt: skip
    wheel = tmp_path / f"hotcore_int8-0.1.0-cp312-abi3-{platform}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (GOOD | changes).items():
            archive.writestr(name, content)
    monkeypatch.setattr(sys, "argv", ["check_wheel.py", str(wheel)])
    code = check_wheel.main()
    printed = capsys.readouterr().out
    assert code == (problem is not None), printed
    assert printed.startswith(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB (C")
    if problem is not None:
        assert re.search(problem, printed), printed


def test_a_release_names_what_blocks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "said", lambda *words: "v1.2.3" if "tag" in words else "")
    project, changes = tmp_path / "pyproject.toml", tmp_path / "CHANGELOG.md"
    project.write_text('version = "1.2.3"\n[project.urls]\nRepository = "somewhere"\n')
    changes.write_text("## [1.2.3] – 2026-11-22\n\n## [1.2.2] – 2026-01-01\n")
    assert release.blockers() == ("1.2.3", [])
    changes.write_text("## [1.2.3] – unreleased\n")
    assert release.blockers()[1] == ["CHANGELOG.md has no date for 1.2.3: unreleased"]
    changes.write_text("## [1.2.2] – 2026-11-22\n")
    says = "CHANGELOG.md's newest version is 1.2.2; pyproject.toml's is 1.2.3"
    assert release.blockers()[1] == [says]
    monkeypatch.setattr(release, "said", lambda *words: " M file" if "status" in words else "")
    problems = "; ".join(release.blockers()[1])
    assert "not committed" in problems and "no tag v1.2.3" in problems


def test_a_release_does_not_write_over_another(tmp_path: Path) -> None:
    (tmp_path / "hotcore_int8-0.1.0.tar.gz").touch()
    done = ran(sys.executable, ROOT / "scripts/release.py", "--out", tmp_path)
    assert done.returncode != 0 and "is not empty" in done.stderr


def test_the_changelog_has_the_version() -> None:
    assert not [text for text in release.blockers()[1] if "newest version" in text]


def test_a_release_has_one_list_of_architectures() -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    (preset,) = [row for row in presets if row["name"] == "release"]
    archs = preset["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"]
    assert archs == release.RELEASE_ARCHS
    for path in ("cmake/HotCudaFind.cmake", "cmake/cibuildwheel-cuda.toml"):
        assert f'"{archs}"' in (ROOT / path).read_text(), path


def test_the_page_of_the_package_has_no_relative_links() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text()
    assert "](docs/quickstart.md" in text
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert "`docs/torch.md`" in text and "](https://arxiv.org/" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_scripts_install_nothing_unasked(tmp_path: Path) -> None:
    # An apt-get on the path would record calls, as root or not.
    apt = tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    apt.chmod(0o755)

    def need(**environment: str) -> tuple[int, str]:
        code = f". {ROOT}/scripts/env.sh; id() {{ echo 0; }}; hot_env_need g++ python3-dev"
        done = ran("bash", "-c", code, env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment})
        return done.returncode, done.stderr

    code, said = need()
    assert code == 1 and "please run: sudo apt-get install g++ python3-dev" in said
    assert not (tmp_path / "called").exists()
    code, _ = need(HOT_APT="1")
    assert code == 0
    assert "install -y" in (tmp_path / "called").read_text()


def test_citations_name_the_version() -> None:
    version = ""
    for path, pattern in (
        ("pyproject.toml", r'^version = "([^"]+)"'),
        ("CITATION.cff", r"^version: (\S+)$"),
        ("docs/paper.md", r"^ +version = \{([^}]+)\}"),
    ):
        (found,) = re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        version = version or found
        assert found == version, path


def test_the_words_that_may_begin_a_sentence() -> None:
    faults = script("check_words").faults
    text = "Of x.\n\nArgs:\n    a: As b. It is.\n    c: d.\n\nWhether y.\n\n    Of --code"
    words = [fault.split('"')[1] for _, fault in faults(text, 1, False, False)]
    assert words == ["Of", "As", "Whether"]
    assert not list(faults("Whether y.", 1, True, False)) and list(faults("a " * 26, 1, True, True))
