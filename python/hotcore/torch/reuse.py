"""One compressed x for the layers that take the same x (q, k and v; gate and up), in eager mode.

Plain torch keeps such an x once. Here each thread remembers what it compressed last, and another
layer that comes with the same tensor, unchanged, takes that and the seed it was made with; g_y is
still rounded with the layer's own. The entry goes when x dies, when the node in the graph dies that
it was made for, when the next x is compressed, when a layer that has it comes again, and in
backward: the noise of an x that is trained on again has to be fresh.

Only activations are shared, tensors with a ``grad_fn`` that are no views of a leaf. Leaves are what
others write past torch's version counter: optimizers, ``torch.distributed``, data loaders. An
activation that is written so (NumPy, DLPack, ``.detach().data``, replays of a CUDA graph) is not
seen to have changed, unless its memory moved; :class:`share_inputs` is for programs that do it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..config import HotConfig
from . import _compat, ops

_Ref = weakref.ref[Any]
_FIELDS = (
    "basis", "rank", "block", "rows", "token_grid", "prefix_tokens",
    "storage", "x_scale", "x_rounding", "equalize_tokens",
)  # fmt: skip


def form(config: HotConfig) -> Hashable:
    """Equal for configurations that compress an x to the same bytes."""
    return tuple(getattr(config, name) for name in _FIELDS)


@functools.lru_cache(maxsize=256)
def linear_form(config: str, dtype: torch.dtype | None) -> Hashable:
    """The form of a linear layer's x: its configuration, as JSON, and what autocast casts x to."""
    return (dtype, form(ops.parsed(config)))


class share_inputs:
    """Whether layers that follow each other with one x keep one compressed x; they do at first.

    As ``torch.set_grad_enabled`` a function, from here on, or a context, until its end. It holds
    for all threads of the process, so that a checkpoint finds it in autograd's own, and for layers
    in eager mode. (In a compiled graph the compiler merges equal calls.)

    Args:
        enabled: False lets every layer compress its own x: for programs that write an activation
            past torch's version counter (through NumPy, DLPack, ``.data``) between two layers that
            take it. It costs the memory and the time of a compressed x for every layer.

    Source: docs/torch/accumulation.md, "Layers with one x".
    """

    enabled: ClassVar[bool] = True
    """How it is."""

    def __init__(self, enabled: bool) -> None:
        """Set it."""
        self._before = share_inputs.enabled
        share_inputs.enabled = bool(enabled)

    def __enter__(self) -> None:
        """Nothing: it is set."""

    def __exit__(self, *_: object) -> None:
        """As it was before."""
        share_inputs.enabled = self._before

    def __repr__(self) -> str:
        """How it is now."""
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
    """What else has to be the same."""
    saved: Tensor
    seed: Tensor
    """Of ``saved``."""
    node: _Ref
    weights: set[int]
    """Of the layers that have taken it, by id."""


class Last:
    """What a thread compressed last. On every layer's way: a miss costs the host about 1 us."""

    __slots__ = ("_entry",)

    def __init__(self) -> None:
        """Begin without an entry."""
        self._entry: _Entry | None = None

    def compressed(
        self,
        node: Any,
        x: Tensor,
        weight: Tensor,
        form: Hashable,
        compress: Callable[..., Tensor],
        inner: Tensor,
        seed: Tensor,
        *arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """``compress(inner, seed, *arguments)``, or what a layer before made of x; and its seed.

        Args:
            node: of the layer in autograd's graph (``ctx``).
            x: the layer's input; it is what has to be the same.
            weight: the layer's; one that comes again compresses afresh.
            form: what else has to be, for the same bytes but for the seed.
            compress: makes them.
            inner: x as autocast casts it.
            seed: the layer's own, as :func:`ops.seed_for` gives it.
            arguments: for ``compress``.
        """
        stream = None
        # A capture (its seed is on the device) neither takes from outside nor leaves anything:
        # replays are not seen.
        shares = seed.is_cpu and share_inputs.enabled and _is_activation(x) and ops.unseen(x)
        if shares and x.is_cuda:
            stream = _compat.current_stream(x.get_device())
        try:
            key = (x._version, x.data_ptr(), stream, form) if shares else None
        except RuntimeError:  # tensors of inference mode have no version
            key = None
        if key is None:
            return compress(inner, seed, *arguments), seed
        entry, layer = self._entry, id(weight)
        if entry is not None and entry.x() is x and entry.key == key and layer not in entry.weights:
            entry.weights.add(layer)
            return entry.saved, entry.seed
        self._entry = entry = None  # before there is a second one
        saved = compress(inner, seed, *arguments)
        died = self._died
        refs = weakref.ref(x, died), weakref.ref(node, died)
        self._entry = _Entry(refs[0], key, saved, seed, refs[1], {layer})
        return saved, seed

    def forget(self) -> None:
        """Drop the entry; for backward, once the saved tensors are there.

        It is the forward's thread that is meant: on CUDA backward runs in one of autograd's own.
        What a checkpoint compresses there again goes with its nodes.
        """
        self._entry = None

    def _died(self, ref: _Ref) -> None:
        entry = self._entry
        if entry is not None and (entry.x is ref or entry.node is ref):
            self._entry = None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.last = Last()


threads = _Threads()
"""``threads.last``: the calling thread's."""
