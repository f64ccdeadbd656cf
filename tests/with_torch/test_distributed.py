"""DDP, FSDP2 and the plans of tests/plans.py with gloo: two processes on the CPU."""

import copy
from collections.abc import Callable
from typing import Any

import hotcore.torch as hot
import plans
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as checkpoints
from support import refused
from torch import nn
from torch_graphs import same

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
WORLD = plans.WORLD


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, 4)
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(self.stem(x))).flatten(2).transpose(1, 2)
        return self.head((x + self.down(torch.relu(self.up(x)))).mean(1))


def build(recipe: str | hot.HotConfig | None) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    if recipe:
        assert len(hot.convert(model, recipe).hot_report.converted) == 3
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(100 + rank))


def local_grads(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Gradients of one process's batch, with the random numbers that it has there."""
    model.zero_grad()
    torch.manual_seed(50 + rank)
    model(batch(rank)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def int8_forward(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """An 8-bit forward, one weight frozen: as each process alone has it, when it changes, too."""
    model = build(hot.HotConfig.recipe("fast", forward="int8"))
    model.down.weight.requires_grad_(False)
    report = model.hot_report
    alone, wrapped = copy.deepcopy(model), wrap(model)
    assert getattr(wrapped, "module", wrapped).hot_report is report  # DDP's, FSDP2's own
    assert alone.hot_report == report
    for _ in range(2):
        torch.manual_seed(50 + rank)
        y = wrapped(batch(rank))
        assert torch.equal(y, alone(batch(rank)))
        y.square().mean().backward()
        with torch.no_grad():  # a sharded one is gathered anew into the same Parameter
            model.down.weight.mul_(2)
            alone.down.weight.mul_(2)


def frozen(rank: int, wrap: Callable[[nn.Module], nn.Module], bits: Any) -> None:
    """Weights that are frozen in codes: as each process alone has them."""
    model = build(hot.HotConfig.recipe("fast", forward="int8"))
    with torch.no_grad():  # so that features have sizes of their own
        model.down.weight *= torch.linspace(0.1, 3, model.down.in_features)
    hot.freeze(model, bits, lambda module, name: name == "down")
    alone, expected = copy.deepcopy(model), model.state_dict()
    wrapped = wrap(model)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(50 + rank)
        y = wrapped(batch(rank))
        y.square().mean().backward()
        assert torch.equal(y, alone(batch(rank)))
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    trained = [name for name, p in alone.named_parameters() if p.requires_grad]
    parts = [local_grads(alone, other) for other in range(WORLD)]
    for name, grad, *addends in zip(trained, grads, *parts, strict=True):
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        assert torch.allclose(whole, sum(addends) / WORLD, rtol=1e-5, atol=1e-7), name
    found = model.state_dict()["down.weight"]  # gathered, where it is sharded
    assert type(found) is torch.Tensor and torch.equal(found, expected["down.weight"])
    codes = model.down.weight_codes
    model.load_state_dict(model.state_dict())  # each process quantises all, and keeps its part
    again = model.state_dict()["down.weight"]
    assert (again - found).norm() < (0.1 if bits == 4 else 1e-5) * found.norm()
    assert model.down.weight_codes is codes
    options = checkpoints.StateDictOptions(full_state_dict=True)
    state = checkpoints.get_model_state_dict(model, options=options)
    state["down.weight"] *= 2
    checkpoints.set_model_state_dict(model, state, options=options)
    assert (model.state_dict()["down.weight"] - 2 * found).norm() < 0.2 * found.norm()


def ddp(rank: int, device: str) -> None:
    int8_forward(rank, nn.parallel.DistributedDataParallel)
    for bits in (8, 4):
        frozen(rank, nn.parallel.DistributedDataParallel, bits)
    model = build("fast")
    alone = copy.deepcopy(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(50 + rank)
    parallel(batch(rank)).square().mean().backward()
    # The mean over the processes of what each computes by itself, to the bit: 2 addends, then / 2.
    parts = [local_grads(alone, other) for other in range(WORLD)]
    means = [a / WORLD + b / WORLD for a, b in zip(*parts, strict=True)]
    assert same((p.grad for p in model.parameters()), means)
    torch.manual_seed(50 + rank)
    compiled = torch.compile(parallel, backend="aot_eager")
    parallel.zero_grad()
    compiled(batch(rank)).square().mean().backward()
    assert same((p.grad for p in model.parameters()), means)
    # Without synchronisation they add up; the next step sends the sum.
    before = model.up.weight.grad.clone()
    with parallel.no_sync():
        parallel(batch(rank)).square().mean().backward()
    assert not torch.equal(model.up.weight.grad, before)
    # A converted model inside DDP, and back.
    assert type(hot.revert(parallel).module.up) is nn.Linear


def whole_codes(model: nn.Module) -> dict[str, Any]:
    """Arguments of fully_shard for frozen layers: before torch 2.12 it shards no integers."""
    codes = {p for p in model.parameters() if p.dtype == torch.uint8}
    return {} if torch.__version__ >= (2, 12) else {"ignored_params": codes}


def fsdp(rank: int, device: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))

    def sharded(model: nn.Module) -> nn.Module:
        fully_shard(model.down, mesh=mesh, **whole_codes(model))
        return fully_shard(model, mesh=mesh, **whole_codes(model))

    int8_forward(rank, sharded)
    for bits in (8, 4):
        frozen(rank, sharded, bits)
    model = build("default")
    alone = copy.deepcopy(model)
    for layer in (model.conv, model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model.up.weight, DTensor) and isinstance(model.up, hot.HotLinear)
    torch.manual_seed(50 + rank)
    model(batch(rank)).square().mean().backward()
    parts = [local_grads(alone, other) for other in range(WORLD)]
    for (name, p), *addends in zip(model.named_parameters(), *parts, strict=True):
        mean = (addends[0] + addends[1]) / WORLD
        assert torch.allclose(p.grad.full_tensor(), mean, rtol=1e-6, atol=1e-8), name
    # Sharded state and the plain model's have the same keys and whole tensors.
    whole = {name: p.full_tensor() for name, p in model.state_dict().items()}
    plain = build(None)
    plain.load_state_dict(whole)
    with torch.no_grad():
        assert torch.allclose(model(batch(rank)), plain(batch(rank)), rtol=1e-5, atol=1e-6)
    refused(lambda: hot.revert(model), "undo what was wrapped around it")

    # Mixed precision: parameters gathered in bfloat16, gradients reduced in float32.
    model = build("default")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.up, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    y = model(batch(rank))
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32 and p.grad.full_tensor().isfinite().all(), name


HAS_FSDP = torch.__version__ >= (2, 9)
no_fsdp = pytest.mark.skipif(
    not HAS_FSDP,
    reason="FSDP2 on the CPU fails with torch 2.6 and sums gradients with 2.7 and 2.8, also plain",
)


@pytest.mark.long
def test_two_processes() -> None:
    """The two import torch once for all plans."""
    plans.spawn(ddp, *((fsdp, *plans.PLANS) if HAS_FSDP else ()))


@no_fsdp
@pytest.mark.parametrize("each", [False, True])
def test_convert_comes_before_sharding(mesh: Any, each: bool) -> None:
    """Sharded weights are refused by name; a model whose sharded layers are left out is taken."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    for part in (model[0], model[2]) if each else (model,):
        fully_shard(part, mesh=mesh)
    with pytest.raises(ValueError, match=r"weight of 0 is a DTensor.*hot\.convert first, then"):
        hot.convert(model, filter_fn=lambda module, name: True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    frozen = hot.convert(nn.Sequential(nn.Linear(64, 64)), filter_fn=lambda module, name: True)
    hot.freeze_int8(frozen)
    mixed = copy.deepcopy(frozen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(mixed, mesh=mesh, mp_policy=policy, **whole_codes(mixed))
    refused(lambda: mixed(torch.randn(4, 64)), "x has bfloat16.*where the mp_policy of fully_shard")
    if not whole_codes(frozen):
        fully_shard(frozen, mesh=mesh)
        refused(lambda: hot.thaw(frozen), "its codes are a DTensor; undo fully_shard")
    both = nn.ModuleList([model, nn.Linear(64, 64)])
    report = hot.convert(both, filter_fn=lambda module, name: name == "1").hot_report
    assert [layer.name for layer in report.converted] == ["1"]


@no_fsdp
def test_a_head_that_is_sharded_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    given = {"x": torch.randn(8, 64), "weight": torch.randn(96, 64), "target": torch.arange(8)}
    for name, tensor in given.items():
        spread = {**given, name: distribute_tensor(tensor, mesh, [Replicate()])}
        with pytest.raises(NotImplementedError, match=f"{name}: a DTensor; leave the head out"):
            hot.linear_cross_entropy(**spread)
