"""Gradients of several processes exchanged in INT8, for DDP and FSDP2.

Each process transforms its gradient in blocks of 64 (Hadamard) and rounds every block
stochastically to INT8 with one fp32 scale. Codes and scales travel, 1.0625 bytes a value. The
receiver adds the processes' values in fp32, always in the order of ranks, and undoes the transform
once. The sum is unbiased. docs/torch/support.md, "Gradients in INT8", has its error.
"""

# Without ``annotations`` of __future__: DDP reads those of its hook as objects.
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import _core
from ...config import Key
from ..ops.core import SEEDS, call

BLOCK = 64
"""Values that are transformed together and share a scale."""
_SCALE_BYTES = 4
# The second name is the first one's before torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Int8Exchange(NamedTuple):
    """Result of :func:`int8_gradients`: the plan, and the number of groups that were changed."""

    plan: str
    """``"DDP"`` or ``"FSDP2"``."""
    groups: int
    """Groups of parameters that are reduced together; 0 for DDP, which chooses its buckets."""

    def __str__(self) -> str:
        """One line for a log."""
        groups = f" of {self.groups} groups" if self.groups else ""
        return f"{self.plan}: gradients{groups} travel in INT8, 1.0625 bytes a value"


def int8_gradients(model: nn.Module) -> Int8Exchange:
    """Exchange the gradients of ``model`` in INT8 from now on.

    Call it after ``DistributedDataParallel(model)`` or ``fully_shard``, before the first step. All
    gradients take part, those of plain layers, norms and embeddings too. A block of 64 values with
    NaN or Inf arrives as NaN, so a GradScaler sees it. Each reduction draws one seed from torch's
    default CPU generator, so ``torch.manual_seed`` makes a run repeatable. Processes with equal
    seeds round differently. DDP arranges its buckets anew after the first step, so the bits of that
    step differ in a run that is resumed. With FSDP2, ``MixedPrecisionPolicy(reduce_dtype=
    torch.float32)`` keeps the fp32 sum and costs no bytes on the wire. HSDP reduces between its
    replicas as before.

    Args:
        model: a ``DistributedDataParallel``, or a model of which ``fully_shard`` was called.

    Returns:
        The changed plan and its groups; ``print`` shows them.

    Raises:
        TypeError: ``model`` is neither.
        NotImplementedError: this torch has no ``FSDPModule.set_custom_reduce_scatter`` (2.9 has).
        RuntimeError: DDP has a communication hook already.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(model.process_group, _reduce_bucket)
        return Int8Exchange("DDP", 0)
    from torch.distributed.fsdp import FSDPModule

    groups: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not groups:
        raise TypeError(
            f"model: expected a DistributedDataParallel or a model after fully_shard, got "
            f"{type(model).__name__}; wrap it first"
        )
    if not hasattr(groups[0], "set_custom_reduce_scatter"):
        raise NotImplementedError(
            f"int8_gradients: FSDP2 of torch {torch.__version__} takes no custom reduce-scatter; "
            "expected torch 2.9 or newer"
        )
    for group in groups:
        group.set_custom_reduce_scatter(_ReduceScatter())
    return Int8Exchange("FSDP2", len(groups))


class _ReduceScatter:
    """FSDP2's reduce-scatter, called on a stream of its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        factor = _factor(op, group)
        if async_op:
            raise NotImplementedError("int8_gradients: an asynchronous reduce-scatter")
        wire = _exchanged(input_tensor, group)
        output_tensor.copy_(_sum(wire, output_tensor.numel(), factor))


