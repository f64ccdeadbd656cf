"""The bounds of docs/numerics.md, "Bounds on floating-point results", for any layer."""

from typing import NamedTuple

import numpy as np
import reference
from hotcore import HotConfig

Matrix = np.ndarray


class Bound(NamedTuple):
    """A gradient without rounding, and the bound of its rounding error."""

    target: Matrix
    error: Matrix


def gx_bound(gy: Matrix, w: Matrix, config: HotConfig) -> Bound:
    """docs/numerics.md, "Bounds on floating-point results"."""
    n, q = config.hadamard_block, 127 if config.gx_bits == 8 else 7
    more = (0, -gy.shape[1] % n)
    y_hat = reference.fwht(np.pad(gy, ((0, 0), more)), block=n).astype(np.float64)
    w_hat = reference.fwht(np.pad(w, (more, (0, 0))), axis=0, block=n).astype(np.float64)
    s_y = np.abs(y_hat).max(1 if config.gx_scale == "token" else None, keepdims=True) / q
    s_w = np.abs(w_hat).max(None if config.gx_scale == "tensor" else 0, keepdims=True) / q
    error = s_y * np.abs(w_hat).sum(0) + s_w / 2 * np.abs(y_hat).sum(1, keepdims=True)
    error = (error + w_hat.shape[0] * s_y * s_w / 2) / n
    exact = gy.astype(np.float64) @ w
    rest = 1e-5 * (np.abs(gy).astype(np.float64) @ np.abs(w))  # fp32 of transform and product
    return Bound(exact, error * (1 + 1e-5) + rest)


def gw_bound(gy: Matrix, x: Matrix, config: HotConfig, key: int) -> Bound:
    """One step of each operand's scale a value; of an INT4 x two, as it comes back to INT8.

    The target is the product that the basis keeps, the plain one for basis "full".
    """
    options = {
        "basis": config.basis, "rank": config.rank, "block": config.block, "rows": config.rows,
        "token_grid": config.token_grid, "prefix_tokens": config.prefix_tokens, "key": key,
    }  # fmt: skip
    if config.equalize_tokens:
        t = np.exp2(reference.token_exponents(x).astype(np.float64) - 127).astype(np.float32)
        gy, x = gy * t[:, None], x / t[:, None]
    left = reference.hla(gy, side="gradient", **options).astype(np.float64)
    right = reference.hla(x, side="activation", **options).astype(np.float64)
    divisor = 1 if config.basis == "full" else config.block
    one = None if config.gw_scale == "tensor" else 0
    s_g = np.abs(left).max(one, keepdims=True) / 127
    if config.storage == "int4":
        starts = range(0, len(right), 64)
        amax = np.stack([np.abs(right[start : start + 64]).max(0) for start in starts])
        of_group = amax / 7 * (1 + 2**-7)  # rounded up to bf16
        s_x = np.repeat(of_group, 64, 0)[: len(right)] + 7 * of_group.max(0) / 127
    else:
        one = 0 if config.gw_scale == "channel" else None
        s_x = np.abs(right).max(one, keepdims=True) / 127
    s_g, s_x = np.broadcast_to(s_g, left.shape), np.broadcast_to(s_x, right.shape)
    error = s_g.T @ np.abs(right) + np.abs(left).T @ s_x + s_g.T @ s_x
    error = error + 1e-5 * (np.abs(left).T @ np.abs(right))
    return Bound(left.T @ right / divisor, error * (1 + 1e-5) / divisor)


def forward_bound(x: Matrix, w: Matrix, block: int = 64) -> Bound:
    """docs/numerics.md, "Bounds on floating-point results": y of the 8-bit forward."""
    pad = ((0, 0), (0, -x.shape[1] % block))
    x_hat, w_hat = (
        np.abs(reference.fwht(np.pad(v, pad), block=block).astype(np.float64)) for v in (x, w)
    )
    s_x, s_w = (v.max(1) / 127 * (v.max(1) >= 2.0**-100) for v in (x_hat, w_hat))
    lost = (x_hat.max(1)[:, None] < 2.0**-100) | (w_hat.max(1) < 2.0**-100)
    exact = np.where(lost, 0, x.astype(np.float64) @ w.T.astype(np.float64))
    error = s_x[:, None] * w_hat.sum(1) / 2 + x_hat.sum(1)[:, None] * s_w / 2
    error = (error + x_hat.shape[1] * s_x[:, None] * s_w / 4) / block
    rest = 1e-5 * (x_hat.sum(1)[:, None] * w_hat.sum(1)) / block
    return Bound(exact, error + rest + 2.0**-148)
