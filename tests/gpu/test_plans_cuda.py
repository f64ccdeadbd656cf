"""The plans of tests/plans.py by NCCL, on two GPUs."""

import pytest

torch = pytest.importorskip("torch")
import plans  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < plans.WORLD, reason="needs two CUDA devices"),
]


@pytest.mark.long
@pytest.mark.parametrize("body", plans.PLANS, ids=lambda body: body.__name__)
def test_plans_by_nccl(body: plans.Body) -> None:
    plans.spawn(body, device="cuda")
