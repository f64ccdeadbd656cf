"""Layers with the storages of one code a value: hotcore's gradients, however they are run."""

from __future__ import annotations

import copy

import pytest
from support import TOKEN_STORAGES, one_code

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from hotcore.torch.ops import codes, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch_graphs import every  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


class Block(nn.Module):
    """Two layers that take the same x, and one that takes theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.q, self.k, self.o = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.o(self.q(y) * self.k(y)) + x


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_layers_with_one_x_share_its_codes(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their blocks along the in features are the same."""
    compressed: list[int] = []
    compress = codes.compress
    monkeypatch.setattr(codes, "compress", lambda *a: compressed.append(1) or compress(*a))
    for block, count in ((64, 2), (16, 3)):
        model = Block()
        hot.convert(model, one_code(storage), every)
        model.k.config = one_code(storage, hadamard_block=block)
        compressed.clear()
        x = torch.randn(80, 48, requires_grad=True)
        model(x).sum().backward()
        assert len(compressed) == count
    same = one_code(storage, gx_rounding="stochastic")
    assert sharing.config_key(same) == sharing.config_key(one_code(storage))


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_frozen_weights(storage: str) -> None:
    layer = nn.Linear(64, 96).requires_grad_(False)
    model = nn.Sequential(copy.deepcopy(layer))
    hot.convert(model, one_code(storage, forward="int8"), every)
    hot.freeze_int8(model)
    x = torch.randn(50, 64, requires_grad=True)
    gy = torch.randn(50, 96)
    (got,) = torch.autograd.grad(model(x), x, gy)
    (wanted,) = torch.autograd.grad(layer(x), x, gy)
    assert float((got - wanted).norm() / wanted.norm()) < 0.03
