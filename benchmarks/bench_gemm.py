"""INT8 products with fused scales beside torch's INT8, FP8 and bf16 products.

    python benchmarks/bench_gemm.py [--device cpu|cuda] [--shape M,N,K ...]

Every product of the layers of layers.py: g_x (M = L, N = I, K = O), g_w of r = 8 (M = O, N = I,
K = L / 2) and g_w in full (K = L). hotcore.gemm_int8 and torch._scaled_mm (FP8, a scale a row and a
column) write bf16; torch._int_mm writes int32 without scales; all take both operands with the
contraction contiguous. Tera-operations a second, 2 M N K of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import hotcore
import rivals
import timing
import torch
from layers import CUDA_GROUPS, parse_shape
from timing import Call, Row

# The best stock CUTLASS 4.2 tile of each product on an H200, TOPS, from the project's sweep before
# hotcore: other runs, so a guide only; what counts in one run are the rivals.
STOCK = {
    "ViT-B g_x": {"qkv": 1333, "proj": 952, "fc1": 1424, "fc2": 1167},
    "ViT-B g_w, r = 8": {"qkv": 1186, "proj": 397, "fc1": 1134, "fc2": 1128},
    "ViT-B g_w, full": {"fc1": 1286},
    "Llama-3-8B g_x": {"qkv": 1608, "o": 1626, "up": 1514, "down": 1373},
    "Llama-3-8B g_w, r = 8": {"qkv": 1375, "o": 1360, "up": 1417, "down": 1397},
    "Llama-3-8B g_w, full": {"up": 1482},
}
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


def contenders(product: Product, device: str) -> dict[str, Call]:
    m, n, k = product

    def codes(rows: int) -> torch.Tensor:
        return torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device)

    a, b = codes(m), codes(n)
    a_scale, b_scale = torch.rand(m, device=device), torch.rand(n, device=device)
    wide = torch.float32 if device == "cpu" else torch.bfloat16
    out = torch.empty(m, n, dtype=wide, device=device)
    a_wide, b_wide = torch.randn(m, k, device=device).to(wide), torch.randn(n, k, device=device)
    b_wide = b_wide.to(wide)
    calls: dict[str, Call] = {
        "hotcore": lambda: hotcore.gemm_int8(a, b, a_scale, b_scale, out=out),
        "torch._int_mm": lambda: torch._int_mm(a, b.t()),
        f"torch {str(wide).removeprefix('torch.')}": lambda: torch.mm(a_wide, b_wide.t()),
    }
    if device == "cuda":
        a8, b8 = a_wide.to(rivals.FP8), b_wide.to(rivals.FP8)
        rows, columns = a_scale[:, None].contiguous(), b_scale[None, :].contiguous()
        calls["torch fp8 rowwise"] = lambda: torch._scaled_mm(
            a8, b8.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return calls


def bench(product: Product, args: argparse.Namespace) -> dict[str, Row]:
    rows = timing.in_turns(contenders(product, args.device), args.rounds, args.device)
    operations = 2 * product[0] * product[1] * product[2]
    for row in rows.values():
        row["TOPS"] = operations / row["median_ms"] / 1e9
    mine = rows["hotcore"]
    mine["faster than"] = {
        name: row["median_ms"] / mine["median_ms"] for name, row in rows.items() if row is not mine
    }
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "gemm")
    parser.add_argument("--shape", type=parse_shape, action="append", help="M,N,K; repeatable")
    parser.add_argument("--only", help="groups whose name contains this, e.g. 'g_w'")
    args = timing.begin(parser, argv)
    groups = CPU_PRODUCTS if args.device == "cpu" else cuda_products()
    if args.shape:
        groups = {"given": {",".join(map(str, shape)): shape for shape in args.shape}}
    if args.only:
        groups = {name: products for name, products in groups.items() if args.only in name}
        if not groups:
            parser.error(f"--only {args.only}: no such group")
    out: dict[str, Any] = {}
    for group, products in groups.items():
        out[group] = {}
        print(f"\n{group}: TOPS (times faster than)")
        for name, product in products.items():
            rows = bench(product, args)
            stock = STOCK.get(group, {}).get(name)
            if stock:
                rows["hotcore"]["of stock CUTLASS"] = rows["hotcore"]["TOPS"] / stock
            out[group][name] = {"M, N, K": product, "stock TOPS": stock, "rows": rows}
            words = "  ".join(
                f"{rival} {rows[rival]['TOPS']:.4g} ({faster:.2f})"
                for rival, faster in rows["hotcore"]["faster than"].items()
            )
            guide = f"  stock {stock} ({rows['hotcore']['of stock CUTLASS']:.2f})" if stock else ""
            print(
                f"  {name:5s} {product!s:22s} hotcore {rows['hotcore']['TOPS']:.4g}  {words}{guide}"
            )
    timing.write(args, "gemm", {"products": out})


if __name__ == "__main__":
    main()
