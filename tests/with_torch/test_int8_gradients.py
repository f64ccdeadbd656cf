"""Gradients and weights in INT8 between two and three processes by gloo."""

from typing import Any

import hotcore
import hotcore.torch as hot
import numpy as np
import plans
import pytest
import torch
import torch.distributed as dist
from hotcore.config import Key
from hotcore.torch.distributed.int8_gradients import BLOCK, _factor, decode_sum, encode
from hotcore.torch.distributed.int8_weights import _AllGather
from support import refused
from torch import Tensor, nn

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
    every = range(dist.get_world_size())
    return torch.stack([gradients(*model_of(rank)) for rank in every]).mean(0)


def check(wrapped: Any, x: Tensor, bound: float) -> None:
    """Error, no bias, equal bits in all processes, repeatable by the seed."""
    gradients(wrapped, x)  # after which DDP arranges its buckets anew
    torch.manual_seed(7)  # the same in both processes
    found = torch.stack([gradients(wrapped, x) for _ in range(REPEATS)])
    wanted = exact()
    assert 0 < max(plans.error(one, wanted) for one in found) < bound
    assert plans.error(found.mean(0), wanted) < 2 * bound / REPEATS**0.5
    everywhere = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, found)
    assert all(torch.equal(one, found) for one in everywhere)
    torch.manual_seed(7)
    assert torch.equal(gradients(wrapped, x), found[0])
    assert not torch.equal(gradients(wrapped, x), found[0])


def ddp(rank: int, device: str) -> None:
    model, x = model_of(rank)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert "DDP" in str(hot.int8_gradients(wrapped))
    check(wrapped, x, 0.008 if dist.get_world_size() == 2 else 0.012)  # rounded once, or twice
    refused(lambda: hot.int8_gradients(wrapped), "hook", RuntimeError)
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
        refused(lambda: hot.int8_gradients(model), "torch 2.9", NotImplementedError)
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


def weights(rank: int, device: str) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh(device, (plans.WORLD,))
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        model, _ = model_of(rank)
        fully_shard(model, mesh=mesh)
        refused(lambda: hot.int8_weights(model), "torch 2.9", NotImplementedError)
        return
    for dtype, again in ((None, True), (torch.bfloat16, False)):
        model, x = model_of(rank)
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (model[0], model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        assert str(hot.int8_weights(model)).startswith("FSDP2: weights of 2 groups travel in INT8")
        seen: list[dict[str, Tensor]] = []

        def look(part: Any, *_: Any, seen: Any = seen) -> None:
            seen.append({name: p.detach().clone() for name, p in part.named_parameters()})

        model[1].register_forward_pre_hook(lambda *_, model=model: look(model[3]) or look(model[2]))
        model[0].register_forward_pre_hook(lambda part, *_: look(part))
        model[0].compile(backend="aot_eager")
        assert plans.error(gradients(model, x.to(dtype) if dtype else x), exact()) < 0.05
        if dtype is None:  # in eval mode, and after a step, with the same decoded weights
            y = model.eval()(x)
            assert torch.equal(y, model(x)) and len(seen) == 9
        for name, layer in (("0", 0), ("3", 1), ("2", 2)):
            for key, got in seen[layer].items():
                wanted = kept[f"{name}.{key}"].to(got.dtype)
                if wanted.dim() == 1:
                    assert torch.equal(got, wanted), (name, key)
                else:
                    assert 0 < plans.error(got.float(), wanted.float()) < 0.012, (name, key)
                assert torch.equal(got, seen[-3 + layer][key])
                everywhere = [torch.empty_like(got) for _ in range(plans.WORLD)]
                dist.all_gather(everywhere, got.contiguous())
                assert torch.equal(*everywhere)
        assert all(torch.equal(plans.whole(p), kept[n]) for n, p in model.named_parameters())
    model, x = model_of(rank)
    fully_shard([model[3], model[0]], mesh=mesh)  # one group, in this order
    fully_shard(model, mesh=mesh)
    assert str(hot.int8_weights(model)).startswith("FSDP2: weights of 2 groups travel in INT8")
    assert plans.error(gradients(model, x), exact()) < 0.05
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    mixed[1].requires_grad_(False)
    fully_shard(mixed, mesh=mesh)
    hot.int8_weights(mixed)
    refused(mixed.unshard, "several types", NotImplementedError)


def test_sparse_gradients_are_refused(mesh: Any) -> None:
    model = nn.Sequential(nn.Embedding(8, 64, sparse=True), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="gradients of 0 are sparse; expected dense ones"):
        hot.int8_gradients(nn.parallel.DistributedDataParallel(model))
    model[0].requires_grad_(False)
    hot.int8_gradients(nn.parallel.DistributedDataParallel(model))


def test_gradients_of_float64_are_refused(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    wrapped = nn.parallel.DistributedDataParallel(model)
    words = r"model: gradients of module\.1\.weight, module\.1\.bias"
    refused(hot.int8_gradients, words, ValueError, wrapped)
    wrapped.float()
    assert str(hot.int8_gradients(wrapped)).startswith("DDP")


def test_gradients_of_two_processes() -> None:
    plans.spawn(ddp, fsdp)


def test_gradients_of_three_processes() -> None:
    plans.spawn(ddp, world=3)


def test_weights_of_two_processes() -> None:
    plans.spawn(weights)


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
    decoded = [decode_sum(wire[None], 1.0, torch.empty(count)) for wire in wires]
    assert plans.error(decoded[0], values.float()) < 0.02
    found = decode_sum(wires, 0.5, torch.empty(count, dtype=dtype))
    torch.testing.assert_close(found, (sum(decoded) / 2).to(dtype))


def test_what_is_refused() -> None:
    """Nothing of the model changes."""
    model = nn.Linear(3, 3)
    before = dict(vars(model))
    refused(lambda: hot.int8_gradients(model), "expected a DistributedDataParallel", TypeError)
    assert vars(model) == before
    refused(lambda: hot.int8_weights(model), "expected a model after fully_shard", TypeError)
    gather = _AllGather([torch.Size((3, 4)), torch.Size((5,))])
    assert gather._runs(2, torch.empty(11)) == [(0, 8, True), (8, 11, False)]
    parts = "expected 11 values of a process's part, got 10"
    refused(lambda: gather._runs(2, torch.empty(10)), parts, NotImplementedError)
    premultiplied = "set_force_sum_reduction_for_comms"
    refused(lambda: _factor(dist.ReduceOp.MAX, None), premultiplied, NotImplementedError)
