"""FSDP2 that gathers a weight's INT8 codes, a byte a value, in place of its values.

The codes are those of the 8-bit forward, a row at a time, so each process makes those of its own
rows: y has the bits of an ordinary ``fully_shard``. Backward takes g_x from the same codes (the
weight that y was made with), and g_w and g_b need no weight.
"""

from __future__ import annotations

import collections
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _compat
from .frozen import mapped
from .modules import HotLinear
from .ops import codes, is_dtensor
from .ops.codes import Frozen

_Model = TypeVar("_Model", bound=nn.Module)
_NAN = float("nan")
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]  # a property of C
_MOVES = ("_pin_memory", "_to_copy", "alias", "clone", "detach", "empty_like")
_SAME = (*_MOVES, "as_strided", "new_zeros", "slice", "split", "view")
"""Operators of rows whose results are rows: what fully_shard, copies and moves do."""


def gather_codes(model: _Model) -> _Model:
    """Have ``fully_shard`` gather codes of the weights of HotLinears with an 8-bit forward.

    Call it after :func:`hotcore.torch.convert` and before ``fully_shard``. All weights stay what
    they are, for optimizers and checkpoints. Layers that share a weight are left out.

    Returns:
        ``model``, changed in place.

    Raises:
        ValueError: there is no such layer, or it is sharded already.

    In the training: RuntimeError in eval mode with gradients; NotImplementedError in compiled
    layers, under dispatch modes, of tensor parallel weights, and of weights whose number of rows
    does not divide by that of processes.
    """
    every = model.named_parameters(remove_duplicate=False)
    uses = collections.Counter(id(parameter) for _, parameter in every)
    found = False
    for name, layer in model.named_modules():
        if not isinstance(layer, HotLinear) or layer.config.forward != "int8":
            continue
        weight = layer._parameters.get("weight")
        if is_dtensor(weight):
            raise ValueError(f"model: the weight of {name} is a DTensor; fully_shard comes after")
        if type(layer) is HotLinear and weight is not None and uses[id(weight)] == 1:
            rows = _Rows.of(weight.detach())
            layer.weight = nn.Parameter(rows, requires_grad=weight.requires_grad)
            found = True
    if not found:
        raise ValueError("model: no HotLinear of it has forward='int8' and a weight of its own")
    return model


class _Rows(Tensor):
    """Rows of a weight, which ``fully_shard`` asks what to gather; ``rows`` has the values."""

    rows: Tensor

    @staticmethod
    def of(rows: Tensor) -> _Rows:
        made: _Rows = _compat.wrapper(_Rows, rows)
        made.rows = rows
        return made

    def __tensor_flatten__(self) -> Any:
        """For moves: torch then swaps tensors, which takes ``rows`` along."""
        return ["rows"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> _Rows:
        return _Rows.of(inner["rows"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.rows.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # so in torch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA:
            raise RuntimeError("gather_codes: weight.data = values would be lost; use copy_")
        with _compat.without_subclasses():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes the operator first
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*_plain(args), **_plain(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name in _SAME:
            many = isinstance(found, list | tuple)
            return [cls.of(part) for part in found] if many else cls.of(found)
        return args[0] if name.endswith("_") and found is not None else found

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Codes of this process's rows, each with its scale behind it: ``[rows, Kp + 4]``."""
        if module.config.forward != "int8":
            raise RuntimeError(
                f"layer {module.layer_name}: config: forward is {module.config.forward!r} now, and "
                "gather_codes has codes alone to multiply"
            )
        if tuple(outer_size) != (module.out_features, module.in_features):
            raise NotImplementedError(
                f"layer {module.layer_name}: fully_shard cannot gather codes of a part of a weight "
                "(tensor parallel): leave it out of gather_codes"
            )
        if outer_size[0] % mesh.size():
            raise NotImplementedError(
                f"layer {module.layer_name}: {outer_size[0]} rows do not divide by {mesh.size()} "
                "processes, so fully_shard cannot gather codes: leave it out of gather_codes"
            )
        rows = self.rows
        rows = rows if mp_policy.param_dtype is None else rows.to(mp_policy.param_dtype)
        made = codes.quantize_forward_weight(rows, module.config)
        count = rows.shape[0]
        parts = made[: -4 * count].view(count, -1), made[-4 * count :].view(count, 4)
        return (torch.cat(parts, 1),), (tuple(outer_size), module.config.forward_block)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight without values, and the memory of its codes."""
        (rows,) = outputs
        parts = rows[:, :-4].reshape(-1), rows[:, -4:].reshape(-1)  # as libhot has them
        shape, block = metadata
        if out is not None:
            if out.frozen.block != block:
                raise RuntimeError("config: forward_block has changed since the first gathering")
            torch.cat(parts, out=out.frozen.codes)
            return None
        made = torch.cat(parts)
        empty = torch.full((1, 1), _NAN, dtype=dtype, device=made.device).expand(shape)
        return _Gathered.of(empty, Frozen(made, block, shape[0], shape[1], dtype)), (made,)


def _plain(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor.rows if isinstance(tensor, _Rows) else tensor)


class _Gathered(Tensor):
    """A gathered weight: its codes. What reads its values gets NaN."""

    frozen: Frozen

    @staticmethod
    def of(empty: Tensor, frozen: Frozen) -> _Gathered:
        made = empty.as_subclass(_Gathered)
        made.frozen = frozen
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            if torch.is_grad_enabled() and weight.requires_grad:
                raise RuntimeError(
                    "gather_codes: a weight of which only codes are gathered has no gradient in "
                    "eval mode; use torch.no_grad(), or .train()"
                )
            return F.linear(x, codes.dequantized(weight.frozen), *bias, **(kwargs or {}))
        with _compat.without_subclasses():
            if func is torch.as_strided:  # fully_shard's, to the same shape
                return args[0]
            found = func(*args, **(kwargs or {}))
        return cls.of(found, args[0].frozen) if func is Tensor.detach else found
