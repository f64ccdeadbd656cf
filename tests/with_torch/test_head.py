"""hot.linear_cross_entropy: F.cross_entropy's loss and gradients, and never all logits at once."""

import copy
import functools
import inspect
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hotcore.torch as hot
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hotcore.torch.layers.head import _whole_logits, attach
from hotcore.torch.ops import head
from support import DEVICES, refused
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torch_graphs import causal, same

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")
INT8 = hot.HotConfig.recipe("accurate", forward="int8")
CONFIGS = (None, "default", "fast", INT8)


def reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
) -> Tensor:
    """The same of whole logits, by torch."""
    logits = F.linear(x, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows, to = logits.flatten(0, -2), target.flatten()
    loss = F.cross_entropy(
        *(rows, to), ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    loss = loss + (to != ignore_index) * lse_square_scale * rows.logsumexp(-1).square()
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / ((to != ignore_index).sum() if reduction == "mean" else 1)


def tensors(
    *shape: int, vocab: int = 96, dtype: torch.dtype = torch.float32, ignored: float = 0.2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, target and bias."""
    x = torch.randn(shape).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, shape[-1]) / math.sqrt(shape[-1])).to(dtype).requires_grad_()
    target = torch.randint(vocab, shape[:-1])
    target[torch.rand(shape[:-1]) < ignored] = -100
    return x, weight, target, torch.randn(vocab).to(dtype).requires_grad_()


def results(
    loss: Callable[..., Tensor], tensors: Any, double: bool = False, **options: Any
) -> list[Tensor]:
    """The loss, and gradients of all that require them, for one incoming gradient."""
    made = [
        t.detach().to(torch.float64 if double and t.is_floating_point() else t.dtype)
        for t in tensors
    ]
    wanted = [new.requires_grad_() for new, t in zip(made, tensors, strict=True) if t.requires_grad]
    out = loss(*made, **options)
    out.backward(torch.linspace(-1, 2, out.numel() or 1)[: out.numel()].view(out.shape).to(out))
    return [out.detach(), *(t.grad for t in wanted)]


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-20))


def worst(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(error(*pair) for pair in zip(got, expected, strict=True))


def met(kind: str = "Llama", **fields: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """A model of transformers, one whose head is attached, and a batch."""
    plain = causal(kind, **fields)
    model = copy.deepcopy(plain)
    assert attach(model) == ""
    ids = torch.randint(1, 101, (2, 10))
    return plain, model, {"input_ids": ids, "labels": ids}


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    grads = ([p.grad for p in each.parameters()] for each in (model, plain))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def detached(model: Any) -> bool:
    """Whether nothing of :func:`attach` is left."""
    return not {"forward", "_loss_function"} & {*vars(model), *vars(model.lm_head)}


@pytest.mark.parametrize("vocab", [1, 7, 128, 1031, 50257])
def test_against_float64(vocab: int, rng: np.random.Generator) -> None:
    for tokens in (0, 1, 197, 640):
        options: dict[str, Any] = {
            "reduction": str(rng.choice(["mean", "sum", "none"])),
            "label_smoothing": float(rng.choice([0, 0.1])),
            "softcap": None if rng.random() < 0.5 else 2.0,
            "lse_square_scale": float(rng.choice([0, 1e-2])),
        }
        all_of = tensors(*((2, tokens // 2) if tokens == 640 else (tokens,)), 24, vocab=vocab)
        given = all_of if rng.random() < 0.5 else all_of[:3]
        chunk = None if rng.random() < 0.3 else 128
        got = results(hot.linear_cross_entropy, given, chunk=chunk, **options)
        expected = results(reference, given, True, **options)
        for ours, theirs in zip(got, expected, strict=True):
            # The mean of no tokens, whose gradients torch says to be 0.
            if theirs.numel() and theirs.isnan().all():
                assert ours.isnan() if ours is got[0] else not ours.count_nonzero()
            else:
                floor = 1e-6 * max([1.0, *theirs.abs().flatten().tolist()])
                assert torch.allclose(ours.double(), theirs, rtol=2e-5, atol=floor), options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "label_smoothing": 0.1}], ids=str)
def test_sixteen_bits_err_no_more_than_torch(dtype: torch.dtype, options: Any) -> None:
    given = tensors(1500, 64, vocab=301, dtype=dtype)
    exact = results(reference, given, True, **options)
    got = results(hot.linear_cross_entropy, given, chunk=256, **options)
    plain = results(reference, given, **options)
    assert got[0].dtype == torch.float32
    for ours, theirs, right in zip(got, plain, exact, strict=True):
        # The factor comes after the product's own rounding.
        assert error(ours, right) <= 1.25 * error(theirs, right) + 1e-6


@pytest.mark.parametrize("config", CONFIGS[1:], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hot_products(config: Any, dtype: torch.dtype, reduction: str) -> None:
    given = tensors(700, 128, vocab=1001, dtype=dtype)
    got = results(hot.linear_cross_entropy, given, config=config, reduction=reduction, chunk=256)
    exact = results(reference, given, True, reduction=reduction)
    # Measured: 0.004 and 0.07. With the targets in the products: 0.03 and 1.
    assert worst(got[1:], exact[1:]) < (0.15 if config == "fast" else 0.008)
    assert abs(float(got[0].mean() - exact[0].mean())) < 1e-3


def test_loss_of_8_bit_logits() -> None:
    # With the target's logit in 8 bits a token's loss changes by 0.01, and a mean of 4096 by 2e-4.
    x, weight, target, bias = (t.detach() for t in tensors(4096, 128, vocab=1001))
    exact = reference(x.double(), weight.double(), target, bias.double())
    assert abs(hot.linear_cross_entropy(x, weight, target, bias, INT8) - exact) < 1e-4


def test_a_vocabulary_longer_than_integer_sums() -> None:
    given = tensors(8, 16, vocab=50_000)
    got = results(hot.linear_cross_entropy, given, config="default")
    assert worst(got, results(reference, given, True)) < 0.01


def test_rounding_is_repeatable_and_new_in_every_chunk() -> None:
    x, weight, _, _ = tensors(256, 64, vocab=512)
    x, target = x.detach().requires_grad_(), torch.arange(256) % 128
    with torch.no_grad():  # two equal chunks
        x[128:], target[128:] = x[:128], target[:128]

    def gx(seed: int) -> Tensor:
        torch.manual_seed(seed)
        loss = hot.linear_cross_entropy(x, weight, target, None, "default", chunk=128)
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gx(3), gx(3)) and not torch.equal(gx(3), gx(4))
    assert not torch.equal(gx(3)[:128], gx(3)[128:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("retain", [False, True])
def test_factors_are_not_rounded(retain: bool, device: str) -> None:
    """On CUDA a 0-dim tensor on the device would be cast to bf16 before the product."""
    given = tensors(300, 64, dtype=torch.bfloat16, ignored=0)[:3]
    x, weight, target = (t.detach().to(device).requires_grad_(t.requires_grad) for t in given)
    factor, grads = 1 / 3, []
    for reduction in ("mean", "sum"):
        loss = hot.linear_cross_entropy(x, weight, target, reduction=reduction)
        g = torch.tensor(factor if reduction == "mean" else 1.0, device=device)
        grads.append(torch.autograd.grad(loss, (x, weight), g, retain_graph=retain))
    for mean, of_sum in zip(*grads, strict=True):
        ratio = (mean.double() * of_sum).sum() / of_sum.double().square().sum()
        assert float(ratio) * 300 / factor == pytest.approx(1, abs=2e-4)  # bf16's steps: 4e-3


@pytest.mark.parametrize("config", [None, INT8], ids=str)
def test_all_ignored(config: Any) -> None:
    x, weight, target, bias = tensors(40, 64)
    target.fill_(7)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        given = (x, weight, target, bias)
        options = {"reduction": reduction, "ignore_index": 7}
        loss, *gradients = results(hot.linear_cross_entropy, given, config=config, **options)
        assert torch.equal(loss.nan_to_num(5), torch.tensor(expected).nan_to_num(5))
        assert not any(g.count_nonzero() for g in gradients)
    for tokens in (40, 0):  # a loss of NaN, from which NaN comes back
        given = (x[:tokens], weight, target[:tokens], bias)
        loss = hot.linear_cross_entropy(*given, config=config, ignore_index=7)
        gradients = torch.autograd.grad(loss.square(), (x, weight, bias))
        assert loss.isnan() and not any(g.count_nonzero() for g in gradients)


def test_strided_and_any_leading_dimensions() -> None:
    x, weight, target, bias = tensors(3, 4, 50, 64)
    expected = hot.linear_cross_entropy(x, weight, target, bias)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    wide = torch.randn(96, 80)
    wide[:, :64] = weight.detach()
    views = (strided, wide[:, :64], target.mT.contiguous().mT, bias)
    assert not strided.is_contiguous()
    for config in (None, INT8):
        torch.testing.assert_close(
            hot.linear_cross_entropy(*views, config), expected, atol=1e-3, rtol=0
        )
    torch.testing.assert_close(hot.linear_cross_entropy(*views), expected)
    one = hot.linear_cross_entropy(x[0, 0, 0], weight, torch.tensor(3))
    torch.testing.assert_close(one, reference(x[0, 0, :1], weight, torch.tensor([3])))


class Largest(TorchDispatchMode):
    """Values of the largest tensor that is made inside."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.numel())
        return out


@pytest.mark.parametrize("config", ["", hot.HotConfig().json, INT8.json], ids=["torch", "hot", "8"])
def test_all_logits_never_exist(config: str) -> None:
    x, weight, target, bias = (t.detach() for t in tensors(12_000, 32, vocab=2000, ignored=0))
    factor, options = torch.ones(12_000), head.Options(0.1, 5.0, 1e-3, 0)
    with Largest() as largest:
        head.chunked(
            *(x, weight, bias, target, factor, torch.tensor(1), config, (True,) * 3, options)
        )
    assert largest.values <= head.MIN_CHUNK * 2000 < x.shape[0] * 2000 / 5
    with Largest() as plain:
        reference(x, weight, target, bias)
    assert plain.values == 12_000 * 2000


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_losses_alone_leave_the_logits(softcap: float) -> None:
    logits, target = torch.randn(9, 50), torch.randint(47, (9,))
    before = logits.clone()
    options = head.Options(0.1, softcap, 1e-3, 0)
    alone, _ = head.differentiate(logits, 47, target, options, False)
    assert torch.equal(logits, before)
    both, _ = head.differentiate(logits, 47, target, options, True)
    assert torch.equal(alone, both) and not logits[:, 47:].count_nonzero()


def test_chunks() -> None:
    for tokens, vocab, width in ((8192, 128256, 4096), (16384, 50257, 768), (4097, 100, 4096)):
        step = head.chunk_of(tokens, vocab, width)
        assert step % 128 == 0 or step == tokens
        most = max(width / 2 * vocab, tokens * width, head.MIN_CHUNK * vocab)
        assert step * vocab <= most + 128 * vocab
        assert tokens <= step * -(-tokens // step)
    assert head.chunk_of(8192, 128256, 4096) == 2048 and head.chunk_of(100, 9, 9) == 100


def test_only_products_that_are_wanted() -> None:
    given = tensors(64, 32)

    def products(*wanted: bool, backward: bool = True) -> int:
        x, weight, bias = (
            t.detach().requires_grad_(want)
            for t, want in zip((given[0], given[1], given[3]), wanted, strict=True)
        )
        with FlopCounterMode(display=False) as counter:
            with torch.set_grad_enabled(backward):
                loss = hot.linear_cross_entropy(x, weight, given[2], bias)
            assert loss.requires_grad == (any(wanted) and backward)
            if loss.requires_grad:
                loss.backward()
        return int(counter.get_total_flops()) // (2 * 64 * 32 * 96)

    assert products(False, False, False) == 1 and products(True, True, True) == 3
    assert products(True, False, False) == products(False, True, True) == 2
    assert products(True, True, True, backward=False) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("config", [None, "default"])
def test_backward_twice_and_accumulated(config: Any, reduction: str) -> None:
    x, weight, target, bias = tensors(100, 64, dtype=torch.bfloat16)
    loss = hot.linear_cross_entropy(x, weight, target, bias, config, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (x, weight, bias), retain_graph=True)
    kept = [g.clone() for g in first]
    again = torch.autograd.grad(4 * loss, (x, weight, bias), retain_graph=True)
    loss.backward()  # may write in place
    for a, b, c, p in zip(kept, first, again, (x, weight, bias), strict=True):
        assert torch.equal(a, b) and torch.equal(4 * a, c) and torch.equal(p.grad, a)
    grad = weight.grad.clone()
    loss = hot.linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum()
    rows = torch.autograd.grad(loss, weight, torch.tensor([1.0, 4.0]), is_grads_batched=True)[0]
    assert error(rows[1], 4 * grad.double()) < 0.02
    hot.linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum().backward()
    assert error(weight.grad, 2 * grad.double()) < 0.02


@pytest.mark.parametrize("config", [None, INT8], ids=str)
def test_what_is_refused(config: Any) -> None:
    x, weight, target, _ = tensors(20, 64)
    call = functools.partial(hot.linear_cross_entropy, target=target, config=config)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(call(x, weight), x, create_graph=True)
    for transformed in (
        lambda: torch.func.grad(lambda w: call(x, w))(weight),
        lambda: torch.func.vmap(lambda a: call(a, weight))(x.expand(2, -1, -1)),
        lambda: torch.func.jvp(lambda a: call(a, weight), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match=r"linear_cross_entropy: torch\.func"):
            transformed()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(8, 63)}, r"weight: shape \[96, 64\]; expected \[V, I\]"),
        ({"weight": torch.randn(0, 64)}, r"weight: shape \[0, 64\]"),
        ({"x": torch.randn(8, 64).double()}, "x: dtype float64"),
        ({"x": torch.randn(8, 64).bfloat16()}, "weight: dtype float32; x has bfloat16"),
        ({"bias": torch.randn(96).half()}, "bias: dtype float16"),
        (
            {"weight": torch.randn(96, 64).to_sparse()},
            r"weight: layout torch\.sparse_coo; expected",
        ),
        ({"x": torch.randn(8, 64).to_sparse()}, r"x: layout torch\.sparse_coo; expected"),
        ({"bias": torch.randn(95)}, r"bias: shape \[95\]; expected \[96\]"),
        ({"target": torch.zeros(9, dtype=torch.int64)}, r"target: shape \[9\]; expected \[8\]"),
        ({"target": torch.zeros(8, dtype=torch.int32)}, "target: dtype int32; expected int64"),
        ({"target": torch.full((8,), 96)}, "target: 96; expected 0 to 95, or ignore_index"),
        ({"target": torch.full((8,), -1)}, "target: -1; expected"),
        ({"target": torch.zeros(8, dtype=torch.int64, device="meta")}, "target: on meta; x is on"),
        ({"reduction": "max"}, "reduction: 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing: 1.5 is outside 0 to 1"),
        ({"softcap": 0.0}, "softcap: 0.0"),
        ({"lse_square_scale": float("nan")}, "lse_square_scale: nan"),
        ({"chunk": 0}, "chunk: 0"),
        ({"config": "best"}, "config: 'best' is not one of 'default'"),
        ({"config": hot.HotConfig.recipe("fast", token_grid=(2, 2))}, "config: token_grid"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),  # no tensor
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.randn(8, 64), "weight": torch.randn(96, 64), "target": torch.arange(8)}
    refused(lambda: hot.linear_cross_entropy(**{**given, **change}), message)


@pytest.mark.parametrize("name", ["x", "weight", "target", "bias"])
@pytest.mark.parametrize("wrong", [None, [[0.0] * 64] * 8, np.zeros((8, 64), np.float32), 3])
def test_what_is_no_tensor_is_refused(name: str, wrong: Any) -> None:
    given = {"x": torch.randn(8, 64), "weight": torch.randn(96, 64), "target": torch.arange(8)}
    if name == "bias" and wrong is None:
        return
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got {kind}"):
        hot.linear_cross_entropy(**{**given, name: wrong})


@pytest.mark.parametrize(
    "change",
    [{"chunk": w} for w in (True, 64.0, "64", torch.tensor(2.0))]
    + [{name: w} for name in ("softcap", "label_smoothing", "lse_square_scale")
       for w in (True, "1", [1.0], torch.tensor(1.0))]
    + [{"label_smoothing": None}, {"lse_square_scale": None}, {"ignore_index": 1.5}],
    ids=str,
)  # fmt: skip
def test_options_of_another_type_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(change))}: expected an? (number|int), got"):
        hot.linear_cross_entropy(torch.randn(8, 64), torch.randn(96, 64), torch.arange(8), **change)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", [None, INT8], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_in_one_graph(config: Any, autocast: bool, reduction: str) -> None:
    _, weight, _, bias = tensors(1, 64)

    def call(x: Tensor, target: Tensor) -> Tensor:
        loss = hot.linear_cross_entropy(
            *(x * 1.5, weight, target, bias, config), reduction=reduction, softcap=30.0, chunk=128
        )
        return loss.mean() * 3

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (100, 300):
        x, _, target, _ = tensors(tokens, 64)
        both = []
        for function in (call, compiled):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = function(x, target)
            both.append([loss.detach(), *torch.autograd.grad(loss, (x, weight, bias))])
        for ours, theirs in zip(*both, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, rtol=1e-2 if autocast else 1e-6, atol=1e-6)


