"""CMake finds compilers, GPUs and CUTLASS, and its messages say what is missing."""

import os
import pty
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ran

ROOT = Path(__file__).resolve().parents[2]
FOUND = shutil.which("cmake")
pytestmark = pytest.mark.skipif(FOUND is None, reason="needs cmake")

KNOWN = "75 80 86 87 89 90 100 103 120 121"  # nvcc 13's list
RELEASE = "80-real;86-real;89-real;90a-real;100-real;120-real;120-virtual"
UNKNOWN = "80-real;80-virtual"  # runs on every GPU
BROKEN = "echo 'unsupported GNU version' >&2; exit 1"


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


SCRIPT = f'cmake_minimum_required(VERSION 3.24)\ninclude("{ROOT}/cmake/HotCudaFind.cmake")\n'


class Machine:
    """A folder that stands for a machine: a build finds only what is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(root)}
        self.options = {"hot_cuda_default": root / "none", "hot_driver_file": root / "nvidiactl"}

    def gpus(self, *capabilities: str) -> None:
        lines = "".join(f"echo {capability}\n" for capability in capabilities)
        program(self.bin / "nvidia-smi", f'[ "$1" = --query-gpu=compute_cap ] || exit 1\n{lines}')
        (self.root / "nvidiactl").touch()

    def cmake(self, *words: str | Path) -> tuple[int, str]:
        options = (f"-D{name}={value}" for name, value in self.options.items())
        done = ran(FOUND, *options, *words, env=self.environment)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def configure(self, body: str, fails: bool = False) -> str:
        """Output of a project with these commands, and hotcore's modules on the path."""
        source = self.root / "source"
        source.mkdir(exist_ok=True)
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.24)\nproject(probe LANGUAGES NONE)\n"
            f'list(APPEND CMAKE_MODULE_PATH "{ROOT}/cmake")\n{body}\n'
        )
        program(self.bin / "make", "exit 1")  # the build only looks for it
        code, said = self.cmake("-S", source, "-B", self.root / "build", "-G", "Unix Makefiles")
        assert (code != 0) == fails, said
        return said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    result = Machine(tmp_path)
    for path in ("/usr/bin/nvcc", "/usr/bin/nvidia-smi", "/bin/nvcc", "/bin/nvidia-smi"):
        if os.path.exists(path):  # cannot be hidden
            pytest.skip(f"{path} is there")
    return result


def test_no_compiler_and_no_gpu_builds_for_the_cpu(machine: Machine) -> None:
    said = machine.configure('include(HotCuda)\nmessage(STATUS "built: ${HOT_CUDA_BUILT}")')
    assert "built: OFF" in said
    assert "CUDA backend OFF (no CUDA compiler: looked in CUDACXX (not set), CUDA_HOME" in said
    machine.options["HOT_CUDA"] = "ON"
    said = machine.configure("include(HotCuda)", fails=True)
    assert "HOT_CUDA=ON, but: no CUDA compiler" in said


@pytest.mark.parametrize("sign", ["driver", "nvidia-smi"])
def test_a_gpu_without_a_compiler_stops_the_build(machine: Machine, sign: str) -> None:
    if sign == "driver":
        (machine.root / "nvidiactl").touch()
    else:
        machine.gpus("9.0")
    said = machine.configure("include(HotCuda)", fails=True)
    assert "this machine has a GPU" in said and "HOT_CUDA=OFF pip install" in said
    assert ("compute capability 9.0" in said) == (sign == "nvidia-smi")
    machine.options["HOT_CUDA"] = "OFF"
    assert "CUDA backend OFF (HOT_CUDA=OFF)" in machine.configure("include(HotCuda)")


def test_a_compiler_that_fails_stops_the_build(machine: Machine) -> None:
    nvcc = program(machine.bin / "nvcc", BROKEN)
    for _ in range(2):  # the first result is not cached
        said = machine.configure("include(HotCuda)", fails=True)
        assert f"the CUDA compiler {nvcc} (from PATH) cannot compile" in said
        assert "unsupported GNU version" in said and "HOT_CUDA=OFF pip install" in said


