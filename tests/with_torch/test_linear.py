"""hot.linear and HotLinear: nn.Linear's forward, HOT's gradients, and only compressed x kept."""

import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import hotcore
import hotcore.torch as hot
import pytest
import torch
import torch.nn.functional as F
from hotcore.config import RECIPES, HotConfig
from hotcore.saved import saved_layout
from hotcore.torch.ops import codes, core
from hypothesis import given
from hypothesis import strategies as st
from support import equal_bits, nbytes, refused, saved_tensors
from torch import nn
from torch_graphs import Symbolic, drawn

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((7, 24), (2, 5, 24), (2, 3, 4, 24), (1, 2, 1, 2, 24), (24,), (0, 24), (3, 0, 24))


def config_name(config: str | HotConfig) -> str:
    return config if isinstance(config, str) else config.storage


def tensors(
    *shape: int, outs: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias that require grad."""
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = (torch.randn(outs, shape[-1]) / math.sqrt(shape[-1])).to(dtype).requires_grad_()
    return x, weight, torch.randn(outs, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_bit_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = tensors(*shape, dtype=dtype)
    for b in (bias, None):
        y = hot.linear(x, weight, b)
        assert y.requires_grad and torch.equal(y, F.linear(x, weight, b))


def test_a_bias_alone_is_plain() -> None:
    x, weight, bias = tensors(6, 20)
    y = hot.linear(x.detach(), weight.detach(), bias)  # nothing for HOT
    assert torch.equal(y, F.linear(x, weight, bias))
    (gb,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(gb, torch.full((16,), 6.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", RECIPES, ids=config_name)
def test_gradients_are_those_of_hotcore(config: str | HotConfig, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(3, 19, 70, dtype=dtype)
    gy = torch.randn(3, 19, 16).to(dtype)
    (key,) = drawn(99, 1)
    torch.manual_seed(99)
    got = torch.autograd.grad(hot.linear(x, weight, bias, config), (x, weight, bias), gy)
    operands = gy, weight.detach(), x.detach()
    expected = hotcore.backward_linear(*operands, config=config, need=("gx", "gw", "gb"), key=key)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        equal_bits(ours, theirs)


@pytest.mark.parametrize(
    ("config", "bound"), list(zip(RECIPES, (0.54, 0.505, 0.505, 1.01), strict=True)), ids=str
)
@pytest.mark.parametrize("shape", [(16, 197), (8, 256)])
def test_bytes_saved(config: str | HotConfig, bound: float, shape: tuple[int, int]) -> None:
    module = hot.HotLinear(192, 64, config=config)
    source = torch.randn(*shape, 192, requires_grad=True)
    x = source * 1  # no leaf, as in a network
    with saved_tensors() as kept:
        module(x)
    assert nbytes(kept) / x.numel() <= bound
    assert sorted(tensor.dtype for tensor in kept if tensor.ndim) == [torch.uint8]
    assert all(tensor.untyped_storage().data_ptr() != x.data_ptr() for tensor in kept)
    with saved_tensors() as plain:
        nn.Linear(192, 64)(x)
    assert nbytes([t for t in plain if t.data_ptr() == x.data_ptr()]) == 4 * x.numel()


def test_autocast_keeps_compressed_bytes() -> None:
    module = hot.HotLinear(192, 64)
    x = torch.randn(16, 197, 192, requires_grad=True) * 1
    with torch.autocast("cpu", dtype=torch.bfloat16), saved_tensors() as kept:
        module(x)
    assert nbytes(kept) / x.numel() <= 0.54


def test_bad_arguments() -> None:
    x, weight, bias = tensors(10, 24)
    rows = [torch.randn(3, 4), torch.randn(5, 4)]
    for layout in (torch.jagged, torch.strided):
        with pytest.raises(ValueError, match="x: a nested tensor"):
            hot.HotLinear(4, 4)(torch.nested.nested_tensor(rows, layout=layout))
    with pytest.raises(ValueError, match="x: dtype float64; expected float32"):
        hot.linear(x.double(), weight.double(), bias.double())
    for forward in ("plain", "int8"):
        with pytest.raises(ValueError, match=r"x: no dimensions; expected \[..., I\]"):
            hot.linear(torch.tensor(1.0), weight, bias, HotConfig(forward=forward))
    with pytest.raises(RuntimeError):  # torch's own
        hot.linear(x, weight[:, :20], bias)
    refused(lambda: hot.linear(x, weight, bias, None), "config: ", TypeError)
    refused(lambda: hot.linear(x, weight, bias, "best"), "config: 'best'")
    with pytest.raises(ValueError, match="10 tokens.*multiple of.*50"):
        hot.linear(x, weight, bias, HotConfig.recipe("paper", token_grid=(7, 7), prefix_tokens=1))


def examples() -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    for recipe, dtype in (("default", DTYPES[0]), ("fast", DTYPES[1]), ("paper", DTYPES[2])):
        yield torch.randn(37, 20).to(dtype), torch.tensor(11), HotConfig.recipe(recipe).json


@pytest.mark.long
def test_opcheck_linear() -> None:
    for x, seed, config in examples():
        weight, bias = torch.randn(12, 20).to(x.dtype), torch.randn(12).to(x.dtype)
        saved, _ = codes.compress_activation(x, seed, core.parsed(config))
        for b, kept in ((bias, saved), (None, None)):
            torch.library.opcheck(torch.ops.hotcore.linear, (x, weight, b, kept, seed, config))
            torch.library.opcheck(torch.ops.hotcore.product, (x, weight, b, kept, seed, config))
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        for kept in (saved, None):  # with gradients, those of libhot's products
            torch.library.opcheck(torch.ops.hotcore.linear, (*leaves, kept, seed, config))


def test_opcheck_draw_seed() -> None:
    tests = ("test_schema", "test_faketensor")  # random: its values differ from run to run
    x = torch.randn(2, 3)
    torch.library.opcheck(torch.ops.hotcore.draw_seed, (x,), test_utils=tests)
    for recipe in ("default", "fast"):
        config = HotConfig.recipe(recipe).json
        torch.library.opcheck(torch.ops.hotcore.compress, (x, config), test_utils=tests)
        for keep in (False, True):
            call = (x, x.bfloat16(), config, keep)
            torch.library.opcheck(torch.ops.hotcore.kept_of, call, test_utils=tests)


def test_opcheck_compress_activation_and_backward_linear() -> None:
    for x, seed, config in examples():
        torch.library.opcheck(torch.ops.hotcore.compress_activation, (x, seed, config))
        saved, _ = codes.compress_activation(x, seed, core.parsed(config))
        gy, weight = torch.randn(37, 12).to(x.dtype), torch.randn(12, 20).to(x.dtype)
        own = str(x.dtype).removeprefix("torch.")
        for arguments in (
            (gy, weight, saved, None, seed, config, 20, f"{own} float32 float32"),
            (gy, weight, None, None, seed, config, 20, f"{own} None None"),
            (gy, None, saved, torch.tensor(12), seed, config, 20, "None float32 None"),
            (gy, None, None, None, seed, config, 20, "None None float32"),
        ):
            torch.library.opcheck(torch.ops.hotcore.backward_linear, arguments)


@given(
    recipe=st.sampled_from(sorted(RECIPES)), tokens=st.integers(0, 3000), width=st.integers(0, 200)
)
def test_fake_has_the_size_of_the_real(recipe: str, tokens: int, width: int) -> None:
    configs = [HotConfig.recipe(recipe)]
    if recipe in ("fast", "paper"):
        for grid, prefix in (((14, 14), 1), ((3, 5), 0)):
            configs.append(HotConfig.recipe(recipe, token_grid=grid, prefix_tokens=prefix, rank=4))
    if recipe == "paper":
        configs.append(HotConfig.recipe(recipe, rows=(0, 3, 5), block=32))
    if recipe == "accurate":
        configs += [HotConfig.recipe(recipe, gw_scale=scale) for scale in ("tensor", "token")]
    for config in configs:
        rows, columns = config.token_grid or (1, 1)
        count = tokens // (sample := rows * columns + config.prefix_tokens) * sample
        size = saved_layout(count, width, config).bytes
        assert codes.saved_bytes(count, width, config) == size
        assert codes.saved_bytes(Symbolic(count), width, config) == size


@pytest.mark.parametrize(
    "make",
    [
        lambda: HotConfig.recipe("fast"),
        lambda: HotConfig.recipe("fast", gx_bits=4, gx_rounding="nearest"),
        lambda: HotConfig(basis="lowpass", rows=(0, 3), storage="int8"),
        pytest.param(
            lambda: dataclasses.replace(HotConfig(), gx_bits=4),
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 13),
                reason="torch 2.6 does not trace dataclasses.replace, of any class",
            ),
        ),
    ],
)
def test_compiles_with_a_config_made_inside(make: Callable[[], HotConfig]) -> None:
    x, weight, bias = tensors(40, 32)

    def call(x: torch.Tensor) -> torch.Tensor:
        return hot.linear(x, weight, bias, make())

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    gradients = []
    for function in (compiled, call):
        torch.manual_seed(5)
        gradients.append(torch.autograd.grad(function(x).square().sum(), (x, weight)))
    assert all(map(torch.equal, *gradients))


def test_a_bad_config_made_inside_is_named() -> None:
    x, weight, _ = tensors(40, 32)

    @torch.compile(backend="eager", fullgraph=True)
    def call(x: torch.Tensor) -> torch.Tensor:
        return hot.linear(x, weight, None, HotConfig.recipe("fast", rank=3))

    with pytest.raises(Exception, match="rank: 3"):  # one of torch's own classes
        call(x)


CIRCULAR = {"padding": "same", "padding_mode": "circular"}


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "convert", "shape"),
    [
        (nn.Linear, (40, 30), {}, hot.HotLinear.from_linear, (2, 40)),
        (nn.Conv2d, (8, 16, 3), CIRCULAR, hot.HotConv2d.from_conv, (2, 8, 5, 5)),
    ],
)
def test_a_converted_layer_keeps_everything(
    kind: Any, sizes: Any, options: Any, convert: Any, shape: Any
) -> None:
    plain = kind(*sizes, **options).eval()
    plain.weight.requires_grad_(False)
    seen: list[str] = []
    handle = plain.register_forward_hook(lambda *_: seen.append("hook"))
    plain.register_load_state_dict_pre_hook(lambda module, *_: loaded.append(module))
    content, (weight, bias) = set(vars(plain)), plain.parameters()
    module, loaded = convert(plain, "fast"), []
    assert module is plain and type(module) is getattr(hot, f"Hot{kind.__name__}")
    module.load_state_dict(plain.state_dict())
    assert loaded == [module]
    assert module.weight is weight and module.bias is bias and not module.training
    assert module.config == HotConfig.recipe("fast") and "config=fast" in repr(module)
    assert ("padding=same" in repr(module)) == (kind is nn.Conv2d)
    module(torch.randn(shape))
    assert seen == ["hook"]
    handle.remove()
    module(torch.randn(shape))
    assert seen == ["hook"]
    assert type(hot.revert(module)) is kind and set(vars(module)) == content
    special = type("Special", (kind,), {})(*sizes)
    refused(lambda: convert(special), f"expected a plain {kind.__name__}, got Special", TypeError)
    refused(lambda: convert(nn.ReLU()), "got ReLU", TypeError)


def test_repr() -> None:
    text = "HotLinear(in_features=4, out_features=3, bias=True, config=default)"
    assert repr(hot.HotLinear(4, 3)) == text
    custom = hot.HotLinear(4, 3, config=HotConfig(gx_rounding="nearest"))
    assert "config=default, gx_rounding='nearest'" in repr(custom)


@pytest.mark.parametrize("forward", ["plain", "int8"])
def test_the_way_to_libhot_is_short(forward: Literal["plain", "int8"]) -> None:
    """At most twelve functions of the package get x before libhot, and run in a backward."""
    x, weight = torch.randn(16, 64, requires_grad=True) * 1, torch.randn(32, 64, requires_grad=True)
    entered: list[tuple[object, bool]] = []

    def see(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("hotcore."):
            entered.append((frame.f_code, any(v is x for v in frame.f_locals.values())))

    def run(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
        entered.clear()
        sys.setprofile(see)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)

    y = run(hot.linear, x, weight, None, HotConfig(forward=forward))
    way = entered[: 1 + [code for code, _ in entered].index(core.call.__code__)]
    assert 0 < sum(got_x for _, got_x in way) <= 12
    run(torch.autograd.grad, y, weight, torch.randn_like(y))
    assert 0 < len(entered) <= 12