@pytest.mark.parametrize("config", [None, INT8], ids=str)
def test_autocast_and_checkpoint(config: Any) -> None:
    given = tensors(200, 64)

    def call(*tensors: Tensor) -> Tensor:
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            return hot.linear_cross_entropy(*tensors, config)

    direct = results(call, given)
    assert worst(direct, results(reference, given, True)) < 0.01
    for reentrant in (False, True):
        again = results(functools.partial(checkpoint, call, use_reentrant=reentrant), given)
        assert same(again, direct)


def test_a_selective_checkpoint_keeps_it() -> None:
    given = tensors(64, 32)
    contexts = functools.partial(create_selective_checkpoint_contexts, hot.policies.keep_products)
    call = functools.partial(
        checkpoint, hot.linear_cross_entropy, use_reentrant=False, context_fn=contexts
    )
    with FlopCounterMode(display=False) as counter:
        found = results(call, given)
    assert counter.get_total_flops() == 3 * 2 * 64 * 32 * 96
    assert same(found, results(hot.linear_cross_entropy, given))


def test_module_with_a_tied_weight() -> None:
    embedding, plain = nn.Embedding(90, 64), nn.Linear(64, 90, bias=False)
    ours = hot.LinearCrossEntropy(64, 90, label_smoothing=0.1)
    ours.load_state_dict(plain.state_dict())
    ours.weight = plain.weight = embedding.weight
    tokens, target = torch.randint(90, (2, 3, 20))
    ours(embedding(tokens), target).backward()
    grad, embedding.weight.grad = embedding.weight.grad, None
    logits = plain(embedding(tokens))
    F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1).backward()
    torch.testing.assert_close(grad, embedding.weight.grad)
    assert torch.equal(ours(embedding(tokens)), logits)
    refused(lambda: hot.LinearCrossEntropy(64, 90, smoothing=0.1), "smoothing", TypeError)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("GPT2", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {"tie_word_embeddings": False}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),
        ("Mixtral", {"output_router_logits": True, "num_local_experts": 2}),
    ],
)
def test_models_of_transformers(kind: str, fields: dict[str, Any]) -> None:
    plain, model, _ = met(kind, **fields)
    model = copy.deepcopy(model)  # with what was attached
    ids = torch.randint(1, 101, (2, 40))
    labels = ids.clone()
    labels[:, :7] = -100
    for options in ({}, {"num_items_in_batch": torch.tensor(50.0)}):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            out = each(input_ids=ids, labels=labels, **options)
            out.loss.backward()
            losses.append(out.loss.detach())
        assert out.logits.shape == (2, 40, 0)
        torch.testing.assert_close(losses[1], losses[0])
        same_gradients(model, plain)
    assert model.forward(input_ids=ids, labels=ids).logits.shape == (2, 40, 0)  # as peft calls it
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model(input_ids=ids).logits.shape == (2, 40, 101)
    out = model.eval()(input_ids=ids, labels=labels)
    torch.testing.assert_close(out.logits, plain.eval()(input_ids=ids).logits)


