"""Policies of selective checkpoints: which results of a region are kept instead of recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

_aten: Any = torch.ops.aten
_hot: Any = torch.ops.hotcore

CODES = frozenset(
    getattr(_hot, name).default
    for name in ("compress", "compress_activation", "compress_pixels", "compress_pixels_seeded")
)
"""What HOT's layers keep of x, in eager and in compiled regions."""

PRODUCTS = frozenset(
    (
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        *(_aten.linear.default, _aten.convolution.default),
        *(_hot.product.default, _hot.convolution.default),
    )
)
"""Matrix products and convolutions, plain and HOT's."""


def keep_codes(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the codes of HOT's layers (0.53 bytes a value of x); recompute everything else.

    ::

        contexts = functools.partial(create_selective_checkpoint_contexts, hot.keep_codes)
        y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Nothing is compressed twice. Arguments and result are those of
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    return _kept(op in CODES)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of all products and the codes of HOT's layers; recompute what is cheap.

    Norms, activations and residual sums are recomputed; no product runs twice. As
    :func:`keep_codes`.
    """
    return _kept(op in CODES or op in PRODUCTS)


def _kept(wanted: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE
