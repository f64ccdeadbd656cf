"""Plans of CUDA calls, as hotcore.explain returns them; no GPU is needed."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hotcore
import numpy as np
import pytest
from hotcore import HotConfig, _core, info
from hotcore.plans import Explanation
from support import one_code

ROOT = Path(__file__).resolve().parents[2]
ONE_PASS, AMAX, CODES = "columns_one_pass_kernel", "column_amax_kernel", "column_codes_kernel"
GENERIC = (
    *("generic_columns_kernel, amax", "generic_columns_kernel, codes"),
    "finish_scales_kernel",
)
TOKEN_ROWS = ("sampled_tokens_kernel", "feature_sums_kernel", "token_rows_kernel")
CONTRIBUTIONS = ("token_transpose_kernel", "token_amax_kernel", "token_contributions_kernel")

# (tokens, out_features, in_features), configuration, dtype, kernels on an H200; as plan_cases.h.
LAYERS: list[tuple[tuple[int, int, int], HotConfig, str, tuple[str, ...]]] = [
    (
        (197, 768, 64),
        HotConfig.recipe("default"),
        "bfloat16",
        ("group_quads_kernel", "quantize_grouped_kernel", "gemm_small_kernel"),
    ),
    (
        (6000, 512, 768),
        HotConfig.recipe("fast"),
        "bfloat16",
        (ONE_PASS, "rows16_kernel", ONE_PASS, ONE_PASS, "wgmma 128x192", "wgmma 128x128"),
    ),
    (
        (16500, 768, 64),
        HotConfig.recipe("default"),
        "float32",
        ("groups_kernel", "memset", "rows16_kernel", AMAX, CODES, "final_sum_kernel", ONE_PASS)
        + ("requantize_kernel", "wgmma 128x192", "wgmma stream-K"),
    ),
    (
        (8400, 1024, 128),
        HotConfig.recipe("paper"),
        "bfloat16",
        ("memset", AMAX, CODES, "memset", "rows_column_amax_kernel", "rows16_kernel", CODES)
        + ("final_sum_kernel", AMAX, CODES, "wgmma 128x128", "spread_kernel", "wgmma stream-K"),
    ),
    (
        (196, 256, 128),
        HotConfig.recipe("paper"),
        "bfloat16",
        ("memset", AMAX, CODES, "quantize_grouped_kernel, amax", "quantize_grouped_kernel")
        + ("gemm_small_kernel",),
    ),
    (
        (160, 14336, 16),
        HotConfig.recipe("fast"),
        "bfloat16",
        (ONE_PASS, "rows16_kernel", ONE_PASS, ONE_PASS, "gemm_small_kernel"),
    ),
    (
        (1000, 96, 64),
        HotConfig.recipe("fast", hadamard_block=32),
        "bfloat16",
        (ONE_PASS, "memset", "rows_kernel", ONE_PASS, *GENERIC, "gemm_small_kernel"),
    ),
    (
        (300, 64, 48),
        HotConfig.recipe("fast", rank=4, gw_scale="token"),
        "float16",
        ("memset", *GENERIC, "memset", "rows16_kernel", *GENERIC, ONE_PASS, "gemm_small_kernel")
        + ("token_kernel", "partial_sum_kernel", "final_sum_kernel"),
    ),
    (
        (140000, 16, 16),
        HotConfig.recipe("default"),
        "bfloat16",
        (
            "group_quads_kernel",
            "memset",
            "rows_column_amax_kernel",
            CODES,
            "final_sum_kernel",
            ONE_PASS,
        )
        + ("requantize_kernel", "wgmma 128x192", "tile_kernel 64x64x64", "fixup_kernel"),
    ),
    (
        (6000, 512, 770),
        HotConfig.recipe("fast"),
        "bfloat16",
        (ONE_PASS, "rows16_kernel", ONE_PASS, ONE_PASS, "tile_kernel any", "tile_kernel any"),
    ),
    (
        (6000, 512, 768),
        HotConfig.recipe("compact"),
        "bfloat16",
        ("token_exponents_kernel", "rotate_kernel", "rows16_kernel", ONE_PASS, ONE_PASS)
        + ("requantize_rotated_kernel", "wgmma 128x192", "wgmma stream-K"),
    ),
    (
        (16500, 768, 64),
        HotConfig.recipe("default", storage="rht2"),
        "bfloat16",
        ("rotate_kernel", "memset", "rows16_kernel", AMAX, CODES, "final_sum_kernel", ONE_PASS)
        + ("requantize_rotated_kernel", "wgmma 128x192", "wgmma stream-K"),
    ),
    (
        (300, 64, 48),
        HotConfig.recipe("default", equalize_tokens=True),
        "bfloat16",
        ("token_exponents_kernel", "groups_kernel", "rows16_kernel", ONE_PASS, ONE_PASS)
        + ("requantize_kernel", "gemm_small_kernel"),
    ),
    (
        (300, 64, 48),
        HotConfig.recipe("fast", equalize_tokens=True),
        "bfloat16",
        ("token_exponents_kernel", "memset", *GENERIC, "memset", "rows16_kernel", *GENERIC)
        + (ONE_PASS, "gemm_small_kernel", "partial_sum_kernel", "final_sum_kernel"),
    ),
    (
        (16500, 768, 64),
        one_code("token4"),
        "bfloat16",
        (*TOKEN_ROWS, "memset", *TOKEN_ROWS, ONE_PASS, *CONTRIBUTIONS)
        + ("wgmma 128x192", "wgmma stream-K", "undo_transforms_kernel", "final_sum_kernel"),
    ),
    (
        (800, 200, 144),
        one_code("token2", basis="sketch", rank=8),
        "bfloat16",
        (*TOKEN_ROWS, "memset", *TOKEN_ROWS, *GENERIC, "draw_tokens_kernel", *CONTRIBUTIONS)
        + ("gemm_small_kernel", "undo_transforms_kernel", "final_sum_kernel"),
    ),
    (
        (40, 16400, 16),
        one_code("token8"),
        "float32",
        (*TOKEN_ROWS, "memset", *TOKEN_ROWS, AMAX, CODES, *CONTRIBUTIONS, "gemm_small_kernel")
        + ("undo_transforms_kernel", "partial_sum_kernel", "final_sum_kernel"),
    ),
    (
        (0, 64, 32),
        HotConfig.recipe("fast"),
        "bfloat16",
        ("memset", "finish_scales_kernel", "fill_zero_kernel", "final_sum_kernel"),
    ),
]


# (tokens, out_features, in_features), block, dtype, the bias', w quantised before, kernels.
FORWARDS: list[tuple[tuple[int, int, int], int, str, str, bool, tuple[str, ...]]] = [
    (
        *((25216, 3072, 768), 64, "bfloat16", "float32", False),
        ("rows16_kernel", "rows16_kernel", "wgmma 128x192"),
    ),
    (
        *((8192, 4096, 4096), 64, "bfloat16", "float32", True),
        ("rows16_kernel", "rows16_kernel", "wgmma 128x128"),
    ),
    (
        *((4096, 4096, 14336), 64, "bfloat16", "bfloat16", False),
        ("rows16_kernel", "rows16_kernel", "widen_kernel", "wgmma 128x128"),
    ),
    (
        *((197, 768, 768), 64, "float16", "float32", False),
        ("rows16_kernel", "rows16_kernel", "gemm_small_kernel"),
    ),
    (
        *((6000, 1000, 700), 32, "float32", "float32", False),
        ("rows_kernel", "rows_kernel", "wgmma 128x128"),
    ),
    (
        *((6000, 770, 512), 16, "bfloat16", "float32", False),
        ("rows16_kernel", "rows16_kernel", "tile_kernel any"),
    ),
    (
        *((40, 16, 0), 64, "bfloat16", "float32", False),
        ("rows16_kernel", "rows16_kernel", "tile_kernel 64x64x64"),
    ),
]


# The same where x is kept, too: (tokens, in_features), configuration, dtype, kernels of x (one: it
# is read once).
KEPT: list[tuple[tuple[int, int], HotConfig, str, tuple[str, ...]]] = [
    ((25216, 768), HotConfig(), "bfloat16", ("rows_groups_kernel",)),
    ((9000, 64), HotConfig(), "float16", ("rows_groups_kernel",)),
    ((6001, 3072), HotConfig(), "bfloat16", ("rows_groups_kernel",)),
    ((2048, 14336), HotConfig(), "bfloat16", ("rows_groups_kernel",)),
    ((1, 1024), HotConfig(), "bfloat16", ("rows_groups_kernel",)),
    ((6000, 772), HotConfig(), "bfloat16", ("rows_groups_kernel",)),
    ((600, 770), HotConfig(), "bfloat16", ("rows16_kernel", "groups_kernel")),
    ((6000, 768), HotConfig(), "float32", ("rows16_kernel", "groups_kernel")),
    (
        *((6000, 768), HotConfig.recipe("compact"), "bfloat16"),
        ("token_exponents_kernel", "rows16_kernel", "rotate_kernel"),
    ),
    ((6000, 768), HotConfig.recipe("fast"), "bfloat16", ("rows16_kernel", ONE_PASS)),
    (
        *((40000, 768), HotConfig.recipe("fast"), "bfloat16"),
        ("memset", "rows_column_amax_kernel", CODES),
    ),
]


def explain(*shape: int, **options: Any) -> Explanation:
    """With the wgmma kernels, whatever this build has."""
    return hotcore.explain(*shape, **{"wgmma": True, **options})


def any_layer(draw: random.Random) -> tuple[Explanation, dict[str, Any]]:
    shape = [draw.choice([0, 1, 64, 197, 770, 3136, 16500, draw.randint(1, 20000)]) for _ in "LOI"]
    changes: dict[str, Any] = {}
    if draw.random() < 0.3:
        changes["hadamard_block"] = 2 ** draw.randint(0, 8)
    if draw.random() < 0.3:
        changes["forward_block"] = 2 ** draw.randint(0, 8)
    if draw.random() < 0.3:
        changes["gx_scale"] = changes["weight_scale"] = "tensor"
    if draw.random() < 0.3:
        changes["gw_scale"] = draw.choice(["tensor", "channel", "token"])
    options: dict[str, Any] = {
        "config": HotConfig.recipe(draw.choice(["default", "fast", "paper"]), **changes),
        "device": draw.choice(_core.explain_devices()),
        "need": draw.sample(["y", "x", "gx", "gw", "gb"], draw.randint(1, 5)),
        "bias_dtype": draw.choice([None, "float32", "bfloat16"]),
        "dtype": draw.choice(["float32", "float16", "bfloat16"]),
        "accumulate": draw.random() < 0.5,
        "quantized_weight": draw.random() < 0.3,
        "wgmma": draw.random() < 0.7,
    }
    return explain(*shape, **options), {**options, "shape": shape}


@pytest.mark.parametrize(("shape", "config", "dtype", "kernels"), LAYERS)
def test_layers_get_their_kernels(
    shape: tuple[int, int, int], config: HotConfig, dtype: str, kernels: tuple[str, ...]
) -> None:
    found = explain(*shape, config=config, dtype=dtype, device="sm_90")
    assert tuple(step.kernel for step in found.steps) == kernels, found.text


@pytest.mark.parametrize(("shape", "block", "dtype", "bias", "quantized", "kernels"), FORWARDS)
def test_forward_products_get_their_kernels(
    shape: tuple[int, int, int],
    block: int,
    dtype: str,
    bias: str,
    quantized: bool,
    kernels: tuple[str, ...],
) -> None:
    config = HotConfig(forward="int8", forward_block=block)
    options = {"dtype": dtype, "bias_dtype": bias, "quantized_weight": quantized}
    found = explain(*shape, config=config, need="y", device="sm_90", **options)
    assert tuple(step.kernel for step in found.steps) == kernels, found.text
    whole = {step.call for step in explain(*shape, config=config, device="sm_90").steps}
    assert "forward_linear" in whole
    assert "backward_linear" in whole


@pytest.mark.parametrize(("shape", "config", "dtype", "kernels"), KEPT)
def test_an_x_that_is_kept_is_read_as_seldom_as_can_be(
    shape: tuple[int, int], config: HotConfig, dtype: str, kernels: tuple[str, ...]
) -> None:
    tokens, ins = shape
    found = explain(tokens, 64, ins, config=config, need=("y", "x"), dtype=dtype, device="sm_90")
    steps = [step for step in found.steps if step.call == "quantize_forward_input"]
    assert tuple(step.kernel for step in steps) == kernels, found.text
    once = len(kernels) == 1
    assert (sum("x" in step.reads for step in steps) == 1) == once
    if once:
        assert steps[0].bytes_read == 2 * tokens * ins
    # x alone is compressed by the call of its own.
    alone = explain(tokens, 64, ins, config=config, need="x", dtype=dtype, device="sm_90")
    assert {step.call for step in alone.steps} == {"compress_activation"}


def test_an_empty_x_gets_the_scales_that_it_has() -> None:
    for tokens, ins in ((8, 0), (0, 0), (0, 8)):
        for recipe, scales in (("paper", 1), ("accurate", ins), ("default", 0)):
            saved = hotcore.compress_activation(np.zeros((tokens, ins), np.float32), recipe)
            assert saved.scales().size == scales and not saved.scales().any()
            plan = hotcore.explain(tokens, 16, ins, recipe, need=("x", "gw"), device="sm_90")
            kernels = [s.kernel for s in plan.steps if s.call == "compress_activation"]
            assert (kernels[-1:] == ["finish_scales_kernel"]) == (scales > 0), kernels


def test_nothing_is_read_before_it_is_written() -> None:
    draw = random.Random(1)
    for _ in range(300):
        found, options = any_layer(draw)
        call, known = "", set()
        for step in found.steps:
            if step.call != call:
                call, known = step.call, {"g_y", "w", "x"}
                if call == "backward_linear":
                    known |= {"saved x", "quantised w"}
                if call == "forward_linear":
                    known |= {"bias", "quantised w"}
                    known |= {"quantised x"} if "x" in options["need"] else set()
                if options["accumulate"]:
                    known |= {"g_w", "g_b"}
            assert known.issuperset(step.reads), (step, found.text)
            known |= set(step.writes)


def test_what_is_wanted_is_written() -> None:
    draw = random.Random(2)
    for _ in range(300):
        found, options = any_layer(draw)
        (tokens, outs, ins), need = options["shape"], options["need"]
        # fixup_kernel finishes the tiles of the previous kernel.
        steps = [step for step in found.steps if step.kernel != "fixup_kernel"]
        written = [name for step in steps for name in step.writes]
        assert written.count("g_x") == ("gx" in need and tokens * ins > 0)
        assert written.count("y") == ("y" in need and tokens * outs > 0)
        nothing_to_add = tokens == 0 and options["accumulate"]
        assert written.count("g_w") == ("gw" in need and outs * ins > 0 and not nothing_to_add)
        assert written.count("g_b") == ("gb" in need and outs > 0)
        assert written.count("y") == ("y" in need and tokens * outs > 0)


def test_kernels_that_overlap_share_nothing() -> None:
    draw = random.Random(3)
    overlaps = 0
    for _ in range(300):
        found, _ = any_layer(draw)
        call, running = "", []
        for step in found.steps:
            if step.call != call:
                assert not step.independent
                call = step.call
            if not step.independent:
                running.clear()
            for before in running:
                overlaps += 1
                touched = set(step.reads) | set(step.writes)
                assert not touched & set(before.writes), found.text
                assert not set(step.writes) & set(before.reads), found.text
            running.append(step)
    assert overlaps > 20


def test_every_kernel_is_reached() -> None:
    source = (ROOT / "cuda" / "plan.cpp").read_text(encoding="utf-8")
    names = set(
        re.findall(r'^ +\{"([^"]+)", "\w+\.(?:cuh?|cpp)", (?:true|false)\}', source, re.MULTILINE)
    )
    assert len(names) > 20
    reached = {
        step.kernel
        for shape, config, dtype, _ in LAYERS
        for device in _core.explain_devices()
        for step in explain(*shape, config=config, dtype=dtype, device=device).steps
    }
    for shape, block, dtype, bias, quantized, _ in FORWARDS:
        config = HotConfig(forward_block=block)
        options = {"dtype": dtype, "bias_dtype": bias, "quantized_weight": quantized}
        found = explain(*shape, config=config, need="y", **options)
        reached |= {step.kernel for step in found.steps}
    for (tokens, ins), config, dtype, _ in KEPT:
        found = explain(tokens, 64, ins, config=config, need=("y", "x"), dtype=dtype)
        reached |= {step.kernel for step in found.steps}
    for device, k, int4 in (("sm_90", 512, True), ("sm_80", 512, True), ("sm_90", 500, False)):
        product = hotcore.explain_gemm(512, 512, k, int4=int4, device=device)
        reached |= {step.kernel for step in product.steps}
    for m, n in itertools.product((64, 512, 3072, 8192), repeat=2):  # every tile is some choice
        for device in ("sm_80", "sm_86"):
            product = hotcore.explain_gemm(m, n, 4096, device=device)
            reached |= {step.kernel for step in product.steps}
    assert reached == names


def test_slow_paths_say_why() -> None:
    shape = (25216, 3072, 768)
    assert explain(*shape).slow == ()
    (why,) = explain(*shape, wgmma=False).slow
    assert "no wgmma kernels" in why
    (why,) = {w for w in explain(25216, 3072, 770).slow if w.startswith("mma.sync")} - {
        w for w in explain(25216, 3072, 770).slow if "g_w" in w
    }
    assert "in_features 770, bfloat16" in why
    slow = explain(*shape, config=HotConfig.recipe("fast", hadamard_block=64)).slow
    assert any("hadamard_block is 64" in why for why in slow)


def test_more_reads_than_needed_and_generic_kernels_say_why() -> None:
    needed = {"g_y": 2, "x": 1, "w": 1}
    generic = {"rows_kernel", "unpack_kernel", "tile_kernel any", "token_kernel", *GENERIC[:2]}
    draw = random.Random(4)
    for _ in range(300):
        found, _ = any_layer(draw)
        reads: dict[tuple[str, str], int] = {}
        explained = set()
        for step in found.steps:
            assert step.slow or step.kernel not in generic, found.text
            for name in needed.keys() & set(step.reads):
                array = (step.call, name)
                reads[array] = reads.get(array, 0) + 1
                if step.slow or step.passed_over:
                    explained.add(array)
        for array, count in reads.items():
            assert count <= needed[array[1]] or array in explained, (array, found.text)


def test_the_kernels_that_a_device_lacks_are_named() -> None:
    shape = (25216, 3072, 768)
    b200 = explain(*shape, device="sm_100")
    assert b200.lacks == ("cluster", "dependent-launch", "bulk-copy", "tcgen05")
    assert "no kernels in this build: cluster, dependent-launch" in b200.text
    assert [why for why in b200.slow if why.startswith("mma.sync")] == [
        "mma.sync: this build has no tcgen05 kernels for sm_100"
    ]
    assert any("this build has no cluster kernels for sm_100" in why for why in b200.slow)
    assert explain(*shape, device="sm_90").lacks == explain(*shape, device="sm_80").lacks == ()
    assert explain(*shape, device="sm_90", wgmma=False).lacks == ("wgmma",)
    assert len(explain(*shape, device="sm_120").lacks) == 3


def test_kernels_that_were_passed_over_stay_in_the_step() -> None:
    def passed(found: Explanation, kernel: str) -> tuple[str, ...]:
        return next(step.passed_over for step in found.steps if step.kernel == kernel)

    half = explain(12608, 768, 768)
    assert half.slow == ()
    assert passed(half, ONE_PASS) == ("rows_column_amax_kernel: its columns fit in a cluster",)
    assert "    not rows_column_amax_kernel: its columns fit" in half.text
    single = explain(16500, 768, 64, dtype="float32")
    assert passed(single, AMAX) == (
        "rows_column_amax_kernel: float32",
        f"{ONE_PASS}: a column of 16512 codes is too long for a cluster",
    )
    assert single.gy_passes == 3 and len(single.slow) == 1
    assert "    not rows_column_amax" not in single.text


@pytest.mark.parametrize(
    ("shape", "config", "dtype", "reason"),
    [
        ((6000, 768), HotConfig(), "bfloat16", ""),
        ((6000, 768), HotConfig.recipe("fast"), "bfloat16", ""),
        ((6000, 768), HotConfig(x_rounding="nearest"), "bfloat16", ""),
        ((6000, 14336), HotConfig(), "bfloat16", ""),
        ((6000, 777), HotConfig(), "bfloat16", "in_features 777 is not a multiple of 4"),
        ((60, 49216), HotConfig(), "bfloat16", "in_features 49216 is too long"),
        ((6000, 768), HotConfig(), "float32", "float32"),
        ((6000, 768), HotConfig(forward_block=16), "bfloat16", "forward's hadamard_block is 16"),
        ((6000, 768), HotConfig(equalize_tokens=True), "bfloat16", "tokens are equalised"),
        ((6000, 768), HotConfig(x_rounding="pseudo_stochastic"), "float16", "rounding is pseudo"),
    ],
)
def test_a_second_read_of_x_says_why(
    shape: tuple[int, int], config: HotConfig, dtype: str, reason: str
) -> None:
    slow = explain(shape[0], 64, shape[1], config, need=("y", "x"), dtype=dtype).slow
    again = [why for why in slow if "x is read again to be kept" in why]
    assert len(again) == (reason != "")
    assert all(f"kept: {reason}" in why for why in again)
    on_ampere = explain(
        *(shape[0], 64, shape[1], config), need=("y", "x"), dtype=dtype, device="sm_80"
    )
    assert [why for why in on_ampere.slow if "x is read again to be kept" in why] == again


def test_slow_products_say_why() -> None:
    def slow(n: int, k: int, **options: Any) -> str:
        found = hotcore.explain_gemm(256, n, k, **{"wgmma": True, **options})
        assert found.operations == 2 * 256 * n * k
        return "".join(found.slow)

    assert slow(256, 256) == ""
    assert "half the speed: rows of the operands" in slow(256, 250, device="sm_80")
    assert "rows of out are not a multiple of 16 bytes" in slow(255, 256)
    assert "(K 140000) is longer than INT32 sums hold" in slow(256, 140000)
    assert "rows of the operands" in slow(256, 140001)
    assert "no wgmma kernels" in slow(256, 256, wgmma=False)
    assert slow(256, 256, int4=True, device="sm_86") == ""
    assert "no INT4 units at full speed on sm_120" in slow(256, 256, int4=True, device="sm_120")


def test_explains_bytes_and_floor() -> None:
    found = explain(25216, 3072, 768, need=("gx", "gw"))
    assert found.gy_passes == 2
    assert found.operations == 2 * 2 * 25216 * 3072 * 768
    assert found.bytes_read == sum(step.bytes_read for step in found.steps)
    assert 1e6 * found.operations / 1450e12 < found.floor_us < 400
    assert str(found) == found.text
    assert "g_y is read 2 times" in found.text
    assert explain(25216, 3072, 768, need="x").operations == 0
    # Largest values of x's columns, not of g_y's.
    cleared, rows, _ = explain(40000, 64, 768, "fast", need=("y", "x")).steps[:3]
    assert cleared.bytes_written == 4 * 768
    assert rows.bytes_written == 40000 * (768 + 4) + 4 * 768


def test_equalised_tokens_and_their_sizes_are_explained() -> None:
    found = explain(25216, 3072, 768, "compact")
    kernels = [step.kernel for step in found.steps]
    assert kernels[:2] == ["token_exponents_kernel", "rotate_kernel"]
    assert "requantize_rotated_kernel" in kernels
    assert [step.kernel for step in found.steps if step.slow] == [
        "token_exponents_kernel",
        "column_amax_kernel",
    ]
    sizes, rotate = found.steps[:2]
    assert sizes.bytes_read == 25216 * 768 * 2 and sizes.bytes_written == 25216
    assert rotate.bytes_read == 25216 * 768 * 2 + 25216
    assert rotate.bytes_written == 394 * 768 * (16 + 2)  # a block: 64 codes of 2 bits, a bf16
    assert [s.kernel for s in found.steps if "sizes of tokens" in s.reads] == [
        "rotate_kernel",
        "column_amax_kernel",
        "column_codes_kernel",
    ]
    config = HotConfig.recipe("fast", equalize_tokens=True)
    slow = explain(25216, 3072, 768, config).slow
    assert any("equalize_tokens" in reason for reason in slow)


def test_what_cannot_be_explained_is_refused() -> None:
    for device in ("sm_70", "cpu", "cuda:x"):
        with pytest.raises(ValueError, match="device"):
            hotcore.explain(64, 64, 64, device=device)
    if not _core.built_with_cuda():
        with pytest.raises(NotImplementedError, match="no CUDA backend"):
            hotcore.explain(64, 64, 64, device="cuda")
    with pytest.raises(ValueError, match="tokens"):
        hotcore.explain(-1, 64, 64)
    with pytest.raises(ValueError, match="need: nothing"):
        hotcore.explain(64, 64, 64, need=())
    with pytest.raises(ValueError, match="need: 'w'"):
        hotcore.explain(64, 64, 64, need=("gx", "w"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype"):
        hotcore.explain(64, 64, 64, dtype="int8")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "hotcore.info", "--explain", "25216", "3072", "768"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
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
    for wrong in (
        ["--explain", "64", "32", "16", "--device", "sm_1"],
        ["--device", "sm_90"],
        ["--explain", "1", "1", "1", "--forward", "fp8"],
        ["--forward", "int8"],
    ):
        with pytest.raises(SystemExit, match="2"):
            info.main(wrong)
