"""Linear layers whose tensors are DTensors, as ``parallelize_module`` makes them.

Each process runs the layer on the parts that it holds. What these parts mean, and how the gradients
add up, follows from the placements alone, so that no operator needs a sharding strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _compat
from .core import PLAIN_TYPES


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor; False where nobody has imported them."""
    if type(tensor) in PLAIN_TYPES:
        return False
    return isinstance(tensor, _compat.loaded("torch.distributed.tensor", "DTensor"))


def split(x: Any, weight: Any, bias: Any) -> tuple[tuple[Tensor, Tensor, Tensor | None], Any]:
    """The process's parts of x, weight and bias, and what :func:`joined` needs.

    On every dimension of the mesh one of these holds:

    * w by rows (ColwiseParallel), x whole: y by features, g_x a sum over the processes;
    * w by columns (RowwiseParallel), x by features: y a sum, to which each adds its share of b;
    * w whole, x by samples or tokens: y as x; g_w and g_b are sums.

    A part has scales of its own: a row of g_y, or of an 8-bit x, is one for each process.

    Raises ValueError for other placements. w and x whole is one: the processes would compute the
    same gradient, each with its own random numbers, and the copies of w would drift apart.
    """
    from torch.distributed.tensor import Partial

    given = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, tensor in given.items():
        if not is_dtensor(tensor):
            raise ValueError(f"{name}: a Tensor beside DTensors; parallelize_module makes all such")
    mesh, last = weight.device_mesh, x.dim() - 1
    for name, tensor in given.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name}: its device mesh is not the weight's")
    rows: list[Any] = []  # a dimension of the mesh: placements of y, g_x, g_w and g_b
    shares = 1
    for i, (of_x, of_w) in enumerate(zip(x.placements, weight.placements, strict=True)):
        of_b = of_w if bias is None else bias.placements[i]
        by_features = of_x.is_shard(last) or of_x.is_shard(-1)
        if of_w.is_shard(0) and of_b.is_shard(0) and of_x.is_replicate():
            rows.append((type(of_w)(last), Partial(), of_w, of_b))
        elif of_w.is_shard(1) and (bias is None or of_b.is_replicate()) and by_features:
            rows.append((Partial(), of_x, of_w, Partial()))
            shares *= mesh.size(i)
        elif of_w.is_replicate() and of_b.is_replicate() and of_x.is_shard() and not by_features:
            rows.append((of_x, of_x, Partial(), Partial()))
        else:
            found = ", ".join(f"{name} {tensor.placements[i]!r}" for name, tensor in given.items())
            raise ValueError(
                f"placements: {found}; a HOT layer takes those of ColwiseParallel and "
                "RowwiseParallel, or a whole weight with x sharded by tokens"
            )
    of_y, of_gx, of_gw, of_gb = zip(*rows, strict=True)
    part = None
    if bias is not None:
        part = bias.to_local(grad_placements=of_gb)
        part = part if shares == 1 else part / shares
    parts = x.to_local(grad_placements=of_gx), weight.to_local(grad_placements=of_gw), part
    return parts, (mesh, of_y, (*x.shape[:-1], weight.shape[0]))


def joined(y: Tensor, layout: Any) -> Tensor:
    """The DTensor of which y is the process's part."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = layout
    strides = torch.empty(shape, device="meta").stride()  # parts may differ in size
    whole: Tensor = DTensor.from_local(
        y, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return whole
