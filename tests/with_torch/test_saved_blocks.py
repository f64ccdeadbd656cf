"""The block codes of convert(saved=), in eager mode: their bound, layouts, bytes; CUDA's bits."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")
from hotcore.torch import _compat  # noqa: E402
from hotcore.torch.saved import blocks, codes  # noqa: E402  (after the skip)

EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SEED = 2 << 32 | 1

pytestmark = pytest.mark.usefixtures("seeded")


def coded(x: torch.Tensor, bits: int, seed: int | torch.Tensor = SEED) -> torch.Tensor:
    """x, encoded and decoded."""
    drawn = None if bits == 1 else torch.as_tensor(seed)
    return codes.decode(*codes.encode(x, bits, drawn))


def steps(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Width of a step, for every value of a contiguous x."""
    flat = x.reshape(-1).double()
    missing = -len(flat) % blocks.BLOCK
    rows = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, blocks.BLOCK)
    width = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    return width[:, None].expand_as(rows).reshape(-1)[: len(flat)].view(x.shape)


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
        back = coded(x, bits)
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
        total += coded(x, bits, seed << 32 | (seed * 7919 & blocks.MASK32)).double()
    step = steps(x, bits)
    fraction = ((x.view(-1, 128) - x.view(-1, 128).amin(1, keepdim=True)).view_as(x) / step).frac()
    sd = step * (fraction * (1 - fraction)).clamp(min=1e-3).sqrt() / draws**0.5
    z = ((total / draws - x) / sd).flatten()
    assert z.abs().max() < 5.5, float(z.abs().max())
    assert abs(float(z.mean())) < 0.3


def test_a_seed_repeats_and_another_differs() -> None:
    x = torch.randn(64, 128)
    assert torch.equal(coded(x, 4), coded(x, 4))
    assert not torch.equal(coded(x, 4), coded(x, 4, SEED + 1))
    assert not torch.equal(coded(x, 4), coded(x, 4, SEED + (1 << 32)))
    streams = [codes.encode(x, 4, torch.tensor(SEED), stream)[0][0] for stream in (0, 1)]
    assert not torch.equal(*streams)


def test_roundings_of_a_block_average_out() -> None:
    # All of a block at one fraction: the golden-ratio shifts spread as evenly as can be.
    x = torch.full((128,), 0.3 / 255)
    x[0], x[1] = 0, 1
    for seed in range(20):
        ups = (coded(x, 8, seed)[2:] > 0.5 / 255).double().mean()
        assert abs(float(ups) - 0.3) < 0.04


@pytest.mark.parametrize("bits", [8, 4])
def test_ends_are_exact(bits: int) -> None:
    x = torch.randn(50, 128)
    back = coded(x, bits)
    assert torch.equal(back.amax(1), x.amax(1))
    assert torch.equal(back.amin(1), x.amin(1))
    two = torch.where(torch.rand(50, 128) < 0.5, 0.1, -7.3)
    assert torch.equal(coded(two, bits), two)
    same = torch.randn(50, 1).expand(50, 128).contiguous()
    assert torch.equal(coded(same, bits), same)
    relu = torch.randn(50, 128).relu()
    assert not coded(relu, bits)[relu == 0].any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(bits: int, bad: float) -> None:
    x = torch.randn(3, 128)
    x[1, 40] = bad
    back = coded(x, bits)
    assert not back[1].isfinite().any()
    assert back[::2].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_range_past_float32_is_not_finite(bits: int) -> None:
    x = torch.randn(3, 128)
    x[1, 40], x[1, 41] = 3e38, -3e38
    back = coded(x, bits)
    assert not back[1].isfinite().all()
    assert back[::2].isfinite().all()


def test_tiny_ranges() -> None:
    x = torch.full((128,), 3.0)
    assert torch.equal(coded(x, 8), x)
    x = torch.randn(128) * 2.0**-110
    assert coded(x, 8).isfinite().all()
    assert float((coded(x, 8) - x).abs().max()) < 2.0**-100


def test_signs() -> None:
    for shape in ((5,), (1024,), (3, 1000), (4, 33, 77)):
        x = torch.randn(shape)
        x[..., 0] = 0
        assert torch.equal(coded(x, 1), (x > 0).float())


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_layouts(bits: int) -> None:
    base = torch.randn(2, 9, 3, 4, 64)
    q, k, v = base.permute(2, 0, 3, 1, 4).unbind(0)
    image = torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last)
    for x in (q, k, v, image, torch.randn(5, 6, 7).transpose(0, 2), torch.randn(9, 12)[:, ::3]):
        back = coded(x, bits)
        assert back.shape == x.shape
        order = blocks.memory_order(x)
        assert back.permute(order).is_contiguous()  # the same order of dimensions, without gaps
        assert torch.equal(back.permute(order), coded(x.permute(order).contiguous(), bits))
    assert coded(image, bits).is_contiguous(memory_format=torch.channels_last)
    for x in (torch.randn(4, 1).expand(4, 6), torch.randn(20).as_strided((4, 5), (2, 1))):
        assert blocks.memory_order(x) is None  # elements overlap: blocks follow the shape
        assert torch.equal(coded(x, bits), coded(x.contiguous(), bits))


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_bytes(bits: int) -> None:
    x = torch.randn(64, 1024)
    parts, _ = codes.encode(x, bits, torch.tensor(SEED))
    ranges = 0 if bits == 1 else 8 / 128
    assert sum(part.nbytes for part in parts) == x.numel() * (bits / 8 + ranges)


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_no_values(bits: int) -> None:
    x = torch.randn(0, 128)
    assert coded(x, bits).shape == x.shape


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5000)
    expected = [coded(x, bits) for bits in (8, 4, 1)]
    monkeypatch.setattr(blocks, "CHUNK_VALUES", 2048)
    assert all(torch.equal(coded(x, bits), e) for bits, e in zip((8, 4, 1), expected, strict=True))


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
        # strides as they are: .cuda() keeps those of dense tensors only
        there = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda").copy_(x)
        for seed in (0, 0x1ABC_DEF0_DEAD_BEEF):
            wanted = coded(x, bits, seed)
            assert torch.equal(coded(there, bits, seed).cpu(), wanted)
            on_device = torch.tensor(seed, device="cuda")
            assert torch.equal(coded(there, bits, on_device).cpu(), wanted)


@pytest.mark.cuda
def test_cuda_not_finite() -> None:
    for bits in (8, 4):
        x = torch.randn(3, 128, device="cuda")
        x[1, 40] = float("nan")
        assert not coded(x, bits)[1].isfinite().any()
        assert coded(x, bits)[::2].isfinite().all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is there")
def test_cuda_without_triton_warns_once() -> None:
    _compat.triton_kernels.cache_clear()
    cuda = torch.device("cuda")
    with pytest.warns(RuntimeWarning, match="Triton is missing.*saved="):
        assert blocks._kernels(cuda) is None
    assert blocks._kernels(cuda) is None
