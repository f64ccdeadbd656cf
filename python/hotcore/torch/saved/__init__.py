"""What a backward pass needs beside the inputs of linear layers, kept in codes.

:func:`hotcore.torch.compress_saved` does that with hooks, in eager mode. Here modules and functions
do it themselves, so that it also works, and is fused, inside graphs of torch.compile.
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
