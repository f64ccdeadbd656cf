"""A mixture of experts: its definition, and with codes of x; for tests on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hotcore.torch.ops import experts
from torch import Tensor

T, W, E, H, K = 96, 64, 5, 48, 2
STEP = {8: 0.03, 4: 0.25}
"""Bounds of the relative error of g_w and of the scores' gradient."""


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def operands(
    dtype: Any = torch.float32, tokens: int = T, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """x, first, last, scores and the experts of each token; the last expert is never chosen."""
    shapes = ((tokens, W), (E, 2 * H, W), (E, W, H))
    made = [(torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for shape in shapes]
    made.append(torch.rand(tokens, K))
    chosen = torch.stack([torch.randperm(E - 1)[:K] for _ in range(tokens)] or [torch.zeros(0)])
    made = [t.to(device).requires_grad_() for t in made]
    return (*made, chosen.view(tokens, K).long().to(device))


def inner(rows: Tensor) -> Tensor:
    return torch.tanh(rows[:, :H]) * rows[:, H:]


def mixture(x: Tensor, first: Tensor, last: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """The definition, a token and an expert at a time."""
    each = (first[chosen] @ x[:, None, :, None]).squeeze(-1)  # [T, K, 2H]
    h = inner(each.flatten(0, 1)).view(*chosen.shape, H, 1)
    return ((last[chosen] @ h).squeeze(-1) * scores[..., None]).sum(1)


def answer(function: Callable[..., Tensor], parts: tuple[Tensor, ...], gy: Tensor) -> list[Tensor]:
    y = function(*parts)
    return [y.detach(), *torch.autograd.grad(y, parts[:4], gy.to(y.dtype))]


def kept(bits: int) -> Callable[..., Tensor]:
    def function(x: Tensor, first: Tensor, last: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return experts.experts(x, chosen, scores, first, last, inner, bits)

    return function
