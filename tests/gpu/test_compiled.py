"""Common ways to train on a GPU: compiled, captured, graphed, under reduce-overhead.

Each is compared with eager. The whole model's gradient must have the error of HOT in eager: a
smaller error would mean that HOT did not run. Every replay of a graph must draw new noise.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import refused

torch = pytest.importorskip("torch")

import hotcore.torch as hot  # noqa: E402  (after the skip)
from support_gpu import Block, on_a_side_stream  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402  (whether regions became CUDA graphs)

DEVICE = "cuda"
pytestmark = pytest.mark.cuda

RECIPES = ("default", "fast")
WIDTH, HEADS, CLASSES, BATCH = 128, 4, 10, 16
STEPS = 10
Gradients = dict[str, Tensor]


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(Block(WIDTH, HEADS), Block(WIDTH, HEADS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.blocks(x).mean(1))
        return logits


def mlp() -> nn.Sequential:
    layers = (nn.Flatten(), nn.Linear(3 * 32 * 32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
    return nn.Sequential(*layers, nn.Linear(256, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {"vit": Vit, "mlp": mlp}


@pytest.fixture(autouse=True)
def compiler(prepared: None) -> Iterator[None]:
    """Reset the compiler, and disable TF32, so that the plain gradient is exact."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch._dynamo.reset()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(BATCH, 3, 32, 32, device=DEVICE)


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(CLASSES, (BATCH,), device=DEVICE)


def build(name: str) -> nn.Module:
    return MODELS[name]().to(DEVICE).train()


def converted(model: nn.Module, recipe: str) -> nn.Module:
    """Convert a copy: every linear layer except the head."""
    model = copy.deepcopy(model)
    last = [fqn for fqn, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    return hot.convert(model, recipe, lambda m, fqn: isinstance(m, nn.Linear) and fqn != last)


def loss_of(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images).float(), labels)


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Gradients:
    """Copy gradients, because the next replay of a graph overwrites its memory."""
    model.zero_grad(set_to_none=True)
    loss_of(model, images, labels).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def flat(values: Gradients) -> Tensor:
    return torch.cat([values[name].flatten() for name in sorted(values)])


def error(got: Gradients, exact: Gradients) -> float:
    assert got.keys() == exact.keys()
    return float((flat(got) - flat(exact)).norm() / flat(exact).norm())


def assert_as_in_eager(draws: list[Gradients], eager: list[Gradients], exact: Gradients) -> None:
    """The error is that of eager, and each run has new noise: the mean is closer."""
    size = np.mean([error(got, exact) for got in eager])
    assert size > 1e-4, "HOT's noise is not there in eager"
    errors = [error(got, exact) for got in draws]
    assert all(0.6 * size < value < 1.6 * size for value in errors), (errors, size)
    for i, got in enumerate(draws):
        assert not any(torch.equal(flat(got), flat(b)) for b in draws[:i]), "two steps drew alike"
    mean = {name: torch.stack([got[name] for got in draws]).mean(0) for name in exact}
    assert error(mean, exact) < 0.8 * min(errors)


def draws_of(step: Callable[[], Gradients], count: int = 6) -> list[Gradients]:
    return [step() for _ in range(count)]


def falls(step: Callable[[], Tensor]) -> list[float]:
    """Return the losses of some steps, read at the end, so that the host can run ahead."""
    return torch.stack([step().detach().clone() for _ in range(STEPS)]).tolist()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(model, *batch)
    loss.backward()
    optimizer.step()
    return loss


