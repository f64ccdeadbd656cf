"""Features that users put around a layer, as a table: feature x kind of layer x configuration.

A test is a feature; its parameters are the kinds of layers (:data:`KINDS`), and where it matters
`default` or `accurate` with the 8-bit forward. A kind's own behaviour is tested in its own file.
"""

import copy
import dataclasses
import functools
import itertools
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch.layers.attention import HotMultiheadAttention
from hotcore.torch.ops import core
from support import cosine, nbytes, refused, saved_tensors, strided
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_graphs import conv1d, same

pytestmark = pytest.mark.usefixtures("seeded")

Tensors = list[torch.Tensor]
Call = Callable[[torch.Tensor], torch.Tensor]


class Self(nn.Module):
    """An attention that is called with one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def frozen() -> nn.Module:
    """A linear layer below adapters (LoRA): its weight is not trained, its bias is."""
    layer = nn.Linear(64, 48)
    layer.weight.requires_grad_(False)
    return layer


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 48), (2, 20, 64)),
    "frozen": (frozen, (2, 20, 64)),
    "conv1d": (lambda: conv1d(64, 48), (2, 20, 64)),
    "1x1": (lambda: nn.Conv2d(64, 48, 1), (2, 64, 6, 6)),
    "3x3": (lambda: nn.Conv2d(16, 24, 3, padding=1), (2, 16, 8, 8)),
    "attention": (Self, (3, 16, 64)),
}
"""Name -> the plain module, the shape of x."""
TRAINED = [kind for kind in KINDS if kind != "frozen"]
ONE_LAYER = [kind for kind in TRAINED if kind != "attention"]
INT8 = hot.HotConfig.recipe("accurate", forward="int8")
both_configs = pytest.mark.parametrize("recipe", ["default", INT8], ids=str)
"""The two configurations of the table."""


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", names or list(KINDS))


def pair(kind: str, recipe: Any = "default") -> tuple[nn.Module, nn.Module]:
    """A plain module, and one with equal parameters that is converted."""
    plain = KINDS[kind][0]()
    return plain, converted(copy.deepcopy(plain), recipe)


def converted(module: nn.Module, recipe: Any = "default") -> nn.Module:
    return hot.convert(module, recipe, lambda *_: True)


def inputs(kind: str, **options: Any) -> torch.Tensor:
    return torch.randn(KINDS[kind][1], **options)


def layer_of(module: nn.Module) -> nn.Module:
    """The layer that holds the first weight."""
    return module.attention if isinstance(module, Self) else module


def weights(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() > 1]


def leaves(module: nn.Module, x: torch.Tensor) -> Tensors:
    return [t for t in (x, *module.parameters()) if t.requires_grad]


def random_like(y: torch.Tensor) -> torch.Tensor:
    """The same numbers in every call, without a draw from the default generator."""
    generator = torch.Generator().manual_seed(6)
    return torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.dtype)


def step(
    module: nn.Module, x: torch.Tensor, call: Call | None = None, gy: Any = None, seed: int = 5
) -> Tensors:
    """y and the gradients of x and of the trained parameters."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = (module if call is None else call)(x)
    y.backward(random_like(y) if gy is None else gy)
    return [y.detach(), *(leaf.grad for leaf in leaves(module, x))]


