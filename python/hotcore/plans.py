"""Explains which kernels a layer or a product runs on a GPU, without running them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from . import _core, arrays, gpus
from .config import ConfigLike, HotConfig, as_config, as_size, check_ints, check_type

Needed = Literal["y", "x", "gx", "gw", "gb"]


@dataclass(frozen=True)
class Step:
    """A launch of a kernel, or a memset."""

    call: str
    """Function that launches it: quantize_forward_weight, quantize_forward_input, forward_linear,
    compress_activation, quantize_weight or backward_linear."""
    kernel: str
    file: str
    """The kernel's file in cuda/."""
    blocks: int
    """Thread blocks of the grid; 0: a memset."""
    threads: int
    """Threads of a thread block."""
    cluster: int
    """Thread blocks of a cluster."""
    shared_bytes: int
    """Dynamic shared memory of a thread block."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes_read: int
    """Bytes of each operand times the number of its reads."""
    bytes_written: int
    operations: int
    """2 M N K for a product."""
    independent: bool
    """Whether it may start before the previous kernel has ended."""
    slow: str
    """Cost of this kernel beside a faster one that does not fit, and the reason; empty: none."""
    passed_over: tuple[str, ...]
    """Kernels before it in its operand's list that do not fit, as "kernel: reason"."""


@dataclass(frozen=True)
class Explanation:
    """The kernels of a layer, in order; ``print`` shows them as a table."""

    device: str
    lacks: tuple[str, ...]
    """Kinds of kernels that the device can run and the build lacks, e.g. "tcgen05"."""
    steps: tuple[Step, ...]
    workspace: int
    """Bytes of scratch for backward; an estimate if the device is not present."""
    gy_passes: int
    """Number of reads of g_y."""
    bytes_read: int
    bytes_written: int
    operations: int
    floor_us: float
    """Lower bound of the time in microseconds, without launches and latency; 0 if ``rates`` is
    empty. It is the longer of bytes at the device's bandwidth and products at its INT8 rate."""
    rates: str
    """The rates behind the floor."""
    slow: tuple[str, ...]
    """The reasons for slow steps, each once."""
    int8: str
    """The rate of INT8 products beside bf16's on this device, and its source (docs/gpus.md)."""
    text: str

    def __str__(self) -> str:
        return self.text


def explain(
    tokens: int,
    out_features: int,
    in_features: int,
    config: ConfigLike | None = None,
    *,
    device: Any = "sm_90",
    need: Needed | Collection[Needed] | None = None,
    dtype: Any = "bfloat16",
    gw_dtype: Any = "float32",
    accumulate: bool = False,
    quantized_weight: bool = False,
    bias_dtype: Any = "float32",
    wgmma: bool | None = None,
) -> Explanation:
    """Explain which kernels a linear layer runs on a GPU, their traffic, and why any is slow.

    Nothing runs, and no GPU is needed: the CUDA backend's planner makes the plan. If a grid depends
    on occupancy, an absent device is modelled.

    Args:
        tokens: L, rows of x and g_y.
        out_features: O.
        in_features: I.
        config: configuration or name of a recipe; None: the default recipe.
        device: ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90"``, ``"sm_100"``, ``"sm_120"``, or
            a GPU of this machine: ``"cuda"``, ``"cuda:1"`` or a torch device.
        need: one or several of ``"y"`` (the 8-bit forward product), ``"x"`` (its compression),
            ``"gx"``, ``"gw"``, ``"gb"``. None: all, but ``"y"`` only with ``forward="int8"``.
        dtype: float32, float16 or bfloat16: dtype of g_y, w, x, y and g_x.
        gw_dtype: dtype of g_w.
        accumulate: add to the values in g_w and g_b.
        quantized_weight: w is quantised ahead.
        bias_dtype: dtype of the forward product's bias; None: no bias.
        wgmma: for a device by name: the build has the wgmma kernels. None: this build's answer, or
            True in a build without CUDA.

    Returns:
        The steps, with bytes, operations and a floor time. A GPU of this machine in a build without
        CUDA raises NotImplementedError.

    Source: docs/python.md, "Which kernels run".
    """
    settings = HotConfig() if config is None else as_config(config)
    if need is None:
        product: tuple[Needed, ...] = ("y",) if settings.forward == "int8" else ()
        need = (*product, "x", "gx", "gw", "gb")
    wanted = arrays.needed(need, get_args(Needed))
    sizes = {"tokens": tokens, "out_features": out_features, "in_features": in_features}
    for name, size in sizes.items():
        as_size(size, name, 64)
    check_type(bool, accumulate=accumulate, quantized_weight=quantized_weight)
    dtypes = {"dtype": dtype, "gw_dtype": gw_dtype, "bias_dtype": bias_dtype or "float32"}
    named = [arrays.dtype_name(one, name, arrays.FLOATS) for name, one in dtypes.items()]
    plan = _core.explain(
        _device(device), tokens, out_features, in_features, settings.spec, named[0], named[1],
        "x" in wanted, "gx" in wanted, "gw" in wanted, "gb" in wanted,
        accumulate, quantized_weight, _wgmma(wgmma),
        settings.forward_spec if "y" in wanted else None, bias_dtype is not None, named[2],
        quantized_weight,
    )  # fmt: skip
    return _explanation(plan)


