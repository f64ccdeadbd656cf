"""The operators under the modules, ``torch.ops.hotcore.compress_activation`` and
``torch.ops.hotcore.backward_linear``, and the seeds of their random numbers.

Low-level library operators with fakes: they cost half of what ``torch.library.custom_op`` does, and
``torch.compile`` sees through them. The seed travels as a tensor, so that drawing it stays inside a
compiled graph. There ``linear`` (and ``conv2d``) computes the output and what is kept in one: left
alone, the partitioner would move what only backward needs, with the drawing of its seed, there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _core, contexts
from ..config import HotConfig, Key

_to_dlpack: Any = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]  # ten times cheaper than Tensor.__dlpack__

_CPU = torch.device("cpu")

PLAIN: Any = (Tensor, torch.nn.Parameter)
"""Types that want no say in what a layer does inside; subclasses may."""

library: Any = torch.library.Library("hotcore", "DEF")  # type: ignore[no-untyped-call]  # so in torch
library.define(
    "draw_seed(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor seed, str config, bool keep)"
    " -> (Tensor, Tensor)"
)
library.define("compress_activation(Tensor x, Tensor seed, str config) -> Tensor")
library.define(
    "backward_linear(Tensor gy, Tensor? weight, Tensor? saved, Tensor? saved_seed, Tensor seed, "
    "str config, SymInt in_features, ScalarType? gx_dtype, ScalarType? gw_dtype, "
    "ScalarType? gb_dtype)"
    " -> (Tensor, Tensor, Tensor)"
)


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> HotConfig:
    """The configuration that an operator was given as JSON."""
    return HotConfig.from_json(text)


def _random_seed() -> Tensor:
    return torch.randint(0x7FFF_FFFF_FFFF_FFFF, (), device=_CPU)  # int64 unless told otherwise


def seed_for(x: Tensor, weight: Tensor, compiling: bool) -> Tensor:
    """A 63-bit seed from torch's default CPU generator: int64 ``[]`` on the CPU.

    While compiling an operator of its own that depends on the layer: torch's partitioner would draw
    a bare ``randint`` once more in backward, and merge those of layers that share x. That one's
    result is ``[seed, address]`` (:func:`counted`), the address 0 where nothing is captured.
    """
    if not compiling:
        return _random_seed()
    seed: Tensor = draw_seed(x.detach(), weight.detach())
    return seed


class Counters:
    """Numbers on a device, one for each layer call that a CUDA graph holds: how often it ran.

    All of them are made at once, outside of any capture: what a capture allocates is the graph's.
    """

    most = 1 << 16

    def __init__(self, device: torch.device) -> None:
        """Make them, all 0; the only time that the device is waited for."""
        with torch.inference_mode(False):  # captures outside of that mode write them, too
            self._numbers = torch.zeros(self.most, dtype=torch.int64, device=device)
        if device.type == "cuda":  # whatever stream a graph will run on
            torch.cuda.current_stream(device).synchronize()
        self._taken = itertools.count()

    def take(self) -> int:
        """Address of a number that the current stream has counted up; 0: there are none left."""
        index = next(self._taken)
        if index >= len(self._numbers):
            return 0
        number = self._numbers[index]
        number.add_(1)  # captured with the rest: once at every replay
        return number.data_ptr()


_counters: dict[int, Counters] = {}
_used_up: list[Counters] = []  # graphs go on counting in them


def _address(x: Tensor) -> int:
    """Of a number for a layer call on x, on CUDA; 0 where nothing is being captured."""
    device = x.get_device()
    counters = _counters.get(device)
    if not torch.cuda.is_current_stream_capturing():
        if counters is None and unseen(x):
            _counters[device] = Counters(x.device)
        return 0
    if counters is None:
        raise RuntimeError(
            f"hotcore.torch: no layer has run on cuda:{device} outside of a capture yet; run one "
            "step of training before a CUDA graph is captured"
        )
    address = counters.take()
    if address == 0:
        _used_up.append(_counters.pop(device))
        raise RuntimeError(
            f"hotcore.torch: CUDA graphs have captured {counters.most} layer calls on "
            f"cuda:{device}; run one step outside of a capture to make room for as many again"
        )
    return address


def counted(seed: Tensor, x: Tensor) -> Tensor:
    """``seed``; while a CUDA graph is captured ``[seed, address]``, int64 on the CPU.

    The number at the address is 1 at the graph's first replay, 2 at the second; the layer's key
    has it for an offset (:func:`key_of`). Its forward counts it up, its backward only reads it.

    Raises:
        RuntimeError: while capturing, where no step has run before, or after
            :attr:`Counters.most` captured calls.
    """
    return _counted(seed, x) if x.is_cuda else seed


def _counted(seed: Tensor, x: Tensor) -> Tensor:
    address = _address(x)
    return seed if address == 0 else torch.tensor([int(seed.item()), address], device=_CPU)


def _draw_seed(x: Tensor, weight: Tensor) -> Tensor:
    address = _address(x) if x.is_cuda else 0
    return torch.tensor([int(_random_seed().item()), address], device=_CPU)


def context_of(device: torch.device) -> _core.CoreContext:
    """Where calls on tensors of ``device`` run: torch's number of threads, or current stream.

    Raises NotImplementedError for a device that this build has no backend for.
    """
    if device.type == "cpu":
        return contexts.cpu(torch.get_num_threads())
    if device.type == "cuda":
        return _cuda_context(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"x: no backend of hotcore for the device {device}")


def context_for(x: Tensor) -> _core.CoreContext:
    """``context_of(x.device)``; faster on CUDA, as a device's type is made into a string."""
    return _cuda_context(x.get_device()) if x.is_cuda else context_of(x.device)


