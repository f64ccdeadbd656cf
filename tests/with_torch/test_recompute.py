"""hot.recompute: what a block keeps and recomputes, with unchanged gradients."""

import copy
import functools
import warnings
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch import policies
from support import refused
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch_graphs import Graphs, causal, converted, gradients, same

SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Block(nn.Module):
    """Attention between two linear layers, then a third and a fourth; residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(4, 64, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind(0)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(found.transpose(1, 2).reshape(4, 64, 64))
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def x(seeded: None) -> torch.Tensor:
    return torch.randn(4, 64, 64)


POLICIES = [None, hot.policies.keep_attention, hot.policies.keep_codes, hot.policies.keep_products]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: getattr(policy, "__name__", "none"))
def test_eager_gradients_are_the_same_bits(x: torch.Tensor, policy: Any) -> None:
    model = converted(nn.Sequential(Block(), Block()), "fast")
    expected = gradients(model, model, x)
    names = list(model.state_dict())
    handle = hot.recompute(model, policy)
    name = getattr(policy, "__name__", "None")
    assert repr(handle) == f"Recomputed(2 blocks: Block; policy={name})"
    assert list(model.state_dict()) == names
    assert same(gradients(model, model, x), expected)
    own, model[1].forward = model[1].forward, lambda *args: own(*args)
    refused(handle.remove, "blocks: the forward of Block was replaced since")
    model[1].forward = own
    handle.remove()
    handle.remove()
    assert repr(handle) == "Recomputed(no blocks)"
    assert not any("forward" in m.__dict__ or getattr(m, "defer", False) for m in model.modules())
    assert same(gradients(model, model, x), expected)


class Mixed(nn.Module):
    """One layer of each kind in ``recipe``, a frozen one, and a head in chunks."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(64, 64), nn.MultiheadAttention(64, 4)
        self.wide, self.point = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 1)
        hot.convert(self, recipe, lambda module, name: True)
        self.frozen = hot.HotLinear(64, 64)
        hot.freeze_int8(self, lambda module, name: name == "frozen")
        self.head = nn.Parameter(torch.randn(70, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.linear(x))
        y = self.attention(y, y, y, need_weights=False)[0].reshape(4, 64, 8, 8)
        y = self.point(nn.functional.gelu(self.wide(y))).flatten(2)
        target = torch.arange(4 * 64).view(4, 64) % 70
        return hot.linear_cross_entropy(self.frozen(y), self.head, target, config="default")


def own_list() -> list[Any]:
    return [torch.ops.hotcore.compress_activation.default, torch.ops.hotcore.compress.default]


def nearly_equal(ours: Any, theirs: Any) -> None:
    for got, wanted in zip(ours, theirs, strict=True):
        assert nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("policy", [*POLICIES[2:], own_list], ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("mode", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_kept_codes_keep_seeds(x: torch.Tensor, mode: str, policy: Any, preserve: bool) -> None:
    """Sketches of two seeds are nearly orthogonal to each other."""
    model = Mixed("fast")
    keep = policy() if policy is own_list else policy
    contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    options = {"context_fn": contexts, "preserve_rng_state": preserve, "use_reentrant": False}
    kept = functools.partial(checkpoint, model, **options)

    calls: tuple[Any, Any] = (kept, model)
    if mode != "eager":
        torch._dynamo.reset()
        calls = tuple(torch.compile(call, backend=mode, fullgraph=True) for call in calls)
    nearly_equal(*(gradients(model, call, x) for call in calls))


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "forward", "backward", "attention"),
    [
        (None, (4, 0), (3, 4), 1),
        (hot.policies.keep_attention, (4, 0), (3, 4), 0),
        (hot.policies.keep_codes, (4, 4), (3, 0), 1),
        (hot.policies.keep_products, (4, 4), (0, 0), 1),
    ],
    ids=["nothing", "attention", "codes", "products"],
)
def test_compiled_graphs(
    x: torch.Tensor, policy: Any, forward: Any, backward: Any, attention: int
) -> None:
    """(products, compressions) of each graph: x is compressed once, wherever that is."""
    model = converted(Block(), "fast")
    full = Graphs().run(model, x.requires_grad_())
    hot.recompute(model, policy)
    graphs = Graphs().run(model, x)
    for stage, wanted in (("forward", forward), ("backward", backward)):
        made = graphs.count(stage, "compress") + graphs.count(stage, "compress_activation")
        assert (graphs.count(stage, "product"), made) == wanted, stage
    assert (graphs.calls["forward"][SDPA], graphs.calls["backward"][SDPA]) == (1, attention)
    # No generator state is kept if the seeds are.
    if policy is hot.policies.keep_attention:
        assert not any(t.dtype == torch.uint8 for t in graphs.kept)
    kept = sum(t.nbytes for t in graphs.kept if isinstance(t.numel(), int))
    # torch 2.7 keeps a vector more than without keep_products.
    if policy is not hot.policies.keep_products or not torch.__version__.startswith("2.7."):
        assert kept < sum(t.nbytes for t in full.kept)


def test_eval_and_copies(x: torch.Tensor) -> None:
    model = hot.convert(nn.Sequential(Block()), "default", lambda module, name: True)
    hot.recompute(model)
    twin = copy.deepcopy(model)
    assert twin[0].forward.block is twin[0]
    model.eval()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = model(x.requires_grad_())
    assert y.grad_fn is not None
    assert torch.equal(y, twin.eval()(x))


def test_own_policies() -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    def prefers(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in policies.CODES
        return CheckpointPolicy.PREFER_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    for policy, deferred in ((prefers, False), (hot.policies.keep_attention, True), (None, True)):
        model = converted(Block(), "default")
        handle = hot.recompute(model, policy)
        assert model.up.defer is deferred
        converted(hot.revert(model), "fast")  # inside of the blocks
        assert model.up.defer is deferred
        handle.remove()
        assert model.up.defer is False


def test_batch_norms_that_count_twice_are_named() -> None:
    norm = nn.BatchNorm1d(8)
    with pytest.warns(UserWarning, match="count every batch twice"):
        handle = hot.recompute(nn.Sequential(nn.Sequential(norm)))
    handle.remove()
    norm.track_running_stats = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hot.recompute(nn.Sequential(nn.Sequential(norm))).remove()


def test_errors() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block()))
    with pytest.raises(TypeError, match="blocks: expected a module or several, got str"):
        hot.recompute([model[0], "blocks"])  # type: ignore[list-item]
    refused(lambda: hot.recompute(3), "blocks: expected a module or several, got int", TypeError)
    says = r"policy: expected a function \(hot.policies.keep_codes\), got 'keep_codes'"
    refused(lambda: hot.recompute(model, "keep_codes"), says, TypeError)
    for leaves in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())):
        with pytest.raises(ValueError, match="blocks: expected blocks that contain layers"):
            hot.recompute(leaves)
    for twice in ([model[1], model[1][0]], [model[0], model[0]]):
        with pytest.raises(ValueError, match="or holds a block that is"):
            hot.recompute(twice)
    assert not any("forward" in module.__dict__ for module in model.modules())
    hot.recompute(model[1][0])
    refused(lambda: hot.recompute(model[1]), "recomputed already")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Any, early_stop: bool = False, debug: bool = False) -> Any:
        y = x if early_stop else self.layer(x)
        return 2 * y if debug else y


