"""Codes of the tensors that operations other than linear layers save for backward.

The modules and functions of this package save the codes themselves, without hooks, so it works in
eager mode and, fused, in graphs of torch.compile.
"""

from .attention import scaled_dot_product_attention
from .functions import activation, gated, layer_norm, relu, relu_squared, rms_norm
from .modules import KINDS, SavedModule, SavedReport, convert_saved, revert_saved

__all__ = [
    "KINDS",
    "SavedModule",
    "SavedReport",
    "activation",
    "convert_saved",
    "gated",
    "layer_norm",
    "relu",
    "relu_squared",
    "revert_saved",
    "rms_norm",
    "scaled_dot_product_attention",
]
