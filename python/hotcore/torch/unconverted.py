"""Finds what ``convert`` cannot reach: weights used without their layer, matrices in no layer."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from .report import Skipped

MIN_SIDE = 64
"""Rows and columns below which a stack of matrices is not listed."""

_PRODUCTS = frozenset(("linear", "conv2d", "matmul", "mm", "addmm", "bmm", "einsum"))
_KINDS: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.RNNBase,
    nn.Bilinear,
)


def matrices(model: nn.Module) -> list[Skipped]:
    """Matrices outside of Linear, Conv2d and Conv1D, and why they are not converted.

    These are experts of a mixture in one Parameter, and layers of other kinds: other convolutions,
    recurrent layers, ``nn.Bilinear``.
    """
    found = []
    for fqn, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _KINDS):
            sizes = _sizes(module)
            why = f"nn.{_base(module).__name__} is not a kind of layer that HOT supports"
            values = sum(p.numel() for p in module._parameters.values() if p is not None)
            found.append(Skipped(fqn, kind, *sizes, why, values))
        elif not isinstance(module, nn.Conv2d):
            found += _stacks(fqn, module)
    return found


def _stacks(fqn: str, module: nn.Module) -> list[Skipped]:
    found: list[Skipped] = []
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.dim() != 3 or parameter.shape[0] < 2:
            continue
        count, rows, columns = parameter.shape
        if min(rows, columns) < MIN_SIDE:
            continue
        why = f"a stack of {count} matrices in one Parameter (experts); only layers are converted"
        size = (columns, rows, why, parameter.numel())  # the layout of F.linear's weight
        full_name = f"{fqn}.{name}" if fqn else name
        found.append(Skipped(full_name, type(module).__name__, *size))
    return found


def _base(module: nn.Module) -> type:
    return next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn."))


def _sizes(module: nn.Module) -> tuple[int, int]:
    for ins, outs in (
        ("in_channels", "out_channels"),
        ("input_size", "hidden_size"),
        ("in1_features", "out_features"),
    ):
        sizes = getattr(module, ins, None), getattr(module, outs, None)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return sizes[0], sizes[1]
    return 0, 0


# ---- Layers whose parent uses their weight itself ----


def bypassed(
    model: nn.Module, layers: Mapping[str, nn.Module], *, certain: bool = True
) -> set[str]:
    """Names of layers whose parent's code multiplies ``self.NAME.weight``.

    Reads the source of the parent's class and runs nothing. With ``certain`` the parent never calls
    ``self.NAME(...)``; otherwise it does both, one of them in a branch. Code that reaches a weight
    in another way is not found.
    """
    found = set()
    for fqn in layers:
        parent, _, name = fqn.rpartition(".")
        if not fqn or name.isdigit():
            continue
        cls: Hashable = type(model.get_submodule(parent))  # type: ignore[assignment]  # mypy: #11470
        multiplied, called = _uses(cls)
        if name in multiplied and (name in called) != certain:
            found.add(fqn)
    return found


@functools.lru_cache(maxsize=4096)
def _uses(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes of self whose weight the class multiplies, and attributes that it calls."""
    multiplied: set[str] = set()
    called: set[str] = set()
    for part in cls.__mro__:
        if part.__module__.startswith("torch.nn."):  # torch's own modules
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):  # built in, typed into a shell, generated
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                if name := _own_attribute(node.func):
                    called.add(name)
                if getattr(node.func, "attr", getattr(node.func, "id", "")) in _PRODUCTS:
                    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                        multiplied |= _weights(argument)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
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
