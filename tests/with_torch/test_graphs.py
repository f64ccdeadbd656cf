"""Seeds on x's device, drawn again by every replay of a CUDA graph; tested without a GPU.

Here torch only reports a capture, and the kernels read the seed from CPU memory.
tests/gpu/test_runtime.py and test_compiled.py have the graphs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hotcore
import pytest
from hotcore import HotConfig, Key
from hotcore.config import RECIPES

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402  (after the skip)
from hotcore.torch import _compat  # noqa: E402  (after the skip)
from hotcore.torch.ops import codes, core, sharing  # noqa: E402  (after the skip)
from torch.utils.checkpoint import checkpoint  # noqa: E402  (after the skip)
from torch_graphs import same  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Keys have the addresses of their seeds, as on a device; the seeds that were drawn."""
    drawn: list[torch.Tensor] = []
    seed_for = core.seed_for

    def noted(x: torch.Tensor) -> torch.Tensor:
        drawn.append(seed_for(x))
        return drawn[-1]

    monkeypatch.setattr(core, "seed_for", noted)
    monkeypatch.setattr(core, "key_of", lambda seed: Key(0, counter=seed.data_ptr()))
    return drawn


def gradients(
    module: Callable[[torch.Tensor], torch.Tensor],
    leaves: tuple[torch.Tensor, ...],
    gy: torch.Tensor,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return torch.autograd.grad(module(leaves[0]), leaves, gy)


def test_a_key_has_the_seed_for_an_offset() -> None:
    x = torch.randn(4, 16)
    torch.manual_seed(5)
    wanted = Key(0, int(torch.randint(2**63 - 1, (), dtype=torch.int64)))
    for draw in (
        core.seed_for,
        codes.draw_seed,
        lambda x: codes.kept_of(x, HotConfig().json, True)[1],
    ):
        torch.manual_seed(5)
        seed = draw(x)
        assert (seed.dtype, seed.shape, seed.device) == (torch.int64, (), x.device)
        assert core.key_of(seed) == wanted


def test_a_capture_draws_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    randint = torch.randint

    class OnCuda:
        is_cuda = True
        device = torch.device("cuda", 0)

    def noted(high: int, size: tuple[int, ...], *, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return randint(high, size)

    monkeypatch.setattr(torch, "randint", noted)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        core.seed_for(OnCuda())
    assert [device.type for device in asked] == ["cpu", "cuda"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_seed_read_by_the_kernels_gives_the_same_bits(
    recipe: str, request: pytest.FixtureRequest
) -> None:
    module = hot.HotLinear(64, 48, config=recipe)
    x, gy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)
    leaves = (x, module.weight, module.bias)
    eager = gradients(module, leaves, gy, 5)
    request.getfixturevalue("captured")
    assert same(gradients(module, leaves, gy, 5), eager)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replay_draws_anew(recipe: str, captured: list[torch.Tensor]) -> None:
    """Forward and backward read the current number; backward draws none."""
    module = hot.HotLinear(64, 48, config=recipe)
    x, gy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)
    y = module(x)
    (seed,) = captured
    kept = next(t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8)
    for number in (7, 2**63 - 2):  # a replay writes another number and makes the codes anew
        seed.data.fill_(number)
        kept.data.copy_(hotcore.compress_activation(x.detach(), recipe, key=Key(0, number)).data)
        gx, gw = torch.autograd.grad(y, (x, module.weight), gy, retain_graph=True)
        expected = hotcore.backward_linear(
            gy, module.weight.detach(), x.detach(), config=recipe, key=Key(0, number)
        )
        assert torch.equal(gw, expected.gw)
        assert torch.equal(gx, expected.gx)
    assert len(captured) == 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_compress_once(recipe: str, kernel: int, captured: list[torch.Tensor],
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    keys: list[Key] = []
    compress = codes.compress

    def noting(x: torch.Tensor, config: HotConfig, key: Key) -> torch.Tensor:
        keys.append(key)
        return compress(x, config, key)

    monkeypatch.setattr(codes, "compress", noting)
    module = hot.HotConv2d(32, 16, kernel, padding=kernel // 2, config=recipe)
    x, gy = torch.randn(4, 32, 8, 8, requires_grad=True), torch.randn(4, 16, 8, 8)
    gradients(module, (x, module.weight), gy, 5)
    assert [(key.counter, key.offset) for key in keys] == [(captured[0].data_ptr(), 0)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("captured")
def test_a_checkpoint_meets_the_same_numbers(recipe: str, reentrant: bool) -> None:
    """torch preserves the generator's state."""
    module = hot.HotLinear(64, 48, config=recipe)
    x, gy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)

    def both(wrapped: bool) -> list[torch.Tensor | None]:
        x.grad = module.weight.grad = None
        torch.manual_seed(5)
        y = checkpoint(module, x, use_reentrant=reentrant) if wrapped else module(x)
        y.backward(gy)
        return [x.grad, module.weight.grad]

    assert same(both(False), both(True))


@pytest.mark.usefixtures("unshared")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_that_preserves_no_seed(recipe: str, captured: list[torch.Tensor]) -> None:
    """x is then rounded with another seed than g_y, but a sketch is the same on both sides."""
    module = hot.HotLinear(64, 48, bias=False, config=recipe)
    x, gy = torch.randn(96, 64), torch.randn(96, 48)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    checkpoint(module, x, **options).backward(gy)
    own, again = (Key(0, int(seed)) for seed in captured)
    assert own != again
    saved = hotcore.compress_activation(x, recipe, key=again)
    expected = hotcore.backward_linear(gy, None, saved, need="gw", key=own)
    assert torch.equal(module.weight.grad, expected.gw)


def test_captured_layers_share_no_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later capture would use codes that its own replays do not make."""
    cache = sharing.Cache()

    class OnCuda:
        is_cuda, grad_fn, _base, _version = True, object(), None, 0

        def get_device(self) -> int:
            return 0

        def data_ptr(self) -> int:
            return 1

        def stride(self) -> tuple[int, ...]:
            return (1,)

    x: Any = OnCuda()
    monkeypatch.setattr(core, "is_intercepted", lambda x: False)
    monkeypatch.setattr(_compat, "current_stream", lambda index: 0)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        assert (cache.entry_of(x) is None) == capturing
