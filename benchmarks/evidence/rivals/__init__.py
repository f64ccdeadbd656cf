"""What hotcore is compared with: the same backward by torch and torchao, and by other methods.

``products``, ``backward``, ``torchao_calls``, ... are timed (``calls``, ``torchao_layers``).
``convert(model, method)`` puts a rival's method, or one of your own, into a model's layers
(``conversion``); the methods stand in ``methods`` and ``lbp_wht``, their quantisers in
``quantizers``. docs/dev/rivals.md has their sources.
"""

# ruff: noqa: F401  (names for other modules)

import importlib.util

from .calls import (
    FP8,
    Call,
    StockGemm,
    backward,
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
)

if importlib.util.find_spec("hotcore"):  # else compile_torchao.py runs while it is being built
    from .conversion import METHODS, Converted, convert, method_of, of_file, taken_by_hotcore
    from .methods import Method
