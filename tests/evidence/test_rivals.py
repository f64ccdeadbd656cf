"""Defining properties of the benchmarks' rivals."""

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hotcore  # noqa: E402
import hotcore.torch as hot  # noqa: E402
import reference  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from evidence import ROOT, rivals  # noqa: E402
from evidence.rivals import quantizers  # noqa: E402
from evidence.rivals.conversion import taken_by_hotcore  # noqa: E402
from evidence.rivals.lbp_wht import LbpWht  # noqa: E402
from evidence.rivals.methods import power_of_two_factor, triangle_rows  # noqa: E402
from hotcore.config import RECIPES  # noqa: E402
from support import needs_torchao, refused, saved_tensors  # noqa: E402  (after the skip)
from torch import Tensor, nn  # noqa: E402

SIMULATED = (
    "bf16", "naive_int4", "luq", "luq_forward", "lbp_wht", "lbp_wht_flat", "authors_hot",
    "actnn_2bit",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("seeded_torch")


class Net(nn.Module):
    """Network with a convolution, tokens of a 4 x 4 grid, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, stride=2, padding=1)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).mT
        return self.norm(tokens + self.down(F.gelu(self.up(tokens)))).mean(1)


def everything(module: nn.Module, name: str) -> bool:
    return True


@functools.lru_cache(maxsize=2)  # convert scans all objects of the process: 0.1 s and more
def model_of(method: str, w: Tensor, **settings: Any) -> nn.Sequential:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight = nn.Parameter(w.clone())
    rivals.convert(model := nn.Sequential(layer), method, everything, **settings)
    return model


def gradients(
    method: str, x: Tensor, w: Tensor, gy: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    model, leaf = model_of(method, w, **settings), x.clone().requires_grad_()
    model.zero_grad()
    model(leaf).backward(gy)
    assert leaf.grad is not None and model[0].weight.grad is not None
    return leaf.grad, model[0].weight.grad


def operands(samples: int = 2, tokens: int = 64, ins: int = 24, outs: int = 32) -> list[Tensor]:
    return [torch.randn(s) for s in ((samples, tokens, ins), (outs, ins), (samples, tokens, outs))]


def unbiased(draw: Callable[[], Tensor], exact: Tensor, count: int) -> None:
    """Check draws' expectation in 32 directions; a z-score exceeds 5.5 once in a million runs."""
    directions = [exact, exact.sign(), torch.ones_like(exact)]
    directions += [torch.randn_like(exact) for _ in range(29)]
    matrix = torch.stack([direction.flatten() for direction in directions]).double()
    errors = torch.stack([matrix @ (draw() - exact).flatten().double() for _ in range(count)])
    noise = errors.std(0) / math.sqrt(count) + 1e-6 * matrix.norm(dim=1) * exact.norm()
    z = errors.mean(0) / noise
    assert z.abs().max() < 5.5, z


@pytest.mark.parametrize("method", SIMULATED)
def test_drop_in(method: str) -> None:
    """The forward is the same unless the name says otherwise; gradients have the same sign."""
    torch.set_num_threads(1)
    model = Net()
    x = torch.randn(4, 3, 8, 8)
    plain = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    done = rivals.convert(model, method, everything)
    assert done.names == ("conv", "up", "down") and not done.left
    assert all(p is parameters[name] for name, p in model.named_parameters())
    y, expected = model(x), plain(x)
    if method in ("bf16", "luq_forward"):
        tolerance = 0.02 if method == "bf16" else 0.5
        assert 0 < (y - expected).norm() < tolerance * expected.norm() + 1e-6
    else:
        torch.testing.assert_close(y, expected)
    gy = torch.randn_like(expected)
    y.backward(gy)
    expected.backward(gy)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        if name == "down.bias" and method != "luq_forward":  # no rival's product is before it
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=1e-5)
        cosine = F.cosine_similarity(mine.grad.flatten(), theirs.grad.flatten(), 0)
        assert cosine > 0.3, (name, cosine)
    model.eval()
    torch.testing.assert_close(model(x), plain.eval()(x), rtol=0, atol=0)


