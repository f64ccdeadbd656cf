"""Every private name of torch that the adapter uses, each with a public way where it is missing.

The private ones are faster, or know what no public function tells. tests/torch/test_private.py runs
each function with and without its private name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_C: Any = torch._C


def transforms_active() -> bool:
    """Whether a ``torch.func`` transform (grad, vmap, ...) is running.

    Without the private name False: torch's own error of autograd functions then says it.
    """
    active = getattr(_C, "_are_functorch_transforms_active", None)
    return False if active is None else bool(active())


def any_autocast() -> bool:
    """Whether autocast may be on for some device; True without the private name."""
    enabled = getattr(_C, "_is_any_autocast_enabled", None)
    return True if enabled is None else bool(enabled())


def current_stream(index: int) -> int:
    """Handle of the current stream of CUDA device ``index``.

    The private function does not make an object around it.
    """
    raw = getattr(_C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return int(torch.cuda.current_stream(index).cuda_stream)
    return int(raw(index))


def dispatch_modes() -> int:
    """How many modes watch every operator (``TorchDispatchMode``).

    Without the private name 1, as if there were one: calls then go through the dispatcher.
    """
    count = getattr(_C, "_len_torch_dispatch_stack", None)
    return 1 if count is None else int(count())


def without_torch_function() -> AbstractContextManager[Any]:
    """Hides what is done inside from ``TorchFunctionMode``; does nothing without the private name.

    A mode would be asked about every attribute and call of a layer.
    """
    disabled = getattr(_C, "DisableTorchFunction", None)
    return nullcontext() if disabled is None else disabled()


@functools.cache
def _class(module: str, name: str) -> Any:
    """A class of torch, or one without instances where there is none of that name."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return type(name, (), {})


def functional(x: torch.Tensor) -> bool:
    """Whether x stands for a value of a graph that AOTAutograd is tracing; False if unknown."""
    return isinstance(x, _class("torch._subclasses.functional_tensor", "FunctionalTensor"))


def symbolic(x: torch.Tensor) -> bool:
    """Whether x has no values, as while something is compiled; False if unknown."""
    return functional(x) or isinstance(x, _class("torch._subclasses.fake_tensor", "FakeTensor"))


@functools.cache
def prefers_cudnn_attention(index: int, dtype: torch.dtype, width: int, causal: bool) -> bool:
    """Whether torch takes cuDNN's kernel for an attention without mask and dropout.

    False where torch does not tell: flash attention gives the same, on Hopper in twice the time.
    """
    choice = getattr(torch, "_fused_sdp_choice", None)
    if choice is None:
        return False
    with _no_modes():
        q = torch.empty((1, 1, 192, width), dtype=dtype, device=torch.device("cuda", index))
        return int(choice(q, q, q, None, 0.0, causal)) == _CUDNN


_CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION


def _no_modes() -> AbstractContextManager[Any]:
    """Real tensors are made inside, also while something is compiled."""
    try:
        modes: Any = importlib.import_module("torch.utils._python_dispatch")
        return modes._disable_current_modes()  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return nullcontext()


def count_as_products(operators: Iterable[Any]) -> bool:
    """Have the compiler's partitioner treat operators as it treats ``mm``: dear to recompute.

    Told nothing, it takes them for free under an ``activation_memory_budget`` below 1, and repeats
    every product in backward. Returns whether it could be told. Imports the partitioner, which
    takes seconds: for the time of a compilation.
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
    """Whether the backward pass at hand adds to ``leaf.grad``; False without the private name.

    ``backward()`` does; ``torch.autograd.grad`` does not, nor does ``backward(inputs=...)`` of
    others.
    """
    will_run = getattr(_C, "_will_engine_execute_node", None)
    if will_run is None:
        return False
    try:
        return bool(will_run(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:  # torch's answer for what autograd.grad was asked for
        return False


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether this module, not its children, runs under ``torch.compile``.

    Both ways to it leave a private attribute: ``torch.compile(module)`` and ``module.compile()``.
    Without them False: ``autotune(compiled=True)`` says it.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


_is_batched: Any = getattr(getattr(_C, "_functorch", None), "is_legacy_batchedtensor", None)


def batched(gradient: torch.Tensor) -> bool:
    """Whether it stands for many: ``autograd.grad(is_grads_batched=True)``, vectorised jacobians.

    Without the private name, whether it has no memory of its own.
    """
    if _is_batched is not None:
        return bool(_is_batched(gradient))
    try:
        gradient.data_ptr()
    except RuntimeError:
        return True
    return False