def test_the_order_in_which_a_compiler_is_looked_for(machine: Machine) -> None:
    places = {
        "default": program(machine.root / "default/bin/nvcc", BROKEN),
        "PATH": program(machine.bin / "nvcc", BROKEN),
        "CUDA_PATH": program(machine.root / "path/bin/nvcc", BROKEN),
        "CUDA_HOME": program(machine.root / "home/bin/nvcc", BROKEN),
        "CUDACXX": program(machine.root / "cxx/compiler", BROKEN),
    }
    places["PATH"].rename(machine.root / "hidden")
    script = machine.root / "find.cmake"
    script.write_text(
        f'{SCRIPT}hot_find_cuda_compiler(found from)\nmessage("found: ${{found}} from: ${{from}}.")'
    )
    machine.options["hot_cuda_default"] = machine.root / "default"
    machine.environment["CUDA_HOME"] = str(machine.root / "empty")  # no toolkit there: skipped
    # Each step adds a place that precedes the previous ones.
    for place, compiler in places.items():
        if place == "PATH":
            (machine.root / "hidden").rename(compiler)
        elif place != "default":
            folder = compiler if place == "CUDACXX" else compiler.parent.parent
            machine.environment[place] = str(folder)
        name = str(machine.root / "default") if place == "default" else place
        code, said = machine.cmake("-P", script)
        assert (code, said) == (0, f"found: {compiler} from: {name}.")


@pytest.mark.parametrize(
    ("gpus", "known", "archs"),
    [
        ([], KNOWN, UNKNOWN),
        (["9.0", "9.0"], KNOWN, "90a-real"),
        (["8.0"], KNOWN, "80-real"),
        (["8.9", "10.0"], KNOWN, "89-real;100-real"),
        (["12.0"], KNOWN, "120-real"),
        (["7.5", "8.6"], KNOWN, "86-real"),
        (["7.5"], KNOWN, ""),
        # a compiler that does not know the GPU yet: PTX of the newest
        (["13.0"], KNOWN, "121-virtual"),
        (["12.0"], "80 86 89 90", "90-virtual"),
        ([], "80 86 89 90", UNKNOWN),
        ([], "", UNKNOWN),  # clang++ says nothing
    ],
)
def test_architectures_are_those_of_the_gpus(
    machine: Machine, gpus: list[str], known: str, archs: str
) -> None:
    codes = "".join(f"echo sm_{code}\n" for code in known.split())
    nvcc = program(machine.bin / "nvcc", f'[ "$1" = --list-gpu-code ] || exit 1\n{codes}')
    if gpus:
        machine.gpus(*gpus)
    script = machine.root / "choose.cmake"
    script.write_text(
        f"{SCRIPT}hot_find_gpus(gpus sign)\n"
        f'hot_choose_archs("{nvcc}" "${{gpus}}" archs why)\n'
        'message("archs: ${archs}. why: ${why}.")'
    )
    code, said = machine.cmake("-P", script)
    assert code == 0, said
    assert said.startswith(f"archs: {archs}. why: "), said
    assert ("7.5" in said) == (gpus == ["7.5"])


SUMMARY = """
set(HOT_CUDA_BUILT {cuda})
set(HOT_WGMMA_BUILT {wgmma})
set(hot_cuda_why "no CUDA compiler")
set(hot_wgmma_why "90a is not among the architectures")
set(CMAKE_CUDA_ARCHITECTURES {archs})
set(hot_archs_why "for a reason")
include(HotCudaFind)
include(HotSummary)
hot_build_summary(text 2)
message("for two: ${{text}}")
"""


def test_openmp_waits_passively_beside_other_processes() -> None:
    script = f"source {ROOT}/scripts/env.sh; "
    script += "cut() { echo $LOAD; }; hot_env_busy; echo $OMP_WAIT_POLICY"
    for load, policy in (("0.50", ""), ("9999.5", "passive")):
        done = ran("bash", "-c", script, env={"PATH": os.environ["PATH"], "LOAD": load})
        assert (done.returncode, done.stdout.strip()) == (0, policy)
        assert (load in done.stderr) == bool(policy)


def minutes(said: str) -> int:
    return int(re.findall(r"This takes \d+ to (\d+) minutes on", said)[-1])


