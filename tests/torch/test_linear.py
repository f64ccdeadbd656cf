"""hot.linear and HotLinear: nn.Linear's forward, HOT's gradients, and only compressed x kept."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator

import hotcore
import numpy as np
import pytest
from hotcore.config import RECIPES, HotConfig, Key
from hotcore.saved import saved_layout
from hypothesis import given
from hypothesis import strategies as st
from support import cosine, equal_bits, nbytes, saved_tensors

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hotcore.torch import ops  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((7, 24), (2, 5, 24), (2, 3, 4, 24), (1, 2, 1, 2, 24), (24,), (0, 24), (3, 0, 24))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(1234)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small work: threads of several test processes would only wait
    yield
    torch.set_num_threads(before)


def tensors(
    *shape: int, outs: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias that require grad."""
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = (torch.randn(outs, shape[-1]) / math.sqrt(shape[-1])).to(dtype).requires_grad_()
    return x, weight, torch.randn(outs, dtype=dtype, requires_grad=True)


def every(module: nn.Module, fqn: str) -> bool:
    """A filter for models too small for the default one."""
    return True


def drawn_key(seed: int) -> Key:
    """The key that the first hot.linear after ``manual_seed(seed)`` draws."""
    torch.manual_seed(seed)
    return Key(0, int(torch.randint(2**63 - 1, (), dtype=torch.int64)))


# ------------------------------------------------------------------------------------------ Forward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_bit_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = tensors(*shape, dtype=dtype)
    for b in (bias, None):
        y = hot.linear(x, weight, b)
        assert y.requires_grad
        assert torch.equal(y, F.linear(x, weight, b))


