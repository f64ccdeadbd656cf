"""The x of layers with an 8-bit forward: quantised once for all that take it, and kept."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import hotcore
import pytest
from hotcore.config import HotConfig, Key
from support import equal_bits

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402  (after the skip)
import torch.nn.functional as F  # noqa: E402  (after the skip)
from hotcore.torch.ops import codes, core, sharing  # noqa: E402  (after the skip)
from torch import nn  # noqa: E402  (after the skip)
from torch.utils.checkpoint import (  # noqa: E402  (after the skip)
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_graphs import Graphs, converted  # noqa: E402  (after the skip)

pytestmark = pytest.mark.usefixtures("seeded")
WIDTH = 70


def int8(recipe: str = "default", **fields: Any) -> HotConfig:
    return dataclasses.replace(HotConfig.recipe(recipe), forward="int8", **fields)


INT8 = int8()


def layers(count: int = 3, config: HotConfig = INT8) -> list[hot.HotLinear]:
    return [hot.HotLinear(WIDTH, 48, config=config) for _ in range(count)]


def activation(tokens: int = 96, **options: Any) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, **options).requires_grad_() + 0


def expected(x: torch.Tensor, layer: hot.HotLinear, config: HotConfig) -> torch.Tensor:
    with torch.no_grad():
        return hotcore.forward_linear(x, layer.weight, layer.bias, config=config)


def same(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    equal_bits(y.detach(), wanted.detach())  # which raises
    return True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry each time that an x is quantised: whether it is kept, too."""
    seen: list[bool] = []
    original = codes.quantize_forward_input

    def noted(x: Any, config: HotConfig, key: Key | None = None) -> Any:
        seen.append(key is not None)
        return original(x, config, key)

    monkeypatch.setattr(codes, "quantize_forward_input", noted)
    return seen


# ------------------------------------------------------------------------------------- Eager mode


@pytest.mark.parametrize("recipe", hotcore.config.RECIPES)
def test_one_call_for_layers_of_one_x_and_the_bits_of_many(recipe: str, made: list[bool]) -> None:
    config, x = int8(recipe), activation(97)
    parts = layers(3, config)
    torch.manual_seed(5)
    outputs = [part(x) for part in parts]
    assert made == [True]
    torch.manual_seed(5)
    key = Key(0, int(torch.randint(core.SEEDS, ())))
    for part, y in zip(parts, outputs, strict=True):
        assert same(y, expected(x, part, config))
        (saved,) = (t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8)
        assert same(saved, hotcore.compress_activation(x.detach(), config, key=key).data)


def test_layers_that_keep_nothing_share_it_too(made: list[bool]) -> None:
    trained, frozen = layers(2)
    frozen.weight.requires_grad_(False)
    in_codes = nn.Sequential(nn.Linear(WIDTH, 32))
    hot.convert(in_codes, INT8, lambda *_: True)
    hot.freeze_int8(in_codes)
    x = activation()
    for part in (frozen, in_codes, frozen, trained):
        part(x)
    assert made == [False]  # the last one only compresses
    other = activation()
    trained(other)
    in_codes(other)
    frozen(other)
    assert made == [False, True]


def drop_by_backward(x: torch.Tensor, y: torch.Tensor) -> None:
    y.sum().backward()


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda x, y: None, 0),
        (lambda x, y: x.detach().mul_(2), 1),
        (drop_by_backward, 1),
        (lambda x, y: layers(1)[0](activation()), 1),
        (lambda x, y: sharing.current().clear(), 1),
    ],
    ids=["nothing", "written", "backward", "another x", "cleared"],
)
def test_when_it_is_made_again(change: Callable[..., None], again: int, made: list[bool]) -> None:
    x = activation()
    q, k = layers(2)
    y = q(x)
    change(x, y)
    before = len(made)
    assert same(k(x), expected(x, k, INT8))
    assert len(made) - before == again


def test_another_block_and_another_dtype(made: list[bool]) -> None:
    x = activation()
    (q,), (k,) = layers(1), layers(1, int8(forward_block=16))
    for part, config in ((q, INT8), (k, k.config), (q, INT8)):
        assert same(part(x), expected(x, part, config))
    assert len(made) == 3
    with torch.autocast("cpu", torch.bfloat16):
        y = q(x)
    assert same(y, expected(x.bfloat16(), q, INT8))
    assert len(made) == 4


