"""``HotLinear`` and ``HotConv2d``: the modules of ``torch.nn`` whose backward is HOT."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import ConfigLike, HotConfig, as_config
from .. import _compat
from ..ops.conv import conv2d_from_json
from ..ops.linear import linear_from_json

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
    """Whether the compiler decides when a linear layer compresses x; without it the codes are kept.
    The compiler may have backward compress an x that is available there, such as a norm of a kept
    tensor. This keeps the fewest bytes and costs another pass."""
    layer_name: str = ""
    """The layer's name in the converted model, for error messages."""
    _config: HotConfig
    _config_json: str
    _plain_in_eval: bool = True
    """Whether the layer is plain in eval mode."""

    def __init__(self, *args: Any, config: ConfigLike = "default", **options: Any) -> None:
        super().__init__(*args, **options)
        self.config = as_config(config)

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

        Raises TypeError unless the class of ``module`` is :attr:`plain` or this one: the additions
        of a subclass would be lost. Raises ValueError if ``module`` has a ``forward`` of its own
        that is not accelerate's: calls would not run the forward of this class.
        """
        if type(module) not in (cls.plain, cls):
            kind = type(module).__name__
            raise TypeError(f"module: expected a plain {cls.plain.__name__}, got {kind}")
        if why := own_forward(module):
            raise ValueError(f"module: {why}")
        settings = as_config(config)
        become(module, cls)
        assert isinstance(module, cls)
        module.config = settings
        return module

    @property
    def runs_plain(self) -> bool:
        """Whether the layer is now plain: in eval mode, unless its 8-bit forward is kept."""
        return self._plain_in_eval and not self.training  # type: ignore[attr-defined]  # nn.Module's

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Output of the layer by :attr:`config`, in training and in eval mode."""
        return linear_from_json(x, weight, bias, self._config_json, self.defer)

    def _named_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Output of :meth:`_product`, whose errors begin with the layer's name."""
        try:
            return self._product(x, weight, bias)
        except (ValueError, RuntimeError) as error:
            self.prefix_layer_name(error)
            raise

    def _recorded(self, x: Any, *arguments: Any) -> Any:
        """The call of the module in a graph of torch.fx, whose proxy x is."""
        if not isinstance(x, torch.fx.Proxy):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
        path = x.tracer.path_of_module(self)  # type: ignore[attr-defined]  # a Tracer has it
        return x.tracer.create_proxy("call_module", path, (x, *arguments), {})

    def prefix_layer_name(self, error: Exception) -> None:
        """Put the layer's name before an error's message; for meta weights append a remedy."""
        text = f"layer {self.layer_name}: {error}" if self.layer_name else str(error)
        weights: Any = vars(self)["_parameters"].values()
        if any(weight is not None and weight.is_meta for weight in weights):
            text += "; its weights have no values: model.to_empty(device=...), then load_state_dict"
        error.args = (text,)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load the plain layer's keys. Codes of a frozen weight are an error with the remedy."""
        _, strict, *_, errors = rest
        unfrozen = "weight_codes" not in vars(self)["_parameters"]
        if strict and unfrozen and f"{prefix}weight_codes" in state_dict:
            errors.append(
                f"{prefix}weight_codes: codes of a frozen weight, for a plain one; call "
                "hot.freeze(model, bits) before load_state_dict"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]  # a module has it

    def extra_repr(self) -> str:
        """Text of the plain module, then the recipe and the fields that differ from it."""
        if not isinstance(self, HotModule):  # torchao's quantize_ keeps the method through revert()
            return str(type(self).extra_repr(self))
        plain: str = super().extra_repr()  # type: ignore[misc]  # nn.Module's, next in the MRO
        return f"{plain}, config={self.config}" if plain else f"config={self.config}"

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script is not supported; script a copy of the model "
            "after revert(), trace it in eval mode, or use torch.compile to train"
        )

    def _replicate_for_data_parallel(self) -> Any:
        # The replicas' threads would draw seeds from one generator in an undefined order.
        reason = "nn.DataParallel is not supported; use DistributedDataParallel"
        raise NotImplementedError(f"{type(self).__name__}: {reason}")


