"""The benchmarks: their clock and arithmetic, and each script once at toy size on the CPU."""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

# After the skip: these need torch.
import bench_backward  # noqa: E402
import bench_gemm  # noqa: E402
import bench_latency  # noqa: E402
import bench_models  # noqa: E402
import hotcore  # noqa: E402
import timing  # noqa: E402
from evidence import bench_fwht, rivals  # noqa: E402
from hotcore.torch.conversion import gains  # noqa: E402
from support import refused, report_of, without_broken_torchvision  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded_torch")


def run(script: Any, path: Path, *words: str) -> Any:
    report = report_of(script, path, *words, "--rounds", "2", "--threads", "1")
    assert {"benchmark", "date", "device", "versions", "rounds", "seed"} <= report.keys()
    return report


def test_a_report_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that is killed while it writes leaves the previous report."""
    path = tmp_path / "made" / "report.json"
    timing.write_json(path, {"a": 1.23456789, "b": [12345678.9, "x", 3]})
    assert json.loads(path.read_text()) == {"a": 1.23457, "b": [12345700.0, "x", 3]}
    write_text = Path.write_text

    def ended(self: Path, text: str, **how: Any) -> int:
        write_text(self, text[: len(text) // 2], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    refused(lambda: timing.write_json(path, {"a": 2}), "", KeyboardInterrupt)
    assert json.loads(path.read_text())["a"] == 1.23457


def test_a_report_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    """Numbers with more digits than a report keeps are equal to themselves."""
    settings = {"epochs": 1 / 3, "size": (2, 3)}
    timing.write_json(tmp_path / "a.json", {"settings": settings, "runs": {"x": 1}})
    assert timing.begun(tmp_path / "a.json", "a", settings, "runs")["runs"] == {"x": 1}
    assert timing.begun(tmp_path / "b.json", "b", settings, "runs")["runs"] == {}
    other = {**settings, "epochs": 0.3334}
    refused(timing.resumed, "has other settings", SystemExit, tmp_path / "a.json", other)


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


def test_rivals_do_the_same_work(rng: np.random.Generator) -> None:
    shape = (48, 24, 32)
    gy, w, x = bench_backward.tensors(shape, "cpu", torch.float32)
    gx, gw, gb = rivals.backward(gy, w, x)()
    mine = bench_backward.hot_backward(gy, w, x, "accurate")()
    for theirs, ours in zip((gx, gw, gb), mine, strict=True):
        assert (theirs - ours).norm() < 0.05 * theirs.norm()
    int8 = rivals.int8_products(*shape, "cpu")()
    assert [tuple(result.shape) for result in int8] == [(48, 32), (24, 32)]


def test_shapes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for script, word in ((bench_backward, "1,2"), (bench_gemm, "0,1,2")):
        refused(script.main, "", SystemExit, ["--shape", word])
        assert "is no shape" in capsys.readouterr().err
    refused(bench_backward.main, "", SystemExit, ["--group", "Llama-3-8B"])  # a group of the GPU's
    assert "--group: 'Llama-3-8B' fits none of ['ViT-B, 8 images']" in capsys.readouterr().err
    words = ["--part", "table", "--contenders", "bf16*"]
    refused(bench_models.main, "", SystemExit, words)
    assert "--contenders: for part step" in capsys.readouterr().err
    if not torch.cuda.is_available():
        refused(lambda: bench_fwht.main(["--device", "cuda"]), "", SystemExit)
        assert "no CUDA device" in capsys.readouterr().err


def test_bench_backward(tmp_path: Path) -> None:
    parts = [word for part in bench_backward.PARTS for word in ("--part", part)]
    shapes = ("--shape", "33,48,16", "--shape", "64,32,32")
    report = run(bench_backward, tmp_path / "out.json", *shapes, *parts, "--recipe", "fast")
    total = report["layers"]["given"]
    rows = [table["rows"] for table in total["layers"].values()]
    assert len(rows) == 2
    fast = total["recipes"]["fast"]
    total_ms = sum(r["hotcore fast"]["median_ms"] for r in rows)
    assert fast["sum_ms"] == pytest.approx(total_ms, rel=1e-4)  # reports have six digits
    rival = sum(r["fp32 products"]["median_ms"] for r in rows)
    assert fast["faster than"]["fp32 products"] == pytest.approx(rival / fast["sum_ms"], rel=1e-4)
    assert set(report["paper"]["rotating"]["means"]) == {"fp32", "hotcore fast"}
    calls = report["stages"]["given"]["33,48,16"]["recipes"]["fast"]["calls"]
    assert set(calls) == {"all", "gx", "gw", "gb"}
    assert set(report["forward"]["given"]["extra"]) == {"fast"}
    host = report["host"]["rows"]
    inside = host["inside adapter backward fast"]
    assert 0 < inside["median_ms"] < inside["whole_ms"]  # both use the same bursts
    both = host["HotLinear fast, forward and backward"]
    plain = host["nn.Linear, forward and backward"]["median_ms"]
    assert both["of nn.Linear"] == pytest.approx(both["median_ms"] / plain, rel=1e-4)


def test_a_part_that_fails_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(bench_backward, "part_layers", failing)
    monkeypatch.setattr(bench_backward, "part_host", lambda _: {"rows": {}})
    path = tmp_path / "out.json"
    words = ["--device", "cpu", "--json", str(path), "--part", "layers", "--part", "host"]
    refused(bench_backward.main, "layers.*gone", SystemExit, words)
    report = json.loads(path.read_text())
    assert report["host"] == {"rows": {}} and "layers" not in report


def test_a_mean_is_of_all_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that a graph cannot hold has its reason in place of a time, and no mean."""
    rows = {"fp32": {"median_ms": 2.0}, "bf16": {"median_ms": 1.0}}
    means = bench_latency.means({
        name: {"rows": found, "paper_us": {"FP": 6.0, "LBP-WHT": 3.0, "HOT": 2.0}}
        for name, found in (("a", rows), ("b", {**rows, "bf16": "RuntimeError: no"}))
    })  # fmt: skip
    assert means["fp32"] == {"geomean": 1.0, "worst": 1.0, "layers": 2} and "bf16" not in means
    assert means["the paper's HOT"]["geomean"] == pytest.approx(3)
    failing = {"fp32": {"median_ms": 2.0}, "bf16": "RuntimeError: no"}
    monkeypatch.setattr(timing, "in_graphs", lambda *_: failing)
    settings = argparse.Namespace(device="cpu", recipe=[], rounds=2)
    assert set(bench_backward.part_paper(settings)["rotating"]["means"]) == {"fp32"}
    assert "bf16: RuntimeError: no" in capsys.readouterr().out