def _cuda_context(index: int) -> _core.CoreContext:
    # The handle alone: torch.cuda.current_stream() makes an object around it.
    return contexts.cuda(index, torch._C._cuda_getCurrentRawStream(index))


@functools.lru_cache(maxsize=4096)  # asking takes microseconds
def _saved_size(tokens: int, in_features: int, spec: _core.Spec) -> int:
    return _core.saved_layout(tokens, in_features, spec)[0]


@functools.lru_cache(maxsize=4096)  # the same for every stream of a device
def _workspace_size(
    size_of: Callable[..., int], device: torch.device, arguments: tuple[Any, ...]
) -> int:
    return size_of(context_of(device), *arguments)


def _workspace(size_of: Callable[..., int], x: Tensor, *arguments: Any) -> object:
    """Scratch of ``size_of(context, *arguments)`` bytes, where x is."""
    if x.is_cpu:  # the binding has scratch of its own
        return None
    device = x.device
    size = _workspace_size(size_of, device, arguments)
    return None if size == 0 else _to_dlpack(torch.empty(size, dtype=torch.uint8, device=device))


def quantize_weight(weight: Tensor, config: HotConfig) -> Tensor:
    """w ``[O, I]`` as one uint8 vector that :func:`backward` takes in its place."""
    rows, columns = weight.shape
    spec = config.spec
    size = _core.quantized_weight_bytes(rows, columns, spec)
    out = torch.empty(size, dtype=torch.uint8, device=weight.device)
    workspace = _workspace(_core.quantize_weight_workspace, weight, rows, columns, spec)
    _core.quantize_weight(context_for(weight), _to_dlpack(weight), spec, _to_dlpack(out), workspace)
    return out


def compress(x: Tensor, config: HotConfig, key: Key) -> Tensor:
    """x ``[..., I]`` as one uint8 vector, straight to libhot: no autograd, no dispatcher."""
    x = collapsible(x)
    *leading, in_features = x.shape
    tokens, spec = math.prod(leading), config.spec
    size = _saved_size(tokens, in_features, spec)
    saved = torch.empty(size, dtype=torch.uint8, device=x.device)
    workspace = _workspace(_core.compress_activation_workspace, x, tokens, in_features, spec)
    _core.compress_activation(
        context_for(x), _to_dlpack(x), spec, key, _to_dlpack(saved), workspace
    )
    return saved


