"""Every private name of torch that the adapter uses, in torch 2.6 to 2.15; Triton, libraries.

The private names are faster, or give information that no public function gives.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_C: Any = torch._C

_NAMES = (
    "_are_functorch_transforms_active",
    "_autograd._get_current_graph_task_keep_graph",
    "_functorch.is_legacy_batchedtensor",
    "_is_any_autocast_enabled",
    "_is_tracing",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
)
"""Those of ``torch._C``; ``_cuda_getCurrentRawStream`` is there in builds with CUDA alone."""


def require(names: Iterable[str] = _NAMES) -> None:
    """Raise ImportError where torch lacks a private name."""
    for name in names:
        try:
            operator.attrgetter(name)(_C)
        except AttributeError:
            raise ImportError(
                f"hotcore.torch: torch {torch.__version__} has no torch._C.{name}; install a newer "
                "hotcore, or torch 2.6 to 2.15"
            ) from None


require()  # here, not in a layer's first call


def global_module_hooks() -> list[dict[int, Any]]:
    """Hooks of all modules that see an output or its gradient."""
    names = ("_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
    return [getattr(torch.nn.modules.module, name) for name in names]


def loaded(module: str, name: str) -> tuple[Any, ...]:
    """A class of a library, as isinstance takes it; none where nobody has imported the library."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


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
    """Whether a ``torch.func`` transform (grad, vmap, ...) is running."""
    return bool(_C._are_functorch_transforms_active())


def any_autocast() -> bool:
    """Whether autocast is on for some device."""
    return bool(_C._is_any_autocast_enabled())


def current_stream(index: int) -> int:
    """Handle of the current stream of CUDA device ``index``, not wrapped in an object."""
    return int(_C._cuda_getCurrentRawStream(index))


def dispatch_modes() -> int:
    """Number of active ``TorchDispatchMode``s, which intercept every operator."""
    return int(_C._len_torch_dispatch_stack())


def in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint's policy sees every operator."""
    if dispatch_modes() == 0:  # sooner told than by the list of them
        return False
    utils: Any = torch.utils
    stack = utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, utils.checkpoint._CachingTorchDispatchMode) for mode in stack)


def torch_function_modes() -> int:
    """Number of active ``TorchFunctionMode``s."""
    return int(_C._len_torch_function_stack())


def without_torch_function() -> AbstractContextManager[Any]:
    """Hide the calls inside from ``TorchFunctionMode``.

    A mode would otherwise intercept every attribute and call of a layer.
    """
    disabled: AbstractContextManager[Any] = _C.DisableTorchFunction()
    return disabled


def functional(x: torch.Tensor) -> bool:
    """Whether x is a value of a graph that AOTAutograd is tracing."""
    return isinstance(x, FunctionalTensor)


def symbolic(x: torch.Tensor) -> bool:
    """Whether x has no values, as during compilation."""
    return isinstance(x, FunctionalTensor | FakeTensor)


def count_as_products(operators: Iterable[Any]) -> None:
    """Mark operators as expensive to recompute, like ``mm``, for the compiler's partitioner.

    Otherwise it treats them as free under an ``activation_memory_budget`` below 1 and repeats every
    product in backward. Call it only during compilation: it imports the partitioner, which takes
    seconds.
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    original = partitioners.get_default_op_list
    found = frozenset(operators)

    @functools.wraps(original)
    def with_operators() -> Any:
        lists = original()
        lists.compute_intensive_ops.update(found)
        return lists

    partitioners.get_default_op_list = with_operators


def jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` is running; the public function takes three times as long."""
    return bool(_C._is_tracing())


def keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph (``retain_graph``)."""
    return bool(_C._autograd._get_current_graph_task_keep_graph())


COMPILED_OF = "_torchdynamo_orig_callable"
"""Attribute of a result of torch.compile: what was compiled. No call of the result runs it."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this module, not its children, runs under ``torch.compile``.

    ``torch.compile(module)`` and ``module.compile()`` both set a private attribute.
    """
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


@functools.cache
def traces_parameters() -> bool:
    """Whether torch.compile follows a subclass of Parameter.

    It does in torch 2.13 and 2.15. In 2.6, 2.8, 2.10 and 2.12 tracing ends with an error.
    """
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def without_subclasses() -> AbstractContextManager[Any]:
    """Hide the calls inside from the ``__torch_function__`` of subclasses; a documented name."""
    disabled: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return disabled


def memory_budget(budget: float) -> AbstractContextManager[Any]:
    """torch's ``activation_memory_budget`` for what is compiled inside."""
    config: Any = importlib.import_module("torch._functorch.config")
    patched: AbstractContextManager[Any] = config.patch(activation_memory_budget=budget)
    return patched


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any]:
    """Its hooks that run once ``.grad`` is there."""
    found: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return found or {}


def batched(gradient: torch.Tensor) -> bool:
    """Whether vmap batches it: ``autograd.grad(is_grads_batched=True)``, vectorised jacobians."""
    return bool(_C._functorch.is_legacy_batchedtensor(gradient))