def explain_gemm(
    m: int,
    n: int,
    k: int,
    *,
    int4: bool = False,
    device: Any = "sm_90",
    out_dtype: Any = "float32",
    accumulate: bool = False,
    wgmma: bool | None = None,
) -> Explanation:
    """Explain which kernels :func:`hotcore.gemm_int8` or ``gemm_int4`` runs on a GPU.

    Args:
        m: rows of a.
        n: rows of b.
        k: length of the contraction. Arrays are assumed contiguous and aligned to 16 bytes, with a
            scale for each row.
        int4: the operands are packed INT4.
        device: see :func:`explain`.
        out_dtype: float32, float16 or bfloat16.
        accumulate: the product is added to the values in ``out``.
        wgmma: see :func:`explain`, also for the result and the errors.
    """
    check_ints(64, m=m, n=n, k=k)
    check_type(bool, int4=int4, accumulate=accumulate)
    out = arrays.dtype_name(out_dtype, "out_dtype", arrays.FLOATS)
    return _explanation(
        _core.explain_gemm(_device(device), m, n, k, out, int4, accumulate, _wgmma(wgmma))
    )


def _device(device: Any) -> str:
    return "cuda:0" if str(device) == "cuda" else str(device)


def _wgmma(wgmma: bool | None) -> bool:
    if wgmma is None:
        return _core.cuda_wgmma() or not _core.built_with_cuda()
    check_type(bool, wgmma=wgmma)
    return wgmma


def _explanation(plan: dict[str, Any]) -> Explanation:
    steps = tuple(Step(**step) for step in plan.pop("steps"))
    rate = str(_int8_rate(plan["device"]))
    text = f"{plan.pop('text')}{rate}\n"
    return Explanation(steps=steps, int8=rate, text=text, **plan)


def _int8_rate(device: str) -> gpus.Int8Rate:
    """Return the rate of a device like "sm_86 (RTX 3090, 82 SMs)" or "cuda:0, sm_90 (...)"."""
    parts = re.fullmatch(r"(?:cuda:(\d+), )?sm_(\d+)(\d) \((?:(.+), )?\d+ SMs\)", device)
    assert parts is not None, device
    present, major, minor, modelled = parts.groups()
    name = gpus.name_of(int(present)) if present else modelled
    if not present and name.startswith("RTX"):  # libhot models only GeForce cards
        name = f"GeForce {name}"
    return gpus.int8_rate(name, int(major), int(minor))
