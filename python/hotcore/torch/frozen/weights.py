"""Linear layers whose frozen weight is kept as codes alone; :func:`.freeze` makes them.

INT8 codes are those of the 8-bit forward; INT4 codes become such codes in each call. One uint8
Parameter, ``weight_codes``, holds them with their format and checksum
(:mod:`hotcore.torch.ops.frozen_codes`). It is never cast. ``weight`` is a :class:`FrozenWeight`.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...config import ConfigLike, HotConfig, as_config
from .. import _compat
from ..layers.modules import HotLinear, HotModule, become, own_forward
from ..ops import DTYPES, PLAIN_TYPES, frozen_codes, is_dtensor
from ..ops.codes import Frozen, body, dequantized, quantize_forward_weight, quantize_weight_int4
from ..ops.frozen_codes import Format, guard, refuse_gradients, version
from ..ops.linear import linear_from_json
from . import feature_sizes

_CODES = "weight_codes"
ALIGNMENT = 16
"""Alignment in bytes that libhot requires for codes."""
_READ_ONLY = (
    "the weight is frozen in codes, and this would write to a copy of it; hot.thaw(model) makes it "
    "a plain one, as weight.data = values does"
)
_SHARED = (
    "the weight is frozen in codes, and values written to memory that is shared so would be lost; "
    "weight.dequantized() is a copy, and hot.thaw(model) makes it a plain one"
)
_TIED = (
    "several layers have it, frozen in codes, and this would write to one of them; hot.thaw(model) "
    "makes it one plain Parameter"
)
_WRITTEN = (
    "hotcore.torch: weights that were frozen in codes have been written (adapters merged?); they "
    "are plain Parameters again"
)


def _properties(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_SIZES = {
    *_properties("shape", "dtype", "layout", "ndim", "grad", "grad_fn", "is_leaf", "itemsize"),
    *_properties("requires_grad", "is_sparse", "is_quantized", "is_nested", "nbytes"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.ndimension, Tensor.storage_offset),
}
"""Questions that are answered without values."""
_PLACES = {*_properties("device", "is_cuda", "is_cpu", "is_meta"), Tensor.get_device}
"""Questions that are answered by the codes."""


def _one_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a plain tensor lies in the memory of another one."""
    if a.is_meta or b.is_meta:
        return False
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
    except RuntimeError:  # no storage
        return False


