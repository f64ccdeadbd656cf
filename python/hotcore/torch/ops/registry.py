"""Decorators: a function becomes an operator of ``torch.ops.hotcore``; backward runs only once.

Operators are low-level library operators with fakes: half the host time of
``torch.library.custom_op``. They follow no autocast and no vmap: callers cast, and refuse what is
batched. Operators of a compiled layer run in C++ where torch is 2.10 or newer
(``python/bindings/torch_ops.cpp``). The Python operator beside each, ``NAME_python``, takes the
first call with a configuration and a stream, calls that C++ does not know, and errors. It checks
the codes of a frozen weight; C++ takes codes that have not changed since (``know_codes``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ... import _core
from .. import _compat
from . import core

library: Any = torch.library.Library("hotcore", "DEF")  # type: ignore[no-untyped-call]  # so in torch

_products: list[str] = []
_Result = TypeVar("_Result")


def operator(
    schema: str,
    *,
    fake: Callable[..., Any] | None = None,
    composite: bool = False,
    flops: Callable[..., Any] = lambda *_, **__: 0,
    random: bool = False,
    any_strides: bool = True,
    product: bool = False,
    native: bool = False,
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Register the decorated function as an operator, whose calls go through the dispatcher.

    Args:
        schema: ``name(Tensor x, ...) -> Tensor``. A ``SymInt`` may be symbolic; an ``int`` is a
            constant of the graph. The function is called without trailing default values.
        fake: makes results of the same shapes, dtypes and strides, without values. The default is
            the function itself, in which :func:`.core.call` then does nothing.
        composite: made of other operators, which every tracer follows.
        flops: a formula of ``register_flop_formula``. A multiply-add counts as two, as in torch.
        random: draws random numbers.
        any_strides: takes arguments of any strides, and its results are contiguous. Otherwise
            inductor copies arguments into eager mode's strides.
        product: expensive to recompute, for the compiler's partitioner.
        native: has a form in C++, too. The first argument is a tensor; a text is a configuration.
    """

    def register(function: Callable[..., _Result]) -> Callable[..., _Result]:
        name = schema.partition("(")[0]
        tags = [torch.Tag.nondeterministic_seeded] if random else []
        if any_strides and not composite:
            tags.append(torch.Tag.flexible_layout)
        in_cpp = native and runs_in_cpp()
        kernel = _without_derivative(function, name) if product else function
        shown = _of_product(fake or function) if product else fake or function
        # C++ runs the first of two operators, and Python the last, which is alone otherwise.
        names = (name, f"{name}_python") if in_cpp else (name,)
        for each in names:
            library.define(schema.replace(name, each, 1), tags=tuple(tags))
            packet = getattr(torch.ops.hotcore, each)
            if in_cpp and each == name:
                _compat.raise_instead(packet.default, _raised)
            if not composite:
                torch.library.register_fake(f"hotcore::{each}", shown, lib=library)
            register_flop_formula(packet)(flops)
        _products.extend(names if product else ())
        for key in ("CompositeImplicitAutograd",) if composite else ("CPU", "CUDA"):
            library.impl(names[-1], _teaching(kernel) if in_cpp else kernel, key)
        default: Callable[..., _Result] = getattr(torch.ops.hotcore, name).default
        return default

    return register


# ---- operators in C++ ----


_raised = threading.local()
"""``error`` is what the calling thread's last Python operator behind one in C++ has raised."""


@functools.cache
def runs_in_cpp() -> bool:
    """Register the operators in C++, in the first call. False where torch is older than 2.10."""
    known = _core.torch_operators()
    if known:
        library.define("know_codes(Tensor codes, Tensor? exponents) -> int")
    return known


def python_form(operator: Any) -> Any:
    """The operator in Python beside one in C++, for calls that C++ would pass on to it."""
    name = f"{operator.name().partition('::')[2]}{'_python' if runs_in_cpp() else ''}"
    return getattr(torch.ops.hotcore, name).default


def _teaching(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The Python operator behind one in C++, which tells that one of configuration and context."""

    @functools.wraps(function)
    def called(x: Tensor, *arguments: Any) -> _Result:
        try:
            results = function(x, *arguments)
        except BaseException as error:
            _raised.error = error
            raise
        if _core.torch_unknown():
            core.teach(x, next((a for a in arguments if isinstance(a, str)), ""))
        return results

    return called


def _without_derivative(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A product that raises RuntimeError where autograd would follow it.

    Its gradients would be missing. Graphs in which this happens were made by taking a layer's
    operators apart outside of torch.compile.
    """

    @functools.wraps(function)
    def called(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in arguments):
            raise RuntimeError(
                f"torch.ops.hotcore.{name}: a graph whose HOT layers were taken apart "
                "(ExportedProgram.run_decompositions, make_fx) has no derivatives; run it under "
                "torch.no_grad(), or train the program as torch.export made it"
            )
        return function(*arguments)

    return called


def _of_product(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A product's fake. Only compilation calls it, and then needs :func:`_register_products`."""

    @functools.wraps(fake)
    def called(*arguments: Any, **options: Any) -> Any:
        _register_products()
        return fake(*arguments, **options)

    return called


@functools.cache
def _register_products() -> None:
    """Tell the partitioner that products are expensive, so that no budget recomputes them."""
    _compat.count_as_products(getattr(torch.ops.hotcore, name) for name in _products)


# ---- autograd functions ----

_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def not_differentiable(backward: _Backward) -> _Backward:
    """Make an autograd function's backward raise RuntimeError under ``create_graph=True``.

    It gives the gradients of the first inputs; the others get None, and so do all without a
    gradient of the result. ``once_differentiable`` would raise only where the result is
    differentiated. But autograd skips a node that leads to none of the requested inputs: the term
    would be missing without an error.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, gy: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # by the engine, to follow this pass
            raise RuntimeError(
                "hotcore.torch: create_graph=True reaches a HOT layer, whose backward cannot be "
                "differentiated: revert() the model, or keep the layer plain (convert's filter_fn)"
            )
        results = () if gy is None else backward(ctx, gy)
        return (*results, *(None,) * (len(ctx.needs_input_grad) - len(results)))

    return checked  # type: ignore[return-value]  # of the same signature


def without_base(y: Tensor) -> Tensor:
    """y as a tensor that is no view, in the same memory, for the result of an autograd function.

    ``F.linear`` may return a view of its product; autograd forbids writing such a result in place.
    """
    return y if y._base is None else y.data
