"""Use of torch's OpenMP threads for HOT's work on a CPU.

torch's threads wait actively for some milliseconds after each of its operations. HOT's own threads
would compete with them for the cores. torch's threads take HOT's work without delay.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from .. import contexts

OWN_THREADS = "HOT_OWN_THREADS"
"""Environment variable; with the value 1 HOT keeps its own threads beside torch's."""
LIBRARIES = ("libgomp", "libiomp5", "libomp")
"""File names of GNU's, Intel's and LLVM's OpenMP; each has GOMP_parallel."""


def parallel_region() -> int:
    """Address of GOMP_parallel in torch's OpenMP library; 0 if there is none."""
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/") > 1}
        every = [path for path in mapped if Path(path).name.startswith(LIBRARIES)]
        home = Path(torch.__file__).parent  # torch's wheel
        ours = [p for p in every if {home, home.parent / "torch.libs"} & {*Path(p).parents}]
        if len(ours or every) == 1:  # otherwise it is not known which one torch uses
            region = ctypes.CDLL((ours or every)[0]).GOMP_parallel
            return ctypes.cast(region, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        pass
    return 0


def share() -> None:
    """Use torch's threads, unless HOT_OWN_THREADS=1 says otherwise."""
    if os.environ.get(OWN_THREADS, "0") != "1":
        contexts.use_openmp(parallel_region())
