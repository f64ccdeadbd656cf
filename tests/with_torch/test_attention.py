"""HotMultiheadAttention beside nn.MultiheadAttention: outputs, gradients, masks, kept bytes."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import hotcore.torch as hot
import pytest
import support
import torch
from hotcore.config import HotConfig
from hotcore.torch.layers.attention import HotMultiheadAttention
from support import refused
from torch import nn
from torch_graphs import same

pytestmark = pytest.mark.usefixtures("seeded")

SAMPLES, TOKENS, SOURCE, WIDTH, HEADS = 4, 24, 40, 64, 4
EXACT = "accurate"


def pair(config: Any = EXACT, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain attention, and a converted copy."""
    plain = nn.MultiheadAttention(WIDTH, HEADS, **options)
    if plain.in_proj_bias is not None:  # zeros would hide errors
        nn.init.normal_(plain.in_proj_bias)
        nn.init.normal_(plain.out_proj.bias)
    converted = hot.convert(copy.deepcopy(plain), config)
    assert type(converted) is HotMultiheadAttention
    return plain, converted


def inputs(kind: str, batch_first: bool, kdim: int = WIDTH, vdim: int = WIDTH) -> list[Any]:
    def tokens(count: int, width: int) -> torch.Tensor:
        shape = (SAMPLES, count, width) if batch_first else (count, SAMPLES, width)
        return torch.randn(shape, requires_grad=True)

    query = tokens(TOKENS, WIDTH)
    if kind == "self":
        return [query, query, query]
    key = tokens(SOURCE, kdim)
    return [query, key, key if kind == "memory" else tokens(SOURCE, vdim)]


def gradients(module: nn.Module, call: Callable[[nn.Module], Any], given: list[Any]) -> list[Any]:
    """Outputs, then the gradients of everything."""
    module.zero_grad()
    for x in given:
        x.grad = None
    y, weights = call(module)
    torch.manual_seed(5)
    loss = (y * torch.randn(y.shape)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape)).sum()
    loss.backward()
    leaves = {id(x): x for x in given}.values()
    found = [x.grad.clone() for x in (*leaves, *module.parameters())]
    return [y.detach(), weights if weights is None else weights.detach(), *found]


def compare(plain: nn.Module, module: nn.Module, given: list[Any], **options: Any) -> None:
    call = lambda m: m(*given, **options)  # noqa: E731
    expected, got = gradients(plain, call, given), gradients(module, call, given)
    # another order in memory
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-5, atol=1e-5)
    for a, b in zip(got[2:], expected[2:], strict=True):
        assert a.shape == b.shape
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99
    assert not same(got[2:], expected[2:])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "memory", "apart"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_equals_the_plain_one(kind: str, batch_first: bool, need_weights: bool) -> None:
    plain, module = pair(batch_first=batch_first)
    compare(plain, module, inputs(kind, batch_first), need_weights=need_weights)


def test_without_bias_and_with_other_features() -> None:
    plain, module = pair(batch_first=True, bias=False)
    compare(plain, module, inputs("self", True))
    plain, module = pair(batch_first=True, kdim=72, vdim=80)
    compare(plain, module, inputs("apart", True, 72, 80))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("sizes", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_small_sizes(sizes: tuple[int, int, int], need_weights: bool, batch_first: bool) -> None:
    plain, module = pair(batch_first=batch_first)
    samples, *tokens = sizes
    query, key = (
        torch.randn(*((samples, n) if batch_first else (n, samples)), WIDTH, requires_grad=True)
        for n in tokens
    )
    for given in ([query, key, key], [query, query, query]):
        call = lambda m, given=given: m(*given, need_weights=need_weights)  # noqa: E731
        got, expected = gradients(module, call, given), gradients(plain, call, given)
        for ours, theirs in zip(got, expected, strict=True):
            if theirs is None or not all(x.numel() for x in given):
                torch.testing.assert_close(ours, theirs)
            else:
                assert ours.shape == theirs.shape


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("floating", [True, False])
@pytest.mark.parametrize("which", ["attn", "heads", "padding", "both"])
def test_masks(which: str, floating: bool, need_weights: bool) -> None:
    plain, module = pair(batch_first=True)
    options: dict[str, Any] = {"need_weights": need_weights}
    shape = (SAMPLES * HEADS, TOKENS, SOURCE) if which == "heads" else (TOKENS, SOURCE)
    if which != "padding":
        options["attn_mask"] = torch.rand(shape) < 0.3
    if which in ("padding", "both"):
        options["key_padding_mask"] = torch.zeros(SAMPLES, SOURCE, dtype=torch.bool)
        options["key_padding_mask"][:, -5:] = True
    if floating:
        for name in set(options) - {"need_weights"}:
            options[name] = torch.zeros(options[name].shape).masked_fill(options[name], -9.0)
    compare(plain, module, inputs("memory", True), **options)


def test_causal_unbatched_and_weights_of_each_head() -> None:
    plain, module = pair()
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    given = inputs("self", False)
    for need_weights in (True, False):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
        compare(plain, module, given, **options)
    compare(plain, module, given, average_attn_weights=False)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    padding = torch.zeros(TOKENS, dtype=torch.bool)
    padding[-1] = True
    compare(plain, module, [x, x, x], key_padding_mask=padding)


def test_what_is_kept() -> None:
    plain, module = pair("default", batch_first=True)
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    sizes = []
    for each in (plain, module):
        with support.saved_tensors() as kept:
            each(x, x, x, need_weights=False)
        sizes.append(support.nbytes(kept))
    values = 4 * SAMPLES * TOKENS * WIDTH
    assert sizes[0] - sizes[1] > 0.6 * values  # in_proj's x; out_proj's is attention's result


def test_keys_parameters_and_the_way_back() -> None:
    plain, module = pair()
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict())
    back = hot.revert(module)
    assert type(back) is nn.MultiheadAttention
    assert vars(back).keys() == vars(plain).keys()
    assert all(a is b for a, b in zip(back.parameters(), module.parameters(), strict=True))
    new = HotMultiheadAttention(WIDTH, HEADS, batch_first=True, config="fast")
    assert new.config == HotConfig.recipe("fast")
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    new(x, x, x)[0].sum().backward()
    assert new.in_proj_weight.grad is not None
    refused(lambda: HotMultiheadAttention(WIDTH, HEADS, add_bias_kv=True), "neither add_bias_kv")


