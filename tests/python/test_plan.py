"""Plans of CUDA calls, as hotcore.explain returns them; no GPU is needed."""

import sys
from typing import Any

import hotcore
import pytest
from hotcore import HotConfig, _core, info
from hotcore.plans import Explanation
from support import ran, refused


def explain(*shape: int, **options: Any) -> Explanation:
    """Explain with the wgmma kernels, also in a build without them."""
    return hotcore.explain(*shape, **{"wgmma": True, **options})


# tests/cpp/test_plan.cpp has tables of each layer's kernels. It checks that the steps' reads and
# writes fit together, and that every kernel is in some plan.


def test_steps_of_a_layer() -> None:
    plan = explain(197, 768, 64, dtype="bfloat16", device="sm_90")
    kernels = [step.kernel for step in plan.steps]
    assert kernels == ["group_quads_kernel", "quantize_grouped_kernel", "gemm_small_kernel"]
    assert [step.call for step in plan.steps] == ["compress_activation", *2 * ["backward_linear"]]
    first, second, last = plan.steps
    assert (first.reads, first.writes) == (("x",), ("saved x",)) and first.file.endswith(".cu")
    assert {"g_y", "w", "saved x"} <= set(second.reads) and {"g_x", "g_w"} <= set(last.writes)


def test_steps_of_a_forward() -> None:
    """Plans of y: with floats, with w quantised ahead, and with x compressed in the same read."""
    config = HotConfig(forward="int8")
    options: dict[str, Any] = {"config": config, "device": "sm_90", "bias_dtype": "bfloat16"}
    plan = explain(4096, 4096, 14336, need="y", quantized_weight=True, **options)
    kernels = ("rows16_kernel", "rows16_kernel", "widen_kernel", "wgmma 128x256")
    assert tuple(step.kernel for step in plan.steps) == kernels
    whole = {step.call for step in explain(197, 768, 64, **options).steps}
    assert {"forward_linear", "backward_linear"} <= whole
    both = explain(25216, 64, 768, need=("y", "x"), **options)
    (step,) = (step for step in both.steps if "x" in step.reads)
    assert (step.call, step.kernel) == ("quantize_forward_input", "rows_groups_kernel")
    assert step.bytes_read == 2 * 25216 * 768
    alone = explain(25216, 64, 768, need="x", **options)
    assert {step.call for step in alone.steps} == {"compress_activation"}
    slow = explain(6000, 64, 777, need=("y", "x"), **options).slow
    why = "x is read again to be kept: in_features 777 is not a multiple of 4"
    assert any(why in reason for reason in slow), slow


def test_what_libhot_says_is_passed_on() -> None:
    """tests/cpp/test_plan.cpp has the texts and numbers."""
    shape = (25216, 3072, 768)
    b200 = explain(*shape, device="sm_100")
    assert b200.lacks == ("cluster", "dependent-launch", "bulk-copy", "tcgen05")
    assert "mma.sync: this build has no tcgen05 kernels for sm_100" in b200.slow
    assert explain(*shape, device="sm_90", wgmma=False).lacks == ("wgmma",)
    plan = explain(*shape, need=("gx", "gw"))
    assert (plan.gy_passes, plan.operations) == (2, 2 * 2 * 25216 * 3072 * 768)
    assert plan.bytes_read == sum(step.bytes_read for step in plan.steps)
    assert 1e6 * plan.operations / 1450e12 < plan.floor_us < 400
    assert str(plan) == plan.text and "g_y is read 2 times" in plan.text
    assert explain(*shape, need="x").operations == 0
    sizes, groups = explain(*shape, HotConfig(equalize_tokens=True)).steps[:2]
    assert (sizes.kernel, groups.kernel) == ("token_exponents_kernel", "groups_kernel")
    assert (sizes.bytes_read, sizes.bytes_written) == (25216 * 768 * 2, 25216)
    assert groups.bytes_read == 25216 * 768 * 2 + 25216 and "sizes of tokens" in groups.reads
    for options, why in (
        ({"wgmma": True}, ""),
        ({"wgmma": False}, "no wgmma kernels"),
        ({"int4": True, "device": "sm_120"}, "no INT4 units at full speed on sm_120"),
    ):
        product = hotcore.explain_gemm(256, 256, 512, **options)
        assert product.operations == 2 * 256 * 256 * 512
        assert why in "".join(product.slow) and bool(product.slow) == bool(why)


def test_what_cannot_be_explained_is_refused() -> None:
    for options, message in (
        *(({"device": device}, "device") for device in ("sm_70", "cpu", "cuda:x")),
        *(({size: -1}, f"^{size}: ") for size in ("tokens", "out_features", "in_features")),
        ({"need": ()}, "need: expected at least one of"),
        ({"need": ("gx", "w")}, "need: 'w'"),
        ({"dtype": "int8"}, "dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            hotcore.explain(**{"tokens": 64, "out_features": 64, "in_features": 64, **options})
    if not _core.built_with_cuda():
        with pytest.raises(NotImplementedError, match="no CUDA backend"):
            hotcore.explain(64, 64, 64, device="cuda")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    done = ran(sys.executable, "-m", "hotcore.info", "--explain", 25216, 3072, 768)
    assert done.stdout == hotcore.explain(25216, 3072, 768).text
    assert info.main(["--explain", "64", "32", "16", "--device", "sm_80", "--recipe", "fast"]) == 0
    expected = hotcore.explain(64, 32, 16, "fast", device="sm_80").text
    assert capsys.readouterr().out == expected
    command = ["--explain", "64", "32", "16", "--device", "sm_80", "--forward", "int8"]
    assert info.main(command) == 0
    printed = capsys.readouterr().out
    config = HotConfig(forward="int8")
    assert printed == hotcore.explain(64, 32, 16, config, device="sm_80").text
    assert "forward_linear" in printed
    for wrong in ("--explain 64 32 16 --device sm_1", "--device sm_90",
                  "--explain 1 1 1 --forward fp8", "--forward int8"):  # fmt: skip
        refused(info.main, "2", SystemExit, wrong.split())
