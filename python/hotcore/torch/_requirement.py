"""Imported before anything else here: says what to install where torch is missing or too old."""

import re

_OLDEST = (2, 6)
_NEEDED = "hotcore.torch needs torch 2.6 or newer: pip install 'torch>=2.6'"

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError(_NEEDED) from error
_found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
if _found and (int(_found[1]), int(_found[2])) < _OLDEST:
    raise ImportError(f"{_NEEDED} (torch is {torch.__version__}, in {torch.__file__})")
