"""The caller's arrays: their framework, their properties, and new arrays of the same framework.

No array is converted or copied. An unusable one raises an error that names the argument. An object
that is no array raises TypeError, a wrong dtype, layout or device ValueError, and a device without
a backend NotImplementedError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _core, contexts

Array = Any
"""NumPy, torch or CuPy array, or any object with ``__dlpack__`` (on CUDA this needs torch)."""

FLOATS = ("float32", "float16", "bfloat16")
_DLPACK_CPU, _DLPACK_CUDA = 1, 2  # DLDeviceType


class Kind:
    """One array framework, here NumPy; results for a ``foreign`` array go back to its framework."""

    name, title, bfloat16 = "numpy", "NumPy", False
    library: Any = np

    def __init__(self, foreign: Array = None) -> None:
        """Prepare results for this framework, or for that of ``foreign``."""
        self._from_dlpack = None
        if foreign is not None:
            self.name = "dlpack"
            if hasattr(foreign, "__array_namespace__"):
                namespace = foreign.__array_namespace__()
                self._from_dlpack = getattr(namespace, "from_dlpack", None)
            jax = sys.modules.get("jax")
            if jax is not None and isinstance(foreign, jax.Array):
                from_dlpack = jax.numpy.from_dlpack  # JAX may have several CPU devices
                self._from_dlpack = functools.partial(from_dlpack, device=foreign.device)

    def dlpack(self, array: Array) -> Any:
        """Return ``array`` in the form that ``_core`` takes."""
        return array

    def empty(self, shape: Sequence[int], dtype: str, device: int) -> Array:
        """Uninitialised array on CUDA device ``device``, or on the CPU (-1)."""
        return self.library.empty(tuple(shape), dtype=dtype)

    def stream(self, device: int) -> int:
        """Address of the framework's current stream of a CUDA device."""
        raise NotImplementedError

    def result(self, array: Array) -> Array:
        """Turn an array of :meth:`empty` into the caller's kind of array."""
        return array if self._from_dlpack is None else self._from_dlpack(array)

    def written(self, array: Array) -> None:
        """Tell the framework that the caller's ``array`` was written."""

    def view(self, array: Array, dtype: str) -> Array:
        """The bytes of a contiguous ``array`` as another dtype."""
        return array.view(dtype)


class _Torch(Kind):
    name, title, bfloat16 = "torch", "torch", True

    def __init__(self, foreign: Array = None) -> None:
        import torch

        super().__init__(foreign)
        self.library = torch
        # The capsule is ten times cheaper than the tensor's own __dlpack__.
        self._to_dlpack = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]
        self.dtypes = {
            name: getattr(torch, name) for name in (*FLOATS, "int8", "int32", "uint8", "int64")
        }

    def dlpack(self, array: Array) -> Any:
        return self._to_dlpack(array)

    def empty(self, shape: Sequence[int], dtype: str, device: int) -> Array:
        where = "cpu" if device < 0 else f"cuda:{device}"
        return self.library.empty(tuple(shape), dtype=self.dtypes[dtype], device=where)

    def stream(self, device: int) -> int:
        return int(self.library.cuda.current_stream(device).cuda_stream)

    def result(self, array: Array) -> Array:
        if self.name == "dlpack":
            # That framework does not know torch's stream: it may reuse an input's memory at once.
            self.library.cuda.current_stream(array.device).synchronize()
        return super().result(array)

    def written(self, array: Array) -> None:
        # Autograd refuses a backward that needs the values before.
        self.library.autograd.graph.increment_version(array)

    def view(self, array: Array, dtype: str) -> Array:
        return array.view(self.dtypes[dtype])


class _CuPy(Kind):
    name, title = "cupy", "CuPy"

    def __init__(self) -> None:
        super().__init__()
        self.library = sys.modules["cupy"]

    def empty(self, shape: Sequence[int], dtype: str, device: int) -> Array:
        with self.library.cuda.Device(device):
            return super().empty(shape, dtype, device)

    def stream(self, device: int) -> int:
        with self.library.cuda.Device(device):
            return int(self.library.cuda.get_current_stream().ptr)


