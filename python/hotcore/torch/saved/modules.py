"""Modules whose backward pass uses codes, converted from plain ones in place.

A module keeps its Parameters, its hooks and its place in the model. Only its class changes, to a
subclass with another forward pass; in eval mode the plain one runs.
"""

from __future__ import annotations

import dataclasses
import difflib
import dis
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import experts, functions
from .attention import scaled_dot_product_attention

Saved = int | Mapping[str, Any]

KINDS: Mapping[str, tuple[int | None, ...]] = {
    "activation": (8, 4, None),
    "relu": (1, None),
    "norm": (8, 4, None),
    "attention": (8, 4, None),
    "product": (8, 4, None),
    "experts": (8, 4, None),
}
"""Kinds of operations and the supported numbers of bits; None: save tensors unchanged.

``product``: the two factors of a gated unit (SwiGLU, GeGLU). ``experts``: x of the grouped products
of a mixture of experts, which stay torch's, in the dtype of the weights.
"""

SAVED_FIELDS = ("saved_bits", "saved_gate")
"""What a converted module has beside its class."""

Bits = dict[str, "int | None"]


@dataclasses.dataclass(frozen=True)
class SavedModule:
    """A module that saves codes."""

    name: str
    kind: str
    """Name of the plain class."""
    bits: Mapping[str, int]
    """Kind of operation -> bits."""


@dataclasses.dataclass
class SavedReport:
    """The result of :func:`convert_saved`; print it for a table."""

    converted: list[SavedModule]
    left: dict[str, str]
    """Name of a module with such an operation that was not converted -> why."""

    def __str__(self) -> str:
        """One row per class, kinds and bits; then the modules that stay plain, and why."""
        rows: dict[tuple[str, str], list[str]] = {}
        for module in self.converted:
            bits = ", ".join(f"{kind} {value}" for kind, value in module.bits.items())
            if "experts" in module.bits:
                bits += "; x of the grouped products, which stay torch's in the weights' dtype"
            rows.setdefault((module.kind, bits), []).append(module.name)
        lines = [
            f"{kind}: kept in bits: {bits} ({_listed(names)})"
            for (kind, bits), names in rows.items()
        ]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"as it was: {_listed(names)}: {reason}" for reason, names in reasons.items()]
        count = len(self.converted)
        lines.append(
            f"{count} modules keep codes for backward ({len(self.left)} left as they were)"
        )
        return "\n".join(lines)


def _listed(names: list[str]) -> str:
    shown = [name or "(root)" for name in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown) + more


# ---- The classes ----


class SavedCodes:
    """Base of the classes that :func:`convert_saved` assigns to modules."""

    plain: ClassVar[type[nn.Module]]
    saved_bits: Bits
    """Kind of operation -> bits; None: unchanged."""

    def extra_repr(self) -> str:
        """The text of the plain module, and the bits."""
        base: str = super().extra_repr()  # type: ignore[misc]
        bits = ", ".join(f"{kind}={value}" for kind, value in self.saved_bits.items() if value)
        return f"{base}, saved({bits})" if base else f"saved({bits})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy rebuild the class, which is made at run time, from the plain one."""
        return _new, (self.plain, _recipe(type(self))), self.__dict__


def _new(plain: type[nn.Module], forward: str) -> nn.Module:
    cls = _class(plain, forward)
    return cls.__new__(cls)


def _recipe(cls: type) -> str:
    return str(cls.__dict__["_hot_forward"])


_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def _class(plain: type[nn.Module], forward: str) -> type[nn.Module]:
    """The subclass of ``plain`` whose training forward is ``_FORWARDS[forward]``."""
    found = _classes.get((plain, forward))
    if found is None:
        body = {
            "plain": plain,
            "_hot_forward": forward,
            "forward": _training(plain, _FORWARDS[forward]),
            "__module__": plain.__module__,
            "__doc__": plain.__doc__,
        }
        found = type(f"Saved{plain.__name__}", (SavedCodes, plain), body)
        _classes[plain, forward] = found
    return found