def backward(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    in_features: int,
    config: HotConfig,
    keys: tuple[Key, Key],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    accumulate: bool = False,
    quantized: Tensor | None = None,
) -> None:
    """Write ``outputs`` (g_x, g_w, g_b; None: not wanted), straight to libhot.

    gy is ``[..., O]`` and g_x ``[..., I]``, leading dimensions alike or flattened. ``keys``: the
    one that ``saved`` was made with, and the one to round g_y with (:func:`keys_of`).
    With ``accumulate`` g_w and g_b are added to what is there. ``quantized`` is what
    :func:`quantize_weight` made of ``weight``, which is then not looked at.
    """
    gy = collapsible(gy)
    *leading, out_features = gy.shape
    tokens, spec = math.prod(leading), config.spec
    saved_key, key = keys
    gx, gw, gb = outputs
    if gx is not None and not 2 <= gx.dim() <= 4:
        gx = gx.view(tokens, in_features)
    workspace = _workspace(
        _core.backward_linear_workspace,
        gy,
        tokens,
        out_features,
        in_features,
        spec,
        gx is not None,
        gw is not None,
    )
    _core.backward_linear(
        context_for(gy),
        _to_dlpack(gy),
        None if weight is None or quantized is not None else _to_dlpack(weight),
        None if saved is None else _to_dlpack(saved),
        tokens,
        in_features,
        saved_key,
        spec,
        key,
        None if gx is None else _to_dlpack(gx),
        None if gw is None else _to_dlpack(gw),
        None if gb is None else _to_dlpack(gb),
        accumulate,
        workspace,
        None if quantized is None else _to_dlpack(quantized),
    )


def keys_of(saved_seed: Tensor | None, seed: Tensor) -> tuple[Key, Key]:
    """For :func:`backward`; without ``saved_seed`` x was compressed with the layer's own seed."""
    key = key_of(seed)
    if saved_seed is None or saved_seed is seed:
        return key, key
    return key_of(saved_seed), key


def key_of(seed: Tensor) -> Key:
    """The key of a seed ``[]``, or of ``[seed, address]`` as :func:`counted` makes it."""
    if seed.dim() == 0:
        return Key(int(seed.item()))
    value, counter = seed.tolist()
    return Key(value, counter=counter)


def flat(x: Tensor) -> Tensor:
    """``[..., I]`` as ``[L, I]``."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def collapsible(x: Tensor) -> Tensor:
    """``[..., I]`` as libhot takes it: as it is, where its leading dimensions surely collapse."""
    return x if 2 <= x.dim() <= 4 and x.is_contiguous() else flat(x)


def new_gradients(
    gy: Tensor, x_shape: Sequence[int], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Uninitialised g_x, g_w and g_b for :func:`backward`; None where the dtype is."""
    out_features, device = gy.shape[-1], gy.device
    of_gx, of_gw, of_gb = dtypes
    matrix, empty = (out_features, x_shape[-1]), torch.empty
    return (
        None if of_gx is None else empty(x_shape, dtype=of_gx, device=device),
        None if of_gw is None else empty(matrix, dtype=of_gw, device=device),
        None if of_gb is None else empty(out_features, dtype=of_gb, device=device),
    )


def register(*operators: tuple[str, Callable[..., Any], Callable[..., Any]]) -> None:
    """Give operators of :data:`library` (name, implementation, fake) to CPU and CUDA tensors."""
    for name, implementation, fake in operators:
        for key in ("CPU", "CUDA"):
            library.impl(name, implementation, key)
        torch.library.register_fake(f"hotcore::{name}", fake, lib=library)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str, keep: bool
) -> tuple[Tensor, Tensor]:
    saved = _compress_activation(flat(x), seed, config) if keep else seed.new_empty(0)
    return F.linear(x, weight, bias), saved


def _fake_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, config: str, keep: bool
) -> tuple[Tensor, Tensor]:
    saved = _fake_compress_activation(flat(x), seed, config) if keep else seed.new_empty(0)
    return F.linear(x, weight, bias), saved


def _compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    return compress(x, parsed(config), key_of(seed))


