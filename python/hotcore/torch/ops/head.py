"""An output head and its loss over chunks of tokens: the logits of all tokens never exist.

The operator ``head_loss`` computes a chunk's logits, and turns them into their gradient in place.
It multiplies that into g_x and g_w at once, as Liger-Kernel does. These gradients lack the factor
of the mean and of the graph behind the loss; backward multiplies by it, in fp32.
``reduction="none"`` has a factor for each token, which g_w sums over, so backward runs the operator
once more.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import numbers
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _core
from ...config import ConfigLike, HotConfig, Key, as_int, own_text
from .. import _compat
from . import calls, codes, core, linear, sharded
from .codes import Frozen
from .core import call, parsed
from .frozen_codes import up
from .registry import not_differentiable, operator

_NAME = "linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")

MIN_CHUNK = 2048
"""Least limit of tokens in a chunk: each chunk reads and writes the fp32 g_w once."""
_PART = 3 << 14
"""Words of the vocabulary in one g_x product of integers. INT32 sums hold 131,071 words, and CUDA's
kernels for rows of codes hold 49,152."""
_BLOCK_VALUES = 1 << 24
"""Number of logits that are in fp32 at a time: 64 MiB."""
_ALIGNED = 16
"""Rows of zeros pad the vocabulary to a multiple of this; fast products need multiples of 8."""


class Options(NamedTuple):
    """Options of the loss; the names are Liger-Kernel's and torch's."""

    label_smoothing: float
    softcap: float
    """0: none."""
    lse_square_scale: float
    chunk: int
    """0: :func:`chunk_of`."""


_OPTIONS = "float label_smoothing, float softcap, float lse_square_scale, int chunk"
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""Losses ``[L]``, g_x, g_w and g_b; an operator returns no None: empty where not wanted."""


