"""``compress_saved``: 8- or 4-bit codes of what autograd saves for layers that are not HOT's.

HOT compresses the inputs of linear layers and convolutions. In a transformer, most of the remaining
saved memory belongs to other operations: inputs of GELU and normalisation, attention's q, k, v and
result. This module cuts these tensors into blocks of 128 values. A block keeps its minimum and
maximum, and for each value a stochastically rounded code between them.

On CUDA, Triton kernels (``compress_saved_triton.py``) read every value once and write it once, near
the bandwidth of the memory. Eager torch operations would pass over the data about ten times, and
compiled ones need a compilation for every shape. On the CPU, and on CUDA without Triton, torch
operations compute the same bits.

Source: blockwise min-max codes with stochastic rounding as in ActNN (Chen et al., ICML 2021).
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from . import ops
from .functional import DTYPES

BLOCK = 128
"""Values that share a minimum and a maximum."""

MASK_BLOCK = 1024
"""Values whose signs share 128 bytes (one bit each)."""

CHUNK_VALUES = 1 << 20
"""Values that the torch path processes at a time."""

MIN_RANGE = 2.0**-100  # of a block; narrower blocks count as constant
MASK32 = 0xFFFF_FFFF
GOLDEN32 = 0x9E37_79B1
_GOLDEN64 = 0x9E37_79B9_7F4A_7C15

KINDS: Mapping[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "activation": "gelu silu silu_ mish elu elu_ celu selu hardswish hardsigmoid hardtanh "
        "relu6 softplus sigmoid tanh glu prelu",
        "relu": "relu relu_ leaky_relu leaky_relu_",
        "norm": "layer_norm rms_norm group_norm batch_norm instance_norm",
        "attention": "scaled_dot_product_attention multi_head_attention_forward",
        "softmax": "softmax",
        "product": "mul multiply __mul__ __rmul__ matmul __matmul__ __rmatmul__ bmm baddbmm einsum "
        "square pow __pow__",
        "pool": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        "linear": "linear addmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
        "conv_transpose3d",
        "loss": "cross_entropy log_softmax",
    }.items()
}
"""Kind of operation -> names of torch functions whose saved tensors are compressed. Those of other
operations (divisions, roots, custom autograd Functions, ...) are never compressed: a derivative may
need exact values."""

Key = tuple[int, int] | tuple[Tensor, int]
"""Two 32-bit words; or a tensor on the device that holds them (an int64, low word first), and a
number that distinguishes the tensors that share it."""

_POWERS: Any = {2, 3}  # a set, so that a tensor is not compared element by element
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


def compress_saved(bits: int = 8, *, min_values: int = 65536, **kinds: int | None) -> Compression:
    """Make a context in which autograd keeps its saved tensors compressed.

    ::

        compress = hot.compress_saved()
        for batch in batches:
            with compress:
                loss = loss_fn(model(batch))
            loss.backward()

    Args:
        bits: 8 or 4, for every kind but ``relu``, ``linear``, ``loss`` and those in ``kinds``.
        min_values: smaller tensors are kept as they are.
        **kinds: bits of one kind of operation, or None to keep its tensors: ``activation`` (GELU,
            SiLU, ...), ``norm``, ``attention`` (q, k, v and result of scaled_dot_product_attention;
            nn.MultiheadAttention without masks), ``softmax``, ``product`` (element- and matrix
            products of two activations), ``pool``; ``relu``, which needs signs alone: 1 (the
            default, exact); None unless given: ``linear``, plain linear layers and convolutions,
            and ``loss``, the logarithms of probabilities that cross entropy keeps (large for a
            large vocabulary; their rounding comes out multiplied by the probability).

    Never compressed: integer and boolean tensors; parameters, inputs and other tensors without a
    gradient, and their views (masks, tables); statistics (mean, 1/std, logsumexp: tensors smaller
    than a quarter of the operation's largest); expanded tensors; dtypes other than float32, float16
    and bfloat16; and tensors saved by operations outside :data:`KINDS` or by custom autograd
    Functions (HOT's layers compress their own). A tensor that several operations save is kept once.

    Error, of a value x of a block with ``lo = min``, ``hi = max`` and b bits: ``|x' - x| <=
    (hi - lo) / (2**b - 1)``, plus one rounding to the tensor's dtype. The expectation over the
    seed is x, within 2**-15 of that step (plus the dtype's rounding again). ``lo`` and ``hi`` are
    exact, so blocks of one or two values are exact, too. A range below 2**-100 counts as 0. A block
    with NaN or Inf, or whose range overflows float32, decodes to NaN or Inf.

    Random numbers: every entry of the context draws one 63-bit seed from torch's default CPU
    generator, so ``torch.manual_seed`` repeats a run. The roundings of a block share one draw,
    shifted by multiples of the golden ratio: each is unbiased, but they are not independent.

    Memory: ``1 + 8/128`` bytes per value at 8 bits, ``0.5 + 8/128`` at 4.

    Backward runs outside or inside the context. It composes with autocast, HOT's layers and
    activation checkpointing (a checkpointed region saves nothing to compress). Nothing is
    compressed inside of compiled graphs (``convert(..., saved=)`` does that). In a CUDA graph every
    tensor draws its own seed on the device, again at every replay.

    Raises:
        ValueError: bad bits, or an unknown kind.
    """
    return Compression(bits, min_values, kinds)


class Compression:
    """The context that :func:`compress_saved` makes; it can be entered again and again."""

    def __init__(self, bits: int, min_values: int, kinds: Mapping[str, int | None]) -> None:
        """See :func:`compress_saved`."""
        if bits not in (4, 8):
            raise ValueError(f"bits: {bits!r}; expected 8 or 4")
        if min_values < 0:
            raise ValueError(f"min_values: {min_values} is negative")
        bits_of_kind: dict[str, int | None] = dict.fromkeys(KINDS, bits)
        bits_of_kind.update(relu=1, linear=None, loss=None)
        for kind, value in kinds.items():
            if kind not in KINDS:
                raise ValueError(f"{kind}: no such kind of operation; known: {', '.join(KINDS)}")
            allowed = (1, None) if kind == "relu" else (4, 8, None)
            if value not in allowed:
                raise ValueError(f"{kind}: {value!r}; expected one of {allowed}")
            bits_of_kind[kind] = value
        self._min_values = max(1, min_values)
        # Every call of torch inside the context looks a name up here.
        self._bits_of = {
            name: found
            for name, kind in _KIND_OF.items()
            if (found := bits_of_kind[kind]) is not None
        }
        self._rule: _Rule | None = None
        self._seed = 0
        self._counter: Iterator[int] = itertools.count()
        self._kept: weakref.WeakValueDictionary[tuple[Any, ...], _Packed] = (
            weakref.WeakValueDictionary()
        )
        self._entered: list[tuple[TorchFunctionMode, Any]] = []

    def __enter__(self) -> Compression:
        """Draw a seed and begin."""
        self.draw_seed()
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        mode = self.watch()
        mode.__enter__()  # type: ignore[no-untyped-call]
        hooks.__enter__()
        self._entered.append((mode, hooks))
        return self

    def __exit__(self, *error: Any) -> None:
        """End; compressed tensors live until backward or until their graph is freed."""
        mode, hooks = self._entered.pop()
        hooks.__exit__(*error)
        mode.__exit__(*error)  # type: ignore[no-untyped-call]

    def draw_seed(self) -> None:
        """Draw the seed of the following roundings from torch's default CPU generator."""
        self._seed = int(torch.randint(0x7FFF_FFFF_FFFF_FFFF, (), dtype=torch.int64, device="cpu"))
        self._counter = itertools.count()

    def watch(self) -> TorchFunctionMode:
        """A context that records for :meth:`pack` which operation saves."""
        return _Watch(self)

    def pack(self, tensor: Tensor) -> Any:
        """The tensor itself (detached), or a smaller object with ``.nbytes``."""
        rule = self._rule
        if rule is None or not rule.takes(tensor):
            return (
                tensor.detach()
            )  # with its graph it would keep itself alive if no backward follows
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in rule.exact:
            return tensor.detach()
        key = (
            address,
            tensor._version,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            rule.bits,
        )
        found = self._kept.get(key)
        if found is None:
            order = memory_order(tensor)
            if order is None:
                return tensor.detach()
            found = _Packed(tensor, order, rule.bits, self._key(tensor))
            self._kept[key] = found
        return found

    def unpack(self, kept: Any) -> Tensor:
        """Restore a tensor of the same shape, dtype, device and memory order."""
        return kept.restore() if isinstance(kept, _Packed) else kept

    def _key(self, tensor: Tensor) -> Key:
        """A new key: two words, or a seed on the device while a graph is captured."""
        seed = ops.captured_seed(tensor)
        if seed is not None:
            return seed, next(self._counter)
        value = _splitmix64(self._seed + next(self._counter) * _GOLDEN64)
        return value & MASK32, value >> 32


class _Watch(TorchFunctionMode):
    def __init__(self, owner: Compression) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        owner = self._owner
        name = getattr(func, "__name__", "")
        bits = owner._bits_of.get(name)
        before = owner._rule
        if bits is None and before is None:  # most calls: attributes, views, sums
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        owner._rule = None if bits is None else _rule(name, bits, owner._min_values, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            owner._rule = before


class _Rule:
    """Decides which of an operation's saved tensors are compressed."""

    __slots__ = ("bits", "exact", "exact_shapes", "min_values", "widths")

    def __init__(
        self, bits: int, min_values: int, tensors: list[Tensor], widths: tuple[int, ...]
    ) -> None:
        self.bits = bits
        self.exact = set()
        exact_shapes, shapes = set(), set()
        largest = 0
        for tensor in tensors:
            largest = max(largest, tensor.numel())
            if _without_gradient(tensor):
                self.exact.add(tensor.untyped_storage()._cdata)
                exact_shapes.add(tensor.shape)
            else:
                shapes.add(tensor.shape)
        self.min_values = max(min_values, largest // 4)
        # Under autocast a copy of a parameter is saved; only its shape identifies it.
        self.exact_shapes = exact_shapes - shapes
        self.widths = widths

    def takes(self, tensor: Tensor) -> bool:
        """Whether to compress it, as far as anything but its storage (``exact``) decides."""
        return (
            type(tensor) is Tensor
            and tensor.numel() >= self.min_values
            and tensor.dtype in DTYPES
            and tensor.layout == torch.strided
            and not tensor.is_meta
            and tensor.shape not in self.exact_shapes
            and (not self.widths or tensor.shape[-1] in self.widths)
        )


def _rule(
    name: str, bits: int, min_values: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Rule | None:
    """The rule for a call; None: none of its saved tensors is compressed."""
    widths: tuple[int, ...] = ()
    if name in ("pow", "__pow__") and not (len(args) == 2 and args[1] in _POWERS):
        return None  # negative and fractional powers have a steep derivative
    if name == "multi_head_attention_forward":
        if kwargs.get("key_padding_mask") is not None or kwargs.get("attn_mask") is not None:
            return None  # merged into new tensors, which look like activations
    elif name == "scaled_dot_product_attention":
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        if kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is not None:
            # The mask may be saved as a padded copy: take only what is as wide as a head.
            widths = tuple(range(query.shape[-1], query.shape[-1] + 8))
            if any(key.shape[-2] <= width < key.shape[-2] + 8 for width in widths):
                return None
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return _Rule(bits, min_values, tensors, widths)


def _without_gradient(tensor: Tensor) -> bool:
    """Whether it is a parameter, a constant or a view of one, not an activation."""
    base = tensor._base
    # A custom Function may return a view of its own temporary, which is a leaf as well.
    return tensor.is_leaf or (base is not None and base.is_leaf and base.requires_grad)


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the outermost in memory to the innermost; None if elements overlap.

    Empty for a contiguous tensor, which needs no permutation.
    """
    if tensor.is_contiguous():
        return ()
    stride, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.dim()), key=lambda i: (stride[i], shape[i]), reverse=True))
    extent = 1
    for i in reversed(order):
        if shape[i] == 1:
            continue
        if stride[i] < extent:
            return None
        extent = stride[i] * (shape[i] - 1) + extent
    return order


class _Packed:
    """One compressed tensor."""

    __slots__ = (
        "__weakref__",
        "_bits",
        "_codes",
        "_dtype",
        "_order",
        "_ranges",
        "_shape",
        "_source",
    )

    def __init__(self, tensor: Tensor, order: tuple[int, ...], bits: int, key: Key) -> None:
        # A weak reference to the storage keeps its address from being reused.
        source = tensor.untyped_storage()
        self._source = StorageWeakRef(source)  # type: ignore[no-untyped-call]
        self._order, self._bits, self._dtype = order, bits, tensor.dtype
        dense = tensor.permute(order) if order else tensor
        self._shape = dense.shape
        self._codes, self._ranges = encode_blocks(dense, bits, key)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._ranges.nbytes

    def restore(self) -> Tensor:
        dense = decode_blocks(self._codes, self._ranges, self._bits, self._shape, self._dtype)
        if not self._order:
            return dense
        inverse = [0] * len(self._order)
        for place, dim in enumerate(self._order):
            inverse[dim] = place
        return dense.permute(inverse)


def encode_blocks(dense: Tensor, bits: int, key: Key) -> tuple[Tensor, Tensor]:
    """Codes ``[blocks, bytes]`` and ranges ``[blocks, 2]`` (none for one bit) of any values.

    The dimensions of ``dense`` are in memory order.
    """
    width = MASK_BLOCK if bits == 1 else BLOCK
    blocks = -(-dense.numel() // width)
    device = dense.device
    codes = torch.empty((blocks, width * bits // 8), dtype=torch.uint8, device=device)
    ranges = torch.empty((0 if bits == 1 else blocks, 2), dtype=torch.float32, device=device)
    if blocks == 0:
        return codes, ranges
    kernels = _kernels(device)
    if kernels is not None:
        kernels.compress(dense, codes, ranges, bits, key)
    else:
        _compress(dense.reshape(-1), codes, ranges, bits, key)
    return codes, ranges


def decode_blocks(
    codes: Tensor, ranges: Tensor | None, bits: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Decode to a contiguous tensor; one-bit codes decode to 1 for positive values, else 0."""
    dense = torch.empty(shape, dtype=dtype, device=codes.device)
    if dense.numel() == 0:
        return dense
    kernels = _kernels(dense.device)
    if kernels is not None:
        kernels.restore(codes, ranges, bits, dense)
    else:
        _restore(codes, ranges, bits, dense.view(-1))
    return dense


def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels, for CUDA; None for the torch path."""
    return triton_kernels() if device.type == "cuda" else None


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The module of the Triton kernels; None without Triton, after one warning."""
    try:
        from . import compress_saved_triton
    except ImportError as error:
        warnings.warn(
            f"compress_saved: Triton is missing ({error}); torch operations give the same bits "
            "several times slower",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return compress_saved_triton


def _splitmix64(value: int) -> int:
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & mask
    return value ^ (value >> 31)


def mix32(value: Tensor) -> Tensor:
    """A hash of 32-bit words kept in int64 (lowbias32 of Ellis, 2018)."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB_352D) & MASK32
    value = value ^ (value >> 15)
    value = (value * 0x846C_A68B) & MASK32
    return value ^ (value >> 16)


def _words(key: Key) -> tuple[Tensor | int, Tensor | int]:
    seed, stream = key
    if isinstance(seed, int):
        return seed, stream
    return seed & MASK32, ((seed >> 32) + stream * GOLDEN32) & MASK32


def _dither(first: int, blocks: int, key: Key, device: torch.device) -> Tensor:
    """Uniform numbers ``[blocks, 128]`` in [0, 1), multiples of 2**-23.

    Value i of a block gets ``frac(u + i * phi)``, where u is the block's draw.
    """
    block = torch.arange(first, first + blocks, dtype=torch.int64, device=device)
    low, high = _words(key)
    draw = mix32(mix32((block & MASK32) ^ low) ^ high) >> 9
    i = torch.arange(BLOCK, dtype=torch.int64, device=device)
    shift = ((i * GOLDEN32) & MASK32) >> 9
    sums = (draw[:, None] + shift) & 0x7F_FFFF
    return sums.float() * 2.0**-23


def _chunks(blocks: int, width: int) -> Iterator[tuple[int, int]]:
    step = CHUNK_VALUES // width
    for first in range(0, blocks, step):
        yield first, min(first + step, blocks)


def _compress(flat: Tensor, codes: Tensor, ranges: Tensor, bits: int, key: Key) -> None:
    """Fill codes and ranges from flat ``[N]``, with torch operations."""
    width = MASK_BLOCK if bits == 1 else BLOCK
    for first, last in _chunks(len(codes), width):
        part = flat[first * width : last * width].float()
        missing = (last - first) * width - len(part)
        if missing:  # repeating the last value changes no range
            part = torch.cat([part, part[-1:].expand(missing)])
        values = part.view(last - first, width)
        if bits == 1:
            signs = (values > 0).view(-1, 8, BLOCK).to(torch.uint8)
            weights = (2 ** torch.arange(8, device=flat.device)).to(torch.uint8)[:, None]
            codes[first:last] = (signs * weights).sum(1, dtype=torch.uint8)
            continue
        top = 2**bits - 1
        lo, hi = values.aminmax(dim=1, keepdim=True)
        span = hi - lo
        # Both operands are tensors: torch would multiply by the reciprocal of a number.
        inverse = torch.where(span < MIN_RANGE, 0.0, torch.full_like(span, top) / span)
        dither = _dither(first, last - first, key, flat.device)
        code = ((values - lo) * inverse).add_(dither).floor_().clamp_(0, top).to(torch.uint8)
        if bits == 4:
            code = code[:, : BLOCK // 2] | (code[:, BLOCK // 2 :] << 4)
        codes[first:last] = code
        ranges[first:last] = torch.cat([lo, hi], dim=1)


def _restore(codes: Tensor, ranges: Tensor | None, bits: int, flat: Tensor) -> None:
    """Fill flat ``[N]`` from codes and ranges, with torch operations."""
    width = MASK_BLOCK if bits == 1 else BLOCK
    for first, last in _chunks(len(codes), width):
        code = codes[first:last]
        if bits == 1:
            shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
            values = ((code[:, None, :] >> shifts) & 1).float()
        else:
            if bits == 4:
                code = torch.cat([code & 15, code >> 4], dim=1)
            assert ranges is not None
            top = 2**bits - 1
            lo, hi = ranges[first:last, :1], ranges[first:last, 1:]
            step = (hi - lo) / torch.full_like(hi, top)
            values = torch.where(code == top, hi, lo + code.float() * step)
        part = flat[first * width : last * width]
        part.copy_(values.reshape(-1)[: len(part)])