@pytest.mark.long
@pytest.mark.parametrize("config", [True, "accurate"])
def test_convert_with_a_head(config: Any) -> None:
    model = causal("Llama")
    ids = torch.randint(1, 101, (2, 40))
    expected = model(input_ids=ids, labels=ids).loss.item()
    state = set(model.state_dict())
    hot.convert(model, "default", head=config)
    assert f"head: loss in chunks, {'torch' if config is True else config}" in str(model.hot_report)
    assert model.hot_report.to_dict()["head"]
    found = model(input_ids=ids, labels=ids)
    assert found.logits.numel() == 0
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert set(model.state_dict()) == state
    hot.revert(model)
    out = model(input_ids=ids, labels=ids)
    assert out.loss.item() == pytest.approx(expected, rel=1e-6) and out.logits.shape[-1] == 101
    assert detached(model)


def test_a_head_alone() -> None:
    plain = causal("Llama")
    model = hot.convert(copy.deepcopy(plain), filter_fn=lambda *_: False, head=True)
    assert not model.hot_report.converted and "head: loss in chunks" in str(model.hot_report)
    ids = torch.randint(1, 101, (2, 40))
    for each in (model, plain):
        each(input_ids=ids, labels=ids).loss.backward()
    same_gradients(model, plain)
    layers = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="head: no model of transformers; and no layer is conv"):
        hot.convert(layers, filter_fn=lambda *_: False, head=True)
    assert type(layers[0]) is nn.Linear and not hasattr(layers, "hot_report")
    head, model.lm_head = model.lm_head, nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="head: its head is a Sequential.*; and no layer is conv"):
        hot.convert(model, filter_fn=lambda *_: False, head=True)
    model.lm_head = head  # the loss is as it was
    assert model(input_ids=ids, labels=ids).logits.shape[-1] == 0