class ReadOnly(Tensor):
    """Values of a frozen weight, in memory of their own: a call that writes them is a RuntimeError.

    Views of them are read-only, too, as are NumPy's arrays; other results are plain tensors.
    """

    @property
    def data(self) -> Tensor:
        """This tensor itself, which sees writes."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        self._written(value)

    def _written(self, values: Tensor) -> Tensor:
        raise RuntimeError(f"data: {_READ_ONLY}")

    def detach(self) -> Tensor:
        """Return this tensor itself, as :attr:`data` does."""
        return self

    def dequantized(self) -> Tensor:
        """A plain tensor with the values."""
        values: Tensor = _values(self)
        return values.clone()

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Raise ValueError if this would change the setting."""
        refuse_gradients(requires_grad)
        return self

    def _use_count(self) -> int:
        # torch.utils.swap_tensors asks before it changes anything.
        raise RuntimeError(f"swap_tensors: {_SHARED}")

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.dequantized()

    def __reduce_ex__(self, protocol: Any) -> Any:
        values: Any = self.dequantized()
        return values.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the call on copies of the values, and refuse it where it has written to them."""
        name = getattr(func, "__name__", "")
        if name == "__set__" and isinstance(args[0], ReadOnly):
            return _assign(func, *args)
        if name in _EXPORTS:
            raise RuntimeError(f"{name}: {_SHARED}")
        copies: list[Tensor] = []
        with torch.inference_mode(False):  # its tensors have no version
            args, kwargs = _values((args, kwargs or {}), copies)
        versions = [version(values) for values in copies]
        result = func(*args, **kwargs)
        if versions != [version(values) for values in copies]:
            raise RuntimeError(f"{name}: {_READ_ONLY}")
        return _read_only(result, copies)


def _thawing(name: str) -> Any:
    def change(weight: FrozenWeight, other: Any) -> Tensor:
        """Thaw the layer and change its weight; return it as a plain tensor."""
        return weight._written(getattr(weight.dequantized(), name)(other))

    return change


class FrozenWeight(ReadOnly):
    """The weight of a frozen layer, as other code sees it: dequantised when its values are read.

    Shape, dtype and device cost nothing; any operation dequantises. ``weight.data = values`` and
    ``weight.data += values`` (peft's merge) thaw the layer: it then holds a plain Parameter. Other
    writes raise a RuntimeError, also into views and arrays of it: they would go to a copy.
    """

    _layer: FrozenModule

    @staticmethod
    def of(layer: FrozenModule) -> FrozenWeight:
        """The weight of a layer."""
        # On the meta device, so that code past __torch_function__ finds no values to misread.
        like = torch.empty(layer.weight_features, dtype=layer.weight_dtype, device="meta")
        weight = layer.rows(like).as_subclass(FrozenWeight)
        weight._layer = layer
        return weight

    def dequantized(self) -> Tensor:
        """A plain tensor with the values."""
        weight = self._thawed()
        return self._layer.dequantized() if weight is None else weight.detach().clone()

    # "weight.data += values": Python then assigns the result to weight.data, which it is by then.
    __iadd__, __isub__ = _thawing("add_"), _thawing("sub_")
    __imul__, __itruediv__ = _thawing("mul_"), _thawing("div_")

    def _written(self, values: Tensor) -> Tensor:
        weight = self._thawed()
        if weight is None:
            if self._layer.weight_tied:
                raise RuntimeError(f"weight: {_TIED}")
            self._layer.thaw(self._layer.plain_weight(values))
            warnings.warn(_WRITTEN, stacklevel=3)
            weight = self._layer.weight
        elif weight.data_ptr() != values.data_ptr():
            weight.data = values.to(weight.dtype)
        return weight

    def _thawed(self) -> Tensor | None:
        """The plain weight of a layer that is not frozen any more."""
        return None if isinstance(self._layer, FrozenModule) else self._layer.weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer questions of size and place; the rest is read-only values."""
        if func in _PLACES:
            weight = args[0]._thawed()
            return func(args[0]._layer.weight_codes if weight is None else weight)
        if func in _SIZES:
            with _compat.without_subclasses():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


_EXPORTS = ("__dlpack__", "share_memory_", "untyped_storage", "storage", "data_ptr", "set_",
            "apply_", "map_", "map2_")  # fmt: skip
"""Functions that give access to memory, which other code may then write, or write unseen."""


def _assign(func: Any, weight: ReadOnly, value: Any) -> None:
    name = func.__self__.__name__  # the attribute of this __set__
    if name == "requires_grad":
        refuse_gradients(bool(value))
    elif not (name == "grad" and value is None):
        raise RuntimeError(f"{name}: {_READ_ONLY}")


def _values(value: Any, copies: list[Tensor] | None = None) -> Any:
    """Arguments with plain tensors for read-only ones, which are also put into ``copies``."""
    if isinstance(value, list | tuple):
        items = [_values(item, copies) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _values(item, copies) for key, item in value.items()}
    if not isinstance(value, ReadOnly):
        return value
    if isinstance(value, FrozenWeight):
        plain = value.dequantized()
    else:
        with _compat.without_subclasses():
            plain = Tensor.detach(value)
    if copies is not None:
        copies.append(plain)
    return plain


def _read_only(result: Any, copies: list[Tensor]) -> Any:
    """A result, with ReadOnly for tensors that share memory with ``copies``."""
    if isinstance(result, np.ndarray):
        if any(np.shares_memory(result, values.numpy()) for values in copies if values.is_cpu):
            result.flags.writeable = False
    elif type(result) is Tensor and any(_one_memory(result, values) for values in copies):
        return result.as_subclass(ReadOnly)
    elif type(result) in (list, tuple):
        return type(result)(_read_only(item, copies) for item in result)
    return result


class FrozenModule(HotModule, nn.Module):
    """A linear layer whose weight exists only as codes. Its classes come with :func:`.freeze`.

    With ``forward="int8"`` the INT8 product takes the codes. With a plain forward, and in eval mode
    unless ``forward_in_eval``, every call dequantises the weight. Backward dequantises it for g_x.
    """

    thawed: ClassVar[type[HotModule]]
    """The class with a plain weight."""
    hot_fields = (
        *HotModule.hot_fields,
        *("weight_dtype", "weight_block", "weight_features", "save_codes", "weight_tied"),
        *("weight_bits", "weight_measured"),
    )
    transposed: ClassVar[bool] = False
    """Whether ``weight`` is ``[I, O]``."""
    convrot: ClassVar[bool] = False
    """Whether the codes are ConvRot's."""
    weight_codes: nn.Parameter
    weight_dtype: torch.dtype
    """Dtype of the weight that the codes stand for."""
    weight_block: int
    """Block size of their Hadamard transform along I."""
    weight_features: tuple[int, int]
    """Output features O and input features I."""
    save_codes: bool
    """Whether ``state_dict`` has codes instead of the dequantised weight."""
    weight_tied: list[str]
    """Names of the layers that had this weight when it was frozen, one object for all of them;
    empty if the layer had it alone."""
    weight_bits: int
    """8 or 4."""
    weight_measured: bool
    """Whether the exponents come from x, and a new weight keeps them."""
    weight_exponents: Tensor
    """Only in INT4: those of the codes, int8 ``[I]``."""
    buffers_of_codes: ClassVar[tuple[str, ...]] = ("weight_exponents",)
    """Names of the buffers that a plain layer does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{type(self).__name__}: hot.freeze makes it of a {self.thawed.__name__}")

    @classmethod
    def rows(cls, weight: Tensor) -> Tensor:
        """A weight as ``[O, I]``, and such a matrix as a weight."""
        return weight.t() if cls.transposed else weight

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of ``weight``."""
        outs, ins = self.weight_features
        return (ins, outs) if self.transposed else (outs, ins)

    @property
    def frozen(self) -> Frozen:
        """The weight, as the operators take it. Raises ValueError: codes of another format."""
        codes: Tensor = self.weight_codes
        if not self._fits(codes):
            self.take_format(codes)
        if self.weight_bits == 4 and frozen_codes.written(codes, self.weight_exponents):
            self.on_frozen()
        weight = self._as_frozen(codes)
        # A tensor of functional_call. Operators check codes that remember it.
        if type(codes) is Tensor and not torch.compiler.is_compiling():
            body(weight, check=True)
        return weight

    def _as_frozen(self, codes: Tensor) -> Frozen:
        fields = (self.weight_block, *self.weight_features, self.weight_dtype)
        if self.weight_bits == 8:
            return Frozen(codes, *fields)
        held = type(codes) is not Tensor or torch.compiler.is_compiling()
        return Frozen(codes, *fields, 4, self.weight_exponents if held else self._exponents(codes))

    @property
    def _format(self) -> Format:
        return Format(self.weight_block, self.convrot, self.weight_bits)

    @property
    def _body_bytes(self) -> int:
        return self._format.body(*self.weight_features)

    def _fits(self, codes: Tensor) -> bool:
        """Whether codes are of the layer's format, by their size."""
        return codes.numel() == self._format.bytes(*self.weight_features)

    def take_format(self, codes: Tensor) -> None:
        """Raise ValueError for codes of another format; ConvRot's layer may take them."""
        form = frozen_codes.format_of(codes.numel(), *self.weight_features)
        got = f"{codes.numel()} bytes, of no format" if form is None else f"codes of {form}"
        raise ValueError(f"weight_codes: {got}; expected codes of {self._format}")

    def dequantized(self) -> Tensor:
        """The weight that the codes stand for, in its shape and dtype: a new tensor."""
        parts: Any = self.frozen
        codes, *fields = parts  # torch 2.6 traces no _replace
        return self.rows(dequantized(Frozen(frozen_codes.gathered(codes), *fields)))

    @property
    def weight(self) -> Tensor:
        """The weight without memory of its own (:class:`FrozenWeight`)."""
        if torch.compiler.is_compiling():  # the compiler drops it where no values are used
            return self.dequantized()
        return FrozenWeight.of(self)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise AttributeError(
            f"{self.layer_name or type(self).__name__}: weight is frozen in codes and cannot be "
            "replaced; hot.thaw(model) first, or assign the values: layer.weight.data = ..."
        )

    @property
    def config(self) -> Any:
        """The layer's configuration; may be set, with the same ``forward_block``."""
        return self._config

    @config.setter
    def config(self, value: ConfigLike) -> None:
        wanted = as_config(value)
        if wanted.forward_block != self.weight_block:
            raise ValueError(
                f"config: forward_block {wanted.forward_block}; the weight is frozen in codes of "
                f"blocks of {self.weight_block}. hot.thaw(model) first"
            )
        HotModule.config.fset(self, wanted)  # type: ignore[attr-defined]  # a property has it

    def _named_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not isinstance(x, Tensor):
            return self._recorded(x)
        return super()._named_product(x, weight, bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain = not self.training and self._plain_in_eval
        return linear_from_json(x, self.frozen, bias, "" if plain else self._config_json)

    # ---- to and from a plain weight ----

    @classmethod
    def encode(cls, rows: Tensor, config: HotConfig, exponents: Tensor | None = None) -> Tensor:
        """The codes of a weight ``[O, I]``, with their format: INT4 where there are exponents."""
        if exponents is None:
            codes, bits = quantize_forward_weight(rows, config), 8
        else:
            codes, bits = quantize_weight_int4(rows, exponents, config), 4
        return frozen_codes.sealed(codes, Format(config.forward_block, cls.convrot, bits))

    def on_frozen(self) -> None:
        """Make the layer's buffers from its codes, after each change of these."""
        if self.weight_bits == 8 or isinstance(self.weight_codes, _compat.SYMBOLIC):
            return
        codes = frozen_codes.gathered(self.weight_codes)
        exponents = self._exponents(codes).clone()
        if not (codes.is_meta or frozen_codes.intact(codes, self._body_bytes)):
            exponents.zero_()  # to_empty's codes have no values
        elif codes is self.weight_codes:
            frozen_codes.remember(codes, exponents)  # the first call may be a trace
        self.register_buffer("weight_exponents", exponents, persistent=False)

    def _exponents(self, codes: Tensor) -> Tensor:
        return frozen_codes.exponents_of(codes[: self._body_bytes], self.weight_features[1])

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a Parameter; refuses a DTensor, and the weight under another name."""
        if is_dtensor(param):
            raise NotImplementedError(
                f"{self.layer_name or type(self).__name__}: its weight is frozen in codes, which "
                "tensor parallel plans cannot split; leave the layer out, or hot.thaw(model) first"
            )
        if name == "weight":
            type(self).weight.fset(self, param)  # type: ignore[attr-defined]  # a property has it
        if isinstance(param, ReadOnly):
            raise RuntimeError(
                f"{self.layer_name or type(self).__name__}: {name}: the weight is frozen in codes, "
                "and cannot be pruned or reparametrised; hot.thaw(model) first"
            )
        super().register_parameter(name, param)
        if name == _CODES:
            guard(param)

    def plain_weight(self, values: Tensor | None = None) -> nn.Parameter:
        """A plain weight, not trained. Raises ValueError where the layer cannot have it."""
        if type(self.weight_codes) not in PLAIN_TYPES:
            kind = type(self.weight_codes).__name__
            raise ValueError(f"weight: its codes are a {kind}; undo fully_shard before thawing it")
        if why := own_forward(self):
            raise ValueError(f"weight: its layer cannot be thawed: {why}; undo that first")
        weight = (self.dequantized() if values is None else _values(values)).contiguous()
        if (shape := tuple(weight.shape)) != self.weight_shape:
            raise ValueError(f"weight: shape {shape}; expected {self.weight_shape}")
        return nn.Parameter(weight, requires_grad=False)

    @classmethod
    def freeze(cls, layer: Any, codes: nn.Parameter, **fields: Any) -> None:
        """Make a layer of :attr:`thawed` one of this class; ``fields`` are of ``hot_fields``."""
        weight = layer._parameters["weight"]
        _swap(layer, "weight", _CODES, codes)
        fields |= {"weight_dtype": weight.dtype, "weight_features": tuple(cls.rows(weight).shape)}
        become(layer, cls, {"weight_block": layer.config.forward_block, **fields})
        layer.on_frozen()

    def thaw(self, weight: nn.Parameter) -> None:
        """Become the layer with this :meth:`plain_weight`, in place."""
        _swap(self, _CODES, "weight", weight)
        for name in self.buffers_of_codes:
            self._buffers.pop(name, None)
        # A new set: preserve_state restores the old one.
        kept = self._non_persistent_buffers_set.difference(self.buffers_of_codes)
        self._non_persistent_buffers_set = kept
        become(self, self.thawed)

    # ---- as a module ----

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the codes; a cast changes the dtype of the weight that they stand for."""
        like = torch.empty(0, dtype=self.weight_dtype, device=self.weight_codes.device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_dtype = fn(like).dtype
        guard(self.weight_codes)
        if type(self.weight_codes) in PLAIN_TYPES:  # parts of a sharded one have been moved alike
            self.on_frozen()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set requires_grad of the bias. Raises ValueError if the weight would be trained."""
        refuse_gradients(requires_grad)
        return super().requires_grad_(requires_grad)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the module and guard its codes, after a copy, too."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        guard(self.weight_codes)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the plain layer's keys, or those of the codes."""
        state: OrderedDict[str, Any] = OrderedDict()
        super()._save_to_state_dict(state, prefix, keep_vars)
        if self.save_codes:
            if not keep_vars:
                state[prefix + _CODES] = frozen_codes.plain(state[prefix + _CODES])
        else:
            # On the CPU: a GPU that holds the codes may not have room for all weights at once.
            del state[prefix + _CODES]
            weight = self.dequantized().contiguous()
            state[prefix + "weight"] = weight if self.weight_codes.is_meta else weight.cpu()
            state.move_to_end(prefix + "weight", last=False)
        destination.update(state)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load a plain weight, which is quantised, or codes."""
        local_metadata, strict, missing_keys, unexpected_keys, error_msgs = rest
        state = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            if (codes := self._codes_from(state, prefix, assign)) is not None:
                state[prefix + _CODES] = frozen_codes.split_as(codes, self.weight_codes)
                self._make_room(codes, assign)
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f"While loading {prefix}weight: {error}")
            state[prefix + _CODES] = self.weight_codes.detach()
        missing: list[str] = []
        common = (local_metadata, strict, missing, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state, prefix, *common)
        plain = {prefix + _CODES: prefix + "weight"}
        missing_keys += [plain.get(key, key) for key in missing]
        guard(self.weight_codes)
        self.on_frozen()

    def _codes_from(self, state: dict[str, Any], prefix: str, assign: bool) -> Tensor | None:
        """Take the weight out of ``state``, as codes; None where it has none. Raises ValueError."""
        codes: Tensor | None = state.get(prefix + _CODES)
        if codes is self._parameters[_CODES] and prefix + "weight" in state:
            # torch.distributed.checkpoint puts the model's own Parameters beside the loaded values.
            del state[prefix + _CODES]
            codes = None
        if codes is not None:  # a weight beside them is an unexpected key
            if codes.dtype != torch.uint8:
                raise ValueError(f"codes of dtype {codes.dtype}; expected torch.uint8")
            if not self._fits(codes):
                self.take_format(codes)
            if type(codes) in PLAIN_TYPES:
                body(self._as_frozen(codes), check=True)
            aligned = codes.is_meta or codes.data_ptr() % ALIGNMENT == 0
            return codes if aligned or not assign else codes.clone()
        weight = state.pop(prefix + "weight", None)
        if weight is None:
            return None
        if (shape := tuple(weight.shape)) != self.weight_shape:
            raise ValueError(f"size mismatch: shape {shape}; expected {self.weight_shape}")
        if not weight.is_floating_point():
            raise ValueError(
                f"dtype {weight.dtype}; expected floating-point values, or codes under {_CODES} "
                "(save_codes=True, or convrot=True for ConvRot's)"
            )
        weight = _values(weight).detach()
        if assign:
            if weight.dtype not in DTYPES:
                raise ValueError(f"dtype {weight.dtype}; expected one of {DTYPES}")
            self.weight_dtype = weight.dtype
        here = self.weight_codes.device
        weight = weight.to(weight.device if assign or here.type == "meta" else here)
        if self.weight_dtype in DTYPES:
            weight = weight.to(self.weight_dtype)
        rows = self.rows(weight)
        return self.encode(rows, self._config, self._exponents_for(rows))

    def _exponents_for(self, rows: Tensor) -> Tensor | None:
        """Exponents of a weight that replaces the layer's.

        They are the layer's own if these come from x, or if the weight's differ by a step at most.
        A dequantised weight thus gets nearly its codes again.
        """
        if self.weight_bits == 8:
            return None
        own, new = self.weight_exponents, feature_sizes.exponents(feature_sizes.of_columns(rows))
        if own.is_meta or rows.is_meta:
            return new
        own = own.to(rows.device)
        return own if self.weight_measured or bool(((own.int() - new).abs() <= 1).all()) else new

    def _make_room(self, codes: Tensor, assign: bool) -> None:
        """Allocate memory for codes of another format; layers that share it see them, too."""
        old = self.weight_codes
        if type(old) not in PLAIN_TYPES or old.shape == codes.shape:
            return
        empty = torch.empty(codes.shape, dtype=codes.dtype, device=old.device)
        if assign:
            self._parameters[_CODES] = frozen_codes.parameter(empty)
        else:
            old.data = empty

    def extra_repr(self) -> str:
        """The text of the layer with a plain weight, and ``weight=INT8`` or ``INT4``."""
        return f"{super().extra_repr()}, weight=INT{self.weight_bits}"


def plain_weights(layers: Iterable[FrozenModule]) -> dict[FrozenModule, nn.Parameter]:
    """A plain weight for each layer; layers that had one weight get one. Errors name the layer.

    Warns if only some of the layers that had one weight are among ``layers``, or if they have
    several by now (``load_state_dict(assign=True)``).
    """
    by_owner: dict[int, nn.Parameter] = {}
    ties = Counter[int]()
    weights = {}
    firsts: dict[tuple[int, Format], Tensor] = {}
    for layer in layers:
        codes, tied = layer.weight_codes, layer.weight_tied
        owner = id(tied or codes)
        first = firsts.setdefault((owner, layer._format), codes)
        if first is not codes and not torch.equal(first, codes):
            owner = id(codes)
        ties[owner] += 1
        try:
            if owner not in by_owner:
                with torch.inference_mode(False):  # whose tensors no training can take
                    by_owner[owner] = layer.plain_weight()
            weights[layer] = by_owner[owner]
        except (ValueError, RuntimeError) as error:
            layer.prefix_layer_name(error)
            raise
    apart = [names for x in weights if ties[id(names := x.weight_tied)] < len(names)]
    if apart:
        warnings.warn(
            f"hotcore.torch: {', '.join(apart[0])} had one weight, and not all of them are thawed "
            "or have it still; those that are have one of their own now",
            stacklevel=3,
        )
    return weights


def _swap(layer: nn.Module, old: str, name: str, parameter: nn.Parameter) -> None:
    """Replace a Parameter by another; their order stays."""
    items = [(name, parameter) if k == old else (k, p) for k, p in layer._parameters.items()]
    layer._parameters.clear()
    layer._parameters.update(items)


class HotFrozenLinear(FrozenModule, HotLinear):
    """A HotLinear whose frozen weight is kept as codes alone; :func:`.freeze` makes it."""

    thawed = HotLinear

    def forward(self, input: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``; see :func:`.freeze`."""
        return self._named_product(input, self.weight_codes, self.bias)