@functools.cache
def _kind(kind: type[Kind]) -> Kind:
    """Return the one object of a framework. The first array of torch or CuPy imports it."""
    return kind()


_NUMPY_NAMES = {np.dtype(name): name for name in ("float32", "float16", "int8", "int32", "uint8")}


class Operand(NamedTuple):
    """An array argument with its properties, read once."""

    name: str
    array: Array
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    device: int  # CUDA device, or -1: the CPU

    @property
    def dlpack(self) -> Any:
        """The array for ``_core``. Raises ValueError for a tensor without its own memory."""
        try:
            return self.kind.dlpack(self.array)
        except RuntimeError as error:  # for example inside torch.func.vmap
            raise ValueError(f"{self.name}: {error}") from error

    def empty(self, shape: Sequence[int], dtype: str) -> Operand:
        """A new array of the same framework and device."""
        array = self.kind.empty(shape, dtype, self.device)
        return Operand("out", array, self.kind, tuple(shape), dtype, self.device)

    def float_dtype(self, dtype: Any, name: str) -> str:
        """Name of a dtype for :meth:`empty`; ``name`` is the argument's. Raises ValueError."""
        text = dtype_name(dtype, name, FLOATS)
        if text == "bfloat16" and not self.kind.bfloat16:
            raise ValueError(
                f"{name}: {self.kind.title} has no bfloat16; use float32 or torch tensors"
            )
        return text

    def workspace(self, size_of: Callable[..., int], *arguments: Any) -> Any:
        """Workspace for ``_core`` of so many bytes; None on the CPU: the binding allocates it."""
        size = 0 if self.device < 0 else size_of(self.context(), *arguments)
        if size == 0:
            return None
        return self.kind.dlpack(self.kind.empty((size,), "uint8", self.device))

    def context(self) -> _core.CoreContext:
        """The context for calls on this array."""
        if self.device < 0:
            return contexts.cpu()
        return contexts.cuda(self.device, self.kind.stream(self.device))


def operand(array: Array, name: str, dtypes: Sequence[str] = FLOATS) -> Operand:
    """Read the properties of an input array. Raises as the module's docstring says."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if isinstance(array, np.ndarray):
        source = _numpy_operand(array, name, _kind(Kind))
    elif torch is not None and isinstance(array, torch.Tensor):
        source = _torch_operand(torch, array, name, _kind(_Torch))
    elif cupy is not None and isinstance(array, cupy.ndarray):
        properties = (array.shape, array.dtype.name, array.device.id)
        source = Operand(name, array, _kind(_CuPy), *properties)
    else:
        source = _foreign_operand(array, name)
    if source.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {source.dtype}; expected {_listed(dtypes)}")
    return source


def output(array: Array, name: str, like: Operand, dtypes: Sequence[str] = FLOATS) -> Operand:
    """Read the properties of an output, which has ``like``'s framework and device."""
    target = operand(array, name, dtypes)
    if target.kind.name == "dlpack":
        raise ValueError(f"{name}: only NumPy, torch and CuPy arrays can be written")
    if target.kind is not like.kind:
        raise ValueError(
            f"{name}: a {target.kind.name} array; {like.name} is a {like.kind.name} array"
        )
    if target.device != like.device:
        places = [f"CUDA device {i}" if i >= 0 else "the CPU" for i in (target.device, like.device)]
        raise ValueError(f"{name}: on {places[0]}; {like.name} is on {places[1]}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")
    return target


