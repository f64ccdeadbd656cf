"""Codes of a frozen weight, with a tail that tells their format and holds their checksum.

The tail stands behind the codes and scales: 64 bits of a checksum, then zeros, in all as many bytes
as the format says. Codes of two formats therefore never have one size. The checksum tells codes
from computed bytes, such as an average that was cast back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ... import _core
from .. import _compat

_MAGIC = 0x68_6F_74_63_6F_72_65_21
"""Added to the sum of the bytes: zeros are no codes."""
_WRITTEN = (
    "weight_codes: these bytes are not codes of a weight: something has computed with them (an "
    "average of parameters?), or they were never loaded. Load the weights again; averages must "
    "leave out Parameters of torch.uint8"
)
_OTHERS = (
    "weight_codes: these codes have other sizes of x's features than the layer. load_state_dict "
    "takes both; freeze every process's model with the same inputs"
)
_DATA: Any = Tensor.data  # a property of C, whose type has no setter


GROUP = 32
"""Values along I that share a step in INT4."""


STEPS = 4
"""Steps of an exponent from a power of two to the next."""


class Format(NamedTuple):
    """Format of codes: the parameters of the transform and quantisation that made them."""

    block: int
    """Block size of their Hadamard transform along I."""
    convrot: bool = False
    """Whether they are of ``w D`` (:mod:`hotcore.torch.frozen.convrot`)."""
    bits: int = 8
    """Bits of a code: 8, or 4 with steps of groups and exponents of features."""

    @property
    def tail(self) -> int:
        """Bytes of the tail.

        They rise with the block, and from a format to ConvRot's. INT4's are odd multiples of 2, so
        that no body of INT8, which is a multiple of 4, can make up for them.
        """
        return 4 * (2 * self.block.bit_length() + self.convrot + 1) + 2 * (self.bits == 4)

    def body(self, rows: int, columns: int) -> int:
        """Bytes of the codes and scales, in INT4 also of the exponents; sizes may be symbolic."""
        if self.bits == 8:
            return rows * (padded(columns, self.block) + 4)
        return up(int4_bytes(rows, columns, self.block), 16) + up(columns, 16)

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of the codes and scales with their tail."""
        return self.body(rows, columns) + self.tail

    def __str__(self) -> str:
        if self.convrot:
            return f"ConvRot's groups of {self.block}"
        return f"blocks of {self.block}" + " in INT4" * (self.bits == 4)


FORMATS = tuple(
    Format(2**k, *kind) for k in range(9) for kind in ((False, 8), (True, 8), (False, 4))
)


def up(size: int, multiple: int) -> int:
    """The size, rounded up to a multiple; both may be symbolic."""
    return (size + multiple - 1) // multiple * multiple


def padded(columns: int, block: int) -> int:
    """Codes of a row of so many features; sizes may be symbolic."""
    return up(up(columns, block), 16)


