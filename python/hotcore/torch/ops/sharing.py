"""The cache of codes: one compressed x for layers with the same input (q, k and v; gate and up).

In eager mode each thread remembers the x that it compressed last (:class:`Cache`). The next layer
with the same, unchanged tensor takes the codes and their seed; it still rounds g_y with its own.
The codes are dropped in backward, because a second pass over x needs fresh rounding noise. Freeing
x or their autograd node drops them, too, as does compressing another x, or calling a layer again.
With an 8-bit forward the layers share x quantised for their products, too (``quantized``).

Only activations are shared: tensors with a ``grad_fn`` that are not views of a leaf. Optimizers,
``torch.distributed`` and data loaders write leaves without raising torch's version counter. While
AOTAutograd traces a graph, :func:`once` does the same for every x of the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _core
from ...config import HotConfig
from .. import _compat
from . import core

_Ref = weakref.ref[Any]
_Compress = Callable[[], tuple[Tensor, Tensor]]


def config_key(config: HotConfig) -> Hashable:
    """A key that is equal for configurations that compress an x to the same bytes."""
    return _core.saved_format(config.spec)


class share_inputs:
    """Switch the sharing of one compressed x between consecutive layers; it is on by default.

    A function, whose setting stays, or a context manager. The setting holds for every thread of the
    process, for layers in eager mode.

    Args:
        enabled: False lets every layer compress its own x. Programs need it that write an
            activation between two layers without raising torch's version counter.

    Source: docs/torch/sharing.md, "Layers with one x".
    """

    enabled: ClassVar[bool] = True
    """The current setting."""

    def __init__(self, enabled: bool) -> None:
        self._before = share_inputs.enabled
        share_inputs.enabled = bool(enabled)

    def __enter__(self) -> None:
        """Do nothing: the constructor has applied the setting."""

    def __exit__(self, *_: object) -> None:
        share_inputs.enabled = self._before

    def __repr__(self) -> str:
        return f"share_inputs(enabled={share_inputs.enabled})"


class Same(NamedTuple):
    """A tensor as a part of a key, which is equal for the same tensor."""

    tensor: Tensor | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def _source(x: Tensor, base: Tensor) -> Tensor:
    """x, or ``base`` if x is an alias of it: DTensors make one for every layer."""
    if base.shape != x.shape or base.stride() != x.stride():
        return x
    same = base.data_ptr() == x.data_ptr() and base.dtype == x.dtype
    return base if same and base.is_neg() == x.is_neg() else x


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """The codes of one x: compressed for backward, and quantised for 8-bit products."""

    x: _Ref
    state: tuple[Any, ...]
    compressed: tuple[Tensor, Tensor] | None = None
    """Codes and the seed they were made with."""
    key: Hashable = None
    """Everything beside x and the seed that ``compressed`` depends on."""
    node: _Ref | None = None
    """The autograd node that ``compressed`` was made for."""
    weights: set[int] = dataclasses.field(default_factory=set)
    """Addresses of the weights of the layers that have taken ``compressed``."""
    quantized: tuple[Hashable, Tensor] | None = None
    """x quantised for an 8-bit product, behind everything else that its bytes depend on."""


class Cache:
    """The x that a thread compressed last. A miss takes the host about 1 us.

    Backward drops the entry of the forward's thread once it has the saved tensors. (On CUDA it runs
    in a thread of autograd.) Entries that a checkpoint makes there are dropped with their nodes.
    """

    __slots__ = ("entry",)

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def entry_of(self, x: Tensor) -> Entry | None:
        """The entry of x, a new one if the last is not x's; None: x is not shared.

        Its state holds values that are equal as long as a tensor is the same x.
        A new one is kept once it has codes: by :meth:`compressed`, or by a caller. Raises
        RuntimeError where ``x.data`` has another shape since the last layer.
        """
        if x.grad_fn is None or not share_inputs.enabled:
            return None
        base, stream = x._base, None
        intercepted = type(x) not in core.PLAIN_TYPES or _compat.dispatch_modes()
        if intercepted or (base is not None and base.grad_fn is None):  # a view of a leaf
            return None
        if x.is_cuda:
            # A CUDA graph capture neither takes codes from outside nor leaves any behind: replays
            # do not raise version counters.
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = _compat.current_stream(x.get_device())
        try:
            # The rest is for x.data = x.data.t(), which raises no version.
            state = (x._version, x.shape, x.data_ptr(), x.stride(), x.dtype, stream)
        except RuntimeError:  # inference-mode tensors have no version counter
            return None
        entry, source = self.entry, x if base is None else _source(x, base)
        if entry is not None and entry.x() is source:
            if entry.state == state:
                return entry
            if entry.state[0] == state[0] and entry.state[1] != state[1]:
                raise RuntimeError(
                    f"x: shape {list(state[1])}; the layer before had the same x with "
                    f"{list(entry.state[1])}. x.data was replaced between them, which autograd "
                    "does not see; pass another tensor"
                )
        self.entry = None  # free the old codes before new ones are allocated
        return Entry(weakref.ref(source, self._expire), state)

    def compressed(
        self, entry: Entry | None, key: Hashable, weight: Tensor, node: Any, compress: _Compress
    ) -> tuple[Tensor, Tensor]:
        """Codes of an entry's x and their seed: those that are there, or ``compress()``.

        Without an entry nothing is shared. ``key`` is everything beside x and the seed that the
        bytes depend on. A layer (``weight``) that is called again compresses afresh. ``node`` is
        the layer's node in autograd's graph (``ctx``).
        """
        if entry is None:
            return compress()
        # No ids: Conv1D and attention pass a new view of their weight in every call.
        pair, layer = entry.compressed, weight.data_ptr()
        if pair is None or entry.key != key or layer in entry.weights:
            entry.compressed = self.entry = pair = None  # an error leaves nothing
            entry.compressed = pair = compress()
            entry.key, entry.weights = key, set()
            entry.node = weakref.ref(node, self._expire)
            self.entry = entry
        entry.weights.add(layer)
        return pair

    def _expire(self, ref: _Ref) -> None:
        entry = self.entry
        if entry is None:
            return
        if ref is entry.node:
            entry.compressed = None
        if ref is entry.x or (entry.compressed is None and entry.quantized is None):
            self.entry = None


@functools.lru_cache(maxsize=1024)
def linear_key(config: str, dtype: torch.dtype | None) -> Hashable:
    """Key of a linear layer's codes: its configuration, and the dtype autocast casts x to."""
    return dtype, config_key(core.parsed(config))


class _Threads(threading.local):
    def __init__(self) -> None:
        self.cache = Cache()


threads = _Threads()
"""``threads.cache`` is the calling thread's cache."""


# ---- in a graph that is being traced ----

_traced: Any = WeakTensorKeyDictionary()
"""Results of :func:`once` by x, and then by its version and a key."""
_Result = TypeVar("_Result")


def once(x: Tensor, key: Hashable, make: Callable[[], _Result]) -> _Result:
    """``make()``, once for an x and ``key`` in a graph: the compiler merges no random operators."""
    if not _compat.functional(x):
        return make()
    results: dict[Hashable, _Result] = _traced.setdefault(x, {})
    versioned = (x._version, key)
    if versioned not in results:
        results[versioned] = make()
    return results[versioned]
