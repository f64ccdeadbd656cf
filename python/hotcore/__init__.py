"""Hadamard-based optimised training (HOT): the backward pass of linear layers in INT8 and INT4.

Functions take and return arrays of any DLPack framework; ``hotcore.torch`` has torch modules. A
wrong shape, dtype, device or option raises ValueError. An object that is no array raises TypeError.
A call that this build or device cannot run raises NotImplementedError. Each error names the
argument and comes before anything is written.
"""

from . import _core
from .config import HotConfig, Key
from .contexts import isa, num_threads, set_isa, set_num_threads
from .functions import (
    Gradients,
    backward_linear,
    basis_order,
    compress_activation,
    decompress_activation,
    dequantize,
    dequantize_weight,
    expand_weight_int4,
    forward_linear,
    fwht,
    gemm_int4,
    gemm_int8,
    hla,
    pack_int4,
    quantize,
    quantize_forward_input,
    quantize_forward_weight,
    quantize_weight,
    quantize_weight_int4,
    supported,
    unpack_int4,
)
from .plans import Explanation, explain, explain_gemm
from .saved import (
    QuantizedForwardWeight,
    QuantizedInput,
    QuantizedWeight,
    QuantizedWeightInt4,
    Saved,
)

__version__: str = _core.version()

__all__ = [
    "Explanation",
    "Gradients",
    "HotConfig",
    "Key",
    "QuantizedForwardWeight",
    "QuantizedInput",
    "QuantizedWeight",
    "QuantizedWeightInt4",
    "Saved",
    "__version__",
    "backward_linear",
    "basis_order",
    "compress_activation",
    "decompress_activation",
    "dequantize",
    "dequantize_weight",
    "expand_weight_int4",
    "explain",
    "explain_gemm",
    "forward_linear",
    "fwht",
    "gemm_int4",
    "gemm_int8",
    "hla",
    "isa",
    "num_threads",
    "pack_int4",
    "quantize",
    "quantize_forward_input",
    "quantize_forward_weight",
    "quantize_weight",
    "quantize_weight_int4",
    "set_isa",
    "set_num_threads",
    "supported",
    "unpack_int4",
]