def test_models_that_are_not_met() -> None:
    model = causal("Cohere")
    with pytest.warns(UserWarning, match=r"head: its forward uses the logits otherwise: logits = "):
        hot.convert(model, "default", head=True)
    assert "head: stays plain: its forward uses" in str(model.hot_report)
    with pytest.warns(UserWarning, match="head: no model of transformers"):
        hot.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), head=True)
    with pytest.raises(TypeError, match="head: expected a HotConfig"):
        hot.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), head=3)
    model = causal("Llama")
    model.loss_function = F.cross_entropy
    assert attach(model) == "its loss is cross_entropy, not ForCausalLMLoss"
    model = causal("Llama")
    model.lm_head = hot.LinearCrossEntropy(64, 101)
    assert attach(model).startswith("its head is a LinearCrossEntropy")


def test_a_copy_of_the_head_is_plain() -> None:
    """A copy as peft's modules_to_save makes it trains another weight."""
    _, model, batch = met()
    model.lm_head = copied = copy.deepcopy(model.lm_head)
    assert vars(copied)["forward"].head is copied
    out = model(**batch)
    assert out.logits.shape == (2, 10, 101)
    out.loss.backward()
    assert copied.weight.grad.count_nonzero()
    hot.revert(model)
    assert detached(model)


def halved(module: Any, inputs: Any, output: Any) -> Any:
    return output / 2 if getattr(module, "out_features", 0) == 101 else None


