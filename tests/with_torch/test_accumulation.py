"""``gradient_accumulation`` belongs to a thread; its graphs keep it in any thread.

test_features.py tests the sums.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402  (after the skip)
from hotcore.torch import accumulation  # noqa: E402  (after the skip)
from torch import nn  # noqa: E402  (after the skip)
from torch.utils.checkpoint import checkpoint  # noqa: E402  (after the skip)

pytestmark = pytest.mark.usefixtures("seeded")
WIDTH = 64


class Counted(nn.Module):
    """Two layers; torch.manual_seed(0) before each call, so that every call has equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (hot.HotLinear(WIDTH, WIDTH, config="fast") for _ in range(2))
        self.returned: list[int] = []
        """One entry for each g_w that a node gave to autograd; in place it gives none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        inner = self.first(x)
        y = self.second(torch.relu(inner))
        for out in (inner, y):
            if out.grad_fn is not None:
                out.grad_fn.register_hook(self._note)
        return y.square().sum()

    def _note(self, gradients: Any, _: Any) -> None:
        if gradients[1] is not None:
            self.returned.append(1)

    def in_place(self) -> bool:
        """Whether no g_w was returned since the last question."""
        found, self.returned[:] = not self.returned, []
        return found


def tokens() -> torch.Tensor:
    return torch.randn(96, WIDTH)


def with_gradients(x: torch.Tensor) -> tuple[Counted, list[torch.Tensor], list[torch.Tensor]]:
    """A model whose parameters have a ``.grad``; its parameters; that gradient."""
    model = Counted()
    model(x).backward()
    assert not model.in_place()
    parameters = list(model.parameters())
    return model, parameters, [p.grad.clone() for p in parameters]


def equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None and torch.equal(a, b)


@pytest.fixture
def other() -> Any:
    """Runs a call in another thread."""
    with ThreadPoolExecutor(1) as executor:

        def run(call: Callable[..., Any], *arguments: Any) -> Any:
            return executor.submit(call, *arguments).result()

        yield run


def test_autograd_grad_inside_returns_and_leaves_grad_alone() -> None:
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        equal(torch.autograd.grad(model(x), parameters), expected)
        equal([p.grad for p in parameters], expected)
        assert not model.in_place()
        # Nor does asking for others: x, an activation, one of the parameters.
        x.requires_grad_()
        torch.autograd.grad(model(x), x)
        model(x).backward(inputs=[x])
        equal([p.grad for p in parameters], expected)
        model.returned.clear()
        model(x).backward(inputs=[model.second.weight])
        assert model.in_place()
        equal([model.second.weight.grad], [2 * expected[2]])
        equal([p.grad for p in parameters[:2]], expected[:2])
        torch.autograd.backward(model(x))
        assert model.in_place()
        equal([p.grad for p in parameters[:2]], [2 * g for g in expected[:2]])


def test_another_thread_is_not_concerned(other: Any) -> None:
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        equal(other(lambda: torch.autograd.grad(model(x), parameters)), expected)
        equal([p.grad for p in parameters], expected)
        other(lambda: model(x).backward())
        assert not model.in_place()
    equal([p.grad for p in parameters], [2 * g for g in expected])


def test_threads_have_contexts_of_their_own() -> None:
    x = tokens()
    models = [with_gradients(x) for _ in range(2)]
    barrier = threading.Barrier(2, timeout=60)

    def train(index: int) -> None:
        model, _, _ = models[index]
        with hot.gradient_accumulation():
            barrier.wait()  # both are inside
            for _ in range(2):
                model(x).backward()
            barrier.wait()
        assert accumulation.current() is None

    with ThreadPoolExecutor(2) as executor:
        for done in [executor.submit(train, index) for index in range(2)]:
            done.result()
    assert all(model.in_place() for model, _, _ in models)


def test_backward_in_another_thread_knows_the_context(other: Any) -> None:
    # As on CUDA, where autograd has threads of its own.
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        for _ in range(2):
            other(model(x).backward)
        assert model.in_place()
    equal([p.grad for p in parameters[:1]], [3 * g for g in expected[:1]])


def test_graphs_of_a_context_that_has_ended_are_plain() -> None:
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        loss = model(x)
    with hot.gradient_accumulation():  # the next one is not the graph's
        loss.backward(retain_graph=True)
        assert not model.in_place()
    equal(torch.autograd.grad(loss, parameters), expected)
    equal([p.grad for p in parameters], [2 * g for g in expected])


def test_a_thread_enters_once_and_again_after_an_error(other: Any) -> None:
    def enter() -> str:
        with hot.gradient_accumulation():
            return "entered"

    with pytest.raises(ZeroDivisionError), hot.gradient_accumulation():
        with pytest.raises(RuntimeError, match="already inside"):
            enter()
        assert other(enter) == "entered"
        raise ZeroDivisionError
    assert enter() == "entered"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(reentrant: bool) -> None:
    x = tokens().requires_grad_()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).backward()
        assert model.in_place()
    equal([p.grad for p in parameters], [3 * g for g in expected])


@pytest.mark.cuda
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_on_cuda(reentrant: bool) -> None:
    # A reentrant checkpoint recomputes in one of autograd's threads, outside of the context.
    x = tokens().cuda().requires_grad_()
    model = Counted().cuda()
    with hot.gradient_accumulation():
        for step in range(3):
            checkpoint(model, x, use_reentrant=reentrant).backward()
            if step > 0:  # there is a .grad to add to
                assert model.in_place() != reentrant
            model.returned.clear()


def test_many_contexts_one_after_another() -> None:
    """The state lives exactly as long as something holds it."""
    x = tokens()
    model, parameters, expected = with_gradients(x)
    states = []
    for _ in range(40):
        model.zero_grad()
        with hot.gradient_accumulation():
            for _ in range(2):
                model(x).backward()
            states.append(weakref.ref(accumulation.current()))
            objects = [object() for _ in range(1000)]  # these would reuse freed memory
        equal([p.grad for p in parameters], [2 * g for g in expected])
        del objects
    gc.collect()
    assert not any(state() for state in states)
