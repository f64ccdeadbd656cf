"""One code a value on CUDA: the bits of the CPU, for any storage, shape, strides and data."""

from __future__ import annotations

import random

import pytest
from support import TOKEN_STORAGES, one_code

torch = pytest.importorskip("torch")

import hotcore  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# tokens, out features, in features: primes, short and padded blocks, rows of one lane, of several
# warps and of two blocks a lane, more tokens than a CTA takes.
SHAPES = (
    (1, 1, 1),
    (1, 16, 16),
    (2, 3, 700),
    (33, 17, 5),
    (197, 96, 64),
    (257, 832, 80),
    (100, 200, 1600),
    (600, 64, 64),
    (130, 520, 520),
    (2100, 768, 192),
    (1100, 48, 3072),
    (40, 9000, 64),
    (24, 64, 14336),
)


def is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bits, but for the payload of a NaN and the sign of a zero."""
    if ours.dtype == torch.uint8:
        return torch.equal(ours.cpu(), theirs.cpu())
    a, b = (torch.nan_to_num(t.cpu().float(), nan=7e7) for t in (ours, theirs))
    return torch.equal(a, b)


def data(kind: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, cols)
    if kind == "sizes":  # of tokens and of features, far apart
        x *= torch.exp(2 * torch.randn(rows, 1)) * torch.exp(3 * torch.randn(cols))
    elif kind == "sparse":
        x *= torch.rand(rows, cols) < 0.1
        x[rows // 2] = 0
        x[:, cols // 3] = 0
    elif kind == "tiny":
        x *= 1e-7 if dtype == torch.float16 else 1e-37
        x[::2] *= 1e3
    elif kind == "special":
        x[rows // 3, cols // 2] = float("nan")
        x[rows // 2, cols // 3] = float("-inf")
    elif kind == "huge" and dtype != torch.float16:
        x *= 1e37
    return x.to(dtype)


def check(
    config: hotcore.HotConfig,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kind: str = "normal",
    *,
    quantized: bool = False,
    gw_dtype: torch.dtype | None = None,
) -> None:
    tokens, outs, ins = shape
    gy, w, x = (
        data(kind, tokens, outs, dtype),
        data("normal", outs, ins, dtype),
        data(kind, tokens, ins, dtype),
    )
    start = torch.randn(outs, ins).to(gw_dtype or dtype)
    results = []
    for device in ("cpu", "cuda"):
        on = {name: t.to(device) for name, t in (("gy", gy), ("w", w), ("x", x))}
        saved = hotcore.compress_activation(on["x"], config, key=hotcore.Key(5, 6, 7))
        restored = hotcore.decompress_activation(saved)
        some = hotcore.decompress_activation(saved, first=tokens // 3, last=tokens - tokens // 5)
        weight = hotcore.quantize_weight(on["w"], config) if quantized else on["w"]
        gw = start.clone().to(device)
        gb = torch.ones(outs, dtype=torch.float32, device=device)
        grads = hotcore.backward_linear(
            on["gy"], weight, saved, config=config, need=("gx", "gw", "gb"), key=9
        )
        hotcore.backward_linear(
            on["gy"], None, saved, config=config, need=("gw", "gb"), key=9,
            gw_out=gw, gb_out=gb, accumulate=True,
        )  # fmt: skip
        results.append((saved.data, restored, some, *grads[:2], gw, grads[2], gb))
    names = ("saved", "restored", "some", "gx", "gw", "accumulated gw")
    for name, ours, theirs in zip(names, *results, strict=False):
        assert theirs.is_cuda
        assert is_same(ours, theirs), f"{name} at {shape}, {dtype}, {kind}, {config!r}"
    sums, sizes = gy.double().sum(0), gy.double().abs().sum(0)
    finite = sizes < torch.finfo(torch.float16 if dtype == torch.float16 else torch.float32).max
    for result in results:
        for before, gb in zip((0, 1), result[6:], strict=True):
            found = gb.cpu().double()
            error = (found - sums - before).abs()
            limit = 1e-5 * sizes + (sums + before).abs() * 2.0**-8 + 1e-40
            assert bool(((error <= limit) | ~finite).all())
            assert not bool((found.isfinite() & ~sums.isfinite()).any())


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_equals_the_cpu(storage: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check(one_code(storage), shape, dtype)


@pytest.mark.parametrize("kind", ["normal", "sizes", "special"])
@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_products_of_rows(storage: str, kind: str) -> None:
    """Too large for one launch: g_w takes q as it lies. Tiles of tokens and in features in part."""
    for shape in ((9001, 256, 528), (4112, 1024, 400), (16385, 128, 768), (2049, 3072, 784)):
        check(one_code(storage), shape, torch.bfloat16, kind)


@pytest.mark.parametrize("kind", ["sizes", "sparse", "tiny", "special", "huge"])
@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_any_values(storage: str, kind: str) -> None:
    for dtype in DTYPES:
        for shape in ((33, 17, 5), (197, 96, 128), (700, 256, 320)):
            check(one_code(storage), shape, dtype, kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"hadamard_block": 32},
        {"hadamard_block": 16},
        {"gx_rounding": "stochastic"},
        {"gw_rounding": "nearest"},
        {"basis": "sketch"},
        {"basis": "sketch", "block": 16, "rank": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_settings(storage: str, fields: dict[str, object]) -> None:
    for shape in ((1, 16, 16), (65, 48, 33), (1030, 128, 192)):
        for kind in ("normal", "sizes", "special"):
            check(one_code(storage, **fields), shape, torch.bfloat16, kind)


def test_stochastic_token8() -> None:
    check(one_code("token8", x_rounding="stochastic"), (300, 96, 200), torch.bfloat16)


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_weights_quantised_before(storage: str) -> None:
    for shape in ((33, 17, 5), (200, 96, 128)):
        config = one_code(storage, gx_rounding="stochastic")
        check(config, shape, torch.bfloat16, quantized=True)


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_views(storage: str) -> None:
    """Of any strides, from an address that no vector fits."""
    config = one_code(storage)
    for rows, cols in ((70, 40), (130, 129)):
        big = data("normal", 2 * rows, 2 * cols + 1, torch.bfloat16)
        gy = data("normal", 2 * rows, 96, torch.bfloat16)
        w = data("normal", 48, 2 * cols + 1, torch.bfloat16)
        results = []
        for device in ("cpu", "cuda"):
            on, on_gy, on_w = big.to(device), gy.to(device), w.to(device)
            found = []
            for x, weight in (
                (on[:rows, 1 : cols + 1], on_w[:, 1 : cols + 1]),
                (on[::2, ::2][:, :cols], on_w[:, ::2][:, :cols]),
                (on.t().contiguous().t()[:rows, :cols], on_w.t().contiguous().t()[:, :cols]),
            ):
                saved = hotcore.compress_activation(x, config, key=hotcore.Key(1, 2, 3))
                grads = hotcore.backward_linear(
                    on_gy[:rows, ::2], weight, saved, config=config, need=("gx", "gw"), key=4
                )
                found += [saved.data, grads.gx, grads.gw]
            results.append(found)
        for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
            assert is_same(ours, theirs), f"{i} at {(rows, cols)}"


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_a_side_stream(storage: str) -> None:
    config = one_code(storage)
    gy, w, x = (
        torch.randn(s, device="cuda").bfloat16() for s in ((500, 192), (192, 320), (500, 320))
    )
    saved = hotcore.compress_activation(x, config, key=1)
    usual = hotcore.backward_linear(gy, w, saved, config=config, need=("gx", "gw"), key=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = hotcore.compress_activation(x, config, key=1)
        other = hotcore.backward_linear(gy, w, again, config=config, need=("gx", "gw"), key=2)
    torch.cuda.synchronize()
    assert is_same(saved.data, again.data)
    for ours, theirs in zip(usual[:2], other[:2], strict=True):
        assert torch.equal(ours, theirs)


def test_a_long_contraction() -> None:
    """More tokens than INT32 sums hold."""
    tokens = 133143 + 500
    gy = torch.ones(tokens, 16, dtype=torch.bfloat16)
    x = torch.ones(tokens, 16, dtype=torch.bfloat16)
    config = one_code("token8", gw_rounding="nearest")
    found = []
    for device in ("cpu", "cuda"):
        saved = hotcore.compress_activation(x.to(device), config, key=1)
        found.append(
            hotcore.backward_linear(gy.to(device), None, saved, config=config, need=("gw",), key=2)
        )
    assert is_same(found[0].gw, found[1].gw)
