"""Linear layers whose tensors are DTensors, as ``parallelize_module`` makes them.

Each process runs the layer on the parts that it holds. Placements alone say how these parts and
their gradients add up, so no operator needs a sharding strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _compat
from .core import PLAIN_TYPES


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor; False where no DTensor was imported."""
    if type(tensor) in PLAIN_TYPES:
        return False
    return isinstance(tensor, _compat.loaded("torch.distributed.tensor", "DTensor"))


def split(x: Any, weight: Any, bias: Any) -> tuple[tuple[Tensor, Tensor, Tensor | None], Any]:
    """The process's parts of x, weight and bias, and the layout for :func:`joined`.

    On every dimension of the mesh one of these holds:

    * w by rows (ColwiseParallel), x whole: y by features, g_x a sum over the processes;
    * w by columns (RowwiseParallel), x by features: y a sum, to which each adds its share of b;
    * w whole, x by samples or tokens: y as x; g_w and g_b are sums.

    Raises ValueError for other placements, also for w and x whole. Each process would compute the
    same gradient with its own random numbers, and the copies of w would drift apart.
    """
    from torch.distributed.tensor import Partial

    tensors = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            raise ValueError(f"{name}: a Tensor beside DTensors; parallelize_module makes all such")
    mesh, last, shape = weight.device_mesh, x.dim() - 1, (*x.shape[:-1], weight.shape[0])
    for name, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name}: its device mesh is not the weight's")
    rows: list[Any] = []  # a dimension of the mesh: placements of y, g_x, g_w and g_b
    shares = 1
    for i, (px, pw) in enumerate(zip(x.placements, weight.placements, strict=True)):
        pb = pw if bias is None else bias.placements[i]
        by_features = px.is_shard(last) or px.is_shard(-1)
        if pw.is_shard(0) and pb.is_shard(0) and px.is_replicate():
            rows.append((type(pw)(last), Partial(), pw, pb))
        elif pw.is_shard(1) and (bias is None or pb.is_replicate()) and by_features:
            rows.append((Partial(), px, pw, Partial()))
            shares *= mesh.size(i)
        elif pw.is_replicate() and pb.is_replicate() and px.is_shard() and not by_features:
            rows.append((px, px, Partial(), Partial()))
        else:
            got = ", ".join(f"{name} {tensor.placements[i]!r}" for name, tensor in tensors.items())
            raise ValueError(
                f"placements: {got}; a HOT layer takes those of ColwiseParallel and "
                "RowwiseParallel, or a whole weight with x sharded by tokens"
            )
    y_placements, *gradients = zip(*rows, strict=True)
    x, weight, bias_part = (
        tensor if tensor is None else tensor.to_local(grad_placements=placements)
        for tensor, placements in zip((x, weight, bias), gradients, strict=True)
    )
    if bias_part is not None and shares > 1:
        bias_part = bias_part / shares
    return (x, weight, bias_part), (mesh, y_placements, shape)


def joined(y: Tensor, layout: Any) -> Tensor:
    """The DTensor whose part on this process is y."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = layout
    strides = torch.empty(shape, device="meta").stride()  # parts may differ in size
    whole: Tensor = DTensor.from_local(
        y, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return whole
