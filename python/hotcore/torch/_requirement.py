"""Imported before anything else here: says what to install where there is no torch."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "hotcore.torch needs torch 2.6 or newer, the extra hotcore[torch]: pip install 'torch>=2.6'"
    ) from error