class Operators(TorchDispatchMode):
    """Records hotcore's operators: ``name``, or ``name gx gw gb`` with the wanted gradients.

    A convolution's backward may be torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        names = ("gx", "gw", "gb")
        if name == "convolution_backward":
            wanted = [g for g, needed in zip(names, args[-1], strict=True) if needed]
            self.calls.append(" ".join(["backward", *wanted]))
        elif space == "hotcore" and name.startswith("backward"):
            dtypes = args[7].split()
            wanted = [g for g, dtype in zip(names, dtypes, strict=True) if dtype != "None"]
            self.calls.append(" ".join([name, *wanted]))
        elif space == "hotcore":
            self.calls.append(name)
        return func(*args, **(kwargs or {}))

    def backwards(self) -> list[str]:
        """The wanted gradients of every backward, in the order of the forward pass."""
        return [c.partition(" ")[2] for c in reversed(self.calls) if c.startswith("backward")]

    def compressed(self) -> int:
        return sum(call.startswith("compress") for call in self.calls)


@pytest.mark.parametrize("mode", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "recipe", ["default", INT8, dataclasses.replace(INT8, forward_in_eval=True)]
)
@kinds()
def test_sizes_of_zero_and_one(kind: str, recipe: Any, mode: str) -> None:
    plain, module = pair(kind, recipe)
    if kind == "frozen":
        hot.freeze_int8(module)
    shape = KINDS[kind][1]
    axes = range(len(shape) - 1) if len(shape) == 3 else (0,)
    sizes = [[*shape[:axis], size, *shape[axis + 1 :]] for axis in axes for size in (0, 1)]
    cases = [*itertools.product(sizes, (True, False))]
    for size, train in cases if mode == "eager" else cases[:1]:
        found = []
        for each in (plain.train(train), module.train(train)):
            each.zero_grad()
            x = torch.zeros(size, requires_grad=True)
            call: Any = each
            if mode != "eager":
                torch._dynamo.reset()
                call = torch.compile(each, backend=mode, fullgraph=True)
            y = call(x)
            y.square().sum().backward()
            trained = [p.grad for p in each.parameters() if p.requires_grad]
            found.append([y, x.grad, *trained])
        for ours, theirs in zip(found[1], found[0], strict=True):
            assert ours.shape == theirs.shape and bool(ours.any()) == bool(theirs.any())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (0, 0), (1, 1)])
def test_layers_without_features(sizes: tuple[int, int]) -> None:
    layer = converted(nn.Linear(*sizes))
    gradients = step(layer, torch.randn(3, sizes[0]))
    assert [tuple(g.shape) for g in gradients[1:3]] == [(3, sizes[0]), sizes[::-1]]


@kinds()
def test_eval_mode_is_plain(kind: str) -> None:
    """Bits, gradients, saved tensors and torch's generator."""
    plain, module = (each.eval() for each in pair(kind))
    x = inputs(kind)
    with saved_tensors() as kept:
        y = module(x.clone().requires_grad_())
    assert y.requires_grad and not any(tensor.dtype == torch.uint8 for tensor in kept)
    assert same(step(module, x), step(plain, x))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(module(x), plain(x))
    state = torch.get_rng_state()
    module(x)
    assert torch.equal(torch.get_rng_state(), state)


@kinds()
def test_without_gradients_it_is_plain(kind: str) -> None:
    plain, module = pair(kind)
    x = inputs(kind)
    expected = plain(x)
    with torch.no_grad():
        y = module(x)
    assert not y.requires_grad
    with torch.inference_mode():
        inference = module(x)
    assert inference.is_inference()
    for got in (y, inference, module(x).detach()):
        torch.testing.assert_close(got, expected)  # an attention's sums have another order
        assert kind == "attention" or torch.equal(got, expected)


@kinds()
def test_state_dict_both_ways(kind: str, tmp_path: Path) -> None:
    plain, module = pair(kind)
    other, again = pair(kind)
    assert list(module.state_dict()) == list(plain.state_dict())
    x = inputs(kind)
    for source, target in ((plain, again), (module, other)):
        torch.save(source.state_dict(), tmp_path / "state.pt")
        target.load_state_dict(torch.load(tmp_path / "state.pt"))
        torch.testing.assert_close(target(x), plain(x))
        assert same(target.parameters(), source.parameters())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("plain", "ours", "sizes"),
    [
        (nn.Linear, hot.HotLinear, (40, 30)),
        (nn.Conv2d, hot.HotConv2d, (8, 16, 3, 2, 1)),
        (nn.MultiheadAttention, HotMultiheadAttention, (64, 4)),
    ],
)
def test_initialised_as_the_plain_one(plain: Any, ours: Any, sizes: Any, bias: bool) -> None:
    states = []
    for cls, options in ((plain, {}), (ours, {"config": "fast"})):
        torch.manual_seed(3)
        states.append(cls(*sizes, bias=bias, **options).state_dict())
    assert states[0].keys() == states[1].keys()
    assert same(states[0].values(), states[1].values())


