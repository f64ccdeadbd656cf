"""Shared by all Python tests: hypothesis, seeds, caches of compiled code, CUDA tests skipped."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# support.py and others here, and what benchmarks/ has
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]

# Every worker of pytest-xdist has a folder for Inductor's compiled code.
if {"PYTEST_XDIST_WORKER", "TORCHINDUCTOR_CACHE_DIR"} <= os.environ.keys():
    os.environ["TORCHINDUCTOR_CACHE_DIR"] += "/" + os.environ["PYTEST_XDIST_WORKER"]

# Workers take the GPUs in turns; each sees all of them.
if {"PYTEST_XDIST_WORKER", "CUDA_VISIBLE_DEVICES"} <= os.environ.keys():
    _gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    _first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(_gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus[_first:] + _gpus[:_first])

# A failure of hypothesis prints the blob that replays it; HOT_TEST_SEED replays all other tests.
settings.register_profile(
    "hotcore",
    deadline=None,
    max_examples=int(os.environ.get("HOT_TEST_EXAMPLES", "30")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("hotcore")

SEED = int(os.environ.get("HOT_TEST_SEED", "20240611"))


def pytest_report_header() -> str:
    return f"HOT_TEST_SEED={SEED}"


@pytest.fixture(scope="module", autouse=True)
def _imported_objects_are_frozen() -> None:
    # The collector's passes, of which each convert makes one, leave out what is imported by now.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _threads_are_restored() -> Iterator[None]:
    """Restore the numbers of threads, which fixtures, tests and benchmarks set."""
    names = {"hotcore": "num_threads", "torch": "get_num_threads"}
    imported = [(sys.modules[name], get) for name, get in names.items() if name in sys.modules]
    before = [getattr(module, get)() for module, get in imported]
    yield
    for (module, get), count in zip(imported, before, strict=True):
        if getattr(module, get)() != count:
            module.set_num_threads(count)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports what is alive when the interpreter ends


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Generator of this test, from the run's seed and the test's name."""
    name = np.frombuffer(request.node.nodeid.encode(), dtype=np.uint8)
    return np.random.default_rng([SEED, *name.tolist()])


@pytest.fixture
def seeded_torch(rng: np.random.Generator) -> None:
    """Seed torch from the test's generator."""
    import torch

    torch.manual_seed(int(rng.integers(1 << 62)))


@pytest.fixture
def api() -> Iterator[Any]:
    from c_api import CApi

    library = CApi()
    yield library
    library.close()


# These files are long as a whole.
LONG = re.compile(r"test_(bench\w*|evidence|gpt|rivals)\.py|evidence/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LONG.search(item.nodeid):
            item.add_marker(pytest.mark.long)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    try:
        import torch

        available = torch.cuda.is_available()
    except ImportError:
        available = False
    if not available:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