# ---- what a user calls ----


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    config: ConfigLike | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(x, weight, bias), target)`` without ever holding all logits.

    Args:
        x: ``[..., I]`` float32, float16 or bfloat16, after autocast's cast.
        weight: ``[V, I]``, any V from 1.
        target: ``[...]`` int64 from 0 to V - 1, or ``ignore_index``.
        bias: ``[V]`` or None.
        config: None for torch's products. A HotConfig or a recipe's name for HOT's g_x and g_w,
            and with ``forward="int8"`` for logits in INT8.
        ignore_index: tokens with this target add nothing to loss and gradients.
        reduction: ``"mean"`` over tokens that are not ignored, ``"sum"`` or ``"none"``.
        label_smoothing: share of the target that is uniform over V, 0 to 1.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        lse_square_scale: z-loss: this times ``logsumexp(logits)**2`` is added to a token's loss.
        chunk: tokens of a chunk. The default is up to 2048. It is more while logits of 16 bits take
            no more bytes than x, or than a quarter of an fp32 g_w.

    Returns:
        ``[]`` in float32, or ``[...]`` with ``reduction="none"``.

    Raises:
        ValueError: an argument is out of range; on CUDA a target out of range is torch's assert.
        NotImplementedError: inside a ``torch.func`` transform, or on a device without a backend.
        RuntimeError: when differentiated twice.

    Source: docs/torch/head.md.
    """
    json = "" if config is None else calls.config_json(config)
    _check(x, weight, target, bias, json, reduction)
    options = _options(label_smoothing, softcap, lse_square_scale, chunk)
    ignore_index = as_int(ignore_index, "ignore_index", 64)
    calls.check_transforms(_NAME, x, weight, bias)
    dtype, seed = calls.autocast_dtype(x), None
    calls.check_dtypes(x, weight.dtype, bias, dtype)
    inner = calls.cast(x, dtype)
    if json and torch.compiler.is_compiling():
        seed = codes.draw_seed(inner.detach())
    elif json:
        seed = calls.seed_for_call(_NAME, x, weight, bias, json)
    tensors = (core.flat(inner), weight, bias, target.reshape(-1), seed)
    loss = _linear_cross_entropy(*tensors, json, ignore_index, reduction, *options)
    return loss.view(target.shape) if reduction == "none" else loss


def _check(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, config: str, reduction: str
) -> None:
    """Refuse arguments that do not fit, by name."""
    calls.check_tensors(bias, x=x, weight=weight, target=target)
    for name, tensor in (("x", x), ("weight", weight), ("target", target), ("bias", bias)):
        if tensor is None:
            continue
        if sharded.is_dtensor(tensor):
            raise NotImplementedError(
                f"{name}: a DTensor; leave the head out of the tensor parallel plan, and call the "
                "model that fully_shard wraps, which gathers the weight"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name}: layout {tensor.layout}; expected a dense tensor")
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}; x is on {x.device}")
    if weight.dim() != 2 or weight.shape[0] == 0 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight: shape {list(weight.shape)}; expected [V, I], V at least 1, for x of shape "
            f"{list(x.shape)}"
        )
    expected = {"target": (target, x.shape[:-1]), "bias": (bias, weight.shape[:1])}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)}; expected {list(shape)}")
    if target.dtype != torch.int64:
        got = str(target.dtype).removeprefix("torch.")
        raise ValueError(f"target: dtype {got}; expected int64")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r}; expected one of {', '.join(REDUCTIONS)}")
    text = own_text(config)
    if "'token_grid':[" in text and "'basis':'full'" not in text:
        raise ValueError("config: token_grid; chunks of tokens are no whole samples")


def _options(smoothing: float, softcap: float | None, scale: float, chunk: int | None) -> Options:
    cap = 1.0 if softcap is None else softcap
    values = {"label_smoothing": smoothing, "softcap": cap, "lse_square_scale": scale}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name}: expected a number, got {value!r}")
    if chunk is not None:
        chunk = as_int(chunk, "chunk", 64)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing: {smoothing} is outside 0 to 1")
    if not 0 < cap < math.inf:
        raise ValueError(f"softcap: {softcap}; expected a positive number or None")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"lse_square_scale: {scale}; expected a finite number")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: {chunk}; expected a positive number or None")
    return Options(float(smoothing), float(softcap or 0), float(scale), chunk or 0)


# ---- loss and gradient of a chunk's logits ----


def chunk_of(tokens: int, vocab: int, in_features: int) -> int:
    """Tokens of a chunk: chunks are about equal, and multiples of 128."""
    limit = max(MIN_CHUNK, in_features // 2, tokens * in_features // vocab)
    count = max(1, -(-tokens // limit))
    return up(tokens, 128 * count) // count if count > 1 else max(1, tokens)


def differentiate(
    logits: Tensor, vocab: int, target: Tensor, options: Options, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses ``[C]`` of logits ``[C, padded]``; with ``gradient`` these become their gradient.

    The second result is that gradient at the target, ``[C]`` fp32; columns from ``vocab`` on have
    none. Arithmetic is fp32. On CUDA a kernel writes over the logits as it reads them; elsewhere
    some rows are done at a time.
    """
    losses = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    at_target = torch.empty_like(losses)
    kernels = _kernels() if logits.is_cuda else None
    if kernels is not None:
        kernels.rows(logits, vocab, target, losses, at_target, *options[:3], gradient)
        return losses, at_target
    step = max(1, _BLOCK_VALUES // vocab)
    for begin in range(0, len(target), step):
        part = slice(begin, begin + step)
        block = logits[part, :vocab]
        losses[part], at_target[part] = _rows(block, target[part], options, gradient)
    if gradient:
        logits[:, vocab:] = 0
        logits.scatter_(1, target[:, None], at_target[:, None].to(logits.dtype))
    return losses, at_target


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("hotcore.torch.ops.head_triton")
    except ImportError as error:
        slow = f"{_NAME}: torch operations take several times as long"
        warnings.warn(f"Triton is missing ({error}); {slow}", RuntimeWarning, stacklevel=3)
        return None


def _rows(block: Tensor, target: Tensor, options: Options, gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses and gradients at the targets. The block becomes the gradient, without the -1 there."""
    smoothing, softcap, z, _ = options
    at, share, tanh, values = target[:, None], smoothing / block.shape[1], None, block
    if softcap:
        tanh = block.float().div(softcap).tanh_()
        values = tanh * softcap
    logp = torch.log_softmax(values, -1, dtype=torch.float32)
    of_target = logp.gather(1, at)
    loss = -of_target[:, 0]
    if smoothing:
        loss = (1 - smoothing) * loss - share * logp.sum(-1)
    lse = values.gather(1, at).float() - of_target if z else None
    if lse is not None:
        loss = loss + z * lse[:, 0].square()
    if not gradient:
        return loss, loss
    if not (smoothing or softcap or z):
        torch.exp(logp, out=block)  # rounds as it writes
        return loss, of_target[:, 0].expm1()
    p = logp.exp_()
    if lse is not None:
        p *= 1 + 2 * z * lse
    if smoothing:
        p -= share
    at_target = p.gather(1, at) - (1 - smoothing)
    if tanh is not None:
        slope = tanh.square_().neg_().add_(1)
        p *= slope
        at_target *= slope.gather(1, at)
    block.copy_(p)
    return loss, at_target[:, 0]


# ---- the products of a chunk ----


class _Chunk(NamedTuple):
    """A chunk's gradients of the logits, and its x."""

    gy: Tensor
    """``[C, padded]``; the products may write over it."""
    target: Tensor
    at_target: Tensor
    """fp32 values of ``gy`` at the targets."""
    x: Tensor


class _Products:
    """torch's products, in x's dtype, with the vocabulary padded."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype, self.weight = x.dtype, weight
        self.padded = up(len(weight), _ALIGNED)
        self.bias = None if bias is None else self.pad(bias)

    def pad(self, rows: Tensor) -> Tensor:
        """Put zeros behind the vocabulary."""
        missing = self.padded - len(rows)
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows

    @functools.cached_property
    def cast(self) -> Tensor:
        """The padded weight in x's dtype."""
        return self.pad(self.weight.to(self.dtype))

    def logits(self, x: Tensor, target: Tensor) -> Tensor:
        """``[C, padded]``."""
        return F.linear(x, self.cast, None if self.bias is None else self.bias.to(self.dtype))

    def gradients(self, chunk: _Chunk, first: bool, gx: bool, gw: Tensor | None) -> Tensor | None:
        """g_x of a chunk. g_w is written to ``gw``, or added to it after the first chunk."""
        if gw is not None:
            _add_product(gw, chunk.gy.t(), chunk.x, first)
        return chunk.gy @ self.cast if gx else None


def _add_product(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``out += a b``, in fp32; for the first product ``out = a b``."""
    beta = 0 if first else 1
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=beta)
    elif a.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):  # torch 2.8
        torch.addmm(out, a, b, beta=beta, out_dtype=out.dtype, out=out)
    elif first:
        out.copy_(a @ b)
    else:
        out += a @ b


class _HotProducts(_Products):
    """HOT's products; the targets' largest logits and gradients are multiplied apart, exactly."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Any, config: HotConfig, seed: Any, gx: bool
    ) -> None:
        super().__init__(x, weight, bias)
        # x is not kept: fewer than 8 bits would save nothing.
        self.config = config = dataclasses.replace(config, storage="int8")
        self.seed, self.calls = seed, 0
        count = -(-self.padded // _PART)
        step = up(self.padded, 128 * count) // count
        self.parts = [slice(begin, begin + step) for begin in range(0, self.padded, step)]
        whole = self.pad(weight)
        self.quantized = [_for_gx(whole[part], config) if gx else None for part in self.parts]
        self.frozen: Frozen | None = None
        if config.forward == "int8":
            quantized = codes.quantize_forward_weight(whole, config)
            shape = (self.padded, x.shape[1])
            self.frozen = Frozen(quantized, config.forward_block, *shape, weight.dtype)

    def logits(self, x: Tensor, target: Tensor) -> Tensor:
        if self.frozen is None:
            return super().logits(x, target)
        y = linear.int8_linear(x, self.frozen, self.bias, self.config)
        exact = (x.float() * self.weight[target]).sum(-1)
        if self.bias is not None:
            exact += self.bias[target]
        return y.scatter_(1, target[:, None], exact[:, None].to(y.dtype))

    def gradients(self, chunk: _Chunk, first: bool, gx: bool, gw: Tensor | None) -> Tensor | None:
        gy, target, at_target, x = chunk
        gy.scatter_(1, target[:, None], 0)
        at, width = at_target[:, None], x.shape[1]
        saved_key, saved, out = self._key(), None, None
        if gw is not None:
            saved = codes.compress(x, self.config, saved_key)
        for part, quantized in zip(self.parts, self.quantized, strict=True):
            share = torch.empty(x.shape, dtype=torch.float32, device=x.device) if gx else None
            outputs = (share, None if gw is None else gw[part], None)
            keys = (saved_key, self._key())
            linear.backward(
                gy[:, part], None, saved, width, self.config, keys, outputs, not first, quantized
            )
            out = share if out is None or share is None else out.add_(share)
        if gw is not None:
            gw.index_add_(0, target, at * x)
        return None if out is None else out.addcmul_(at, self.weight[target])

    def _key(self) -> Key:
        """A new key for every call that rounds."""
        assert self.seed is not None
        key, self.calls = core.key_of(self.seed), self.calls + 1
        return key._replace(offset=key.offset + self.calls - 1)


def _for_gx(weight: Tensor, config: HotConfig) -> Tensor:
    """A weight's codes for g_x."""
    rows, columns = weight.shape
    shape = (rows, columns, config.spec)
    out = weight.new_empty(_core.quantized_weight_bytes(*shape), dtype=torch.uint8)
    scratch = (_core.quantize_weight_workspace, *shape)
    call(_core.quantize_weight, weight, scratch, w=weight, spec=config.spec, out=out)
    return out


# ---- all chunks ----


def chunked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    factor: Tensor,
    seed: Tensor | None,
    config: str,
    wanted: Sequence[bool],
    options: Options,
) -> _Results:
    """Losses, and gradients of the sum of ``factor`` times them; g_w and g_b are fp32."""
    vocab, (need_gx, need_gw, need_gb) = len(weight), wanted
    if not target.is_cpu:
        target.new_empty(vocab).gather(0, target)  # torch's assert, which does not wait
    elif (wrong := (target < 0) | (target >= vocab)).any():
        got = int(target[wrong][0])
        raise ValueError(f"target: {got}; expected 0 to {vocab - 1}, or ignore_index")
    products = _Products(x, weight, bias)
    if config:
        products = _HotProducts(x, weight, bias, parsed(config), seed, need_gx)
    losses, gx, gw, gb = _outputs(x, weight, wanted, products.padded)
    gb.zero_()
    if not len(x):
        gw.zero_()
    step = options.chunk or chunk_of(len(x), vocab, x.shape[1])
    for begin in range(0, len(x), step):
        part = slice(begin, begin + step)
        inner, to, scale = x[part], target[part], factor[part, None]
        gy = products.logits(inner, to)
        losses[part], at = differentiate(gy, vocab, to, options, any(wanted))
        if need_gb:
            gb += (scale.to(gy.dtype).t() @ gy)[0]
        if need_gx or need_gw:
            chunk = _Chunk(gy, to, at, (inner * scale).to(x.dtype))
            rows = products.gradients(chunk, begin == 0, need_gx, gw if need_gw else None)
            if rows is not None:
                gx[part] = rows * scale
            del chunk
        del gy  # before the next logits are computed
    return losses, gx, gw[:vocab], gb[:vocab]


def _outputs(x: Tensor, weight: Tensor, wanted: Sequence[bool], rows: int) -> _Results:
    """Uninitialised results; ``rows`` of g_w and g_b."""
    need_gx, need_gw, need_gb = wanted
    return (
        x.new_empty(len(x), dtype=torch.float32),
        x.new_empty(x.shape if need_gx else 0),
        weight.new_empty((rows, weight.shape[1]) if need_gw else 0, dtype=torch.float32),
        weight.new_empty(rows if need_gb else 0, dtype=torch.float32),
    )


def _flops(x_shape: Sequence[int], weight_shape: Sequence[int], *arguments: Any, **_: Any) -> int:
    """Three products at most, at full rank and whatever their precision."""
    need_gx, need_gw, *_others = arguments[5:]
    return 2 * math.prod(x_shape) * weight_shape[0] * (1 + bool(need_gx) + bool(need_gw))


@operator(
    "head_loss(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor factor, Tensor? seed, "
    f"str config, bool need_gx, bool need_gw, bool need_gb, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda x, weight, *rest: _outputs(x, weight, rest[5:8], len(weight)),
    flops=_flops,
    product=True,
)
def _head_loss(*arguments: Any) -> _Results:
    x, weight, bias, target, factor, seed, config, *rest = arguments
    with torch.autocast(x.device.type, enabled=False):  # x and weight have been cast
        return chunked(x, weight, bias, target, factor, seed, config, rest[:3], Options(*rest[3:]))


# ---- autograd ----


class Head(torch.autograd.Function):
    """The loss, in eager mode and as AOTAutograd traces it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """Compute the loss and, except for ``"none"``, the gradients."""
        target, seed, config, ignore_index, reduction, *options = rest
        counted = target != ignore_index
        factor, target = counted.float(), torch.where(counted, target, 0)
        later, needs = reduction == "none", ctx.needs_input_grad[:3]
        wanted = (False,) * 3 if later else needs
        tensors = (x, weight, bias, target, factor, seed)
        losses, *gradients = _head_loss(*tensors, config, *wanted, *options)
        losses = torch.where(counted, losses, 0)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.later = (config, options) if later else None
        ctx.set_materialize_grads(False)
        if later:
            ctx.save_for_backward(x, core.kept_weight(weight, needs[1]), *tensors[2:])
            return losses
        count = factor.sum() if reduction == "mean" else factor.new_ones(())
        ctx.save_for_backward(torch.where(count > 0, 1 / count, 0), *gradients)
        loss: Tensor = losses.sum() / count
        return loss

    @staticmethod
    @not_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """g_x, g_w and g_b."""
        needs = ctx.needs_input_grad[:3]
        alone = ctx.later is None and core.bypasses_dispatcher(g) and not _compat.batched(g)
        owned = alone and not _compat.keeps_graph()
        if ctx.later is None:
            scale, *gradients = ctx.saved_tensors
            scale = torch.where(scale > 0, scale * g, 0).float()  # the mean of no token is NaN
        else:
            config, options = ctx.later
            *tensors, factor, seed = ctx.saved_tensors
            _, *gradients = _head_loss(*tensors, factor * g, seed, config, *needs, *options)
            scale = None
        return tuple(
            _scaled(gradient, scale, dtype, owned) if need else None
            for gradient, dtype, need in zip(gradients, ctx.dtypes, needs, strict=True)
        )


def _scaled(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype, owned: bool) -> Tensor:
    """The gradient times ``scale``, in fp32, rounded to ``dtype``; in place if it is ``owned``."""
    if scale is None:
        return gradient.to(dtype)
    scale = scale.reshape([1] * gradient.dim())  # a 0-dim one would be rounded first
    if not owned:
        return (gradient * scale).to(dtype)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, scale, out=out)  # in one pass


@operator(
    f"{_NAME}(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? seed, str config, "
    f"int ignore_index, str reduction, {_OPTIONS}) -> Tensor",
    flops=_flops,
    composite=True,
)
def _linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> Tensor:
    calls.refuse_transforms(_NAME)
    if not torch.is_grad_enabled():  # needs_input_grad does not tell
        x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = Head.apply(x, weight, bias, *others)  # type: ignore[no-untyped-call]  # so in torch
    return loss