def test_a_leaf_is_not_shared(made: list[bool]) -> None:
    x = torch.randn(96, WIDTH)
    q, k = layers(2)
    q(x), k(x)
    assert made == [True, True] and sharing.current().entry is None
    for part in (q, k):
        part.weight.requires_grad_(False)
    leaf = x.requires_grad_()
    q(leaf), k(leaf)
    assert made == [True, True]  # by the product itself


def test_the_switch(made: list[bool]) -> None:
    x = activation()
    with hot.share_inputs(False):
        for part in layers(3):
            assert same(part(x), expected(x, part, INT8))
    assert made == [True] * 3 and sharing.current().entry is None


def test_the_codes_go_with_x() -> None:
    (q,) = layers(1)
    x = activation()
    y = q(x)
    entry = sharing.current().entry
    assert entry is not None and entry.quantized is not None
    found = weakref.ref(entry.quantized[1])
    del entry, x
    assert found() is None and sharing.current().entry is None
    y.sum().backward()


def test_an_error_leaves_no_codes() -> None:
    x = activation()
    (q,) = layers(1, int8("fast", token_grid=(7, 7)))
    with pytest.raises(ValueError, match="tokens"):
        q(x)
    assert sharing.current().entry is None


# ------------------------------------------------------------------------------------ The compiler


class Attention(nn.Module):
    """Three layers of one x."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        scores = F.softmax(self.q(x) @ self.k(x).mT, -1)
        return scores @ self.v(x)


def test_one_operator_for_layers_of_one_x() -> None:
    graphs = Graphs().run(converted(Attention(), INT8), torch.randn(96, 64))
    assert graphs.count("forward", "quantize_input") == 1
    assert graphs.count("forward", "product") == 3
    assert graphs.count("forward", "compress") == graphs.count("forward", "forward_input") == 0
    assert graphs.count("backward", "quantize_input") == 0


def test_where_the_compiler_decides_when_x_is_compressed() -> None:
    graphs = Graphs().run(converted(Attention(), INT8, defer=True), torch.randn(96, 64))
    assert graphs.count("forward", "forward_input") == 1
    assert graphs.count("forward", "quantize_input") == 0


def test_layers_frozen_in_int8() -> None:
    model = converted(Attention(), INT8)
    hot.freeze_int8(model)
    graphs = Graphs().run(model, torch.randn(96, 64).requires_grad_())
    assert graphs.count("forward", "forward_input") == 1
    assert graphs.count("forward", "product") == 3


@pytest.mark.parametrize(
    "policy", [hot.policies.keep_codes, hot.policies.keep_products], ids=["codes", "products"]
)
def test_a_policy_keeps_no_codes_of_the_forward(policy: Any) -> None:
    model, x = Attention(), torch.randn(96, 64)
    plain = converted(copy.deepcopy(model), "default")
    sizes = []
    for each in (converted(model, INT8), plain):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        call = partial(checkpoint, each, use_reentrant=False, context_fn=contexts)
        graphs = Graphs().run(call, x.requires_grad_())
        sizes.append(sum(t.nbytes for t in graphs.kept if isinstance(t.numel(), int)))
        if each is model:
            assert graphs.count("forward", "quantize_input") == 0
            assert graphs.count("forward", "compress") == 1
    assert sizes[0] <= sizes[1]


def test_opcheck() -> None:
    text = INT8.json
    for x in (torch.randn(50, 70), torch.randn(2, 3, 65).bfloat16(), torch.randn(8, 60).t()):
        torch.library.opcheck(torch.ops.hotcore.forward_input.default, (x, text))
        tests = ("test_schema", "test_faketensor")  # random: its values differ from run to run
        rows = x.contiguous()
        call = (rows, text)
        torch.library.opcheck(torch.ops.hotcore.quantize_input.default, call, test_utils=tests)
        for keep in (False, True):
            call = (rows, text, keep)
            torch.library.opcheck(torch.ops.hotcore.input_of.default, call, test_utils=tests)


def test_sizes_of_fakes() -> None:
    for tokens, width, block in ((0, 8, 64), (5, 0, 64), (7, 65, 16), (33, 100, 1), (2, 7, 256)):
        config = int8(forward_block=block)
        x = torch.randn(tokens, width)
        size = codes.forward_input(x, config.json).numel()
        assert codes.input_bytes(tokens, width, config) == size
        assert codes.symbolic_input_bytes(tokens, width, config) == size
