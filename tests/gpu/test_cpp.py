"""C++ programs on a GPU: a consumer of the package and of a static libhot, and cpp_trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cpp_projects import CONSUMER, TRAINER, build, check_curves, curves, run
from hotcore import _core

pytestmark = pytest.mark.cuda
ARCHS = _core.cuda_architectures()


def test_consumer_of_the_package(tmp_path: Path) -> None:
    folder = build(CONSUMER, tmp_path, CONSUMER_CUDA="ON")
    assert "GPU: g_x and g_w as on the CPU" in run(folder / "consumer", "--cuda")
    run(folder / "consumer_c")


def test_consumer_of_a_static_library(tmp_path: Path) -> None:
    # Built here, inside the consumer; without CUTLASS, whose kernels take minutes.
    folder = build(
        CONSUMER,
        tmp_path / "build",
        HOTCORE_FROM="subdirectory",
        HOT_SHARED="OFF",
        HOT_INSTALL="ON",
        HOT_CUDA="ON",
        HOT_CUTLASS="OFF",
        CMAKE_CUDA_ARCHITECTURES=ARCHS,
        CONSUMER_CUDA="ON",
    )
    assert "GPU: g_x and g_w as on the CPU" in run(folder / "consumer", "--cuda")
    # And from a prefix, whose package has to name what a static libhot needs.
    prefix = tmp_path / "prefix"
    run("cmake", "--install", folder, "--prefix", prefix, "--component", "devel")
    other = build(CONSUMER, tmp_path / "other", CONSUMER_CUDA="ON", CMAKE_PREFIX_PATH=prefix)
    assert "GPU: g_x and g_w as on the CPU" in run(other / "consumer", "--cuda")


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    digits = tmp_path / "digits.bin"
    run(sys.executable, TRAINER / "export_digits.py", digits)
    folder = build(TRAINER, tmp_path / "build", TRAINER_CUDA="ON", CMAKE_CUDA_ARCHITECTURES=ARCHS)
    program = folder / "cpp_trainer"
    for recipe in ("default", "fast"):
        text = run(program, digits, "--epochs", 8, "--device", "cuda", "--recipe", recipe)
        assert "on cuda" in text
        check_curves(curves(text))
        on_cpu = curves(run(program, digits, "--epochs", 8, "--recipe", recipe))
        # The sums of fp32 go in another order; the integers are the same.
        assert abs(curves(text)[0][3] - on_cpu[0][3]) < 0.01
