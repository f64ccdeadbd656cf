"""What hotcore is compared with: the same backward by torch and torchao, and by other methods.

``products``, ``backward``, ``torchao_calls``, ... are timed (``calls``, ``torchao_layers``).
``convert(model, method)`` puts a rival's method, or one of your own, into a model's layers
(``conversion``); the methods stand in ``methods`` and ``lbp_wht``, their quantisers in
``quantizers``. docs/dev/rivals.md has their sources.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
    torchao_calls,
    torchao_convert,
    torchao_int8_convert,
    torchao_layer,
)

if TYPE_CHECKING:
    from .conversion import METHODS, Converted, convert, method_of, of_file, taken_by_hotcore
    from .methods import Method

# Loaded when asked for: compile_torchao.py runs while hotcore, which they need, is being built.
_LATER = {
    **dict.fromkeys(
        ("METHODS", "Converted", "convert", "method_of", "of_file", "taken_by_hotcore"),
        "conversion",
    ),
    "Method": "methods",
}

__all__ = [
    "FP8",
    "METHODS",
    "Call",
    "Converted",
    "Method",
    "StockGemm",
    "TorchaoMissing",
    "backward",
    "convert",
    "fp8_product",
    "fp8_products",
    "int8_products",
    "method_of",
    "of_file",
    "products",
    "taken_by_hotcore",
    "torchao_calls",
    "torchao_convert",
    "torchao_int8_convert",
    "torchao_layer",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
