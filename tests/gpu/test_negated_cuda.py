"""Tensors whose minus sign is a bit beside their memory, and writes in place, on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import hotcore.torch as hot  # noqa: E402  (after the skip)
from hotcore.config import HotConfig  # noqa: E402  (after the skip)
from torch import nn  # noqa: E402  (after the skip)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FORWARDS = ("plain", "int8")
ROUND = {"gx_rounding": "nearest", "gw_rounding": "nearest", "x_rounding": "nearest"}
Tensors = tuple[torch.Tensor, ...]
Form = Callable[[torch.Tensor], torch.Tensor]


def config(forward: str) -> HotConfig:
    """Without random numbers, so that equal operands give equal bits."""
    return HotConfig.recipe("default", forward=forward, **ROUND)  # type: ignore[arg-type]


def negated(values: torch.Tensor) -> torch.Tensor:
    """A tensor of these values whose memory holds their negatives."""
    out = torch._neg_view(-values)
    assert out.is_neg() and torch.equal(out, values)
    return out


def same(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("operand", ["x", "weight", "bias", "gy"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype: torch.dtype, forward: str, operand: str) -> None:
    shapes = {"x": (2, 160, 64), "weight": (48, 64), "bias": (48,), "gy": (2, 160, 48)}
    values = {
        name: torch.randn(shape, device="cuda", dtype=dtype) for name, shape in shapes.items()
    }

    def call(given: dict[str, torch.Tensor]) -> Tensors:
        *leaves, gy = (given[name].detach() for name in values)
        x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        y = hot.linear(x, weight, bias, config(forward))
        return (y, *torch.autograd.grad(y, (x, weight, bias), gy))

    expected = call(values)
    assert same(call({**values, operand: negated(values[operand])}), expected)


@pytest.mark.parametrize("forward", FORWARDS)
def test_gradient_accumulation(forward: str) -> None:
    """And ``.grad`` itself, which libhot adds to."""
    shapes = ((48, 64), (48,), (48, 64), (48,), (160, 64), (160, 48))
    values = [torch.randn(shape, device="cuda") for shape in shapes]

    def run(form: Form) -> Tensors:
        w, b, w_grad, b_grad, x, gy = map(form, values)
        w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
        w.grad, b.grad = w_grad, b_grad
        with hot.gradient_accumulation():
            for _ in range(2):
                hot.linear(x, w, b, config(forward)).backward(gy)
        return w_grad, b_grad

    assert same(run(negated), run(torch.clone))


@pytest.mark.parametrize("forward", FORWARDS)
def test_freeze_int8(forward: str) -> None:
    values = [torch.randn(shape, device="cuda") for shape in ((48, 64), (160, 64), (160, 48))]

    def run(form: Form) -> Tensors:
        weight, x, gy = map(form, values)
        model = nn.Sequential(nn.Linear(64, 48, bias=False, device="cuda"))
        model[0].weight = nn.Parameter(weight, requires_grad=False)
        hot.convert(model, config(forward), filter_fn=lambda *_: True)
        hot.freeze_int8(model)
        x = x.detach().requires_grad_()
        y = model(x)
        return (y, *torch.autograd.grad(y, x, gy))

    assert same(run(negated), run(torch.clone))


@pytest.mark.parametrize("shape", [(64,), (6, 64), (2, 6, 64), (2, 3, 5, 64)])
@pytest.mark.parametrize("forward", FORWARDS)
def test_y_written_in_place(forward: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(64, 48, device="cuda"), nn.ReLU(inplace=True))
    hot.convert(model, config(forward), filter_fn=lambda *_: True)
    x = torch.randn(shape, device="cuda", requires_grad=True)

    def gradients() -> Tensors:
        y = model(x)
        return (y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters())))

    expected = gradients()
    model[1].inplace = False
    assert same(gradients(), expected)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("forward", FORWARDS)
def test_y_of_a_convolution_written_in_place(forward: str, kernel: int) -> None:
    model = nn.Sequential(nn.Conv2d(32, 48, kernel, device="cuda"), nn.ReLU(inplace=True))
    hot.convert(model, config(forward), filter_fn=lambda *_: True)
    x = torch.randn(2, 32, 6, 6, device="cuda").to(memory_format=torch.channels_last)
    y = model(x)
    assert bool((y >= 0).all())
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_differentiating_twice() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    hot.convert(model, filter_fn=lambda *_: True)
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True reaches a HOT layer"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
