"""``compute_report``: bit operations of a model's products, by method.

A multiply-add of an a-bit by a b-bit number is a * b bit operations (BOPs). Every other operation
(an addition of a transform, rounding, scaling) counts as one in 32 bits, 1024 BOPs. The paper and
its authors' code use this measure; it says nothing about time.

Source: the paper, Appendix D, Table 5 (in FLOPs: a multiply-add in 32 bits is two) and Table 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import ConfigLike, HotConfig, as_config
from ..torch.conversion import probe, selection
from ..torch.conversion.convert import decide
from ..torch.conversion.probe import preserve_state
from ..torch.conversion.report import aligned
from ..torch.conversion.selection import Filter, products_of
from ..torch.frozen.bitsandbytes import is_8bit
from ..torch.layers.modules import HotModule, is_pointwise
from ..torch.ops.conv import settings

FULL_PRECISION = "full precision"
RIVALS = ("LBP-WHT", "LUQ", "naive INT4")
_FULL = 32 * 32
_GIGA = 1e9
_ROWS = 40  # limit of layers in the printed table
_LUQ_OPERATIONS = 3  # logarithmic rounding of a value, as the authors' code counts it
_BLOCK, _RANK = 16, 8  # LBP-WHT's


@dataclasses.dataclass(frozen=True)
class LayerCompute:
    """One weight: the shape of its products and their BOPs.

    ``tokens``, ``outs``, ``ins`` are the paper's (L, O, I); L includes the batch. ``taken``: the
    methods apply; otherwise every method computes the layer in full precision. A convolution with
    torch's products counts in full precision for a configuration, plus the operations that restore
    x. ``trained``: g_w is computed.
    """

    name: str
    type: str
    tokens: int
    outs: int
    ins: int
    taken: bool
    trained: bool
    forward: int
    """BOPs of the forward product in 32 bits, for all methods but the last."""
    backward: Mapping[str, int]
    """Method -> BOPs."""
    own_forward: int
    """BOPs of the forward product under the configuration: in 8 bits with ``forward="int8"``."""


@dataclasses.dataclass(frozen=True)
class ComputeReport:
    """The result of :func:`.compute_report`; print it for a table. All figures are BOPs."""

    layers: tuple[LayerCompute, ...]
    methods: tuple[str, ...]
    """Keys of every layer's ``backward``; the first is full precision."""

    @property
    def forward(self) -> int:
        """BOPs of all forward products, in 32 bits."""
        return sum(layer.forward for layer in self.layers)

    def forward_by(self, method: str = FULL_PRECISION) -> int:
        """BOPs of all forward products; for the last method under the layers' configurations."""
        if method != self.methods[-1]:
            return self.forward
        return sum(layer.own_forward for layer in self.layers)

    def backward(self, method: str = FULL_PRECISION) -> int:
        """BOPs of a backward pass. Raises KeyError for a method that was not counted."""
        return sum(layer.backward[method] for layer in self.layers)

    def flops(self, method: str = FULL_PRECISION) -> float:
        """FLOPs of a backward pass as in the paper's Table 5: 1024 BOPs are two FLOPs."""
        return 2 * self.backward(method) / _FULL

    def __str__(self) -> str:
        largest = sorted(self.layers, key=lambda row: row.forward, reverse=True)
        shown = {row.name for row in largest[:_ROWS]}
        table = [("layer", "type", "L", "O", "I", "forward", *self.methods)]
        for row in self.layers:
            if row.name in shown:
                notes = ["plain"] * (not row.taken) + ["frozen"] * (not row.trained)
                kind = f"{row.type} ({', '.join(notes)})" if notes else row.type
                shape = map(str, (row.tokens, row.outs, row.ins))
                costs = map(_giga, (row.forward, *row.backward.values()))
                table.append((row.name or "(root)", kind, *shape, *costs))
        if rest := [row for row in self.layers if row.name not in shown]:
            sums = [sum(row.backward[method] for row in rest) for method in self.methods]
            costs = map(_giga, (sum(row.forward for row in rest), *sums))
            table.append((f"{len(rest)} more", "", "", "", "", *costs))
        totals = [self.backward(method) for method in self.methods]
        table.append(("backward", "", "", "", "", "", *map(_giga, totals)))
        shares = [f"{total / totals[0]:.3f}" if totals[0] else "-" for total in totals]
        table.append((f"of {FULL_PRECISION}", "", "", "", "", "", *shares))
        both = [self.forward_by(m) + n for m, n in zip(self.methods, totals, strict=True)]
        table.append(("forward and backward", "", "", "", "", "", *map(_giga, both)))
        unit = "10^9 bit operations: bits x bits of every multiply-add"
        return "\n".join([*aligned(table), unit])


