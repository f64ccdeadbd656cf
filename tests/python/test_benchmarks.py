"""The benchmarks: their clock and arithmetic, and each script once at toy size on the CPU."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import bench_backward  # noqa: E402
import bench_gemm  # noqa: E402
import bench_models  # noqa: E402
import hotcore  # noqa: E402
import layers  # noqa: E402
import timing  # noqa: E402
from evidence import (  # noqa: E402
    bench_examples,
    bench_fwht,
    bench_rule,
    rivals,
    targets,
)
from hotcore.torch import gains  # noqa: E402
from support import without_broken_torchvision  # noqa: E402

RECIPES = ("default", "fast", "paper")


pytestmark = pytest.mark.usefixtures("seeded_torch")


def run(script: Any, path: Path, *words: str) -> Any:
    script.main([*words, "--rounds", "2", "--threads", "1", "--json", str(path)])
    report = json.loads(path.read_text())
    assert {"benchmark", "date", "device", "versions", "rounds", "seed"} <= report.keys()
    return report


# ---- the clock ----


def test_a_report_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that is ended while it writes leaves the report of before."""
    path = tmp_path / "made" / "report.json"
    timing.write_json(path, {"a": 1.23456789, "b": [12345678.9, "x", 3]})
    assert json.loads(path.read_text()) == {"a": 1.23457, "b": [12345700.0, "x", 3]}
    write_text = Path.write_text

    def ended(self: Path, text: str, **how: Any) -> int:
        write_text(self, text[: len(text) // 2], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        timing.write_json(path, {"a": 2})
    assert json.loads(path.read_text())["a"] == 1.23457


def test_spread(rng: np.random.Generator) -> None:
    values = rng.exponential(size=int(rng.integers(2, 50))).tolist()
    row = timing.spread(values)
    assert row["median_ms"] == statistics.median(values)
    assert [row["q1_ms"], row["q3_ms"]] == pytest.approx(np.quantile(values, [0.25, 0.75]).tolist())
    assert timing.spread([3.0]) == {
        "median_ms": 3.0, "q1_ms": 3.0, "q3_ms": 3.0, "measurements": 1,
    }  # fmt: skip


def test_contenders_take_turns() -> None:
    order: list[str] = []
    contenders = {name: (lambda name=name: order.append(name)) for name in "ab"}
    rows = timing.in_turns(contenders, 8, "cpu")
    assert order[:4] == ["a", "a", "b", "b"]
    turns = ["".join(order[at : at + 10]) for at in range(4, len(order), 10)]
    assert len(turns) == 8 and set(turns) == {"aaaaabbbbb", "bbbbbaaaaa"}
    assert all(row["measurements"] == 24 for row in rows.values())


def test_rows_that_are_not_steady_are_measured_again_and_are_no_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quartiles more than 5 % of the median apart."""
    spreads = {"quiet": [0.01], "calms": [0.2, 0.3, 0.04], "shaky": [0.3, 0.2, 0.4, 0.3, 0.3]}
    asked: list[list[str]] = []

    def in_turns(contenders: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
        asked.append(list(contenders))
        return {
            name: {"median_ms": 1.0, "q1_ms": 1.0, "q3_ms": 1.0 + spreads[name].pop(0)}
            for name in contenders
        }

    monkeypatch.setattr(timing, "in_turns", in_turns)
    rows = timing.steadied(dict.fromkeys(spreads, lambda: None), 5, "cuda")
    assert asked == [["quiet", "calms", "shaky"], ["calms", "shaky"], ["calms", "shaky"], ["shaky"]]
    assert [name for name, row in rows.items() if row.get("unsteady")] == ["shaky"]
    assert rows["calms"]["q3_ms"] == 1.04 and rows["shaky"]["q3_ms"] == 1.2
    assert timing.summed([rows, rows]) == {"quiet": 2.0, "calms": 2.0}
    assert timing.steady({"median_ms": 1.0})  # a difference has no quartiles


# ---- the arithmetic ----


def test_rivals_do_the_same_work(rng: np.random.Generator) -> None:
    shape = (48, 24, 32)
    gy, w, x = bench_backward.tensors(shape, "cpu", torch.float32)
    gx, gw, gb = rivals.backward(gy, w, x)()
    mine = bench_backward.hot_backward(gy, w, x, "accurate")()
    for theirs, ours in zip((gx, gw, gb), mine, strict=True):
        assert (theirs - ours).norm() < 0.05 * theirs.norm()
    int8 = rivals.int8_products(*shape, "cpu")()
    assert [tuple(result.shape) for result in int8] == [(48, 32), (24, 32)]


def test_torchao_emulated() -> None:
    gy, w, x = bench_backward.tensors((64, 48, 32), "cpu", torch.float32)
    try:
        calls, version = rivals.torchao_calls(gy, w, x, emulate=True)
    except rivals.TorchaoMissing as error:
        pytest.skip(str(error))
    assert version.endswith("no timing")
    for name in ("torchao both", "torchao backward"):
        for _ in range(2):  # the retained graph serves again
            gx, gw = calls[name]()
        assert (gx - gy @ w).norm() < 0.1 * gx.norm()
        assert (gw - gy.t() @ x).norm() < 0.1 * gw.norm()


def test_shapes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for script, word in ((bench_backward, "1,2"), (bench_gemm, "0,1,2")):
        with pytest.raises(SystemExit):
            script.main(["--shape", word])
        assert "is no shape" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            bench_fwht.main(["--device", "cuda"])
        assert "no CUDA device" in capsys.readouterr().err


# ---- the scripts ----


def test_bench_backward(tmp_path: Path) -> None:
    parts = [word for part in bench_backward.PARTS for word in ("--part", part)]
    shapes = ("--shape", "33,48,16", "--shape", "64,32,32")
    report = run(bench_backward, tmp_path / "out.json", *shapes, *parts, "--recipe", "fast")
    total = report["layers"]["given"]
    rows = [table["rows"] for table in total["layers"].values()]
    assert len(rows) == 2
    fast = total["recipes"]["fast"]
    total_ms = sum(r["hotcore fast"]["median_ms"] for r in rows)
    assert fast["sum_ms"] == pytest.approx(total_ms, rel=1e-4)  # six digits are written
    rival = sum(r["fp32 products"]["median_ms"] for r in rows)
    assert fast["faster than"]["fp32 products"] == pytest.approx(rival / fast["sum_ms"], rel=1e-4)
    assert set(report["paper"]["rotating"]["means"]) == {"fp32", "hotcore fast"}
    calls = report["stages"]["given"]["33,48,16"]["recipes"]["fast"]["calls"]
    assert set(calls) == {"all", "gx", "gw", "gb"}
    assert set(report["forward"]["given"]["extra"]) == {"fast"}
    host = report["host"]["rows"]
    inside = host["inside adapter backward fast"]
    assert 0 < inside["median_ms"] < inside["whole_ms"]  # of the same bursts
    both = host["HotLinear fast, forward and backward"]
    plain = host["nn.Linear, forward and backward"]["median_ms"]
    assert both["of nn.Linear"] == pytest.approx(both["median_ms"] / plain, rel=1e-4)
    assert {
        "draw a seed, CPU's generator, item",
        "draw a seed, cpu's generator, a tensor there",
    } <= set(host)  # noqa: E501


def test_bench_examples(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    report = run(bench_examples, tmp_path / "out.json", "--quick", "--examples", "diffusion")
    rows = report["examples"]["diffusion"]["contenders"]
    assert set(rows) == {"plain", "default", "default, 8-bit forward"}
    for row in rows.values():
        assert row["steps"] == 32 and row["step_ms"] > 0
        assert row["result"] == pytest.approx(rows["plain"]["result"], rel=0.02)
    assert len({row["result"] for row in rows.values()}) == 3
    again = run(bench_examples, tmp_path / "out.json", "--quick", "--examples", "diffusion")
    assert again["examples"] == report["examples"]  # nothing ran again


def test_bench_gemm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(bench_gemm, tmp_path / "out.json", "--shape", "32,24,48")
    rows = report["products"]["given"]["32,24,48"]["rows"]
    mine = rows["hotcore"]
    assert mine["TOPS"] == pytest.approx(2 * 32 * 24 * 48 / mine["median_ms"] / 1e9, rel=1e-4)
    assert set(mine["faster than"]) == {"torch._int_mm", "torch float32"}
    assert "of the best stock tile" not in mine
    assert "CUTLASS's stock tiles: left out" in capsys.readouterr().out


class StockGemm:
    """Replaces CUTLASS's tiles: computes the same on the CPU, plus ``error``."""

    tiles = ("small 1x1", "large 1x1")

    def __init__(self, error: float = 0.0) -> None:
        self.error = error

    def call(
        self, tile: str, along_m: bool, swizzle: int, codes: Any, scales: Any, out: Any
    ) -> Any:
        def call() -> None:
            hotcore.gemm_int8(*codes, *scales, out=out)
            out.mul_(1 + self.error)

        return call


def test_stock_tiles_of_a_product() -> None:
    """Two tiles take part, and what targets.py reads is hotcore's time beside the better one."""
    args = argparse.Namespace(device="cpu", rounds=2)
    product = (16, 32, 48)
    found = bench_gemm.bench(product, args, StockGemm())
    rows = found["rows"]
    stock = [name for name in rows if name.startswith("stock ")]
    assert len(stock) == bench_gemm.FINALISTS
    assert all(re.fullmatch(r"stock \w+ 1x1, along [MN], swizzle [1248]", name) for name in stock)
    best = min(rows[name]["median_ms"] for name in stock)
    share = rows["hotcore"]["of the best stock tile"]
    assert share == pytest.approx(best / rows["hotcore"]["median_ms"])
    assert set(found["choice of stock tiles"]) == set(StockGemm.tiles)
    assert all("TOPS" in row for row in found["choice of stock tiles"].values())
    gemm = {"products": {"Llama-3-8B g_x": {"up": found}}}
    (row,) = targets.rows({}, {}, gemm)
    assert (row["measured"], row["must"], row["aim"]) == (share, 1.0, 1.1)


def test_stock_tiles_must_compute_the_same(rng: np.random.Generator) -> None:
    given = bench_gemm.operands((16, 32, 48), "cpu")
    names, _ = bench_gemm.stock_finalists(StockGemm(2**-8), given, "cpu")  # the last bit may differ
    assert len(names) == bench_gemm.FINALISTS
    with pytest.raises(AssertionError, match="stock (small|large) 1x1, along"):
        bench_gemm.stock_finalists(StockGemm(float(rng.uniform(0.02, 0.5))), given, "cpu")


def test_bench_fwht(tmp_path: Path) -> None:
    words = ("--n", "16", "--n", "256", "--elements", "4096")
    report = run(bench_fwht, tmp_path / "out.json", *words)
    assert set(report["n"]) == {"16", "256"}
    assert {"copy", "hotcore", "hotcore along axis 0", "torch matmul"} == set(report["n"]["16"])
    assert report["n"]["256"]["copy"]["of the copy"] == 1


# ---- targets and plots ----


def cuda_report() -> dict[str, Any]:
    """The report of bench_backward.py on a GPU, with invented times."""
    names = ["fp32 products", "tf32 products", "bf16 products", "torchao both - forward"]
    faster = dict(zip(names, (21.0, 4.5, 2.2, 1.4), strict=True))
    rows = {name: {"median_ms": 1.0} for name in names}
    rows |= {f"hotcore {recipe}": {"median_ms": 0.5 + 0.1 * i} for i, recipe in enumerate(RECIPES)}
    stages = {stage: 10.0 + i for i, stage in enumerate(("quantise g_y, g_b", "quantise w"))}
    stages |= dict.fromkeys(("unpack x", "product g_x", "product g_w", "between kernels"), 20.0)
    recipe = {"faster than": faster, "compress of a copy": 1.2, "sum_ms": 1.0}
    return {
        "device": "a GPU",
        "recipes": list(RECIPES),
        "layers": {
            group: {
                "layers": {name: {"rows": rows} for name in shapes},
                "recipes": dict.fromkeys(RECIPES, recipe),
            }
            for group, shapes in layers.CUDA_GROUPS.items()
        },
        "stages": {
            "ViT-B": {"fc1": {"recipes": {name: {"stages": stages} for name in RECIPES}}},
            "Llama-3-8B": {"up": {"recipes": {name: {"stages": stages} for name in RECIPES}}},
        },
        "paper": {
            "rotating": {
                "means": {"hotcore paper": {"geomean": 1.9, "worst": 1.4}},
                "published geomean": 2.1,
            }
        },
        "forward": {"ViT-B": {"extra": {"fast": 0.04}}},
        "host": {
            "rows": {
                "adapter backward fast": {"median_ms": 0.07},
                "inside adapter backward fast": {"median_ms": 0.05},
                "adapter forward fast": {"median_ms": 0.05},
                "HotLinear fast, forward and backward": {"median_ms": 0.2, "of nn.Linear": 1.3},
            }
        },
    }


def test_targets() -> None:
    fwht = {
        "n": {"16": {"hotcore": {"of the copy": 0.9}}, "32": {"hotcore": {"of the copy": 0.99}}}
    }
    share = {"rows": {"hotcore": {"of the best stock tile": 2.0}}}
    gemm = {
        "products": {
            "ViT-B g_w, r = 8": {"proj": share, "fc1": {"rows": {"hotcore": {}}}},
            "given": {"1,1,1": share},
        }
    }
    found = {row["work"]: row for row in targets.rows(cuda_report(), fwht, gemm)}
    reached = {work: row["reached"] for work, row in found.items()}
    assert reached["Llama-3-8B sum, fast faster than bf16 products"] == "must"
    assert reached["ViT-B sum, fast faster than bf16 products"] == "aim"
    assert reached["ViT-B sum, paper faster than fp32 products"] == "must"
    assert reached["ViT-B, compress fast, copies of x"] == "must"
    work = "the paper's layers, arrays rotating, paper faster than fp32"
    assert reached[f"{work}: geometric mean"] == "missed"
    assert reached[f"{work}: worst row"] == "must"
    assert reached["ViT-B, forward fast, extra time"] == "aim"
    assert reached["host, adapter backward fast, us"] == "missed"
    assert reached["host, inside adapter backward fast, us"] == "aim"
    assert "host, adapter forward fast, us" not in reached
    assert reached["host, HotLinear fast, forward and backward, of nn.Linear"] == "missed"
    assert found["fwht, slowest n, share of the copy"]["measured"] == 0.9
    products = {work: verdict for work, verdict in reached.items() if "INT8" in work}
    assert products == {"INT8 product, ViT-B g_w, r = 8 proj, of the best stock tile": "must"}
    assert targets.rows({}, {}, {}) == []


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot

    report = tmp_path / "check.json"
    report.write_text(json.dumps({"bench_backward": cuda_report()}))
    plot.main([str(report), "--out", str(tmp_path)])
    for name, words in (
        ("speedup_by_layer.svg", ("Llama-3-8B", "fc2", "default")),
        ("breakdown.svg", ("quantise w", "product g_x")),
    ):
        text = (tmp_path / name).read_text()
        assert text.startswith("<?xml")
        assert all(word in text for word in words)


# ---- the rule of what is slower on CUDA ----


def test_the_rules_fit_finds_the_costs_that_made_the_times() -> None:
    costs = {"plain": (7e-3, 1.5, 1.8, 4e3), "accurate": (5e-3, 2.4, 2.6, 3e3)}
    costs |= {"default": (5e-3, 2.5, 2.8, 3e3), "fast": (4e-3, 2.5, 2.9, 3e3)}

    def times(ins: int, outs: int) -> dict[str, list[float]]:
        sizes = (ins * outs, ins, outs, 1)
        tokens = bench_rule.FIT_TOKENS
        return {n: [tokens * float(np.dot(c, sizes)) / 1e9, 0, 0, 0] for n, c in costs.items()}

    rows = [
        {"shape": f"Linear {o} x {i}, x [16384, {i}] bfloat16", "times": times(i, o)}
        for i, o in bench_rule.FEATURES
    ]
    few = [{"shape": "Linear 512 x 512, x [4096, 512] bfloat16", "times": times(1, 1)}]
    cases = {"linear, 4096 tokens": few, "linear, 16384 tokens": rows}
    content = {"grid": {name: {"rows": found} for name, found in cases.items()}}
    fitted = bench_rule.fit(content)
    for name, expected in costs.items():
        assert fitted[name]["ps"] == pytest.approx(expected)
        assert fitted[name]["worst error"] < 1e-6
    sizes = (768 * 3072, 768, 3072, 1)
    ratio = np.dot(costs["fast"], sizes) / np.dot(costs["plain"], sizes)
    (found,) = (r for r in fitted["fast"]["ratios"] if r[:2] == [768, 3072])
    assert found[2:] == pytest.approx([ratio, ratio])
    assert bench_rule.fit(content, weight_trained=False) == {}


@pytest.mark.parametrize("frozen", [False, True])
def test_the_rule_is_the_fit_of_its_report(frozen: bool) -> None:
    """If this fails, ``bench_rule.py --fit`` prints the numbers for gains.py."""
    content = json.loads((FOLDER.parent / gains.REPORT).read_text())
    fitted = bench_rule.fit(content, weight_trained=not frozen)
    for recipe in bench_rule.RECIPES:
        config = hotcore.HotConfig.recipe(recipe)
        assert fitted[recipe]["worst error"] < 0.08
        for ins, outs, measured, ratio in fitted[recipe]["ratios"]:
            expected = gains.expected_time(gains.Facts(None, ins, outs, config, "cuda", frozen))
            assert expected == pytest.approx(ratio, abs=0.002)
            assert expected == pytest.approx(measured, abs=0.08)


def test_bench_rule(tmp_path: Path) -> None:
    report = run(bench_rule, tmp_path / "out.json")
    for name, case in report["grid"].items():
        assert case["rows"], name
        for row in case["rows"]:
            assert set(row["times"]) == {"plain", "accurate", "default", "fast"}


def test_convolutions_in_channels_last(tmp_path: Path) -> None:
    with without_broken_torchvision():
        pytest.importorskip("timm")
    chosen = ("default eager, k x k alone", "token4 eager")
    words = ["--quick", "--models", "resnet50_last", "--backend", "aot_eager", "--contenders"]
    path = tmp_path / "out.json"
    bench_models.main([*words, *chosen, "--threads", "1", "--json", str(path)])
    rows = json.loads(path.read_text())["steps"]["resnet50_last"]["rows"]
    assert list(rows) == ["bf16 compiled", "token4 eager", "default eager, k x k alone"]
    wide, every = (rows[name] for name in chosen)
    assert 0 < wide["converted"] < every["converted"] and wide["of reference"]["step"] > 0
    assert every["how"]["settings"]["storage"] == "token4"
