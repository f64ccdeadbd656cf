"""Setup of GPU tests: collect garbage, seed torch from the run's seed, poison the allocator."""

import gc
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # support_gpu.py


@pytest.fixture(scope="session", autouse=True)
def shared_cores() -> None:
    """Divide the cores among parallel processes (pytest -n), because waiting CPU threads spin."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers < 2:
        return
    import hotcore
    import torch

    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    hotcore.set_num_threads(threads)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory for torch
    module = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        module.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return module


@pytest.fixture(autouse=True)
def prepared(rng: np.random.Generator) -> None:
    import torch  # imported here, so that tests can skip without torch
    from support_gpu import poison

    gc.collect()  # freeing graphs during a capture would invalidate it
    torch.manual_seed(int(rng.integers(1 << 62)))
    if torch.cuda.is_available():
        poison()
