"""Tensors whose minus sign is a bit beside their memory, and tensors without memory.

``k.conj().imag`` negates nothing: torch notes that its values are the negatives of what lies in
memory. Whoever reads that memory past torch's dispatcher has to look at the note.
"""

import functools
from collections.abc import Callable
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.config import Key
from hotcore.torch.ops import codes, linear
from support import DEVICES
from torch import nn
from torch_graphs import same, whole, without_chance

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")

FORWARDS = ("plain", "int8")


def negated(values: torch.Tensor) -> torch.Tensor:
    """A tensor of these values whose memory holds their negatives."""
    out = torch._neg_view(-values)
    assert out.is_neg() and torch.equal(out, values)
    return out


def check(function: Callable[..., torch.Tensor], operand: str, kind: Any, **shapes: Any) -> None:
    """y and all gradients are the same bits, be it negated or not."""
    values = {name: torch.randn(size, **kind) for name, size in shapes.items()}

    def call(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        *leaves, gy = (given[name].detach() for name in values)
        x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        torch.manual_seed(0)  # x is rounded alike
        y = function(x, weight, bias)
        return (y, *torch.autograd.grad(y, (x, weight, bias), gy))

    expected = call(values)
    assert same(call({**values, operand: negated(values[operand])}), expected)


OPERANDS = pytest.mark.parametrize("operand", ["x", "weight", "bias", "gy"])


@OPERANDS
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("shape", [(2, 20, 64), (64,)])
@pytest.mark.parametrize("device", DEVICES)
def test_linear(device: str, forward: str, operand: str, shape: tuple[int, ...]) -> None:
    shapes = {"x": shape, "weight": (48, 64), "bias": (48,), "gy": (*shape[:-1], 48)}
    for dtype in (torch.float32, torch.bfloat16):
        kind = {"device": device, "dtype": dtype}
        check(lambda *given: hot.linear(*given, without_chance(forward)), operand, kind, **shapes)


@OPERANDS
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("forward", FORWARDS)
def test_conv2d(forward: str, kernel: int, operand: str) -> None:
    shapes = {"x": (2, 32, 6, 6), "weight": (48, 32, kernel, kernel), "bias": (48,)}
    shapes["gy"] = (2, 48, 7 - kernel, 7 - kernel)
    check(lambda *given: hot.conv2d(*given, config=without_chance(forward)), operand, {}, **shapes)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_freeze_int8(device: str, forward: str) -> None:
    values = [torch.randn(shape, device=device) for shape in ((48, 64), (40, 64), (40, 48))]

    def run(form: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        weight, x, gy = (form(value) for value in values)
        model = nn.Sequential(nn.Linear(64, 48, device=device))
        model[0].weight = nn.Parameter(weight, requires_grad=False)
        with torch.no_grad():
            model[0].bias.fill_(0.5)
        hot.convert(model, without_chance(forward), filter_fn=lambda *_: True)
        hot.freeze_int8(model)
        x = x.detach().requires_grad_()
        y = model(x)
        return (y, *torch.autograd.grad(y, (x, model[0].bias), gy))

    assert same(run(negated), run(torch.clone))


def test_a_complex_model() -> None:
    """ComplEx: scores of subject, relation and object; the conjugate negates g_y of one layer."""
    real, imaginary = (nn.Linear(64, 48) for _ in range(2))
    x, q = torch.randn(128, 64), torch.randn(128, 48, dtype=torch.complex64)

    def gradients() -> tuple[torch.Tensor, ...]:
        k = torch.complex(real(x), imaginary(x))
        loss = (q * k.conj()).real.square().sum()
        return torch.autograd.grad(loss, (real.weight, imaginary.weight))

    expected = gradients()
    layers = real, imaginary
    real, imaginary = (hot.convert(layer, filter_fn=lambda *_: True) for layer in layers)
    for ours, theirs in zip(gradients(), expected, strict=True):
        assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.98


@pytest.mark.long
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, forward: str) -> None:
    weight, bias = torch.randn(48, 64).requires_grad_(), torch.randn(48).requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        y = hot.linear(x, weight, bias, without_chance(forward))
        return torch.complex(torch.zeros_like(y), y).conj().imag

    x, gy = whole(40, 64), torch.randn(40, 48)
    expected = call(x)
    gradients = torch.autograd.grad(expected, (weight, bias), gy)
    if backend == "aot_eager":  # inductor itself overlooks the bit of what enters a graph
        x, gy = negated(x), negated(gy)
    y = torch.compile(call, backend=backend)(x)
    found = torch.autograd.grad(y, (weight, bias), gy)
    torch.testing.assert_close(y.resolve_neg(), expected.resolve_neg(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-4)


def freed(x: torch.Tensor) -> torch.Tensor:
    """Free memory but keep the shape, as FSDP1 frees a weight."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (freed, r"no data|not allocated|out of bounds"),
        (lambda t: t.to("meta"), "meta"),
        (lambda t: t.to_sparse(), "a tensor of layout torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("forward", FORWARDS)
def test_without_memory(forward: str, form: Callable[..., torch.Tensor], message: str) -> None:
    x, weight, gy = torch.randn(40, 64), torch.randn(48, 64), torch.randn(40, 48)
    settings = without_chance(forward)
    saved = codes.compress(x, settings, Key(0))
    keys = Key(0), Key(0)
    calls: list[Callable[[], Any]] = [
        lambda: linear.int8_linear(x, form(weight), None, settings),
        lambda: linear.int8_linear(form(x), weight, None, settings),
    ]
    if message != "meta":  # alone it is an operator's fake
        calls.append(lambda: codes.compress(form(x), settings, Key(0)))
    for grad, matrix in ((form(gy), weight), (gy, form(weight))):
        outputs = linear.new_gradients(gy, x.shape, (torch.float32, torch.float32, None))
        arguments = (grad, matrix, saved, 64, settings, keys, outputs)
        calls.append(functools.partial(linear.backward, *arguments))
    for call in calls:
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=message):
            call()


class Wrapped(torch.Tensor):
    """A tensor that holds another one, and no memory of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        return function(*map(inner, args), **(kwargs or {}))


def test_a_weight_that_wraps_another() -> None:
    x, weight, gy = torch.randn(40, 64), torch.randn(48, 64), torch.randn(40, 48)
    settings = without_chance("plain")

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(hot.linear(leaf, weight, None, settings), leaf, gy)[0]

    assert torch.equal(gradient(Wrapped(weight)), gradient(weight))
