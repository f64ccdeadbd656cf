"""Rows of docs/torch/support.md, "Supported features", that no other file tests."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch.ops import core
from support import refused, without_broken_torchvision
from torch import nn
from torch_graphs import same

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that TorchScript is deprecated, and that vmap loops over an operator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


Make = Callable[[], tuple[nn.Module, torch.Tensor]]
FORWARD_INT8 = hot.HotConfig(forward="int8")
LAYERS: dict[str, Make] = {
    "linear": lambda: (hot.HotLinear(64, 48), torch.randn(2, 48, 64)),
    "pointwise": lambda: (hot.HotConv2d(64, 48, 1), torch.randn(2, 64, 6, 6)),
    "window": lambda: (hot.HotConv2d(64, 48, 3, padding=1), torch.randn(2, 64, 6, 6)),
    "linear_int8": lambda: (hot.HotLinear(64, 48, config=FORWARD_INT8), torch.randn(2, 48, 64)),
    "pointwise_int8": lambda: (
        hot.HotConv2d(64, 48, 1, config=FORWARD_INT8),
        torch.randn(2, 64, 6, 6),
    ),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def gradients(
    module: nn.Module, x: torch.Tensor, gy: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    x, trained = x.clone().requires_grad_(), (p for p in module.parameters() if p.requires_grad)
    return torch.autograd.grad(module(x), (x, *trained), gy, **options)


@every_layer
def test_batched_gradients_are_those_of_each(make: Make) -> None:
    module, x = make()
    gys = torch.randn(3, *module(x).shape)
    batched = gradients(module, x, gys, is_grads_batched=True)
    for i, gy in enumerate(gys):
        assert same((ours[i] for ours in batched), gradients(module, x, gy))


def test_a_vectorised_jacobian() -> None:
    module, x = LAYERS["linear"]()
    jacobian = torch.autograd.functional.jacobian

    def rows(vectorize: bool) -> torch.Tensor:
        torch.manual_seed(3)
        return jacobian(lambda x: module(x)[0, :, :3].sum(0), x, vectorize=vectorize)

    assert torch.equal(rows(True), rows(False))
    assert float(rows(True).norm()) > 0
    with pytest.raises(NotImplementedError, match="hotcore.torch.linear: .*forward mode.* revert"):
        jacobian(lambda x: module(x).sum(0), x, vectorize=True, strategy="forward-mode")


@every_layer
def test_a_sparse_gradient(make: Make) -> None:
    module, x = make()
    gy = torch.randn_like(module(x)).relu()
    assert same(gradients(module, x, gy.to_sparse()), gradients(module, x, gy))


@every_layer
def test_fx_notes_the_call_in_training_mode(make: Make) -> None:
    module, x = make()
    graph = torch.fx.symbolic_trace(model := nn.Sequential(module, nn.ReLU()))
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert len(calls) == 1  # the layer; ReLU is a module
    for found in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        gy = torch.randn_like(model(x))
        ours, theirs = gradients(found, x, gy), gradients(model, x, gy)
        assert sorted(a.shape for a in ours) == sorted(b.shape for b in theirs)
        assert torch.equal(ours[0], theirs[0])
        assert any(torch.equal(ours[1], b) for b in theirs[1:])  # HOT's, by the same seed


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x, x, x)
        return y


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["attention", "Conv1D", "8", "4"])
def test_fx_notes_calls_of_other_layers(kind: str, training: bool) -> None:
    layer: nn.Module = Attends() if kind == "attention" else nn.Linear(64, 48)
    if kind == "Conv1D":
        with without_broken_torchvision():
            layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(48, 64)
    model, x = nn.Sequential(layer).train(training), torch.randn(2, 48, 64)
    hot.convert(model, FORWARD_INT8, lambda *_: True)
    if kind in "84":
        hot.freeze(model, int(kind))
    graph = torch.fx.symbolic_trace(model)
    for found in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        gy = torch.randn_like(model(x))
        assert torch.equal(gradients(found, x, gy)[0], gradients(model, x, gy)[0])


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="export took training graphs apart")
@every_layer
def test_export(make: Make) -> None:
    module, x = make()
    program = torch.export.export(module, (x,))
    gy = torch.randn_like(module(x))
    assert same(gradients(program.module(), x, gy), gradients(module, x, gy))
    apart = program.run_decompositions().module()
    with torch.no_grad():
        assert torch.equal(apart(x), module(x))
    with pytest.raises(RuntimeError, match=r"torch\.ops\.hotcore\.\w+: a graph whose HOT layers"):
        apart(x)  # it would be trained as a plain layer, or not at all
    graph = torch.export.export(module.eval(), (x,)).graph
    assert not any("hotcore" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("trained", [True, False])
@every_layer
def test_compiled_transforms_are_refused(make: Make, trained: bool) -> None:
    module, x = make()
    module.requires_grad_(trained)

    @torch.compile(backend="aot_eager")
    def tangent(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(module, (x,), (x,))[1]

    if trained or module.config.forward == "int8":
        refused(lambda: tangent(x), r"torch\.func transforms", (NotImplementedError, RuntimeError))
    else:  # the plain layer
        assert torch.allclose(tangent(x), torch.func.jvp(module.eval(), (x,), (x,))[1], atol=1e-6)


def test_no_tensor_is_an_error_that_says_so() -> None:
    weight = torch.randn(48, 64, requires_grad=True)
    with pytest.raises(TypeError, match=r"x: ndarray; expected a torch\.Tensor"):
        hot.linear(torch.randn(4, 64).numpy(), weight)
    refused(lambda: hot.conv2d([1.0], weight), r"x: list; expected a torch\.Tensor", TypeError)
    x = torch.randn(2, 4, 8, 8)
    for call, given in ((hot.linear, (x[..., :4], x[0, 0])), (hot.conv2d, (x, x[:, :, :1, :1]))):
        for name, arguments in (("weight", (given[0], None)), ("bias", (*given, [0.0]))):
            with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor, got (None|l)"):
                call(*arguments)


@every_layer
def test_script(make: Make) -> None:
    module, x = make()
    model = nn.Sequential(module, nn.ReLU())
    name = type(module).__name__
    for training in (True, False):
        for scripted in (model.train(training), module):
            with pytest.raises(NotImplementedError, match=rf"{name}: torch.jit.script .* revert"):
                torch.jit.script(scripted)
    assert model[0] is module
    plain = hot.revert(copy.deepcopy(model))
    assert torch.equal(torch.jit.script(plain)(x), model(x))


@every_layer
def test_trace(make: Make) -> None:
    module, x = make()
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace .* eval mode"):
        torch.jit.trace(module, x)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(module, x)(x), module(x))
    module.eval()
    assert torch.equal(torch.jit.trace(module, x)(x), module(x))
    assert core.bypasses_dispatcher(x)
