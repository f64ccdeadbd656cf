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

import argparse
from collections.abc import Sequence
from typing import Any

import hotcore
import timing
import torch
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


def parse_matrix(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; expected R,C, e.g. 1576,768")
    return int(parts[0]), int(parts[1])


def contenders(shape: tuple[int, int], device: str) -> tuple[dict[str, Call], dict[str, int]]:
    """Calls, and the minimum of bytes that each moves."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(shape, device=device).to(dtype)
    out = torch.empty_like(x)
    calls: dict[str, Call] = {"copy": lambda: out.copy_(x)}
    nbytes = {"copy": 2 * x.nbytes}
    for bits in (8, 4):
        for scale in ("row", "column", "tensor"):
            name = f"INT{bits}, {scale}"
            calls[name] = lambda bits=bits, scale=scale: hotcore.quantize(
                x, bits=bits, scale=scale, key=1
            )
            nbytes[name] = x.nbytes + x.numel()
    calls["INT8, row, nearest"] = lambda: hotcore.quantize(x, rounding="nearest")
    nbytes["INT8, row, nearest"] = x.nbytes + x.numel()
    calls["INT4, row, packed"] = lambda: hotcore.quantize(x, bits=4, packed=True, key=1)
    nbytes["INT4, row, packed"] = x.nbytes + x.numel() // 2
    calls["hla, r = 8"] = lambda: hotcore.hla(x, key=1)
    nbytes["hla, r = 8"] = x.nbytes + 2 * x.numel()
    q, scales = hotcore.quantize(x, bits=4, key=1)
    calls["pack_int4"] = lambda: hotcore.pack_int4(q)
    nbytes["pack_int4"] = q.nbytes + q.nbytes // 2
    wide = str(dtype).removeprefix("torch.")
    calls["dequantize"] = lambda: hotcore.dequantize(q, scales, dtype=wide)
    nbytes["dequantize"] = q.nbytes + x.nbytes
    for form, config in KEPT.items():
        saved = hotcore.compress_activation(x, config, key=1)
        few = hotcore.compress_activation(x[:, :16].clone(), config, key=1)
        calls[f"compress {form}"] = lambda config=config: hotcore.compress_activation(
            x, config, key=1
        )
        nbytes[f"compress {form}"] = x.nbytes + saved.nbytes
        if config.basis == "full":
            calls[f"decompress {form}"] = lambda saved=saved: hotcore.decompress_activation(
                saved, dtype=wide
            )
            nbytes[f"decompress {form}"] = saved.nbytes + x.nbytes
        # x for the 8-bit forward and kept, by two calls and by one.
        calls[f"rows, compress {form}"] = lambda config=config: (
            hotcore.quantize_forward_input(x, config),
            hotcore.compress_activation(x, config, key=1),
        )
        calls[f"rows and {form}"] = lambda config=config: hotcore.quantize_forward_input(
            x, config, keep=True, key=1
        )
        nbytes[f"rows and {form}"] = x.nbytes + x.numel() + saved.nbytes
        nbytes[f"rows, compress {form}"] = nbytes[f"rows and {form}"]
        for name, gy, kept in (("columns", x, few), ("operand", x[:, :16].clone(), saved)):
            calls[f"{name} {form}"] = lambda gy=gy, kept=kept: hotcore.backward_linear(
                gy, None, kept, need=("gw",), key=1
            )
            codes = x.numel() // 2 if config.basis != "full" else x.numel()
            nbytes[f"{name} {form}"] = codes + (x.nbytes if name == "columns" else saved.nbytes)
    return calls, nbytes


def bench(shape: tuple[int, int], args: argparse.Namespace) -> dict[str, Row]:
    calls, nbytes = contenders(shape, args.device)
    rows = timing.in_turns(calls, args.rounds, args.device)
    for name, row in rows.items():
        row["TB/s"] = nbytes[name] / row["median_ms"] / 1e9
        row["copies"] = row["median_ms"] / rows["copy"]["median_ms"]
        row["bytes"] = nbytes[name] / nbytes["copy"]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "quantize")
    parser.add_argument("--shape", type=parse_matrix, action="append", help="R,C; repeatable")
    args = timing.begin(parser, argv)
    out: dict[str, Any] = {}
    for shape in args.shape or (CPU_SHAPES if args.device == "cpu" else CUDA_SHAPES):
        rows = bench(shape, args)
        out[",".join(map(str, shape))] = rows
        print(f"\nx {shape}: us, median [quartiles]")
        for name, row in rows.items():
            notes = f"{row['TB/s']:.3g} TB/s  {row['copies']:.2f} copies, bytes {row['bytes']:.2f}"
            print(timing.line(name, row, notes))
    timing.write(args, "quantize", {"shapes": out})


if __name__ == "__main__":
    main()
