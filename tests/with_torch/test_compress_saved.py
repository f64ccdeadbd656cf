"""compress_saved: codes and their bound, what is compressed, and composition."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402  (after the skip)
from torch.utils.checkpoint import checkpoint  # noqa: E402

module = importlib.import_module("hotcore.torch.compress_saved")  # the function has the same name

EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def seeded(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))


def kept(compress: hot.Compression, function: Callable[[], object]) -> list[object]:
    """What autograd keeps of ``function`` in the context, in order."""
    found: list[object] = []

    def pack(tensor: torch.Tensor) -> object:
        found.append(compress.pack(tensor))
        return found[-1]

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, compress.unpack)
    with compress.watch(), hooks:
        found.append(function())  # the graph has to live
    return found[:-1]


def packed(x: torch.Tensor, bits: int, key: tuple[int, int] = (1, 2)) -> torch.Tensor:
    order = module.memory_order(x)
    assert order is not None
    return module._Packed(x, order, bits, key).restore()


def steps(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Width of a step, for every value of a contiguous x."""
    flat = x.reshape(-1).double()
    missing = -len(flat) % module.BLOCK
    blocks = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, module.BLOCK)
    width = (blocks.amax(1) - blocks.amin(1)) / (2**bits - 1)
    return width[:, None].expand_as(blocks).reshape(-1)[: len(flat)].view(x.shape)


# ---- the codes ----


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("shape", [(1,), (127,), (128,), (3, 129), (2, 5, 64), (40, 7, 130)])
def test_bound(bits: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for x in (
        torch.randn(shape),
        torch.rand(shape) * 100 + 1000,
        torch.randn(shape) * torch.where(torch.rand(shape) < 0.02, 100.0, 1.0),
        torch.randn(shape).relu(),
        torch.randn(shape) * 1e-6,
    ):
        x = x.to(dtype)
        back = packed(x, bits)
        assert back.dtype == dtype and back.shape == x.shape
        error = (back.double() - x.double()).abs()
        rounding = EPS[dtype] * back.double().abs().clamp(min=torch.finfo(dtype).tiny)
        bound = steps(x, bits) * (1 + 2.0**-15) + rounding / 2
        assert (error <= bound).all(), float((error - bound).max())


@pytest.mark.parametrize("bits", [8, 4])
def test_unbiased(bits: int) -> None:
    x = torch.randn(4, 256)
    draws = 2000
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(draws):
        total += packed(x, bits, (seed * 7919 & 0xFFFFFFFF, seed)).double()
    step = steps(x, bits)
    fraction = ((x.view(-1, 128) - x.view(-1, 128).amin(1, keepdim=True)).view_as(x) / step).frac()
    sd = step * (fraction * (1 - fraction)).clamp(min=1e-3).sqrt() / draws**0.5
    z = ((total / draws - x) / sd).flatten()
    assert z.abs().max() < 5.5, float(z.abs().max())
    assert abs(float(z.mean())) < 0.3


def test_roundings_of_a_block_average_out() -> None:
    # All of a block at one fraction: the golden-ratio shifts spread as evenly as can be.
    x = torch.full((128,), 0.3 / 255)
    x[0], x[1] = 0, 1
    for seed in range(20):
        ups = (packed(x, 8, (seed, 0))[2:] > 0.5 / 255).double().mean()
        assert abs(float(ups) - 0.3) < 0.04


@pytest.mark.parametrize("bits", [8, 4])
def test_ends_are_exact(bits: int) -> None:
    x = torch.randn(50, 128)
    back = packed(x, bits)
    assert torch.equal(back.amax(1), x.amax(1))
    assert torch.equal(back.amin(1), x.amin(1))
    two = torch.where(torch.rand(50, 128) < 0.5, 0.1, -7.3)
    assert torch.equal(packed(two, bits), two)
    same = torch.randn(50, 1).expand(50, 128).contiguous()
    assert torch.equal(packed(same, bits), same)
    relu = torch.randn(50, 128).relu()
    assert not packed(relu, bits)[relu == 0].any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(bits: int, bad: float) -> None:
    x = torch.randn(3, 128)
    x[1, 40] = bad
    back = packed(x, bits)
    assert not back[1].isfinite().any()
    assert back[::2].isfinite().all()


def test_tiny_ranges() -> None:
    x = torch.full((128,), 3.0) + torch.arange(128) * 0
    assert torch.equal(packed(x, 8), x)
    x = torch.randn(128) * 2.0**-110
    assert packed(x, 8).isfinite().all()
    assert float((packed(x, 8) - x).abs().max()) < 2.0**-100


def test_signs() -> None:
    for shape in ((5,), (1024,), (3, 1000), (4, 33, 77)):
        x = torch.randn(shape)
        x[..., 0] = 0
        assert torch.equal(packed(x, 1), (x > 0).float())


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_layouts(bits: int) -> None:
    base = torch.randn(2, 9, 3, 4, 64)
    q, k, v = base.permute(2, 0, 3, 1, 4).unbind(0)
    image = torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last)
    for x in (q, k, v, image, torch.randn(5, 6, 7).transpose(0, 2), torch.randn(9, 12)[:, ::3]):
        back = packed(x, bits)
        assert back.shape == x.shape
        order = module.memory_order(x)
        assert back.permute(order).is_contiguous()  # the same order of dimensions, without gaps
        assert torch.equal(back.permute(order), packed(x.permute(order).contiguous(), bits))
    assert packed(image, bits).is_contiguous(memory_format=torch.channels_last)
    assert module.memory_order(torch.randn(4, 1).expand(4, 6)) is None
    assert module.memory_order(torch.randn(20).as_strided((4, 5), (2, 1))) is None


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_bytes(bits: int) -> None:
    x = torch.randn(64, 1024)
    order = module.memory_order(x)
    nbytes = module._Packed(x, order, bits, (0, 0)).nbytes
    ranges = 0 if bits == 1 else 8 / 128
    assert nbytes == x.numel() * (bits / 8 + ranges)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5000)
    expected = [packed(x, bits) for bits in (8, 4, 1)]
    monkeypatch.setattr(module, "CHUNK_VALUES", 2048)
    assert all(torch.equal(packed(x, bits), e) for bits, e in zip((8, 4, 1), expected, strict=True))


