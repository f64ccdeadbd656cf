"""Types of the package for type checkers and editors: mypy on a small file."""

import re
from pathlib import Path
from typing import get_args

import hotcore
import pytest
from hotcore import _core
from hotcore.config import RecipeName

api = pytest.importorskip("mypy.api")

# Code and mypy's message for the line: a type, a part of an error, or none.
LINES = [
    ('reveal_type(hotcore.HotConfig.recipe("fast").basis)',
     "'full'.*'lowpass'.*'sequency'.*'sketch'"),
    ("reveal_type(hotcore.HotConfig().gx_bits)", r"Literal\[4\].*Literal\[8\]|Literal\[4, 8\]"),
    ("reveal_type(hotcore.HotConfig().name)", "'accurate'.*'custom'"),
    ('hotcore.HotConfig.recipe("quick")', "incompatible type"),
    ('hotcore.HotConfig.recipe("fast", gx_bit=4)', 'Unexpected keyword argument "gx_bit"'),
    ('hotcore.HotConfig.recipe("fast", rank=4, token_grid=(4, 4))', ""),
    ('hotcore.HotConfig(basis="high")', "incompatible type"),
    ('hotcore.hla(x, basis="sketsh")', "incompatible type"),
    ("reveal_type(hotcore.backward_linear(x, x, x).gb)", "None"),
    ('reveal_type(hotcore.backward_linear(x, x, x, need="gw").gw)', "Any"),
    ('reveal_type(hotcore.backward_linear(x, x, x, need="gw").gx)', "None"),
    ('reveal_type(hotcore.backward_linear(x, x, x, need=("gx", "gw", "gb")).gb)', "Any"),
    ("reveal_type(hotcore.backward_linear(x, x, x, need=some).gx)", r"Any \| None"),
    ('hotcore.backward_linear(x, x, x, need="wg")', "expected.*gx.*gw.*gb"),
    ("reveal_type(hotcore.quantize_forward_input(x))", r'"hotcore\.saved\.QuantizedInput"'),
    ("reveal_type(hotcore.quantize_forward_input(x, keep=True))",
     r"tuple\[hotcore\.saved\.QuantizedInput, hotcore\.saved\.Saved\]"),
    ("hotcore.forward_linear(hotcore.quantize_forward_input(x), x)", ""),
    ('hot.convert(model, "fast", overrides={"head": None, "*": {"gx_bits": 4}})', ""),
    ("reveal_type(hot.convert(hot.HotLinear(64, 64)))", "HotLinear"),
    ('hot.convert(model, "quick")', "incompatible type"),
    ('hot.convert(model, "fast", forward="int8")', ""),
    ('hot.convert(model, forward="int9")', "incompatible type"),
    ("hot.convert(model, saved=8)", 'Unexpected keyword argument "saved"'),
    ("reveal_type(hot.report(model))", r"ConversionReport"),
    ("hot.gradient_accumulation()", "no attribute"),
    ('hot.convert(model, overrides={"*": {"gx_bit": 4}})', "incompatible type"),
    ('hot.HotLinear(64, 64, config="quick")', "incompatible type"),
    ("paper.PrecisionSchedule(model, 10, bits=6)", "incompatible type"),
]  # fmt: skip
HEAD = """from typing import Any, Literal
import hotcore
import hotcore.torch as hot
from hotcore import paper
x: Any = 0
model: Any = 0
some: set[Literal["gx", "gw"]] = {"gx"}
"""


def test_what_mypy_knows(tmp_path: Path) -> None:
    script, settings = tmp_path / "uses.py", tmp_path / "mypy.ini"
    script.write_text(HEAD + "".join(f"{code}\n" for code, _ in LINES))
    # torch and numpy are Any here: they would take mypy half a minute.
    skipped = "follow_imports = skip\nfollow_imports_for_stubs = True\n"
    settings.write_text(f"[mypy]\n[mypy-torch.*,numpy.*]\n{skipped}")
    package = Path(hotcore.__file__).parent
    options = ["--config-file", str(settings), "--cache-dir", str(tmp_path / "cache")]
    with pytest.MonkeyPatch.context() as patch:
        if package.parent.name != "site-packages":  # mypy finds site-packages without a path
            patch.setenv("MYPYPATH", str(package.parent))
        printed, errors, _ = api.run([*options, str(script)])
    assert not errors, errors
    said: dict[int, str] = {}
    for number, text in re.findall(r"^\S*uses\.py:(\d+): (.*)$", printed, re.MULTILINE):
        said[int(number)] = said.get(int(number), "") + text
    first = HEAD.count("\n") + 1
    for number, (code, expected) in enumerate(LINES, first):
        if expected:
            assert re.search(expected, said.pop(number, "")), f"{code}\n{printed}"
    assert not said, said


def test_the_names_of_recipes_are_those_of_libhot() -> None:
    assert list(get_args(RecipeName)) == _core.recipe_names()