class HotLinear(HotModule, nn.Linear):
    """``nn.Linear`` with the same parameters and state_dict keys, trained by
    :func:`hotcore.torch.linear`.

    In eval mode it is ``nn.Linear``, unless ``forward_in_eval`` keeps its 8-bit forward. The
    arguments are those of ``nn.Linear``, and ``config``: a HotConfig or a recipe's name.
    """

    plain = nn.Linear

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
    """``nn.Conv2d`` with the same parameters and keys, trained by :func:`hotcore.torch.conv2d`.

    In eval mode it is ``nn.Conv2d``. The arguments are those of ``nn.Conv2d``, and ``config``: a
    HotConfig or a recipe's name.
    """

    plain = nn.Conv2d

    @classmethod
    def from_conv(cls, module: nn.Conv2d, config: ConfigLike = "default") -> HotConv2d:
        """Make ``module`` a HotConv2d, in place; see :meth:`from_plain`."""
        return cls.from_plain(module, config)

    @staticmethod
    def plain_in_eval(module: Any, config: HotConfig) -> bool:
        """Whether ``module`` has no 8-bit forward in eval mode, which only 1x1 kernels have."""
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
    """Whether a convolution is linear in pixels: a 1x1 kernel, one group, no padding."""
    unpadded = module.padding in ((0, 0), "same", "valid")
    return module.kernel_size == (1, 1) and unpadded and module.groups == 1


_FORWARD, _OLD_FORWARD, _OWN = "forward", "_old_forward", "_hot_own_forward"