def _training(plain: type[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
    of_x = len(inspect.signature(forward).parameters) == 2  # self and x, by whatever name

    def train_or_plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return plain.forward(self, *args, **kwargs)
        return forward(self, *args, *kwargs.values()) if of_x else forward(self, *args, **kwargs)

    train_or_plain.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]  # libraries look
    return train_or_plain


def _gelu(self: Any, input: Tensor) -> Tensor:
    name = "gelu" if self.approximate == "none" else "gelu_tanh"
    return functions.activation(input, name, self.saved_bits["activation"])


def _named(name: str) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        return functions.activation(input, name, self.saved_bits["activation"])

    return forward


def _relu(self: Any, input: Tensor) -> Tensor:
    return functions.relu(input, self.inplace)


def _relu_squared(self: Any, input: Tensor) -> Tensor:
    return functions.relu_squared(input, self.saved_bits["activation"])


def _layer_norm(self: Any, input: Tensor) -> Tensor:
    shape, bits = self.normalized_shape, self.saved_bits["norm"]
    return functions.layer_norm(input, shape, self.weight, self.bias, self.eps, bits)


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    shape, bits = self.normalized_shape, self.saved_bits["norm"]
    return functions.rms_norm(x, shape, self.weight, self.eps, bits)


def _llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    shape, bits = hidden_states.shape[-1:], self.saved_bits["norm"]  # a weight may have more axes
    return functions.rms_norm(
        hidden_states, shape, self.weight, self.variance_epsilon, bits, "llama"
    )


def _timm_norm(self: Any, x: Tensor) -> Tensor:
    shape, bits = self.normalized_shape, self.saved_bits["norm"]
    return functions.rms_norm(x, shape, self.weight, self.eps, bits, "timm")


def _gate_of(self: Any) -> str | None:
    """The key of functions.ACTIVATIONS for ``act_fn``, which :func:`.gated` does not call.

    None where it has to be called: it is another one by now, or has hooks or a forward of its own.
    """
    name, known = self.saved_gate
    act = self.act_fn
    hooks = (act._forward_pre_hooks, act._forward_hooks, act._backward_pre_hooks)
    if act is known and "forward" not in act.__dict__ and not any((*hooks, act._backward_hooks)):
        return str(name)
    if not torch.compiler.is_compiling():
        what = f"act_fn, a {type(act).__name__}, was replaced, or has hooks or a forward of its own"
        what = f"hotcore.torch: {what}: the gated product's factors are kept as they are"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
    return None


def _llama_mlp(self: Any, x: Tensor) -> Tensor:
    name = _gate_of(self)
    if name is None:
        plain: Tensor = self.plain.forward(self, x)
        return plain
    gate, up = self.gate_proj(x), self.up_proj(x)
    product = functions.gated(gate, up, name, self.saved_bits["product"])
    output: Tensor = self.down_proj(product)
    return output


class _Watch(TorchFunctionMode):
    """Replaces torch's functions by the ones that save codes, for the calls inside."""

    def __init__(self, bits: Bits) -> None:
        super().__init__()
        self.bits = bits

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        bits: dict[str, Any] = self.bits
        if func is F.scaled_dot_product_attention and bits.get("attention"):
            return scaled_dot_product_attention(*args, **kwargs, bits=bits["attention"])
        if func is F.gelu and bits.get("activation"):
            return _called_gelu(bits["activation"], *args, **kwargs)
        if func is F.silu and bits.get("activation"):
            return _called("silu", F.silu, bits["activation"], *args, **kwargs)
        if func is F.mish and bits.get("activation"):
            return _called("mish", F.mish, bits["activation"], *args, **kwargs)
        if func is F.hardswish and bits.get("activation"):
            return _called("hardswish", F.hardswish, bits["activation"], *args, **kwargs)
        if func is F.relu and bits.get("relu"):
            return functions.relu(*args, **kwargs)
        if func is F.layer_norm and bits.get("norm"):
            return _called_layer_norm(bits["norm"], *args, **kwargs)
        if func is F.rms_norm and bits.get("norm"):
            return _called_rms_norm(bits["norm"], *args, **kwargs)
        return func(*args, **kwargs)


def _called_gelu(bits: Any, input: Tensor, approximate: str = "none") -> Tensor:
    return functions.activation(input, "gelu" if approximate == "none" else "gelu_tanh", bits)


def _called(name: str, plain: Any, bits: Any, input: Tensor, inplace: bool = False) -> Tensor:
    if inplace:
        y: Tensor = plain(input, inplace=True)
        return y
    return functions.activation(input, name, bits)


def _called_layer_norm(
    bits: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return functions.layer_norm(input, normalized_shape, weight, bias, eps, bits)


def _called_rms_norm(
    bits: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return functions.rms_norm(input, normalized_shape, weight, eps, bits)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    bits = self.saved_bits.get("experts")
    if not bits or experts.why_plain(self):
        return self.plain.forward(self, hidden_states, top_k_index, top_k_weights)
    inner = self._apply_gate if self.has_gate else self.act_fn
    kept = self.saved_bits.get("product")
    if kept and (name := _gate_of(self)):

        def inner(rows: Tensor) -> Tensor:
            factors = rows.chunk(2, -1)
            return functions.gated(factors[0], factors[1], name, kept)

    matrices = (experts.first_of(self), self.down_proj)
    return experts.experts(hidden_states, top_k_index, top_k_weights, *matrices, inner, bits)


def _watched(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _Watch(self.saved_bits):
        return self.plain.forward(self, *args, **kwargs)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "gelu": _gelu,
    **{name: _named(name) for name in functions.ACTIVATIONS if name != "gelu"},
    "relu": _relu,
    "relu_squared": _relu_squared,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "llama_norm": _llama_norm,
    "timm_norm": _timm_norm,
    "llama_mlp": _llama_mlp,
    "experts": _experts,
    "watched": _watched,
}


# ---- Operations of a module ----


class _Templates:
    """Forward passes that many classes of transformers share literally."""

    def llama_norm(self: Any, hidden_states: Any) -> Any:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)

    def llama_mlp(self: Any, x: Any) -> Any:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

    def expert_gate(self: Any, gate_up_out: Any) -> Any:
        gate, up = gate_up_out.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def gelu_new(self: Any, input: Any) -> Any:
        return (
            0.5
            * input
            * (
                1.0
                + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0)))
            )
        )

    def gelu_fast(self: Any, input: Any) -> Any:
        return (
            0.5
            * input
            * (1.0 + torch.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))
        )

    def gelu_quick(self: Any, input: Any) -> Any:
        return input * torch.sigmoid(1.702 * input)

    def relu_squared(self: Any, input: Any) -> Any:
        relu_applied = nn.functional.relu(input)
        squared = torch.square(relu_applied)
        return squared


