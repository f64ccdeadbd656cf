"""Weights that FSDP2 gathers in INT8: blocks of 64 (Hadamard), rounded to nearest, with one scale.

Layers get weights of the usual type. Source: docs/torch/support.md, "Weights and gradients in
INT8".
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import int8_gradients as codes

_ALIGNMENT = 16


def int8_weights(model: nn.Module) -> codes.Int8Exchange:
    """Have FSDP2 gather the weights of ``model`` in INT8 from now on.

    Call it after ``fully_shard``, before the first step. Parameters of one dimension (norms,
    biases) travel in their own type. Every process computes with the same decoded weights; shards,
    optimizers and checkpoints keep the exact ones. Two gathers of one weight have equal bits.

    Returns:
        The plan and its groups; ``print`` shows them.

    Raises:
        TypeError: ``fully_shard`` was not called.
        NotImplementedError: this torch has no ``FSDPModule.set_custom_all_gather`` (2.9 has). In
            the training: parameters of a group differ in type, or are tensor parallel. Their rows
            do not divide by the processes of ``reshard_after_forward``.

    Source: docs/torch/support.md, "Weights and gradients in INT8".
    """
    groups = codes.fsdp_modules(model, "int8_weights", "set_custom_all_gather")
    for group in groups:
        seen: set[Any] = set()
        together = [p for m in group._get_fsdp_state()._modules for p in _managed(m, seen)]
        group.set_custom_all_gather(_AllGather([p.shape for p in together]))
    return codes.Int8Exchange("FSDP2", len(groups), "weights")


def _managed(module: nn.Module, seen: set[Any]) -> list[nn.Parameter]:
    """Parameters that ``fully_shard(module)`` gathers together, in its order."""
    from torch.distributed.fsdp import FSDPModule

    found: list[nn.Parameter] = []
    seen.add(module)
    for child in module.children():
        if child not in seen and not isinstance(child, FSDPModule):
            found += _managed(child, seen)
    for parameter in module.parameters(recurse=False):
        if parameter not in seen:
            seen.add(parameter)
            found.append(parameter)
    return found


class _Run(NamedTuple):
    """Neighbouring values of a process's part."""

    begin: int
    end: int
    coded: bool


class _AllGather(codes.Allocates):
    """FSDP2's all-gather, called on a stream of its own."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        self._shapes = shapes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        if async_op:
            raise NotImplementedError("int8_weights: an asynchronous all-gather")
        world, count = dist.get_world_size(group), input_tensor.numel()
        each = input_tensor.element_size()
        runs = self._runs(world, input_tensor)
        wires = []  # bytes of each run
        end = 0
        for run in runs:
            size = run.end - run.begin
            sent_bytes = codes.encoded_bytes(size) if run.coded else size * each
            wires.append(slice(end, end + sent_bytes))
            end += -(-sent_bytes // _ALIGNMENT) * _ALIGNMENT
        sent = torch.empty(end, dtype=torch.uint8, device=input_tensor.device)
        for run, wire in zip(runs, wires, strict=True):
            values = input_tensor[run.begin : run.end]
            if run.coded:
                codes.encode(values, None, wire=sent[wire])
            else:
                sent[wire].copy_(values.view(torch.uint8))
        received = torch.empty(world, end, dtype=torch.uint8, device=sent.device)
        codes._all_gather(received.view(-1), sent, group=group)
        parts = output_tensor.view(world, count)
        for run, wire in zip(runs, wires, strict=True):
            values, data = parts[:, run.begin : run.end], received[:, wire]
            if run.coded:
                for row, part in zip(data, values, strict=True):
                    codes.decode_sum(row[None], 1.0, part)
            else:
                values.copy_(data.view(values.dtype))

    def _runs(self, world: int, values: Tensor) -> list[_Run]:
        """Runs of matrices and of other parameters in a process's part."""
        if not values.is_floating_point():
            raise NotImplementedError(
                "int8_weights: parameters that are gathered together have several types, or codes; "
                "expected one floating-point type (MixedPrecisionPolicy(param_dtype=...))"
            )
        runs: list[_Run] = []
        end = 0
        for shape in self._shapes:  # a part has as many rows as the largest
            begin, end = end, end + -(-shape[0] // world) * shape[1:].numel()
            coded = len(shape) > 1
            if runs and runs[-1].coded == coded:
                begin = runs.pop().begin
            runs.append(_Run(begin, end, coded))
        if end != values.numel():
            raise NotImplementedError(
                f"int8_weights: expected {end} values of a process's part, got {values.numel()}; "
                "tensor parallel weights, ignored_params, and rows that the processes of "
                "fully_shard(reshard_after_forward=n) do not divide, are not supported"
            )
        return runs
