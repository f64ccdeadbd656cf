"""One stage, one name: header, CPU backend, Python tests and C functions mirror each other."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from c_api import prototypes

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "cpp" / "include" / "hot"
CPU = ROOT / "cpp" / "src" / "cpu"
PYTHON_TESTS = ROOT / "tests" / "python"

# Headers that are no stage, and stages composed of others: a backend has no file for them, or one
# that only calls the others. Tests elsewhere: explain in test_plan, hot_c in test_c_api, memory in
# test_docs_cpp and the consumer.
NO_STAGE = {"api", "context", "device", "error", "explain", "hot", "hot_c", "memory", "tensor"}
COMPOSED = {"backward_linear", "forward_linear"}

STAGES = sorted(path.stem for path in HEADERS.glob("*.h") if path.stem not in NO_STAGE)


def test_the_stages_are_known() -> None:
    single = {"blocks", "gemm", "hadamard", "lowrank", "pack", "quantize", "weight_int4"}
    assert sorted(COMPOSED | single) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_files(stage: str) -> None:
    assert (HEADERS / f"{stage}.h").exists()
    if stage not in COMPOSED:
        assert (CPU / f"{stage}.cpp").exists()
    assert (PYTHON_TESTS / f"test_{stage}.py").exists()


def functions() -> Iterator[tuple[str, str]]:
    """Yield each stage and its functions. Names of enumerators are no calls."""
    for stage in STAGES:
        text = (HEADERS / f"{stage}.h").read_text()
        for name in re.findall(r"^HOT_API [\w:<>* ]+?(\w+)\(", text, re.MULTILINE):
            if not name.endswith("_name"):
                yield stage, name


def test_every_public_function_is_bound() -> None:
    bound = (ROOT / "python" / "bindings" / "ops.cpp").read_text()
    for stage, name in functions():
        assert f'm.def("{name}"' in bound or name == "scale_count", f"{name} of {stage}.h"


# C functions with another name. C needs no functions for hot_saved, hot_weight and hot_input: the
# library fills them.
IN_C = {
    "saved_layout": "hot_saved_layout_of",
    "recipe": "hot_spec_recipe",
    "recipe_names": "hot_recipe_name",
    **dict.fromkeys(("saved_format", "weight_format", "forward_weight_format")),
    **dict.fromkeys(("forward_input_format", "weight_int4_format", "scale_count")),
}


def test_every_public_function_has_a_c_function() -> None:
    declared = {*prototypes(), None}
    for stage, name in functions():
        assert IN_C.get(name, f"hot_{name}") in declared, f"{name} of {stage}.h"