def test_the_report() -> None:
    attention = functools.partial(nn.MultiheadAttention, WIDTH, HEADS)
    layers = {"mixed": attention(batch_first=True), "extra": attention(add_bias_kv=True)}
    layers |= {"zero": attention(add_zero_attn=True), "last": nn.Linear(WIDTH, WIDTH)}
    layers["cross"] = attention(kdim=32, vdim=96, batch_first=True)
    model, keys = nn.ModuleDict(layers), torch.randn(SAMPLES, 7, 32)
    values = torch.randn(SAMPLES, 7, 96)
    model.forward = lambda x: model["cross"](model["mixed"](x, x, x)[0], keys, value=values)[0]
    report = hot.convert(model, inputs=torch.randn(SAMPLES, TOKENS, WIDTH)).hot_report
    rows = {layer.name: layer for layer in report.converted}
    assert list(rows) == ["mixed", "last", "cross"]
    assert rows["cross"].macs == SAMPLES * WIDTH * (2 * TOKENS * WIDTH + 7 * (32 + 96))
    reasons = {layer.name: layer.reason for layer in report.skipped}
    why = "add_bias_kv and add_zero_attn are not supported"
    assert reasons == dict.fromkeys(("extra", "zero"), why)
    row = rows["mixed"]
    assert (row.kind, row.in_features, row.out_features) == ("MultiheadAttention", 64, 192)
    assert row.macs == SAMPLES * TOKENS * 4 * WIDTH**2
    assert row.parameters == 4 * WIDTH**2 + 4 * WIDTH
    assert not report.unsupported
    frozen = attention().requires_grad_(False)
    assert "weight frozen" in str(hot.convert(frozen).hot_report)


def test_a_token_grid_needs_batch_first() -> None:
    config = HotConfig.recipe("paper", token_grid=(4, 6))
    refused(lambda: hot.convert(nn.MultiheadAttention(WIDTH, HEADS), config), "batch_first=False")
    _, module = pair(config, batch_first=True)
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    module(x, x, x)[0].sum().backward()


def test_bad_inputs() -> None:
    _, module = pair(batch_first=True)
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    refused(lambda: module(x, x, x, is_causal=True), "attn_mask: is_causal needs it", RuntimeError)
    refused(lambda: module(x[..., :32], x, x), "query: shape .*, 32.; expected .* 64")
    for k, v in ((x, x[:, :3]), (x[:, :3], x), (x[:1], x[:1]), (x[0], x[0]), (x, x[0])):
        refused(lambda k=k, v=v: module(x, k, v, need_weights=False), "key, value: shapes")
    with pytest.raises(ValueError, match=r"attn_mask: shape \[3, 3\]; expected \[24, 24\] or"):
        module(x, x, x, attn_mask=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="attn_mask: torch.int64; expected bool"):
        module(x, x, x, attn_mask=torch.zeros(TOKENS, TOKENS, dtype=torch.int64))
    with pytest.raises(ValueError, match="key_padding_mask: shape"):
        module(x, x, x, key_padding_mask=torch.zeros(3, 3, dtype=torch.bool))
