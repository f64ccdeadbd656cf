"""Experts in two Parameters: their grouped products keep x, and the gate its factors, in codes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from support import saved_tensors, storage_bytes, without_broken_torchvision

torch = pytest.importorskip("torch")
import hotcore.torch as hot  # noqa: E402
from hotcore.torch.ops import experts  # noqa: E402
from mixtures import STEP, T, W, answer, error, inner, kept, mixture, operands  # noqa: E402
from torch import Tensor  # noqa: E402

with without_broken_torchvision():
    transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [
    pytest.mark.skipif(not experts.AVAILABLE, reason="torch has no grouped_mm"),
    pytest.mark.usefixtures("seeded"),
]


@pytest.mark.parametrize("mode", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])  # fmt: skip  # noqa: E501
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_against_float64(bits: int, dtype: Any, mode: str) -> None:
    parts, gy = operands(dtype), torch.randn(T, W)
    function = kept(bits)
    if mode != "eager":
        torch._dynamo.reset()
        function = torch.compile(function, backend=mode, fullgraph=True)
    got = answer(function, parts, gy)
    wide = (*(t.detach().double().requires_grad_() for t in parts[:4]), parts[4])
    wanted = answer(mixture, wide, gy)
    plain = 2e-6 if dtype == torch.float32 else 0.02
    for name, bound, a, b in zip(
        ("y", "gx", "first", "last", "scores"),
        (plain, plain, *(STEP[bits],) * 3),
        got,
        wanted,
        strict=True,
    ):
        assert error(a, b) < bound, (name, error(a, b))
    assert not got[2][-1].any() and not got[3][-1].any()  # an expert without tokens


def test_the_expectation_is_the_gradient() -> None:
    parts, gy, draws = operands(), torch.randn(T, W), 64
    wanted = answer(mixture, parts, gy)
    found = [answer(kept(4), parts, gy) for _ in range(draws)]
    for i in (2, 3, 4):
        one = error(found[0][i], wanted[i])
        mean = torch.stack([each[i] for each in found]).mean(0)
        assert 0.02 < one < 0.25 and error(mean, wanted[i]) < 2 * one / draws**0.5


@pytest.mark.parametrize("bits", [8, 4])
def test_no_token_changes_another(bits: int) -> None:
    """A token 10^4 times as large leaves the codes of the others' x as accurate as they were."""
    x, first, last, scores, chosen = operands()
    large = x.detach().clone()
    large[7] *= 1e4
    gy = torch.randn(T, W)
    gy[7] = 0
    parts = (large.requires_grad_(), first, last, scores, chosen)
    got, wanted = answer(kept(bits), parts, gy), answer(mixture, parts, gy)
    assert error(got[2], wanted[2]) < STEP[bits]


def test_edges() -> None:
    empty = operands(tokens=0)
    for gradient in answer(kept(4), empty, torch.zeros(0, W))[1:]:
        assert not gradient.any()
    x, first, last, scores, chosen = operands()
    alone = torch.zeros(T, 1, dtype=torch.long)  # every token, one expert
    one = (x, first, last, scores[:, :1].detach().requires_grad_(), alone)
    got, wanted = (answer(f, one, torch.ones(T, W)) for f in (kept(8), mixture))
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 0.03
    first.requires_grad_(False)
    last.requires_grad_(False)
    with saved_tensors(leaves=True) as held:
        experts.experts(x, chosen, scores.detach(), first, last, inner, 4)
    assert not any(t.dtype == torch.uint8 for t in held)  # frozen: no x
    other = operands()
    with pytest.raises(RuntimeError, match="create_graph=True reaches"):
        torch.autograd.grad(kept(4)(*other).sum(), other[0], create_graph=True)


# ---- the gate ----

WIDE = 128


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", experts.GATES)
def test_a_gate_against_float64(name: str, bits: int, mode: str) -> None:
    def plain(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, -1)
        return experts.GATES[name][0](gate) * up

    def function(rows: Tensor) -> Tensor:
        return experts.gated(rows, name, bits)

    rows = torch.randn(T, 2 * WIDE)
    rows[:, WIDE:] *= 30  # the gate's codes have scales of their own
    rows[7] *= 1e4  # no token changes another
    gy = torch.randn(T, WIDE)
    gy[7] = 0
    if mode != "eager":
        torch._dynamo.reset()
        function = torch.compile(function, backend=mode, fullgraph=True)
    x, wide = rows.requires_grad_(), rows.detach().double().requires_grad_()
    assert torch.equal(function(x), plain(x))
    (got,) = torch.autograd.grad(function(x), x, gy)
    (wanted,) = torch.autograd.grad(plain(wide), wide, gy.double())
    assert not got[7].any()
    for a, b in zip(got.chunk(2, -1), wanted.chunk(2, -1), strict=True):
        assert error(a, b) < STEP[bits]
    with saved_tensors(leaves=True) as held:
        experts.gated(x, name, bits)
    assert sum(storage_bytes(held).values()) < rows.numel() * (bits / 8 + 0.1)


# ---- models of transformers ----

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
QWEN: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 128, "first_k_dense_replace": 0, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**QWEN, "head_dim": 16},
    "DeepseekV3": DEEPSEEK,
}
GPT_OSS = {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2}


def build(name: str, act: str = "silu", **options: Any) -> Any:
    sizes = {**SIZES, **MODELS.get(name, GPT_OSS), "hidden_act": act}
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")._from_config(config, **options)