def int4_bytes(rows: int, columns: int, block: int) -> int:
    """Bytes of INT4 codes, row scales and steps of groups."""
    width = padded(columns, block)
    return rows * (width // 2 + 4 + width // GROUP)


def exponents_of(body: Tensor, columns: int) -> Tensor:
    """Exponents of the features, an int8 view ``[columns]`` of INT4's bytes."""
    begin = body.numel() - up(columns, 16)
    return body[begin : begin + columns].view(torch.int8)


def format_of(size: int, rows: int, columns: int) -> Format | None:
    """The format of ``size`` bytes of codes; None: they are none of such a weight."""
    return next((f for f in FORMATS if f.bytes(rows, columns) == size), None)


def sealed(body: Tensor, form: Format) -> Tensor:
    """Codes and scales, with their tail behind them."""
    if body.is_meta:
        return body.new_empty(body.numel() + form.tail)
    return torch.cat((body, _checksum(body), body.new_zeros(form.tail - 8)))


def _checksum(body: Tensor) -> Tensor:
    """A sum of the bytes, four at a time, as 8 bytes on their device."""
    return (body.view(torch.int32).sum(dtype=torch.int64) + _MAGIC).view(1).view(torch.uint8)


def check(codes: Any, size: int, exponents: Tensor | None = None) -> None:
    """Raise RuntimeError where the first ``size`` bytes do not have the checksum behind them.

    They must also hold the ``exponents``, by which x is divided. The bytes are summed once for each
    state of torch's version counter and memory, which synchronises a GPU. While a CUDA graph is
    captured, or where there are no values, nothing is checked.
    """
    if _known(codes, exponents) or _captured(codes):
        return
    codes._hot_seen = None  # what C++ knows of them is forgotten first
    if not (codes.is_meta or isinstance(codes, _compat.SYMBOLIC)):
        if not intact(codes, size):
            raise RuntimeError(_WRITTEN)
        if exponents is not None:
            held = exponents_of(codes[:size], exponents.numel())
            if not torch.equal(held, exponents):
                raise RuntimeError(_OTHERS)
    remember(codes, exponents)


def remember(codes: Any, exponents: Tensor | None) -> None:
    """Let :func:`check` take guarded codes that were found intact, until they change."""
    known = None
    if not (codes.is_meta or isinstance(codes, _compat.SYMBOLIC)):
        known = _known_to_cpp(codes, exponents)
    codes._hot_seen = (version(codes), codes.data_ptr(), exponents, known)


class KnownCodes:
    """Codes that the operators in C++ take as they are, for as long as this object lives."""

    key = 0

    def __del__(self, forget: Callable[[int], None] = _core.torch_forget_codes) -> None:
        forget(self.key)  # the memory may serve others

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy knows nothing


def _known_to_cpp(codes: Tensor, exponents: Tensor | None) -> KnownCodes | None:
    """Let the operators in C++ take codes that were found intact; None where they cannot."""
    if codes.is_inference() or not hasattr(torch.ops.hotcore, "know_codes"):  # without a version
        return None
    known = KnownCodes()
    known.key = torch.ops.hotcore.know_codes.default(codes, exponents)
    return known


def _known(codes: Any, exponents: Tensor | None) -> bool:
    """Whether :func:`check` has seen these bytes, together with the exponents."""
    seen = getattr(codes, "_hot_seen", None)
    if seen is None or seen[:2] != (version(codes), codes.data_ptr()):
        return False
    return exponents is None or exponents is seen[2]


def _captured(codes: Tensor) -> bool:
    return codes.is_cuda and torch.cuda.is_current_stream_capturing()


def written(codes: Any, exponents: Tensor) -> bool:
    """Whether guarded codes may hold other exponents: :func:`check` has not seen both together."""
    if torch.compiler.is_compiling() or not hasattr(codes, "_hot_seen"):
        return False
    return not (_captured(codes) or _known(codes, exponents))


def intact(codes: Tensor, size: int) -> bool:
    """Whether the first ``size`` bytes have their checksum behind them."""
    return torch.equal(_checksum(codes[:size]), codes[size : size + 8])


def version(values: Tensor) -> int:
    """torch's count of writes."""
    try:
        return values._version
    except RuntimeError:  # of inference mode
        return 0


class FrozenCodes(nn.Parameter):
    """Codes and scales of a frozen weight, uint8 ``[bytes]``: moved and saved, not computed with.

    Methods that would write numbers raise RuntimeError. :func:`check` finds other writes, because
    ``data`` has the version of the Parameter. NumPy's arrays of it are read-only. Older torch than
    2.13 cannot compile a subclass. There an ordinary Parameter holds the codes, and only writes
    that raise its version are found.
    """

    _hot_seen: Any = None
    """Version, address, exponents that :func:`check` has found intact; whether C++ knows them."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> FrozenCodes:
        """Guard the memory of ``data``."""
        refuse_gradients(requires_grad)
        codes: FrozenCodes = Tensor._make_subclass(cls, plain(data), False)
        return codes

    def detach(self) -> FrozenCodes:
        """An alias, which is guarded, too."""
        alias = FrozenCodes(self)
        alias._hot_seen = self._hot_seen and self._hot_seen[:3]
        return alias

    @property
    def data(self) -> Tensor:
        """An alias with the same version; torch's own ``data`` would have a version of its own."""
        return plain(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != torch.uint8:
            _refuse("data")
        _DATA.__set__(self, value)
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
        """Pickle it as a plain Parameter, which the layer guards again."""
        parameter: Any = nn.Parameter(plain(self), False)
        return parameter.__reduce_ex__(protocol)


def plain(codes: Tensor) -> Tensor:
    """An alias of codes, with the same version, as a plain tensor."""
    return Tensor.detach(codes)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}: weight_codes are codes of a weight that is frozen in codes, and no numbers to "
        "compute with; leave out Parameters of torch.uint8, or hot.thaw(model) makes plain ones"
    )


def _refusal(name: str) -> Any:
    return lambda self, *_, **__: _refuse(name)


_ALLOWED = {"copy_", "detach_", "requires_grad_", "resize_", "set_", "share_memory_"}
for _name in {*dir(Tensor)} - _ALLOWED:
    _ends = _name.endswith("_") and not _name.endswith("__")
    _operator = _name.startswith("__i") and hasattr(Tensor, f"__{_name[3:]}")  # __iadd__, __add__
    if _ends or _operator or _name in ("__setitem__", "__dlpack__"):
        setattr(FrozenCodes, _name, _refusal(_name))


def parameter(codes: Tensor) -> nn.Parameter:
    """Codes as a layer's Parameter."""
    guarded = nn.Parameter(codes, requires_grad=False)
    guard(guarded)
    return guarded


def guard(codes: Any) -> None:
    """Guard a Parameter, in place; a wrapper of another kind (DTensor) stays."""
    plain_parameter = type(codes) is nn.Parameter
    if plain_parameter:
        codes._hot_seen = None
        if _compat.traces_parameters():
            codes.__class__ = FrozenCodes
        else:  # a parent's requires_grad_() fails with a clear message
            codes.requires_grad_ = refuse_gradients


def gathered(codes: Tensor) -> Tensor:
    """All of the codes that ``fully_shard`` has split; every process calls it."""
    gather = getattr(codes, "full_tensor", None)
    return codes if gather is None else gather()


def split_as(codes: Tensor, like: Any) -> Tensor:
    """All of the codes, which every process has, split as ``fully_shard`` has split ``like``."""
    if hasattr(codes, "full_tensor") or not hasattr(like, "full_tensor"):
        return codes
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    whole = DTensor.from_local(codes, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


def refuse_gradients(requires_grad: bool = True) -> None:
    """Raise ValueError where codes are to be trained; ``Module.requires_grad_`` calls it."""
    if requires_grad:
        raise ValueError(
            "requires_grad: the model has weights that are frozen in codes; hot.thaw(model) makes "
            "them plain Parameters, which can be trained. Where peft's modules_to_save names a "
            "part of the model, thaw that part and call get_peft_model again"
        )