def dtype_name(dtype: Any, name: str, dtypes: Sequence[str]) -> str:
    """Name of a dtype given as a string, a NumPy or a torch dtype. Raises ValueError."""
    text = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) and text not in dtypes:
        with contextlib.suppress(TypeError):
            text = np.dtype(dtype).name
    if text not in dtypes:
        raise ValueError(f"{name}: {dtype!r}; expected {_listed(dtypes)}")
    return text


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _numpy_operand(array: np.ndarray[Any, Any], name: str, kind: Kind) -> Operand:
    if not array.dtype.isnative:
        raise ValueError(f"{name}: byte-swapped dtype {array.dtype.str}; expected native bytes")
    dtype = _NUMPY_NAMES.get(array.dtype, array.dtype.name)
    if dtype == "bfloat16":  # a package's dtype: NumPy cannot export it
        raise ValueError(f"{name}: NumPy arrays of bfloat16 are not supported; use torch tensors")
    if not array.flags.aligned:
        items = f"{array.dtype.itemsize}-byte items"
        raise ValueError(f"{name}: data or strides are not aligned to the {items}")
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"{name}: a masked array would lose its mask; pass its filled() data")
    return Operand(name, array, kind, array.shape, dtype, -1)


def _torch_operand(torch: Any, array: Any, name: str, kind: Kind) -> Operand:
    if torch.jit.is_tracing():
        raise TypeError(f"{name}: traced by torch.jit, whose graph would lack this call")
    if array.layout is not torch.strided or array.is_nested:
        layout = "a nested tensor" if array.is_nested else f"layout {array.layout}"
        raise ValueError(f"{name}: {layout}; expected a strided tensor")
    if array.is_neg() or array.is_conj():
        raise ValueError(f"{name}: a lazily negated view; pass {name}.resolve_neg()")
    if array.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: requires grad, but this function has no derivative; pass {name}.detach(), "
            "or use hotcore.torch.linear"
        )
    if torch.autograd.forward_ad.unpack_dual(array).tangent is not None:
        raise ValueError(f"{name}: has a forward-mode tangent, but this function has no derivative")
    device = array.device
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name}: no backend for the device {device}")
    index = -1 if device.type == "cpu" else device.index
    dtype = str(array.dtype).removeprefix("torch.")
    return Operand(name, array, kind, tuple(array.shape), dtype, index)


def _foreign_operand(array: Any, name: str) -> Operand:
    jax_core = sys.modules.get("jax.core")
    if jax_core is not None and isinstance(array, jax_core.Tracer):
        raise TypeError(
            f"{name}: traced by JAX; expected an array with values. Inside jit, grad and vmap, use "
            "hotcore.jax.linear"
        )
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        raise TypeError(
            f"{name}: expected an array (NumPy, torch, CuPy, or anything with __dlpack__), got "
            f"{type(array).__name__}"
        )
    try:
        where = array.__dlpack_device__()[0]
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # deleted or sharded
        raise ValueError(f"{name}: a {type(array).__name__} on no one device: {error}") from error
    if where not in (_DLPACK_CPU, _DLPACK_CUDA):
        raise NotImplementedError(f"{name}: expected an array on the CPU or a CUDA device")
    if where == _DLPACK_CUDA:
        reader = f"{name}: torch reads a {type(array).__name__} on CUDA, but it"
        try:
            import torch
        except ImportError as error:
            raise NotImplementedError(f"{reader} is not installed; or pass a CuPy array") from error
        if not torch.cuda.is_available():
            raise NotImplementedError(f"{reader} sees no CUDA device")
    kind = (_Torch if where == _DLPACK_CUDA else Kind)(array)
    try:
        view = kind.library.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: {kind.title} cannot read this {type(array).__name__}: {error}"
        ) from error
    if where == _DLPACK_CUDA:
        return _torch_operand(kind.library, view, name, kind)
    return _numpy_operand(view, name, kind)


def needed(need: Collection[str], known: Sequence[str]) -> frozenset[str]:
    """Return the names in ``need``, one or several of ``known``. Raises ValueError, TypeError."""
    names = ", ".join(map(repr, known))
    try:
        wanted = frozenset([need] if isinstance(need, str) else need)
    except TypeError:
        raise TypeError(f"need: expected one or several of {names}, got {need!r}") from None
    if unknown := wanted - set(known):
        raise ValueError(f"need: {min(unknown, key=repr)!r} is not one of {names}")
    if not wanted:
        raise ValueError(f"need: expected at least one of {names}, got {need!r}")
    return wanted
