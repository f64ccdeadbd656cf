"""``HotLinear`` and ``HotConv2d``: the modules of ``torch.nn`` whose backward is HOT."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ConfigLike, HotConfig, as_config
from . import _compat
from .ops.conv import conv2d_from_json
from .ops.linear import linear_from_json

_Hot = TypeVar("_Hot", bound="HotModule")


class Changed:
    """Base of the classes that :func:`become` gives to modules."""

    plain: ClassVar[type[nn.Module]]
    """The class that this one replaces."""
    hot_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes of an instance that the plain class does not have."""


class HotModule(Changed):
    """Base of the HOT modules: a configuration, and conversion from the plain class."""

    hot_fields: ClassVar[tuple[str, ...]] = (
        *("_config", "_config_json", "_plain_in_eval", "defer", "layer_name"),
    )
    defer: bool = False
    """For linear layers in compiled graphs. True lets the compiler decide when x is compressed: it
    keeps the codes, or has backward compress an x that is available there anyway (a norm of a kept
    tensor), which keeps the fewest bytes and costs another pass. False keeps the codes."""
    layer_name: str = ""
    """The layer's name in the converted model, for error messages."""
    _config: HotConfig
    _config_json: str
    _plain_in_eval: bool = True
    """Whether it is plain in eval mode."""

    @property
    def config(self) -> HotConfig:
        """The layer's configuration; may be set."""
        return self._config

    @config.setter
    def config(self, value: ConfigLike) -> None:
        self._config = as_config(value)
        self._config_json = self._config.json  # compiled graphs hold it as a constant
        self._plain_in_eval = self.plain_in_eval(self, self._config)

    @staticmethod
    def plain_in_eval(module: Any, config: HotConfig) -> bool:
        """Whether ``module`` with this configuration has no 8-bit forward in eval mode."""
        return not config.forward_in_eval

    @classmethod
    def from_plain(cls: type[_Hot], module: nn.Module, config: ConfigLike = "default") -> _Hot:
        """Make ``module`` a layer of this class, in place; it keeps its Parameters and hooks.

        Raises TypeError unless ``module`` is exactly of class :attr:`plain` (or this one): the
        additions of a subclass would be lost. Raises ValueError where calls would not run the
        forward of this class: ``module`` has a ``forward`` of its own that is not accelerate's.
        """
        if type(module) not in (cls.plain, cls):
            found = type(module).__name__
            raise TypeError(f"module: expected a plain {cls.plain.__name__}, got {found}")
        if why := own_forward(module):
            raise ValueError(f"module: {why}")
        settings = as_config(config)
        become(module, cls)
        assert isinstance(module, cls)
        module.config = settings
        return module

    @property
    def runs_plain(self) -> bool:
        """Whether it is now the plain layer: in eval mode, unless its 8-bit forward is kept."""
        return self._plain_in_eval and not self.training  # type: ignore[attr-defined]  # a module has it

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer that :attr:`config` says, in training and in eval mode."""
        return linear_from_json(x, weight, bias, self._config_json, self.defer)

    def _named_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same; errors begin with the layer's name."""
        try:
            return self._product(x, weight, bias)
        except (ValueError, RuntimeError) as error:
            self.prefix_layer_name(error)
            raise

    def prefix_layer_name(self, error: Exception) -> None:
        """Put the layer's name, if it has one, before the error's message."""
        if self.layer_name:
            error.args = (f"layer {self.layer_name}: {error}",)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load the plain layer's keys. Codes of a frozen weight are an error with the remedy."""
        _, strict, *_, errors = rest
        unfrozen = "weight_codes" not in vars(self)["_parameters"]
        if strict and unfrozen and f"{prefix}weight_codes" in state_dict:
            errors.append(
                f"{prefix}weight_codes: codes of a weight that is frozen in INT8, for a plain one; "
                "call hot.freeze_int8(model) before load_state_dict"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]  # a module has it

    def extra_repr(self) -> str:
        """The text of the plain module, the recipe and what differs from it."""
        if not isinstance(self, HotModule):  # torchao's quantize_ keeps the method through revert()
            return str(type(self).extra_repr(self))
        own: str = super().extra_repr()  # type: ignore[misc]
        return f"{own}, config={self.config}" if own else f"config={self.config}"

    def __prepare_scriptable__(self) -> Any:
        """Refuse ``torch.jit.script``.

        Returning a plain module here would put it into the caller's model as well.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script is not supported; script a copy of the model "
            "after revert(), trace it in eval mode, or use torch.compile to train"
        )

    def _replicate_for_data_parallel(self) -> Any:
        # The replicas' threads would draw seeds from one generator in an undefined order.
        raise NotImplementedError(
            f"{type(self).__name__}: torch.nn.DataParallel is not supported; use "
            "torch.nn.parallel.DistributedDataParallel"
        )


class HotLinear(HotModule, nn.Linear):
    """``nn.Linear`` with the same parameters and state_dict keys, trained through HOT.

    In eval mode it is ``nn.Linear``: plain forward, plain autograd. In training mode the forward is
    bit-equal (with ``config.forward == "int8"`` that of :func:`hotcore.forward_linear`, which
    ``forward_in_eval`` keeps in eval mode), and gradients are those of
    :func:`hotcore.torch.linear`.

    Args:
        in_features: I.
        out_features: O.
        bias: with a bias.
        device: as ``nn.Linear``.
        dtype: as ``nn.Linear``.
        config: a HotConfig or a recipe's name.
    """

    plain = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        config: ConfigLike = "default",
    ) -> None:
        """Make a layer with new parameters, initialised as ``nn.Linear`` does."""
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.config = as_config(config)

    @classmethod
    def from_linear(cls, module: nn.Linear, config: ConfigLike = "default") -> HotLinear:
        """Make ``module`` a HotLinear, in place; see :meth:`from_plain`."""
        return cls.from_plain(module, config)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``; see :func:`hotcore.torch.linear`."""
        if self.runs_plain:
            return F.linear(input, self.weight, self.bias)
        return self._named_product(input, self.weight, self.bias)


