"""Classes of GPUs: the rate of INT8 products beside bf16's, and which class was measured.

``convert``'s rule, ``hotcore.info``, ``hotcore.explain`` and ``hotcore.torch.advise`` read this one
table. A class is a compute capability, for some with a name: bf16 products with fp32 sums run at
half rate on GeForce cards. Source: docs/gpus.md, with the origin of each figure.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

Capability = tuple[int, int]

MEASURED: frozenset[Capability] = frozenset({(9, 0)})
"""Capabilities on which ``make gpu-check`` has passed. :mod:`.selftest` tests all others."""


class Int8Rate(NamedTuple):
    """Rate of libhot's INT8 products as a multiple of torch's bf16 products with fp32 sums."""

    ratio: float | None
    """None: unknown."""
    source: Literal["measured", "derived", "none", "unknown", "assumed"]
    """``"none"``: the device has no INT8 units for libhot's kernels."""
    why: str
    """Figures behind the ratio, or the reason for its absence."""

    @property
    def fast(self) -> bool:
        """Whether integer products can save time."""
        return self.ratio is not None and self.ratio > 1

    def __str__(self) -> str:
        if self.fast:
            return f"INT8 at {self.ratio:g} times bf16's rate ({self.source}: {self.why})"
        return f"no fast INT8 ({self.why})"


H200 = Int8Rate(2, "measured", "H200, H100")
"""The class that ``convert``'s rule was fitted on, by an H100."""

_TCGEN05 = "INT8 by tcgen05 alone, for which libhot has no kernel; mma.sync's rate is not known"
_GEFORCE, _NO_GEFORCE = "GeForce", "no GeForce by its name"

_TABLE: tuple[tuple[Capability, str, Int8Rate], ...] = (
    ((8, 0), "", Int8Rate(2, "derived", "A100: 624 TOPS, 312 TFLOPS")),
    ((8, 6), _GEFORCE, Int8Rate(4, "derived", "RTX 3090: 284 TOPS, 71 TFLOPS")),
    ((8, 6), "", Int8Rate(2, "derived", f"{_NO_GEFORCE}; A40: 299 TOPS, 150 TFLOPS")),
    ((8, 9), _GEFORCE, Int8Rate(4, "derived", "RTX 4090: 661 TOPS, 165 TFLOPS")),
    ((8, 9), "", Int8Rate(2, "derived", f"{_NO_GEFORCE}; L40: 362 TOPS, 181 TFLOPS")),
    ((9, 0), "", H200),
    ((10, 0), "", Int8Rate(None, "none", _TCGEN05)),
    ((10, 1), "", Int8Rate(None, "none", _TCGEN05)),
    ((10, 3), "", Int8Rate(0.08, "none", "GB300: 157 TOPS, 1980 TFLOPS, pytorch#187094")),
    ((10, 7), "", Int8Rate(None, "none", "Rubin has no INT8 instruction beside the slow mma.sync")),
    ((11, 0), "", Int8Rate(None, "none", _TCGEN05)),
    ((12, 0), _GEFORCE, Int8Rate(4, "derived", "RTX 5090: 838 TOPS, 210 TFLOPS")),
    ((12, 0), "", Int8Rate(2, "derived", f"{_NO_GEFORCE}; RTX PRO 6000: 1008 TOPS, 504 TFLOPS")),
    ((12, 1), "", Int8Rate(2, "derived", "GB10: by its rates, taken as those of RTX PRO 6000")),
)  # the first that fits

ABSENT = Int8Rate(2, "assumed", "no GPU is here, so that of an H200")


def int8_rate(name: str, major: int, minor: int) -> Int8Rate:
    """Return the rate of a GPU by its name (torch's and nvidia-smi's) and compute capability."""
    for capability, part, rate in _TABLE:
        if capability == (major, minor) and part in name:
            return rate
    if major == 8:
        return Int8Rate(2, "derived", f"as other GPUs of sm_8x; sm_8{minor} is not in the table")
    return Int8Rate(None, "unknown", f"{name or 'a GPU'} of sm_{major}{minor} is not known")


def name_of(device: int) -> str:
    """Name of a CUDA device of this process; empty if torch is not imported or sees no GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name(device))
