"""Shared by the torch tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """torch seeded by the test's generator, on one thread: small work only waits for more."""
    torch.manual_seed(int(rng.integers(2**31)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
