"""Training steps (benchmarks/steps.py): contenders, kernels, the report."""

import importlib.util
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import needs_torchao, refused

torch = pytest.importorskip("torch")

import bench_models  # noqa: E402
import hotcore  # noqa: E402
import kernel_classes  # noqa: E402
import models  # noqa: E402
import steps  # noqa: E402
import training  # noqa: E402
from evidence import doc_tables  # noqa: E402
from kernel_classes import Event  # noqa: E402
from training import REFERENCE, Contender  # noqa: E402

SETTING = steps.Setting("cpu", quick=True, backend="aot_eager")


def needs(*packages: str) -> None:
    """Skip without these packages. No import: torchvision may need models.mend_torchvision."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Use one thread for small models, and forget compiled code after a test."""
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tuple", "products"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("void hot::detail::(anonymous namespace)::tile_kernel<hot::Mma, true>", "products"),
        ("void hot::detail::(anonymous namespace)::gemm_small_kernel<...>(Args)", "products"),
        ("void hot::detail::(anonymous namespace)::rows16_kernel<(hot::Rounding)1, 4>",
         "hotcore's quantisers"),
        ("hot::detail::(anonymous namespace)::final_sum_kernel(float const*, long)",
         "hotcore's quantisers"),
        ("triton_per_fused__to_copy_native_layer_norm_0", "pointwise, reductions"),
        ("triton_red_fused__scaled_mm_abs_max_1", "pointwise, reductions"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NHWC<__nv_bfloat16>", "pointwise, reductions"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::half>",
         "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::...)", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized>", "products"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMath>",
         "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("some_kernel_of_tomorrow", "other"),
    ],
)  # fmt: skip
def test_classes(name: str, kind: str) -> None:
    assert kind in kernel_classes.CLASSES and kernel_classes.class_of(name) == kind


