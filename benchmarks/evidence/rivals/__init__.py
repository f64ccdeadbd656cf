"""Rivals of hotcore: the same backward by torch and torchao, and other methods.

Benchmarks time ``products``, ``backward``, ``torchao_calls`` (in ``calls`` and ``torchao_layers``).
``convert(model, method)`` of ``conversion`` puts a method into a model's layers. The methods are in
``methods`` and ``lbp_wht``, their quantisers in ``quantizers``. docs/dev/rivals.md has the sources.
"""

# ruff: noqa: F401  (names for other modules)

import importlib.util

from .calls import (
    FP8,
    Call,
    StockGemm,
    backward,
    fp8_product,
    fp8_products,
    int8_products,
    products,
)
from .torchao_layers import (
    TorchaoMissing,
    torchao_adamw,
    torchao_calls,
    torchao_convert,
    torchao_int8_convert,
    torchao_nf4,
)

if importlib.util.find_spec("hotcore"):  # compile_torchao.py runs while hotcore is built
    from .conversion import METHODS, Converted, convert, method_of, of_file, taken_by_hotcore
    from .methods import Method
