"""All private names of torch 2.6 to 2.15 that the adapter uses, and optional libraries.

The private names are faster, or give information that no public function gives.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

Context = Callable[[], AbstractContextManager[Any]]


def _private(name: str) -> Any:
    """Return ``torch._C.name``; raise ImportError if torch lacks it."""
    try:
        return operator.attrgetter(name)(torch._C)
    except AttributeError:
        raise ImportError(
            f"hotcore.torch: torch {torch.__version__} has no torch._C.{name}; install a newer "
            "hotcore, or torch 2.6 to 2.15"
        ) from None


transforms_active: Callable[[], bool] = _private("_are_functorch_transforms_active")
"""Whether a ``torch.func`` transform (grad, vmap, ...) is running."""
any_autocast: Callable[[], bool] = _private("_is_any_autocast_enabled")
"""Whether autocast is on for some device."""
jit_tracing: Callable[[], bool] = _private("_is_tracing")
"""Whether ``torch.jit.trace`` is running; the public function takes three times as long."""
keeps_graph: Callable[[], bool] = _private("_autograd._get_current_graph_task_keep_graph")
"""Whether the running backward pass keeps its graph (``retain_graph``)."""
batched: Callable[[torch.Tensor], bool] = _private("_functorch.is_legacy_batchedtensor")
"""Whether vmap batches a gradient: ``autograd.grad(is_grads_batched=True)``, jacobians."""
dispatch_modes: Callable[[], int] = _private("_len_torch_dispatch_stack")
"""Number of active ``TorchDispatchMode``s, which intercept every operator."""
torch_function_modes: Callable[[], int] = _private("_len_torch_function_stack")
"""Number of active ``TorchFunctionMode``s."""
without_torch_function: Context = _private("DisableTorchFunction")
"""Hides calls from ``TorchFunctionMode``, which intercepts every attribute and call of a layer."""
without_subclasses: Context = _private("DisableTorchFunctionSubclass")
"""Hides calls from the ``__torch_function__`` of subclasses; a documented name."""
COMPILED_OF = "_torchdynamo_orig_callable"
"""Attribute of torch.compile's result that holds the original, which its calls do not run."""


def current_stream(index: int) -> int:
    """Handle of the current stream of CUDA device ``index``; only builds with CUDA have one."""
    return torch._C._cuda_getCurrentRawStream(index)


sm_carveout: Callable[[], int | None] = getattr(
    torch._C, "_get_sm_carveout_experimental", lambda: None
)
"""Multiprocessors that torch's products leave to other kernels."""


def raise_instead(overload: Any, raised: Any) -> None:
    """Make an operator in C++ raise what the Python operator that it called has raised.

    Torch's C interface makes a RuntimeError of every error. OutOfMemoryError needs its type.
    """
    plain = overload._op

    @functools.wraps(plain)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return plain(*arguments, **options)
        except RuntimeError as shown:
            error, raised.error = getattr(raised, "error", None), None
            if error is None or "_python failed" not in str(shown):
                raise
        raise error

    overload._op = called


def in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint's policy sees every operator."""
    if dispatch_modes() == 0:  # faster than the list of modes
        return False
    utils: Any = torch.utils
    stack = utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, utils.checkpoint._CachingTorchDispatchMode) for mode in stack)


def global_module_hooks() -> list[dict[int, Any]]:
    """Hooks for all modules that see an output or its gradient."""
    names = ("_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
    return [getattr(torch.nn.modules.module, name) for name in names]


def loaded(module: str, name: str) -> tuple[Any, ...]:
    """A library's class for ``isinstance``, or an empty tuple if the library is not imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return () if cls is None else (cls,)


def functional(x: torch.Tensor) -> bool:
    """Whether x is a value of a graph that AOTAutograd is tracing."""
    return isinstance(x, FunctionalTensor)


SYMBOLIC = (FunctionalTensor, FakeTensor)
"""Tensors without values, as during compilation."""


def count_as_products(operators: Iterable[Any]) -> None:
    """Mark operators as expensive to recompute, like ``mm``, for the compiler's partitioner.

    Otherwise it treats them as free under an ``activation_memory_budget`` below 1 and repeats every
    product in backward. Call it only during compilation: importing the partitioner takes seconds.
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    original, products = partitioners.get_default_op_list, frozenset(operators)

    @functools.wraps(original)
    def with_operators() -> Any:
        lists = original()
        lists.compute_intensive_ops.update(products)
        return lists

    partitioners.get_default_op_list = with_operators


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this module, not its children, runs under ``torch.compile`` or ``compile()``."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


@functools.cache
def traces_parameters() -> bool:
    """Whether torch.compile follows a subclass of Parameter: from torch 2.13."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def unwritten(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context whose writes to a tensor do not count: graphs that keep it stay valid."""
    guard: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
    return cast(AbstractContextManager[Any], guard(tensor))


def memory_budget(budget: float) -> AbstractContextManager[Any]:
    """Set torch's ``activation_memory_budget`` for compilations inside."""
    config: Any = importlib.import_module("torch._functorch.config")
    return cast(AbstractContextManager[Any], config.patch(activation_memory_budget=budget))


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any]:
    """Hooks of a parameter that run after its ``.grad`` was accumulated."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks or {}
