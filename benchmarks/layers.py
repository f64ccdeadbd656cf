"""The timed layers, and the least time that an H200 could need for them."""

from __future__ import annotations

import argparse

Shape = tuple[int, int, int]
"""L tokens, O out features, I in features."""

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

PAPER: dict[Shape, float] = {  # one image: the paper's speed-up over fp32 on an RTX 3090
    (3136, 64, 256): 1.9,
    (3136, 64, 576): 2.3,
    (784, 128, 512): 1.8,
    (784, 128, 1152): 2.1,
    (196, 256, 2304): 1.8,
    (49, 512, 4608): 1.9,
    (197, 2304, 768): 2.6,
    (197, 768, 768): 1.7,
    (197, 3072, 768): 3.1,
    (197, 768, 3072): 3.3,
    (3136, 384, 96): 2.0,
    (784, 768, 192): 1.9,
    (196, 1536, 384): 2.0,
    (49, 1536, 768): 2.1,
    (49, 768, 1024): 1.6,
    (49, 3072, 768): 2.2,
}

TOPS = 1450e12  # INT8, sustained
BANDWIDTH = 4.3e12  # bytes a second, read and written
HALF_RANK = ("fast", "paper")  # r = 8 of 16: half the arithmetic of g_w


def parse_shape(text: str) -> Shape:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; expected L,O,I, e.g. 1576,768,768")
    return int(parts[0]), int(parts[1]), int(parts[2])


def floor_ms(shape: Shape, recipe: str, passes: int = 1) -> float:
    """Least time of a backward on an H200: arithmetic at 1450 TOPS, bytes at 4.3 TB/s.

    g_y is read ``passes`` times (2 bytes per value). Per value one INT8 code is written for g_x,
    and one (full) or half a code (r = 8) for g_w. w is read and its codes are written. Recipes with
    x in INT4 unpack it (0.53 + 1 bytes), in 2 bits 0.28 + 1. A product takes the longer of its
    arithmetic and its bytes.
    """
    tokens, outs, ins = shape
    kept = tokens / 2 if recipe in HALF_RANK else tokens
    quantise = tokens * outs * (2 * passes + 1) + kept * outs + 3 * outs * ins
    if recipe in ("default", "int4"):
        quantise += 1.53 * tokens * ins
    if recipe == "compact":
        quantise += 1.28 * tokens * ins

    def product(m: float, n: float, k: float) -> float:
        return max(2 * m * n * k / TOPS, (m * k + n * k + 2 * m * n) / BANDWIDTH)

    return 1e3 * (quantise / BANDWIDTH + product(tokens, ins, outs) + product(outs, ins, kept))
