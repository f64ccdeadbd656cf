"""Time INT8 products with fused scales beside torch's INT8, FP8 and bf16 products.

    python benchmarks/bench_gemm.py [--device cpu|cuda] [--shape M,N,K ...] [--stock LIBRARY]

The shapes come from layers.py: (L, I, O) for g_x, (O, I, L/2) for g_w with r = 8, and (O, I, L) for
full g_w. `hotcore.gemm_int8` and torch._scaled_mm (FP8, scales per row and column) write
bf16. torch._int_mm writes int32 without scales. The contraction is contiguous in every operand.
--stock adds the two fastest of CUTLASS's stock tiles (stock_gemm/), with the same operands and
result. The figures are 2 M N K operations in tera-operations a second.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hotcore
import timing
import torch
from evidence import rivals
from layers import CUDA_GROUPS
from timing import Call

# A few launches of every stock tile in every order choose the finalists.
SWIZZLES = (1, 2, 4, 8)  # all that CUTLASS has
CHOICE_ROUNDS = 3
FINALISTS = 2  # a few launches may not tell the first from the second
Product = tuple[int, int, int]
"""M, N, K."""


def cuda_products() -> dict[str, dict[str, Product]]:
    out: dict[str, dict[str, Product]] = {}
    for group, layers in CUDA_GROUPS.items():
        kinds: dict[str, dict[str, Product]] = {"g_x": {}, "g_w, r = 8": {}, "g_w, full": {}}
        for layer, (tokens, outs, ins) in layers.items():
            kinds["g_x"][layer] = (tokens, ins, outs)
            kinds["g_w, r = 8"][layer] = (outs, ins, tokens // 2)
            kinds["g_w, full"][layer] = (outs, ins, tokens)
        out |= {f"{group} {kind}": products for kind, products in kinds.items()}
    return out


CPU_PRODUCTS: dict[str, dict[str, Product]] = {
    "ViT-B, 8 images": {
        "g_x, proj": (1576, 768, 768),
        "g_w, proj": (768, 768, 1576),
        "g_x, fc1": (1576, 768, 3072),
    }
}


class Operands(NamedTuple):
    """Operands int8 [M, K] and [N, K], their scales float32 [M] and [N], and the output."""

    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    out: torch.Tensor


def operands(product: Product, device: str) -> Operands:
    m, n, k = product
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    wide = torch.float32 if device == "cpu" else torch.bfloat16
    scales = torch.rand(m, device=device), torch.rand(n, device=device)
    return Operands((a, b), scales, torch.empty(m, n, dtype=wide, device=device))


def contenders(arrays: Operands) -> dict[str, Call]:
    (a, b), (a_scale, b_scale), out = arrays
    wide, device = out.dtype, out.device
    a_wide, b_wide = (torch.randn(codes.shape, device=device).to(wide) for codes in (a, b))
    calls: dict[str, Call] = {
        "hotcore": lambda: hotcore.gemm_int8(a, b, a_scale, b_scale, out=out),
        "torch._int_mm": lambda: torch._int_mm(a, b.t()),
        f"torch {str(wide).removeprefix('torch.')}": lambda: torch.mm(a_wide, b_wide.t()),
    }
    if device.type == "cuda":
        a8, b8 = a_wide.to(rivals.FP8), b_wide.to(rivals.FP8)
        rows, columns = a_scale[:, None].contiguous(), b_scale[None, :].contiguous()
        calls["torch fp8 rowwise"] = lambda: rivals.fp8_product(a8, b8, rows, columns)
    return calls


def stock_finalists(
    stock: rivals.StockGemm, arrays: Operands, device: str
) -> tuple[dict[str, Call], dict[str, dict[str, Any]]]:
    """Return the fastest stock tiles with their orders, and the best order of each tile.

    Raises AssertionError if a finalist's product differs from hotcore's by more than the last bit
    of a bfloat16.
    """
    out = torch.empty_like(arrays.out)
    calls: dict[str, Call] = {}
    tile_of: dict[str, str] = {}
    for tile, along_m, swizzle in itertools.product(stock.tiles, (False, True), SWIZZLES):
        name = f"stock {tile}, along {'M' if along_m else 'N'}, swizzle {swizzle}"
        calls[name] = stock.call(tile, along_m, swizzle, arrays.codes, arrays.scales, out)
        tile_of[name] = tile
    rows = timing.in_turns(calls, CHOICE_ROUNDS, device)
    ranked = sorted(rows, key=lambda name: rows[name]["median_ms"])
    expected = hotcore.gemm_int8(*arrays.codes, *arrays.scales, out=arrays.out)
    for name in ranked[:FINALISTS]:
        out.fill_(torch.nan)
        calls[name]()
        torch.testing.assert_close(
            out, expected, rtol=2**-7, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    best_first = {tile_of[name]: name for name in reversed(ranked)}
    tiles = {
        tile: {"order": best_first[tile].removeprefix(f"stock {tile}, "), **rows[best_first[tile]]}
        for tile in stock.tiles
    }
    return {name: calls[name] for name in ranked[:FINALISTS]}, tiles


def bench(
    product: Product, args: argparse.Namespace, stock: rivals.StockGemm | None
) -> dict[str, Any]:
    arrays = operands(product, args.device)
    finalists, tiles = stock_finalists(stock, arrays, args.device) if stock else ({}, None)
    rows = timing.in_turns(contenders(arrays) | finalists, args.rounds, args.device)
    for row in (*rows.values(), *(tiles or {}).values()):
        row["TOPS"] = 2 * product[0] * product[1] * product[2] / row["median_ms"] / 1e9
    mine = rows["hotcore"]
    mine["faster than"] = {
        name: row["median_ms"] / mine["median_ms"] for name, row in rows.items() if row is not mine
    }
    if finalists:
        mine["of the best stock tile"] = min(mine["faster than"][name] for name in finalists)
    return {"M, N, K": product, "rows": rows, "choice of stock tiles": tiles}


def described(table: Mapping[str, Any]) -> str:
    rows = table["rows"]
    faster = rows["hotcore"]["faster than"].items()
    words = (f"{rival} {rows[rival]['TOPS']:.4g} ({ratio:.2f})" for rival, ratio in faster)
    return "  ".join([f"hotcore {rows['hotcore']['TOPS']:.4g}", *words])


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "gemm", "shape")
    parser.add_argument("--stock", type=Path, help="libhot_stock_gemm, for stock tiles")
    args = timing.begin(parser, argv)
    if args.stock and args.device == "cpu":
        parser.error("--stock: CUTLASS's tiles run on CUDA only")
    stock = rivals.StockGemm(args.stock) if args.stock else None
    if stock is None:
        print("CUTLASS's stock tiles: left out (--stock LIBRARY takes them in)")
    groups = CPU_PRODUCTS if args.device == "cpu" else cuda_products()
    if args.shape:
        groups = {"given": {",".join(map(str, shape)): shape for shape in args.shape}}
    print("\nTOPS (times faster than)")
    tables: dict[str, Any] = {}
    for group, products in groups.items():
        tables[group] = {}
        print(f"\n{group}:")
        for name, product in products.items():
            tables[group][name] = row = bench(product, args, stock)
            print(f"  {name:5s} {product!s:22s} {described(row)}", flush=True)
    timing.write(args, "gemm", {"products": tables})


if __name__ == "__main__":
    main()
