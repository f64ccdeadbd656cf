"""Hooks that record how a forward pass uses a model's layers; the model does not change."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from .. import _compat
from ..frozen.weights import FrozenModule
from ..ops.calls import autocast_on
from ..ops.core import flat
from .unconverted import PRODUCTS

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, inputs)`` -> loss, a scalar."""


class Call(NamedTuple):
    """Properties of one call of a layer."""

    shape: tuple[int, ...]
    requires_grad: bool
    """Whether x's gradient is wanted."""
    autocast: torch.dtype | None
    """The dtype autocast computes in; None if it is off."""

    @classmethod
    def of(cls, x: Tensor) -> Call:
        """Return the properties of a call with x now."""
        return cls(tuple(x.shape), x.requires_grad, autocast_on(x.device.type))


@dataclasses.dataclass
class LayerUse:
    """How one forward pass used one layer."""

    calls: list[Call] = dataclasses.field(default_factory=list)
    macs: int = 0
    """Multiply-adds."""
    bypassed: bool = False
    """Whether its weight was multiplied outside of the layer's own forward."""

    @property
    def tokens(self) -> float | None:
        """Mean tokens of a call of a linear layer; None if it was not called."""
        counts = [math.prod(call.shape[:-1]) for call in self.calls]
        return sum(counts) / len(counts) if counts else None


