"""hot.linear_cross_entropy on CUDA: compared with float64, peak memory, CUDA graph, compiled."""

import math
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hotcore.torch as hot  # noqa: E402  (after the skip)
import torch.nn.functional as F  # noqa: E402
from hotcore.torch.ops import head  # noqa: E402
from support_gpu import captured  # noqa: E402

pytestmark = pytest.mark.cuda
INT8 = hot.HotConfig.recipe("accurate", forward="int8")
CONFIGS = (None, "default", "fast", INT8)
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def arrays(tokens: int, vocab: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Arrays:
    """Return x, weight, target, bias."""
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


@pytest.mark.parametrize("vocab", [1, 5, 1003, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.0, 20.0, 0.0), (0.1, 20.0, 1e-3)], ids=str
)
@pytest.mark.parametrize("triton", [True, False])
def test_rows(
    vocab: int, dtype: torch.dtype, options: tuple[float, float, float], triton: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A chunk's losses and gradients agree with float64, with NaN in the padding of rows."""
    if not triton:
        monkeypatch.setattr(head, "_kernels", lambda: None)
    smoothing, softcap, z = options
    whole = torch.full((50, vocab + 3), math.nan, device="cuda", dtype=dtype)
    logits = whole[:, :vocab].copy_(torch.randn(50, vocab, device="cuda") * 4)
    target = torch.randint(vocab, (50,), device="cuda")
    logits[:9].scatter_add_(1, target[:9, None], torch.full_like(logits[:9, :1], 40))  # p near 1
    wide = logits.double().requires_grad_()
    values = softcap * torch.tanh(wide / softcap) if softcap else wide
    losses = F.cross_entropy(values, target, reduction="none", label_smoothing=smoothing)
    losses = losses + z * values.logsumexp(-1).square()
    (exact,) = torch.autograd.grad(losses.sum(), wide)
    alone, _ = head.differentiate(whole, vocab, target, head.Options(*options, 0), False)
    got, at_target = head.differentiate(whole, vocab, target, head.Options(*options, 0), True)
    assert torch.equal(alone, got)
    assert not whole[:, vocab:].count_nonzero()
    torch.testing.assert_close(got.double(), losses.detach(), rtol=1e-6, atol=1e-5)
    of_target = exact.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(at_target.double(), of_target, rtol=1e-3, atol=1e-6)
    half_ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.double(), exact, rtol=half_ulp + 1e-3, atol=1e-6)


def test_targets_out_of_range_end_the_process() -> None:
    code = (
        "import torch, hotcore.torch as hot; x = torch.randn(4, 32, device='cuda')\n"
        "w = torch.randn(9, 32, device='cuda', requires_grad=True)\n"
        "hot.linear_cross_entropy(x, w, torch.full((4,), {0}, device='cuda')); "
        "torch.cuda.synchronize()"
    )
    for target in (9, -1):
        run = subprocess.run([sys.executable, "-c", code.format(target)], capture_output=True)
        assert run.returncode and b"ssert" in run.stderr, run.stderr[-400:]


@pytest.mark.parametrize("config", [None, INT8], ids=str)
def test_peak(config: Any) -> None:
    x, weight, target, _ = arrays(8192, 50257, 256)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hot.linear_cross_entropy(x, weight, target, None, config).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 8192 * 50257 * 2 * 0.6  # share of the whole bf16 logits' bytes


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