def _bytecode(function: Any) -> tuple[Any, ...] | None:
    """A key of a function's code: equal for equal sources, up to names of variables."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    consts = tuple(c for c in code.co_consts if not isinstance(c, str) or c != function.__doc__)
    return code.co_code, code.co_names, tuple(c for c in consts if c is not None)


_TEMPLATES = {
    _bytecode(function): name
    for name, function in vars(_Templates).items()
    if inspect.isfunction(function)
}

_EXACT: dict[type[nn.Module], tuple[str, str]] = {
    nn.GELU: ("gelu", "activation"),
    nn.SiLU: ("silu", "activation"),
    nn.Mish: ("mish", "activation"),
    nn.Hardswish: ("hardswish", "activation"),
    nn.ReLU: ("relu", "relu"),
    nn.LayerNorm: ("layer_norm", "norm"),
    nn.RMSNorm: ("rms_norm", "norm"),
}

_KIND_OF_TEMPLATE = {"llama_norm": "norm", "llama_mlp": "product"}  # others: activation

_CALLS: dict[str, str] = {
    "scaled_dot_product_attention": "attention",
    "gelu": "activation",
    "silu": "activation",
    "mish": "activation",
    "hardswish": "activation",
    "relu": "relu",
    "layer_norm": "norm",
    "fast_layer_norm": "norm",
    "rms_norm": "norm",
    "fast_rms_norm": "norm",
}
"""Names in a forward pass -> kind of operation."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """The operations of a module, and how to convert it."""

    forward: str
    kinds: tuple[str, ...]
    reason: str = ""
    """Why it cannot be converted; empty if it can."""


def _gate_name(activation: nn.Module) -> str | None:
    """The key of functions.ACTIVATIONS for a module; None if it computes something else."""
    activation_class = getattr(activation, "plain", type(activation))
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    exact = _EXACT.get(activation_class)
    if exact is not None:
        return exact[0] if exact[0] in functions.ACTIVATIONS else None
    if _is_from(activation_class, "transformers.activations"):
        if activation_class.__name__ == "SiLUActivation":
            return "silu"
        return _activation_of_wrapper(activation)
    name = _TEMPLATES.get(_bytecode(activation_class.forward))
    return name if name in functions.ACTIVATIONS else None


def _activation_of_wrapper(module: nn.Module) -> str | None:
    """The key for transformers' modules that call a function held in ``act``."""
    act = getattr(module, "act", None)
    if act is F.gelu:
        return "gelu"
    if act is not None and getattr(act, "func", None) is F.gelu:
        approximate = act.keywords.get("approximate")
        return "gelu" if approximate in (None, "none") else "gelu_tanh"
    return None


