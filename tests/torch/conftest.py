"""Shared by the torch tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hotcore.torch import reuse


@pytest.fixture
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """torch seeded by the test's generator, on one thread: small work only waits for more."""
    torch.manual_seed(int(rng.integers(2**31)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer compresses its own x, as in compiled graphs."""

    def compressed(
        self: Any, node: Any, x: Any, form: Any, compress: Any, inner: Any, seed: Any, *rest: Any
    ) -> Any:
        return compress(inner, seed, *rest), seed

    monkeypatch.setattr(reuse.Last, "compressed", compressed)
