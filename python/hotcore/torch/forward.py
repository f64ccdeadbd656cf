"""The 8-bit forward of layers (``forward="int8"``) in eager mode.

Every call quantises its weight. No codes of it stay for the next call: nothing on the host tells
whether a weight was written in between (``.data``, fused optimizers and FSDP raise no version).
:func:`hotcore.torch.freeze_int8` keeps codes, in place of the weight.
"""

from __future__ import annotations

from torch import Tensor

from . import input_cache, ops

_INT8 = '"forward":"int8"'


def is_int8(config: str) -> bool:
    """Whether a configuration, as its own ``json`` has it, has an 8-bit forward.

    By its text, as torch.compile cannot follow what parses it.
    """
    return _INT8 in config


class Input:
    """The x of a call that goes past the dispatcher: quantised for its product, and kept.

    What another layer has made of the same x is taken. What is missing comes from one read of x.
    """

    __slots__ = ("_cache", "_codes", "_config", "_inner", "_key", "_x")

    def __init__(self, x: Tensor, inner: Tensor, config: str) -> None:
        """``inner`` is x as autocast casts it."""
        self._x, self._inner, self._config = x, inner, ops.parsed(config)
        self._cache = input_cache.current()
        self._key = input_cache.codes_key(x, inner.dtype, self._config.forward_block)
        self._codes = self._cache.codes_of(x, self._key)

    def compress(self, inner: Tensor, seed: Tensor, config: str) -> Tensor:
        """As :func:`ops.compress_activation`; makes the other form with it, if that is missing."""
        if self._codes is not None:
            return ops.compress_activation(inner, seed, config)
        self._cache.quantized = None  # free the old codes before the new ones are allocated
        codes, saved = ops.quantize_forward_input(inner, self._config, ops.key_of(seed))
        self._keep(codes)
        return saved

    def codes(self) -> Tensor | None:
        """What :func:`linear` takes; None: x itself, which no other layer can share."""
        if self._codes is None and self._key is not None:
            self._cache.quantized = None
            self._keep(ops.quantize_forward_input(self._inner, self._config)[0])
        return self._codes

    def _keep(self, codes: Tensor) -> None:
        self._codes = codes
        if self._key is not None:
            self._cache.keep_codes(self._x, self._key, codes)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: str,
    codes: Tensor | None = None,
) -> Tensor:
    """``x weight^T + bias`` in INT8 and in x's dtype; no gradients.

    Args:
        x: ``[..., I]``, as autocast casts it.
        weight: ``[O, I]``, of any dtype that HOT takes.
        bias: ``[O]`` or None, likewise.
        config: as JSON.
        codes: of x, by :func:`ops.quantize_forward_input`; only where the call goes past the
            dispatcher.
    """
    return ops.forward_linear(x, weight, bias, config, codes)
