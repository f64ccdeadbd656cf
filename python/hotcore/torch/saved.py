"""``convert(saved=)``: ReLUs and transformers' experts whose backward pass uses codes.

A converted module keeps its Parameters, its hooks and its place in the model. Only its class
changes, to a subclass with another forward pass; in eval mode the plain one runs. No hooks on saved
tensors are involved, so it works in eager mode and, fused, in graphs of torch.compile.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .modules import Changed, become, own_forward
from .ops import experts, is_dtensor
from .ops.relu import relu
from .report import SavedModule, SavedReport, listed

Saved = int | Mapping[str, Any]

KINDS: Mapping[str, tuple[int | None, ...]] = {"relu": (1, None), "experts": (8, 4, None)}
"""Kinds of operations and the supported numbers of bits; None: keep tensors as they are.

``relu``: the sign, which is exact. ``experts``: x of the grouped products of a mixture of experts,
which stay torch's, in the dtype of the weights, and the two factors of the gate between them.
"""

_GONE = ("activation", "norm", "attention", "product")
_INSTEAD = "use hot.recompute(model.blocks[:n])"


# ---- the classes ----


class SavedCodes(Changed):
    """Base of the classes that :func:`convert_saved` assigns to modules."""

    hot_fields = ("saved_bits", "saved_gate")
    _hot_forward: ClassVar[str]
    saved_bits: int

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


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    if _why_plain(self):
        return self.plain.forward(self, hidden_states, top_k_index, top_k_weights)
    bits, inner = self.saved_bits, self._apply_gate if self.has_gate else self.act_fn
    if gate := _gate_of(self):

        def inner(rows: Tensor) -> Tensor:
            return experts.gated(rows, gate, bits)

    matrices = (self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj)
    return experts.experts(hidden_states, top_k_index, top_k_weights, *matrices, inner, bits)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "relu": _relu,
    "watched": _watched,
    "experts": _experts,
}


# ---- transformers' experts ----

_EXPERTS = ("num_experts", "down_proj", "_apply_gate", "has_gate", "has_bias", "is_transposed")
"""What transformers' ``use_experts_implementation`` gives a class of experts, and they have."""


def _why_plain(module: Any) -> str:
    """Why experts run transformers' own forward; empty where :func:`.experts` does the same."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(module, "_is_expert_parallel"):
        return "transformers before 5.18: its experts do not say whether they are parallel"
    reasons = {
        "torch has no grouped_mm before 2.10": not experts.AVAILABLE,
        f"its experts are {chosen!r}, not 'grouped_mm'": chosen != "grouped_mm",
        "experts with biases": module.has_bias,
        "experts with transposed weights": module.is_transposed,
        "experts with a norm of their own": getattr(module, "has_post_expert_norm", False),
        "experts of several ranks": module._is_expert_parallel or is_dtensor(module.down_proj),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _default_gate(self: Any, gate_up_out: Any) -> Any:
    gate, up = gate_up_out.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def _bytecode(function: Any) -> tuple[Any, ...]:
    """Equal for equal sources, up to names of variables."""
    code = inspect.unwrap(function).__code__
    return code.co_code, code.co_names, tuple(c for c in code.co_consts if c != function.__doc__)


def _gate_name(module: Any) -> str:
    """The key of ``experts.GATES`` of a gate as transformers' own is; empty for another one."""
    own = type(module)._apply_gate
    if not module.has_gate or _bytecode(own) != _bytecode(_default_gate):
        return ""
    held = getattr(module.act_fn, "act", None)
    if type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
        return "silu"
    if getattr(held, "func", held) is not F.gelu:
        return ""
    options = getattr(held, "keywords", {})
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(options.get("approximate", "none"), "")


def _gate_of(module: Any) -> str:
    """The gate's activation, which :func:`.gated` does not call; empty where it has to be called.

    It or the gate is another one by now, or it has hooks or a forward of its own.
    """
    name, known = module.saved_gate
    act = module.act_fn
    hooks = (act._forward_pre_hooks, act._forward_hooks, act._backward_pre_hooks)
    hooked = "forward" in act.__dict__ or any((*hooks, act._backward_hooks))
    if name and (act is not known or hooked or "_apply_gate" in module.__dict__):
        if not torch.compiler.is_compiling():
            what = f"act_fn, a {type(act).__name__}, was replaced, or has hooks or a forward"
            what = f"{what} of its own, or _apply_gate was: the gate's factors are kept as they are"
            what = f"hotcore.torch: {what}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
        return ""
    return str(name)


# ---- operations of a module ----


class _Found(NamedTuple):
    kind: str
    forward: str
    reason: str = ""
    """Why it cannot be converted; empty if it can."""


def _find(module: nn.Module) -> _Found | None:
    """A module's operation that can keep codes."""
    cls, why = type(module), own_forward(module)
    if cls is nn.ReLU:
        return _Found("relu", "relu", why)
    if cls.__module__.startswith("torch.") or isinstance(module, SavedCodes):
        return None
    if all(hasattr(module, name) for name in _EXPERTS):
        return _Found("experts", "experts", why or _why_plain(module))
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    named = code is not None and "relu" in code.co_names  # also an attribute
    return _Found("relu", "watched", why) if named and "relu" not in module._modules else None