def test_the_summary_says_what_is_built_how_long_and_the_switch(machine: Machine) -> None:
    said = machine.configure(SUMMARY.format(cuda="OFF", wgmma="OFF", archs=""))
    assert "-- hotcore: building for the CPU alone (no CUDA compiler). This takes" in said
    said = said.partition("for two: ")[2]
    assert "on 2 cores. To change it: HOT_CUDA=ON" in said
    cpu = minutes(said)

    said = machine.configure(SUMMARY.format(cuda="ON", wgmma="OFF", archs="80-real 80-virtual"))
    said = said.partition("for two: ")[2]
    assert "CPU and CUDA. Architectures: 80-real, 80-virtual (for a reason). Without the" in said
    assert "90a is not among the architectures" in said
    for switch in ("CUDAARCHS=90a-real", f'CUDAARCHS="{RELEASE}"', "HOT_CUDA=OFF"):
        assert switch in said
    two = minutes(said)
    said = machine.configure(SUMMARY.format(cuda="ON", wgmma="OFF", archs="80"))
    assert minutes(said.partition("for two: ")[2]) == two  # the short form

    said = machine.configure(SUMMARY.format(cuda="ON", wgmma="ON", archs=f'"{RELEASE}"'))
    said = said.partition("for two: ")[2]
    assert "With the wgmma kernels" in said and cpu < two < minutes(said)


def on_a_terminal(call: Callable[[], int]) -> tuple[int, bytes]:
    """Status of ``call`` in a process with a terminal of its own, and what that shows."""
    process, terminal = pty.fork()
    if process == 0:
        code = 1
        try:
            code = call()
        finally:
            os._exit(code)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # EIO: its other end was closed
        pass
    status = os.waitpid(process, 0)[1]
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), shown


@pytest.mark.parametrize("by_pip", [True, False])
def test_a_build_by_pip_says_it_on_the_terminal(machine: Machine, by_pip: bool) -> None:
    # pip runs CMake like this: pip takes the output, but the terminal is still the user's.
    if by_pip:
        machine.options["SKBUILD"] = "2"
    source = machine.root / "source"

    def configure() -> int:
        said = machine.configure(SUMMARY.format(cuda="OFF", wgmma="OFF", archs=""))
        (source / "said").write_text(said)
        return 0

    code, shown = on_a_terminal(configure)
    assert code == 0
    line = b"hotcore: building for the CPU alone (no CUDA compiler). This takes"
    assert (line in shown) == by_pip and line.decode() in (source / "said").read_text()