def compute_report(
    model: nn.Module,
    inputs: Any,
    config: ConfigLike = "default",
    *,
    filter_fn: Filter | None = None,
    overrides: Mapping[str, Any] | None = None,
    slower: bool = False,
) -> ComputeReport:
    """Count the bit operations of every layer's products, in full precision and by method.

    One forward pass without gradients finds the shapes; a model and inputs on the ``meta`` device
    cost nothing. The methods are "full precision", "LBP-WHT" (rank 8 of 16), "LUQ", "naive INT4",
    "HOT" and the name of the configuration. :func:`backward_bops` has the formulas. g_x counts for
    every layer, g_w if the weight is trained. ``filter_fn``, ``overrides`` and ``slower`` are those
    of ``convert``; ``lambda module, name: True`` counts every layer that HOT supports.

    Args:
        model: plain, or converted by :func:`hotcore.torch.convert`; it is not changed.
        inputs: a Tensor, a tuple of positional arguments or a dict of keyword arguments.
        config: configuration for a plain model.

    Returns:
        A :class:`.ComputeReport`. ValueError if no layer can be converted.

    Source: the paper, Appendix D, Table 5. Its worked example, (49, 448, 1792) from 137.3 to 11.5
    MFLOPs, cannot be reproduced: docs/dev/rivals.md.
    """
    layers = dict(selection.candidates(model))
    watch = probe.Watch(layers)
    with preserve_state(model), torch.no_grad(), probe.eagerly(), watch:
        probe.output_of(model, inputs)
    configs = {name: layer.config for name, layer in layers.items() if isinstance(layer, HotModule)}
    last = "as converted"
    if not configs:
        chosen = as_config(config)
        last = "HOT, custom" if chosen.name == "custom" else chosen.name
        report = decide(model, chosen, filter_fn, overrides, slower=slower).report
        configs = {layer.name: layer.config for layer in report.converted}
    methods = (FULL_PRECISION, *RIVALS, "HOT", last)
    rows = []
    for name, layer in layers.items():
        layer_config, trained = configs.get(name), not selection.is_frozen(layer)
        grouped = isinstance(layer, nn.Conv2d) and layer.groups != 1
        taken = layer_config is not None and not grouped
        wide = isinstance(layer, nn.Conv2d) and not is_pointwise(layer)
        plain_forward = wide or is_8bit(layer)
        for part, tokens, outs, ins in _shapes(layer, watch.uses[name].macs):
            shape = (tokens, outs, ins)
            costs = {
                method: backward_bops(*shape, method if taken else FULL_PRECISION, trained=trained)
                for method in methods[:-1]
            }
            plain = costs[last] = costs[FULL_PRECISION]
            if layer_config is not None and products_of(layer, layer_config) is False:
                # torch's products; libhot scales the codes of x back.
                pixels = sum(math.prod(call.shape) for call in watch.uses[name].calls)
                steps = 1 + settings(layer_config, False, None).equalize_tokens
                costs[last] = plain + trained * pixels * steps * _FULL
            elif layer_config is not None and taken:
                costs[last] = backward_bops(*shape, layer_config, trained=trained)
            rows.append(
                LayerCompute(
                    f"{name}{part}".lstrip("."), type(layer).__name__, *shape, taken, trained,
                    math.prod(shape) * _FULL, costs,
                    forward_bops(*shape, None if plain_forward else layer_config)
                )
            )  # fmt: skip
    return ComputeReport(tuple(rows), methods)


