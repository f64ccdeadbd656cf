"""``CustomBackward``: the identity is the plain layer; what a subclass changes is what happens."""

import copy
import math
from collections.abc import Callable

import hotcore.torch as hot
import pytest
import torch
import torch.nn.functional as F
from support import nbytes, refused, saved_tensors
from torch import Tensor, nn
from torch_graphs import every

pytestmark = pytest.mark.usefixtures("seeded")

GRID = 0.5


class Nearest(hot.CustomBackward):
    """g_y of g_x on a grid, rounded to nearest."""

    def gx_operands(self, gy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (gy / GRID).round() * GRID, w


class Stochastic(hot.CustomBackward):
    """g_y of both products on a grid, without bias; x in a byte."""

    def _round(self, gy: Tensor) -> Tensor:
        return torch.floor(gy / GRID + torch.rand_like(gy)) * GRID

    def gx_operands(self, gy: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self._round(gy), w

    def gw_gradient(self, gy: Tensor) -> Tensor:
        return self._round(gy)

    def keep(self, x: Tensor) -> tuple[Tensor, ...]:
        return ((x * 32).round().clamp(-127, 127).to(torch.int8),)

    def unkeep(self, kept: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
        return kept[0].float() / 32


class OwnProducts(hot.CustomBackward):
    """The exact products, computed here: a convolution's x is unfolded for them."""

    def g_x(self, gy: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bto,oi->bti", gy, w)

    def g_w(self, gy: Tensor, x: Tensor) -> Tensor:
        return gy.flatten(0, 1).T @ x.flatten(0, 1)


class Windows(hot.CustomBackward):
    """The exact products of windows, as a projection gets them."""

    elementwise = False


EXACT = (hot.CustomBackward, OwnProducts, Windows)
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "token": (lambda: nn.Linear(24, 16), (24,)),
    "tokens": (lambda: nn.Linear(24, 16, bias=False), (10, 24)),
    "samples": (lambda: nn.Linear(24, 16), (3, 10, 24)),
    "images": (lambda: nn.Linear(24, 16), (2, 4, 5, 24)),
    "nothing": (lambda: nn.Linear(24, 16), (0, 24)),
    "convolution": (lambda: nn.Conv2d(4, 16, 3, stride=2, padding=(1, 2)), (2, 4, 9, 8)),
    "one image": (lambda: nn.Conv2d(4, 16, (2, 3), dilation=2), (4, 9, 8)),
}


def run(layer: nn.Module, x: Tensor, gy: Tensor) -> list[Tensor | None]:
    for p in layer.parameters():
        p.grad = None
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(gy)
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", EXACT)
def test_the_identity_is_the_plain_layer(
    kind: str, dtype: torch.dtype, method: type[hot.CustomBackward]
) -> None:
    make, shape = KINDS[kind]
    plain = make().to(dtype)
    layer = copy.deepcopy(plain)
    assert method().convert(layer, every).hot_report == (("",), {})
    x = torch.randn(shape, dtype=dtype)
    gy = torch.randn_like(plain(x))
    room = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    ours, theirs = run(layer, x, gy), run(plain, x, gy)
    assert all(t is not None for t in (*ours, *theirs))
    torch.testing.assert_close(ours, theirs, **room)  # dtypes, too


def test_a_rounding_is_where_it_was_put() -> None:
    layer = nn.Linear(24, 16)
    Nearest().convert(layer, every)
    x, gy = torch.randn(3, 10, 24), torch.randn(3, 10, 16)
    _, gx, gw, gb = run(layer, x, gy)
    rounded = (gy / GRID).round() * GRID
    torch.testing.assert_close(gx, rounded @ layer.weight)
    torch.testing.assert_close(gw, gy.flatten(0, 1).T @ x.flatten(0, 1))  # exact
    torch.testing.assert_close(gb, gy.sum((0, 1)))
    assert (gx - gy @ layer.weight).norm() > 0.01 * gx.norm()


def test_a_convolution_of_stand_ins() -> None:
    """Each hook's stand-in is in its own product; x's are pixels, and no window is kept."""

    class Mine(Nearest):
        def forward_operands(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, 3 * w

        def gw_gradient(self, gy: Tensor) -> Tensor:
            return 5 * gy

        def unkeep(self, kept: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
            assert kept[0].shape == shape == (2, 9 * 8, 4)
            return 7 * kept[0]

    plain = nn.Conv2d(4, 16, 3, stride=2, padding=(1, 2), bias=False)
    x = torch.randn(2, 4, 9, 8).contiguous(memory_format=torch.channels_last)
    gy = torch.randn_like(plain(x))
    y, gx, gw = run(plain, x, gy)
    _, rounded, _ = run(plain, x, (gy / GRID).round() * GRID)
    Mine().convert(plain, every)
    with saved_tensors() as kept:
        found = run(plain, x, gy)
    assert nbytes(kept) <= nbytes([x, plain.weight])
    expected = [6 * y, rounded, 35 * gw]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert (gx - found[1]).norm() > 0.01 * gx.norm()


def test_the_bias_of_a_rounding() -> None:
    """Rounding by chance has none, rounding to nearest of gradients of one sign has."""
    layer = nn.Linear(12, 8, bias=False)
    x = (torch.randn(2, 6, 12) * 32).round().clamp(-127, 127) / 32  # exact in its byte
    gy = 0.1 + 0.1 * torch.rand(2, 6, 8)  # to nearest all are 0
    exact = gy @ layer.weight.detach(), gy.flatten(0, 1).T @ x.flatten(0, 1)
    draws = 400
    for method, biased in ((Stochastic(), (False, False)), (Nearest(), (True, False))):
        method.convert(layer, every)
        found = [run(layer, x, gy)[1:3] for _ in range(draws)]
        for i, wrong in enumerate(biased):
            sums = torch.tensor([float((each[i] * exact[i]).sum()) for each in found])
            error = (sums.mean() - exact[i].square().sum()) / exact[i].square().sum()
            noise = sums.std() / math.sqrt(draws) / exact[i].square().sum()
            assert (abs(error) > 0.9) if wrong else (abs(error) < 5 * noise + 1e-5)


def test_what_is_kept() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(4, 16, 64)
    Stochastic().convert(model, every)
    with saved_tensors() as kept:
        model(x)
    assert nbytes([t for t in kept if t.dtype == torch.int8]) == 2 * x.numel()
    hot.CustomBackward().convert(model, every)
    with saved_tensors() as kept:
        model(x)
    assert any(t.data_ptr() == x.data_ptr() for t in kept)  # x itself, no copy of it


def test_convert_and_revert() -> None:
    model = nn.Module()
    model.first, model.second = nn.Linear(64, 64), nn.Linear(64, 64)
    model.small = nn.Linear(64, 8)
    model.circular = nn.Conv2d(4, 64, 3, padding=1, padding_mode="circular")
    model.deep = nn.Conv2d(64, 64, 3, groups=64)
    model.head = nn.Linear(64, 64)
    parameters = dict(model.named_parameters())
    layers = dict(model.named_modules())
    nearest, stochastic = Nearest(), Stochastic()
    done = nearest.convert(model).hot_report  # as hot.convert chooses
    few = "fewer than 64 features"
    assert done.names == ("first", "second")
    expected = {"small": few, "head": "the output head", "deep": few}
    assert done.left.items() >= expected.items()
    done = stochastic.convert(model, lambda module, name: name in ("second", "circular")).hot_report
    assert done.names == ("second",) and "circular" in done.left["circular"]
    assert Nearest().convert(copy.deepcopy(model), every).hot_report.left["deep"] == "depthwise"
    assert (model.first.method, model.second.method) == (nearest, stochastic)
    assert "method=Stochastic" in repr(model)
    assert dict(model.named_parameters()) == parameters and dict(model.named_modules()) == layers
    with pytest.raises(ValueError, match="takes none of its layers.*left out by filter_fn"):
        nearest.convert(model, lambda *_: False)
    copied = copy.deepcopy(model)
    assert copied.second.method is not stochastic

    assert hot.convert(model, filter_fn=every).hot_report.converted  # others; these are named
    refused(lambda: nearest.convert(model), "runs HOT; hotcore.torch.revert")
    assert hot.revert(model) is model
    assert [type(m) for m in (model.first, model.second, model.small)] == [nn.Linear] * 3
    assert "method" not in vars(model.first)
    assert type(hot.revert(copied).second) is nn.Linear
    assert not hasattr(copied, "hot_report")


def test_a_second_backward_takes_the_layers_of_the_first() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 128))
    for method in (Nearest(), Stochastic()):
        assert method.convert(model).hot_report == (("0",), {"2": "the output head"})
    assert type(model[2]) is nn.Linear


def test_a_forward_of_its_own_is_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].forward = lambda x: F.linear(x, model[0].weight)
    done = Nearest().convert(model, every).hot_report
    assert done.names == ("1",) and "forward of its own" in done.left["0"]


def test_accelerate_s_hooks_stay() -> None:
    """They put a forward into the module that calls the class's."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64)
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    Nearest().convert(model, every)
    assert model(x).grad_fn.name() == "AddBackward0"  # of the bias
    hot.revert(model)
    assert model(x).grad_fn.name() == "AddmmBackward0"


def test_a_refused_revert_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    Nearest().convert(model, lambda _, name: name == "2")
    hot.convert(model, filter_fn=lambda _, name: name == "0")
    nn.utils.parametrizations.weight_norm(model[2])
    before = [type(module) for module in model]
    refused(lambda: hot.revert(model), "2 is now a ParametrizedCustomLinear")
    assert [type(module) for module in model] == before
    assert hasattr(model, "hot_report")


def test_eval_mode_and_writes_to_y() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    Nearest().convert(model, every)
    x = torch.randn(10, 64)
    model(x).sum().backward()  # the activation writes to y
    y = model[0](x.view(2, 5, 64))
    y += 1
    y.sum().backward()
    assert torch.equal(model.eval()(x), plain(x))


def test_wrong_shapes_are_refused() -> None:
    """autograd would sum a larger gradient, einsum repeat a single token."""

    def method(name: str, **hooks: Callable[..., Tensor]) -> hot.CustomBackward:
        return type(name, (hot.CustomBackward,), hooks)()

    inherited = hot.CustomBackward.g_w
    larger = method("Larger", g_x=lambda _, gy, w: (gy @ w).expand(5, *gy.shape[:2], w.shape[1]))
    x, w = torch.randn(2, 6, 12, requires_grad=True), torch.randn(8, 12, requires_grad=True)
    for wrong, name in (
        (larger, "g_x"),
        (method("One", gw_gradient=lambda _, gy: gy[:, :1]), "gw_gradient"),
        (method("Wide", g_w=lambda own, gy, x: inherited(own, gy, x).unsqueeze(0)), "g_w"),
        (method("Kept", unkeep=lambda _, kept, shape: kept[0][:, :1]), "unkeep"),
    ):
        y = wrong.linear(x, w)
        with pytest.raises(ValueError, match=rf"{type(wrong).__name__}\.{name}: shape"):
            y.sum().backward()
    layer, image = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 6, 6)
    for wrong, name in (
        (method("Narrow", gx_operands=lambda _, gy, w: (gy[:, 1:], w)), "gx_operands: g_y"),
        (method("Flat", gx_operands=lambda _, gy, w: (gy, w[:, 1:])), "gx_operands: w"),
        (method("One", gw_gradient=lambda _, gy: gy[:, :1]), "gw_gradient"),
    ):
        y = wrong.convert(layer, every)(image.requires_grad_())
        with pytest.raises(ValueError, match=rf"{type(wrong).__name__}\.{name}: shape"):
            y.sum().backward()
    unfolded = method("Unfolded", forward_operands=lambda _, x, w: (x.mT, w))
    with pytest.raises(ValueError, match=r"Unfolded\.forward_operands: x: shape \(2, 2, 36\)"):
        unfolded.convert(layer, every)(image)
    with pytest.raises(ValueError, match=r"x: shape \(2, 6, 12\); expected \[\.+, 6\] for weight"):
        larger.linear(x, torch.randn(8, 6))


@pytest.mark.parametrize("name", ["gx_operand", "gw_operands", "keeps", "elementwize"])
def test_a_misspelt_hook_is_named(name: str) -> None:
    hook = {"gw_operands": "gx_operands", "elementwize": "elementwise"}.get(name, name[:4])
    with pytest.raises(TypeError, match=rf"Mine\.{name}: .* did you mean {hook}"):
        type("Mine", (hot.CustomBackward,), {name: None, "_gx_operand": None, "scale": 2})


def test_gradients_of_gradients_are_refused() -> None:
    x, w = torch.randn(2, 6, 12), torch.randn(8, 12, requires_grad=True)
    loss = Nearest().linear(x, w).square().sum()
    with pytest.raises(RuntimeError, match="Nearest: gradients of gradients"):
        torch.autograd.grad(loss, [w], create_graph=True)


@pytest.mark.long
def test_autocast_and_compiled() -> None:
    convolutions = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    images, x = torch.randn(2, 4, 9, 8), torch.randn(10, 64)
    for method in (Nearest(), OwnProducts(), Windows()):
        for net, inputs in ((convolutions, images), (model, x)):
            method.convert(net, every)
            gy = torch.randn_like(net(inputs))
            eager = run(net, inputs, gy)
            torch.compiler.reset()
            compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(run(compiled, inputs, gy), eager, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
