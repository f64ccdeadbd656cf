"""Before every GPU test: collect the last ones' garbage, seed torch from the run's seed, poison the
allocator's memory.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # support_gpu.py


@pytest.fixture(autouse=True)
def prepared(rng: np.random.Generator) -> None:
    import torch  # here, so that the tests skip themselves where there is none
    from support_gpu import poison

    gc.collect()  # graphs in a cycle that are freed during a capture would invalidate it
    torch.manual_seed(int(rng.integers(1 << 62)))
    if torch.cuda.is_available():
        poison()
