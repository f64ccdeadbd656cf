"""Experts on CUDA: grouped products in bf16, x in codes, sizes that stay on the device."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hotcore.torch.ops import experts  # noqa: E402
from mixtures import STEP, T, W, answer, error, kept, mixture, operands  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not experts.AVAILABLE, reason="torch has no grouped_mm"),
]


@pytest.mark.parametrize("mode", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("bits", [8, 4])
def test_against_float64_without_a_sync(bits: int, mode: str) -> None:
    parts, gy = operands(torch.bfloat16, device="cuda"), torch.randn(T, W, device="cuda")
    function: Any = kept(bits)
    if mode != "eager":
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True)
    answer(function, parts, gy)  # compiles, and loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = answer(function, parts, gy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = (*(t.detach().double().requires_grad_() for t in parts[:4]), parts[4])
    bounds = (0.02, 0.02, *(STEP[bits],) * 3)
    for bound, a, b in zip(bounds, got, answer(mixture, wide, gy), strict=True):
        assert error(a, b) < bound
    assert not got[2][-1].any() and not got[3][-1].any()  # an expert without tokens
