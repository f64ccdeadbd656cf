"""Gradients of gradients: HOT's backward refuses to be followed, and never leaves a term out."""

from collections.abc import Callable

import hotcore.torch as hot
import pytest
import torch
from support import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")

REFUSED = r"hotcore.torch: create_graph=True reaches a HOT layer.*revert"
Critic = Callable[[torch.Tensor], torch.Tensor]


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(16, 64)


def conv(kernel: int) -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Conv2d(16, 16, kernel), nn.Tanh(), nn.Flatten(), nn.LazyLinear(1)
    model, x = nn.Sequential(*layers), torch.randn(4, 16, 6, 6)
    model(x)
    return model, x


def checkpointed() -> tuple[nn.Module, torch.Tensor]:
    model, x = linear()
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    return model, x


MODELS = {"linear": linear, "1x1": lambda: conv(1), "3x3": lambda: conv(3)}
MODELS["checkpointed"] = checkpointed


@pytest.fixture(params=[*MODELS, pytest.param("cuda", marks=pytest.mark.cuda)])
def model_and_x(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor]:
    if request.param == "cuda":
        model, x = (part.cuda() for part in linear())
    else:
        model, x = MODELS[request.param]()
    hot.convert(model, filter_fn=lambda *_: True)
    return model, x.requires_grad_()


def penalty(critic: Critic, x: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's."""
    (gx,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gx.flatten(1).norm(dim=1) - 1).square().mean()


def test_a_gradient_penalty(model_and_x: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = model_and_x
    with pytest.raises(RuntimeError, match=REFUSED):
        # With the critic's own loss beside it every parameter has some gradient.
        loss = model(x).mean() + penalty(model, x)
        torch.autograd.grad(loss, list(model.parameters()))


def test_a_frozen_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).requires_grad_(False)
    hot.convert(model, filter_fn=lambda *_: True)
    hot.freeze_int8(model)
    refused(lambda: penalty(model, torch.randn(16, 64, requires_grad=True)), REFUSED, RuntimeError)


@pytest.mark.long
def test_compiled() -> None:
    """AOTAutograd raises its own error."""
    model, x = linear()
    hot.convert(model, filter_fn=lambda *_: True)
    compiled = torch.compile(model, backend="aot_eager")
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(penalty(compiled, x), list(model.parameters())[:1])


def test_what_does_not_reach_a_hot_layer() -> None:
    """A plain critic's penalty on what a generator of HOT layers has made; first-order steps."""
    generator, z = linear()
    hot.convert(generator, filter_fn=lambda *_: True)
    critic = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    made = generator(z)
    loss = penalty(critic, made) + critic(made).mean()
    expected = torch.autograd.grad(loss, list(critic.parameters()), retain_graph=True)
    alone = penalty(critic, made.detach().requires_grad_()) + critic(made.detach()).mean()
    again = torch.autograd.grad(alone, list(critic.parameters()))
    torch.testing.assert_close(expected, again, rtol=1e-5, atol=1e-8)
    loss.backward()  # through the generator, not followed
    assert all(p.grad is not None for p in generator.parameters())
