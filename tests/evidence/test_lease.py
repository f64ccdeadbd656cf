"""benchmarks/evidence/lease.py: a share that outlives its call; several.py with two processes."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from support import SHORT_TEXT, refused

torch = pytest.importorskip("torch")
for needed in ("sklearn", "tqdm", "tokenizers"):
    pytest.importorskip(needed)

import bench_fsdp  # noqa: E402
import plans  # noqa: E402
from evidence import RESULTS, lease, several, several_tables  # noqa: E402

REPORT = """import json, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
time.sleep(float(words["--wait"]))
rows = json.load(open(words["--json"])) if words["--wait"] == "0" else {}
json.dump({**rows, words["--wait"]: float(words["--budget"])}, open(words["--json"], "w"))
"""


def test_a_share_outlives_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The call ends before its commands do. The next one waits for them, a third begins anew."""
    (tmp_path / "report.py").write_text(REPORT)
    commands = {f"{tmp_path}/report.py --wait {wait}": "a" for wait in "30"}
    monkeypatch.setitem(lease.SHARES, "several-8b", commands)
    folders = ["--out", str(tmp_path / "out"), "--folder", str(tmp_path)]
    words = ["several-8b", *folders, "--lease", "40"]
    lease.main([*words, "--seconds", "0.1"])
    assert "goes on, repeat this call; exit codes [] of 2" in capsys.readouterr().out
    assert not (tmp_path / "out/cuda-a.json").exists()
    lease.main(words)
    assert "ended; exit codes [0, 0] of 2" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/cuda-a.json").read_text())
    assert 30 < report["0"] < report["3"] <= 40
    lease.main([*words, "--seconds", "0"])
    assert "exit codes [] of 2" in capsys.readouterr().out
    lease.main(words)


def cut_and_resumed(rank: int, device: str, *, folder: str) -> None:
    """Losses of three steps are those of one, a checkpoint and two more, to the bit."""
    for model in ("llama_8b", "vit_l"):
        name, cache = "default int8-forward", Path(folder)
        run = several.Run(model, name, 2, 2, quick=True, layers=1, steps=3, cache=cache)
        whole = several.trained(run, torch.device(device))["losses"]
        run = dataclasses.replace(run, steps=1, checkpoint=Path(folder) / model)
        cut = several.trained(run, torch.device(device))["losses"]
        run = dataclasses.replace(run, steps=3, first=1)
        rest = several.trained(run, torch.device(device))["losses"]
        assert len(rest) == 2 and cut + rest == whole, (model, cut, rest, whole)


needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.mark.long
@needs_gloo
def test_a_run_on_two_processes_resumes_to_the_same_bits(tmp_path: Path) -> None:
    plans.spawn(functools.partial(cut_and_resumed, folder=str(tmp_path)))


@pytest.mark.long
@needs_gloo
@pytest.mark.parametrize("model", ["llama_8b", "vit_l"])
def test_speeds_with_gradients_in_a_byte_go_on_from_a_report(model: str, tmp_path: Path) -> None:
    """A second call measures what lacks. Gradients take 1.0625 bytes a value in place of 2 or 4."""
    hooks = ["bf16, PowerSGD"] * (model == "vit_l")
    report = several_tables.SPEEDS if model == "llama_8b" else several_tables.DDP
    path, name = tmp_path / report, "default int8-forward"
    words = ["--quick", "--model", model, "--json", str(path), "--contenders"]
    bench_fsdp.main([*words, "bf16"])
    first = json.loads(path.read_text())["rows"]
    bench_fsdp.main([*words, "bf16", f"{name}, INT8 gradients", *hooks])
    rows = json.loads(path.read_text())["rows"]
    assert first.items() <= rows.items()
    plain, byte = (row for row in rows.values() if "step" in row)
    ratio = byte["wire"]["reduced"] / plain["wire"]["reduced"]
    assert ratio == pytest.approx(1.0625 / (2 if model == "llama_8b" else 4))
    assert abs(byte["losses"][0] - plain["losses"][0]) < 0.1
    assert byte["losses"][-1] < byte["losses"][0]
    make = several_tables.ddp if hooks else several_tables.several
    table = list(make(tmp_path))
    assert len(table) == 2 + len(rows) + 2
    assert not hooks or "needs NCCL" in "".join(table)


@pytest.mark.long
@needs_gloo
@pytest.mark.parametrize("model", several.GPTS)
def test_a_gpt_with_a_byte_on_the_wire(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses fall beside bf16's. A report goes on with its own text alone, and gives a table."""
    # Text of the installed packages is another one on each machine.
    monkeypatch.setattr("bench_gpt.sources", lambda *_: SHORT_TEXT)
    size = several.GPTS[model][0]
    path = tmp_path / f"cuda-wire-{size}.json"
    words = ["--quick", "--model", model, "--json", str(path), "--cache", str(tmp_path)]
    names = [one.name for one in several.contenders(model)][:2]
    several.main([*words, "--steps", "8", "--contenders", names[0]])
    first = json.loads(path.read_text())["rows"]
    several.main([*words, "--steps", "8", "--contenders", *names])
    rows = json.loads(path.read_text())["rows"]
    assert first.items() <= rows.items()
    plain, byte = rows.values()
    for row in (plain, byte):
        assert len(row["losses"]) == 8 and row["losses"][0] - row["validation_loss"] > 0.3
    assert byte["losses"] != plain["losses"]  # validation losses may be equal in six digits
    assert abs(byte["validation_loss"] - plain["validation_loss"]) < 0.05
    gap = byte["validation_loss"] - plain["validation_loss"]
    assert f", {names[1]} | 1 | {gap:+.4f} |" in "\n".join(several_tables.wire_losses(tmp_path))
    refused(lambda: several.main([*words, "--steps", "9"]), "other settings", SystemExit)


def test_a_report_keeps_the_batch_of_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "row_of", lambda part, run: {"losses": [float(run.each)]})
    path = tmp_path / "cuda-several.json"
    words = ["--quick", "--json", str(path), "--contenders", "bf16", "--model"]
    several.main([*words, "vit_l", "--each", "3"])
    several.main([*words, "llama_8b"])
    first = path.read_text()
    assert json.loads(first)["settings"]["each"] == {"vit_l": 3, "llama_8b": 2}
    base = [*words, "vit_l", "--each"]
    others = (["--steps", "5"], ["--images", "folder:mine"], ["--layers", "1"])
    for more in (["2"], *(["3", *other] for other in others)):
        refused(several.main, "other settings", SystemExit, [*base, *more])
    assert path.read_text() == first
    report = json.loads(first)
    report["settings"] = {name: report["settings"][name] for name in ("steps", "each")}
    path.write_text(json.dumps(report))  # an earlier one, which does not name its images
    several.main([*base, "3", "--images", "folder:mine", "--seeds", "1"])
    assert json.loads(path.read_text())["settings"]["images"] == {"vit_l": "folder:mine"}