def backward_bops(
    tokens: int, outs: int, ins: int, method: str | HotConfig, *, trained: bool = True
) -> int:
    """BOPs of one layer's backward pass: g_x and, if ``trained``, g_w.

    With (L, O, I), operations in 32 bits (1024 BOPs each) and products:

    * full precision: two products of LOI in 32 bits;
    * LBP-WHT: LO log n + 2 LI log n transforms, two products of LOI r/n in 32 bits (n = 16, r = 8);
    * LUQ: three operations for each g_y, one for each w and x, LI + OI to scale the results; two
      products of LOI in 4 bits;
    * naive INT4: LUQ's count with one operation per g_y;
    * HOT, g_x: LO log n + IO log n transforms, LO + IO roundings, a product of LOI in 4 bits;
    * HOT, g_w: LI log n + LO log n transforms, (LI + LO) r/n roundings, a product of LOI r/n in 8
      bits. IO + LI scale both results. Table 5's FLOPs count each operation twice;
    * a configuration: HOT's count with its bits, blocks and rows. Basis ``full`` has no transform
      along L. The sketch has n - r additions per block and a transform of r. An INT4 x takes LI
      operations to become INT8.

    Args:
        tokens: L, batch included.
        outs: O.
        ins: I; the unfolded channels of a convolution.
        method: a configuration, or "full precision", "LBP-WHT", "LUQ", "naive INT4", "HOT".
        trained: False: no g_w.

    Raises ValueError for another method.

    Source: the paper, Appendix D, Table 5; the products' bits as in its authors' code.
    """
    gy, w, x, product = tokens * outs, outs * ins, tokens * ins, tokens * outs * ins
    if method == "HOT":
        method = HotConfig.recipe("paper")
    if isinstance(method, HotConfig):
        gx, gw = _config_bops(tokens, outs, ins, method)
    elif method == FULL_PRECISION:
        gx = gw = product * _FULL
    elif method == "LBP-WHT":
        steps, low = math.log2(_BLOCK), product * _RANK / _BLOCK
        gx, gw = ((gy + x) * steps + low) * _FULL, (x * steps + low) * _FULL
    elif method in RIVALS:
        each = _LUQ_OPERATIONS if method == "LUQ" else 1
        gx = gw = (each * gy + w + x) * _FULL + product * 4 * 4
    else:
        known = ", ".join((FULL_PRECISION, *RIVALS, "HOT"))
        raise ValueError(f"method: expected a HotConfig or one of {known}, got {method!r}")
    return round(gx + gw) if trained else round(gx)


def forward_bops(tokens: int, outs: int, ins: int, config: HotConfig | None) -> int:
    """BOPs of one layer's forward product under a configuration; None: in 32 bits.

    ``forward="int8"`` has LI log n + IO log n transforms, LI + IO roundings and LO operations that
    scale the results, all in 32 bits. Its product of LOI is in 8 bits.
    """
    product = tokens * outs * ins
    if config is None or config.forward == "plain":
        return product * _FULL
    operands, steps = tokens * ins + outs * ins, math.log2(config.forward_block)
    return round((operands * (steps + 1) + tokens * outs) * _FULL) + product * 8 * 8


def _config_bops(tokens: int, outs: int, ins: int, config: HotConfig) -> tuple[float, float]:
    gy, w, x, product = tokens * outs, outs * ins, tokens * ins, tokens * outs * ins
    steps = math.log2(config.hadamard_block)
    gx = ((gy + w) * steps + gy + w + x) * _FULL + product * config.gx_bits**2
    share, transform = _low_rank(config)
    unpack = x if config.storage != "int8" else 0
    equalize = gy + 2 * x if config.equalize_tokens else 0  # a product per value, and x's sizes
    operations = (gy + x) * transform + (gy + x) * share + unpack + equalize + w
    return gx, operations * _FULL + product * share * 8 * 8


def _low_rank(config: HotConfig) -> tuple[float, float]:
    """Return the basis rows per token, and the operations per value that compute them."""
    if config.basis == "full":
        return 1.0, 0.0
    block, rank = config.block, config.rank if config.rows is None else len(config.rows)
    if config.basis == "sketch":  # folds a block to rank tokens, then transforms them
        return rank / block, (block - rank + rank * math.log2(rank)) / block
    return rank / block, math.log2(block)


def _shapes(layer: nn.Module, macs: int) -> list[tuple[str, int, int, int]]:
    """Return suffix of the name, L, O and I of every weight that the forward pass multiplied."""
    weights = selection.weights_of(layer)
    total = sum(weight.numel() for weight in weights)
    if not total or not macs:
        return []
    tokens = macs // total
    if len(weights) == 1:
        outs = selection.features_of(layer)[1]
        return [("", tokens, outs, weights[0].numel() // outs)]
    names = [n for n, p in layer.named_parameters() if any(p is weight for weight in weights)]
    return [
        (f".{name.removesuffix('_weight').removesuffix('.weight')}", tokens, *weight.shape)
        for name, weight in zip(names, weights, strict=True)
    ]


def _giga(count: float) -> str:
    return f"{count / _GIGA:.4g}"