def saved_kind(module: nn.Module) -> str:
    """The kind of operation for which it could keep codes; empty if it could not."""
    found = _find(module)
    return "" if found is None or found.reason else found.kind


# ---- conversion ----


def _value(kind: str, value: Any, where: str) -> int | None:
    if kind in _GONE:
        raise ValueError(
            f"{where}: {kind!r} is gone: recomputing some of the blocks takes the same time at the "
            f"same peak or a lower one; {_INSTEAD}"
        )
    if kind not in KINDS:
        raise ValueError(f"{where}: {kind!r}: no such kind of operation; known: {', '.join(KINDS)}")
    allowed = KINDS[kind]
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{where}: {kind}: {value!r}; expected one of {allowed}")
    found: int | None = value
    return found


def _all(value: Any, where: str) -> dict[str, int | None]:
    """Bits of every kind from one number."""
    if value is None:
        return dict.fromkeys(KINDS)
    if isinstance(value, bool) or value not in (4, 8):
        raise ValueError(f"{where}: {value!r}; expected 8, 4, None or a mapping")
    return {"relu": 1, "experts": value}


def _bits(saved: Saved, names: list[str]) -> dict[str, dict[str, int | None]]:
    """Name of a module -> its bits of every kind.

    ``names`` are the modules with operations that can keep codes.
    """
    if not isinstance(saved, Mapping):
        base = _all(saved, "saved")
        return {name: dict(base) for name in names}
    base, patterns = _all(8, "saved"), []
    for key, value in saved.items():
        if not isinstance(key, str):
            raise ValueError(f"saved: the key {key!r}; expected a kind of operation or a pattern")
        if key in KINDS or key in _GONE:
            base[key] = _value(key, value, "saved")
        else:
            patterns.append((key, value))
    bits = {name: dict(base) for name in names}
    for pattern, value in patterns:  # more specific than kinds, so they come after them
        where = f"saved[{pattern!r}]"
        if isinstance(value, Mapping):
            new = {kind: _value(kind, bits_of, where) for kind, bits_of in value.items()}
        else:
            new = _all(value, where)
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.strip("*."), [*KINDS, *names], 3, 0.3)
            known = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(
                f"saved: {pattern!r} is no kind of operation ({', '.join(KINDS)}) and matches no "
                f"module that does one{known}"
            )
        for name in matched:
            bits[name].update(new)
    return bits


def _asks(saved: Any) -> bool:
    """Whether anything is to keep codes."""
    return any(map(_asks, saved.values())) if isinstance(saved, Mapping) else saved is not None


def convert_saved(model: nn.Module, saved: Saved = 8) -> SavedReport:
    """Make ReLUs and transformers' experts keep codes for backward, in place.

    ``hot.convert(model, recipe, saved=...)`` calls this. The report lists the modules.

    Args:
        model: any module.
        saved: 8 or 4, the bits of experts (a ReLU keeps one, which is exact); or a mapping of kinds
            (:data:`KINDS`) to bits or None (unchanged; 8 and 1 for a kind that is not named), and
            of name patterns (``fnmatch``) to bits, None, or such a mapping of kinds, for the
            matching modules.

    These modules are converted: ``nn.ReLU``; modules whose own forward calls ``F.relu``,
    ``torch.relu`` or ``x.relu()``, during which a TorchFunctionMode, which torch.compile supports,
    replaces them (none that has a submodule ``relu``); transformers' experts in two Parameters,
    with ``experts_implementation="grouped_mm"``.

    Raises:
        ValueError: bad bits; a kind that is gone; a key that is no kind and matches nothing; a
            module that is already converted; or no module of the model can be.
    """
    found = {name: what for name, m in model.named_modules() if (what := _find(m)) is not None}
    twice = [name for name, module in model.named_modules() if isinstance(module, SavedCodes)]
    if twice:
        raise ValueError(
            f"model: keeps codes already ({listed(twice)}); revert() it first, or change the "
            "bits of a module by its saved_bits"
        )
    bits = _bits(saved, list(found))
    wanted = {name: own for name, what in found.items() if (own := bits[name][what.kind])}
    left = {name: found[name].reason for name in wanted if found[name].reason}
    report = SavedReport([], left)
    if len(left) == len(wanted) and _asks(saved):
        why = "".join(f"; {name}: {reason}" for name, reason in [*left.items()][:3])
        raise ValueError(
            "saved: finds no ReLU and no experts of transformers for the codes that it asks for"
            f"{why}; for the memory of other operations {_INSTEAD}"
        )
    for name, own in wanted.items():
        kind, forward, reason = found[name]
        if reason:
            continue
        module, note = model.get_submodule(name), ""
        fields: dict[str, Any] = {"saved_bits": own}
        plain: Any = type(module)
        if kind == "experts":
            gate = _gate_name(module), module.act_fn
            fields["saved_gate"] = gate
            note = "; x of the grouped products, which stay torch's in the weights' dtype"
            note += ", and the gate's factors" if gate[0] else ", not the gate's factors"
        become(module, _class(plain, forward), fields)
        report.converted.append(SavedModule(name, plain.__name__, {kind: own}, note))
    return report
