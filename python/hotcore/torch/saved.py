"""``convert(saved=)``: ReLUs that keep a bit a value for backward.

A converted module keeps its Parameters, its hooks and its place in the model. Only its class
changes, to a subclass with another forward pass; in eval mode the plain one runs. No hooks on saved
tensors are involved, so it works in eager mode and, fused, in graphs of torch.compile.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..config import RECOMPUTE, REMOVED, check_gone
from .modules import carry_forward, own_forward, unwrapped
from .ops.relu import relu
from .report import SavedModule, SavedReport, listed

Saved = int | Mapping[str, Any]

_BIT = 1  # a ReLU's sign, which is exact

# ---- the classes ----


class SavedCodes:
    """Base of the classes that :func:`convert_saved` assigns to modules."""

    plain: ClassVar[type[nn.Module]]
    _hot_forward: ClassVar[str]
    saved_bits: ClassVar[int] = _BIT

    def extra_repr(self) -> str:
        """The text of the plain module, and the bits."""
        base: str = super().extra_repr()  # type: ignore[misc]
        return f"{base}, saved={self.saved_bits}" if base else f"saved={self.saved_bits}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy rebuild the class, which is made at run time, from the plain one."""
        return _new, (self.plain, self._hot_forward), self.__dict__


def _new(plain: Any, forward: str) -> nn.Module:
    cls = _class(plain, forward)
    return cls.__new__(cls)


@functools.cache
def _class(plain: type[nn.Module], forward: str) -> type[nn.Module]:
    """The subclass of ``plain`` whose training forward is ``_FORWARDS[forward]``."""
    in_training = _FORWARDS[forward]

    def train_or_plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (in_training if self.training else plain.forward)(self, *args, **kwargs)

    train_or_plain.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]  # libraries look
    body = {
        "plain": plain,
        "_hot_forward": forward,
        "forward": train_or_plain,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
    }
    return type(f"Saved{plain.__name__}", (SavedCodes, plain), body)


def _relu(self: Any, input: Tensor) -> Tensor:
    return relu(input, self.inplace)


_RELUS = (F.relu, torch.relu, Tensor.relu)


class _Watch(TorchFunctionMode):
    """Replaces torch's ReLU by the one that keeps bits, for the calls inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (relu if func in _RELUS else func)(*args, **(kwargs or {}))


def _watched(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _Watch():
        return self.plain.forward(self, *args, **kwargs)


_FORWARDS = {"relu": _relu, "watched": _watched}


# ---- operations of a module ----


class _Found(NamedTuple):
    forward: str
    reason: str = ""
    """Why it cannot be converted; empty if it can."""


def _find(module: nn.Module) -> _Found | None:
    """A module's ReLU that can keep its sign."""
    cls, why = type(module), own_forward(module)
    if cls is nn.ReLU:
        return _Found("relu", why)
    if cls.__module__.startswith("torch.") or isinstance(module, SavedCodes):
        return None
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    named = code is not None and "relu" in code.co_names  # also an attribute
    return _Found("watched", why) if named and "relu" not in module._modules else None


def has_relu(module: nn.Module) -> bool:
    """Whether :func:`convert_saved` can convert the module."""
    found = _find(module)
    return found is not None and not found.reason


# ---- conversion ----


def _kept(value: Any, where: str, allowed: tuple[int, ...] = (1, 4, 8)) -> bool:
    """Whether bits are kept. Raises ValueError for other numbers of bits."""
    if isinstance(value, Mapping):
        for kind in value:
            check_gone("saved", kind)
        if list(value) != ["relu"]:
            raise ValueError(f"{where}: {value!r}; the one kind of operation is 'relu'")
        return _kept(value["relu"], f"{where}: relu", (_BIT,))
    if isinstance(value, bool) or value not in (*allowed, None):
        expected = ", ".join(map(str, allowed))
        raise ValueError(f"{where}: {value!r}; expected {expected} or None")
    return value is not None


def _wanted(saved: Saved, names: list[str]) -> list[str]:
    """The modules that are to keep bits, of ``names``, those with ReLUs."""
    if not isinstance(saved, Mapping):
        return names if _kept(saved, "saved") else []
    kept = dict.fromkeys(names, True)
    if "relu" in saved:
        kept = dict.fromkeys(names, _kept({"relu": saved["relu"]}, "saved"))
    for pattern, value in saved.items():
        if not isinstance(pattern, str):
            raise ValueError(f"saved: the key {pattern!r}; expected 'relu' or a pattern")
        check_gone("saved", pattern)
        if pattern == "relu":
            continue
        this = _kept(value, f"saved[{pattern!r}]")
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.strip("*."), ["relu", *names], 3, 0.3)
            known = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(f"saved: {pattern!r} matches no module with a ReLU{known}")
        kept.update(dict.fromkeys(matched, this))
    return [name for name in names if kept[name]]


def _asks(saved: Any) -> bool:
    """Whether anything is to keep bits."""
    return any(map(_asks, saved.values())) if isinstance(saved, Mapping) else saved is not None


def convert_saved(model: nn.Module, saved: Saved = 8) -> SavedReport:
    """Make ReLUs keep the sign of their result for backward, in place: one bit a value, exact.

    ``hot.convert(model, recipe, saved=...)`` calls this. The report lists the modules.

    Args:
        model: any module.
        saved: 8, 4 or 1: every ReLU; or a mapping of name patterns (``fnmatch``) and of ``"relu"``,
            which stands for all, to such a number, or to None for modules that stay as they are.

    These modules are converted: ``nn.ReLU``; modules whose own forward calls ``F.relu``,
    ``torch.relu`` or ``x.relu()``, during which a TorchFunctionMode, which torch.compile supports,
    replaces them (none that has a submodule ``relu``).

    Raises:
        ValueError: a bad number; a kind that was removed; a pattern that matches nothing; a module
            that is already converted; or no module of the model can be.
    """
    found = {name: what for name, m in model.named_modules() if (what := _find(m)) is not None}
    twice = [name for name, module in model.named_modules() if isinstance(module, SavedCodes)]
    if twice:
        raise ValueError(f"model: keeps codes already ({listed(twice)}); revert() it first")
    wanted = _wanted(saved, list(found))
    left = {name: found[name].reason for name in wanted if found[name].reason}
    report = SavedReport([], left)
    if len(left) == len(wanted) and _asks(saved):
        why = "".join(f"; {name}: {reason}" for name, reason in [*left.items()][:3])
        raise ValueError(f"saved: finds no ReLU{why}; other kinds were {REMOVED}; {RECOMPUTE}")
    for name in wanted:
        forward, reason = found[name]
        if reason:
            continue
        module = model.get_submodule(name)
        plain: Any = type(module)
        carry_forward(module, module, _class(plain, forward))
        module.__class__ = _class(plain, forward)
        report.converted.append(SavedModule(name, plain.__name__, {"relu": _BIT}))
    return report


def saved_modules(model: nn.Module) -> list[Any]:
    """Those that :func:`revert_saved` makes plain.

    Raises ValueError if a module has become a subclass in the meantime (a parametrisation,
    ``fully_shard``), or has got a ``forward`` of its own (``recompute``): undo that first.
    """
    return unwrapped(model, SavedCodes, lambda m: _class(m.plain, m._hot_forward))


def revert_saved(model: nn.Module) -> None:
    """Restore every module's plain class. Raises as :func:`saved_modules`."""
    for module in saved_modules(model):
        carry_forward(module, module, module.plain)
        module.__class__ = module.plain