def test_a_build_shows_on_the_terminal_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text(
        "build all: phony\n" + "build a.o: CXX_COMPILER__hot_Release a.cpp\n" * 37
    )
    words = ["sh", ROOT / "cmake/progress.sh"]

    def build() -> int:
        for command in (*["true"] * 20, "exit 3", *["true"] * 17):
            done = ran(*words, "sh", "-c", command, cwd=tmp_path)
            assert done.returncode == (3 if command == "exit 3" else 0)
            assert done.stdout + done.stderr == ""
        return 0

    code, shown = on_a_terminal(build)
    assert code == 0
    steps = [int(n) for n in re.findall(rb"hotcore: (\d+) of 37 files compiled\r\n", shown)]
    assert steps == [4, 8, 12, 15, 19, 23, 26, 30, 34, 37]
    # The command also runs without a terminal.
    done = ran(*words, "true", cwd=tmp_path, start_new_session=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_machine_without_a_compiler(machine: Machine) -> None:
    program(machine.bin / "make", "exit 1")  # the build only looks for it
    machine.environment["PATH"] = str(machine.bin)
    machine.options |= {"CMAKE_FIND_USE_CMAKE_SYSTEM_PATH": "OFF", "HOT_CUDA": "OFF"}
    code, said = machine.cmake("-S", ROOT, "-B", machine.root / "build", "-G", "Unix Makefiles")
    assert code != 0
    assert "hotcore: no C++ compiler was found" in said and "apt-get install g++" in said
    assert "CMAKE_CXX_COMPILER" not in said  # not CMake's message


@pytest.mark.parametrize(
    ("compiler", "problem"),
    [("set(CMAKE_CXX_COMPILER_ID GNU)\nset(CMAKE_CXX_COMPILER_VERSION 10.2.1)",
      "GCC 10.2.1 (/usr/bin/true) stops with an internal error; use GCC 11 or newer"),
     ("set(CMAKE_CXX_COMPILER_ID Clang)\nset(MSVC 1)",
      "/usr/bin/true takes the options of Microsoft's compiler")],
)  # fmt: skip
def test_a_compiler_that_cannot_build(machine: Machine, compiler: str, problem: str) -> None:
    body = f"{compiler}\nset(CMAKE_CXX_COMPILER /usr/bin/true)\nmacro(enable_language)\nendmacro()"
    body = f"set(CMAKE_CXX_COMPILER_FORCED ON)\n{body}\ninclude(HotCompiler)"
    assert problem in machine.configure(body, fails=True)


def test_a_python_without_headers(machine: Machine) -> None:
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    (machine.root / "include").mkdir()
    machine.options |= {
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": machine.root / "include",  # scikit-build-core's wording
        "HOT_CUDA": "OFF",
        "HOT_BUILD_PYTHON": "ON",
        "HOT_BUILD_TESTS": "OFF",
    }
    make = shutil.which("make") or shutil.which("ninja")
    if make is None:
        pytest.skip("needs make or ninja")
    kind = "Ninja" if make.endswith("ninja") else "Unix Makefiles"
    machine.options["CMAKE_MAKE_PROGRAM"] = make
    code, said = machine.cmake("-S", ROOT, "-B", machine.root / "build", "-G", kind)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert code != 0
    assert f"hotcore: the headers of Python {version}" in said
    assert f"apt-get install python{version}-dev" in said


CUTLASS = """
set(HOT_CUDA_BUILT ON)
set(CMAKE_CUDA_ARCHITECTURES {archs})
include(HotCutlass)
message(STATUS "wgmma: ${{HOT_WGMMA_BUILT}}")
"""
FETCHED = """
import pathlib
version = pathlib.Path(__file__).parents[1] / "third_party/cutlass/include/cutlass/version.h"
version.parent.mkdir(parents=True)
version.write_text("".join(f"#define CUTLASS_{p} {n}\\n" for p, n in
                   (("MAJOR", 4), ("MINOR", 2), ("PATCH", 0))))
"""


def test_cutlass_is_fetched_for_sm_90a(machine: Machine) -> None:
    script = machine.root / "source/scripts/fetch_cutlass.py"
    script.parent.mkdir(parents=True)
    script.write_text(FETCHED)
    for archs in ("80-real", "80-real;100-real"):  # these architectures do not use it
        said = machine.configure(CUTLASS.format(archs=f'"{archs}"'))
        assert "wgmma: OFF" in said and "fetching" not in said, said
    said = machine.configure(CUTLASS.format(archs='"80-real;90a-real"'))
    for words in ("fetching the CUTLASS headers", "CUTLASS 4.2.0", "wgmma: ON"):
        assert words in said, said
    said = machine.configure(CUTLASS.format(archs="90a-real"))
    assert "fetching" not in said and "wgmma: ON" in said, said


def test_cutlass_that_cannot_be_fetched_stops_the_build(machine: Machine) -> None:
    # The real script, without a network.
    source = machine.root / "source"
    (source / "third_party").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", source / "scripts")
    machine.environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    said = machine.configure(CUTLASS.format(archs="90a-real"), fails=True)
    assert f"python3 {source}/scripts/fetch_cutlass.py" in said
    assert "HOT_CUTLASS=OFF pip install" in said
    assert not list((source / "third_party").iterdir())  # no partial file
    machine.options["HOT_CUTLASS"] = "OFF"
    assert "wgmma: OFF" in machine.configure(CUTLASS.format(archs="90a-real"))
    machine.options |= {"HOT_CUTLASS": "AUTO", "HOT_CUTLASS_DIR": machine.root}
    said = machine.configure(CUTLASS.format(archs="90a-real"), fails=True)
    assert "holds no include/cutlass/version.h" in said