def _factor(op: Any, group: Any) -> float:
    """Factor of the sum. Raises NotImplementedError for other reductions."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / dist.get_world_size(group)
    raise NotImplementedError(
        f"int8_gradients: expected a sum or a mean of gradients, got {op}; call "
        "model.set_force_sum_reduction_for_comms(True) beside set_gradient_divide_factor"
    )


def _reduce_bucket(
    group: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # no stub has it; DDP compares it
) -> torch.futures.Future[Tensor]:
    """DDP's hook: the mean of a bucket, the same bits in every process.

    On CUDA it runs on a stream beside backward, and the future's value waits for that stream.
    """
    values = bucket.buffer()
    if not values.is_cuda or dist.get_world_size(group) == 1:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(_all_reduced(values, group))
        return future
    stream = _stream(values.device)
    stream.wait_stream(torch.cuda.current_stream(values.device))
    future = torch.futures.Future(devices=[values.device])
    with torch.cuda.stream(stream):
        values.record_stream(stream)
        future.set_result(_all_reduced(values, group))
    return future


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _all_reduced(values: Tensor, group: Any) -> Tensor:
    """The mean of ``values`` of all processes, written to ``values``."""
    world, count = dist.get_world_size(group), values.numel()
    if world == 1:
        return values
    part = -(-count // world)
    padded = values
    if part * world != count:
        padded = nn.functional.pad(values, (0, part * world - count))
    mean = _sum(_exchanged(padded, group), part, 1.0 / world)
    mine = encode(mean, _key(group))
    wire = torch.empty(world, len(mine), dtype=torch.uint8, device=values.device)
    _all_gather(wire.view(-1), mine, group=group)
    whole = torch.cat([_sum(row[None], part, 1.0) for row in wire])
    return values.copy_(whole[:count])


def _exchanged(values: Tensor, group: Any) -> Tensor:
    """Codes of this process's share of ``values``, by rank: uint8 ``[world, bytes]``."""
    parts = values.view(dist.get_world_size(group), -1)
    key = _key(group)
    sent = torch.stack([encode(part, key._replace(stream=i)) for i, part in enumerate(parts)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return received


def _key(group: Any) -> Key:
    # The rank keeps the errors of processes apart that draw the same seed.
    return Key(dist.get_rank(group), int(torch.randint(SEEDS, ())))


# ---- codes of one process ----


def encode(values: Tensor, key: Key) -> Tensor:
    """Codes and scales of a vector: uint8, 68 bytes for each block of 64 values.

    Args:
        values: float32, float16 or bfloat16 ``[n]``; the last block is filled up with zeros.
        key: random key of the rounding.

    Returns:
        ``ceil(n / 64)`` blocks of int8 codes, then as many fp32 scales.
    """
    rest = -values.numel() % BLOCK
    rows = (nn.functional.pad(values, (0, rest)) if rest else values.contiguous()).view(-1, BLOCK)
    transformed = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    call(_core.fwht, rows, x=rows, axis=1, block=BLOCK, out=transformed)
    wire = torch.empty(len(rows) * (BLOCK + _SCALE_BYTES), dtype=torch.uint8, device=rows.device)
    rounding: dict[str, Any] = {"bits": 8, "scale": "token", "rounding": "stochastic", "key": key}
    q, scales = _halves(wire)
    call(_core.quantize, rows, x=transformed, **rounding, q=q, scale_out=scales)
    return wire


def _halves(wire: Tensor) -> tuple[Tensor, Tensor]:
    """Views of codes ``[blocks, 64]`` and scales ``[blocks]``."""
    count = wire.numel() // (BLOCK + _SCALE_BYTES)
    codes = wire[: count * BLOCK].view(torch.int8).view(count, BLOCK)
    return codes, wire[count * BLOCK :].view(torch.float32)


def _sum(wire: Tensor, count: int, factor: float) -> Tensor:
    """The sum of what rows of ``wire`` stand for, times ``factor``: float32 ``[count]``."""
    total: Tensor | None = None
    for row in wire:
        q, scales = _halves(row)
        part = torch.empty(q.shape, dtype=torch.float32, device=wire.device)
        call(_core.dequantize, wire, q=q, scale=scales, granularity="token", out=part)
        total = part if total is None else total.add_(part)
    assert total is not None
    call(_core.fwht, wire, x=total, axis=1, block=BLOCK, out=total)
    return total.view(-1)[:count].mul_(factor / BLOCK)
