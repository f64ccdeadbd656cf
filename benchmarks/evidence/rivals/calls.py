"""Products by torch and CUTLASS, for comparisons of speed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from layers import Call

FP8 = torch.float8_e4m3fn


def products(gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, tf32: bool | None = None) -> Call:
    """Return a call of ``g_y w`` and ``g_y^T x``."""

    def call() -> object:
        _set_tf32(tf32)
        return gy @ w, gy.t() @ x

    return call


def backward(gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, tf32: bool | None = None) -> Call:
    """Return a call of the two products and the sums of g_y."""

    def call() -> object:
        _set_tf32(tf32)
        return gy @ w, gy.t() @ x, gy.sum(0)

    return call


def _set_tf32(allowed: bool | None) -> None:
    if allowed is not None:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def int8_products(tokens: int, outs: int, ins: int, device: str) -> Call:
    """Return a call of ``torch._int_mm`` on ready codes, with int32 results."""
    gy, gy_t, w_t, x_t = (
        torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        for shape in ((tokens, outs), (outs, tokens), (ins, outs), (ins, tokens))
    )
    return lambda: (torch._int_mm(gy, w_t.t()), torch._int_mm(gy_t, x_t.t()))


def fp8_products(tokens: int, outs: int, ins: int) -> Call:
    """Return a call of ``torch._scaled_mm`` on ready operands, with one scale per tensor."""
    gy, gy_t, w_t, x_t = (
        torch.randn(shape, device="cuda").to(FP8)
        for shape in ((tokens, outs), (outs, tokens), (ins, outs), (ins, tokens))
    )
    one = torch.ones((), device="cuda")
    return lambda: (fp8_product(gy, w_t, one, one), fp8_product(gy_t, x_t, one, one))


def fp8_product(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """Return ``a b^T`` in bf16, both operands in FP8, with their scales."""
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


class StockGemm:
    """Stock tiles of CUTLASS: libhot_stock_gemm (stock_gemm/, -DHOT_BUILD_STOCK_GEMM=ON).

    Args:
        path: path of the library.

    Attributes:
        tiles: schedule, tile and cluster of each instance.

    Raises OSError for another library.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path.resolve()))
        try:
            self._run = library.hot_stock_gemm_run
            name_of = library.hot_stock_gemm_name
            count = library.hot_stock_gemm_count()
        except AttributeError as error:
            raise OSError(f"{path} is no libhot_stock_gemm: {error}") from error
        self._run.argtypes = [ctypes.c_int] * 6 + [ctypes.c_void_p] * 6
        name_of.restype = ctypes.c_char_p
        self.tiles: tuple[str, ...] = tuple(name_of(i).decode() for i in range(count))

    def call(
        self,
        tile: str,
        along_m: bool,
        swizzle: int,
        codes: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> Call:
        """Return a call of ``codes[0] codes[1]^T`` times both scales, as for ``hotcore.gemm_int8``.

        Args:
            tile: one of ``tiles``.
            along_m: whether tiles are visited along M, else along N.
            swizzle: largest number of tiles in a stripe of that order.
            codes: int8 [M, K] and [N, K], dense, on CUDA.
            scales: float32 [M] and [N].
            out: bfloat16 [M, N], dense.

        The call raises RuntimeError if CUTLASS reports an error.
        """
        (m, k), n = codes[0].shape, codes[1].shape[0]
        arrays = (*codes, *scales, out)
        wanted = [(m, k), (n, k), (m,), (n,), (m, n)]
        found = [tuple(array.shape) for array in arrays]
        if found != wanted or not all(array.is_contiguous() for array in arrays):
            raise ValueError(f"stock GEMM: arrays of {found}; expected {wanted}, dense")
        types = [torch.int8] * 2 + [torch.float32] * 2 + [torch.bfloat16]
        if [array.dtype for array in arrays] != types:
            raise ValueError(f"stock GEMM: {[array.dtype for array in arrays]}; expected {types}")
        numbers = (self.tiles.index(tile), int(along_m), swizzle, m, n, k)

        def call() -> None:
            pointers = (array.data_ptr() for array in arrays)  # the call keeps the arrays alive
            status = self._run(*numbers, *pointers, torch.cuda.current_stream().cuda_stream)
            if status != 0:
                raise RuntimeError(f"stock {tile}, {m}, {n}, {k}: cutlass::Status {status}")

        return call
