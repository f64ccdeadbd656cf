"""One stage, one name: header, CPU backend, C++ tests and Python tests mirror each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from c_api import prototypes

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "cpp" / "include" / "hot"
CPU = ROOT / "cpp" / "src" / "cpu"
CPP_TESTS = ROOT / "tests" / "cpp"
PYTHON_TESTS = ROOT / "tests" / "python"

# Headers that are no stage (of these explain is tested by test_plan, hot_c by test_c_api.py, memory
# by test_docs_cpp.py and the consumer), and stages that are composed of others: in a backend they
# have no file, or one that only calls the others.
INFRASTRUCTURE = {
    "api",
    "context",
    "device",
    "error",
    "explain",
    "hot",
    "hot_c",
    "memory",
    "tensor",
}
COMPOSED = {"backward_linear", "forward_linear"}

STAGES = sorted(path.stem for path in HEADERS.glob("*.h") if path.stem not in INFRASTRUCTURE)
# Tests of one backend's kernels (test_<stage>_cuda.cpp) and of the choice among them (plans) have
# no counterpart here, nor have those of an operator new that fails (test_faults.cpp) and of AMX's
# registers (test_gemm_amx.cpp).
ALONE = {"test_config_fields", "test_faults", "test_gemm_amx", "test_gemm_mma_plan", "test_plan"}
CPP_FILES = sorted(
    path.stem
    for path in CPP_TESTS.glob("test_*.cpp")
    if not path.stem.endswith("_cuda") and path.stem not in ALONE
)


def python_tests(stem: str) -> set[str]:
    """Names of the test functions of a Python test file, and of the tables of test_errors.py."""
    text = (PYTHON_TESTS / f"{stem}.py").read_text()
    tables = re.findall(r'^    "(\w+)": \[$', text, re.MULTILINE)
    return {*re.findall(r"^def (test_\w+)\(", text, re.MULTILINE), *(f"test_{t}" for t in tables)}


def cpp_tests(stem: str) -> list[tuple[str, str]]:
    """(suite, case) of a C++ test file."""
    text = (CPP_TESTS / f"{stem}.cpp").read_text()
    return re.findall(r"^\s*TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\s*\)", text, re.MULTILINE)


def test_the_stages_are_known() -> None:
    assert sorted(COMPOSED | {"gemm", "hadamard", "lowrank", "pack", "quantize"}) == STAGES
    assert set(CPP_FILES) >= {f"test_{stage}" for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_files(stage: str) -> None:
    assert (HEADERS / f"{stage}.h").exists()
    if stage not in COMPOSED:
        assert (CPU / f"{stage}.cpp").exists()
    assert (CPP_TESTS / f"test_{stage}.cpp").exists()
    assert (PYTHON_TESTS / f"test_{stage}.py").exists()


@pytest.mark.parametrize("stem", CPP_FILES)
def test_every_cpp_case_has_a_python_case(stem: str) -> None:
    cases = cpp_tests(stem)
    assert cases, f"{stem}.cpp holds no TEST"
    suite = "".join(part.capitalize() for part in stem.removeprefix("test_").split("_"))
    assert {name for name, _ in cases} == {suite}
    missing = {f"test_{case}" for _, case in cases} - python_tests(stem)
    assert not missing, f"tests/python/{stem}.py lacks {sorted(missing)}"


def test_every_public_function_is_bound() -> None:
    bound = (ROOT / "python" / "bindings" / "ops.cpp").read_text()
    for stage in STAGES:
        text = (HEADERS / f"{stage}.h").read_text()
        # A name of one enumerator is no call: Python passes the names themselves.
        for name in re.findall(r"^HOT_API [\w:<>* ]+?(\w+)\(", text, re.MULTILINE):
            if name.endswith("_name") or name == "scale_count":
                continue
            assert f'm.def("{name}"' in bound, f"{name} of {stage}.h"


# Functions of C that have another name, and what C needs no function for: a hot_saved, a hot_weight
# and a hot_input come filled in.
IN_C = {
    "saved_layout": "hot_saved_layout_of",
    "recipe": "hot_spec_recipe",
    "recipe_names": "hot_recipe_name",
    "saved_format": None,
    "weight_format": None,
    "forward_weight_format": None,
    "forward_input_format": None,
    "scale_count": None,
}


def test_every_public_function_has_a_c_function() -> None:
    declared = set(prototypes())
    for stage in STAGES:
        text = (HEADERS / f"{stage}.h").read_text()
        for name in re.findall(r"^HOT_API [\w:<>* ]+?(\w+)\(", text, re.MULTILINE):
            wanted = IN_C.get(name, f"hot_{name}")
            if wanted is not None and not name.endswith("_name"):
                assert wanted in declared, f"{name} of {stage}.h"