def test_a_method_in_a_file_has_rows_in_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class of docs/dev/rivals.md works as its page shows it, at toy size."""
    pytest.importorskip("sklearn")
    import bench_training
    from evidence import bench_gradients

    page = (ROOT / "docs/dev/rivals.md").read_text()
    (tmp_path / "signs.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    assert "luq;default;signs.py:SignGradient" in page
    small = ["--methods", "fp32;luq;signs.py:SignGradient", "--tasks", "vit", "--steps", "1"]
    for table in ("rivals", "finetune"):
        words = ["--seeds", "0", "--table", table, "--json", f"{table}.json", "--cache", "."]
        bench_training.main([*small, *words])
        runs = json.loads(Path(f"{table}.json").read_text())["runs"]
        assert set(runs) == {"vit/fp32/0", "vit/luq/0", "vit/SignGradient/0"}
        gap = runs["vit/SignGradient/0"]["val_loss"] - runs["vit/fp32/0"]["val_loss"]
        assert gap != 0 and f"| SignGradient | {gap:+.3f} |" in capsys.readouterr().out
    kept = [runs[f"vit/{name}/0"]["linear_saved_bytes"] for name in ("fp32", "SignGradient")]
    assert 0.25 < kept[1] / kept[0] < 0.26
    words = ["--methods", "luq;signs.py:SignGradient", *small[2:], "--at", "0", "--draws", "2"]
    gradients = [*words, "--batches", "2", "--json", "gradients.json"]
    bench_gradients.main(gradients)
    assert re.search(r"\| SignGradient \|( 0\.\d+ \|){4}  \| 1\.00 \|", capsys.readouterr().out)
    refused(lambda: rivals.convert(Net(), "signs.py:Best"), "signs.py:Best: 'Best' is no subclass")
    with pytest.raises(SystemExit):
        bench_training.main(["--methods", "fp32;other.py:Best", "--json", "none.json"])
    assert "other.py:Best: there is no 'other.py'" in capsys.readouterr().err
    right = (tmp_path / "signs.py").read_text()
    (tmp_path / "signs.py").write_text(right.replace("gy.sign()", "gy.signs()"))
    words = [*small, "--seeds", "0", "--json", "mended.json"]
    with pytest.raises(AttributeError):
        bench_training.main(words)
    (tmp_path / "signs.py").write_text(right)  # it has no row yet, so it may change
    bench_training.main(words)
    assert set(json.loads(Path("mended.json").read_text())["runs"]) == set(runs)
    (tmp_path / "also.py").write_text(right)
    with (tmp_path / "signs.py").open("a") as file:
        file.write("# another method\n")
    again = [*small, "--seeds", "0", "--json", "rivals.json"]
    for main, options in ((bench_training.main, again), (bench_gradients.main, gradients)):
        before = Path(options[-1]).read_text()
        with pytest.raises(SystemExit):
            main(options)
        assert "signs.py:SignGradient: the file differs from that" in capsys.readouterr().err
        assert Path(options[-1]).read_text() == before
    twice = "signs.py:SignGradient;also.py:SignGradient"
    with pytest.raises(SystemExit):
        bench_training.main([*small[2:], "--methods", twice, "--json", "none.json"])
    assert "also.py:SignGradient: another method has its name" in capsys.readouterr().err


@pytest.mark.parametrize("method", [m for m in SIMULATED if m not in ("authors_hot", "actnn_2bit")])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_exact_where_nothing_is_lost(method: str, kind: str) -> None:
    """Inputs that a method represents exactly give torch's gradients, signs and scales included."""
    # One magnitude is exact in INT4, FP4 and two bits. SAWB's clip of it is negative, but not that
    # of +-1 and 0. Values are constant along the tokens, so only row 0 is not zero.
    if kind == "linear":
        layer: nn.Module = nn.Linear(16, 16, bias=False)
        x, gy = (torch.ones(2, 16, 1) * _signs(1, 1, 16) for _ in range(2))
    else:
        layer = nn.Conv2d(16, 16, 1, stride=2, bias=False)
        x, gy = torch.ones(2, 16, 7, 7), torch.ones(2, 16, 4, 4) * _signs(1, 16, 1, 1)
    with torch.no_grad():
        layer.weight.copy_(_signs(*layer.weight.shape))
    results = []
    for name in ("fp32", method):
        model = nn.Sequential(copy.deepcopy(layer))
        rivals.convert(model, name, everything)
        leaf = x.clone().requires_grad_()
        model(leaf).backward(gy)
        results.append((leaf.grad, model[0].weight.grad))
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-4)


