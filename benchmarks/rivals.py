"""What hotcore is compared with: the same backward by torch and torchao, products by CUTLASS.

python benchmarks/rivals.py    # compiles torchao's layers into inductor's cache, for later runs
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from layers import CUDA_GROUPS

Call = Callable[[], object]
TORCHAO = Path(__file__).resolve().parent.parent / "third_party" / "torchao"
FP8 = torch.float8_e4m3fn


def products(gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, tf32: bool | None = None) -> Call:
    """``g_y w`` and ``g_y^T x``."""

    def call() -> object:
        _set_tf32(tf32)
        return gy @ w, gy.t() @ x

    return call


def backward(gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, tf32: bool | None = None) -> Call:
    """The two products and the sums of g_y."""

    def call() -> object:
        _set_tf32(tf32)
        return gy @ w, gy.t() @ x, gy.sum(0)

    return call


def _set_tf32(allowed: bool | None) -> None:
    if allowed is not None:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def int8_products(tokens: int, outs: int, ins: int, device: str) -> Call:
    """``torch._int_mm`` alone: operands that are codes already, int32 results."""
    gy, gy_t, w_t, x_t = (
        torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        for shape in ((tokens, outs), (outs, tokens), (ins, outs), (ins, tokens))
    )
    return lambda: (torch._int_mm(gy, w_t.t()), torch._int_mm(gy_t, x_t.t()))


def fp8_products(tokens: int, outs: int, ins: int) -> Call:
    """``torch._scaled_mm`` alone, one scale a tensor: no casts, no transposition."""
    gy, gy_t, w_t, x_t = (
        torch.randn(shape, device="cuda").to(FP8)
        for shape in ((tokens, outs), (outs, tokens), (ins, outs), (ins, tokens))
    )
    one = torch.ones((), device="cuda")

    def product(a: torch.Tensor, b_t: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b_t.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return lambda: (product(gy, w_t), product(gy_t, x_t))


class StockGemm:
    """CUTLASS's stock tiles: libhot_stock_gemm (stock_gemm/, -DHOT_BUILD_STOCK_GEMM=ON).

    Args:
        path: the library.

    Attributes:
        tiles: schedule, tile and cluster of each instance; of those for sm_80 "mma.sync" and the
            tile.

    Raises OSError: it is no such library.
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
        """``codes[0] codes[1]^T`` times both scales, as ``hotcore.gemm_int8`` takes them.

        Args:
            tile: one of ``tiles``.
            along_m: the order through the tiles: along M, or along N.
            swizzle: in stripes of at most so many tiles.
            codes: int8 [M, K] and [N, K], dense, on CUDA.
            scales: float32 [M] and [N].
            out: bfloat16 [M, N], dense.

        The call raises RuntimeError where CUTLASS reports an error.
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
            pointers = (array.data_ptr() for array in arrays)  # here, so that the arrays live on
            status = self._run(*numbers, *pointers, torch.cuda.current_stream().cuda_stream)
            if status != 0:
                raise RuntimeError(f"stock {tile}, {m}, {n}, {k}: cutlass::Status {status}")

        return call


class TorchaoMissing(Exception):
    """Why torchao's FP8 layer cannot be timed here."""


def _float8() -> Any:
    """torchao.float8 of third_party/torchao, or of what is installed. Raises TorchaoMissing."""
    # Its own C++ kernels have no part in FP8 training; loading them is a matter of luck.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    if TORCHAO.is_dir() and str(TORCHAO) not in sys.path:
        sys.path.insert(0, str(TORCHAO))
    try:
        importlib.import_module("torchao.float8.float8_linear")
        return importlib.import_module("torchao.float8")
    except Exception as error:  # whatever a package of another version may raise
        raise TorchaoMissing(f"torchao does not import: {error}") from error


def torchao_convert(
    model: torch.nn.Module, recipe: str, names: Collection[str], emulate: bool
) -> int:
    """Convert linear layers to torchao's FP8 training, in place; how many.

    Args:
        model: to be compiled afterwards: torchao leaves the casts to ``torch.compile``.
        recipe: "tensorwise" or "rowwise".
        names: the layers; those of them that are no ``nn.Linear``, or have a number of features
            that FP8's products do not take (no multiple of 16), stay as they are.
        emulate: compute without FP8 hardware, which tests the way here, not the time.

    Raises TorchaoMissing; also where no layer is left.
    """
    float8 = _float8()
    taken = []

    def chosen(module: torch.nn.Module, name: str) -> bool:
        assert isinstance(module, torch.nn.Linear)  # torchao asks for no other
        fits = module.in_features % 16 == 0 and module.out_features % 16 == 0
        if name in names and fits:
            taken.append(name)
        return name in names and fits

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        config = dataclasses.replace(config, emulate=True)
    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    if not taken:
        raise TorchaoMissing("torchao takes nn.Linear alone; no layer is one that FP8 fits")
    return len(taken)


def torchao_layer(w: torch.Tensor, emulate: bool = False) -> tuple[Any, str]:
    """A compiled FP8 layer, tensorwise (torchao's default), that holds ``w``; and the version.

    Taken from third_party/torchao (scripts/fetch_torchao.py) or from what is installed. torchao
    leaves the casts to ``torch.compile``, which is therefore part of it. ``emulate`` computes
    without FP8 hardware and uncompiled: it tests the way here, not the time.

    Raises TorchaoMissing.
    """
    float8 = _float8()
    layer_type = importlib.import_module("torchao.float8.float8_linear").Float8Linear
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta", dtype=w.dtype)
    linear.weight = torch.nn.Parameter(w)
    config = float8.Float8LinearConfig(emulate=emulate)
    layer = layer_type.from_float(linear, config)
    if not emulate:
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # else a backward cannot be run twice
        torch._dynamo.reset()  # every layer compiles the same code; dynamo gives up after eight
        layer = torch.compile(layer, dynamic=False)
    version = str(importlib.import_module("torchao").__version__)
    return layer, f"{version}, emulated: no timing" if emulate else version


def torchao_calls(
    gy: torch.Tensor, w: torch.Tensor, x: torch.Tensor, emulate: bool = False
) -> tuple[dict[str, Call], str]:
    """Contenders "torchao forward", "torchao both" and "torchao backward" (graph retained)."""
    layer, version = torchao_layer(w, emulate)
    leaf = x.detach().clone().requires_grad_()

    def both() -> object:
        return torch.autograd.grad(layer(leaf), (leaf, layer.weight), gy)

    def forward() -> object:
        return layer(leaf)

    try:
        y = layer(leaf)
        torch.autograd.grad(y, (leaf, layer.weight), gy, retain_graph=True)
    except Exception as error:  # compilation can fail in any way
        raise TorchaoMissing(f"torchao's layer does not run: {error!s:.300}") from error

    def alone() -> object:
        return torch.autograd.grad(y, (leaf, layer.weight), gy, retain_graph=True)

    return {"torchao forward": forward, "torchao both": both, "torchao backward": alone}, version


def main() -> None:
    for group in sys.argv[1:] or CUDA_GROUPS:
        for tokens, outs, ins in CUDA_GROUPS[group].values():
            gy, w, x = (
                torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((tokens, outs), (outs, ins), (tokens, ins))
            )
            calls, version = torchao_calls(gy, w, x)
            for call in calls.values():
                call()
    torch.cuda.synchronize()
    print(f"torchao {version} compiled")


if __name__ == "__main__":
    main()
