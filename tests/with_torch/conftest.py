"""Shared by the torch tests; without torch the whole folder is skipped."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import hotcore  # noqa: E402  (after the skip)


@pytest.fixture
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed torch from the test's generator; one thread, because small work does not scale."""
    torch.manual_seed(int(rng.integers(2**31)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(seeded: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One of hotcore's threads, too, on a machine without other work."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    hotcore.set_num_threads(1)
    yield
    hotcore.set_num_threads(0)


@pytest.fixture
def compiled_afresh() -> None:
    """Every test has its own layers, and torch compiles a module's forward eight times at most."""
    torch._dynamo.reset()