@pytest.mark.parametrize("model", ["llama_8b", "vit_l"])
def test_speeds_are_those_of_one_machine_and_its_settings(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_fsdp, "launched", lambda *_: {"bf16": {"left_out": "nothing"}})
    path = tmp_path / "speeds.json"
    words = ["--quick", "--model", model, "--json", str(path), "--contenders", "bf16"]
    bench_fsdp.main(words)
    first = path.read_text()
    report = json.loads(first)
    for key, value in (("device", "another GPU"), ("settings", {**report["settings"], "rank": 9})):
        path.write_text(json.dumps({**report, key: value}))
        refused(bench_fsdp.main, "another GPU|other settings", SystemExit, words)
    name, settings = bench_fsdp.report_of(model, quick=False)
    kept = json.loads((RESULTS / f"cuda-{name}.json").read_text())
    assert kept["settings"] == settings  # so that it goes on


def test_contenders_of_ddp_are_compared_with_bf16_of_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later call measures bf16 again, whose row of an earlier one stays."""
    times, asked = {"bf16": 10.0, "FP8 tensorwise": 8.0}, []

    def launched(work: object, run: bench_fsdp.Run, world: int) -> dict[str, Any]:
        asked.append((run.contender, *run.beside))
        rows = {name: {"step": {"median_ms": times[name]}} for name in asked[-1]}
        return {name: row | {"bf16_ms": times["bf16"]} for name, row in rows.items()}

    monkeypatch.setattr(bench_fsdp, "launched", launched)
    path = tmp_path / several_tables.DDP
    words = ["--quick", "--model", "vit_l", "--json", str(path), "--contenders"]
    bench_fsdp.main([*words, "bf16"])
    times["bf16"] = 16.0  # another host
    bench_fsdp.main([*words, "FP8 tensorwise"])
    assert asked == [("bf16",), ("bf16", "FP8 tensorwise")]
    table = "\n".join(several_tables.ddp(tmp_path))
    assert "| vit_l | bf16 | 10 ms |  |" in table and "| FP8 tensorwise | 2.00× |  |" in table


def test_gaps_beyond_the_seeds_spread() -> None:
    assert not several_tables.differs([-0.01, 0.0, 0.02], 0.01)
    # the mean, the interval, no numbers
    for gaps in ([-0.01, 0.0, 0.06], [0.004, 0.005, 0.006], [float("nan")] * 3):
        assert several_tables.differs(gaps, 0.01)


def test_the_wire_predicts_what_was_measured() -> None:
    settings = several_tables.settings_of(RESULTS)
    checked = 0
    for setting, rows in settings.items():
        for name, ms in several_tables.predictions(settings, setting).items():
            assert ms == pytest.approx(rows[name]["step"]["median_ms"], rel=0.1), (setting, name)
            checked += 1
    assert checked
    hidden, exposed = (several_tables.predicted_ms(100, 5e9, 100, o) for o in (1.0, 0.0))
    assert (hidden, exposed) == (100, 150)


def test_losses_of_several_gpus_are_compared_with_bf16(tmp_path: Path) -> None:
    key, losses = "vit_l/4/losses/{}/1", {"losses": [9.0] * 5 + [2.0] * 20}
    rows = {key.format("bf16"): losses, key.format("hot"): {"losses": [2.5] * 20}}
    rows["vit_l/4/resume/hot/1"] = {"losses": {}, "equal": True}
    rows["vit_l/4/one/hot/1"] = {"error": "gone"}
    rows["vit_l/2/resume/hot/0"] = {"losses": {}, "equal": True}  # on fewer GPUs
    more = {"bf16": 2.0, "hot": 2.3}
    rows |= {f"vit_l/4/losses/{name}/2": {"losses": [loss] * 20} for name, loss in more.items()}
    (tmp_path / several_tables.LOSSES).write_text(json.dumps({"rows": rows}))
    table = "\n".join(several_tables.several_losses(tmp_path))
    assert "| vit_l, 4 GPUs, bf16 | 1, 2 | 2.0000 |  |  |  |" in table
    gaps = "+0.4000 [-0.8706, +1.6706] (2): +0.5000, +0.3000"
    resumed = "to the bit, to the bit (2 GPUs)"
    assert f"| vit_l, 4 GPUs, hot | 1, 2 | 2.4000 | {gaps} | {resumed} | failed |" in table