def _signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape) * 2.0 - 1


def test_same_layers_as_hotcore() -> None:
    """Rivals take the default filter's layers, and name those of kinds without a product."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    assert taken_by_hotcore(model) == ["0"] and rivals.convert(model, "luq").names == ("0",)
    assert type(model[1]) is nn.Linear
    mixed = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding="same"))
    done = rivals.convert(mixed, "luq", everything)
    assert done.names == ("0",) and "same" in done.left["1"]
    for name in RECIPES:
        fresh = nn.Sequential(nn.Linear(64, 64))
        assert rivals.convert(fresh, name).names == ("0",)
        assert type(fresh[0]) is hot.HotLinear and fresh[0].config.name == name
    refused(lambda: rivals.convert(model, "best"), "method: 'best' is none of fp32")
    says = "method: 0.5 is none of fp32.*and no CustomBackward"
    refused(rivals.convert, says, ValueError, Net(), 0.5)
    done = rivals.convert(Net(), hot.CustomBackward(), everything)  # see test_custom.py
    assert (done.method, done.names, done.left) == ("CustomBackward", ("conv", "up", "down"), {})
    says = "the class CustomBackward; make an object of it first"
    refused(rivals.convert, says, TypeError, Net(), hot.CustomBackward)
    says = "CustomBackward: settings are for methods by name"
    refused(rivals.convert, says, TypeError, Net(), hot.CustomBackward(), rank=8)
    same = nn.Sequential(nn.Conv2d(64, 64, 3, padding="same"))
    refused(lambda: rivals.convert(same, "luq", everything), "takes none")


def test_naive_int4() -> None:
    """Fifteen codes, one scale per tensor, unbiased in g_y for given codes of x and w."""
    x, w, gy = operands()
    codes, scale = quantizers.int_codes(x, 4)
    assert codes.abs().max() == 7 and scale == x.abs().max() / 7 and (codes == codes.round()).all()
    assert (codes * scale - x).abs().max() <= scale * 0.5001
    wq, xq = quantizers.int_values(w, 4), codes * scale
    unbiased(lambda: gradients("naive_int4", x, w, gy)[0], gy @ wq, 300)
    unbiased(lambda: gradients("naive_int4", x, w, gy)[1], torch.einsum("bto,bti->oi", gy, xq), 300)


def test_luq_values_are_fp4() -> None:
    """Values are zero, or a sign and one of seven powers of two up to the largest value."""
    x = torch.randn(4096) * torch.logspace(-4, 0, 4096)
    q = quantizers.luq_values(x)
    alpha = x.abs().max() / 64
    exponents = torch.log2(q[q != 0].abs() / alpha)
    assert set(exponents.tolist()) == set(range(7))
    assert len(q.unique()) <= 15 and ((q == 0) | (q.sign() == x.sign())).all()
    assert q[x.abs().argmax()] == x[x.abs().argmax()]
    assert (quantizers.luq_values(torch.zeros(5)) == 0).all()
    exact = alpha * 2.0 ** torch.arange(7)  # values with a code stay unchanged
    assert (quantizers.luq_values(exact) == exact).all()


def test_luq_products() -> None:
    """E[g_x] = g_y q(w), E[g_w] = g_y^T q(x), with SAWB's INT4 of w and x."""
    x, w, gy = operands()
    gy = gy * torch.logspace(-2, 0, gy.shape[1])[:, None]
    wq, xq = quantizers.sawb_values(w), quantizers.sawb_values(x)
    assert len(wq.unique()) <= 15 and 0.05 < (wq - w).norm() / w.norm() < 0.3
    unbiased(lambda: gradients("luq", x, w, gy)[0], gy @ wq, 400)
    unbiased(lambda: gradients("luq", x, w, gy)[1], torch.einsum("bto,bti->oi", gy, xq), 400)
    layer = model_of("luq_forward", w)
    torch.testing.assert_close(layer(x), xq @ wq.t())
    assert (layer.eval()(x) == F.linear(x, w)).all()
    kept = model_of("luq", w, forward=True, in_eval=True)
    with torch.no_grad():
        torch.testing.assert_close(kept.eval()(x), xq @ wq.t())
    refused(lambda: rivals.method_of("luq", in_eval=True), "in_eval")


