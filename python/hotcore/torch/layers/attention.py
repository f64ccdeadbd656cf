"""``HotMultiheadAttention``: an ``nn.MultiheadAttention`` that trains its projections with HOT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modules import HotModule


class HotMultiheadAttention(HotModule, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with the same parameters and keys; its projections are HOT layers.

    Its in_proj and out_proj save x compressed; attention itself is torch's. There is one in_proj
    product if query, key and value are the same tensor, otherwise two or three. In eval mode the
    module is ``nn.MultiheadAttention``, fast path included.

    The arguments are those of ``nn.MultiheadAttention``, and ``config``: a HotConfig or a recipe's
    name. ``add_bias_kv`` and ``add_zero_attn`` raise a ValueError.
    """

    plain = nn.MultiheadAttention

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("HotMultiheadAttention supports neither add_bias_kv nor add_zero_attn")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and attention's weights if ``need_weights``."""
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if not isinstance(query, Tensor):
            return self._recorded(query, key, value, *options)
        if self.runs_plain:
            return super().forward(query, key, value, *options)
        if is_causal and attn_mask is None:
            raise RuntimeError("attn_mask: is_causal needs it, as in nn.MultiheadAttention")
        if query.dim() not in (2, 3) or query.shape[-1] != self.embed_dim:
            raise ValueError(
                f"query: shape {list(query.shape)}; expected two or three sizes, the last "
                f"{self.embed_dim}"
            )
        batched = query.dim() == 3
        # The projections take either order of samples and tokens.
        samples, tokens = (0, 1) if self.batch_first or not batched else (1, 0)
        alike = key.dim() == query.dim() and key.shape[:-1] == value.shape[:-1]
        if not alike or (batched and key.shape[samples] != query.shape[samples]):
            raise ValueError(
                f"key, value: shapes {list(key.shape)} and {list(value.shape)}; expected as many "
                f"tokens in both, and the samples of query {list(query.shape)}"
            )
        if not batched:  # tensors that are the same stay so
            v = value.unsqueeze(0)
            k = v if key is value else key.unsqueeze(0)
            query, key, value = (k if query is key else query.unsqueeze(0)), k, v
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        try:
            q, k, v = self._projected(query, key, value, samples, tokens)
            causal = is_causal and key_padding_mask is None and not need_weights
            mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q, k)
            dropout = self.dropout if self.training else 0.0
            weights = _weights(q, k, mask, dropout) if need_weights else None
            if weights is None:
                y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
            else:
                y = weights @ v
            y = y.permute(0, 2, 1, 3) if samples == 0 else y.permute(2, 0, 1, 3)
            out = self.out_proj
            y = self._product(y.flatten(2), out.weight, out.bias)
        except (ValueError, RuntimeError) as error:
            self.prefix_layer_name(error)
            raise
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y, weights

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, samples: int, tokens: int
    ) -> list[Tensor]:
        """Return q, k and v, ``[N, heads, tokens, features of a head]`` each."""
        width, bias = self.embed_dim, self.in_proj_bias
        weight: Tensor | None = self.in_proj_weight
        weights: Sequence[Tensor]
        if weight is None:  # key or value differ in features
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            inputs = [query, key, value]
        elif query is key and key is value:
            weights, inputs = [weight], [query]
        elif key is value:
            weights, inputs = torch.split(weight, [width, 2 * width]), [query, key]
        else:
            weights, inputs = torch.chunk(weight, 3), [query, key, value]
        biases: Sequence[Tensor | None] = [None] * len(weights)
        if bias is not None:
            biases = torch.split(bias, [w.shape[0] for w in weights])
        projected: list[Tensor] = []
        for x, w, b in zip(inputs, weights, biases, strict=True):
            y = self._product(x, w, b)
            parts = w.shape[0] // width  # no -1, which is ambiguous without elements
            heads = y.view(*y.shape[:-1], parts, self.num_heads, self.head_dim)
            projected += heads.permute(2, samples, 3, tokens, 4).unbind(0)
        return projected


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Both masks as one additive mask, ``[N or 1, heads or 1, L or 1, S]``."""
    samples, heads, length, source = *q.shape[:3], k.shape[2]
    mask = None
    if attn_mask is not None:
        shapes = ((length, source), (samples * heads, length, source))
        mask = _additive(attn_mask, "attn_mask", q, *shapes)
        mask = mask[None, None] if mask.dim() == 2 else mask.view(samples, heads, length, source)
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, "key_padding_mask", q, (samples, source))
        padding = padding[:, None, None]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor, name: str, q: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: shape {list(mask.shape)}; expected {expected}")
    if mask.is_floating_point():
        return mask.to(q.dtype)
    if mask.dtype != torch.bool:
        raise ValueError(f"{name}: {mask.dtype}; expected bool or a floating type")
    return q.new_zeros(mask.shape).masked_fill_(mask, -math.inf)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = F.softmax(scores if mask is None else scores + mask, -1)
    return F.dropout(weights, dropout) if dropout > 0 else weights