def test_graphs_hold_enough_arrays_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were counted in fp32: contenders with bf16 arrays rotated through half of the bytes."""
    counted: list[int] = []

    def in_graphs(make: Any, nbytes: int, *_: Any) -> dict[str, Any]:
        counted.append(nbytes)
        return {"fp32": {"median_ms": 2.0}}

    monkeypatch.setattr(timing, "in_graphs", in_graphs)
    settings = argparse.Namespace(device="cpu", recipe=[], rounds=2)
    bench_backward.part_paper(settings)
    bench_latency.in_graphs((64, 64, 64), settings, 1)
    arrays = bench_backward.tensors((64, 64, 64), "cpu", torch.bfloat16)
    assert counted == [sum(array.nbytes for array in arrays)] * 2


def test_host_times_of_rivals_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    def bursts(call: Any, device: str, clocks: Any, bursts: int = 1) -> list[list[float]]:
        order.append(call)
        return [[1.0] for _ in clocks]

    monkeypatch.setattr(bench_backward, "host_bursts", bursts)
    rows = bench_backward.part_host(argparse.Namespace(device="cpu", recipe=["fast"]))["rows"]
    timed = len(rows) - 1  # the adapter's inside has bursts of its own
    assert order[:timed] == order[timed : 2 * timed] and len({*map(id, order)}) == timed == 7


def test_bench_gemm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(bench_gemm, tmp_path / "out.json", "--shape", "32,24,48")
    rows = report["products"]["given"]["32,24,48"]["rows"]
    mine = rows["hotcore"]
    assert mine["TOPS"] == pytest.approx(2 * 32 * 24 * 48 / mine["median_ms"] / 1e9, rel=1e-4)
    assert set(mine["faster than"]) == {"torch._int_mm", "torch float32"}
    assert "of the best stock tile" not in mine
    assert "CUTLASS's stock tiles: left out" in capsys.readouterr().out


def test_bench_fwht(tmp_path: Path) -> None:
    words = ("--n", "16", "--n", "256", "--elements", "4096")
    report = run(bench_fwht, tmp_path / "out.json", *words)
    assert set(report["n"]) == {"16", "256"}
    assert {"copy", "hotcore", "hotcore along axis 0", "torch matmul"} == set(report["n"]["16"])
    assert report["n"]["256"]["copy"]["of the copy"] == 1


PLAIN, INT8 = hotcore.HotConfig(), hotcore.HotConfig(forward="int8")
KINDS = {name: hotcore.HotConfig.recipe(name) for name in ("accurate", "default", "fast")}
KINDS |= {"default int8": INT8, "frozen": PLAIN, "frozen int8": INT8}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_is_the_fit_of_its_report(kind: str) -> None:
    """gains.py must have the numbers of the report, and choose as its times do."""
    rule = json.loads((FOLDER.parent / gains.REPORT).read_text())["rule"]
    plain = "frozen plain" if kind.startswith("frozen") else "plain"
    for name in (kind, plain):
        fit = rule["fit"][name]
        assert gains._FITS[name] == pytest.approx(fit["terms"], rel=1e-4)
        assert fit["worst error"] < 0.25
    for shape, rows in rule["shapes"].items():
        tokens, outs, ins = map(int, shape.split(","))
        facts = gains.Facts(None, ins, outs, KINDS[kind], "cuda", kind.startswith("frozen"))
        expected = gains.expected_time(facts._replace(tokens=tokens))
        measured = rows[kind]["median_ms"] / rows[plain]["median_ms"]
        assert expected == pytest.approx(measured, rel=0.3), shape
        if min(outs, ins) >= 768:  # a choice against the measurement costs little
            assert measured < 1.2 if expected <= gains.SLOWER else measured > 0.9, shape


def test_bench_rule(tmp_path: Path) -> None:
    rule = run(bench_backward, tmp_path / "out.json", "--part", "rule", "--rounds", "2")["rule"]
    assert len(rule["shapes"]) == 8 and set(rule["fit"]) == {*KINDS, "plain", "frozen plain"}
    assert all(len(fit["terms"]) == 6 for fit in rule["fit"].values())


def test_convolutions_in_channels_last(tmp_path: Path) -> None:
    with without_broken_torchvision():
        pytest.importorskip("timm")
    chosen = ("default eager, k x k alone", "default eager")
    words = ["--quick", "--models", "resnet50_last", "--backend", "aot_eager", "--contenders"]
    report = report_of(bench_models, tmp_path / "out.json", *words, *chosen, "--threads", "1")
    rows = report["steps"]["resnet50_last"]["rows"]
    assert list(rows) == ["bf16 compiled", "default eager", "default eager, k x k alone"]
    wide, every = (rows[name] for name in chosen)
    assert 0 < wide["converted"] < every["converted"] and wide["of reference"]["step"] > 0
