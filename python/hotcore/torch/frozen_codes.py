"""``FrozenCodes``: bytes that stand for a weight, as a Parameter that is no array of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from . import _compat

Terms = tuple[float, "FrozenCodes"]
"""A sum of codes, times this in all; the codes that came last."""

_NEAR = 1e-5
"""By which the factors of an average may miss 1, as fp32 rounds them."""


def mutated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that a call of ``func`` writes, as far as its schema or its name tells.

    An operator's schema tells. So do those of the operator that a function or method of torch is
    named after: what ends with ``_`` writes its first argument, ``_foreach_`` a list of them. Any
    function writes ``out``, and with ``inplace`` its first argument.
    """
    yield from tensors(kwargs.get("out"))
    schema = getattr(func, "_schema", None)
    if schema is not None:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                at = args[index] if index < len(args) else kwargs.get(argument.name)
                yield from tensors(at)
        return
    first = args[0] if args else next(iter(kwargs.values()), None)  # nn.init's functions name it
    base = _name(func)
    ends = base.endswith("_") and not base.endswith("__")
    inplace = base.startswith("__i") and base.endswith("__") and base not in _NO_WRITES
    if ends or inplace or base in ("__setitem__", "__set__") or kwargs.get("inplace"):
        yield from tensors(first)


_NO_WRITES = ("__index__", "__int__", "__invert__", "__init__", "__iter__", "__init_subclass__")


def tensors(value: Any) -> Iterator[Any]:
    """Tensors of an argument: itself, or those of a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


class FrozenCodes(nn.Parameter):
    """Codes and scales of a frozen weight, uint8 ``[bytes]``: moved and saved, not computed with.

    Bytes of codes have no sums. So operations that would write numbers into them raise a
    RuntimeError. Codes may be copied from other codes of the same size. An average of codes (EMA,
    SWA) is the codes themselves, since frozen weights do not change: where the factors sum to 1,
    those that are averaged in are copied. What is read is a plain tensor; a view of the memory is
    guarded, too.
    """

    _factor: float
    """1, except between ``codes.mul_(d)`` and ``codes.add_(others, alpha=1 - d)``."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> FrozenCodes:
        """Guard ``data``, in place."""
        if requires_grad:
            refuse_gradients()
        return guarded(plain(data))

    def requires_grad_(self, requires_grad: bool = True) -> FrozenCodes:
        """Raise ValueError if this would change the setting."""
        if requires_grad:
            refuse_gradients()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenCodes:
        """Guarded codes of its own."""
        if id(self) not in memo:
            memo[id(self)] = FrozenCodes(plain(self).clone())
        found: FrozenCodes = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled with its guard."""
        return FrozenCodes, (plain(self),)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on the bytes, unless it would write numbers into them."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # hotcore's operators, which write nothing
            with _compat.without_subclasses():
                return func(*args, **kwargs)
        name = _name(func)
        if name == "__set__":
            return _assign(func, *args)
        if name == "detach" or (name == "__get__" and assigned(func) == "data"):
            return args[0]  # itself: what is written there is seen
        if name in _KEEP:
            func(*mapped(args, plain), **mapped(kwargs, plain))
            return args[0]
        if name.startswith("_foreach_"):
            return _each(name.removeprefix("_foreach_"), func, args, kwargs)
        if any(isinstance(t, FrozenCodes) for t in mutated(func, args, kwargs)):
            return _write(name, func, *args, **kwargs)
        if name == "__dlpack__":
            _refuse(name)
        found = func(*mapped(args, plain), **mapped(kwargs, plain))
        if isinstance(found, Tensor) and type(found) is Tensor:
            summed = _sum(func, args, kwargs)
            if summed is not None:
                average = found.as_subclass(_Average)
                average._terms = summed
                return average
            aliases = (t for t in tensors([*args, *kwargs.values()]) if isinstance(t, FrozenCodes))
            same = name in _COPIES or any(one_memory(found, t) for t in aliases)
            if found.dtype == torch.uint8 and same:
                return guarded(found)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found


_KEEP = ("share_memory_", "detach_")
"""What ends with ``_`` and writes no values."""
_COPIES = ("clone", "to", "cpu", "cuda")
"""What makes other codes."""


class _Average(Tensor):
    """Numbers computed from codes by a linear operation; only codes accept them."""

    _terms: Terms

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As in :class:`FrozenCodes`."""
        return FrozenCodes.__torch_function__(func, types, args, kwargs)


def guarded(codes: Tensor) -> FrozenCodes:
    """The same memory as a FrozenCodes."""
    made: FrozenCodes = Tensor._make_subclass(FrozenCodes, codes, False)
    made._factor = 1.0
    return made


def parameter(codes: Tensor) -> nn.Parameter:
    """Codes as a layer's Parameter: a FrozenCodes where torch.compile can follow it."""
    if _compat.traces_parameters():
        return FrozenCodes(codes)
    made = nn.Parameter(codes, requires_grad=False)
    guard(made)
    return made


def guard(codes: Tensor) -> None:
    """Guard a Parameter again, in place; what wraps another way (DTensor) stays."""
    if type(codes) is not nn.Parameter:
        return
    if _compat.traces_parameters():
        codes.__class__ = FrozenCodes
        codes._factor = 1.0  # type: ignore[attr-defined]  # it is one now
    else:  # a parent's requires_grad_() fails with a clear message
        setattr(codes, "requires_grad_", refuse_gradients)  # noqa: B010
        setattr(codes, "_hot_seen", (codes._version, _checksum(codes)))  # noqa: B010