def test_events_of_a_trace() -> None:
    """Kernels, copies and fills count; host events and ranges around kernels do not."""
    step = {"ph": "X", "ts": 10.0, "dur": 99.0}
    trace = {
        "traceEvents": [
            {**step, "cat": "kernel", "name": "nvjet"},
            {**step, "cat": "gpu_memset", "name": "Memset (Device)"},
            {**step, "cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step"},
            {**step, "cat": "cuda_runtime", "name": "cudaLaunchKernel"},
            {**step, "cat": "cpu_op", "name": "aten::mm"},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1.0},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert kernel_classes.events_of(trace) == [
        Event("nvjet", 10.0, 99.0), Event("Memset (Device)", 10.0, 99.0),
    ]  # fmt: skip


def test_summary_of_kernels() -> None:
    events = [
        Event("nvjet", 0.0, 3000.0),
        Event("nvjet", 5000.0, 1000.0),
        Event("triton_poi_fused_add_0", 2000.0, 2000.0),  # half of it waits beside the first
    ]
    classes = kernel_classes.summary(events, steps=2)
    assert classes["ms"]["products"] == 2.0 and classes["ms"]["pointwise, reductions"] == 0.5
    assert set(classes["ms"]) == set(kernel_classes.CLASSES)
    assert (classes["busy_ms"], classes["launches"]) == (2.5, 1.5)
    assert classes["longest"][0] == {
        "kernel": "nvjet", "class": "products", "ms": 2.0, "launches": 1.0,
    }  # fmt: skip


def test_a_name_has_its_contenders_fields() -> None:
    name = "default int8-forward compiled, attention kept in half, 8-bit head"
    assert steps.described(training.by_name(name, autocast=True)) == {
        "recipe": "default", "autocast": True, "compiled": "default", "checkpointed": True,
        "attention_kept": True, "first": 0.5, "forward": "int8", "head": "accurate",
    }  # fmt: skip
    with pytest.raises(ValueError, match="'bf16 compiled fast-forward' has 'fast-forward'; expect"):
        training.by_name("bf16 compiled fast-forward")


def test_waves() -> None:
    """The reference is in each part; the first contenders of all models come before the second."""
    waves = steps.waves_of(["vit_b", "bert"], None, {"vit_b": 8, "bert": 12})
    names = [model for model, _ in waves]
    assert names[:4] == ["vit_b", "bert", "vit_b", "bert"]
    assert all(among[0].name == REFERENCE for _, among in waves)
    assert [len(among) for _, among in waves[:2]] == [8, 12]
    for model in ("vit_b", "bert"):
        measured = [c.name for name, among in waves if name == model for c in among[1:]]
        assert [REFERENCE, *measured] == [c.name for c in training.people(models.TASKS[model])]
    (only,) = steps.waves_of(["vit_b"], ["fast e*", "bf16 eager"], {"vit_b": 0})
    assert [c.name for c in only[1]] == [REFERENCE, "bf16 eager", "fast eager"]
    people = [c.name for c in training.people(models.TASKS["bert"])]
    done = {"vit_b": ["bf16 eager"], "bert": people}
    jobs = {"vit_b": 0, "bert": 0, "gpt2": 0}
    left = steps.waves_of(["vit_b", "bert", "gpt2"], ["bf16 e*", "fp32*"], jobs, done)
    assert [(model, [c.name for c in among]) for model, among in left] == [
        ("vit_b", [REFERENCE, "fp32 eager"]),
        ("gpt2", [REFERENCE, "bf16 eager", "fp32 eager"]),
    ]
    with pytest.raises(ValueError, match=r"\['bf17\*'\] fit none"):
        steps.waves_of(["vit_b"], ["bf16*", "bf17*"], {"vit_b": 0})


class Toy(torch.nn.Module):
    """Return two blocks, and a function that counts their runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)
        )
        self.head = torch.nn.Linear(64, 10)
        self.runs = 0
        for layer in self.layers:
            layer[0].register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.runs += 1

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def toy_trainer(contender: Contender, build: Any = Toy) -> training.Trainer:
    batch = {"x": torch.randn(32, 64), "y": torch.randint(10, (32,))}
    task = models.Task("toy", None, models._classification, blocks="layers")
    return training.Trainer(contender, build(), batch, task, in_place=True, backend="aot_eager")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_checkpointed_blocks_run_twice(checkpointed: bool) -> None:
    trainer = toy_trainer(Contender("x", checkpointed=checkpointed))
    trainer.step()
    assert trainer.model.runs == (4 if checkpointed else 2)


def test_compiled_blocks() -> None:
    """Only blocks are recomputed; the head stays as it is."""
    trainer = toy_trainer(Contender("x", compiled="default"))
    compiled = [n for n, m in trainer.model.named_modules() if m._compiled_call_impl is not None]
    assert compiled == ["layers.0", "layers.1"]
    refused(lambda: training.blocks_of(trainer.model, "h"), "no blocks at 'h'")


@needs_torchao
def test_fp8_takes_the_layers_that_hot_would() -> None:
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        trainer = toy_trainer(Contender("x", fp8=recipe))
        types = {n: type(m).__name__ for n, m in trainer.model.named_modules() if "Linear" in
                 type(m).__name__}  # fmt: skip
        assert types == {
            "layers.0.0": "Float8Linear", "layers.1.0": "Float8Linear", "head": "Linear",
        }  # fmt: skip
        trainer.step()
    trainer = toy_trainer(Contender("x", int8_torchao=True))
    assert "Int8MixedPrecision" in str(trainer.model.layers[0]), trainer.model
    trainer.step()
    with pytest.raises(training.Left, match="no layer is one that FP8 fits"):
        toy_trainer(Contender("x", fp8="rowwise"), Sevens)


class Sevens(torch.nn.Module):
    """A layer that HOT converts and FP8's products cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = torch.nn.Linear(64, 72), torch.nn.Linear(72, 10)


@pytest.mark.long
def test_steps_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run eager, compiled, with a budget and checkpointed in this process."""
    needs("transformers", "peft")
    path = tmp_path / "steps.json"
    words = ["--quick", "--models", "llama_lora", "--backend", "aot_eager", "--threads", "1"]
    some = ["default compiled", "default eager", "bf16 compiled, budget 0.5", "bf16 checkpointed",
            "frozen int8 compiled"]  # fmt: skip
    bench_models.main([*words, "--contenders", *some, "--json", str(path)])
    report = json.loads(path.read_text())
    rows = report["steps"]["llama_lora"]["rows"]
    assert list(rows) == [REFERENCE, "default compiled", "default eager",
                          "bf16 compiled, budget 0.5", "bf16 checkpointed",
                          "frozen int8 compiled"]  # fmt: skip
    for row in rows.values():
        assert row["host"]["measurements"] == steps.STEPS_FROM_IDLE
        assert row["step"]["measurements"] == 2 and 0 < row["loss"][1] < row["loss"][0]
        reference = rows[REFERENCE]["step"]["median_ms"]
        ratio = row["step"]["median_ms"] / reference
        assert row["of reference"]["step"] == pytest.approx(ratio, rel=1e-4)
        tokens = 4 * 32 / row["step"]["median_ms"] * 1e3
        assert row["tokens_per_s"] == pytest.approx(tokens, rel=1e-4)
    assert rows["default compiled"]["converted"] > 0
    assert rows["frozen int8 compiled"]["weight_bytes"] < rows[REFERENCE]["weight_bytes"]
    assert rows["default compiled"]["compiler"]["graphs"] > 0
    assert rows["default eager"]["how"] == {"recipe": "default", "autocast": True, "slower": False}
    printed = capsys.readouterr().out
    assert "bf16 checkpointed" in printed and str(path) in printed
    # Without time no row starts, and the report says so; earlier rows stay.
    rows["default of yesterday"] = rows["default eager"]  # which this version does not have
    path.write_text(json.dumps(report))
    more = [*words, "--json", str(path), "--resume", str(path), "--contenders", "default eager"]
    bench_models.main([*more, "bf16 eager", "--budget", "-1"])
    again = json.loads(path.read_text())["steps"]["llama_lora"]["rows"]
    assert again.pop("bf16 eager")["left_out"] == "no time left" and again == rows
    for other in (["--seed", "1"], ["--backend", "eager"]):
        refused(bench_models.main, "--resume: .* this is ", SystemExit, [*more, *other])
    report["device"] = "another"
    path.write_text(json.dumps(report))
    refused(lambda: bench_models.main(more), r"--resume: .* is of \('another', ", SystemExit)


def test_several_runs_are_one_row() -> None:
    """Step, host and tokens a second are medians over the runs, as the ratios are."""

    def run(step: float, host: float) -> dict[str, Any]:
        row = {"step": {"median_ms": step}, "host": {"median_ms": host}, "tokens_per_s": 60 / step}
        return {"x": row | {"of reference": {"step": step / 10, "host": host / 10}}}

    row = steps.combined([run(20.0, 9.0), run(10.0, 5.0), run(12.0, 6.0)])["x"]
    assert row["step"]["median_ms"] == 12 and row["host"]["median_ms"] == 6
    assert row["of reference"] == {"step": 1.2, "host": 0.6}
    assert row["tokens_per_s"] == pytest.approx(5)
    failed = steps.combined([run(20.0, 9.0), {"x": {"error": "gone"}}])
    assert failed == {"x": {"error": "gone"}}


def test_a_contender_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build() -> Any:
        raise ZeroDivisionError("nothing to\ndivide by")

    broken = models.Size(build, lambda generator: {})
    monkeypatch.setitem(models.TASKS, "bert", models.Task("broken", broken, lambda m, b: None))
    words = ["--quick", "--models", "bert", "--contenders", "bf16 eager", "--jobs", "0"]
    path = tmp_path / "steps.json"
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        bench_models.main([*words, "--json", str(path)])
    row = json.loads(path.read_text())["steps"]["bert"]["rows"]["bf16 eager"]
    assert row["error"] == "ZeroDivisionError: nothing to divide by"
    assert "nothing to divide by" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="fit none"):
        bench_models.main(["--quick", "--models", "bert", "--contenders", "x", "--json", str(path)])


def test_a_process_has_the_threads_of_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries' threads: hotcore's must not be more than plain torch's."""
    monkeypatch.setattr(steps.os, "dup2", lambda *_: None)
    hotcore.set_num_threads(2)
    ends = SimpleNamespace(recv=lambda: "close")
    steps.serve(ends, str(tmp_path / "log"), "vit_s", Contender("bf16"), SETTING)
    assert (torch.get_num_threads(), hotcore.num_threads()) == (1, 1)


def test_a_second_start_has_as_much_time_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender without memory beside the others starts again, after the first time is over."""
    waits: list[float] = []

    class Full(SimpleNamespace):
        def answer(self, timeout_s: float) -> Any:
            waits.append(timeout_s)
            if len(waits) == 1:
                time.sleep(0.2)
                raise steps.Said("OutOfMemoryError: full")
            return {"loss": [2.0, 1.0]}

    def remote(*_: object) -> Full:
        return Full(begin=lambda _: None, hang_up=lambda: None, close=lambda: None)

    monkeypatch.setattr(steps, "Remote", remote)
    with steps.Wave("vit_s", [Contender("bf16")], SETTING, jobs=1) as wave:
        wave.start(0.1)
    assert "error" not in wave.rows["bf16"] and waits[1] == 0.1


@pytest.mark.long
def test_contenders_in_processes_of_their_own(tmp_path: Path) -> None:
    """One run answers, one fails, one crashes: the others still run."""
    needs("timm")
    among = [Contender("bf16 eager", autocast=True), Contender("bad", "no such recipe")]
    rows = steps.measure("vit_s", among, SETTING, rounds=2, jobs=2)
    assert rows["bf16 eager"]["step"]["measurements"] == 2
    assert "no such recipe" in rows["bad"]["error"] and "step" not in rows["bad"]
    dying = steps.Remote("vit_s", among[0], SETTING, tmp_path)
    dying._process.kill()
    dying.begin("start")
    refused(lambda: dying.answer(60), r"the process ended \(-9\)", steps.Said)
    dying.close()
    slow = steps.Remote("vit_s", among[0], SETTING, tmp_path)
    slow.begin("start")
    refused(lambda: slow.answer(0), "no answer within 0 s; said nothing", steps.Said)
    slow.close()


def test_tables_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: steps vit_b -->\nold\n<!-- end -->\n")
    refused(lambda: doc_tables.main([str(page), "--check"]), "stale: .*page.md", SystemExit)
    doc_tables.main([str(page)])
    text = page.read_text()
    assert "old" not in text and text.startswith("before\n") and "| default compiled |" in text
    doc_tables.main([str(page), "--check"])
    for words, said in (("steps bart", "no bart"), ("stops vit_b", "'stops' is none of")):
        page.write_text(f"<!-- table: {words} -->\n<!-- end -->\n")
        refused(lambda: doc_tables.main([str(page)]), said, SystemExit)


@pytest.mark.parametrize("page", doc_tables.PAGES, ids=lambda page: page.name)
def test_pages_are_as_the_reports(page: Path) -> None:
    """If this fails: run python -m benchmarks.evidence.doc_tables."""
    text = page.read_text()
    begun = re.findall("^<!-- table: ", text, re.MULTILINE)
    assert len(begun) == len(doc_tables.BLOCK.findall(text)) > 0
    assert doc_tables.rewritten(text) == text
