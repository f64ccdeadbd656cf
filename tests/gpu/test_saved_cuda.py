"""saved= on CUDA: the bytes of Triton's kernels for ReLU, compiled, captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hotcore.torch.ops import relu as ops  # noqa: E402  (after the skip)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MODES = ["eager", "default", "reduce-overhead"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_mode(function: Any, mode: str) -> Any:
    return function if mode == "eager" else torch.compile(function, fullgraph=True, mode=mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (32 * 1024,), (5, 33, 1000)])
def test_the_bytes_are_those_of_torch_operations(shape: tuple[int, ...], dtype: Any) -> None:
    pytest.importorskip("triton")
    kernels = ops._kernels(torch.empty(0, device="cuda"))
    x = torch.randn(shape, device="cuda").to(dtype)
    x.view(-1)[0] = float("nan")
    codes = kernels.pack_signs(x)
    assert torch.equal(codes, ops.pack_signs(x))
    assert torch.equal(codes.cpu(), ops.pack_signs(x.cpu()))
    assert torch.equal(kernels.unpack_signs(codes, x.shape), x > 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("memory", ["rows", "channels_last", "transposed", "one later"])
def test_gradients(memory: str, mode: str) -> None:
    function = in_mode(ops.relu, mode)
    for _ in range(3):  # the third replays a graph
        x = torch.randn(2, 6, 5, 70, device="cuda")
        if memory == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        elif memory == "transposed":
            x = x.transpose(1, 3)
        elif memory == "one later":
            x = torch.randn(2 * 6 * 5 * 70 + 1, device="cuda")[1:]
        gy = torch.randn_like(x)
        y = function(x.requires_grad_())
        assert torch.equal(y, x.relu())
        (gx,) = torch.autograd.grad(y, x, gy)
        assert torch.equal(gx, torch.where(x > 0, gy, 0.0))