@both_configs
@kinds(*TRAINED)
def test_manual_seed_repeats_the_bits(kind: str, recipe: Any) -> None:
    _, module = pair(kind, recipe)
    x = inputs(kind)
    first, again, other = (step(module, x, seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    torch.testing.assert_close(first[0], other[0])
    _, gx, *others = zip(first, other, strict=True)
    assert torch.equal(*gx) == (kind == "3x3")  # of which torch's own g_x reads nothing of x
    for a, b in others:
        assert a.dim() == 1 or not torch.equal(a, b)  # a bias has an exact gradient


# torch's part of an attention depends on it, and the products of a 3x3 kernel are torch's
@kinds("frozen", *(kind for kind in ONE_LAYER if kind != "3x3"))
def test_number_of_threads_does_not_matter(kind: str) -> None:
    _, module = pair(kind)
    x, results = inputs(kind), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert core.context_for(x).threads == threads
        results.append(step(module, x)[1:])
    assert same(results[1], results[0]) and same(results[2], results[0])


@kinds()
def test_backward_twice_gives_the_same_bits(kind: str) -> None:
    _, module = pair(kind, "fast")
    x = inputs(kind, requires_grad=True)
    y = module(x).sum()
    one = torch.autograd.grad(y, leaves(module, x), retain_graph=True)
    assert same(one, torch.autograd.grad(y, leaves(module, x)))


class SharedInput(nn.Module):
    """Three layers with one x, which they compress once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return self.q(x) * self.k(x) + self.v(x)


@pytest.mark.parametrize("forward", ["plain", "int8"])
def test_layers_of_one_x_in_two_precisions(forward: str) -> None:
    """A layer outside of autocast keeps an x that fp16 cannot hold."""
    layers = nn.ModuleList([nn.Linear(64, 48), nn.Linear(64, 48)])
    hot.convert(layers, "accurate", lambda *_: True, forward=forward)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            layers[0](x)
        with torch.autocast("cpu", enabled=False):
            return layers[1](x)

    x = 1e5 * torch.randn(128, 64)
    y = torch.compile(run, backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(y, run(x)) and layers[1].weight.grad.isfinite().all()


HOW = [*((kind, "hot") for kind in KINDS), ("linear", "frozen"), ("conv1d", "frozen")]


@pytest.mark.parametrize(("kind", "how"), [*HOW, ("linear", "custom")])
def test_a_checkpoint_of_partitioned_parameters(kind: str, how: str) -> None:
    """ZeRO-3 empties them after every forward pass, that of a recomputation included."""
    plain, module = pair(kind)
    if how == "custom":
        module = hot.CustomBackward().convert(plain, lambda *_: True)
    module.requires_grad_(False)
    if how == "frozen":
        hot.freeze_int8(module)
    model, x = nn.Sequential(module, nn.Tanh()), inputs(kind)
    expected = step(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    full = {p: p.detach().clone() for p in module.parameters()}

    def gather(*_: Any) -> None:
        for p, values in full.items():
            p.data = values.clone()

    def partition(*_: Any) -> None:
        for p in full:
            p.data = torch.empty(0, dtype=p.dtype)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(partition)
    module.register_full_backward_pre_hook(gather)
    partition()
    assert same(step(model, x, lambda x: checkpoint(model, x, use_reentrant=False)), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@both_configs
@pytest.mark.parametrize("kind", [*KINDS, "shared input"])
def test_checkpoint_repeats_the_bits(kind: str, recipe: Any, reentrant: bool) -> None:
    if kind == "shared input":
        module, x = converted(SharedInput(), recipe), torch.randn(40, 64)
    else:
        module, x = pair(kind, recipe)[1], inputs(kind)
    if kind == "frozen" and recipe is INT8:
        hot.freeze_int8(module)
    # Dropout shows that forward and its repetition draw the same numbers: a reentrant checkpoint
    # runs the first one without gradients.
    block = nn.Sequential(module, nn.GELU(), nn.Dropout(0.1))
    wrapped = step(block, x, lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert same(wrapped, step(block, x))


@kinds()
def test_a_frozen_weight_saves_nothing_of_x(kind: str) -> None:
    _, module = pair(kind)
    for weight in weights(module):
        weight.requires_grad_(False)
    x = inputs(kind, requires_grad=True)
    with Operators() as seen, saved_tensors() as kept:
        y = module(x * 1)
    if kind != "attention":  # attention itself saves q, k, v
        own = {weight.untyped_storage().data_ptr() for weight in weights(module)}
        others = [t for t in kept if t.untyped_storage().data_ptr() not in own]
        assert nbytes(others) == 8  # the seed
    with seen:
        y.sum().backward()
    assert seen.compressed() == 0 and set(seen.backwards()) == {"gx gb"}
    assert x.grad is not None and all(weight.grad is None for weight in weights(module))
    assert all(p.grad is not None for p in module.parameters() if p.dim() == 1)


@kinds(*TRAINED)
def test_a_frozen_input_has_no_gradient(kind: str) -> None:
    _, module = pair(kind)
    x = inputs(kind)
    with Operators() as seen, saved_tensors() as kept:
        y = module(x)
    if kind != "attention":
        assert sorted(t.dtype for t in kept if t.ndim) == [torch.uint8]  # not the weight
    with seen:
        y.sum().backward()
    first, *others = seen.backwards()
    assert first == "gw gb" and set(others) <= {"gx gw gb"}
    assert x.grad is None and all(p.grad is not None for p in module.parameters())


@kinds(*TRAINED)
def test_a_frozen_or_missing_bias_is_not_computed(kind: str) -> None:
    _, module = pair(kind)
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.dim() > 1)
    x = inputs(kind, requires_grad=True)
    with Operators() as seen:
        module(x).sum().backward()
    assert set(seen.backwards()) == {"gx gw"}


@kinds()
def test_x_is_freed(kind: str) -> None:
    _, module = pair(kind)
    x = inputs(kind, requires_grad=True) * 1
    gone = weakref.ref(x)
    y = module(x)
    del x
    assert gone() is None
    y.sum().backward()


@kinds()
def test_a_weight_changed_in_place_is_noticed(kind: str) -> None:
    _, module = pair(kind)
    y = module(inputs(kind, requires_grad=True))
    with torch.no_grad():
        weights(module)[0].add_(1)
    refused(y.sum().backward, "modified by an inplace operation", RuntimeError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both_configs
@kinds()
def test_autocast(kind: str, recipe: Any, dtype: torch.dtype) -> None:
    plain, module = pair(kind, recipe)
    x = inputs(kind)

    def under(each: nn.Module) -> Tensors:
        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return each(x)

        return step(each, x, call)

    (y, *ours), (expected, *theirs) = under(module), under(plain)
    assert y.dtype == expected.dtype == dtype
    eight_bits = recipe is INT8 and kind != "3x3"
    assert kind == "attention" or torch.equal(y, expected) != eight_bits
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.1 if eight_bits else 0.05)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
        assert cosine(a.numpy(), b.numpy()) > 0.9


@kinds(*ONE_LAYER)
def test_autocast_of_mixed_inputs(kind: str) -> None:
    """x is bfloat16 already and parameters are fp32, as between two layers under autocast."""
    plain, module = pair(kind)
    x = inputs(kind, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
        assert torch.equal(y, plain(x))
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@kinds(*ONE_LAYER)
def test_autocast_leaves_its_cache_alone(kind: str) -> None:
    """A cached cast without its graph would lose the gradient of the second, plain use."""
    plain, module = pair(kind)
    x = inputs(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x)
        y = torch.func.functional_call(plain, dict(module.named_parameters()), x)
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@kinds()
def test_moves_between_dtypes(kind: str, dtype: torch.dtype) -> None:
    module = pair(kind)[1].to(dtype)
    x = inputs(kind).to(dtype)
    assert all(tensor.dtype == dtype and tensor.isfinite().all() for tensor in step(module, x))
    refused(lambda: module.double()(x.double().requires_grad_()), "x: dtype float64")
    assert module.eval()(x.double()).dtype == torch.float64  # the plain layer


@both_configs
@kinds()
def test_meta_tensors(kind: str, recipe: Any) -> None:
    _, module = pair(kind, recipe)
    shape = module(inputs(kind)).shape
    module = module.to("meta")
    x = torch.empty(KINDS[kind][1], device="meta", requires_grad=True)
    y = module(x)
    assert y.shape == shape and y.device.type == "meta"
    y.sum().backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves(module, x))
    if not isinstance(module, nn.Conv2d):  # torch's take any x
        with pytest.raises((RuntimeError, ValueError), match=r"no values: model.to_empty\(device"):
            module(inputs(kind))


@kinds(*ONE_LAYER)
def test_strides_do_not_matter(kind: str) -> None:
    _, module = pair(kind)
    x = inputs(kind)
    gy = random_like(module(x))
    expected = step(module, x, gy=gy)[1:]
    assert not strided(x).is_contiguous() and not strided(gy).is_contiguous()
    assert same(step(module, strided(x), gy=strided(gy))[1:], expected)
    ones = torch.ones_like(gy)
    assert same(step(module, x, gy=torch.ones(()).expand_as(gy))[1:], step(module, x, gy=ones)[1:])
    with torch.no_grad():
        for parameter in weights(module):
            parameter.set_(strided(parameter.detach()))
    assert same(step(module, x, gy=gy)[1:], expected)


@kinds(*TRAINED)
def test_gradients_accumulate(kind: str) -> None:
    _, module = pair(kind)
    parts = [inputs(kind) for _ in range(3)]
    torch.manual_seed(5)
    total = [torch.zeros_like(p) for p in module.parameters()]
    for part in parts:
        found = torch.autograd.grad(module(part).square().sum(), list(module.parameters()))
        total = [a + b for a, b in zip(total, found, strict=True)]
    torch.manual_seed(5)
    places = set()
    for part in parts:
        module(part).square().sum().backward()
        places.add(weights(module)[0].grad.data_ptr())
    assert len(places) == 1  # added in place
    assert same([p.grad for p in module.parameters()], total)


@kinds(*TRAINED)
def test_a_layer_used_twice_on_one_x(kind: str) -> None:
    """Each use rounds with its own seed, and autograd adds the gradients."""
    _, module = pair(kind, "fast")
    x = inputs(kind, requires_grad=True)
    gy = random_like(module(x))
    torch.manual_seed(5)
    each = [torch.autograd.grad(module(x * 1), leaves(module, x), gy) for _ in range(2)]
    torch.manual_seed(5)
    activation = x * 1
    y = module(activation) + module(activation)
    got = torch.autograd.grad(y, leaves(module, x), gy)
    assert same(list(got), [a + b for a, b in zip(*each, strict=True)])
    of_gw = 1 if kind == "3x3" else 0  # whose g_x takes no random numbers
    assert not torch.equal(each[0][of_gw], each[1][of_gw])


@both_configs
@kinds()
def test_copies(kind: str, recipe: Any, tmp_path: Path) -> None:
    _, module = pair(kind, recipe)
    x = inputs(kind)
    expected = step(module, x)  # the configuration's libhot object is made
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert type(layer_of(again)) is type(layer_of(module))
        assert layer_of(again).config == layer_of(module).config
        assert all(a is not b for a, b in zip(weights(again), weights(module), strict=True))
        assert same(step(again, x), expected)


@kinds(*TRAINED)
def test_hooks_survive_conversion(kind: str) -> None:
    plain, _ = pair(kind)
    calls: list[str] = []
    layer = layer_of(plain)
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    weights(plain)[0].register_hook(lambda gradient: calls.append("gradient"))
    weights(plain)[0].register_post_accumulate_grad_hook(lambda p: calls.append("added"))
    module = converted(plain)
    module(inputs(kind, requires_grad=True)).sum().backward()
    assert calls[0] == "forward" and sorted(calls[1:]) == ["added", "backward", "gradient"]
    assert calls.index("gradient") < calls.index("added")


@kinds(*TRAINED)
def test_differentiating_twice_is_refused(kind: str) -> None:
    _, module = pair(kind)
    x = inputs(kind, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"hotcore.torch: create_graph=True .* revert"):
        torch.autograd.grad(module(x).square().sum(), x, create_graph=True)


@both_configs
@kinds(*TRAINED)
def test_torch_func_and_forward_mode_are_refused(kind: str, recipe: Any) -> None:
    _, module = pair(kind, recipe)
    x, state = inputs(kind), dict(module.named_parameters())
    says = r"hotcore.torch.(linear|conv2d): torch.func transforms .* revert"

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,)).sum()

    refused(lambda: torch.func.grad(loss)(state), says, NotImplementedError)
    refused(lambda: torch.func.grad(lambda x: module(x).sum())(x), says, NotImplementedError)
    refused(lambda: torch.func.vmap(module)(x[:, None]), says, NotImplementedError)
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises((NotImplementedError, RuntimeError)):
        module(forward.make_dual(x.clone().requires_grad_(), torch.ones_like(x)))
    loss(state)  # without a transform it is an ordinary call
    module.eval()  # plain torch
    torch.func.grad(loss)(state)


@both_configs
@kinds()
def test_compiled_equals_eager(kind: str, recipe: Any) -> None:
    torch._dynamo.reset()
    _, module = pair(kind, recipe)
    x = inputs(kind)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    ours = [*step(module, x, compiled), torch.rand(())]
    assert same(ours, [*step(module, x), torch.rand(())])


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@kinds("linear", "3x3")
def test_autocast_inside_a_checkpoint(kind: str, mode: str) -> None:
    _, module = pair(kind, "fast")
    block, x = nn.Sequential(module, nn.ReLU()), inputs(kind)

    def run(call: Call, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x).float()

    wrapped = functools.partial(run, functools.partial(checkpoint, block, use_reentrant=False))
    expected = step(block, x, functools.partial(run, block))
    if mode == "compiled":
        torch._dynamo.reset()
        wrapped = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
        expected[1] = expected[1].bfloat16().float()  # x is cast in the graph, and g_x back
    assert same(step(block, x, wrapped), expected)
