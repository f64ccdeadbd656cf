"""A small vision transformer and a small GPT, in plain PyTorch.

The models do not depend on HOT: ``hotcore.torch.convert`` replaces the Linear layers of
``blocks`` afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a four times wider MLP."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x [batch, tokens, width]`` to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class SmallViT(nn.Module):
    """Images of 32x32 as 8x8 patches of 4x4 pixels plus a class token: 65 tokens an image."""

    def __init__(
        self, width: int = 48, depth: int = 2, heads: int = 4, classes: int = 10, channels: int = 1
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(channels, width, kernel_size=4, stride=4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, 65, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """``images [batch, channels, 32, 32]`` to logits ``[batch, classes]``."""
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class SmallGPT(nn.Module):
    """A character-level decoder; not ``causal``: an encoder, as BERT."""

    def __init__(
        self,
        vocab: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        context: int = 128,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=causal) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        self.apply(self._init_like_gpt2)

    @staticmethod
    def _init_like_gpt2(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [batch, length]`` to logits ``[batch, length, vocab]``."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