def _is_from(cls: type, package: str) -> bool:
    return cls.__module__ == package or cls.__module__.startswith(package + ".")


def _find_operations(module: nn.Module) -> _Found | None:
    """A module's operations on activations; None if none of them can save codes."""
    cls = type(module)
    exact = _EXACT.get(cls)
    if exact is not None:
        if isinstance(module, (nn.SiLU, nn.Mish, nn.Hardswish)) and module.inplace:
            return _Found("", (exact[1],), "it works in place")
        return _Found(exact[0], (exact[1],))
    if cls.__module__.startswith("torch."):
        if isinstance(module, nn.MultiheadAttention):
            return _Found("", ("attention",), "nn.MultiheadAttention is not taken")
        return None
    if _is_from(cls, "timm.layers") and cls.__name__ == "RmsNorm" and not module._fast_norm:
        return _Found("timm_norm", ("norm",))
    if all(hasattr(module, name) for name in _EXPERTS):
        return _find_experts(module)
    template = _TEMPLATES.get(_bytecode(cls.forward))
    if template == "llama_mlp":
        if _gate_name(module.act_fn) is None:  # type: ignore[arg-type]
            return _Found("", ("product",), f"its activation is {type(module.act_fn).__name__}")
        return _Found(template, ("product",))
    if template is not None:
        return _Found(template, (_KIND_OF_TEMPLATE.get(template, "activation"),))
    if _is_from(cls, "transformers.activations") and _activation_of_wrapper(module) is not None:
        return _Found("watched", ("activation",))
    return _find_calls(module)


_EXPERTS = ("num_experts", "down_proj", "_apply_gate", "has_gate", "has_bias", "is_transposed")
"""What transformers' ``use_experts_implementation`` gives a class of experts, and they have."""


def _find_experts(module: Any) -> _Found:
    """Experts whose forward is transformers' of grouped products."""
    if why := experts.why_plain(module):
        return _Found("", ("experts",), why)
    default = _TEMPLATES.get(_bytecode(type(module)._apply_gate)) == "expert_gate"
    gated = module.has_gate and default and _gate_name(module.act_fn) is not None
    return _Found("experts", ("experts", "product") if gated else ("experts",))


def keeps_experts(module: nn.Module) -> bool:
    """Whether it is a module of experts whose x codes could take the place of."""
    found = _find_operations(module)
    return found is not None and found.forward == "experts"


def _called_names(function: Any) -> set[str]:
    """Functions that a forward pass names, also as ``module.function``; no attributes of self."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return set()
    names, before = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF") or (
            instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            and not before.startswith("LOAD_FAST")
        ):
            names.add(str(instruction.argval))
        before = instruction.opname
    return names


def _find_calls(module: nn.Module) -> _Found | None:
    """The operations that a module's own forward pass calls as functions."""
    names = _called_names(type(module).forward)
    kinds = {kind for name, kind in _CALLS.items() if name in names}
    if "scaled_dot_product_attention" in names and getattr(module, "fused_attn", True) is False:
        return _Found("", ("attention",), "its attention is made of products (fused_attn is off)")
    if "ALL_ATTENTION_FUNCTIONS" in names:
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if chosen != "sdpa":
            return _Found("", ("attention",), f"its attention is {chosen!r}, not 'sdpa'")
        kinds.add("attention")
    return _Found("watched", tuple(sorted(kinds))) if kinds else None


# ---- Conversion ----


def _value(kind: str, value: Any, where: str) -> int | None:
    if kind not in KINDS:
        raise ValueError(f"{where}: {kind!r}: no such kind of operation; known: {', '.join(KINDS)}")
    allowed = KINDS[kind]
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{where}: {kind}: {value!r}; expected one of {allowed}")
    found: int | None = value
    return found


def _all(value: Any, where: str) -> Bits:
    """Bits of every kind from one number."""
    if value is None:
        return dict.fromkeys(KINDS)
    if isinstance(value, bool) or value not in (4, 8):
        raise ValueError(f"{where}: {value!r}; expected 8, 4, None or a mapping")
    return {kind: 1 if kind == "relu" else value for kind in KINDS}