class HotConv2d(HotModule, nn.Conv2d):
    """``nn.Conv2d`` with the same parameters and keys, trained through HOT.

    In eval mode it is ``nn.Conv2d``. In training mode the forward is bit-equal, x is kept
    compressed, and gradients are those of :func:`hotcore.torch.conv2d`: torch's own from the
    restored x, of 1x1 kernels HOT's (on CUDA with a low rank). An 8-bit forward is that of 1x1
    kernels, as of :class:`HotLinear`.

    Args:
        in_channels: C.
        out_channels: O.
        kernel_size: one number or (height, width), as the next three.
        stride: as ``nn.Conv2d``.
        padding: as ``nn.Conv2d``.
        dilation: as ``nn.Conv2d``.
        groups: as ``nn.Conv2d``.
        bias: with a bias.
        padding_mode: as ``nn.Conv2d``.
        device: as ``nn.Conv2d``.
        dtype: as ``nn.Conv2d``.
        config: a HotConfig or a recipe's name.
    """

    plain = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Any = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        config: ConfigLike = "default",
    ) -> None:
        """Make a layer with new parameters, initialised as ``nn.Conv2d`` does."""
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        super().__init__(*sizes, bias, padding_mode, device, dtype)
        self.config = as_config(config)

    @classmethod
    def from_conv(cls, module: nn.Conv2d, config: ConfigLike = "default") -> HotConv2d:
        """Make ``module`` a HotConv2d, in place; see :meth:`from_plain`."""
        return cls.from_plain(module, config)

    @staticmethod
    def plain_in_eval(module: Any, config: HotConfig) -> bool:
        """Only 1x1 kernels have an 8-bit forward to keep."""
        return not (config.forward_in_eval and is_pointwise(module))

    def forward(self, input: Tensor) -> Tensor:
        """``[N, C, H, W] -> [N, O, Ho, Wo]``; see :func:`hotcore.torch.conv2d`."""
        if self.runs_plain:
            return super().forward(input)
        return self._named_product(input, self.weight, self.bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sizes = (self.stride, self.padding, self.dilation, self.padding_mode, self.groups)
        return conv2d_from_json(x, weight, bias, sizes, self._config_json)


def is_pointwise(module: nn.Conv2d) -> bool:
    """Whether it is a linear layer over pixels: a 1x1 kernel in one group, without padding."""
    unpadded = module.padding in ((0, 0), "same", "valid")
    return module.kernel_size == (1, 1) and unpadded and module.groups == 1


_FORWARD, _OLD_FORWARD, _OWN = "forward", "_old_forward", "_hot_own_forward"


class OwnForward:
    """Base of the callables that stand in a module's ``__dict__`` as its forward.

    Wrappers such as accelerate's take a bound method apart and bind its function again, to the
    module or to a copy of it; :attr:`__func__` is that function.
    """

    forward: Callable[..., Any]
    """The forward that it calls."""

    @staticmethod
    def of(module: nn.Module) -> OwnForward | None:
        """The one that calls of a module run first; None where something is around it."""
        found = vars(module).get(_FORWARD)
        if isinstance(found, OwnForward):
            return found
        code = getattr(getattr(found, "__func__", None), "__code__", None)
        return vars(module).get(_OWN) if code is _call_own.__code__ else None

    def installed(self) -> dict[str, Any]:
        """What to put into the module's ``__dict__``."""
        return {_FORWARD: self, _OWN: self}

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of :attr:`forward`, which trainers read."""
        return inspect.signature(self.forward)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of the bound method that it stands for."""
        function: Any = types.FunctionType(_call_own.__code__, globals(), _FORWARD)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        with contextlib.suppress(TypeError, ValueError):  # a built-in has no signature
            bound = self.__signature__
            function.__signature__ = bound.replace(parameters=[own, *bound.parameters.values()])
        return cast(Callable[..., Any], function)


def _call_own(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._hot_own_forward(*args, **kwargs)


# ---- A layer's class is changed in place, so that whatever holds the layer sees the change. ----


def own_forward(module: nn.Module) -> str:
    """Why calls of a layer do not run its class's forward; empty if they do.

    accelerate's hooks do run it, between their own calls; :func:`become` keeps them.
    """
    content = vars(module)
    if _FORWARD not in content or _is_class_forward(module, content[_FORWARD]):
        return ""
    if _is_hooked(module):
        return ""
    found = content[_FORWARD]
    name = getattr(found, "__qualname__", type(found).__name__)
    return f"it has a forward of its own ({name}), which calls would go on to run"


def _is_class_forward(module: nn.Module, forward: Any) -> bool:
    """Whether it is the method of the class, bound to this module."""
    bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return bound and forward.__func__ is type(module).forward


def _is_hooked(module: nn.Module) -> bool:
    """Whether accelerate's add_hook_to_module has put its own call around the class's forward."""
    forward = vars(module).get(_FORWARD)
    return (
        isinstance(forward, functools.partial)
        and len(forward.args) == 1
        and forward.args[0] is module
        and _is_class_forward(module, vars(module).get(_OLD_FORWARD))
    )


def held_forwards(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Modules whose bound ``forward`` something holds: it would go on to run the old class's.

    The values say so in words. Frames, those of a traceback for instance, do not count.
    """
    layers = {id(module): module for module in modules}
    bound = types.MethodType

    def methods() -> list[Any]:
        every = [each for each in gc.get_objects() if type(each) is bound] if layers else []
        own = [(each, layers[id(each.__self__)]) for each in every if id(each.__self__) in layers]
        return [
            method
            for method, layer in own
            if _is_class_forward(layer, method)
            and not any(method is vars(layer).get(name) for name in (_FORWARD, _OLD_FORWARD))
        ]

    found = methods()
    if found:
        gc.collect()  # cycles that nothing can reach any more
        found = methods()
    holders = {method.__self__: _holder(method, {id(found)}) for method in found}
    why = "holds its bound forward, which would go on to run the class of now"
    return {module: f"a {holder} {why}" for module, holder in holders.items() if holder}


def _holder(value: Any, seen: set[int]) -> str:
    """An object that holds a value, directly or by a closure; empty if frames alone do."""
    referrers = gc.get_referrers(value)
    seen.add(id(referrers))
    for each in referrers:
        if id(each) in seen or isinstance(each, types.FrameType | types.GeneratorType):
            continue
        seen.add(id(each))
        if type(each) is dict:  # as a rule of an instance or of a module
            if (key := _key_of(value, each)) != _compat.COMPILED_OF:
                return f"dict ({key})"
            continue
        closure = isinstance(each, types.CellType | types.FunctionType | tuple)
        if name := _holder(each, seen) if closure else type(each).__name__:
            return name
    return ""


def _key_of(value: Any, table: dict[Any, Any]) -> str:
    return next((str(key) for key, own in list(table.items()) if own is value), "")


def unwrapped(
    model: nn.Module,
    base: type[Changed] = Changed,
    before: str = "revert()",
    why: Callable[[Any], str] = own_forward,
) -> dict[str, Any]:
    """Names and modules of ``base``, whose class can change back.

    Raises ValueError where something that was put around one of them would stay.
    """
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, base)}
    held = held_forwards(found.values())
    for name, module in found.items():
        if not {"plain", "thawed"} & vars(type(module)).keys():  # a subclass, made elsewhere
            raise ValueError(
                f"model: {name or '(root)'} is now a {type(module).__name__}; undo what was "
                f"wrapped around it (a parametrisation, fully_shard) before {before}"
            )
        if reason := why(module) or held.get(module):
            raise ValueError(f"model: {name or '(root)'}: {reason}; undo that before {before}")
    return found


def become(module: nn.Module, cls: type[Any], fields: Mapping[str, Any] | None = None) -> None:
    """Change a module's class in place; :func:`unwrapped` or :func:`own_forward` has checked it.

    Args:
        module: keeps its id, Parameters, hooks and training mode.
        cls: its new class.
        fields: what ``hot_fields`` names. Fields of the old class alone go.
    """
    content = vars(module)
    kept = getattr(cls, "hot_fields", ())
    for name in getattr(type(module), "hot_fields", ()):
        if name not in kept:
            content.pop(name, None)
    content.update(fields or {})
    if _is_hooked(module):
        method = types.MethodType(cls.forward, module)
        content[_OLD_FORWARD] = content[_FORWARD].__wrapped__ = method
    else:
        content.pop(_FORWARD, None)
    module.__class__ = cls  # fully_shard and parametrisations do so, too
