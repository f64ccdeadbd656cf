"""Shared by the torch tests; without torch the whole folder is skipped."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import hotcore  # noqa: E402  (after the skip)


@pytest.fixture
def seeded(rng: np.random.Generator) -> None:
    """Seed torch from the test's generator; one thread, because small work does not scale."""
    torch.manual_seed(int(rng.integers(2**31)))
    torch.set_num_threads(1)


@pytest.fixture
def one_thread(seeded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of hotcore's threads, too, on a machine without other work."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    hotcore.set_num_threads(1)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone, in a process group of its own."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def compiled_afresh() -> None:
    """Every test has its own layers, and torch compiles a module's forward eight times at most."""
    torch._dynamo.reset()