class OwnForward:
    """Base of the callables that stand in a module's ``__dict__`` as its forward."""

    forward: Callable[..., Any]
    """The module's forward before this one, which it calls."""
    origin: str = ""
    """The call that installed it, and how to undo it, for errors."""
    defer: bool = False
    """``defer`` of the HOT layers in the module."""

    @staticmethod
    def of(module: nn.Module) -> OwnForward | None:
        """Return the object that a module's call runs first; None if something wraps it."""
        forward = vars(module).get(_FORWARD)
        if isinstance(forward, OwnForward):
            return forward
        code = getattr(getattr(forward, "__func__", None), "__code__", None)
        return vars(module).get(_OWN) if code is _call_own.__code__ else None

    def install(self, module: nn.Module, **more: Any) -> None:
        """Make the module's calls run this object; ``more`` goes into its ``__dict__``, too."""
        entries = {_FORWARD: self, _OWN: self, **more}
        self._before = {name: vars(module).get(name) for name in entries}
        vars(module).update(entries)

    def uninstall(self, module: nn.Module) -> None:
        """Restore the module's ``__dict__``."""
        for name, value in self._before.items():
            vars(module).pop(name, None)
            if value is not None:
                vars(module)[name] = value

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of :attr:`forward`, which trainers read."""
        return inspect.signature(self.forward)

    @property
    def __func__(self) -> Callable[..., Any]:
        """Function of the replaced bound method; accelerate takes it and binds it again."""
        function: Any = types.FunctionType(_call_own.__code__, globals(), _FORWARD)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        with contextlib.suppress(TypeError, ValueError):  # a built-in has no signature
            bound = self.__signature__
            function.__signature__ = bound.replace(parameters=[first, *bound.parameters.values()])
        return cast(Callable[..., Any], function)


def _call_own(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._hot_own_forward(*args, **kwargs)


def hot_layers(model: nn.Module) -> list[HotModule]:
    """The HOT modules in a model."""
    return [module for module in model.modules() if isinstance(module, HotModule)]


def defer_in_blocks(model: nn.Module) -> None:
    """Set ``defer`` of the layers in recomputed blocks whose policy does not keep the codes."""
    for block in model.modules():
        if getattr(OwnForward.of(block), "defer", False):
            for layer in hot_layers(block):
                layer.defer = True


def own_forward(module: nn.Module) -> str:
    """Return why a layer's calls do not run its class's forward (accelerate's hooks do), or ""."""
    forward = vars(module).get(_FORWARD)
    if forward is None or _is_class_forward(module, forward) or _is_hooked(module):
        return ""
    if isinstance(forward, OwnForward) and forward.origin:
        return f"it has a forward of its own, as {forward.origin}"
    name = getattr(forward, "__qualname__", type(forward).__name__)
    return f"it has a forward of its own ({name}), which calls would go on to run"


def _is_class_forward(module: nn.Module, forward: Any) -> bool:
    """Whether ``forward`` is the method of the module's class, bound to the module."""
    bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return bound and forward.__func__ is type(module).forward


def _is_hooked(module: nn.Module) -> bool:
    """Whether accelerate's add_hook_to_module has wrapped the class's forward."""
    forward = vars(module).get(_FORWARD)
    return (
        isinstance(forward, functools.partial)
        and len(forward.args) == 1
        and forward.args[0] is module
        and _is_class_forward(module, vars(module).get(_OLD_FORWARD))
    )


def held_forwards(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules in ``model`` whose bound ``forward`` something holds, and what holds it.

    The method would go on to run the class of now. Any holder counts, also outside the model, but
    no frame (of a traceback, for instance).
    """
    found = _bound_forwards(model)
    if found:
        gc.collect()  # unreachable cycles may hold methods
        found = _bound_forwards(model)
    held = {method.__self__: _holder(method, {id(found)}) for method in found}
    why = "holds its bound forward, which would run the old class's"
    return {module: f"a {holder} {why}" for module, holder in held.items() if holder}


def _bound_forwards(model: nn.Module) -> list[Any]:
    layers = list(model.modules())
    # One pass over the collector's objects, in C. Its time grows with the number of functions.
    classes = {type(layer) for layer in layers if not isinstance(layer, torch.jit.ScriptModule)}
    functions = {cls.forward for cls in classes}
    methods = [r for r in gc.get_referrers(*functions) if type(r) is types.MethodType]
    known = {id(layer): layer for layer in layers}
    pairs = [(method, known.get(id(method.__self__))) for method in methods]
    return [
        method
        for method, layer in pairs
        if layer is not None
        and _is_class_forward(layer, method)
        and all(method is not vars(layer).get(name) for name in (_FORWARD, _OLD_FORWARD))
    ]


def _holder(value: Any, seen: set[int]) -> str:
    """Name an object that holds a value, directly or by a closure; empty if only frames do."""
    referrers = gc.get_referrers(value)
    seen.add(id(referrers))
    for each in referrers:
        if id(each) in seen or isinstance(each, types.FrameType | types.GeneratorType):
            continue
        seen.add(id(each))
        # The dict is usually of an instance; Python 3.13 gives the instance itself.
        key = _key_of(value, each if type(each) is dict else getattr(each, "__dict__", {}))
        if key == _compat.COMPILED_OF:
            continue
        if type(each) is dict:
            return f"dict ({key})"
        closure = isinstance(each, types.CellType | types.FunctionType | tuple)
        if name := _holder(each, seen) if closure else type(each).__name__:
            return name
    return ""


def _key_of(value: Any, table: Any) -> str:
    # Apart from _holder, where the generator's cell would be another holder of the value.
    return next((str(key) for key, item in list(table.items()) if item is value), "")


def unwrapped(
    model: nn.Module,
    base: type[Changed] = Changed,
    before: str = "revert()",
    why: Callable[[Any], str] = own_forward,
) -> dict[str, Any]:
    """Return names and modules of ``base``. ValueError if something wraps one of them."""
    changed: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, base)}
    held = held_forwards(model)
    for name, module in changed.items():
        if not {"plain", "thawed"} & vars(type(module)).keys():  # a subclass, made elsewhere
            raise ValueError(
                f"model: {name or '(root)'} is now a {type(module).__name__}; undo what was "
                f"wrapped around it (a parametrisation, fully_shard) before {before}"
            )
        if reason := why(module) or held.get(module):
            raise ValueError(f"model: {name or '(root)'}: {reason}; undo that before {before}")
    return changed


def become(module: nn.Module, cls: type[Any], fields: Mapping[str, Any] | None = None) -> None:
    """Change a module's class in place, so that everything that holds the module sees the change.

    It keeps its id, Parameters, hooks and training mode. Call :func:`unwrapped` or
    :func:`own_forward` first. ``fields`` are values of the new class's ``hot_fields``; fields of
    only the old class are removed.
    """
    content = vars(module)
    for name in {*getattr(type(module), "hot_fields", ())} - {*getattr(cls, "hot_fields", ())}:
        content.pop(name, None)
    content.update(fields or {})
    if _is_hooked(module):
        method = types.MethodType(cls.forward, module)
        content[_OLD_FORWARD] = content[_FORWARD].__wrapped__ = method
    else:
        content.pop(_FORWARD, None)
    module.__class__ = cls  # fully_shard and parametrisations do this, too
