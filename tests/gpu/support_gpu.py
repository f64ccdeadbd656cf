"""Helpers of the GPU tests."""

from collections.abc import Callable
from typing import Any

import hotcore
import torch
import torch.nn.functional as F
from torch import nn

RECIPES = ("default", "fast", "paper", "accurate")
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


POISON = 0xFF  # NaN in every float type, -1 in every integer type


def poison(largest: int = 1 << 28) -> None:
    """Fill the memory of the current stream's next allocations, small and large ones."""
    sizes = [largest, *[1 << 19] * 64, *[1 << 12] * 64]
    blocks = [torch.full((n,), POISON, dtype=torch.uint8, device="cuda") for n in sizes]
    del blocks
    torch.cuda.current_stream().synchronize()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def on_a_side_stream(call: Callable[[], object], times: int = 3) -> None:
    """Run a call on a side stream, which torch requires before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of a call (made after a call outside the graph) and its result."""
    on_a_side_stream(call, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


class Block(nn.Module):
    """Transformer block in timm's form, by default of ViT-B."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


def layer(
    length: int, outs: int, ins: int, dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Layer:  # fmt: skip
    """Return gy, w, x on the CPU."""
    shapes = ((length, outs), (outs, ins), (length, ins))
    gy, w, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return gy, w, x


def whole_backward(arrays: Layer, recipe: str, device: str, key: int) -> list[Any]:
    """Return the saved x, g_x, g_w, g_b, computed on ``device``."""
    gy, w, x = (array.to(device) for array in arrays)
    config = hotcore.HotConfig.recipe(recipe)
    saved = hotcore.compress_activation(x, config, key=key)
    return [saved.data, *hotcore.backward_linear(gy, w, saved, need=("gx", "gw", "gb"))]


def assert_equal_backward(got: list[Any], wanted: list[Any]) -> None:
    """Compare the saved x, g_x, g_w bit for bit; and g_b, a sum in another order, closely."""
    for name, a, b in zip(("saved", "gx", "gw"), got, wanted, strict=False):
        assert same_bits(a, b), name
    assert torch.allclose(got[3].float().cpu(), wanted[3].float().cpu(), rtol=1e-2, atol=1e-3)
