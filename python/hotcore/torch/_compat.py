"""Every private name of torch that the adapter uses, each with a public fallback; Triton.

The private names are faster, or give information that no public function gives.
tests/with_torch/test_private.py runs each function with and without its private name.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)
_C: Any = torch._C


class _PublicNames:
    """``torch._C`` of a version of torch that has none of the names below."""


@contextmanager
def without_private_names() -> Iterator[None]:
    """Use the public fallbacks inside, as on a version of torch without the private names.

    For tests; it holds for the whole process.
    """
    global _C
    before, _C = _C, _PublicNames()
    try:
        yield
    finally:
        _C = before


def global_module_hooks() -> list[dict[int, Any]]:
    """Hooks of all modules that see an output or its gradient."""
    names = ("_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
    return [getattr(torch.nn.modules.module, name, {}) for name in names]


@functools.cache
def triton_kernels(module: str, otherwise: str) -> ModuleType | None:
    """A module of Triton kernels; None without Triton, after one warning: what ``otherwise`` is."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"Triton is missing ({error}); {otherwise}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None


def transforms_active() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, ...) is running.

    False without the private name: torch's own error for autograd functions is then raised.
    """
    active = getattr(_C, "_are_functorch_transforms_active", None)
    return False if active is None else bool(active())


def any_autocast() -> bool:
    """Whether autocast may be on for some device; True without the private name."""
    enabled = getattr(_C, "_is_any_autocast_enabled", None)
    return True if enabled is None else bool(enabled())


def current_stream(index: int) -> int:
    """Handle of the current stream of CUDA device ``index``.

    The private function does not wrap it in an object.
    """
    raw = getattr(_C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return int(torch.cuda.current_stream(index).cuda_stream)
    return int(raw(index))


def dispatch_modes() -> int:
    """Number of active ``TorchDispatchMode``s, which intercept every operator.

    1 without the private name, so that calls go through the dispatcher.
    """
    count = getattr(_C, "_len_torch_dispatch_stack", None)
    return 1 if count is None else int(count())


def in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint's policy sees every operator; True if unknown."""
    if dispatch_modes() == 0:
        return False
    stack = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", None)
    mode = getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)
    if stack is None or mode is None:
        return True
    return any(isinstance(active, mode) for active in stack())


def torch_function_modes() -> int:
    """Number of active ``TorchFunctionMode``s; 1 without the private name."""
    count = getattr(_C, "_len_torch_function_stack", None)
    return 1 if count is None else int(count())


def without_torch_function() -> AbstractContextManager[Any]:
    """Hide the calls inside from ``TorchFunctionMode``; does nothing without the private name.

    A mode would otherwise intercept every attribute and call of a layer.
    """
    disabled = getattr(_C, "DisableTorchFunction", None)
    return nullcontext() if disabled is None else disabled()


@functools.cache
def _class(module: str, name: str) -> Any:
    """A class of torch, or a class without instances if torch has none of that name."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return type(name, (), {})


def functional(x: torch.Tensor) -> bool:
    """Whether x is a value of a graph that AOTAutograd is tracing; False if unknown."""
    return isinstance(x, _class("torch._subclasses.functional_tensor", "FunctionalTensor"))


def symbolic(x: torch.Tensor) -> bool:
    """Whether x has no values, as during compilation; False if unknown."""
    return functional(x) or isinstance(x, _class("torch._subclasses.fake_tensor", "FakeTensor"))


def count_as_products(operators: Iterable[Any]) -> bool:
    """Mark operators as expensive to recompute, like ``mm``, for the compiler's partitioner.

    Otherwise it treats them as free under an ``activation_memory_budget`` below 1 and repeats every
    product in backward. Returns whether the marking worked. Call it only during compilation: it
    imports the partitioner, which takes seconds.
    """
    try:
        partitioners: Any = importlib.import_module("torch._functorch.partitioners")
        original = partitioners.get_default_op_list
        original().compute_intensive_ops.update(())
    except (ImportError, AttributeError):
        return False
    found = frozenset(operators)

    @functools.wraps(original)
    def with_operators() -> Any:
        lists = original()
        lists.compute_intensive_ops.update(found)
        return lists

    partitioners.get_default_op_list = with_operators
    return True


_is_tracing: Callable[[], bool] = getattr(_C, "_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]  # so in torch


def jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` is running; the public function takes three times as long."""
    return _is_tracing()


def accumulates(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass adds to ``leaf.grad``; False without the private name.

    ``backward()`` does; ``torch.autograd.grad`` does not, nor does ``backward(inputs=...)`` of
    others.
    """
    will_run = getattr(_C, "_will_engine_execute_node", None)
    if will_run is None:
        return False
    try:
        return bool(will_run(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:  # torch raises it for a leaf that autograd.grad returns
        return False


def keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph (``retain_graph``); True if unknown."""
    keeps = getattr(getattr(_C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    return True if keeps is None else bool(keeps())


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this module, not its children, runs under ``torch.compile``.

    ``torch.compile(module)`` and ``module.compile()`` both set a private attribute. False without
    these names.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@functools.cache
def traces_parameters() -> bool:
    """Whether torch.compile follows a subclass of Parameter with a ``__torch_function__``.

    It does in torch 2.13 and 2.15. In 2.6, 2.8, 2.10 and 2.12 tracing ends with an error.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def without_subclasses() -> AbstractContextManager[Any]:
    """Hide the calls inside from the ``__torch_function__`` of subclasses; a documented name."""
    disabled: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return disabled


def wrapper(cls: Any, inner: torch.Tensor) -> Any:
    """A tensor of a subclass, like ``inner`` but without memory; a name that libraries rely on."""
    like = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
    made: Any = torch.Tensor
    return made._make_wrapper_subclass(cls, inner.shape, **like)


def memory_budget(budget: float) -> AbstractContextManager[Any]:
    """torch's ``activation_memory_budget`` for what is compiled inside.

    Without the name, as in no supported torch, it raises ImportError or AttributeError.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    patched: AbstractContextManager[Any] = config.patch(activation_memory_budget=budget)
    return patched


def forget_compiled(module: torch.nn.Module) -> None:
    """Undo ``module.compile()`` of a copy, whose compiled call is that of the original."""
    vars(module).pop("_compiled_call_impl", None)


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any]:
    """Its hooks that run once ``.grad`` is there; empty without the private name."""
    found: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if found is None else found


def rebind_hooks(module: _Module) -> _Module:
    """Give hooks of ``load_state_dict`` this module, a copy, in place of the one that it replaces.

    They hold a weak reference to their module, and raise RuntimeError once it is gone.
    """
    for hook in getattr(module, "_load_state_dict_pre_hooks", {}).values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(module)
    return module


def batched(gradient: torch.Tensor) -> bool:
    """Whether vmap batches it: ``autograd.grad(is_grads_batched=True)``, vectorised jacobians.

    Without the private name: whether it has no memory of its own.
    """
    is_batched = getattr(getattr(_C, "_functorch", None), "is_legacy_batchedtensor", None)
    if is_batched is not None:
        return bool(is_batched(gradient))
    try:
        gradient.data_ptr()
    except RuntimeError:
        return True
    return False
