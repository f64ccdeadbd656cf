"""convert(..., saved=): ReLU's bits in eager and compiled graphs, kept bytes, unchanged modules.

Experts: test_experts.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hotcore.torch import _compat, saved  # noqa: E402
from hotcore.torch.ops import relu as ops  # noqa: E402
from hotcore.torch.ops.relu import relu  # noqa: E402
from support import saved_tensors, storage_bytes  # noqa: E402
from torch import nn  # noqa: E402

MODES = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def fresh(seeded: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_mode(function: Any, mode: str, **options: Any) -> Any:
    if mode == "eager":
        return function
    return torch.compile(function, fullgraph=True, backend=mode, **options)


def kept_bytes(call: Callable[[], torch.Tensor], parameters: Any = ()) -> int:
    """Of all storages that backward keeps, but those of parameters."""
    with saved_tensors(leaves=True) as kept:
        call()
    return sum(storage_bytes(kept, parameters).values())


# ---- ReLU ----


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (5, 33, 40), (4, 1024), (2, 6, 5, 7)])
def test_relu_is_exact_and_keeps_a_bit(
    shape: tuple[int, ...], dtype: torch.dtype, mode: str
) -> None:
    x = torch.randn(shape, dtype=dtype)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    gy = torch.randn_like(x)
    y = in_mode(relu, mode)(x)
    assert torch.equal(y, x.relu()) and y.stride() == x.stride()
    (gx,) = torch.autograd.grad(y, x, gy)
    assert torch.equal(gx, torch.where(x > 0, gy, 0.0)) and gx.stride() == x.stride()
    assert kept_bytes(lambda: relu(x)) == (x.numel() + 1023) // 1024 * 128


@pytest.mark.long
@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_relu_of_dynamic_shapes(mode: str) -> None:
    """In torch 2.6 inductor's C++ took a remainder of the symbolic size wrongly."""
    function = in_mode(relu, mode, dynamic=True)
    for shape in ((5, 33, 40), (3, 7, 11), (2, 16, 64)):
        x, gy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        (gx,) = torch.autograd.grad(function(x), x, gy)
        assert torch.equal(gx, torch.where(x > 0, gy, 0.0))


@pytest.mark.parametrize("mode", MODES)
def test_relu_in_place(mode: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        inner = x * 2
        return relu(inner, inplace=True) + inner  # which is the result, too

    x = torch.randn(4, 256, requires_grad=True)
    y = in_mode(function, mode)(x)
    assert torch.equal(y, 4 * x.relu())
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 4.0 * (x > 0))


def test_the_bytes() -> None:
    x = torch.randn(3, 1000)
    x[0, :3] = torch.tensor([0.0, float("nan"), -0.0])
    found = ops.pack_signs(x)
    bits = np.pad(x.numpy().ravel() > 0, (0, 72)).reshape(3, 8, 128)
    assert np.array_equal(found.numpy(), np.packbits(bits, 1, "little")[:, 0])
    assert torch.equal(ops.unpack_signs(found, x.shape), x > 0)


def test_without_triton_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

    monkeypatch.setitem(__import__("sys").modules, "hotcore.torch.ops.relu_triton", None)
    _compat.triton_kernels.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton is missing.*saved="):
        assert ops._kernels(OnCuda()) is None
    assert ops._kernels(OnCuda()) is None
    _compat.triton_kernels.cache_clear()


