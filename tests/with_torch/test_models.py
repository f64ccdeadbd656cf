"""Small versions of the paper's models: report, gradients, and the benchmark's table."""

import copy
import dataclasses
import json
from pathlib import Path

import hotcore.torch as hot
import models
import numpy as np
import pytest
import torch
from torch import nn
from torch_graphs import gradient_of, task_of

pytestmark = pytest.mark.usefixtures("one_thread")

# Cosine with fp32's gradient of all parameters; measured (seeds 0 to 3): default above 0.99,
# accurate 0.999, fast 0.76, by the noise of its sketch.
MIN_COSINE = {"default": 0.97, "accurate": 0.998, "fast": 0.6}

Ready = tuple[nn.Module, models.Batch, models.Task]


# Adapters beside frozen bf16 weights need autocast and have tests of their own (test_lora.py).
@pytest.fixture(params=sorted(name for name, task in models.TASKS.items() if not task.frozen))
def ready(request: pytest.FixtureRequest, rng: np.random.Generator) -> Ready:
    return task_of(request.param, rng)


@pytest.mark.long
def test_conversion_and_gradients(ready: Ready) -> None:
    model, batch, task = ready
    exact = gradient_of(copy.deepcopy(model), batch, task)
    for recipe, bound in MIN_COSINE.items():
        changed = copy.deepcopy(model)
        report = hot.convert(changed, recipe).hot_report
        assert report.converted
        for layer in report.converted:
            assert layer.name in report.table(grouped=False)
            assert changed.get_submodule(layer.name).config == hot.HotConfig.recipe(recipe)
        got = gradient_of(changed, batch, task)
        assert got.isfinite().all()
        cosine = float(torch.nn.functional.cosine_similarity(got, exact, dim=0))
        assert bound < cosine < 1, f"{task.title}, {recipe}: {cosine:.4f}"
        assert hot.revert(changed) is changed
        again = gradient_of(changed, batch, task)
        assert float(torch.nn.functional.cosine_similarity(again, exact, dim=0)) > 0.9999


@pytest.mark.long
def test_table_at_toy_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import bench_models

    path = tmp_path / "table.json"
    options = ["--quick", "--part", "table", "--threads", "1", "--json", str(path)]
    bench_models.main([*options, "--models", "llama_blocks"])
    row = json.loads(path.read_text())["models"]["llama_blocks"]
    assert row["converted"] == 14 and row["plain"] == {}
    assert set(row["cosine"]) == {"bf16", "default", "fast", "paper", "accurate"}
    assert row["cosine"]["fast"] < row["cosine"]["default"] < row["cosine"]["accurate"] < 1
    assert all(row["finite"].values())
    first = row["loss"]["fp32"][0]
    for name in ("default", "fast", "paper"):
        begin, end = row["loss"][name]
        assert begin == pytest.approx(first, rel=1e-5) and end < begin
    table = capsys.readouterr().out
    for name in ("Llama-3-8B's blocks", "14, 0", f"{row['cosine']['fast']:.4f}"):
        assert name in table
    # Without time nothing is begun, and the report says so.
    bench_models.main([*options, "--models", "llama_blocks", "bert", "--budget", "0"])
    report = json.loads(path.read_text())
    assert report["models"] == {}
    assert report["skipped"] == dict.fromkeys(("llama_blocks", "bert"), "no time left")
    assert "left out" in capsys.readouterr().out
    # A failing contender does not stop the others, and is reported.
    broken = dataclasses.replace(models.TASKS["bert"], loss=lambda model, batch: 1 / 0)
    monkeypatch.setitem(models.TASKS, "bert", broken)
    with pytest.raises(SystemExit, match="bert.*ZeroDivisionError"):
        bench_models.main([*options, "--models", "bert"])
    assert "ZeroDivisionError" in json.loads(path.read_text())["failed"]["bert"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        bench_models.main(["--part", "table", "--models", "llama_lora"])
    assert "LoRA's blocks have part step alone" in capsys.readouterr().err
