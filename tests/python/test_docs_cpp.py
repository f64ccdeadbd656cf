"""The C++, C and CMake of docs/cpp.md, and the README's C++, build and run unchanged."""

import re
from pathlib import Path

import hotcore
import numpy as np
import pytest
from cpp_projects import INSTALLED, ROOT, build, run, tool

AROUND_THE_README = """
#include <hot/hot.h>
int main() {
  const std::int64_t L = 32, I = 64, O = 48;
  hot::Tensor x(hot::DType::f32, {L, I}), w(hot::DType::f32, {O, I}), gy(hot::DType::f32, {L, O});
  hot::Tensor gx(hot::DType::f32, {L, I}), gw(hot::DType::f32, {O, I}), gb(hot::DType::f32, {O});
  const hot::BackwardLinearSpec spec = hot::recipe("default");
  const hot::Context context = hot::Context::cpu();
  hot::ScratchBuffer scratch;
  hot::SavedBuffer saved;
"""
PAGE = (ROOT / "docs" / "cpp.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Code blocks of the page; blank lines in front give errors the page's line numbers."""
    matches = re.finditer(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [f'#line {PAGE[: m.start(1)].count(chr(10)) + 1} "cpp.md"\n{m[1]}' for m in matches]


@pytest.mark.long
def test_programs_build_and_run(tmp_path: Path) -> None:
    programs = {"cpp": blocks("cpp"), "c": blocks("c")}
    assert [len(found) for found in programs.values()] == [3, 1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines_of_readme,) = re.findall(r"^```cpp\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    programs["cpp"].append(f"{AROUND_THE_README}{lines_of_readme}}}\n")
    (project,) = re.findall(r"^```cmake\n(find_package.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = ["cmake_minimum_required(VERSION 3.24)", "project(page LANGUAGES C CXX)"]
    lines += ["set(CMAKE_C_STANDARD 99)", "set(CMAKE_C_EXTENSIONS OFF)"]
    lines += ["add_compile_options(-Wall -Wextra -Werror -pedantic)"]
    names = []
    for language, texts in programs.items():
        for i, text in enumerate(texts):
            names.append(f"{language}{i}")
            (tmp_path / f"{names[-1]}.{language}").write_text(text)
            lines.append(f"add_executable({names[-1]} {names[-1]}.{language})")
            lines.append(project.replace("trainer", names[-1]))
    (tmp_path / "CMakeLists.txt").write_text("\n".join(lines) + "\n")
    folder = build(tmp_path, tmp_path / "build")
    said = {name: run(folder / name) for name in names}
    assert re.fullmatch(r"x: 20480 bytes, kept: 2720\ng_w\[0\]: -?[\d.]+\n", said["cpp0"])
    assert said["cpp1"] == "refused: saved was made by compress_activation with another spec\n"
    assert said["cpp2"] == "codes: 8448 bytes, kept: 2720\n"
    assert re.fullmatch(r"g_w\[0\]: -?[\d.]+\n", said["c0"])
    assert said["cpp0"].splitlines()[1] == said["c0"].strip()  # the same layer, the same bits


def test_pkg_config_line(tmp_path: Path) -> None:
    (line,) = re.findall(r"^ *(c\+\+ .*pkg-config.*)$", PAGE, re.MULTILINE)
    tool("pkg-config"), tool("c++")
    if not (INSTALLED / "include").exists():
        pytest.skip(f"needs an installed hotcore; {INSTALLED} has no headers")
    (tmp_path / "trainer.cpp").write_text(blocks("cpp")[0])
    environment = {"PATH": "/usr/bin:/bin", "PKG_CONFIG_PATH": str(INSTALLED / "lib/pkgconfig")}
    # The program finds libhot by its rpath.
    run("sh", "-ec", f"{line} && ./trainer", cwd=tmp_path, env=environment)


def test_rust(tmp_path: Path) -> None:
    rustc = tool("rustc", str(Path.home() / ".cargo/bin/rustc"))
    (source,) = re.findall(r"^```rust\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "layer.rs").write_text(source)
    (library,) = (file for file in (INSTALLED / "lib").glob("libhot.so*") if not file.is_symlink())
    (tmp_path / "libhot.so").symlink_to(library)  # a wheel contains only the name with the soname
    (tmp_path / library.name).symlink_to(library)
    (line,) = re.findall(r"^(rustc .*?)(?: *#.*)?$", PAGE, re.MULTILINE)
    tools = f"{Path(rustc).parent}:/usr/bin:/bin"
    environment = {"PATH": tools, "HOME": str(Path.home()), "LIBHOT": str(tmp_path)}
    run("sh", "-ec", line, cwd=tmp_path, env=environment)
    said = run(tmp_path / "layer", env={})
    x, gy = (
        (np.arange(r * c, dtype=np.int64) ** 2 % 997).reshape(r, c).astype(np.float32) / 500 - 1
        for r, c in ((64, 80), (64, 48))
    )
    gw = hotcore.backward_linear(gy, None, x, need="gw", key=1).gw
    assert said == f"g_w[0]: {gw[0, 0]:.6f}\n"
