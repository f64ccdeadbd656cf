"""y, and x after the layer, written in place."""

from collections.abc import Callable

import hotcore.torch as hot
import pytest
import torch
import torch.nn.functional as F  # noqa: E402, N812  (after the skip)
from support import DEVICES
from torch import nn
from torch_graphs import same, whole, without_chance

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")

FORWARDS = ("plain", "int8")
SHAPES = [(64,), (2, 3, 5, 64)]
WRITES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "add": (lambda y, r: y.add_(r), lambda y, r: y + r),
    "relu": (lambda y, r: F.relu(y, inplace=True), lambda y, r: F.relu(y)),
    "dropout": (lambda y, r: F.dropout(y, 1e-12, inplace=True), lambda y, r: F.dropout(y, 1e-12)),
    "slice": (
        lambda y, r: y.select(-1, 0).mul_(2) + y.select(-1, 1),
        lambda y, r: y.select(-1, 0) * 2 + y.select(-1, 1),
    ),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_linear(device: str, forward: str, shape: tuple[int, ...], write: str) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(48, 64, device=device, requires_grad=True)
    b = torch.randn(48, device=device)
    residual = torch.randn(*shape[:-1], 48, device=device)

    def gradients(f: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)  # x is rounded alike
        y = f(hot.linear(x, weight, b, without_chance(forward)), residual)
        return (y, *torch.autograd.grad(y.square().sum(), (x, weight)))

    in_place, out_of_place = WRITES[write]
    assert same(gradients(in_place), gradients(out_of_place))


@pytest.mark.parametrize("write", ["add", "relu", "dropout"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("shape", [(2, 32, 5, 5), (32, 5, 5)])
def test_conv2d(shape: tuple[int, ...], forward: str, kernel: int, write: str) -> None:
    x = torch.randn(shape)
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    x.requires_grad_()
    weight = torch.randn(48, 32, kernel, kernel, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    settings = without_chance(forward)
    plain = hot.conv2d(x, weight, bias, padding=kernel // 2, config=settings)
    residual = torch.randn_like(plain)

    def gradients(f: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        y = hot.conv2d(x, weight, bias, padding=kernel // 2, config=settings)
        assert y.stride() == plain.stride()
        y = f(y, residual)
        return (y, *torch.autograd.grad(y.square().sum(), (x, weight, bias)))

    in_place, out_of_place = WRITES[write]
    assert same(gradients(in_place), gradients(out_of_place))


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("forward", FORWARDS)
def test_conv2d_on_cuda(forward: str, kernel: int) -> None:
    model = nn.Sequential(nn.Conv2d(32, 48, kernel, device="cuda"), nn.ReLU(inplace=True))
    hot.convert(model, without_chance(forward), filter_fn=lambda *_: True)
    x = torch.randn(2, 32, 6, 6, device="cuda").to(memory_format=torch.channels_last)
    y = model(x)
    assert bool((y >= 0).all())
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_frozen_layer(forward: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(inplace=True))
    model[0].weight.requires_grad_(False)
    hot.convert(model, without_chance(forward), filter_fn=lambda *_: True)
    hot.freeze_int8(model)
    x = torch.randn(shape, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        y = model(x)
        return (y, *torch.autograd.grad(y.square().sum(), (x, model[0].bias)))

    expected = gradients()
    model[1].inplace = False
    assert same(gradients(), expected)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    model = nn.ModuleList()
    for forward in FORWARDS:
        layer = nn.Sequential(nn.Linear(64, 48), nn.ReLU(inplace=True))
        model.append(hot.convert(layer, without_chance(forward), filter_fn=lambda *_: True))
    x = whole(2, 6, 64)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in model])

    y = torch.compile(call, backend=backend)(x)
    y.backward(torch.ones_like(y))
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = call(x)
    expected.sum().backward()
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("forward", FORWARDS)
def test_x_written_after_the_layer(forward: str) -> None:
    """HOT keeps x compressed: the gradients are those of x as the layer saw it."""
    leaf = torch.randn(2, 20, 64, requires_grad=True)
    weight = torch.randn(48, 64, requires_grad=True)
    gy = torch.randn(2, 20, 48)

    def gradients(write: bool) -> tuple[torch.Tensor, ...]:
        x = leaf * 1
        torch.manual_seed(0)
        y = hot.linear(x, weight, None, without_chance(forward))
        if write:
            x.mul_(3)
        return torch.autograd.grad(y, (leaf, weight), gy)

    assert same(gradients(True), gradients(False))
