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
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..layers.modules import HotModule, OwnForward, defer_in_blocks, hot_layers
from .policies import Policy, keep_attention, keeps_codes


class Recomputed:
    """Handle of :func:`~hotcore.torch.recompute`; :meth:`remove` restores the blocks."""

    def __init__(self, blocks: list[nn.Module], policy: Policy | None) -> None:
        self.blocks = blocks
        self._policy = policy
        self._undo = ExitStack()

    def remove(self) -> None:
        """Restore the blocks. A second call does nothing.

        Raises ValueError if something replaced a block's forward; nothing has changed then.
        """
        for block in self.blocks:
            if not isinstance(OwnForward.of(block), _Checkpointed):
                kind = type(block).__name__
                raise ValueError(
                    f"blocks: the forward of {kind} was replaced since; undo that first"
                )
        self._undo.close()
        self.blocks = []

    def __repr__(self) -> str:
        if not self.blocks:
            return "Recomputed(no blocks)"
        kinds = ", ".join(sorted({type(block).__name__ for block in self.blocks}))
        name = getattr(self._policy, "__name__", repr(self._policy))
        return f"Recomputed({len(self.blocks)} blocks: {kinds}; policy={name})"


def recompute(
    blocks: nn.Module | Iterable[nn.Module], policy: Policy | None = keep_attention
) -> Recomputed:
    """Keep the inputs of every block and what ``policy`` selects; recompute the rest in backward.

    Call it before ``torch.compile``, DDP or ``fully_shard``. Parameters, ``state_dict`` and names
    of modules stay. In eval mode, and without gradients, nothing is recomputed. A UserWarning says
    that a block of transformers gets no KV cache, which it would write twice. Another one says that
    batch norms count every batch twice.

    Args:
        blocks: a block or several; an ``nn.ModuleList`` or ``nn.Sequential`` means its children.
        policy: :func:`.keep_attention`, :func:`.keep_codes`, :func:`.keep_products` or your own for
            ``create_selective_checkpoint_contexts``; None keeps nothing but the inputs.

    Returns:
        A handle whose ``remove()`` restores the blocks; printed, it says how many there are.

    Raises:
        TypeError: a block is not a module, or ``policy`` is no function, list or None.
        ValueError: a block is or contains a recomputed one already, or no block contains layers.

    Source: docs/torch/memory.md, "Recompute instead".
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if not (policy is None or callable(policy) or isinstance(policy, list)):
        raise TypeError(f"policy: expected a function (hot.policies.keep_codes), got {policy!r}")
    if policy is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    chosen = _blocks(blocks)
    if chosen and not any(list(block.children()) for block in chosen):
        names = ", ".join(sorted({type(block).__name__ for block in chosen}))
        raise ValueError(
            f"blocks: expected blocks that contain layers, such as model.blocks, got {names}; to "
            "recompute a whole Sequential, pass it in a list"
        )
    inside = {id(module) for block in chosen for module in block.modules() if module is not block}
    for block in chosen:
        twice = id(block) in inside or chosen.count(block) > 1
        if twice or any(isinstance(OwnForward.of(m), _Checkpointed) for m in block.modules()):
            raise ValueError(
                f"blocks: {type(block).__name__} is recomputed already, or holds a block that is"
            )
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    norms = (m for block in chosen for m in block.modules() if isinstance(m, kinds))
    if any(norm.track_running_stats for norm in norms):
        warnings.warn(
            "hotcore.torch.recompute: a block has batch norms, whose running statistics count "
            "every batch twice, as under any checkpoint",
            stacklevel=2,
        )
    handle = Recomputed(chosen, policy)
    defer = policy is None or not keeps_codes(policy)
    for block in chosen:
        forward = _Checkpointed(block, block.forward, options, defer)
        deferred = {layer: layer.defer for layer in hot_layers(block)}
        handle._undo.callback(_restore, block, forward, deferred)
        forward.install(block)
        defer_in_blocks(block)
    return handle


def _restore(block: nn.Module, forward: OwnForward, deferred: dict[HotModule, bool]) -> None:
    forward.uninstall(block)
    for layer in hot_layers(block):
        layer.defer = deferred.get(layer, False)


def _blocks(blocks: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    chosen: list[Any] = [blocks]
    if isinstance(blocks, nn.ModuleList | nn.Sequential):
        chosen = list(blocks.children())
    elif not isinstance(blocks, nn.Module) and isinstance(blocks, Iterable):
        chosen = list(blocks)
    for block in chosen:
        if not isinstance(block, nn.Module):
            raise TypeError(f"blocks: expected a module or several, got {type(block).__name__}")
    return chosen


class _Checkpointed(OwnForward):
    """A block's forward under ``torch.utils.checkpoint``."""

    origin = "hot.recompute was called before; handle.remove(), then this call, then recompute"

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], options: Any, defer: bool
    ) -> None:
        self.block, self.forward, self.options, self.defer = block, forward, options, defer
        try:
            self.names = tuple(inspect.signature(forward).parameters)
        except (TypeError, ValueError):  # a built-in has no signature
            self.names = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        only_reads = getattr(self.block, "_can_checkpoint_with_cache", False)
        for name, off in _CACHES.items():
            if only_reads and off is None:
                continue
            at = self.names.index(name) if name in self.names else len(args)
            if _is_given(kwargs.get(name), name):
                kwargs[name] = off
            elif at < len(args) and _is_given(args[at], name):
                args = (*args[:at], off, *args[at + 1 :])
            else:
                continue
            if not torch.compiler.is_compiling():
                warnings.warn(f"hotcore.torch.recompute: {name}={off} {_WHY}", stacklevel=2)
        forward = self.forward
        # No `_OPTIONS & kwargs.keys()`: torch 2.11 does not compile it, and runs the block eagerly.
        if own := [name for name in kwargs if name in _OPTIONS]:
            forward = functools.partial(forward, **{name: kwargs.pop(name) for name in own})
        return checkpoint(forward, *args, **self.options, **kwargs)


_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
_CACHES = {"use_cache": False, **dict.fromkeys(_NAMES)}
"""transformers' arguments for a KV cache (``cache`` from 5.24 on), and the values without one."""
_OPTIONS = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"}
"""Keyword arguments that checkpoint would take for its own, and not pass to the block."""
_WHY = "in training, as a block that is recomputed would write the KV cache twice"


def _is_given(value: Any, name: str) -> bool:
    if value is None or value is False:  # bool() of an empty cache is False, too
        return False
    return name != "cache" or hasattr(value, "get_seq_length")  # others' blocks may mean tables
