"""Finds what ``convert`` cannot reach: weights used without their layer, matrices in no layer."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import nn

from .report import Skipped

PRODUCTS = frozenset(
    ("linear", "conv2d", "matmul", "mm", "addmm", "bmm", "einsum", "__matmul__", "__rmatmul__")
)
"""torch functions that multiply by a weight."""

MIN_SIDE = 64
"""Rows and columns below which a stack of matrices is not listed."""

_TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_KINDS: dict[Any, tuple[str, str]] = {
    nn.Conv1d | nn.Conv3d | _TRANSPOSED: ("in_channels", "out_channels"),
    nn.RNNBase: ("input_size", "hidden_size"),
    nn.Bilinear: ("in1_features", "out_features"),
}
"""Layers that are not supported, and the attributes of their sizes."""


def matrices(model: nn.Module) -> list[Skipped]:
    """Experts in one Parameter and layers of unsupported kinds, each with the reason."""
    rows = []
    for fqn, module in model.named_modules():
        if sizes := next((sizes for kind, sizes in _KINDS.items() if isinstance(module, kind)), ()):
            ins, outs = (getattr(module, size) for size in sizes)
            base = next(c for c in type(module).__mro__ if c.__module__.startswith("torch.nn."))
            why = f"nn.{base.__name__} is not a kind of layer that HOT supports"
            values = sum(p.numel() for p in module._parameters.values() if p is not None)
            rows.append(Skipped(fqn, type(module).__name__, ins, outs, why, values))
        elif not isinstance(module, nn.Conv2d):
            rows += _stacks(fqn, module)
    return rows


def _stacks(fqn: str, module: nn.Module) -> list[Skipped]:
    rows: list[Skipped] = []
    for name, parameter in module._parameters.items():
        shape = () if parameter is None else tuple(parameter.shape)
        if len(shape) == 3 and shape[0] > 1 and min(shape[1:]) >= MIN_SIDE:
            count, outs, ins = shape  # the layout of F.linear's weight
            why = (
                f"a stack of {count} matrices in one Parameter (experts); only layers are converted"
            )
            about = (f"{fqn}.{name}" if fqn else name, type(module).__name__, ins, outs, why)
            rows.append(Skipped(*about, count * outs * ins))
    return rows


# ---- Layers whose parent uses their weight itself ----


def bypassed(
    model: nn.Module, layers: Mapping[str, nn.Module], *, certain: bool = True
) -> set[str]:
    """Names of layers whose parent's code multiplies ``self.NAME.weight``.

    Reads the source of the parent's class and runs nothing. With ``certain`` the parent never calls
    ``self.NAME(...)``; otherwise it does both, one of them in a branch. Other ways to reach a
    weight are not noticed.
    """
    names = set()
    for fqn in layers:
        parent, _, name = fqn.rpartition(".")
        if not fqn or name.isdigit():
            continue
        cls: Any = type(model.get_submodule(parent))
        multiplied, called = _uses(cls)
        if name in multiplied and (name in called) != certain:
            names.add(fqn)
    return names


@functools.lru_cache(maxsize=4096)
def _uses(cls: type[Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes of ``self`` whose weight a class multiplies, and attributes that it calls."""
    multiplied: set[str] = set()
    called: set[str] = set()
    for part in cls.__mro__:
        if part.__module__.startswith("torch.nn."):  # torch's own modules
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):  # a built-in, shell or generated class
            continue
        for node in ast.walk(tree):
            product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            if isinstance(node, ast.Call):
                called.add(_own_attribute(node.func))
                product = getattr(node.func, "attr", getattr(node.func, "id", "")) in PRODUCTS
            if product:
                multiplied |= _weights(node)
    return frozenset(multiplied), frozenset(called)


def _own_attribute(node: ast.AST) -> str:
    """``NAME`` of ``self.NAME``; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else ""
    return ""


def _weights(node: ast.AST) -> set[str]:
    return {
        name
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and part.attr == "weight"
        if (name := _own_attribute(part.value))
    }
