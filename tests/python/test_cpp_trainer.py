"""examples/cpp_trainer on the CPU: it builds as its README section says, and it learns."""

import struct
import sys
from pathlib import Path

import pytest
from cpp_projects import TRAINER, build, check_curves, curves, run
from support import ran

pytest.importorskip("sklearn")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trainer")
    digits = folder / "digits.bin"
    run(sys.executable, TRAINER / "export_digits.py", digits)
    return build(TRAINER, folder / "build", TRAINER_CUDA="OFF") / "cpp_trainer", digits


@pytest.mark.parametrize("recipe", ["default", "fast"])
def test_learns_like_fp32(trainer: tuple[Path, Path], recipe: str) -> None:
    text = run(*trainer, "--epochs", 6, "--recipe", recipe)
    check_curves(curves(text))
    kept = [int(line.split()[-2]) for line in text.splitlines() if "kept for backward" in line]
    assert kept[0] == 4 * 128 * (64 + 128 + 128) and kept[1] <= 0.15 * kept[0]
    assert run(*trainer, "--epochs", 6, "--recipe", recipe) == text  # the same seed, the same bits


def test_errors(trainer: tuple[Path, Path], tmp_path: Path) -> None:
    program, digits = trainer
    short = digits.read_bytes()[:-1]
    cut, label, none, other = (tmp_path / f"{n}.bin" for n in ("cut", "label", "empty", "other"))
    cut.write_bytes(short)
    label.write_bytes(short + b"\x0a")  # once read beyond the logits
    none.write_bytes(b"DIGITS1\0" + struct.pack("<3I", 0, 64, 10))
    other.write_bytes(b"something else that is long enough")
    for words, message in (
        ([], "usage: cpp_trainer DIGITS"),
        ([tmp_path / "none.bin"], "none.bin: cannot be read"),
        ([cut], "cut.bin: is cut off"),
        ([label], "label.bin: label 10; expected less than 10"),
        ([none], "empty.bin: 0 digits of 64 features, 10 classes; expected 2 digits, a feature"),
        ([other], "other.bin: no file of export_digits.py"),
        ([digits, "--device", "tpu"], "--device: 'tpu'; expected cpu or cuda"),
        ([digits, "--device", "cuda"], "built without CUDA"),
        ([digits, "--recipe", "best"], "recipe: name is 'best'; expected one of 'default'"),
        ([digits, "--epochs", "0"], "--epochs: '0'; expected 1 to 10000"),
        ([digits, "--epochs", "3x"], "--epochs: '3x'"),
        ([digits, "--epochs"], "--epochs: a value is missing"),
        ([digits, "--speed", "1"], "unknown option: --speed"),
        ([digits, digits], "two files"),
    ):
        done = ran(program, *words)
        assert (done.returncode, done.stdout) == (1, "") and message in done.stderr