def test_eval_is_nn_linear() -> None:
    # Bits, gradients, what is saved, and torch's generator: all as without HOT.
    plain = nn.Linear(40, 30)
    module = hot.HotLinear.from_linear(plain).eval()
    x = torch.randn(50, 40, requires_grad=True)
    state = torch.get_rng_state()
    with saved_tensors() as kept:
        y = module(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(tensor.dtype == torch.uint8 for tensor in kept)
    assert torch.equal(y, plain(x))
    ours = torch.autograd.grad(y.square().sum(), (x, module.weight, module.bias))
    theirs = torch.autograd.grad(plain(x).square().sum(), (x, plain.weight, plain.bias))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_gradients_it_is_nn_linear() -> None:
    x, weight, bias = tensors(6, 20)
    with torch.no_grad():
        y = hot.linear(x, weight, bias)
    assert not y.requires_grad
    with torch.inference_mode():
        assert torch.equal(hot.linear(x, weight, bias), y)
    frozen = hot.linear(x.detach(), weight.detach(), bias)  # the bias alone: nothing for HOT
    assert torch.equal(frozen, y)
    (gb,) = torch.autograd.grad(frozen.sum(), bias)
    assert torch.equal(gb, torch.full((16,), 6.0))


# ---------------------------------------------------------------------------------------- Gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_hotcore(recipe: str, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(3, 19, 24, dtype=dtype)
    gy = torch.randn(3, 19, 16).to(dtype)
    key = drawn_key(99)
    torch.manual_seed(99)
    got = torch.autograd.grad(hot.linear(x, weight, bias, recipe), (x, weight, bias), gy)
    expected = hotcore.backward_linear(
        gy, weight.detach(), x.detach(), config=recipe, need=("gx", "gw", "gb"), key=key
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        equal_bits(ours, theirs)


def test_gradients_are_close_to_fp32() -> None:
    bounds = {
        "default": (0.999, 0.98),
        "fast": (0.999, 0.6),
        "int4": (0.97, 0.98),
        "paper": (0.93, 0.6),
        "accurate": (0.999, 0.999),
        "compact": (0.999, 0.88),
    }
    x, weight, bias = tensors(2, 160, 64, outs=48)
    gy = torch.randn(2, 160, 48)
    exact = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), gy)
    for recipe, (gx_bound, gw_bound) in bounds.items():
        got = torch.autograd.grad(hot.linear(x, weight, bias, recipe), (x, weight, bias), gy)
        cosines = [cosine(a.numpy(), b.numpy()) for a, b in zip(got, exact, strict=True)]
        assert cosines[0] > gx_bound and cosines[1] > gw_bound, recipe
        assert torch.allclose(got[2], exact[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight, bias = tensors(*shape)
    flat = x.detach().reshape(-1, 24).requires_grad_()
    gy = torch.randn(*shape[:-1], 16)
    torch.manual_seed(5)
    got = torch.autograd.grad(hot.linear(x, weight, bias), (x, weight, bias), gy)
    torch.manual_seed(5)
    expected = torch.autograd.grad(
        hot.linear(flat, weight, bias), (flat, weight, bias), gy.reshape(-1, 16)
    )
    assert got[0].shape == x.shape
    assert torch.equal(got[0].reshape(-1, 24), expected[0])
    assert torch.equal(got[1], expected[1]) and torch.equal(got[2], expected[2])


def test_non_contiguous() -> None:
    base, weight, bias = tensors(30, 10, 24)
    turned = base.detach().transpose(0, 1).requires_grad_()
    packed = turned.detach().contiguous().requires_grad_()
    gy = torch.randn(30, 10, 16).transpose(0, 1)
    results = []
    for x, g in ((packed, gy.contiguous()), (turned, gy)):
        torch.manual_seed(5)
        results.append(torch.autograd.grad(hot.linear(x, weight, bias), (x, weight, bias), g))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.manual_seed(5)
    summed = torch.autograd.grad(hot.linear(packed, weight, bias).sum(), (packed, weight, bias))
    torch.manual_seed(5)
    ones = torch.autograd.grad(
        hot.linear(packed, weight, bias), (packed, weight, bias), torch.ones(10, 30, 16)
    )
    assert all(torch.equal(a, b) for a, b in zip(summed, ones, strict=True))
    column_major = weight.detach().T.contiguous().T.requires_grad_()
    torch.manual_seed(5)
    again = torch.autograd.grad(
        hot.linear(packed, column_major, bias).sum(), (packed, column_major)
    )
    assert torch.equal(again[0], summed[0]) and torch.equal(again[1], summed[1])


def test_empty_batch() -> None:
    module = hot.HotLinear(24, 16)
    x = torch.empty(0, 24, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == (0, 24)
    assert not module.weight.grad.any() and not module.bias.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_manual_seed_repeats_a_run(recipe: str) -> None:
    def run(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24))
        hot.convert(model, recipe, every)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(seed)
        for _ in range(3):
            loss = (model(torch.randn(40, 24)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_calls_draw_different_seeds() -> None:
    x, weight, _ = tensors(64, 24)
    gy = torch.randn(64, 16)
    one, two = (
        torch.autograd.grad(hot.linear(x, weight, None, "fast"), weight, gy)[0] for _ in range(2)
    )
    assert not torch.equal(one, two)


def test_number_of_threads_does_not_matter() -> None:
    x, weight, bias = tensors(197, 48, outs=40)
    gy = torch.randn(197, 40)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert ops.context_of(x.device).threads == threads
        torch.manual_seed(5)
        results.append(torch.autograd.grad(hot.linear(x, weight, bias), (x, weight, bias), gy))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_backward_twice_gives_the_same_bits() -> None:
    x, weight, bias = tensors(40, 24)
    y = hot.linear(x, weight, bias, "fast").sum()
    one = torch.autograd.grad(y, (x, weight, bias), retain_graph=True)
    two = torch.autograd.grad(y, (x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_gradients_accumulate() -> None:
    module = hot.HotLinear(24, 16)
    x = torch.randn(40, 24)
    torch.manual_seed(5)
    module(x).sum().backward()
    first = module.weight.grad.clone()
    torch.manual_seed(5)
    module(x).sum().backward()
    assert torch.equal(module.weight.grad, 2 * first)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_overflow_is_seen(recipe: str, bad: float) -> None:
    x, weight, bias = tensors(40, 24)
    gy = torch.randn(40, 16)
    gy[3, 2] = bad
    gx, gw, gb = torch.autograd.grad(hot.linear(x, weight, bias, recipe), (x, weight, bias), gy)
    assert not gx[3].isfinite().any()
    assert not gw[2].isfinite().any()
    assert not gb[2].isfinite()


def test_a_model_learns() -> None:
    losses = {}
    for recipe in (None, "default", "fast"):
        torch.manual_seed(0)
        x = torch.randn(512, 32)
        target = torch.sin(x @ torch.randn(32, 4))
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        head = nn.Linear(64, 4)
        if recipe:
            assert len(hot.convert(model, recipe, every).converted) == 2
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=3e-3)
        for _ in range(150):
            loss = (head(model(x)) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[recipe] = loss.item()
    assert losses["default"] < 1.1 * losses[None] + 0.01
    assert losses["fast"] < 0.15  # of 0.5; this much is the sketch's noise on 512 samples


# ----------------------------------------------------------------------------------- What is saved


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [("default", 0.54), ("int4", 0.54), ("fast", 0.505), ("paper", 0.505), ("accurate", 1.01), ("compact", 0.3)],
)
@pytest.mark.parametrize("shape", [(16, 197), (8, 256)])
def test_bytes_saved(recipe: str, bound: float, shape: tuple[int, int]) -> None:
    module = hot.HotLinear(192, 64, config=recipe)
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


def test_frozen_weight_saves_nothing_and_computes_no_gw(monkeypatch: pytest.MonkeyPatch) -> None:
    module = hot.HotLinear(64, 48)
    module.weight.requires_grad_(False)
    calls = recorded(monkeypatch)
    x = torch.randn(100, 64, requires_grad=True)
    with saved_tensors() as kept:
        y = module(x * 1)
    # The seed, and the weight itself (no leaf that requires grad): nothing that grows with x.
    others = [t for t in kept if t.data_ptr() != module.weight.data_ptr()]
    assert nbytes(others) == 8
    y.sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None and module.bias.grad is not None
    assert calls == [("backward", (True, False, True))]


def test_frozen_input_computes_no_gx(monkeypatch: pytest.MonkeyPatch) -> None:
    module = hot.HotLinear(64, 48)
    calls = recorded(monkeypatch)
    x = torch.randn(100, 64)
    with saved_tensors() as kept:
        y = module(x)
    assert sorted(t.dtype for t in kept if t.ndim) == [torch.uint8]  # no weight either
    y.sum().backward()
    assert calls == [("compress", x.shape), ("backward", (False, True, True))]
    assert x.grad is None


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = tensors(40, 24)
    calls = recorded(monkeypatch)
    bias.requires_grad_(False)
    torch.autograd.grad(hot.linear(x, weight, bias).sum(), (x, weight))
    torch.autograd.grad(hot.linear(x, weight, None).sum(), (x, weight))
    assert calls[1::2] == [("backward", (True, True, False))] * 2


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Calls of the two operators: the shape of x, and which gradients are wanted."""
    calls: list[tuple[str, object]] = []
    compress, backward = ops.compress_activation, ops.backward_linear

    def compress_activation(x: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(("compress", x.shape))
        return compress(x, *rest)

    def backward_linear(gy: torch.Tensor, *rest: object) -> tuple[torch.Tensor, ...]:
        calls.append(("backward", tuple(dtype is not None for dtype in rest[-3:])))
        return backward(gy, *rest)

    monkeypatch.setattr(ops, "compress_activation", compress_activation)
    monkeypatch.setattr(ops, "backward_linear", backward_linear)
    return calls


def test_x_is_freed() -> None:
    import weakref

    module = hot.HotLinear(64, 48)
    x = torch.randn(100, 64, requires_grad=True) * 1
    gone = weakref.ref(x)
    y = module(x)
    del x
    assert gone() is None
    y.sum().backward()


def test_weight_changed_in_place_is_noticed() -> None:
    x, weight, bias = tensors(10, 24)
    y = hot.linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ------------------------------------------------------------------------- Autocast, checkpointing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["default", "fast"])
def test_autocast(recipe: str, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(2, 80, 64, outs=48)
    with torch.autocast("cpu", dtype=dtype):
        y = hot.linear(x, weight, bias, recipe)
        expected = F.linear(x, weight, bias)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    gy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, weight, bias), gy)
    plain = torch.autograd.grad(expected, (x, weight, bias), gy)
    for ours, theirs in zip(got, plain, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert cosine(ours.numpy(), theirs.numpy()) > (0.9 if recipe == "default" else 0.5)


def test_autocast_of_mixed_inputs() -> None:
    # x already in bfloat16, parameters in fp32, as between two layers under autocast.
    x, weight, bias = tensors(80, 64)
    x = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = hot.linear(x, weight, bias)
        assert torch.equal(y, F.linear(x, weight, bias))
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


def test_autocast_leaves_its_cache_alone() -> None:
    # A cached cast without its graph would lose the gradient of the second, plain use.
    x, weight, bias = tensors(20, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hot.linear(x, weight, bias)
        plain = F.linear(x, weight, bias)
    plain.sum().backward()
    assert weight.grad is not None and bias.grad is not None


def test_autocast_keeps_compressed_bytes() -> None:
    module = hot.HotLinear(192, 64)
    x = torch.randn(16, 197, 192, requires_grad=True) * 1
    with torch.autocast("cpu", dtype=torch.bfloat16), saved_tensors() as kept:
        module(x)
    assert nbytes(kept) / x.numel() <= 0.54


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["default", "fast"])
def test_checkpoint_repeats_the_bits(recipe: str, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 32))
    hot.convert(model, recipe, every)

    def run(wrapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        model.zero_grad()
        x = torch.randn(40, 32, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant) if wrapped else model(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

    # Dropout shows that forward and its repetition draw the same numbers: the reentrant kind runs
    # the first one without gradients.
    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


# -------------------------------------------------------------------------------------- Bad input


def test_twice_differentiable_is_refused() -> None:
    x, weight, bias = tensors(10, 24)
    (gx,) = torch.autograd.grad(hot.linear(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gx.sum().backward()


def test_torch_func_is_refused() -> None:
    x, weight, bias = tensors(10, 24)
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.grad(lambda w: hot.linear(x, w, bias).sum())(weight)
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.vmap(lambda v: hot.linear(v, weight, bias))(x)


def test_forward_mode_is_refused() -> None:
    x, weight, bias = tensors(10, 24)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((NotImplementedError, RuntimeError)):
            hot.linear(dual, weight, bias)


def test_bad_arguments() -> None:
    x, weight, bias = tensors(10, 24)
    with pytest.raises(ValueError, match="x: dtype float64; expected float32"):
        hot.linear(x.double(), weight.double(), bias.double())
    with pytest.raises(RuntimeError):  # torch's own
        hot.linear(x, weight[:, :20], bias)
    with pytest.raises(TypeError, match="config: "):
        hot.linear(x, weight, bias, None)
    with pytest.raises(ValueError, match="recipe: 'best'"):
        hot.linear(x, weight, bias, "best")
    with pytest.raises(ValueError, match="10 tokens.*multiple of.*50"):
        hot.linear(x, weight, bias, HotConfig.recipe("paper", token_grid=(7, 7), prefix_tokens=1))


@pytest.mark.skipif(hotcore._core.built_with_cuda(), reason="built with CUDA")
def test_device_without_backend() -> None:
    with pytest.raises(NotImplementedError, match="no CUDA backend"):
        hotcore.contexts.cuda(0, 0)
    with pytest.raises(NotImplementedError, match="no backend of hotcore for the device"):
        ops.context_of(torch.device("mps"))


# -------------------------------------------------------------------------------- torch.library ops


def examples() -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    for recipe, dtype in (("default", DTYPES[0]), ("fast", DTYPES[1]), ("paper", DTYPES[2])):
        yield torch.randn(37, 20).to(dtype), torch.tensor(11), HotConfig.recipe(recipe).json


def test_opcheck_compress_activation() -> None:
    for x, seed, config in examples():
        torch.library.opcheck(torch.ops.hotcore.compress_activation, (x, seed, config))


def test_opcheck_linear() -> None:
    for x, seed, config in examples():
        weight, bias = torch.randn(12, 20).to(x.dtype), torch.randn(12).to(x.dtype)
        saved = ops.compress_activation(x, seed, config)
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
        for codes in (False, True):
            call = (x, x.bfloat16(), config, codes)
            torch.library.opcheck(torch.ops.hotcore.kept_of, call, test_utils=tests)


def test_opcheck_backward_linear() -> None:
    for x, seed, config in examples():
        saved = ops.compress_activation(x, seed, config)
        gy, weight = torch.randn(37, 12).to(x.dtype), torch.randn(12, 20).to(x.dtype)
        f = torch.float32
        for arguments in (
            (gy, weight, saved, None, seed, config, 20, x.dtype, f, f),
            (gy, weight, None, None, seed, config, 20, x.dtype, None, None),
            (gy, None, saved, torch.tensor(12), seed, config, 20, None, f, None),
            (gy, None, None, None, seed, config, 20, None, None, f),
        ):
            torch.library.opcheck(torch.ops.hotcore.backward_linear, arguments)


@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    tokens=st.integers(0, 3000),
    width=st.integers(0, 200),
)
def test_fake_has_the_size_of_the_real(recipe: str, tokens: int, width: int) -> None:
    configs = [HotConfig.recipe(recipe)]
    if recipe in ("fast", "paper"):
        for grid, prefix in (((14, 14), 1), ((3, 5), 0)):
            config = HotConfig.recipe(recipe, token_grid=grid, prefix_tokens=prefix, rank=4)
            configs.append(config)
    if recipe == "paper":
        configs.append(HotConfig.recipe(recipe, rows=(0, 3, 5), block=32))
    for config in configs:
        sample = config.token_grid[0] * config.token_grid[1] if config.token_grid else 1
        sample += config.prefix_tokens
        count = tokens // sample * sample
        assert ops.saved_bytes(count, width, config) == saved_layout(count, width, config).bytes


def test_meta_tensors() -> None:
    module = hot.HotLinear(24, 16, device="meta")
    x = torch.empty(2, 5, 24, device="meta", requires_grad=True)
    y = module(x)
    assert y.shape == (2, 5, 16) and y.device.type == "meta"
    y.sum().backward()
    assert x.grad.shape == x.shape and module.weight.grad.shape == (16, 24)


class Attention(nn.Module):
    """Two layers that share their input, as q and k do."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_compiles_in_one_graph(backend: str, request: pytest.FixtureRequest) -> None:
    # The partitioners must not draw a seed again in backward; q and k share that of their x.
    request.getfixturevalue("unshared" if backend == "eager" else "one_seed_an_x")
    torch._dynamo.reset()
    model = Attention()
    hot.convert(model, "fast", every)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    results = []
    for call in (compiled, model):
        torch.manual_seed(3)
        x = torch.randn(40, 32, requires_grad=True)
        y = call(x)
        gradients = torch.autograd.grad(y.square().sum(), (x, *model.parameters()))
        results.append((y, *gradients, torch.rand(())))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_compiles_with_a_config() -> None:
    torch._dynamo.reset()
    x, weight, bias = tensors(40, 32)
    config = HotConfig(gx_bits=4, gx_rounding="nearest")

    def call(x: torch.Tensor) -> torch.Tensor:
        return hot.linear(x, weight, bias, config) + hot.linear(x, weight, None, "paper")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), call(x))


# --------------------------------------------------------------------------------------- HotLinear


def test_from_linear_keeps_everything() -> None:
    plain = nn.Linear(40, 30).eval()
    plain.weight.requires_grad_(False)
    seen: list[str] = []
    handle = plain.register_forward_hook(lambda *_: seen.append("hook"))
    module = hot.HotLinear.from_linear(plain, "fast")
    assert isinstance(module, nn.Linear)
    assert module.weight is plain.weight and module.bias is plain.bias
    assert not module.training
    assert module.config == HotConfig.recipe("fast")
    module(torch.randn(2, 40))
    assert seen == ["hook"]
    handle.remove()
    module(torch.randn(2, 40))
    assert seen == ["hook"]
    back = module.to_linear()
    assert type(back) is nn.Linear and back.weight is plain.weight
    assert "config" not in back.__dict__
    assert module.config is not None  # the HotLinear is as it was


def test_from_linear_refuses_subclasses() -> None:
    class Special(nn.Linear):
        pass

    with pytest.raises(TypeError, match="module: expected a plain Linear, got Special"):
        hot.HotLinear.from_linear(Special(4, 4))
    with pytest.raises(TypeError, match="got ReLU"):
        hot.HotLinear.from_linear(nn.ReLU())


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict(bias: bool) -> None:
    plain, module = nn.Linear(40, 30, bias=bias), hot.HotLinear(40, 30, bias=bias)
    assert list(module.state_dict()) == list(plain.state_dict())
    module.load_state_dict(plain.state_dict())
    x = torch.randn(3, 40)
    assert torch.equal(module(x), plain(x))
    plain.load_state_dict(hot.HotLinear(40, 30, bias=bias).state_dict())


def test_initialised_as_nn_linear() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(40, 30)
    torch.manual_seed(3)
    module = hot.HotLinear(40, 30, config="fast")
    assert torch.equal(plain.weight, module.weight) and torch.equal(plain.bias, module.bias)


def test_copies() -> None:
    module = hot.HotLinear(40, 30, config="paper")
    module(torch.randn(8, 40)).sum().backward()  # the configuration's libhot object is made
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for again in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(again) is hot.HotLinear
        assert again.config == module.config
        assert again.weight is not module.weight and torch.equal(again.weight, module.weight)
        again(torch.randn(8, 40)).sum().backward()


def test_repr() -> None:
    assert repr(hot.HotLinear(4, 3)) == (
        "HotLinear(in_features=4, out_features=3, bias=True, config=default)"
    )
    custom = hot.HotLinear(4, 3, config=HotConfig(gx_rounding="nearest"))
    assert "config=HotConfig(gx_rounding='nearest')" in repr(custom)


def test_moves_between_dtypes() -> None:
    module = hot.HotLinear(40, 30).to(torch.bfloat16)
    x = torch.randn(8, 40, dtype=torch.bfloat16, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad.dtype == x.grad.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="x: dtype float64"):
        module.double()(x.double())
    assert module.eval()(x.double()).dtype == torch.float64  # plain nn.Linear


def test_repeatable_through_numpy() -> None:
    # One draw a call, and nothing else, comes from torch's generator.
    x, weight, _ = tensors(8, 24)
    torch.manual_seed(21)
    hot.linear(x, weight)
    after = torch.rand(())
    torch.manual_seed(21)
    torch.randint(2**63 - 1, (), dtype=torch.int64)
    assert torch.equal(torch.rand(()), after)
    assert isinstance(np.asarray(after), np.ndarray)