def _hooked(
    modules: Mapping[str, nn.Module], enter: Callable[..., None], leave: Callable[..., None]
) -> ExitStack:
    """Call ``enter`` before and ``leave`` after each module's forward, until the result closes."""
    with ExitStack() as stack:
        for name, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            before, after = partial(enter, name), partial(leave, name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hook = module.register_forward_hook(after, with_kwargs=True, always_call=True)
            stack.callback(hook.remove)
        return stack.pop_all()


def kept_for_backward(
    modules: Mapping[str, nn.Module], besides: Iterable[Tensor], forward: Callable[[], object]
) -> dict[str, int]:
    """Run a forward pass and count the bytes that autograd keeps of it, by module.

    A storage counts in full for the innermost of ``modules`` that keeps it first, or for ``""``.
    Storages of ``besides`` do not count.
    """
    counted = {part._cdata for tensor in besides for part in _storages(tensor)}
    alive: list[Tensor] = []  # no storage's key is used again
    inside, sizes = [""], dict[str, int]()

    def pack(tensor: Tensor) -> Tensor:
        # Detached: an output would keep its own graph alive, because no backward pass frees it.
        tensor = tensor.detach()
        for storage in _storages(tensor):
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                alive.append(tensor)
                sizes[inside[-1]] = sizes.get(inside[-1], 0) + storage.nbytes()
        return tensor

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with _hooked(modules, lambda name, *_: inside.append(name), leave), hooks:
        forward()
    return sizes


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Memory of a tensor; a sparse one's indices and values have their own."""
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    return [part.untyped_storage() for part in parts]


class Watch(TorchFunctionMode):
    """Context that observes how forward passes inside use layers; it holds no tensors."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = layers
        self.uses = {name: LayerUse() for name in layers}
        self._inside: list[str] = []

    def __enter__(self) -> Watch:
        self._hooks = _hooked(self.layers, self._enter, self._leave)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._hooks.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notice products by a layer's weight outside of the layer."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in PRODUCTS:
            ids = {id(tensor) for tensor in (*args, *kwargs.values()) if tensor is not None}
            for name, layer in self.layers.items():
                if id(layer._parameters.get("weight")) in ids and name not in self._inside:
                    self.uses[name].bypassed = True
        return func(*args, **kwargs)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        x = input_of(args, kwargs)
        if x is not None:
            self.uses[name].calls.append(Call.of(x))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inside.pop()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            self.uses[name].macs += macs(module, first, args, kwargs)


def macs(layer: nn.Module, output: Tensor, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Multiply-adds of a layer's call; for an attention those of its projections."""
    if isinstance(layer, nn.MultiheadAttention):
        given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        values: int = sum(given[name].numel() for name in ("query", "query", "key", "value"))
        return int(layer.embed_dim) * values
    weight = layer.weight if isinstance(layer, FrozenModule) else layer._parameters.get("weight")
    if weight is None or not weight.numel() or not output.dim():  # no dims: a head's loss
        return 0
    outs = layer.out_channels if isinstance(layer, nn.Conv2d) else output.shape[-1]
    assert isinstance(outs, int)
    return output.numel() * weight.numel() // outs if outs else 0


def total_macs(run: Callable[[], object]) -> int:
    """Multiply-adds of all operations of ``run``, by torch's counter."""
    attention = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    mapping = {} if attention is None else {attention: _attention_flops}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with warnings.catch_warnings(), counter:
        # The warning is about global hooks, the counter's; nothing is compiled here.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        run()
    return int(counter.get_total_flops()) // 2


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the CPU's attention operator, which torch does not count."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[-2] * (width + value[-1]))


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first tensor of a call's arguments, a layer's x; None if there is none."""
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


def gradients_seen(
    layers: Mapping[str, nn.Module],
    see: Callable[[str, nn.Module, Call, Callable[[], Tensor], Tensor], None],
) -> AbstractContextManager[Any]:
    """Call ``see(name, layer, call, x, gy)`` in backward for every call of a layer inside.

    ``x()`` returns x, or raises RuntimeError if it was written after the call.
    """

    def follow(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        x = input_of(args, kwargs)
        call = (name, module, Call.of(x), _unwritten(x, name))
        if output._is_view():  # a write in place would take a view off the graph, and its hook
            output = output.clone()
        hook: Any = output.register_hook
        hook(lambda gy: see(*call, gy.detach()))
        return output

    return _hooked(layers, lambda *_: None, follow)


def _unwritten(x: Tensor, name: str) -> Callable[[], Tensor]:
    x = x.detach()
    version = None if x.is_inference() else x._version

    def unwritten() -> Tensor:
        if version is not None and x._version != version:
            raise RuntimeError(
                f"layer {name}: its x was written in place after the call, so that its gradients "
                "cannot be measured; leave the layer out"
            )
        return x

    return unwritten


def check_training(model: nn.Module, who: str) -> None:
    """Raise ValueError if the function ``who`` would find no backward pass to measure."""
    if not model.training:
        raise ValueError("model: in eval mode, where HOT's layers are plain; call model.train()")
    if not torch.is_grad_enabled():
        raise ValueError(f"{who}: gradients are off (torch.no_grad); it measures backward passes")


def eagerly() -> AbstractContextManager[Any]:
    """Context in which compiled modules run eagerly, so that hooks and modes see every call."""
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))


def output_of(model: nn.Module, inputs: Any) -> Any:
    """Call the model with a mapping as keyword arguments or a tuple as positional ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def loss_of(model: nn.Module, inputs: Any, loss_fn: LossFn | None) -> Tensor:
    """Return ``loss_fn``'s result, by default the sum of the means of the model's float outputs."""
    if loss_fn is not None:
        loss = loss_fn(model, inputs)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                "loss_fn: returned nothing that requires grad; a backward pass needs a loss with a "
                "graph (no torch.no_grad, no detach, no .item())"
            )
        return loss
    output = output_of(model, inputs)
    means = [tensor.float().mean() for tensor in _tensors(output) if tensor.requires_grad]
    if not means:
        raise ValueError("model: its output holds no tensor with a gradient; pass loss_fn")
    return torch.stack(means).sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):  # Hugging Face's outputs are mappings
        value = value.values()
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore .grad, buffers, modules' classes and attributes, and torch's random state at the end.

    Inside, no parameter has a .grad, and hooks on accumulated gradients (an optimizer in backward)
    do not run.
    """
    scripted = torch.jit.ScriptModule  # its tables belong to TorchScript
    modules = [m for m in model.modules() if not isinstance(m, scripted)]
    grads = [(p, p.grad) for p in model.parameters()]
    hooks = [_compat.post_accumulate_hooks(parameter) for parameter, _ in grads]
    tables: list[dict[Any, Any]] = list(hooks)
    for module in modules:
        tables += (module._parameters, module._buffers, module._modules, vars(module))
    contents = [(table, dict(table)) for table in tables]
    classes = [(m, type(m)) for m in modules]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with torch.random.fork_rng({p.device for p, _ in grads if p.is_cuda}), ExitStack() as stack:
        for buffer, value in buffers:  # last, and each whatever happens to the others
            stack.callback(_restore, buffer, value)
        for parameter, grad in grads:
            stack.callback(setattr, parameter, "grad", grad)
            parameter.grad = None
        for module, kind in classes:
            stack.callback(setattr, module, "__class__", kind)
        for table, content in contents:  # undoes self.buffer = self.buffer + 1
            stack.callback(table.update, content)
            stack.callback(table.clear)
        for table in hooks:
            table.clear()  # in place, because handles remove from it
        yield


@torch.no_grad()
def _restore(buffer: Tensor, value: Tensor) -> None:
    """Write a value back into a buffer; graphs made before are valid again."""
    if buffer.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
            if stride == 0 and size > 1:  # expanded: one element stands for all
                buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if buffer.is_inference():
        with torch.inference_mode():
            buffer.copy_(value)
    else:
        with _compat.unwritten(buffer):
            buffer.copy_(value)


# ---- sizes of the features of x ----


@dataclasses.dataclass
class Seen:
    """Batches that a model has run, and the x of its layers."""

    batches: int = 0
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    squares: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Sum of the squares of each feature, fp64 ``[I]``."""

    def add(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Add the x of a layer's call."""
        x = input_of(args, kwargs)
        if x is not None and x.numel():
            norms = torch.linalg.vector_norm(flat(x), dim=0, dtype=torch.float32)
            self.squares[name] = self.squares.get(name, 0.0) + norms.double().square()
            self.tokens[name] = self.tokens.get(name, 0) + x[..., 0].numel()


@torch.no_grad()
def seen_by(model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any]) -> Seen:
    """Run a model in eval mode over ``batches``. ValueError names a layer with a bad x."""
    seen = Seen()
    with preserve_state(model), eagerly(), _hooked(layers, seen.add, lambda *_: None):
        model.eval()
        for batch in batches:
            output_of(model, batch)
            seen.batches += 1
    for name, squares in seen.squares.items():
        if not bool(squares.isfinite().all()):
            raise ValueError(f"inputs: NaN or infinity in the x of layer {name or '(root)'}")
    return seen
