"""Keys with counters, which make the replays of a CUDA graph draw anew, without a GPU.

Here torch only says that it captures, the numbers are memory of the CPU, and what a graph would do
at its first replay is done at once. tests/gpu/test_runtime.py has the graphs themselves.
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
from hotcore.torch import conv, ops  # noqa: E402  (after the skip)
from torch.utils.checkpoint import checkpoint  # noqa: E402  (after the skip)

pytestmark = pytest.mark.usefixtures("seeded")


class Capture:
    """What torch says of the current stream."""

    running = False

    def __call__(self) -> bool:
        return self.running

    def __enter__(self) -> None:
        self.running = True

    def __exit__(self, *_: object) -> None:
        self.running = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Layers take the CPU for a GPU that has no numbers yet."""
    state = Capture()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", state)
    monkeypatch.setattr(ops, "_counters", {})
    monkeypatch.setattr(ops, "_used_up", [])
    monkeypatch.setattr(ops, "counted", ops._counted)
    return state


def warm_up() -> None:
    hot.HotLinear(16, 16)(torch.randn(4, 16))


def drawn(seed: int) -> int:
    """The seed of the first layer call after ``manual_seed(seed)``."""
    torch.manual_seed(seed)
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


def gradients(
    module: Callable[[torch.Tensor], torch.Tensor],
    leaves: tuple[torch.Tensor, ...],
    gy: torch.Tensor,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return torch.autograd.grad(module(leaves[0]), leaves, gy)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_layer_has_its_count_for_an_offset(recipe: str, capture: Capture) -> None:
    warm_up()
    module = hot.HotLinear(64, 48, config=recipe)
    x, gy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)
    with capture:
        gx, gw = gradients(module, (x, module.weight), gy, 5)
    for offset, same in ((1, True), (0, False)):
        saved = hotcore.compress_activation(x.detach(), recipe, key=Key(drawn(5), offset))
        expected = hotcore.backward_linear(gy, module.weight.detach(), saved)
        assert torch.equal(gw, expected.gw) == same
        assert torch.equal(gx, expected.gx) == same


def test_backward_reads_the_count_of_its_time(capture: Capture) -> None:
    """Forward and backward may be graphs of their own: backward counts nothing up itself."""
    warm_up()
    module = hot.HotLinear(64, 48, bias=False, config="accurate")
    x, gy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)
    with capture:
        torch.manual_seed(5)
        y = module(x)
    number = ops._counters[x.get_device()]._numbers[0]
    assert number.item() == 1
    number.fill_(7)  # as at the seventh replay
    (gx,) = torch.autograd.grad(y, x, gy)
    assert number.item() == 7
    key = Key(drawn(5), 7)
    expected = hotcore.backward_linear(gy, module.weight.detach(), None, config="accurate",
                                       need="gx", key=key)  # fmt: skip
    assert torch.equal(gx, expected.gx)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_captured_convolutions(recipe: str, kernel: int, capture: Capture,
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(conv, "CHUNK_BYTES", 1 << 16)  # several chunks of images
    keys: list[Key] = []
    compress = ops.compress

    def noting(x: torch.Tensor, config: HotConfig, key: Key) -> torch.Tensor:
        keys.append(key)
        return compress(x, config, key)

    warm_up()
    monkeypatch.setattr(ops, "compress", noting)
    module = hot.HotConv2d(32, 16, kernel, padding=kernel // 2, config=recipe)
    x, gy = torch.randn(4, 32, 8, 8, requires_grad=True), torch.randn(4, 16, 8, 8)
    with capture:
        captured = gradients(module, (x, module.weight), gy, 5)
    # The keys of all that was rounded: one seed and one count, no offset twice, nor so close that
    # counts would meet.
    assert len(keys) == (1 if kernel == 1 else 1 + len(conv.chunks(4, 32 * 9 * 64)))
    assert len(keys) > 2 or kernel == 1
    assert {(key.seed, key.counter) for key in keys} == {(drawn(5), keys[0].counter)}
    assert keys[0].counter != 0
    assert [key.offset for key in keys] == [chunk << 32 for chunk in range(len(keys))]
    eager = gradients(module, (x, module.weight), gy, 5)
    for a, b in zip(captured, eager, strict=True):
        assert not torch.equal(a, b)
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_checkpoint_meets_the_same_numbers(
    recipe: str, reentrant: bool, capture: Capture
) -> None:
    """The recomputation counts in a number of its own, which is the first one's at every replay."""
    warm_up()
    module = hot.HotLinear(64, 48, config=recipe)
    x, gy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 48)

    def both(wrapped: bool) -> list[torch.Tensor | None]:
        x.grad = module.weight.grad = None
        torch.manual_seed(5)
        with capture:
            y = checkpoint(module, x, use_reentrant=reentrant) if wrapped else module(x)
            y.backward(gy)
        return [x.grad, module.weight.grad]

    for a, b in zip(both(False), both(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_that_preserves_no_seed(recipe: str, capture: Capture) -> None:
    """x is then rounded with another seed than g_y, but a sketch is the same on both sides."""
    warm_up()
    module = hot.HotLinear(64, 48, bias=False, config=recipe)
    x, gy = torch.randn(96, 64), torch.randn(96, 48)
    torch.manual_seed(5)
    with capture:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        checkpoint(module, x, **options).backward(gy)
    own = Key(drawn(5), 1)
    again = Key(int(torch.randint(2**63 - 1, (), dtype=torch.int64)), 1)
    saved = hotcore.compress_activation(x, recipe, key=again)
    expected = hotcore.backward_linear(gy, None, saved, need="gw", key=own)
    assert torch.equal(module.weight.grad, expected.gw)


def test_captured_layers_share_no_x(capture: Capture) -> None:
    warm_up()
    q, k = hot.HotLinear(64, 48), hot.HotLinear(64, 48)
    x = torch.randn(96, 64)
    with capture:
        found = [[t for t in m(x).grad_fn.saved_tensors if t is not None] for m in (q, k)]
    (saved, seed), (other, other_seed) = (tensors[:2] for tensors in found)
    assert saved.data_ptr() != other.data_ptr()
    assert seed.shape == other_seed.shape == (2,)
    assert seed[1] != other_seed[1]


def test_a_capture_needs_a_step_before(capture: Capture) -> None:
    module = hot.HotLinear(16, 16)
    x = torch.randn(4, 16)
    with capture, pytest.raises(RuntimeError, match="run one step of training before"):
        module(x)
    with torch.no_grad():
        module(x)  # nothing to differentiate: no numbers are wanted
    assert not ops._counters
    module(x)
    with capture:
        module(x)


def test_numbers_run_out(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.Counters, "most", 3)
    warm_up()
    module = hot.HotLinear(16, 16)
    x = torch.randn(4, 16)
    with capture:
        seeds = [module(x).grad_fn.saved_tensors[1] for _ in range(3)]
        with pytest.raises(RuntimeError, match="captured 3 layer calls .*run one step outside"):
            module(x)
    module(x)
    with capture:
        seeds.append(module(x).grad_fn.saved_tensors[1])
    assert len({int(seed[1]) for seed in seeds}) == 4
    assert ops._used_up[0]._numbers.tolist() == [1, 1, 1]  # kept: graphs hold their addresses


def test_the_operator_says_where_it_counts(capture: Capture,
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    x, weight = torch.randn(4, 16), torch.randn(16, 16)
    torch.manual_seed(5)
    seed = torch.ops.hotcore.draw_seed(x, weight)
    assert seed.tolist() == [drawn(5), 0]
    assert ops.key_of(seed) == Key(drawn(5)) == ops.key_of(torch.tensor(drawn(5)))