def test_what_stays_plain() -> None:
    for x in (torch.randn(8, dtype=torch.float64), torch.randn(0, 4)):
        assert relu(x.requires_grad_()).grad_fn.name().startswith("Relu")
    assert relu(torch.randn(8)).grad_fn is None
    rows = [torch.randn(3, 128), torch.randn(5, 128)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    (got,) = torch.autograd.grad(relu(x).values().sum(), x)
    assert torch.equal(got.values(), (torch.cat(rows) > 0).float())


def test_differentiated_twice() -> None:
    layer = nn.Linear(16, 16)
    y = relu(layer(torch.randn(4, 16)))
    with pytest.raises(RuntimeError, match="create_graph=True reaches a HOT layer"):
        torch.autograd.grad(y.square().sum(), list(layer.parameters()), create_graph=True)


def test_inside_transforms_it_is_torch_s() -> None:
    x = torch.randn(4, 16)
    assert torch.equal(torch.func.grad(lambda x: relu(x).sum())(x), (x > 0).float())
    assert torch.equal(torch.func.vmap(torch.func.jacrev(relu))(x), torch.diag_embed(x > 0).float())


def test_opcheck() -> None:
    x = torch.randn(2, 600)
    for leaf in (x, x.clone().requires_grad_()):
        torch.library.opcheck(ops.pack_signs, (leaf,))
    torch.library.opcheck(ops.unpack_signs, (ops.pack_signs(x), list(x.shape)))


# ---- models ----


class Net(nn.Module):
    """ReLUs as a module, as a method and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 64, 3), nn.ReLU(inplace=True)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.act(self.conv(x)).flatten(2).transpose(1, 2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(F.relu(self.up(x)).relu()))


def gradients(function: Any, model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(2, 3, 18, 18, generator=torch.Generator().manual_seed(4))
    return list(torch.autograd.grad(function(x).square().sum(), list(model.parameters())))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_without(mode: str) -> None:
    plain = hot.convert(Net(), "default")
    model = copy.deepcopy(hot.revert(copy.deepcopy(plain)))
    report = hot.convert(model, "default", saved=8).hot_report.saved
    assert [(row.name, dict(row.bits)) for row in report.converted] == [
        ("act", {"relu": 1}),
        ("mlp", {"relu": 1}),
    ]
    wanted = gradients(in_mode(plain, mode), plain)
    torch._dynamo.reset()
    for got, exact in zip(gradients(in_mode(model, mode), model), wanted, strict=True):
        torch.testing.assert_close(got, exact)
    x = torch.randn(2, 3, 18, 18)
    kept = [kept_bytes(lambda m=m: m(x), m.parameters()) for m in (plain, model)]
    values = 2 * 256 * (64 + 256 + 256 + 64)
    # Plain keeps y of the method's ReLU for itself and the layer's codes of it for the layer.
    assert kept[0] - kept[1] == values * 4 - values // 8


@pytest.mark.long
def test_the_partitioner_keeps_bits() -> None:
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        return make_boxed_func(graph.forward)

    def call(x: torch.Tensor) -> torch.Tensor:
        return relu(x * 2).cos()

    function = torch.compile(call, backend=lambda g, i: compile_fx(g, i, inner_compile=inner))
    x = torch.randn(64, 1024, requires_grad=True)
    # cos keeps y; without it only the bits are needed.
    assert kept_bytes(lambda: function(x), [x]) <= x.nbytes + x.numel() // 8
    bare = torch.compile(relu, backend=lambda g, i: compile_fx(g, i, inner_compile=inner))
    assert kept_bytes(lambda: bare(x), [x]) == x.numel() // 8


# ---- convert and revert ----


def test_convert_changes_classes_and_nothing_else() -> None:
    model = Net()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    report = hot.convert(model, "default", saved=8).hot_report
    assert list(model.state_dict()) == names
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model.act, nn.ReLU) and type(model.act) is not nn.ReLU
    assert not any(getattr(m, "defer", False) for m in model.modules())
    text = str(report)
    assert "ReLU: kept in bits: relu 1 (act)" in text and "Mlp: kept in bits: relu 1" in text
    assert report.to_dict()["saved"]["converted"][0]["bits"] == {"relu": 1}
    assert "inplace=True, saved=1" in repr(model.act)
    hot.revert(model)
    assert type(model.act) is nn.ReLU and type(model.mlp) is Mlp
    assert "saved_bits" not in vars(model.act)


def test_eval_is_plain() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    saved.convert_saved(model)
    x = torch.randn(4, 8, requires_grad=True)
    assert model.eval()(x).grad_fn.name().startswith("Relu")
    with torch.no_grad():
        assert torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Mlp())
    saved.convert_saved(model)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other] == [type(m) for m in model]
    assert other[1].saved_bits == 1
    hot.revert(other)
    assert type(other[1]) is nn.ReLU and isinstance(model[1], saved.SavedCodes)


def test_bits_by_kind_and_by_name() -> None:
    def found(**bits: Any) -> list[str]:
        model = nn.ModuleDict({"a": Net(), "b": Net()})
        report = saved.convert_saved(model, {key.replace("_", "."): v for key, v in bits.items()})
        return [row.name for row in report.converted]

    assert found(experts=4) == ["a.act", "a.mlp", "b.act", "b.mlp"]
    assert found(**{"b_*": None}) == ["a.act", "a.mlp"]
    assert found(relu=None, **{"b_act": {"relu": 1}}) == ["b.act"]
    assert found(relu=None) == []  # nothing is asked for
    assert found(relu=1, **{"a_*": None, "a_mlp": 4}) == ["a.mlp", "b.act", "b.mlp"]


GONE = r": 'norm' is gone: .*use hot\.recompute\(model\.blocks\[:n\]\)"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "expected 8, 4, None"),
        (True, "expected 8, 4, None"),
        ({"experts": 2}, r"experts: 2; expected one of \(8, 4, None\)"),
        ({"relu": 8}, r"relu: 8; expected one of \(1, None\)"),
        ({"softmax": 8}, "'softmax' is no kind of operation .relu, experts"),
        ({"act*": {"softmax": 4}}, "'softmax': no such kind of operation; known: relu"),
        ({"expert": 8}, "no kind of operation .* near it: experts"),
        ({"nowhere.*": 4}, "matches no module"),
        ({3: 8}, "the key 3; expected a kind"),
        ({"norm": 8}, "saved" + GONE),
        ({"relu": 1, "norm": None}, "saved" + GONE),
        ({"act*": {"norm": 4}}, r"saved\['act\*'\]" + GONE),
        *(({kind: 8}, f"{kind}' is gone") for kind in ("activation", "attention", "product")),
    ],
)
def test_bad_switches(bad: Any, message: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=message):
        hot.convert(model, "default", saved=bad)
    assert type(model.act) is nn.ReLU and type(model.mlp.up) is nn.Linear


@pytest.mark.parametrize("asked", [8, 4, {"relu": 1}, {"experts": 4}])
def test_a_model_without_either_is_refused(asked: Any) -> None:
    """Nobody is left to believe that norms and activations keep codes."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))
    with pytest.raises(ValueError, match=r"no ReLU and no experts .*hot\.recompute\(model\.bl"):
        hot.convert(model, "default", saved=asked)
    assert type(model[0]) is nn.Linear


def test_twice_is_refused() -> None:
    model = Net()
    saved.convert_saved(model)
    with pytest.raises(ValueError, match="keeps codes already .act"):
        saved.convert_saved(model)


def test_an_attribute_named_as_a_function_is_no_call() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(x + 1)

    report = saved.convert_saved(Residual())
    assert [row.name for row in report.converted] == ["relu"]


@pytest.mark.parametrize("function", [F.relu, torch.relu])
def test_arguments_by_name(function: Any) -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(input=x) if function is torch.relu else F.relu(input=x)

    model, x = Named(), torch.randn(3, 1024, requires_grad=True)
    saved.convert_saved(model)
    assert kept_bytes(lambda: model(x)) == 3 * 128


def test_a_forward_of_its_own_is_named() -> None:
    """Calls would run it, and keep tensors as they are."""
    model = nn.Sequential(Mlp(), nn.ReLU())
    handle = hot.recompute(model[0])
    assert "forward of its own" in saved.convert_saved(model).left["0"]
    handle.remove()
    hot.revert(model)
    saved.convert_saved(model)
    handle = hot.recompute(model[0])
    with pytest.raises(ValueError, match="0: it has a forward of its own"):
        hot.revert(model)
    assert isinstance(model[1], saved.SavedCodes)
    handle.remove()
    assert not any(isinstance(m, saved.SavedCodes) for m in hot.revert(model).modules())


def test_accelerate_s_hooks_stay() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = nn.Sequential(nn.ReLU()), torch.randn(3, 1024, requires_grad=True)
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    saved.convert_saved(model)
    assert kept_bytes(lambda: model(x)) == 3 * 128
    hot.revert(model)
    assert model(x).grad_fn.name().startswith("Relu")