def doubled(module: Any, grad_input: Any, grad_output: Any) -> Any:
    return (2 * grad_input[0],)


@pytest.mark.parametrize("how", ["forward", "backward", "everywhere", "adapter"])
def test_what_wants_logits_gets_them(how: str) -> None:
    """Hooks of the head, and an adapter around it, do what they do to a plain model."""
    plain, model, batch = met()
    gradients, handle = [], None
    if how == "everywhere":
        handle = nn.modules.module.register_module_forward_hook(halved)
    for each in (plain, model):
        trained, ours = [*each.parameters()], each is model
        if how == "forward":
            each.lm_head.register_forward_hook(halved)
        elif how == "backward":
            each.lm_head.register_full_backward_hook(doubled)
        elif how == "adapter":
            peft = pytest.importorskip("peft")
            torch.manual_seed(3)
            lora = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
            each = peft.get_peft_model(each, lora)
            trained = [p for p in each.parameters() if p.requires_grad]
        _whole_logits.cache_clear()
        message = "doubled|halved|lm_head is a Linear now"
        with pytest.warns(UserWarning, match=message) if ours else nullcontext():
            out = each(**batch)
        assert out.logits.shape == (2, 10, 101)
        out.loss.backward()
        gradients.append([p.grad for p in trained])
    if handle is not None:
        handle.remove()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_set_later_gets_logits() -> None:
    _, model, batch = met()
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    _whole_logits.cache_clear()
    with pytest.warns(UserWarning, match="loss_function was replaced"):
        out = model(**batch)
    assert out.loss == out.logits.square().mean()


