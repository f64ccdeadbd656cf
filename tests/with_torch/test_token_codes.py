"""Layers with the storages of one code a value: hotcore's gradients, however they are run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hotcore.saved import saved_layout
from support import TOKEN_STORAGES, nbytes, one_code, saved_tensors

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from hotcore.torch.ops import codes, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_graphs import every  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("storage", TOKEN_STORAGES)
def test_bytes_saved(storage: str) -> None:
    x = torch.randn(200, 300, requires_grad=True)
    layer = nn.Linear(300, 20)
    hot.convert(model := nn.Sequential(layer), one_code(storage), every)
    with saved_tensors() as kept:
        model(x)
    assert nbytes(kept) <= saved_layout(200, 300, one_code(storage)).bytes + 8  # and its seed


class Block(nn.Module):
    """Two layers that take the same x, and one that takes theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.q, self.k, self.o = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.o(self.q(y) * self.k(y)) + x


@pytest.mark.parametrize("forward", ["plain", "int8"])
@pytest.mark.parametrize("storage", TOKEN_STORAGES)
@pytest.mark.parametrize("how", ["aot_eager", "checkpoint"])
def test_however_it_is_run(
    how: str, storage: str, forward: Any, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("one_seed_an_x" if how == "aot_eager" else "unshared")
    torch._dynamo.reset()
    model = Block()
    hot.convert(model, one_code(storage, forward=forward), every)

    def recomputed(x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    other = recomputed if how == "checkpoint" else torch.compile(model, backend=how, fullgraph=True)
    results = []
    for call in (model, other):
        torch.manual_seed(3)
        x = torch.randn(40, 48, requires_grad=True)
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


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
@pytest.mark.parametrize("size", [1, 3])
def test_convolutions(storage: str, size: int) -> None:
    plain = nn.Conv2d(32, 48, size, padding=size // 2)
    ours = nn.Sequential(copy.deepcopy(plain))
    hot.convert(ours, one_code(storage), every)
    x = torch.randn(2, 32, 12, 12, requires_grad=True)
    gradients = []
    for layer in (plain, ours):
        y = layer(x)
        gradients.append(torch.autograd.grad(y.square().sum(), (x, *layer.parameters())))
    for got, wanted, limit in zip(
        gradients[1],
        gradients[0],
        (0.03, {"token8": 0.02, "token4": 0.11, "token2": 0.5}[storage], 1e-5),
        strict=True,
    ):
        assert float((got - wanted).norm() / wanted.norm()) < limit


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


def test_a_model_learns() -> None:
    """Full precision's loss, with x in 4 bits."""
    data = torch.Generator().manual_seed(5)
    x = torch.randn(256, 32, generator=data)
    target = torch.sin(x @ torch.randn(32, 8, generator=data))
    losses = {}
    for storage in (None, *TOKEN_STORAGES):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))
        if storage is not None:
            hot.convert(model, one_code(storage), every)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses[storage] = float(loss)
    for storage in TOKEN_STORAGES:
        assert losses[storage] < 1.15 * losses[None] + 0.01, losses
