"""The INT8 product by mma.sync (sm_80 to sm_89, sm_120) beside CUTLASS's tiles for sm_80.

    python -m benchmarks.evidence.bench_mma_sync --device cuda --stock LIBRARY [--shape M,N,K ...]

g_x and g_w of r = 8 of every layer of layers.py, bf16 results with both scales. The library
(stock_gemm/) runs libhot's own product, by any tile, where libhot itself would take wgmma, and
CUTLASS's tiles with the same epilogue; all take both operands with the contraction contiguous.
torch._int_mm writes int32 without scales. "of the best stock tile" is the time of the quickest
stock tile over that of the plan which libhot chooses, "of our best tile" the same for the quickest
of our own tiles and divisions, the chosen one among them: how good the choice is.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_gemm
import hotcore
import timing
import torch
from evidence import rivals
from timing import Call

KINDS = ("g_x", "g_w, r = 8")
CHOICE = -1  # in place of a tile's number
CHOSEN = "chosen"
INT_MM = "torch._int_mm"


class _Plan(ctypes.Structure):
    """MmaPlan of cuda/gemm_sm80_plan.h."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("tile", "band", "blocks", "whole", "shared", "sharers")
    ]


class MmaSync:
    """libhot's own product by mma.sync, from libhot_stock_gemm.

    Args:
        path: the library.

    Attributes:
        tiles: their names.

    Raises OSError: it is no such library.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path.resolve()))
        try:
            self._plan, self._run = library.hot_mma_sync_plan, library.hot_mma_sync_run
            self._error, name_of = library.hot_mma_sync_error, library.hot_mma_sync_name
            count = library.hot_mma_sync_count()
        except AttributeError as error:
            raise OSError(f"{path} is no libhot_stock_gemm: {error}") from error
        number, pointer = ctypes.c_longlong, ctypes.c_void_p
        self._plan.argtypes = [ctypes.c_int] * 2 + [number] * 3 + [ctypes.POINTER(_Plan)]
        self._plan.restype = number
        self._run.argtypes = [ctypes.POINTER(_Plan)] + [number] * 3 + [pointer] * 7
        self._error.restype = name_of.restype = ctypes.c_char_p
        self.tiles: tuple[str, ...] = tuple(name_of(i).decode() for i in range(count))

    def call(
        self, tile: int, share: bool, given: bench_gemm.Operands, out: torch.Tensor
    ) -> tuple[str, Call] | None:
        """How the product is divided, in words, and the call; None: the tile does not do it.

        Args:
            tile: a number of ``tiles``, or CHOICE.
            share: the steps of the last tiles may be shared out (a tile's number: are).
            given: dense, on CUDA.
            out: bfloat16 [M, N], dense.

        The call raises RuntimeError where CUDA reports an error.
        """
        (a, b), scales, _ = given
        (m, k), n = a.shape, b.shape[0]
        plan = _Plan()
        size = self._plan(tile, int(share), m, n, k, ctypes.byref(plan))
        if size < 0:
            return None
        scratch = torch.empty(size, dtype=torch.uint8, device=a.device)
        arrays = (a, b, *scales, out, scratch)

        def call() -> None:
            pointers = (array.data_ptr() for array in arrays)  # here, so that the arrays live on
            stream = torch.cuda.current_stream().cuda_stream
            if self._run(ctypes.byref(plan), m, n, k, *pointers, stream) != 0:
                raise RuntimeError(f"mma.sync, {m}, {n}, {k}: {self._error().decode()}")

        shared = f", {plan.shared} shared by {plan.sharers}" if plan.shared else ""
        return f"{self.tiles[plan.tile]}, {plan.whole + plan.shared} tiles{shared}", call


def own_calls(own: MmaSync, given: bench_gemm.Operands) -> tuple[str, dict[str, Call]]:
    """The choice in words, and every call.

    Raises AssertionError where one's result is not hotcore's to the bit.
    """
    wanted = hotcore.gemm_int8(*given.codes, *given.scales, out=given.out)
    calls: dict[str, Call] = {}
    words = ""
    for tile, share in ((CHOICE, True), *((i, s) for i in range(len(own.tiles)) for s in (0, 1))):
        out = torch.full_like(wanted, torch.nan)
        made = own.call(tile, bool(share), given, out)
        if made is None:
            continue
        how, call = made
        call()
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        if tile == CHOICE:
            words, how = how, CHOSEN
        elif how == words:
            continue  # the chosen plan by its tile's name
        calls.setdefault(how, call)
    return words, calls


def bench(
    product: bench_gemm.Product, args: argparse.Namespace, own: MmaSync, stock: rivals.StockGemm
) -> dict[str, Any]:
    given = bench_gemm.operands(product, args.device)
    words, mine = own_calls(own, given)
    finalists, tiles = bench_gemm.stock_finalists(stock, given, args.device, mma_sync=True)
    a, b = given.codes
    calls = mine | finalists | {INT_MM: lambda: torch._int_mm(a, b.t())}
    rows = bench_gemm.timed(product, calls, args, tiles)
    chosen = rows[CHOSEN]
    of = {"the best stock tile": finalists, "our best tile": mine, INT_MM: [INT_MM]}
    for what, names in of.items():
        least = min(rows[name]["median_ms"] for name in names)
        chosen[f"of {what}"] = least / chosen["median_ms"]
    return {"M, N, K": product, "choice": words, "rows": rows, "choice of stock tiles": tiles}


def described(found: Mapping[str, Any]) -> str:
    row = found["rows"][CHOSEN]
    shares = "  ".join(f"{value:.3f}" for key, value in row.items() if key.startswith("of "))
    return f"{row['TOPS']:6.0f}  {shares}  {found['choice']}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.arguments(__doc__, "mma-sync", "shape")
    parser.add_argument("--stock", type=Path, required=True, help="libhot_stock_gemm")
    args = timing.begin(parser, argv)
    if args.device == "cpu":
        parser.error("--device cpu: these products run on CUDA only")
    own, stock = MmaSync(args.stock), rivals.StockGemm(args.stock)
    every = bench_gemm.cuda_products().items()
    groups = {name: products for name, products in every if name.endswith(KINDS)}
    print("\nTOPS; of the best stock tile, of our best tile, of torch._int_mm")
    found = bench_gemm.bench_groups(args, groups, lambda p: bench(p, args, own, stock), described)
    timing.write(args, "mma-sync", {"products": found})


if __name__ == "__main__":
    main()
