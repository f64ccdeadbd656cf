"""One compressed x for the layers that take the same x (q, k and v; gate and up), in eager mode.

Plain torch keeps such an x once. Here each thread remembers what it compressed last, and a layer
that comes with the same tensor, unchanged, takes that and the seed it was made with; g_y is still
rounded with the layer's own. The entry goes when x dies, when the node in the graph dies that it
was made for, when the next x is compressed, and in backward: the noise of an x that is trained on
again has to be fresh.

Not seen are changes of x that torch's version counter does not see (through ``.data``, by other
libraries, by replays of a CUDA graph), as autograd does not see them in a plain layer's saved x.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..config import HotConfig
from . import ops

_Ref = weakref.ref[Any]
_FIELDS = (
    "basis", "rank", "block", "rows", "token_grid", "prefix_tokens",
    "storage", "x_scale", "x_rounding",
)  # fmt: skip


def form(config: HotConfig) -> Hashable:
    """Equal for configurations that compress an x to the same bytes."""
    return tuple(getattr(config, name) for name in _FIELDS)


@functools.lru_cache(maxsize=256)
def linear_form(config: str, dtype: torch.dtype | None) -> Hashable:
    """The form of a linear layer's x: its configuration, as JSON, and what autocast casts x to."""
    return (dtype, form(ops.parsed(config)))


class Last:
    """What a thread compressed last. On every layer's way: a miss costs the host about 1 us."""

    __slots__ = ("_entry",)

    def __init__(self) -> None:
        """Begin without an entry."""
        # x, what else has to be the same, the bytes, their seed, the node
        self._entry: tuple[_Ref, Hashable, Tensor, Tensor, _Ref] | None = None

    def compressed(
        self,
        node: Any,
        x: Tensor,
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
            form: what else has to be, for the same bytes but for the seed.
            compress: makes them.
            inner: x as autocast casts it.
            seed: the layer's own, as :func:`ops.counted` gives it.
            arguments: for ``compress``.
        """
        stream = None
        # A capture (its seed has a counter) neither takes from outside nor leaves anything: replays
        # are not seen.
        shares = seed.dim() == 0 and ops.unseen(x)
        if shares and x.is_cuda:
            stream = torch._C._cuda_getCurrentRawStream(x.get_device())
        try:
            key = (x._version, stream, form) if shares else None
        except RuntimeError:  # tensors of inference mode have no version
            key = None
        if key is None:
            return compress(inner, seed, *arguments), seed
        entry = self._entry
        if entry is not None and entry[0]() is x and entry[1] == key:
            return entry[2], entry[3]
        self._entry = entry = None  # before there is a second one
        saved = compress(inner, seed, *arguments)
        died = self._died
        self._entry = (weakref.ref(x, died), key, saved, seed, weakref.ref(node, died))
        return saved, seed

    def forget(self) -> None:
        """Drop the entry; for backward, once the saved tensors are there.

        It is the forward's thread that is meant: on CUDA backward runs in one of autograd's own.
        What a checkpoint compresses there again goes with its nodes.
        """
        self._entry = None

    def _died(self, ref: _Ref) -> None:
        entry = self._entry
        if entry is not None and (entry[0] is ref or entry[4] is ref):
            self._entry = None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.last = Last()


threads = _Threads()
"""``threads.last``: the calling thread's."""