def test_a_call_that_fails_leaves_nothing() -> None:
    _, model, batch = met()
    wrong = {**batch, "labels": torch.full_like(batch["labels"], 105)}
    refused(lambda: model(**wrong), "target: 105; expected 0 to 100")
    assert model.lm_head(torch.randn(1, 64)).shape == (1, 101)


def test_a_second_thread_is_refused() -> None:
    """It would get the loss of the first one's x."""
    _, model, batch = met()
    found: list[BaseException] = []

    def call() -> None:
        try:
            model(**batch)
        except RuntimeError as error:
            found.append(error)

    def meanwhile(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = model.lm_head.register_forward_pre_hook(meanwhile)
    assert model(**batch).logits.shape == (2, 10, 0)
    assert "another thread runs this model" in str(found[0]) and len(found) == 1
    call()
    assert len(found) == 1


def test_a_cap_that_is_changed_later() -> None:
    *models, batch = met("Gemma2", final_logit_softcapping=2.0)
    losses = []
    for each in models:
        each.config.final_logit_softcapping = 0.5
        losses.append(each(**batch).loss)
    torch.testing.assert_close(*losses)


def test_a_forward_that_is_wrapped_later() -> None:
    """``revert`` would leave the head as it is."""
    _, model, _ = met()
    inner = model.forward
    model.forward = lambda *args, **named: inner(*args, **named)
    refused(lambda: hot.revert(model), "was wrapped afterwards")
    assert "was wrapped afterwards" in attach(model)
    model.forward = inner
    hot.revert(model)
    assert detached(model)
