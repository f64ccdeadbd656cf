"""Conversion of torch's objects for libhot: configurations, seeds, contexts, memory, scratch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _core, contexts
from ...config import HotConfig, Key
from .. import _compat
from .frozen_codes import FrozenCodes

to_dlpack: Any = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]  # ten times cheaper than Tensor.__dlpack__

SEEDS = 0x7FFF_FFFF_FFFF_FFFF
"""Upper bound of seeds: 0 <= seed < SEEDS."""
PLAIN_TYPES: Any = (Tensor, torch.nn.Parameter, FrozenCodes)
"""Types that override no operation of torch; other subclasses of Tensor may."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that HOT supports."""
_CPU = torch.device("cpu")


@functools.lru_cache(maxsize=256)
def parsed(json: str) -> HotConfig:
    """The configuration of its ``json``, the constant that a compiled graph can hold."""
    return HotConfig.from_json(json.replace("'", '"'))


# ---- seeds and keys ----


def seed_for(x: Tensor) -> Tensor:
    """Draw a seed, int64 ``[]``, in eager mode: on the CPU, or on x's device in a graph capture."""
    # With the generator of x's device every replay draws again; int64 by default.
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return torch.randint(SEEDS, (), device=x.device if captured else _CPU)


def key_of(seed: Tensor) -> Key:
    """The key of a seed: ``Key(0, seed)``; kernels read a seed on a CUDA device there."""
    if seed.is_meta or isinstance(seed, _compat.SYMBOLIC):
        return Key(0)
    if seed.is_cuda:
        return Key(0, counter=seed.data_ptr())
    return Key(0, int(seed.item()))


def keys_of(saved_seed: Tensor | None, seed: Tensor) -> tuple[Key, Key]:
    """Keys of the codes of x and of g_y; without ``saved_seed`` both are the layer's."""
    key = key_of(seed)
    return key if saved_seed is None or saved_seed is seed else key_of(saved_seed), key


# ---- contexts, memory, scratch ----


def context_for(x: Tensor) -> _core.CoreContext:
    """Context of x's device and stream. Raises NotImplementedError without a backend for it."""
    if x.is_cpu:  # device.type would make a string
        return contexts.cpu(torch.get_num_threads())
    if x.is_cuda:
        index = x.get_device()
        # Only the handle: torch.cuda.current_stream() would wrap it in an object.
        return contexts.cuda(index, _compat.current_stream(index), _sm_margin())
    raise NotImplementedError(f"x: no backend of hotcore for the device {x.device}")


def _sm_margin() -> int:
    # torch's margin of multiprocessors holds for hotcore's kernels, too.
    return _compat.sm_carveout() or 0


def teach(x: Tensor, config: str) -> None:
    """Make a configuration, and the context of x's device, known to the operators in C++."""
    handle, index = torch.get_num_threads(), -1
    if x.is_cuda:
        index = x.get_device()
        handle = _compat.current_stream(index)
    if config and contexts.is_admitted(index):
        settings = parsed(config)
        specs = (settings.spec, settings.forward_spec, settings.forward == "int8")
        _core.torch_learn(config, *specs, context_for(x), index, handle)


@functools.lru_cache(maxsize=4096)  # equal for all streams of a device
def _workspace_size(
    size_of: Callable[..., int], index: int, margin: int, arguments: tuple[Any, ...]
) -> int:
    return size_of(contexts.cuda(index, 0, margin), *arguments)


_NAMES = {
    "w": "weight",
    "saved": "the saved x",
    "quantized_weight": "codes of the weight",
    "quantized_input": "codes of x",
}
"""Names of libhot's arguments in errors, where they are other ones."""


def call(
    function: Callable[..., None], like: Tensor, scratch: tuple[Any, ...] = (), /, **arguments: Any
) -> None:
    """Call libhot on the device of ``like``. Every tensor that libhot reads or writes passes here.

    Nothing is done where no tensor has values, as in the fakes of operators. ``scratch`` is the
    function that knows the bytes of a workspace, and its arguments.

    torch may keep a minus sign as a bit beside the memory (``.imag`` of a conjugate). The tensor is
    then copied, because libhot cannot see the bit. A tensor without memory of its own is refused by
    name. Here that is a wrapper of other tensors; libhot refuses the null pointer of a freed one.
    """
    empty = _compat.SYMBOLIC
    if like.is_meta or isinstance(like, empty):
        for name, tensor in arguments.items():
            if isinstance(tensor, Tensor) and not (tensor.is_meta or isinstance(tensor, empty)):
                raise RuntimeError(
                    f"{_NAMES.get(name, name)}: on {tensor.device}, beside tensors without values "
                    f"on {like.device}; move all to one device"
                )
        return
    if scratch and like.is_cuda:  # on the CPU the binding allocates its own
        size = _workspace_size(scratch[0], like.get_device(), _sm_margin(), scratch[1:])
        if size:
            memory = torch.empty(size, dtype=torch.uint8, device=like.device)
            arguments["workspace"] = memory
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        try:  # the capsule holds the copy
            arguments[name] = to_dlpack(tensor.resolve_neg() if tensor.is_neg() else tensor)
        except (BufferError, RuntimeError) as error:
            raise RuntimeError(
                f"{_NAMES.get(name, name)}: a tensor of layout {tensor.layout} on {tensor.device} "
                f"has no memory that hotcore could read ({error})"
            ) from error
    context = contexts.cpu(torch.get_num_threads()) if like.is_cpu else context_for(like)
    function(context, **arguments)


def kept_weight(weight: Tensor, trained: bool) -> Tensor:
    """A weight for ``save_for_backward``: an alias of it if it is not trained, as a plain layer's.

    A checkpoint checks shapes after it has recomputed a region. ZeRO-3 has emptied the region's
    Parameters again before that check. torch makes an alias only of a tensor that requires grad.
    """
    return weight if trained else weight.detach()


def flat(x: Tensor) -> Tensor:
    """``[..., I]`` as ``[L, I]``."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def collapsible(x: Tensor) -> tuple[Tensor, int, int]:
    """``[..., I]`` for libhot (x itself or flattened), its number of tokens, and I."""
    shape = x.shape
    rank = len(shape)
    if rank == 2:
        return x, shape[0], shape[1]
    if rank == 0:
        raise ValueError("x: no dimensions; expected [..., I]")
    if not (2 < rank <= 4 and x.is_contiguous()):
        x = flat(x)
    return x, math.prod(shape[:-1]), shape[-1]


def dense(gy: Tensor) -> Tensor:
    """g_y as a dense tensor: the consumer of y may have made a sparse one."""
    return gy if gy.layout is torch.strided else gy.to_dense()


# ---- past the dispatcher ----


def bypasses_dispatcher(x: Tensor) -> bool:
    """Whether nothing intercepts an operator on x. The dispatcher would only cost 5 to 10 us."""
    return (
        not torch.compiler.is_compiling()
        and (x.is_cuda or x.is_cpu)  # device.type takes three times as long
        and type(x) in PLAIN_TYPES
        and not _compat.dispatch_modes()
    )


def product_bypasses_dispatcher(x: Tensor, weight: Tensor) -> bool:
    """Whether nothing intercepts an operator on x and weight, nor records it."""
    # torch.jit.trace would note an empty y, and nothing that fills it.
    return bypasses_dispatcher(x) and type(weight) in PLAIN_TYPES and not _compat.jit_tracing()
