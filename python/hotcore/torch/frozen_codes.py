"""Codes of a frozen weight, which say themselves what they are: their format and their checksum.

A byte has no type that would tell codes of two formats apart. So a tail of 4-byte words follows the
codes and scales: 64 bits of a checksum, then zeros, as many as the format says. Codes of two
formats therefore never have one size. Every way of copying one tensor into another refuses such a
copy, and a layer sees the size of what has been put in the place of its codes. The checksum tells
codes from bytes that were computed, such as an average that was cast back.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from . import _compat

_MAGIC = 0x68_6F_74_63_6F_72_65_21
"""Added to the sum of the bytes: zeros are no codes."""
_WRITTEN = (
    "weight_codes: these bytes are not codes of a weight: something has computed with them (an "
    "average of parameters?), or they were never loaded. Load the weights again; averages must "
    "leave out Parameters of torch.uint8"
)


class Format(NamedTuple):
    """What the bytes of codes mean."""

    block: int
    """Block of their Hadamard transform along I."""
    convrot: bool = False
    """Whether they are of ``w D`` (:mod:`hotcore.torch.convrot`)."""

    def __str__(self) -> str:
        """Name in errors."""
        return f"ConvRot's groups of {self.block}" if self.convrot else f"blocks of {self.block}"


FORMATS = tuple(Format(2**k, convrot) for k in range(9) for convrot in (False, True))


def body_bytes(rows: int, columns: int, block: int) -> int:
    """Bytes of the codes and scales alone, which libhot reads."""
    width = (columns + block - 1) // block * block
    return rows * ((width + 15) // 16 * 16 + 4)


def sealed_bytes(rows: int, columns: int, block: int, convrot: bool) -> int:
    """Bytes with the tail: they rise with the block, and from a format to ConvRot's."""
    return body_bytes(rows, columns, block) + 4 * (2 * block.bit_length() + convrot + 1)


def format_of(size: int, rows: int, columns: int) -> Format | None:
    """The format of ``size`` bytes of codes; None: they are none of such a weight."""
    return next((f for f in FORMATS if sealed_bytes(rows, columns, *f) == size), None)


def sealed(body: Tensor, form: Format) -> Tensor:
    """Codes and scales, with their tail behind them."""
    words = 2 * form.block.bit_length() + form.convrot + 1
    if body.is_meta:
        return body.new_empty(body.numel() + 4 * words)
    return torch.cat((body, _checksum(body), body.new_zeros(4 * words - 8)))


def _checksum(body: Tensor) -> Tensor:
    """A sum of the bytes, four at a time, as 8 bytes on their device."""
    return (body.view(torch.int32).sum(dtype=torch.int64) + _MAGIC).view(1).view(torch.uint8)


def intact(codes: Tensor, size: int) -> bool:
    """Whether the checksum is that of the first ``size`` bytes, as far as they can be read."""
    if codes.is_meta or _compat.symbolic(codes):
        return True
    return torch.equal(_checksum(codes[:size]), codes[size : size + 8])


def check(codes: Tensor, size: int) -> None:
    """Raise RuntimeError where bytes have been written that are not codes.

    They are summed once for each state of torch's version counter and memory, which synchronises a
    GPU. A CUDA graph is not captured with codes that nothing has read before; then nothing is done.
    """
    state = (version(codes), codes.data_ptr())
    if getattr(codes, "_hot_seen", None) == state:
        return
    if codes.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not intact(codes, size):
        raise RuntimeError(_WRITTEN)
    setattr(codes, "_hot_seen", state)  # noqa: B010


def version(values: Tensor) -> int:
    """torch's count of writes."""
    try:
        return values._version
    except RuntimeError:  # of inference mode
        return 0


class FrozenCodes(nn.Parameter):
    """Codes and scales of a frozen weight, uint8 ``[bytes]``: moved and saved, not computed with.

    Its methods that would write numbers raise RuntimeError. :func:`check` finds other writes, since
    ``data`` has the version of the Parameter, and arrays of NumPy's are read-only. torch before
    2.13 cannot compile a subclass; there an ordinary Parameter holds the codes, and only writes
    that raise its version are found.
    """

    _hot_seen: Any = None
    """Version and address that :func:`check` has found intact."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> FrozenCodes:
        """The same memory."""
        refuse_gradients(requires_grad)
        made: FrozenCodes = Tensor._make_subclass(cls, plain(data), False)
        return made

    def detach(self) -> FrozenCodes:
        """The same memory and version, guarded."""
        made = FrozenCodes(self)
        made._hot_seen = self._hot_seen
        return made

    @property
    def data(self) -> Tensor:
        """The same memory and version; torch's own ``data`` would have a version of its own."""
        return plain(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != torch.uint8:
            _refuse("data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a property of C
        self._hot_seen = None

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array."""
        array = super().numpy(force=force)
        array.flags.writeable = False
        return array

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Take the bytes of other codes; raises RuntimeError for numbers."""
        if source.dtype != torch.uint8:
            _refuse("copy_")
        return super().copy_(source, non_blocking)

    def requires_grad_(self, requires_grad: bool = True) -> FrozenCodes:
        """Raise ValueError if this would change the setting."""
        refuse_gradients(requires_grad)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain Parameter, which the layer guards again."""
        return nn.Parameter(plain(self), False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain(codes: Tensor) -> Tensor:
    """The same memory and version as a plain tensor."""
    return Tensor.detach(codes)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}: weight_codes are codes of a weight that is frozen in INT8, and no numbers to "
        "compute with; leave out Parameters of torch.uint8, or hot.thaw(model) makes plain ones"
    )


def _refusal(name: str) -> Any:
    def refused(self: Tensor, *_: Any, **__: Any) -> NoReturn:
        _refuse(name)

    return refused


_KEEP = {"copy_", "detach_", "requires_grad_", "resize_", "set_", "share_memory_"}
NO_WRITES = {"__index__", "__int__", "__invert__", "__init__", "__iter__", "__init_subclass__"}
"""Methods whose names begin like those of ``+=``, and that write nothing."""
for _name in {*dir(Tensor)} - _KEEP - NO_WRITES:
    _ends = _name.endswith("_") and not _name.endswith("__")
    if _ends or _name.startswith("__i") or _name in ("__setitem__", "__dlpack__"):
        setattr(FrozenCodes, _name, _refusal(_name))


def parameter(codes: Tensor) -> nn.Parameter:
    """Codes as a layer's Parameter."""
    made = nn.Parameter(codes, requires_grad=False)
    guard(made)
    return made


def guard(codes: Any) -> None:
    """Guard a Parameter, in place; what wraps another way (DTensor) stays."""
    if type(codes) is nn.Parameter:
        setattr(codes, "_hot_seen", None)  # noqa: B010
        if _compat.traces_parameters():
            codes.__class__ = FrozenCodes
        else:  # a parent's requires_grad_() fails with a clear message
            setattr(codes, "requires_grad_", refuse_gradients)  # noqa: B010


def gathered(codes: Tensor) -> Tensor:
    """All of the codes that ``fully_shard`` has split; every process calls it."""
    gather = getattr(codes, "full_tensor", None)
    return codes if gather is None else gather()


def refuse_gradients(requires_grad: bool = True) -> None:
    """``requires_grad_`` of codes: Module.requires_grad_ calls it."""
    if requires_grad:
        raise ValueError(
            "requires_grad: the model has weights that are frozen in INT8; hot.thaw(model) makes "
            "them plain Parameters, which can be trained. Where peft's modules_to_save names a "
            "part of the model, thaw that part and call get_peft_model again"
        )