def _checksum(codes: Tensor) -> Tensor | None:
    """A sum of the bytes, four at a time, on their device; None: there are none to read."""
    if codes.is_meta or _compat.symbolic(codes):
        return None
    return codes.detach().view(torch.int32).sum(dtype=torch.int64)


def _check_unwritten(codes: Tensor) -> None:
    """Raise RuntimeError where ordinary codes have been written with other bytes.

    For torch that cannot follow :class:`FrozenCodes`: a write raises the version, and only then are
    the bytes summed again (a broadcast of equal bytes, as DDP's, is no change).
    """
    version, checksum = getattr(codes, "_hot_seen", (codes._version, None))
    if version == codes._version:
        return
    now = _checksum(codes)
    if checksum is not None and now is not None and bool(checksum != now):
        _refuse("a write (an average of parameters?)")
    setattr(codes, "_hot_seen", (codes._version, now))  # noqa: B010


def plain(codes: Tensor) -> Tensor:
    """The bytes as a plain tensor, in the same memory; other tensors as they are."""
    if not isinstance(codes, FrozenCodes | _Average):
        return codes
    with _compat.without_subclasses():
        return Tensor.detach(codes)


def whole(codes: Tensor) -> Tensor:
    """:func:`plain` for a product.

    Raises RuntimeError where an average was begun and not ended, and where ordinary codes have been
    written.
    """
    if isinstance(codes, FrozenCodes) and abs(codes._factor - 1) > _NEAR:
        _refuse("mul_")
    if type(codes) is nn.Parameter:
        _check_unwritten(codes)
    return plain(codes)


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


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}: weight_codes are codes of a weight that is frozen in INT8, and no numbers to "
        "compute with; hot.thaw(model) makes plain Parameters of them, or leave out Parameters of "
        "torch.uint8"
    )


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same, with ``change`` of each tensor, also of those in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def one_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a plain tensor lies in the memory of another one."""
    if a.is_meta or b.is_meta:
        return False
    try:
        return a.untyped_storage().data_ptr() == plain(b).untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # no storage
        return False


def _terms(value: Any) -> Terms | None:
    if isinstance(value, FrozenCodes):
        return value._factor, value
    return value._terms if isinstance(value, _Average) else None


def _sum(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Terms | None:
    """The result of a linear operation on codes; None for any other call."""
    name = _name(func).strip("_").lstrip("ir")  # in place, reflected
    if name not in _LINEAR:
        return None
    given = [(_terms(t), t) for t in tensors([*args, *kwargs.values()])]
    codes = [terms[1] for terms, _ in given if terms is not None]
    numbers = [t for terms, t in given if terms is None]
    if len({c.shape for c in codes}) != 1 or any(t.numel() != 1 for t in numbers):
        return None

    def factor(scale: float) -> float:
        """What ``func`` makes of the factors, each times ``scale``."""

        def of(tensor: Tensor) -> Tensor:
            terms = _terms(tensor)
            if terms is None:
                return tensor.detach().reshape(()).to("cpu", torch.float64)
            return torch.tensor(scale * terms[0], dtype=torch.float64)

        return float(func(*mapped(args, of), **mapped(kwargs, of)))

    found = factor(1)
    if factor(2) != 2 * found:  # a number was added, or codes were multiplied
        return None
    # a - b keeps the codes of a; b may be the average.
    return found, codes[0] if name.startswith("sub") else codes[-1]


_LINEAR = frozenset(
    (
        *("mul", "multiply", "div", "divide", "truediv", "true_divide"),
        *("add", "sub", "subtract", "lerp", "addcdiv"),
    )
)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", "")).split(".")[0]


def assigned(func: Any) -> str:
    """The attribute of a ``__get__`` or ``__set__`` of Tensor."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _assign(func: Any, codes: Any, value: Any) -> None:
    """``codes.requires_grad = False`` and ``codes.grad = None`` are so already."""
    name = assigned(func)
    average = _terms(value)
    if name == "data" and isinstance(value, _Average) and average is not None:
        _write("copy_", func, codes, value)  # codes.data = d * codes.data + (1 - d) * others
    elif name == "data" and value.dtype == torch.uint8:
        with _compat.without_subclasses():
            func(codes, plain(value))
        codes._factor = 1.0
    elif name == "requires_grad":
        refuse_gradients(bool(value))
    elif not (name == "grad" and value is None):
        _refuse(name)


def _write(name: str, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A write into codes: of codes, as they are, or as an average."""
    target, source = (*args, None, None)[:2]
    found: Terms | None = None
    if name == "copy_":
        found = _terms(source)
        if found is None and isinstance(source, Tensor) and source.dtype == torch.uint8:
            found = (1.0, guarded(source))
    elif isinstance(target, FrozenCodes) and "out" not in kwargs:
        found = _sum(func, args, kwargs)
    if found is None or not isinstance(target, FrozenCodes):
        _refuse(name)
    factor, codes = found
    if codes.shape != target.shape:
        raise RuntimeError(f"{name}: {codes.numel()} bytes of codes; expected {target.numel()}")
    if abs(factor - 1) <= _NEAR:
        if not one_memory(plain(codes), target):
            plain(target).copy_(plain(codes))
        factor = 1.0
    elif name == "copy_":
        _refuse(name)
    target._factor = factor
    return target


def _each(name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A ``_foreach_`` function, one tensor after the other."""
    one = getattr(Tensor, name, None)
    if one is None:
        _refuse(func.__name__)

    def at(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, list | tuple) else value

    count = next(len(v) for v in (*args, *kwargs.values()) if isinstance(v, list | tuple))
    made = [
        one(*(at(v, i) for v in args), **{key: at(v, i) for key, v in kwargs.items()})
        for i in range(count)
    ]
    return None if name.endswith("_") else made
