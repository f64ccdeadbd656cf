"""Gradients in INT8 between two processes by gloo."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import hotcore  # noqa: E402
import hotcore.torch as hot  # noqa: E402
import numpy as np  # noqa: E402
import plans  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hotcore.config import Key  # noqa: E402
from hotcore.torch.distributed.int8_gradients import BLOCK, _factor, _sum, encode  # noqa: E402
from torch import Tensor, nn  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
REPEATS = 24


def model_of(rank: int) -> tuple[nn.Module, Tensor]:
    """Odd sizes, a frozen layer, and a batch of this process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(67, 129), nn.ReLU(), nn.LayerNorm(129), nn.Linear(129, 31))
    model[2].bias.requires_grad_(False)
    return model, torch.randn(48, 67, generator=torch.Generator().manual_seed(rank))


def gradients(model: Any, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([plans.whole(p.grad).flatten() for p in model.parameters() if p.requires_grad])


def exact() -> Tensor:
    """The mean gradient of all processes."""
    return torch.stack([gradients(*model_of(rank)) for rank in range(plans.WORLD)]).mean(0)


def check(wrapped: Any, x: Tensor, bound: float) -> None:
    """Error, no bias, equal bits in all processes, repeatable by the seed."""
    gradients(wrapped, x)  # after which DDP arranges its buckets anew
    torch.manual_seed(7)  # the same in both processes
    found = torch.stack([gradients(wrapped, x) for _ in range(REPEATS)])
    wanted = exact()
    errors = [plans.error(one, wanted) for one in found]
    assert 0 < max(errors) < bound
    assert plans.error(found.mean(0), wanted) < 2 * bound / REPEATS**0.5
    everywhere = [torch.empty_like(found) for _ in range(plans.WORLD)]
    dist.all_gather(everywhere, found)
    assert torch.equal(*everywhere)
    torch.manual_seed(7)
    assert torch.equal(gradients(wrapped, x), found[0])
    assert not torch.equal(gradients(wrapped, x), found[0])


def ddp(rank: int, device: str) -> None:
    model, x = model_of(rank)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert "DDP" in str(hot.int8_gradients(wrapped))
    check(wrapped, x, 0.012)  # rounded twice
    with pytest.raises(RuntimeError, match="hook"):
        hot.int8_gradients(wrapped)
    with wrapped.no_sync():
        local = gradients(wrapped, x)
    assert torch.equal(local, gradients(model_of(rank)[0], x))
    x[0, 0] = torch.inf if rank else 0.0
    assert gradients(wrapped, x).isnan().any()


def fsdp(rank: int, device: str) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model, x = model_of(rank)
    mesh = dist.device_mesh.init_device_mesh(device, (plans.WORLD,))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        with pytest.raises(NotImplementedError, match="torch 2.9"):
            hot.int8_gradients(model)
        return
    assert hot.int8_gradients(model).groups == 2
    check(model, x, 0.008)
    wanted = exact()
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(x).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(x).square().mean().backward()
    found = [plans.whole(p.grad).flatten() for p in model.parameters() if p.requires_grad]
    assert plans.error(torch.cat(found), 2 * wanted) < 0.008
    for part in (model[0], model):
        part.set_gradient_divide_factor(3.0)
        part.set_force_sum_reduction_for_comms(True)
    assert plans.error(gradients(model, x), 2 / 3 * wanted) < 0.008


def test_gradients_of_two_processes() -> None:
    plans.spawn(ddp, fsdp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 63, 64, 4099])
def test_codes(dtype: Any, count: int, rng: np.random.Generator) -> None:
    """Parts are hotcore's transform and quantiser with streams of their own; sums add them."""
    values, size = torch.from_numpy(rng.standard_normal(count)).to(dtype), -(-count // 3)
    wires = torch.stack([encode(values, Key(seed), 3) for seed in range(3)])
    for i, wire in enumerate(wires[1]):
        part = values[i * size : (i + 1) * size]
        padded = nn.functional.pad(part, (0, len(wire) // 68 * BLOCK - len(part))).view(-1, BLOCK)
        transformed = hotcore.fwht(padded.float(), block=BLOCK)
        q, scale = hotcore.quantize(transformed, key=Key(1, stream=i))
        assert torch.equal(wire[: q.numel()].view(torch.int8), q.flatten())
        assert torch.equal(wire[q.numel() :].view(torch.float32), scale)
    decoded = [_sum(wire[None], 1.0, torch.empty(count)) for wire in wires]
    assert plans.error(decoded[0], values.float()) < 0.02
    found = _sum(wires, 0.5, torch.empty(count, dtype=dtype))
    torch.testing.assert_close(found, (sum(decoded) / 2).to(dtype))


def test_what_is_neither() -> None:
    with pytest.raises(TypeError, match="expected a DistributedDataParallel"):
        hot.int8_gradients(nn.Linear(2, 2))


def test_a_premultiplied_sum_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="set_force_sum_reduction_for_comms"):
        _factor(dist.ReduceOp.MAX, None)


def test_a_copy_is_as_before() -> None:
    """Nothing of the model itself changes."""
    model = nn.Linear(3, 3)
    before = copy.deepcopy(vars(model))
    with pytest.raises(TypeError):
        hot.int8_gradients(model)
    assert vars(model).keys() == before.keys()
