"""Gradients of several processes exchanged in INT8, for DDP and FSDP2.

Each process transforms its gradient in blocks of 64 (Hadamard) and rounds every block
stochastically to INT8 with one fp32 scale, 1.0625 bytes a value. The receiver adds the values in
fp32, in the order of ranks, and undoes the transform once. The sum is unbiased. Source:
docs/torch/support.md, "Weights and gradients in INT8".
"""

# Without ``annotations`` of __future__: DDP reads those of its hook as objects.
import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import _core
from ...config import Key
from ..conversion.report import listed
from ..ops.core import DTYPES, SEEDS, call

BLOCK = 64
"""Values that are transformed together and share a scale."""
_BLOCK_BYTES = BLOCK + 4  # codes and a scale
# The second name is the first one's before torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Int8Exchange(NamedTuple):
    """Result of :func:`int8_gradients` and :func:`int8_weights`: the plan and what was changed."""

    plan: str
    """``"DDP"`` or ``"FSDP2"``."""
    groups: int
    """Groups of parameters that travel together; 0 for DDP, which chooses its buckets."""
    what: str = "gradients"
    """``"gradients"`` or ``"weights"``."""

    def __str__(self) -> str:
        groups = f" of {self.groups} groups" if self.groups else ""
        return f"{self.plan}: {self.what}{groups} travel in INT8, 1.0625 bytes a value"


def fsdp_modules(model: nn.Module, caller: str, method: str) -> list[Any]:
    """Modules of ``model`` that ``fully_shard`` was called on, one of each call.

    Raises:
        TypeError: there is none.
        NotImplementedError: this torch's FSDPModule has no ``method``.
    """
    from torch.distributed.fsdp import FSDPModule

    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Modules that fully_shard took as a list are one group.
    groups = list({id(module._get_fsdp_state()): module for module in modules}.values())
    if not groups:
        wrapped = "a DistributedDataParallel or " * (caller == "int8_gradients")
        raise TypeError(
            f"model: expected {wrapped}a model after fully_shard, got {type(model).__name__}; "
            "wrap it first"
        )
    if not hasattr(groups[0], method):
        raise NotImplementedError(
            f"{caller}: FSDP2 of torch {torch.__version__} has no {method}; expected torch 2.9 or "
            "newer"
        )
    return groups


def int8_gradients(model: nn.Module) -> Int8Exchange:
    """Exchange the gradients of ``model`` in INT8 from now on.

    Call it after ``DistributedDataParallel(model)`` or ``fully_shard``, before the first step. All
    gradients take part. A block of 64 values with NaN or Inf arrives as NaN, so a GradScaler sees
    it. Each reduction draws one seed from torch's default CPU generator; processes with equal seeds
    round differently. DDP arranges its buckets anew after the first step, so the bits of that step
    differ in a run that is resumed. With FSDP2, a ``reduce_dtype`` of float32 keeps the fp32 sum at
    the same bytes on the wire. HSDP reduces between its replicas as before.

    Returns:
        The changed plan and its groups; ``print`` shows them.

    Raises:
        TypeError: ``model`` is neither DDP's nor FSDP2's.
        NotImplementedError: this torch has no ``FSDPModule.set_custom_reduce_scatter`` (2.9 has).
        RuntimeError: DDP has a communication hook already.
        ValueError: DDP's gradients are float64 or sparse.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if wrong := [name for name, p in named if p.dtype not in DTYPES]:
            raise ValueError(
                f"model: gradients of {listed(wrong)} are not float32, float16 or bfloat16"
            )
        kinds, modules = nn.Embedding | nn.EmbeddingBag, model.module.named_modules()
        tables = [(name, m) for name, m in modules if isinstance(m, kinds) and m.sparse]
        if sparse := [name for name, m in tables if m.weight.requires_grad]:
            raise ValueError(
                f"model: gradients of {listed(sparse)} are sparse; expected dense ones"
            )
        model.register_comm_hook(model.process_group, _reduce_bucket)
        return Int8Exchange("DDP", 0)
    groups = fsdp_modules(model, "int8_gradients", "set_custom_reduce_scatter")
    for group in groups:
        group.set_custom_reduce_scatter(_ReduceScatter())
    return Int8Exchange("FSDP2", len(groups))


class Allocates:
    """Memory of FSDP2's communication, from torch's allocator."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for values that travel, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(Allocates):
    """FSDP2's reduce-scatter, called on a stream of its own."""

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
        decode_sum(_exchanged(input_tensor, group), factor, output_tensor)


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


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # so in torch


def _all_reduced(values: Tensor, group: Any) -> Tensor:
    """The mean of ``values`` of all processes, written to ``values``."""
    world, count = dist.get_world_size(group), values.numel()
    if world == 1:
        return values
    if world == 2:  # as many bytes as two exchanges of halves, and rounded once
        return decode_sum(_gathered(encode(values, _key(group)), group), 0.5, values)
    received = _exchanged(values, group)
    mean = torch.empty(-(-count // world), dtype=torch.float32, device=values.device)
    mine = encode(decode_sum(received, 1.0 / world, mean), _key(group))
    return decode_sum(_gathered(mine, group)[None], 1.0, values)


def _gathered(mine: Tensor, group: Any) -> Tensor:
    """Codes of all processes, by rank: uint8 ``[world, bytes]``."""
    wire = mine.new_empty(dist.get_world_size(group), mine.numel())
    _all_gather(wire.view(-1), mine.view(-1), group=group)
    return wire


def _exchanged(values: Tensor, group: Any) -> Tensor:
    """Codes of this process's share of ``values``, by rank: uint8 ``[world, bytes]``."""
    sent = encode(values, _key(group), dist.get_world_size(group))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return received


def _key(group: Any) -> Key:
    # The rank keeps the errors of processes apart that draw the same seed.
    return Key(dist.get_rank(group), int(torch.randint(SEEDS, ())))


# ---- codes of one process ----


def encoded_bytes(count: int) -> int:
    """Bytes of the codes and scales of ``count`` values."""
    return -(-count // BLOCK) * _BLOCK_BYTES


def encode(values: Tensor, key: Key | None, parts: int = 1, wire: Tensor | None = None) -> Tensor:
    """Codes and scales of a vector: uint8 ``[parts, bytes]``, 68 bytes for 64 values of a part.

    ``values`` are float32, float16 or bfloat16 ``[n]``, for ``parts`` receivers of
    ``ceil(n / parts)`` each. Zeros fill the last block of a part. ``key`` None rounds to nearest.
    ``wire`` is memory for the result, aligned to 4 bytes. Source: docs/numerics.md, "Blocks".
    """
    if wire is None:
        row = encoded_bytes(-(-values.numel() // parts))
        wire = torch.empty(parts, row, dtype=torch.uint8, device=values.device)
    rounding = "nearest" if key is None else "stochastic"
    given = {"x": values, "rounding": rounding, "key": key or Key(0), "wire": wire}
    call(_core.encode_blocks, values, **given)
    return wire


def decode_sum(wire: Tensor, factor: float, out: Tensor) -> Tensor:
    """Write the sum of the ranks' values, times ``factor``, to the vector ``out``."""
    call(_core.sum_blocks, wire, wire=wire, factor=factor, out=out)
    return out
