"""Policies for selective checkpoints: which results are kept and which are recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ..ops.registry import python_form

Policy = Callable[..., CheckpointPolicy] | list[Any]
_aten: Any = torch.ops.aten
_hot: Any = torch.ops.hotcore

CODES = frozenset((_hot.compress.default, _hot.compress_activation.default))
"""Operators that compress x for HOT's layers, in eager and compiled regions."""

SEEDS = frozenset((_hot.draw_seed.default,))
"""Seeds take eight bytes each. If they are kept, generator states need not be."""

PRODUCTS = frozenset(
    (
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        *(_aten.linear.default, _aten.convolution.default),
        *(_hot.product.default, _hot.convolution.default, _hot.head_loss.default),
        python_form(_hot.product.default),
    )
)
"""Matrix products and convolutions, plain and HOT's."""

ATTENTION = frozenset(
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_aten, name)
)
"""The operators of ``F.scaled_dot_product_attention``, by device and shape."""


def keep_codes(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the codes of HOT's layers (0.53 bytes per value of x) and seeds; recompute all else.

    Arguments and result are those of a policy of
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    return _kept(op in CODES or op in SEEDS)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of all products, codes and seeds; use it like :func:`keep_codes`."""
    return _kept(op in CODES or op in SEEDS or op in PRODUCTS)


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep attention's results and seeds, no codes; use it like :func:`keep_codes`."""
    return _kept(op in ATTENTION or op in SEEDS)


def keeps_codes(policy: Policy) -> bool:
    """Whether a policy keeps the codes that HOT's layers make of x in the forward pass."""
    if isinstance(policy, list):  # of the operators whose results are kept
        return not CODES.isdisjoint(policy)
    decision = policy(SelectiveCheckpointContext(is_recompute=False), _hot.compress.default)
    return decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _kept(wanted: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE
