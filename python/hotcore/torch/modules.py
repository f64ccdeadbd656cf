"""``HotLinear`` and ``HotConv2d``: the modules of ``torch.nn`` whose backward is HOT."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ConfigLike, HotConfig, as_config
from . import _compat
from .ops.conv import conv2d_from_json
from .ops.linear import linear_from_json
from .report import REPORT

_Hot = TypeVar("_Hot", bound="HotModule")


class HotModule:
    """Base of the HOT modules: a configuration, and conversion from and to the plain class."""

    plain: ClassVar[type[nn.Module]]
    """The class that this one replaces."""
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
        self._plain_in_eval = not self._config.forward_in_eval

    @classmethod
    def from_plain(cls: type[_Hot], module: nn.Module, config: ConfigLike = "default") -> _Hot:
        """Make a layer that holds ``module``'s own Parameters and hooks; allocates nothing.

        Raises TypeError unless ``module`` is exactly of class :attr:`plain` (or this one): the
        additions of a subclass would be lost. Raises ValueError where it has a ``forward`` of its
        own, except accelerate's hooks, which the new layer has, too.
        """
        if type(module) not in (cls.plain, cls):
            found = type(module).__name__
            raise TypeError(f"module: expected a plain {cls.plain.__name__}, got {found}")
        settings = as_config(config)
        new: Any = copy_content(module, cls)
        new.config = settings
        assert isinstance(new, cls)
        return new

    def to_plain(self) -> nn.Module:
        """Make the plain module that holds the same Parameters and hooks."""
        assert isinstance(self, nn.Module)
        new = copy_content(self, self.plain)
        for name in (REPORT, "_config", "_config_json", "_plain_in_eval", "defer", "layer_name"):
            new.__dict__.pop(name, None)
        return new

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

    def extra_repr(self) -> str:
        """The text of the plain module, the recipe and what differs from it."""
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
        """Make a HotLinear that holds ``module``'s own Parameters; see :meth:`from_plain`."""
        return _compat.rebind_hooks(cls.from_plain(module, config))

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
        """Make a HotConv2d that holds ``module``'s own Parameters; see :meth:`from_plain`."""
        return _compat.rebind_hooks(cls.from_plain(module, config))

    @property
    def runs_plain(self) -> bool:
        """Whether it is now the plain layer; only 1x1 kernels have an 8-bit forward to keep."""
        return not self.training and (self._plain_in_eval or not is_pointwise(self))

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


def own_forward(module: nn.Module) -> str:
    """Why calls of a layer do not run its class's forward; empty if they do.

    accelerate's hooks do run it, between their own calls; :func:`carry_forward` keeps them.
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


def carry_forward(module: nn.Module, new: nn.Module, cls: type[nn.Module]) -> None:
    """Have calls of ``new``, with ``module``'s content, run the forward of ``cls``.

    Raises ValueError where ``module`` has a forward of its own. ``new`` may be ``module``.
    """
    if why := own_forward(module):
        raise ValueError(f"module: {why}")
    if not _is_hooked(module):
        new.__dict__.pop(_FORWARD, None)
        return
    inner = types.MethodType(cls.forward, new)
    hooked = functools.partial(vars(module)[_FORWARD].func, new)
    new.__dict__[_OLD_FORWARD] = inner
    new.__dict__[_FORWARD] = functools.update_wrapper(hooked, inner)


def unwrapped(
    model: nn.Module,
    base: type[Any],
    made: Callable[[Any], type[Any]],
    why: Callable[[Any], str] = own_forward,
) -> list[Any]:
    """The modules of ``base``, whose classes were :func:`made`.

    Raises ValueError where reverting one would leave what was put around it.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, base)]
    for name, module in found:
        if type(module) is not made(module):
            raise ValueError(
                f"model: {name or '(root)'} is now a {type(module).__name__}; undo what was "
                "wrapped around it (a parametrisation, fully_shard) before revert()"
            )
        if reason := why(module):
            raise ValueError(f"model: {name or '(root)'}: {reason}; undo that before revert()")
    return [module for _, module in found]


def copy_content(module: nn.Module, cls: type[Any]) -> nn.Module:
    """A ``cls`` with the content of ``module``: Parameters, buffers, hooks, training mode.

    If ``module`` was compiled by itself, the new one is not: that would be a call of the old one.
    """
    new: nn.Module = object.__new__(cls)
    new.__dict__.update(module.__dict__)
    carry_forward(module, new, cls)
    _compat.forget_compiled(new)
    # The tables of content are copied; hook tables stay shared, because handles remove from them.
    for table in ("_parameters", "_buffers", "_modules"):
        new.__dict__[table] = module.__dict__[table].copy()
    return new


_TABLES = frozenset(vars(nn.Module()))


def replace_layers(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> nn.Module:
    """Put new layers in the place of others, in place; return the model, new if it is replaced.

    Attributes, lists, dicts and partials of its modules that hold a layer, or a bound method of it,
    hold the new one.
    """
    for parent in list(model.modules()):  # a module in two places is the same new one in both
        for name, child in parent._modules.items():
            parent._modules[name] = replacements.get(child, child)
    for new in replacements.values():
        _compat.rebind_hooks(new)
    # What else holds a layer, or its bound methods, would go on to call the old one.
    made = set(replacements.values())
    for parent in model.modules():
        own = (_FORWARD, _OLD_FORWARD) if parent in made else ()  # carry_forward has made them
        for name, value in list(vars(parent).items()):
            if name not in _TABLES and name not in own:
                parent.__dict__[name] = _exchanged(value, replacements)
    return replacements.get(model, model)


def _exchanged(value: Any, replacements: Mapping[Any, nn.Module], depth: int = 3) -> Any:
    """The same, with the new layers and their methods in place of the old ones'."""
    if isinstance(value, nn.Module):
        return replacements.get(value, value)
    if isinstance(value, types.MethodType):
        new = replacements.get(value.__self__) if isinstance(value.__self__, nn.Module) else None
        found = None if new is None else getattr(new, value.__name__, None)
        return value if found is None else found
    if type(value) is functools.partial and depth:
        parts = (value.func, value.args, value.keywords)
        func, args, named = (_exchanged(part, replacements, depth - 1) for part in parts)
        same = func is value.func and args is value.args
        return value if same else functools.partial(func, *args, **named)
    if type(value) in (list, tuple, dict) and depth:
        items = value.values() if isinstance(value, dict) else value
        made = [_exchanged(item, replacements, depth - 1) for item in items]
        if all(a is b for a, b in zip(made, items, strict=True)):
            return value
        if isinstance(value, tuple):
            return tuple(made)
        if isinstance(value, dict):
            value.update(zip(list(value), made, strict=True))
        else:
            value[:] = made
    return value
