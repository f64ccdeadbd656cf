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
from hotcore.torch.ops import linear  # noqa: E402  (after the skip)
from torch import nn  # noqa: E402  (after the skip)
from torch.utils.checkpoint import checkpoint  # noqa: E402  (after the skip)

pytestmark = pytest.mark.usefixtures("seeded")
WIDTH = 64


class Counted(nn.Module):
    """Two layers; torch.manual_seed(0) before each call, so that every call has equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (hot.HotLinear(WIDTH, WIDTH, config="fast") for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return self.second(torch.relu(self.first(x))).square().sum()


def tokens() -> torch.Tensor:
    return torch.randn(96, WIDTH)


def with_gradients(x: torch.Tensor) -> tuple[Counted, list[torch.Tensor], list[torch.Tensor]]:
    """A model whose parameters have a ``.grad``; its parameters; that gradient."""
    model = Counted()
    model(x).backward()
    parameters = list(model.parameters())
    return model, parameters, [p.grad.clone() for p in parameters]


def equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None and torch.equal(a, b)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each product that added to a ``.grad``."""
    seen: list[int] = []
    original = linear.backward

    def backward(*arguments: Any) -> None:
        if len(arguments) > 7 and arguments[7]:
            seen.append(1)
        original(*arguments)

    monkeypatch.setattr(linear, "backward", backward)
    return seen


@pytest.fixture
def other() -> Any:
    """Runs a call in another thread."""
    with ThreadPoolExecutor(1) as executor:

        def run(call: Callable[..., Any], *arguments: Any) -> Any:
            return executor.submit(call, *arguments).result()

        yield run


def test_autograd_grad_inside_returns_and_leaves_grad_alone(in_place: list[int]) -> None:
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        equal(torch.autograd.grad(model(x), parameters), expected)
        equal([p.grad for p in parameters], expected)
        assert not in_place
        # Nor does asking for others: x, an activation, one of the parameters.
        x.requires_grad_()
        torch.autograd.grad(model(x), x)
        model(x).backward(inputs=[x])
        equal([p.grad for p in parameters], expected)
        model(x).backward(inputs=[model.second.weight])
        assert len(in_place) == 1
        equal([model.second.weight.grad], [2 * expected[2]])
        equal([p.grad for p in parameters[:2]], expected[:2])
        torch.autograd.backward(model(x))
        assert len(in_place) == 3
        equal([p.grad for p in parameters[:2]], [2 * g for g in expected[:2]])


def test_another_thread_is_not_concerned(other: Any, in_place: list[int]) -> None:
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        equal(other(lambda: torch.autograd.grad(model(x), parameters)), expected)
        equal([p.grad for p in parameters], expected)
        other(lambda: model(x).backward())
        assert not in_place
    equal([p.grad for p in parameters], [2 * g for g in expected])


def test_threads_have_contexts_of_their_own(in_place: list[int]) -> None:
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
    assert len(in_place) == 2 * 2 * 2  # of two threads' two layers, for two micro-batches


def test_backward_in_another_thread_knows_the_context(other: Any, in_place: list[int]) -> None:
    # As on CUDA, where autograd has threads of its own.
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        for _ in range(2):
            other(model(x).backward)
        assert len(in_place) == 4
    equal([p.grad for p in parameters[:1]], [3 * g for g in expected[:1]])


def test_graphs_of_a_context_that_has_ended_are_plain(in_place: list[int]) -> None:
    x = tokens()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        loss = model(x)
    with hot.gradient_accumulation():  # the next one is not the graph's
        loss.backward(retain_graph=True)
        assert not in_place
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
def test_checkpoints_inside(reentrant: bool, in_place: list[int]) -> None:
    x = tokens().requires_grad_()
    model, parameters, expected = with_gradients(x)
    with hot.gradient_accumulation():
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).backward()
        assert len(in_place) == 4
    equal([p.grad for p in parameters], [3 * g for g in expected])


@pytest.mark.cuda
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_on_cuda(reentrant: bool, in_place: list[int]) -> None:
    # A reentrant checkpoint recomputes in one of autograd's threads, outside of the context.
    x = tokens().cuda().requires_grad_()
    model = Counted().cuda()
    with hot.gradient_accumulation():
        for _ in range(3):
            checkpoint(model, x, use_reentrant=reentrant).backward()
    assert len(in_place) == (0 if reentrant else 4)


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
