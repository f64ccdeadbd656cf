"""Timed layers, and a lower bound of their time on an H200.

This module does not import hotcore, because compile_torchao.py runs while it is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

Call = Callable[[], object]
"""Function that is timed."""
Shape = tuple[int, int, int]
"""Tokens L, out features O, in features I."""

VIT = {  # ViT-B/16, batch 128
    "qkv": (25216, 2304, 768),
    "proj": (25216, 768, 768),
    "fc1": (25216, 3072, 768),
    "fc2": (25216, 768, 3072),
}
LLAMA = {  # Llama-3-8B, 8192 tokens
    "qkv": (8192, 6144, 4096),
    "o": (8192, 4096, 4096),
    "up": (8192, 14336, 4096),
    "down": (8192, 4096, 14336),
}
CUDA_GROUPS: dict[str, dict[str, Shape]] = {"ViT-B": VIT, "Llama-3-8B": LLAMA}
CPU_GROUPS: dict[str, dict[str, Shape]] = {
    "ViT-B, 8 images": {
        "proj": (1576, 768, 768),
        "qkv": (1576, 2304, 768),
        "fc1": (1576, 3072, 768),
        "fc2": (1576, 768, 3072),
        "proj, 1 image": (197, 768, 768),
    }
}

PAPER_LATENCY: dict[str, tuple[Shape, dict[str, float]]] = {
    name: (shape, dict(zip(("FP", "LBP-WHT", "HOT", "faster"), times, strict=True)))
    for name, shape, times in (
        ("layer1.conv1", (3136, 64, 256), (115.0, 106.0, 62.0, 1.9)),
        ("layer1.conv2", (3136, 64, 576), (134.0, 117.0, 59.0, 2.3)),
        ("layer2.conv1", (784, 128, 512), (117.0, 99.0, 67.0, 1.8)),
        ("layer2.conv2", (784, 128, 1152), (124.0, 81.0, 60.0, 2.1)),
        ("layer3.conv2", (196, 256, 2304), (114.0, 85.0, 64.0, 1.8)),
        ("layer4.conv2", (49, 512, 4608), (137.0, 102.0, 72.0, 1.9)),
        ("qkv", (197, 2304, 768), (182.0, 110.0, 70.0, 2.6)),
        ("proj", (197, 768, 768), (122.0, 108.0, 71.0, 1.7)),
        ("fc1", (197, 3072, 768), (226.0, 120.0, 73.0, 3.1)),
        ("fc2", (197, 768, 3072), (233.0, 112.0, 72.0, 3.3)),
        ("stages.0.fc1", (3136, 384, 96), (125.0, 123.0, 63.0, 2.0)),
        ("stages.1.fc1", (784, 768, 192), (129.0, 108.0, 68.0, 1.9)),
        ("stages.2.fc1", (196, 1536, 384), (126.0, 102.0, 66.0, 1.9)),
        ("stages.3.qkv", (49, 1536, 768), (128.0, 105.0, 62.0, 2.1)),
        ("stages.3.proj", (49, 768, 1024), (111.0, 105.0, 69.0, 1.6)),
        ("stages.3.fc1", (49, 3072, 768), (146.0, 110.0, 66.0, 2.2)),
    )
}
"""Latency table of the paper: microseconds of a layer of one image on an RTX 3090, and the printed
speed in units of fp32's."""

PAPER: dict[Shape, float] = {shape: row["faster"] for shape, row in PAPER_LATENCY.values()}
"""Speed in units of fp32's, as the paper prints it."""

TOPS = 1450e12  # INT8, sustained
BANDWIDTH = 4.3e12  # bytes a second, read and written
HALF_RANK = ("fast", "paper")  # r = 8 of 16: half the arithmetic of g_w


def parse_shape(text: str) -> tuple[int, ...]:
    """Three whole numbers above zero between commas."""
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isdigit() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; expected three sizes, as in 8,9,7")
    return tuple(map(int, parts))


def floor_ms(shape: Shape, recipe: str) -> float:
    """Compute a lower bound of a backward's time on an H200: 1450 TOPS and 4.3 TB/s.

    g_y is read once (2 bytes per value). Each value gives one INT8 code for g_x. For
    g_w it gives one code (full) or half a code (r = 8). The bytes of w are read, and its codes
    written. Recipes with x in INT4 unpack it (0.53 + 1 bytes). A product takes the longer of its
    arithmetic and its bytes.
    """
    tokens, outs, ins = shape
    rows = tokens / 2 if recipe in HALF_RANK else tokens
    quantise = 3 * tokens * outs + rows * outs + 3 * outs * ins
    if recipe == "default":
        quantise += 1.53 * tokens * ins

    def product(m: float, n: float, k: float) -> float:
        return max(2 * m * n * k / TOPS, (m * k + n * k + 2 * m * n) / BANDWIDTH)

    return 1e3 * (quantise / BANDWIDTH + product(tokens, ins, outs) + product(outs, ins, rows))