def _outputs(
    gy: Tensor, in_features: int, dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, Tensor, Tensor]:
    new = new_gradients(gy, (gy.shape[0], in_features), dtypes)
    # An operator returns no None: what is not wanted is an empty vector.
    gx, gw, gb = (gy.new_empty(0) if gradient is None else gradient for gradient in new)
    return gx, gw, gb


def _backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    in_features: int,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    results = _outputs(gy, in_features, dtypes)
    gx, gw, gb = (out if dtype else None for out, dtype in zip(results, dtypes, strict=True))
    keys = keys_of(saved_seed, seed)
    backward(gy, weight, saved, in_features, parsed(config), keys, (gx, gw, gb))
    return results


def _fake_draw_seed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


def _fake_compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    tokens, in_features = x.shape
    size = saved_bytes(tokens, in_features, parsed(config))
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def _fake_backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    in_features: int,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(gy, in_features, dtypes)


def _up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def saved_bytes(tokens: int, in_features: int, config: HotConfig) -> int:
    """``saved_layout(...).bytes`` in arithmetic that symbolic shapes can follow."""
    if config.storage == "int4":
        row = _up(tokens, 32) // 2
        scales = 2 * in_features * ((tokens + 63) // 64)
    else:
        kept = tokens
        if config.basis != "full":
            rank = len(config.rows) if config.rows else config.rank
            body = prefix = 0
            if config.token_grid is None:
                body = tokens
            else:
                area = config.token_grid[0] * config.token_grid[1]
                samples = tokens // (area + config.prefix_tokens)
                body, prefix = samples * area, samples * config.prefix_tokens
            kept = (body + config.block - 1) // config.block * rank + prefix
        row = _up(kept, 16)
        scales = 4 * (in_features if config.x_scale == "channel" else 1)
    return _up(in_features * row, 16) + scales


register(
    ("draw_seed", _draw_seed, _fake_draw_seed),
    ("linear", _linear, _fake_linear),
    ("compress_activation", _compress_activation, _fake_compress_activation),
    ("backward_linear", _backward_linear, _fake_backward_linear),
)

draw_seed = torch.ops.hotcore.draw_seed.default
linear = torch.ops.hotcore.linear.default


def unseen(x: Tensor) -> bool:
    """Whether neither a subclass of Tensor nor a mode wants to see what is done with x."""
    return type(x) in PLAIN and torch._C._len_torch_dispatch_stack() == 0


def _at_once(x: Tensor) -> bool:
    """Whether nothing wants to see the operator itself: the dispatcher takes 5 to 10 us."""
    return (
        not torch.compiler.is_compiling()
        and (x.is_cuda or x.is_cpu)  # device.type takes three times as long
        and unseen(x)
    )


def compress_activation(x: Tensor, seed: Tensor, config: str) -> Tensor:
    """x ``[..., I]`` compressed, by ``torch.ops.hotcore.compress_activation`` or as it would be."""
    if _at_once(x):
        return _compress_activation(x, seed, config)
    saved: Tensor = torch.ops.hotcore.compress_activation.default(flat(x), seed, config)
    return saved


def backward_linear(
    gy: Tensor,
    weight: Tensor | None,
    saved: Tensor | None,
    saved_seed: Tensor | None,
    seed: Tensor,
    config: str,
    x_shape: torch.Size,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """g_x, g_w, g_b (None where the dtype is), by the operator or as it would be."""
    if _at_once(gy):
        outputs = new_gradients(gy, x_shape, dtypes)
        keys = keys_of(saved_seed, seed)
        backward(gy, weight, saved, x_shape[-1], parsed(config), keys, outputs)
        return outputs
    rows = gy.reshape(math.prod(x_shape[:-1]), gy.shape[-1])
    arguments = (rows, weight, saved, saved_seed, seed, config, x_shape[-1], *dtypes)
    gx, gw, gb = torch.ops.hotcore.backward_linear.default(*arguments)
    wants_gx, wants_gw, wants_gb = (dtype is not None for dtype in dtypes)
    return (
        gx.view(x_shape) if wants_gx else None,
        gw if wants_gw else None,
        gb if wants_gb else None,
    )