# ---- what is compressed ----


OPERATIONS = {
    "gelu": (F.gelu, 1),
    "silu": (F.silu, 1),
    "tanh": (torch.tanh, 1),
    "softmax": (lambda x: x.softmax(-1), 1),
    "relu": (F.relu, 1),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), 1),
    "square": (lambda x: x.square(), 1),
    "power": (lambda x: x**2, 1),
    "cube": (lambda x: x.pow(3), 1),
    "product": (lambda x: x * x.sin(), 2),
    "matmul": (lambda x: x @ x.transpose(-1, -2), 1),
    "max_pool": (lambda x: F.max_pool2d(x, 2), 1),
}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_are_compressed(name: str) -> None:
    function, at_least = OPERATIONS[name]
    leaf = torch.randn(8, 4, 32, 32, requires_grad=True)
    compress = hot.compress_saved(min_values=1024)
    x = leaf * 1.5
    found = kept(compress, lambda: function(x))
    assert sum(isinstance(item, module._Packed) for item in found) >= at_least
    if name != "product":  # x.sin() keeps x: sin is no operation of the list
        big = [t for t in found if isinstance(t, torch.Tensor) and t.numel() > 1024]
        assert not [t for t in big if t.dtype.is_floating_point]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_gradients(name: str) -> None:
    function, _ = OPERATIONS[name]
    leaf = torch.randn(8, 4, 32, 32, requires_grad=True)
    weights = torch.randn_like(function(leaf))

    def gradient(bits: int | None) -> torch.Tensor:
        x = leaf * 1.5
        if bits is None:
            y = function(x)
        else:
            with hot.compress_saved(bits, min_values=1024):
                y = function(x)
        return torch.autograd.grad((y * weights).sum(), leaf)[0]

    exact = gradient(None)
    for bits, most in ((8, 0.05), (4, 0.6)):
        error = float((gradient(bits) - exact).norm() / exact.norm())
        assert error < most
        # relu and max_pool need no values; everything else must really have been rounded.
        assert (error == 0) == (name in ("relu", "max_pool"))


