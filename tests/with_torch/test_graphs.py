"""Seeds of layers, and what checkpoints make of them. CUDA graphs, whose replays draw anew:
tests/gpu/test_runtime.py and test_compiled.py.
"""

from typing import Any

import hotcore
import hotcore.torch as hot
import pytest
import torch
from hotcore import HotConfig
from hotcore.torch.ops import codes, core
from torch.utils.checkpoint import checkpoint
from torch_graphs import drawn

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_key_has_the_seed_for_an_offset() -> None:
    x = torch.randn(4, 16)
    (wanted,) = drawn(5, 1)
    for draw in (
        core.seed_for,
        codes.draw_seed,
        lambda x: codes.kept_of(x, x, HotConfig().json, True)[1],
    ):
        torch.manual_seed(5)
        seed = draw(x)
        assert (seed.dtype, seed.shape, seed.device) == (torch.int64, (), x.device)
        assert core.key_of(seed) == wanted


@pytest.mark.parametrize(
    "config", ["default", HotConfig.recipe("accurate", forward="int8")], ids=str
)
def test_a_checkpoint_that_preserves_no_seed(config: Any) -> None:
    """x is then rounded with another seed than g_y, but a sketch is the same on both sides."""
    module = hot.HotLinear(64, 48, bias=False, config=config)
    x, gy = torch.randn(96, 64), torch.randn(96, 48)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    torch.manual_seed(5)
    checkpoint(module, x, **options).backward(gy)
    own, again = drawn(5, 2)
    assert own != again
    saved = hotcore.compress_activation(x, config, key=again)
    expected = hotcore.backward_linear(gy, None, saved, need="gw", key=own)
    assert torch.equal(module.weight.grad, expected.gw)