def _bits(saved: Saved, names: list[str]) -> dict[str, Bits]:
    """Name of a module -> its bits of every kind.

    ``names`` are the modules with operations that can save codes.
    """
    if not isinstance(saved, Mapping):
        base = _all(saved, "saved")
        return {name: dict(base) for name in names}
    bits = {name: _all(8, "saved") for name in names}
    patterns = []
    for key, value in saved.items():
        if not isinstance(key, str):
            raise ValueError(f"saved: the key {key!r}; expected a kind of operation or a pattern")
        if key in KINDS:
            checked = _value(key, value, "saved")
            for own in bits.values():
                own[key] = checked
        else:
            patterns.append((key, value))
    for (
        pattern,
        value,
    ) in patterns:  # patterns are more specific than kinds, so they come after them
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.strip("*."), [*KINDS, *names], 3, 0.3)
            known = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(
                f"saved: {pattern!r} is no kind of operation ({', '.join(KINDS)}) and matches no "
                f"module that does one{known}"
            )
        for name in matched:
            if isinstance(value, Mapping):
                where = f"saved[{pattern!r}]"
                bits[name].update({kind: _value(kind, v, where) for kind, v in value.items()})
            else:
                bits[name] = _all(value, f"saved[{pattern!r}]")
    return bits


def convert_saved(model: nn.Module, saved: Saved = 8) -> SavedReport:
    """Make the operations beside the linear layers save codes for backward, in place.

    ``hot.convert(model, recipe, saved=...)`` calls this. The report lists the modules.

    Args:
        model: any module.
        saved: 8 or 4, the bits of every kind; or a mapping of kinds (:data:`KINDS`) to bits or None
            (unchanged; 8 for a kind that is not named), and of name patterns (``fnmatch``) to bits,
            None, or such a mapping of kinds, for the matching modules.

    These modules are converted. By class: ``nn.GELU``, ``nn.SiLU``, ``nn.Mish``, ``nn.Hardswish``,
    ``nn.ReLU`` (one bit, exact), ``nn.LayerNorm``, ``nn.RMSNorm``. By the code of their forward
    pass: the activations, RMSNorms and gated MLPs of transformers that equal those of Llama or
    GPT-2, and timm's. By their calls: modules whose own forward calls ``F.gelu``, ``F.silu``,
    ``F.mish``, ``F.hardswish``, ``F.relu``, ``F.layer_norm``, ``F.rms_norm`` or
    ``F.scaled_dot_product_attention`` (timm's attention; transformers' with
    ``attn_implementation="sdpa"``). During their forward pass a TorchFunctionMode, which
    torch.compile supports, replaces the function by the one that saves codes. By their attributes:
    transformers' experts in two Parameters, with ``experts_implementation="grouped_mm"``.

    Raises:
        ValueError: bad bits; a key that is no kind and matches nothing; or a module that is already
            converted.
    """
    found = [(name, module, what) for name, module, what in _walk(model) if what is not None]
    twice = [name for name, module in model.named_modules() if isinstance(module, SavedCodes)]
    if twice:
        raise ValueError(
            f"model: keeps codes already ({_listed(twice)}); revert() it first, or change the "
            "bits of a module by its saved_bits"
        )
    bits = _bits(saved, [name for name, _, _ in found])
    report = SavedReport([], {})
    for name, module, what in found:
        own = {kind: value for kind in what.kinds if (value := bits[name][kind]) is not None}
        if what.reason:
            if any(bits[name][kind] is not None for kind in what.kinds):
                report.left[name] = what.reason
            continue
        if not own:
            continue
        plain = type(module)
        if what.forward in ("llama_mlp", "experts") and "product" in what.kinds:
            gate = _gate_name(module.act_fn), module.act_fn  # type: ignore[arg-type]  # a module
            module.saved_gate = gate  # type: ignore[assignment]  # no Parameter, no submodule
        module.saved_bits = dict(own)  # type: ignore[assignment]
        module.__class__ = _class(plain, what.forward)
        report.converted.append(SavedModule(name, plain.__name__, own))
    return report


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, _Found | None]]:
    for name, module in model.named_modules():
        yield name, module, None if isinstance(module, SavedCodes) else _find_operations(module)


def revert_saved(model: nn.Module) -> int:
    """Restore every module's plain class; return their number.

    Raises ValueError if a module has become a subclass in the meantime (a parametrisation,
    ``fully_shard``): undo that first.
    """
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, SavedCodes)]
    for name, module in found:
        if "_hot_forward" not in type(module).__dict__:
            raise ValueError(
                f"model: {name or '(root)'} is now a {type(module).__name__}; undo what was "
                "wrapped around it (a parametrisation, fully_shard) before revert()"
            )
    for _, module in found:
        module.__class__ = module.plain  # type: ignore[assignment]
        for attribute in SAVED_FIELDS:
            module.__dict__.pop(attribute, None)
    return len(found)