def trained(model: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return falls(lambda: step_of(model, optimizer, images, labels))


def assert_falls_alike(got: list[float], eager: list[float]) -> None:
    fall = eager[0] - eager[-1]
    assert fall > 0.1
    assert got[0] == pytest.approx(eager[0], rel=2e-2)
    assert got[0] - got[-1] == pytest.approx(fall, rel=0.25)


def in_eager(name: str, recipe: str, *batch: Tensor) -> Any:
    """Return a converted model, the plain gradients, draws of its own, and losses of a copy."""
    plain = build(name)
    model, exact = converted(plain, recipe), gradients(plain, *batch)
    eager = draws_of(lambda: gradients(model, *batch))
    return model, exact, eager, trained(copy.deepcopy(model), *batch)


@pytest.mark.parametrize("way", ["blocks", "recomputed", "whole"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_step(recipe: str, way: str, images: Tensor, labels: Tensor) -> None:
    model, exact, eager, losses = in_eager("vit", recipe, images, labels)
    parts = [model] if way == "whole" else model.blocks
    if way == "recomputed":
        hot.recompute(model.blocks)
    for part in parts:
        part.compile(fullgraph=True)
    assert_as_in_eager(draws_of(lambda: gradients(model, images, labels)), eager, exact)
    assert counters["stats"]["unique_graphs"] > 0
    assert_falls_alike(trained(model, images, labels), losses)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_reduce_overhead_step(recipe: str, name: str, images: Tensor, labels: Tensor) -> None:
    model, exact, eager, losses = in_eager(name, recipe, images, labels)
    model.compile(mode="reduce-overhead")
    for _ in range(3):  # warms up, records, replays
        gradients(model, images, labels)
    draws = draws_of(lambda: gradients(model, images, labels))
    assert counters["inductor"]["cudagraph_skips"] == 0, "a region was compiled without a graph"
    assert_as_in_eager(draws, eager, exact)
    assert_falls_alike(trained(model, images, labels), losses)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_frozen_layers(mode: str, bits: int) -> None:
    """The bits of eager mode, on two streams; changed codes are refused."""
    config = hot.HotConfig.recipe("default", forward="int8", gx_rounding="nearest")
    model = nn.Sequential(nn.Linear(96, 256), nn.Linear(256, 160)).to(DEVICE, torch.bfloat16)
    hot.freeze(hot.convert(model, config, filter_fn=lambda *_: True), bits)
    x = torch.randn(48, 96, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gy = torch.randn(48, 160, device=DEVICE, dtype=torch.bfloat16)

    def both(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x.grad, y = None, function(x)
        y.backward(gy)
        return [y.detach().clone(), x.grad.clone()]

    eager, compiled = both(model), torch.compile(model, mode=mode)
    for _ in range(4):
        assert all(map(torch.equal, both(compiled), eager))
    on_a_side_stream(lambda: both(compiled))
    torch.cuda.synchronize()
    assert all(map(torch.equal, both(compiled), eager))
    if mode == "default":
        model[0].weight_codes.copy_(model[0].weight_codes.detach().roll(1))
        refused(lambda: compiled(x), "not codes of a weight", RuntimeError)


@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_training(recipe: str, images: Tensor, labels: Tensor) -> None:
    """With the optimizer in the graph, too, the loss falls as in eager."""
    model = converted(build("vit"), recipe)
    losses = trained(copy.deepcopy(model), images, labels)
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, fused=True)
    on_a_side_stream(lambda: step_of(model, optimizer, images, labels))
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step_of(model, optimizer, images, labels)
    with torch.no_grad():  # resets the model: the steps before the capture have trained it
        model.load_state_dict(start)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()

    def replayed() -> Tensor:
        graph.replay()
        return loss

    assert_falls_alike(falls(replayed), losses)


@pytest.mark.parametrize("recipe", RECIPES)
def test_graphed_callables(recipe: str, images: Tensor, labels: Tensor) -> None:
    model, exact, eager, losses = in_eager("vit", recipe, images, labels)
    model = torch.cuda.make_graphed_callables(model, (torch.randn_like(images),))
    assert_as_in_eager(draws_of(lambda: gradients(model, images, labels)), eager, exact)
    assert_falls_alike(trained(model, images, labels), losses)
