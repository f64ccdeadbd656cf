"""The threads of torch's OpenMP, for HOT's work on a CPU.

torch's threads wait actively for some milliseconds after each of its operations. Threads of HOT's
own would share the cores with them; the same threads take HOT's work at once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

from .. import contexts

OWN_THREADS = "HOT_OWN_THREADS"
"""Environment variable: set to 1, HOT keeps threads of its own beside torch's."""
LIBRARIES = ("libgomp", "libiomp5", "libomp")
"""GNU's, Intel's and LLVM's; each has GOMP_parallel."""


def parallel_region() -> int:
    """Address of GOMP_parallel in torch's OpenMP library; 0 if there is none."""
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/") > 1}
    except OSError:
        return 0
    found = sorted(path for path in mapped if Path(path).name.startswith(LIBRARIES))
    ours = [path for path in found if _of_torch(path)]
    if len(ours or found) != 1:  # which one torch takes is not known
        return 0
    try:
        region = ctypes.CDLL((ours or found)[0]).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(region, ctypes.c_void_p).value or 0


def _of_torch(path: str) -> bool:
    """Whether a library lies in torch's wheel."""
    home = Path(torch.__file__).parent
    return any(folder in Path(path).parents for folder in (home, home.parent / "torch.libs"))


def share() -> None:
    """Use torch's threads, unless HOT_OWN_THREADS=1 says otherwise."""
    if os.environ.get(OWN_THREADS, "0") != "1":
        contexts.use_openmp(parallel_region())
