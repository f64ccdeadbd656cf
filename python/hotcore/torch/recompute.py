"""Activation checkpointing of blocks that contain HOT's layers, mainly for compiled graphs."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .modules import HotModule, OwnForward
from .policies import keep_attention, keeps_codes

Policy = Callable[..., CheckpointPolicy]


class Recomputed:
    """Handle of :func:`~hotcore.torch.recompute`; :meth:`remove` restores the blocks."""

    def __init__(self) -> None:
        """Begin empty."""
        self._undo = ExitStack()

    def remove(self) -> None:
        """Restore the blocks. A second call does nothing."""
        self._undo.close()


def recompute(
    blocks: nn.Module | Iterable[nn.Module], policy: Policy | None = keep_attention
) -> Recomputed:
    """Keep the inputs of every block and what ``policy`` selects; recompute the rest in backward.

    ::

        hot.convert(model, "fast")
        hot.recompute(model.blocks)                # a list of blocks, or one block
        for block in model.blocks:
            block.compile()

    Each block's forward runs in a ``torch.utils.checkpoint`` (not reentrant) with a selective
    policy. Call it after ``convert`` and before ``torch.compile``, DDP or ``fully_shard``.
    Parameters, ``state_dict`` and names of modules stay. In eval mode, and without gradients,
    nothing is recomputed. Backward recomputes with the weights as they are by then; as under any
    checkpoint, nobody notices that they were written or swapped (``functional_call``) in between.

    A block of transformers that is recomputed gets no KV cache (``use_cache=False``, no
    ``past_key_values``), as under transformers' own checkpointing: it would be written twice. A
    UserWarning says so once; another says where batch norms count every batch twice.

    In compiled graphs HOT's layers compress x once: in forward if the policy keeps the codes,
    otherwise in backward from the recomputed x. In eager mode they compress it in both passes
    unless the policy keeps the codes, and torch's selective checkpoints cost much host time.

    Args:
        blocks: a block (an ``nn.ModuleList`` or ``nn.Sequential`` stands for its children), or
            several.
        policy: :func:`.keep_attention`, :func:`.keep_codes`, :func:`.keep_products` or your own, as
            ``create_selective_checkpoint_contexts`` takes it; None: keep nothing but the inputs.

    Returns:
        A handle whose ``remove()`` restores the blocks.

    Raises:
        TypeError: a block is not a module.
        ValueError: a block is already recomputed, or is inside of one that is.

    Source: docs/torch/memory.md, "Recompute instead".
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if policy is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    found = _blocks(blocks)
    inside = {id(module) for block in found for module in block.modules() if module is not block}
    for block in found:
        twice = id(block) in inside or found.count(block) > 1
        if twice or any(map(_is_recomputed, block.modules())):
            raise ValueError(
                f"blocks: {type(block).__name__} is recomputed already, or holds a block that is"
            )
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    norms = (m for block in found for m in block.modules() if isinstance(m, kinds))
    if any(norm.track_running_stats for norm in norms):
        warnings.warn(
            "hotcore.torch.recompute: a block has batch norms, whose running statistics count "
            "every batch twice, as under any checkpoint",
            stacklevel=2,
        )
    handle = Recomputed()
    defer = policy is None or not keeps_codes(policy)
    for block in found:
        content = vars(block)
        made = _Checkpointed(block, block.forward, options).installed()
        for name in made:
            if name in content:
                handle._undo.callback(content.__setitem__, name, content[name])
            else:
                handle._undo.callback(content.pop, name, None)
        content.update(made)
        for layer in block.modules():
            if defer and isinstance(layer, HotModule):
                handle._undo.callback(setattr, layer, "defer", layer.defer)
                layer.defer = True
    return handle


def _blocks(blocks: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    if isinstance(blocks, nn.ModuleList | nn.Sequential):
        return list(blocks.children())
    if isinstance(blocks, nn.Module):
        return [blocks]
    found = list(blocks) if isinstance(blocks, Iterable) else [blocks]
    for block in found:
        if not isinstance(block, nn.Module):
            raise TypeError(f"blocks: {type(block).__name__}; expected a module or several")
    return found


def _is_recomputed(module: nn.Module) -> bool:
    return isinstance(OwnForward.of(module), _Checkpointed)


class _Checkpointed(OwnForward):
    """A block's forward under ``torch.utils.checkpoint``."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], options: Any) -> None:
        self.block, self.forward, self.options = block, forward, options
        try:
            self.names = tuple(inspect.signature(forward).parameters)
        except (TypeError, ValueError):  # of a built-in
            self.names = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        reads = getattr(self.block, "_can_checkpoint_with_cache", False)  # and does not write it
        for name, off in _CACHES.items():
            if reads and off is None:
                continue
            at = self.names.index(name) if name in self.names else len(args)
            if _is_given(kwargs.get(name)):
                kwargs[name] = off
            elif at < len(args) and _is_given(args[at]):
                args = (*args[:at], off, *args[at + 1 :])
            else:
                continue
            if not torch.compiler.is_compiling():
                warnings.warn(f"hotcore.torch.recompute: {name}={off} {_WHY}", stacklevel=2)
        return checkpoint(self.forward, *args, **self.options, **kwargs)


_CACHES = {
    "use_cache": False,
    **dict.fromkeys(("past_key_values", "past_key_value", "layer_past")),
}
"""Arguments for a KV cache, as transformers names them, and what stands for none."""
_WHY = "in training, as a block that is recomputed would write the KV cache twice"


def _is_given(value: Any) -> bool:
    return value is not None and value is not False  # an empty cache is false, too