def walsh_images(rank: int) -> Tensor:
    rows = hotcore.fwht(torch.eye(16), block=16)[reference.basis_order("lowpass", 16)[:rank]]
    return rows.reshape(rank, 4, 4)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_lbp_wht_tiles(prefix: int) -> None:
    """Products equal the definition tile by tile, and class tokens are exact."""
    x, w, gy = operands(tokens=prefix + 8 * 12)
    settings = {"rank": 8, "token_grid": (8, 12), "prefix_tokens": prefix}
    gx, gw = gradients("lbp_wht", x, w, gy, **settings)
    bases = walsh_images(8)

    def projected(v: Tensor) -> Tensor:
        grid = v[:, prefix:].reshape(2, 8, 12, -1).clone()
        for top in range(0, 8, 4):
            for left in range(0, 12, 4):
                tile = grid[:, top : top + 4, left : left + 4].clone()
                result = torch.einsum("rhw,bhwc->brc", bases, tile) / 16
                back = torch.einsum("brc,rhw->bhwc", result, bases)
                grid[:, top : top + 4, left : left + 4] = back
        return torch.cat([v[:, :prefix], grid.flatten(1, 2)], dim=1)

    torch.testing.assert_close(gx, projected(gy) @ w, rtol=1e-4, atol=1e-4)
    expected = torch.einsum("bto,bti->oi", projected(gy), x)
    torch.testing.assert_close(gw, expected, rtol=1e-4, atol=1e-3)
    full = gradients("lbp_wht", x, w, gy, **{**settings, "rank": 16})
    torch.testing.assert_close(full[0], gy @ w, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(full[1], torch.einsum("bto,bti->oi", gy, x), rtol=1e-4, atol=1e-3)


def test_lbp_wht_is_biased_and_keeps_half() -> None:
    x, w, gy = operands(samples=4)
    assert torch.equal(gradients("lbp_wht", x, w, gy)[1], gradients("lbp_wht", x, w, gy)[1])
    assert kept_bytes("lbp_wht", x, w) == x.numel() * 4 // 2
    refused(lambda: gradients("lbp_wht", x[:, :63], w, gy[:, :63]), "prefix_tokens|token_grid")
    refused(lambda: LbpWht(17), "rank: 17")
    refused(lambda: LbpWht(tiles=False, prefix_tokens=1), "tiles: False")


def kept_bytes(method: str, x: Tensor, w: Tensor) -> int:
    model = model_of(method, w)
    with saved_tensors(leaves=True) as kept:
        model(x.clone().requires_grad_())
    own = model[0].weight.data_ptr()
    return sum(t.numel() * t.element_size() for t in kept if t.data_ptr() != own)


def test_authors_rows() -> None:
    """Counts of their selection, and the ten rows of 16 (in docs/numerics.md's order)."""
    assert {n: len(triangle_rows(n)) for n in (1, 2, 4, 8, 16, 64, 128, 256, 512)} == {
        1: 1, 2: 1, 4: 3, 8: 3, 16: 10, 64: 36, 128: 36, 256: 136, 512: 136,
    }  # fmt: skip
    assert sorted(triangle_rows(16)) == [0, 1, 2, 3, 4, 8, 10, 11, 12, 14]
    assert set(triangle_rows(16)) == set(reference.basis_order("lowpass", 16)[:10])
    factors = {197: 1, 49: 1, 196: 4, 784: 16, 64: 64, 128: 128, 3136: 64}
    assert {n: power_of_two_factor(n) for n in factors} == factors
    assert power_of_two_factor(768, 16) == 16 and power_of_two_factor(100, 16) == 4


@pytest.mark.parametrize(("tokens", "n"), [(16, 16), (48, 16), (64, 64), (49, 1), (197, 1)])
def test_authors_gw(tokens: int, n: int) -> None:
    """E[g_w] = (P g_y)^T q(P x), sample by sample; 49 and 197 tokens are not transformed."""
    x, w, gy = operands(tokens=tokens, ins=12, outs=16)
    matrix = hotcore.fwht(torch.eye(n), block=n)
    rows = matrix[list(triangle_rows(n))]
    assert len(rows) == {1: 1, 16: 10, 64: 36}[n]
    total = torch.zeros(16, 12)
    for i in range(2):
        parts = (v[i].reshape(-1, n, v.shape[2]) for v in (x, gy))
        low_x, low_gy = (torch.einsum("rn,knc->krc", rows, v).flatten(0, 1) for v in parts)
        clip = 12.1 * low_x.square().mean().sqrt() - 12.2 * low_x.abs().mean()
        scale = clip / 127
        total += low_gy.t() @ ((low_x.clamp(-clip, clip) / scale).round() * scale) / n
    kept = kept_bytes("authors_hot", x, w)
    assert kept == 2 * (tokens * len(rows) // n * 12 + 4)  # codes and a scale per sample
    unbiased(lambda: gradients("authors_hot", x, w, gy)[1], total, 300)
    draws = ([gradients("authors_hot", x, w, gy, gw_bits=b)[1] for _ in range(20)] for b in (4, 8))
    four, eight = (torch.stack(some).std(0).mean() for some in draws)
    assert four > 10 * eight


def test_authors_gx() -> None:
    """g_x is per-token INT4 after a Hadamard transform along O, biased only by the clip of w."""
    x, w, gy = operands(outs=48)
    gy = gy * torch.logspace(-3, 3, gy.shape[1])[:, None]  # sizes of tokens have no effect
    turned = hotcore.fwht(w, axis=0, block=16)
    clip = quantizers.sawb_clip(turned)
    wq = (turned.clamp(-clip, clip) / (clip / 7)).round() * clip / 7
    exact = hotcore.fwht(gy, block=16) @ wq / 16
    unbiased(lambda: gradients("authors_hot", x, w, gy)[0], exact, 300)
    found = (gradients(method, x, w, gy)[0] for method in ("authors_hot", "naive_int4"))
    errors = [(g - exact).norm(dim=2) / exact.norm(dim=2) for g in found]
    assert errors[0].max() < 0.6 and errors[1].max() > 3


def test_actnn_layer() -> None:
    x, w, gy = operands(samples=4, ins=32)
    groups = x.numel() // 256
    assert kept_bytes("actnn_2bit", x, w) == x.numel() // 4 + 4 * groups
    gx, _ = gradients("actnn_2bit", x, w, gy)
    torch.testing.assert_close(gx, gy @ w)
    exact = torch.einsum("bto,bti->oi", gy, x)
    unbiased(lambda: gradients("actnn_2bit", x, w, gy)[1], exact, 300)
    conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False))
    rivals.convert(conv, "actnn_2bit", everything)
    with saved_tensors(leaves=True) as kept:
        conv(torch.randn(2, 8, 16, 16, requires_grad=True))
    sizes = [t.numel() * t.element_size() for t in kept if t.dtype != torch.float32]
    assert sum(sizes) == 4096 // 4 + 4 * 16  # pixels, not the nine-fold unfolded ones


def near(value: tuple[Tensor, ...], x: Tensor, w: Tensor, gy: Tensor, bound: float) -> None:
    for mine, exact in zip(value, (gy @ w, torch.einsum("bto,bti->oi", gy, x)), strict=True):
        assert 1e-4 < (mine - exact).norm() / exact.norm() < bound


@needs_torchao
@pytest.mark.parametrize("method", ["torchao_fp8", "torchao_int8"])
def test_torchao(method: str) -> None:
    x, w, gy = operands(samples=2, ins=32, outs=48)
    near(gradients(method, x, w, gy), x, w, gy, 0.1 if method == "torchao_fp8" else 0.02)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 24), nn.Conv2d(8, 8, 1))
    done = rivals.convert(model, method, everything)
    assert done.names == (("0",) if method == "torchao_fp8" else ("0", "1")) and "2" in done.left