def gradients(model: Any) -> tuple[float, dict[str, Tensor]]:
    tokens = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    named = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    return loss.item(), {n: g.clone() for n, g in named.items() if g is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_against_float64(name: str) -> None:
    plain = build(name)
    wide = build(name, experts_implementation="eager").double()
    loss, exact = gradients(wide)
    wanted = gradients(plain)
    for bits in (8, 4):
        model = hot.convert(copy.deepcopy(plain), filter_fn=lambda *_: False, saved=bits)
        found = gradients(model)
        assert found[0] == wanted[0] and abs(found[0] - loss) < 1e-5  # the forward's bits
        for key, gradient in exact.items():
            bound = 0.02 if key == "lm_head.weight" else STEP[bits]
            assert error(found[1][key], gradient) < bound, (key, error(found[1][key], gradient))
        same = pickle.loads(pickle.dumps(model))
        for key, gradient in gradients(copy.deepcopy(same))[1].items():
            assert torch.equal(gradient, found[1][key]), key
        hot.revert(model)
        for key, gradient in gradients(model)[1].items():
            assert torch.equal(gradient, wanted[1][key]), key


def test_older_experts_are_named() -> None:
    """transformers 5.17's have no such attribute, and mark other ranks' tokens in their ids."""
    model = build("Mixtral")
    (layer,) = (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    del layer._is_expert_parallel
    with pytest.raises(ValueError, match=r"saved: .*mlp\.experts: transformers before 5\.18"):
        hot.convert(model, filter_fn=lambda *_: False, saved=8)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_whole_model_compiled_and_checkpointed(name: str) -> None:
    model = hot.convert(build(name), filter_fn=lambda *_: False, saved=4)
    plain = gradients(build(name))
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    checkpointed = copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    wanted = gradients(model)
    for key, gradient in gradients(checkpointed)[1].items():
        assert torch.equal(gradient, wanted[1][key]), key
    for found in (wanted, gradients(compiled)):
        assert abs(found[0] - plain[0]) < 1e-5
        for key in plain[1]:
            if "experts" in key:
                assert error(found[1][key], plain[1][key]) < 0.3, key


def test_what_is_kept() -> None:
    """x once a token, the gate's factors, and nothing of y: all in 4 bits."""

    def held(model: Any) -> int:
        (layer,) = (m for m in model.modules() if hasattr(m, "down_proj") and m.has_gate)
        x = torch.randn(256, 64).requires_grad_() * 1
        chosen = torch.stack([torch.randperm(8)[:2] for _ in range(256)])
        with saved_tensors(leaves=True) as kept:
            assert layer(x, chosen, torch.rand(256, 2, requires_grad=True)).requires_grad
        return sum(storage_bytes(kept, model.parameters()).values())

    plain, coded = build("Qwen3Moe"), build("Qwen3Moe")
    hot.convert(coded, filter_fn=lambda *_: False, saved=4)
    rows = 512
    values = 256 * 64 + 3 * rows * 128  # x; gate, up and the down projection's x
    assert held(coded) < 0.66 * values + 40 * rows < held(plain) / 6


def test_the_report_and_what_stays_plain() -> None:
    model = build("Mixtral")
    plain = hot.convert(copy.deepcopy(model)).hot_report
    assert all("saved= keeps their x in codes" in row.reason for row in plain.unsupported)
    report = hot.convert(model, saved=4).hot_report
    assert not report.unsupported
    note = "x of the grouped products, which stay torch's in the weights' dtype"
    assert f"MixtralExperts: kept in bits: experts 4; {note}, and the gate's factors" in str(report)
    other = hot.convert(build("Mixtral", "relu"), saved=4).hot_report.saved  # not a known gate
    assert f"kept in bits: experts 4; {note}, not the gate's factors (" in str(other)
    assert [dict(row.bits) for row in other.converted] == [{"experts": 4}, {"relu": 1}]
    eager = build("Mixtral", experts_implementation="eager")
    with pytest.raises(
        ValueError, match=r"mlp\.experts: its experts are 'eager', not 'grouped_mm'"
    ):
        hot.convert(eager, saved=4)
    eager.append = torch.nn.ReLU()
    left = hot.convert(eager, saved=4).hot_report.saved.left
    assert left["model.layers.0.mlp.experts"] == "its experts are 'eager', not 'grouped_mm'"
    with pytest.raises(ValueError, match=r"mlp\.experts: experts with biases"):
        hot.convert(build("GptOss"), saved=4)
    layer = next(m for m in model.modules() if type(m).__name__ == "SavedMixtralExperts")
    x, chosen, scores = torch.randn(4, 64), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)
    before = layer(x, chosen, scores)
    layer._is_expert_parallel = True  # ranks have experts of their own: transformers' forward
    assert torch.equal(layer(x, chosen, scores), before)
    assert layer(x, chosen, scores).grad_fn.name() != before.grad_fn.name()


@pytest.mark.parametrize("how", ["replaced", "replaced by its like", "hook", "patch", "gate"])
def test_the_gate_s_activation_is_not_passed_by(how: str) -> None:
    x, chosen = torch.randn(8, 64), torch.randint(4, (8, 1))
    layers = []
    for bits in (None, 8):
        model = build("Mixtral")
        if bits:
            hot.convert(model, filter_fn=lambda *_: False, saved=bits)
        layers.append(next(m for m in model.modules() if hasattr(m, "down_proj")))
        act = layers[-1].act_fn
        if how == "hook":
            act.register_forward_hook(lambda module, inputs, y: 2 * y)
        elif how == "patch":
            act.forward = torch.tanh
        elif how == "gate":
            layers[-1]._apply_gate = lambda rows: rows[:, :128].tanh()
        else:
            layers[-1].act_fn = torch.nn.Tanh() if how == "replaced" else copy.deepcopy(act)
    plain, model = layers
    with pytest.warns(RuntimeWarning, match="act_fn, a .*, was replaced, or has hooks"):
        assert torch.equal(model(x, chosen, torch.ones(8, 1)), plain(x, chosen, torch.ones(8, 1)))