@pytest.mark.parametrize("policy", [None, policies.keep_codes])
@pytest.mark.parametrize("name", ["early_stop", "debug"])
def test_a_block_gets_arguments_named_as_options_of_checkpoint(policy: Any, name: str) -> None:
    block = Scaled()
    hot.convert(nn.ModuleList([block]), filter_fn=lambda *_: True)
    x = torch.randn(4, 64, requires_grad=True)
    expected = block(x, **{name: True})
    hot.recompute([block], policy)
    y = block(x, **{name: True})
    assert torch.equal(y, expected)
    y.sum().backward()
    with pytest.raises(TypeError, match=r"forward\(\) got .* 'determinism_check'"):
        block(x, determinism_check="none")


def test_a_list_of_operators_is_a_policy() -> None:
    operators = [torch.ops.aten.addmm.default, next(iter(policies.CODES))]
    for kept, deferred in ((operators[:1], True), (operators, False)):
        block = hot.convert(nn.ModuleList([Scaled()]), filter_fn=lambda *_: True)[0]
        hot.recompute([block], kept)
        assert block.layer.defer == deferred
        block(torch.randn(4, 64)).sum().backward()


class Cached(nn.Module):
    """A block that appends to a cache, which is empty and hence false at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(
        self, x: torch.Tensor, past_key_values: list[Any] | None = None, use_cache: bool = True
    ) -> torch.Tensor:
        y = self.layer(x)
        if past_key_values is not None and use_cache:
            past_key_values.append(y)
        return y


@pytest.mark.filterwarnings("ignore:hotcore.torch.recompute")
def test_a_cache_is_not_written_twice(x: torch.Tensor) -> None:
    model = converted(Cached(), "default")
    hot.recompute(model)
    for call in (lambda cache: model(x, cache), lambda cache: model(x, past_key_values=cache)):
        cache: list[Any] = []
        call(cache).sum().backward()
        assert not cache
        with torch.no_grad():
            call(cache)
        assert len(cache) == 1
    model.eval()
    model(x, cache)
    assert len(cache) == 2
    model.train()
    model._can_checkpoint_with_cache = True  # it only reads it, as transformers says
    with pytest.warns(UserWarning, match="use_cache=False in training, as a block that is recomp"):
        model(x, cache, True)
    assert len(cache) == 2


class Keys(list[Any]):
    """A KV cache, as transformers' ``Cache``."""

    def get_seq_length(self) -> int:
        return len(self)


class NamedAsSince524(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        y = self.layer(x)
        if isinstance(cache, Keys):
            cache.append(y)
        return y if cache is None or isinstance(cache, Keys) else y * cache


@pytest.mark.filterwarnings("ignore:hotcore.torch.recompute")
def test_an_argument_named_cache_is_one_if_it_has_a_length(x: torch.Tensor) -> None:
    """transformers 5.24 renamed past_key_values. Blocks of others may name a table so."""
    model, table = converted(NamedAsSince524(), "default"), torch.rand(64)
    expected = [model(x), model(x) * table]
    hot.recompute(model)
    keys = Keys()
    for given, y in ((keys, expected[0]), (None, expected[0]), (table, expected[1])):
        for found in (model(x, given), model(x, cache=given)):
            assert torch.equal(found, y)
            found.sum().backward()
    assert not keys


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: getattr(p, "__name__", "none"))
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_stock_models_of_transformers(kind: str, policy: Any, seeded: None) -> None:
    """Their use_cache is True by default, in training mode, too."""
    model = causal(kind)
    blocks = model.transformer.h if kind == "GPT2" else model.model.layers
    assert model.config.use_cache
    hot.convert(model, "default")
    tokens = torch.randint(96, (2, 16))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        model(tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.train().parameters()]

    expected = step()
    hot.recompute(blocks, policy)
    with pytest.warns(UserWarning, match=r"(past_key_values|cache)=None in training"):
        assert same(step(), expected)
    with torch.no_grad():
        output = model.eval()(tokens)
    cache = output["cache" if "cache" in output else "past_key_values"]
    assert cache.get_seq_length() == 16
