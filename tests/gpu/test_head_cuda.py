"""hot.linear_cross_entropy on CUDA: beside float64, in memory, in a CUDA graph, compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hotcore.torch as hot  # noqa: E402  (after the skip)
import torch.nn.functional as F  # noqa: E402
from support_gpu import captured  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
INT8 = hot.HotConfig.recipe("accurate", forward="int8")
CONFIGS = (None, "default", "fast", INT8)
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def arrays(tokens: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Arrays:
    """x, weight, target, bias."""
    x = torch.randn(tokens, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") / math.sqrt(width)).to(dtype)
    target = torch.randint(vocab, (tokens,), device="cuda")
    target[::7] = -100
    bias = torch.randn(vocab, device="cuda").to(dtype).requires_grad_()
    return x, weight.requires_grad_(), target, bias


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 1003, 50257, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_beside_float64(vocab: int, config: Any, dtype: torch.dtype) -> None:
    x, weight, target, bias = arrays(1500, vocab, 128, dtype)
    loss = hot.linear_cross_entropy(x, weight, target, bias, config, chunk=512)
    got = torch.autograd.grad(loss, (x, weight, bias))
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(wide[0], wide[1], wide[2])
    exact = F.cross_entropy(logits, target)
    bound = 0.15 if config == "fast" else 0.01
    assert abs(float(loss.detach() - exact.detach())) < 5e-4
    for ours, right in zip(got, torch.autograd.grad(exact, wide), strict=True):
        if vocab == 1:
            assert not ours.count_nonzero()
        else:
            assert error(ours, right) < bound


def test_factors_are_not_rounded() -> None:
    """A 0-dim tensor on the device would be cast to bf16 before the product."""
    x, weight, target, _ = arrays(301, 500, 64)
    target = target.clamp(min=0)
    grads = []
    for reduction in ("mean", "sum"):
        loss = hot.linear_cross_entropy(x, weight, target, reduction=reduction)
        grads.append(torch.autograd.grad(loss, (x, weight)))
    for mean, of_sum in zip(*grads, strict=True):
        ratio = (mean.double() * of_sum).sum() / of_sum.double().square().sum()
        assert float(ratio) * 301 == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("config", [None, INT8], ids=str)
def test_peak(config: Any) -> None:
    x, weight, target, _ = arrays(8192, 50257, 256)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hot.linear_cross_entropy(x, weight, target, None, config).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 8192 * 50257 * 2 * 0.6  # of whole bf16 logits, with g_w and all else


@pytest.mark.parametrize("config", [None, INT8], ids=str)
def test_captured_and_compiled(config: Any) -> None:
    x, weight, target, bias = arrays(1300, 1003, 128)

    def step() -> tuple[torch.Tensor, ...]:
        loss = hot.linear_cross_entropy(x, weight, target, bias, config, chunk=512)
        return (loss.detach(), *torch.autograd.grad(loss, (x, weight, bias)))

    expected = step()
    graph, replayed = captured(step)
    graph.replay()
    torch.cuda.synchronize()

    def call(x: torch.Tensor) -> torch.Tensor:
        return hot.linear_cross_entropy(x * 1.0, weight, target, bias, config, chunk=512)

    torch._dynamo.reset()
    loss = torch.compile(call, fullgraph=True, mode="reduce-overhead")(x)
    compiled = (loss.detach(), *torch.autograd.grad(loss, (x, weight, bias)))
    for ours in (replayed, compiled):
        for got, wanted in zip(ours, expected, strict=True):
            assert error(got, wanted.double()) < 0.02