def test_gradients_are_unbiased() -> None:
    leaf = torch.randn(64, 128, requires_grad=True)
    weight = torch.randn(64, 128)

    def gradient() -> torch.Tensor:
        x = leaf * 1.0
        with hot.compress_saved(4, min_values=0):
            y = (x.square() * weight).sum()
        return torch.autograd.grad(y, leaf)[0]

    exact = 2 * leaf.detach() * weight
    one = gradient()
    mean = torch.stack([gradient() for _ in range(64)]).mean(0)
    assert float((mean - exact).norm()) < 0.2 * float((one - exact).norm())


def test_attention() -> None:
    qkv = torch.randn(2, 300, 3, 4, 64, requires_grad=True)
    q, k, v = (qkv * 1.0).permute(2, 0, 3, 1, 4).unbind(0)
    found = kept(
        hot.compress_saved(min_values=1024), lambda: F.scaled_dot_product_attention(q, k, v)
    )
    names = [type(item).__name__ for item in found if getattr(item, "nbytes", 0) > 1024]
    assert names.count("_Packed") == 4  # q, k, v and the result
    for item in found:  # logsumexp: exact, though it is larger than min_values
        if isinstance(item, torch.Tensor) and item.dtype.is_floating_point:
            assert item.numel() == 2 * 4 * 300


@pytest.mark.parametrize("kind", ["float", "bool", "padding"])
def test_attention_masks_stay_exact(kind: str) -> None:
    tokens = 64 if kind == "float" else 96  # 64: the mask is as wide as a head
    leaf = torch.randn(3, 2, 4, tokens, 64, requires_grad=True)
    mask = torch.rand(2, 1 if kind == "padding" else 4, tokens, tokens) < 0.8
    mask |= torch.eye(tokens, dtype=torch.bool)
    if kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    def run() -> torch.Tensor:
        q, k, v = (leaf * 1.0).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with hot.compress_saved(min_values=0):
        y = run()
    (got,) = torch.autograd.grad(y.square().sum(), leaf)
    (exact,) = torch.autograd.grad(run().square().sum(), leaf)
    assert got.isfinite().all()
    assert float((got - exact).norm() / exact.norm()) < 0.05


