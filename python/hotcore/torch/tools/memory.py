"""``memory_report``: measures the bytes that each module keeps for backward, plain and converted.

Hooks count the tensors that autograd saves. On CUDA the report adds the allocator's peak over
forward and backward.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...config import ConfigLike, as_config
from ..conversion.convert import convert, revert
from ..conversion.probe import LossFn, check_training, kept_for_backward, loss_of, preserve_state
from ..conversion.report import aligned
from ..conversion.selection import Filter
from ..layers.modules import HotModule
from .clocks import allocator_peak, whole

_MIB = 2**20
_ROWS = 40  # of the printed table


@dataclasses.dataclass(frozen=True)
class ModuleMemory:
    """Bytes that a module's operations keep for backward, without its children's."""

    name: str
    type: str
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The result of :func:`.memory_report`; print it for a table.

    ``peak_before`` and ``peak_after`` are the CUDA allocator's peaks over forward and backward, in
    bytes above what was allocated before; None on the CPU.
    """

    modules: tuple[ModuleMemory, ...]
    peak_before: int | None
    peak_after: int | None
    changes: str

    @property
    def before(self) -> int:
        """Bytes kept by the plain model."""
        return sum(module.before for module in self.modules)

    @property
    def after(self) -> int:
        """Bytes kept by the changed model."""
        return sum(module.after for module in self.modules)

    def __str__(self) -> str:
        largest = sorted(self.modules, key=lambda m: max(m.before, m.after), reverse=True)
        shown = set(largest[:_ROWS])
        rows = [("module", "type", "before MiB", "after MiB", "after / before")]
        rows += [
            (module.name or "(root)", module.type, *_amounts(module.before, module.after))
            for module in self.modules
            if module in shown
        ]
        rest = [module for module in self.modules if module not in shown]
        if rest:
            sums = (sum(m.before for m in rest), sum(m.after for m in rest))
            rows.append((f"{len(rest)} more", "", *_amounts(*sums)))
        rows.append(("kept for backward", "", *_amounts(self.before, self.after)))
        if self.peak_before is not None and self.peak_after is not None:
            rows.append(("allocator's peak", "", *_amounts(self.peak_before, self.peak_after)))
        notes = f"after: {self.changes}; parameters and buffers not counted"
        return "\n".join([*aligned(rows), notes])

    def to_json(self) -> str:
        """Return all figures, in bytes, as JSON."""
        content = {**dataclasses.asdict(self), "before": self.before, "after": self.after}
        return json.dumps(content, indent=1)


def memory_report(
    model: nn.Module,
    inputs: Any,
    config: ConfigLike | None = "default",
    *,
    loss_fn: LossFn | None = None,
    filter_fn: Filter | None = None,
    overrides: Mapping[str, Any] | None = None,
    slower: bool = False,
) -> MemoryReport:
    """Run the model plain and changed, and measure what autograd keeps of the forward pass.

    A plain model is converted for the second run, and a converted one is reverted for the first;
    it is the same afterwards. Wrap the call in ``torch.autocast`` to measure with autocast.

    Args:
        model: in training mode.
        inputs: arguments for the model: a Tensor, a tuple, or a dict of keyword arguments. With
            ``loss_fn`` any argument of it.
        config: configuration for a plain model; ignored, and may be None, for a converted one.
        loss_fn: ``loss_fn(model, inputs)`` -> scalar; by default the mean of every floating output.
        filter_fn: as for :func:`convert`, also the next two.
        overrides: see ``filter_fn``.
        slower: see ``filter_fn``.

    Returns:
        A :class:`.MemoryReport`. A storage counts once and in full, for the first module that keeps
        it or a view of it. Parameters and buffers do not count.

    Raises:
        ValueError: the model is in eval mode, gradients are off, or the model is plain and
            ``config`` None.

    Source: docs/torch/memory.md.
    """
    check_training(model, "memory_report")
    converted = any(isinstance(m, HotModule) for m in model.modules())
    if not converted and config is None:
        raise ValueError("config: None, and the model is plain: there is nothing to compare with")
    changes = "as converted"
    with preserve_state(model):
        if converted:
            revert(model)
        before, peak_before = _measure(model, inputs, loss_fn)
        kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    with preserve_state(model):
        if not converted and config is not None:
            convert(model, config, filter_fn, overrides, slower=slower)
            changes = f"convert({as_config(config)!r})"
        after, peak_after = _measure(model, inputs, loss_fn)
    modules = tuple(
        ModuleMemory(name, kind, before.get(name, 0), after.get(name, 0))
        for name, kind in kinds.items()
        if name in before or name in after
    )
    return MemoryReport(modules, peak_before, peak_after, changes)


def _measure(
    model: nn.Module, inputs: Any, loss_fn: LossFn | None
) -> tuple[dict[str, int], int | None]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    peak = None
    if device.type == "cuda":
        step = whole(model, inputs, loss_fn)
        step()  # allocates workspaces of cuBLAS and cuDNN, which stay
        base = torch.cuda.memory_allocated(device)
        peak = allocator_peak(device, step) - base
    modules, besides = dict(model.named_modules()), (*model.parameters(), *model.buffers())
    return kept_for_backward(modules, besides, lambda: loss_of(model, inputs, loss_fn)), peak


def _amounts(before: int, after: int) -> tuple[str, str, str]:
    share = f"{after / before:.3f}" if before else "-"
    return f"{before / _MIB:.2f}", f"{after / _MIB:.2f}", share
