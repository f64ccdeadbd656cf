"""Quantisers and compress_activation against one copy of the same array.

    python -m benchmarks.evidence.bench_quantize [--device cpu|cuda] [--shape R,C ...]

"copies" is a row's time over that of one copy of x (read and written). "bytes" is the minimum that
the call must move (x read once, results written once) over the copy's bytes. Their quotient says
how close to its own minimum a kernel runs.

Of every form that x is kept in: "compress", "decompress", "rows, compress" and "rows and" (x for
the 8-bit forward, too, by two calls and by one), and two backward passes for g_w alone, of which
one side has 16 features: "columns" has a wide g_y, "operand" a wide x, from what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import hotcore
import timing
import torch
from layers import parse_shape
from timing import Call, Row

CUDA_SHAPES = ((25216, 768), (25216, 3072), (8192, 4096), (8192, 14336))
CPU_SHAPES = ((1576, 768),)
KEPT = {
    **{name: hotcore.HotConfig.recipe(name) for name in ("default", "fast", "paper", "accurate")},
    "rht2": hotcore.HotConfig(storage="rht2"),
    "compact": hotcore.HotConfig.recipe("compact"),
    "default, equalised": hotcore.HotConfig(equalize_tokens=True),
    "fast, equalised": hotcore.HotConfig.recipe("fast", equalize_tokens=True),
}
"""Name -> how x is kept; compact is rht2 with equalised tokens."""


def contenders(shape: tuple[int, int], device: str) -> dict[str, tuple[Call, int]]:
    """Calls, and the minimum of bytes that each moves."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    wide = str(dtype).removeprefix("torch.")
    x = torch.randn(shape, device=device).to(dtype)
    out, narrow = torch.empty_like(x), x[:, :16].clone()
    codes = x.nbytes + x.numel()  # x read, a byte a value written
    found: dict[str, tuple[Call, int]] = {"copy": (lambda: out.copy_(x), 2 * x.nbytes)}
    for bits in (8, 4):
        for scale in ("token", "channel", "tensor"):
            quantize = partial(hotcore.quantize, x, bits=bits, scale=scale, key=1)
            found[f"INT{bits}, {scale}"] = quantize, codes
    q, scales = hotcore.quantize(x, bits=4, key=1)
    packed = partial(hotcore.quantize, x, bits=4, packed=True, key=1)
    found |= {
        "INT8, row, nearest": (partial(hotcore.quantize, x, rounding="nearest"), codes),
        "INT4, row, packed": (packed, x.nbytes + x.numel() // 2),
        "hla, r = 8": (partial(hotcore.hla, x, key=1), x.nbytes + 2 * x.numel()),
        "pack_int4": (partial(hotcore.pack_int4, q), q.nbytes + q.nbytes // 2),
        "dequantize": (partial(hotcore.dequantize, q, scales, dtype=wide), q.nbytes + x.nbytes),
    }
    for form, config in KEPT.items():
        compress = partial(hotcore.compress_activation, x, config, key=1)
        rows = partial(hotcore.quantize_forward_input, x, config)
        saved, few = compress(), hotcore.compress_activation(narrow, config, key=1)
        found[f"compress {form}"] = compress, x.nbytes + saved.nbytes
        if config.basis == "full":
            decompress = partial(hotcore.decompress_activation, saved, dtype=wide)
            found[f"decompress {form}"] = decompress, saved.nbytes + x.nbytes

        def two_calls(rows: Call = rows, compress: Call = compress) -> object:
            return rows(), compress()

        # x for the 8-bit forward and kept, by two calls and by one.
        found[f"rows, compress {form}"] = two_calls, codes + saved.nbytes
        found[f"rows and {form}"] = partial(rows, keep=True, key=1), codes + saved.nbytes
        halves = x.numel() // 2 if config.basis != "full" else x.numel()
        backward = partial(hotcore.backward_linear, need=("gw",), key=1)
        found[f"columns {form}"] = partial(backward, x, None, few), halves + x.nbytes
        found[f"operand {form}"] = partial(backward, narrow, None, saved), halves + saved.nbytes
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "quantize")
    matrix = partial(parse_shape, names="R,C")
    parser.add_argument("--shape", type=matrix, action="append", help="R,C; repeatable")
    args = timing.begin(parser, argv)
    out: dict[str, Any] = {}
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else CUDA_SHAPES):
        found = contenders(shape, args.device)
        nbytes = {name: moved for name, (_, moved) in found.items()}

        def notes(name: str, row: Row, rows: Any, nbytes: dict[str, int] = nbytes) -> str:
            row["TB/s"] = nbytes[name] / row["median_ms"] / 1e9
            row["copies"] = row["median_ms"] / rows["copy"]["median_ms"]
            row["bytes"] = nbytes[name] / nbytes["copy"]
            return f"{row['TB/s']:.3g} TB/s  {row['copies']:.2f} copies, bytes {row['bytes']:.2f}"

        calls = {name: call for name, (call, _) in found.items()}
        out[",".join(map(str, shape))] = timing.printed(f"x {shape}", calls, args, notes)
    timing.write(args, "quantize", {"shapes": out})


if __name__ == "__main__":
    main()