def test_multihead_attention_with_masks() -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 40, 64, requires_grad=True)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[:, 30:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(40)
    for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": causal, "is_causal": True}):
        compress = hot.compress_saved(min_values=256)
        y = x * 1.0
        found = kept(compress, lambda y=y, m=masks: attention(y, y, y, need_weights=False, **m)[0])
        assert any(isinstance(item, module._Packed) for item in found) == (not masks)


def test_what_must_be_exact_is_never_touched() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    weight = nn.Parameter(torch.randn(256, 256))
    constant = torch.randn(64, 256)
    indices = torch.randint(256, (64, 256))
    mask = torch.rand(64, 256) < 0.5
    norm = nn.LayerNorm(256)
    linear = nn.Linear(256, 256)
    exact: list[tuple[str, Callable[[torch.Tensor], object]]] = [
        ("leaf", lambda y: x.square()),
        ("parameter", lambda y: F.gelu(weight)),
        (
            "view of a parameter",
            lambda y: weight.t()[:, 5:].sigmoid() if False else weight.t() ** 2,
        ),
        ("constant", lambda y: y * constant),
        ("gather", lambda y: y.gather(1, indices)),
        ("where", lambda y: torch.where(mask, y, 0)),
        ("division", lambda y: 1 / y),
        ("root", lambda y: y.abs().sqrt()),
        ("exp", lambda y: y.exp()),
        ("log_softmax", lambda y: F.log_softmax(y, -1)),
        ("cross_entropy", lambda y: F.cross_entropy(y, indices[:, 0])),
        ("another power", lambda y: y.abs() ** 0.5),
        ("tensor power", lambda y: y.abs() ** y),
        ("linear", linear),
        ("expanded", lambda y: y.mean(1, keepdim=True).expand(64, 256).square()),
        ("float64", lambda y: y.double().square()),
        ("hot", hot.HotLinear(256, 256)),
    ]
    for name, function in exact:
        y = x * 1.0
        found = kept(hot.compress_saved(min_values=0), lambda y=y, f=function: f(y))
        assert not [item for item in found if isinstance(item, module._Packed)], name
        assert found, name
    # A product's parameter stays, its activation does not.
    for function in (lambda y: y * weight[:64], lambda y: y @ weight.t()):
        y = x * 1.0
        found = kept(hot.compress_saved(min_values=0), lambda y=y, f=function: f(y))
        assert sorted(type(item).__name__ for item in found) == ["Tensor", "_Packed"]
        (tensor,) = (item for item in found if isinstance(item, torch.Tensor))
        assert tensor.untyped_storage()._cdata == weight.untyped_storage()._cdata
    # Statistics stay: mean and 1/std of 64 rows.
    y = x * 1.0
    found = kept(hot.compress_saved(min_values=0), lambda: norm(y))
    assert [type(item).__name__ for item in found].count("_Packed") == 1
    assert {item.numel() for item in found if isinstance(item, torch.Tensor)} == {64, 256}


@pytest.mark.parametrize("layer", [nn.Linear, hot.HotLinear])
def test_after_a_linear_layer(layer: type[nn.Linear]) -> None:
    # What HotLinear returns is a view of a leaf, as views of parameters are.
    fc = layer(64, 192)
    x = torch.randn(4, 20, 64, requires_grad=True)
    y = fc(x)
    compress = hot.compress_saved(min_values=0)
    (gelu,) = kept(compress, lambda: F.gelu(y))
    assert isinstance(gelu, module._Packed)
    q, k, v = y.view(4, 20, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
    found = kept(compress, lambda: F.scaled_dot_product_attention(q, k, v))
    assert sum(isinstance(item, module._Packed) for item in found) == 4


def test_hot_layers_are_one_operation() -> None:
    # 1056 of 1254 calls of the mode in a ViT's forward pass came from inside of HOT's layers.
    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    layers = (hot.HotLinear(8, 64), hot.HotConv2d(64, 32, 3))
    with Watch():
        results = [layer(x) for layer in layers]
        torch.relu(results[0])
    assert "relu" in seen
    assert not {"linear", "conv2d", "to", "randint", "reshape"} & set(seen)
    assert len(seen) < 12
    for y in results:
        y.sum().backward()

    class Own(torch.Tensor):
        """A subclass that intercepts functions."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(f"own {func.__name__}")
            return super().__torch_function__(func, types, args, kwargs or {})

    hot.linear(torch.randn(4, 8).as_subclass(Own), layers[0].weight)
    assert "own linear" in seen


def test_parameters_under_autocast() -> None:
    x = torch.randn(64, 256, requires_grad=True)
    weight = nn.Parameter(torch.randn(256, 128))
    y = x * 1.0
    with torch.autocast("cpu", torch.bfloat16):
        found = kept(hot.compress_saved(min_values=0), lambda: y @ weight)
    assert sorted(type(item).__name__ for item in found) == ["Tensor", "_Packed"]


def test_small_tensors() -> None:
    y = torch.randn(65535, requires_grad=True) * 1.0
    assert isinstance(kept(hot.compress_saved(), lambda: y.square())[0], torch.Tensor)
    y = torch.randn(65536, requires_grad=True) * 1.0
    assert isinstance(kept(hot.compress_saved(), lambda: y.square())[0], module._Packed)


def test_saved_twice_is_kept_once() -> None:
    x = torch.randn(64, 256, requires_grad=True) * 1.0
    found = kept(hot.compress_saved(min_values=0), lambda: (F.gelu(x), x.square(), F.gelu(x + 0)))
    assert found[0] is found[1]
    assert found[2] is not found[0]
    # Changed in between: another version, another content.
    leaf = torch.randn(64, 256, requires_grad=True)

    def twice() -> tuple[torch.Tensor, torch.Tensor]:
        y = leaf * 1.0
        a = y.square()
        with torch.no_grad():
            y.mul_(2)
        return a, y.square()

    compress = hot.compress_saved(min_values=0)
    first, second = kept(compress, twice)
    assert first is not second
    assert float((second.restore() - 2 * first.restore()).norm()) < 0.05 * float(
        leaf.detach().norm()
    )


def test_addresses_are_not_mistaken() -> None:
    # A storage freed and its address taken by the next one: must not count as the same tensor.
    compress = hot.compress_saved(min_values=0)
    graphs, wanted = [], []
    for i in range(20):
        leaf = torch.full((128, 8), float(i), requires_grad=True)
        with compress:
            graphs.append((leaf, (leaf * 1.0).square().sum()))
        wanted.append(2.0 * i)
    for (leaf, y), value in zip(graphs, wanted, strict=True):
        assert torch.equal(torch.autograd.grad(y, leaf)[0], torch.full((128, 8), value))


def test_memory_is_released() -> None:
    compress = hot.compress_saved(min_values=0)
    x = torch.randn(64, 256, requires_grad=True)
    with compress:
        y = (x * 1.0).square().sum()
    assert len(compress._kept) == 1
    y.backward()
    del y
    assert len(compress._kept) == 0


def test_kinds() -> None:
    x = torch.randn(64, 256, requires_grad=True) * 1.0
    compress = hot.compress_saved(8, min_values=0, activation=4, norm=None, relu=None, linear=8)
    linear = nn.Linear(256, 256)
    (gelu,) = kept(compress, lambda: F.gelu(x))
    assert gelu.nbytes == x.numel() * (0.5 + 8 / 128)
    (relu,) = kept(compress, lambda: F.relu(x))
    assert isinstance(relu, torch.Tensor)
    assert all(isinstance(t, torch.Tensor) for t in kept(compress, lambda: F.layer_norm(x, (256,))))
    found = kept(compress, lambda: linear(x))
    assert sorted(type(item).__name__ for item in found) == ["Tensor", "_Packed"]
    labels = torch.randint(256, (64,))
    leaf = torch.randn(64, 256, requires_grad=True)
    for bits, most in ((8, 0.05), (4, 0.6)):
        logits = leaf * 1.0
        with hot.compress_saved(min_values=0, loss=bits):
            loss = F.cross_entropy(logits, labels)
        (got,) = torch.autograd.grad(loss, leaf)
        (exact,) = torch.autograd.grad(F.cross_entropy(leaf * 1.0, labels), leaf)
        assert 0 < float((got - exact).norm() / exact.norm()) < most
    with pytest.raises(ValueError, match="bits: 2"):
        hot.compress_saved(2)
    with pytest.raises(ValueError, match="gelu: no such kind of operation; known: activation"):
        hot.compress_saved(gelu=4)
    with pytest.raises(ValueError, match=r"relu: 8; expected one of \(1, None\)"):
        hot.compress_saved(relu=8)
    with pytest.raises(ValueError, match="min_values: -1"):
        hot.compress_saved(min_values=-1)


# ---- together with everything else ----


class Block(nn.Module):
    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, -1)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def model_gradient(
    model: nn.Module, x: torch.Tensor, compress: hot.Compression | None, seed: int = 5
) -> torch.Tensor:
    torch.manual_seed(seed)
    model.zero_grad()
    if compress is None:
        loss = model(x).float().square().mean()
    else:
        with compress:
            loss = model(x).float().square().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


@pytest.mark.parametrize("converted", [False, True])
def test_whole_model(converted: bool) -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 32, 64)
    exact = model_gradient(model, x, None)
    if converted:
        hot.convert(model, "accurate")
    assert cosine(model_gradient(model, x, hot.compress_saved(min_values=0)), exact) > 0.995
    assert cosine(model_gradient(model, x, hot.compress_saved(4, min_values=0)), exact) > 0.93


def test_same_seed_same_bits() -> None:
    model = nn.Sequential(Block(dropout=0.1), Block())
    x = torch.randn(4, 32, 64)
    compress = hot.compress_saved(4, min_values=0)
    first = model_gradient(model, x, compress, seed=5)
    assert torch.equal(model_gradient(model, x, compress, seed=5), first)
    assert torch.equal(model_gradient(model, x, hot.compress_saved(4, min_values=0)), first)
    model.eval()  # no dropout: now the seed shows in the rounding alone
    a, b = (model_gradient(model, x, compress, seed=seed) for seed in (5, 6))
    assert not torch.equal(a, b)


def test_autocast() -> None:
    model = nn.Sequential(Block(), Block())
    x = torch.randn(4, 32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        exact = model_gradient(model, x, None)
        got = model_gradient(model, x, hot.compress_saved(min_values=0))
    assert cosine(got, exact) > 0.99


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    blocks = nn.Sequential(Block(dropout=0.1), Block())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            x = checkpoint(self.blocks[0], x, use_reentrant=reentrant)
            return self.blocks[1](x)

    x = torch.randn(4, 32, 64)
    compress = hot.compress_saved(min_values=0)
    exact = model_gradient(Checkpointed(), x, None)
    got = model_gradient(Checkpointed(), x, compress)
    assert cosine(got, exact) > 0.8  # dropout differs: the context has drawn a seed before it
    assert torch.equal(model_gradient(Checkpointed(), x, compress), got)
    blocks.eval()
    exact = model_gradient(Checkpointed(), x, None)
    assert cosine(model_gradient(Checkpointed(), x, compress), exact) > 0.995


def test_backward_inside_the_context() -> None:
    model = Block()
    x = torch.randn(4, 32, 64)
    expected = model_gradient(model, x, compress := hot.compress_saved(min_values=0))
    torch.manual_seed(5)
    model.zero_grad()
    with compress:
        model(x).float().square().mean().backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(got, expected)


def test_no_grad_and_errors_leave_nothing_behind() -> None:
    compress = hot.compress_saved(min_values=0)
    x = torch.randn(64, 64, requires_grad=True)
    with compress, torch.no_grad():
        assert not F.gelu(x).requires_grad
    with pytest.raises(RuntimeError), compress:
        (x * 1.0) @ torch.randn(3, 3)
    assert compress._rule is None and not compress._entered
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        y = F.gelu(x * 1.0)
    assert y.requires_grad and found


def test_compiled_model() -> None:
    # Nothing is compressed inside of the graph; tensors outside are.
    model, x = Block(), torch.randn(4, 32, 64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with hot.compress_saved(min_values=0):
        y = compiled(x)
    (got,) = torch.autograd.grad(y.square().mean(), x)
    (exact,) = torch.autograd.grad(model(x).square().mean(), x)
    torch.testing.assert_close(got, exact)


def test_retain_graph() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with hot.compress_saved(min_values=0):
        y = F.gelu(x * 1.0).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


# ---- CUDA ----


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("dtype", list(EPS))
def test_cuda_bits_equal_the_cpus(bits: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    qkv = torch.randn(2, 197, 3, 12, 64).to(dtype)
    for x in (
        torch.randn(32 * 128 * 5).to(dtype),
        torch.randn(1000).to(dtype),
        torch.randn(33 * 128 + 5).to(dtype) * 1e-3,
        qkv.permute(2, 0, 3, 1, 4)[1],
        torch.randn(5, 6, 70).to(dtype).transpose(0, 1),
        torch.randn(64, 64).to(dtype)[:, ::2],
    ):
        for key in ((0, 0), (0xDEADBEEF, 0x9ABCDEF0)):
            # strides as they are: .cuda() keeps those of dense tensors only
            base = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda").copy_(x)
            assert torch.equal(packed(base, bits, key).cpu(), packed(x, bits, key))


@pytest.mark.cuda
def test_cuda_not_finite() -> None:
    for bits in (8, 4):
        x = torch.randn(3, 128, device="cuda")
        x[1, 40] = float("nan")
        assert not packed(x, bits)[1].isfinite().any()
        assert packed(x, bits)[::2].isfinite().all()


@pytest.mark.cuda
def test_cuda_whole_model() -> None:
    model = nn.Sequential(Block(), Block()).cuda().eval()
    x = torch.randn(4, 32, 64, device="cuda")
    exact = model_gradient(model, x, None)
    assert cosine(model_gradient(model, x, hot.compress_saved(min_values=0)), exact) > 0.995


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is there")
def test_cuda_without_triton_warns_once() -> None:
    module.triton_kernels.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton is missing"):
        assert module.triton_kernels() is None
    assert module.triton_kernels() is None
