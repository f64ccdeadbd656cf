"""One compressed x for layers with the same input (q, k and v; gate and up), in eager mode.

Plain torch keeps such an x once. Each thread caches the x that it compressed last. The next layer
that is called with the same, unchanged tensor takes the cached codes and the seed they were made
with; it still rounds g_y with its own seed. The entry is dropped when x is freed, when the autograd
node that it was made for is freed, when another x is compressed, when a layer that has taken it is
called again, and in backward: a second pass over the same x needs fresh rounding noise.

With an 8-bit forward the layers share x quantised for their products, too. Its entry goes with x,
with the codes of another x, and in backward; it has no noise that a second pass would need afresh.

Only activations are shared: tensors with a ``grad_fn`` that are not views of a leaf. Optimizers,
``torch.distributed`` and data loaders write leaves without raising torch's version counter. Code
that writes an activation the same way (NumPy, DLPack, ``.detach().data``, a replayed CUDA graph)
goes unnoticed unless the tensor's memory moves; :class:`share_inputs` switches the cache off.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import _core
from ..config import HotConfig
from . import _compat, ops

_Ref = weakref.ref[Any]


def config_key(config: HotConfig) -> Hashable:
    """Equal for configurations that compress an x to the same bytes."""
    return _core.saved_format(config.spec)


@functools.lru_cache(maxsize=256)
def linear_key(config: str, dtype: torch.dtype | None) -> Hashable:
    """Cache key of a linear layer: its configuration as JSON, and the dtype autocast casts x to."""
    return (dtype, config_key(ops.parsed(config)))


class share_inputs:
    """Switch the sharing of one compressed x between consecutive layers; it is on by default.

    Like ``torch.set_grad_enabled`` it is a function, whose setting stays, or a context manager. The
    setting holds for every thread of the process, so a checkpoint finds it in autograd's threads,
    and for layers in eager mode. (In a compiled graph the compiler merges equal calls.)

    Args:
        enabled: False lets every layer compress its own x. Programs need that which write an
            activation without raising torch's version counter (through NumPy, DLPack, ``.data``)
            between two layers that take it. It costs the memory and the time of one compressed x
            per layer.

    Source: docs/torch/accumulation.md, "Layers with one x".
    """

    enabled: ClassVar[bool] = True
    """The current setting."""

    def __init__(self, enabled: bool) -> None:
        """Apply the setting."""
        self._before = share_inputs.enabled
        share_inputs.enabled = bool(enabled)

    def __enter__(self) -> None:
        """Do nothing: the constructor has applied the setting."""

    def __exit__(self, *_: object) -> None:
        """Restore the setting from before."""
        share_inputs.enabled = self._before

    def __repr__(self) -> str:
        """Show the current setting."""
        return f"share_inputs(enabled={share_inputs.enabled})"


def _is_activation(x: Tensor) -> bool:
    """Whether autograd has made x, and not as a view of a leaf."""
    if x.grad_fn is None:
        return False
    base = x._base
    return base is None or base.grad_fn is not None


class _Entry(NamedTuple):
    x: _Ref
    key: Hashable
    """Everything beside x that has to be equal."""
    saved: Tensor
    seed: Tensor
    """The seed ``saved`` was made with."""
    node: _Ref
    weights: set[int]
    """Ids of the weights of the layers that have taken the entry."""


class _Quantized(NamedTuple):
    x: _Ref
    key: Hashable
    codes: Tensor


def _shared_state(x: Tensor) -> Hashable | None:
    """What has to be equal for the same tensor to be the same x; None: x is not shared."""
    if not share_inputs.enabled or not _is_activation(x) or ops.is_intercepted(x):
        return None
    stream = _compat.current_stream(x.get_device()) if x.is_cuda else None
    try:
        return (x._version, x.data_ptr(), stream)
    except RuntimeError:  # inference-mode tensors have no version counter
        return None


def codes_key(x: Tensor, dtype: torch.dtype, block: int) -> Hashable | None:
    """What codes of x for an 8-bit forward are known by; None: no other layer can share them.

    ``dtype``: what autocast casts x to; ``block``: of the transform.
    """
    state = _shared_state(x)
    if state is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return (state, dtype, block)


class InputCache:
    """The x that a thread compressed last. Every layer asks it: a miss costs the host about 1 us.

    Tests may read :attr:`entry` and :attr:`quantized`.
    """

    __slots__ = ("entry", "quantized")

    entry: _Entry | None
    """What is cached; None: nothing."""

    quantized: _Quantized | None
    """The x that was quantised last for an 8-bit forward; None: nothing."""

    def __init__(self) -> None:
        """Begin empty."""
        self.entry = self.quantized = None

    def codes_of(self, x: Tensor, key: Hashable | None) -> Tensor | None:
        """Codes of x for an 8-bit forward, by their :func:`codes_key`; None: there are none."""
        found = self.quantized
        if key is None or found is None or found.x() is not x or found.key != key:
            return None
        return found.codes

    def keep_codes(self, x: Tensor, key: Hashable, codes: Tensor) -> None:
        """Offer the codes of x to the next layers."""
        self.quantized = _Quantized(weakref.ref(x, self._expire), key, codes)

    def get_or_compress(
        self,
        node: Any,
        x: Tensor,
        weight: Tensor,
        key: Hashable,
        compress: Callable[..., Tensor],
        inner: Tensor,
        seed: Tensor,
        *arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return codes of x and their seed: cached, or ``compress(inner, seed, *arguments)``.

        Args:
            node: the layer's node in autograd's graph (``ctx``).
            x: the layer's input, compared by identity.
            weight: the layer's weight; a layer that is called again compresses afresh.
            key: everything else that the bytes depend on, except the seed.
            compress: makes the codes.
            inner: x as autocast casts it.
            seed: the layer's own seed, from :func:`ops.seed_for`.
            arguments: further arguments of ``compress``.
        """
        # A CUDA graph capture (its seed is on the device) neither takes an entry from outside nor
        # leaves one behind: replays do not raise version counters.
        state = _shared_state(x) if seed.is_cpu else None
        if state is None:
            return compress(inner, seed, *arguments), seed
        full_key = (state, key)
        entry, layer = self.entry, id(weight)
        if (
            entry is not None
            and entry.x() is x
            and entry.key == full_key
            and layer not in entry.weights
        ):
            entry.weights.add(layer)
            return entry.saved, entry.seed
        self.entry = entry = None  # free the old codes before the new ones are allocated
        saved = compress(inner, seed, *arguments)
        expire = self._expire
        refs = weakref.ref(x, expire), weakref.ref(node, expire)
        self.entry = _Entry(refs[0], full_key, saved, seed, refs[1], {layer})
        return saved, seed

    def clear(self) -> None:
        """Drop the entry; backward calls this once it has the saved tensors.

        Backward clears the cache of the forward's thread: on CUDA it runs in one of autograd's own.
        Entries that a checkpoint makes there are dropped with their nodes.
        """
        self.entry = self.quantized = None

    def _expire(self, ref: _Ref) -> None:
        if self.quantized is not None and self.quantized.x is ref:
            self.quantized = None
        entry = self.entry
        if entry is not None and (entry.x is ref or entry.node is ref):
            self.entry = None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.cache = InputCache()


_threads = _Threads()


def current() -> InputCache:
    """The calling thread's cache."""
    return _threads.cache
