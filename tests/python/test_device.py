"""The verdict on a GPU: by a table, in `info`, and at the first call. No GPU is needed."""

import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hotcore
import numpy as np
import pytest
from hotcore import _core, contexts, info, selftest
from support import ran, refused

PAIR = "80-real;90a-real"


def test_missing_devices() -> None:
    missing = "no CUDA backend.*HOT_CUDA=ON pip install.*hotcore.info"
    if _core.built_with_cuda():
        refused(lambda: _core.cuda_device_verdict(999), "device is 999")
        return
    assert not _core.cuda_wgmma()
    refused(lambda: _core.cuda_device_verdict(0), missing, NotImplementedError)
    refused(lambda: contexts.cuda(0, 0), missing, NotImplementedError)
    refused(lambda: _core.CoreContext(device=0), "no CUDA backend", NotImplementedError)
    for device in ("cuda", "cuda:0"):
        ok, why = hotcore.supported(32, 24, 16, device=device)
        assert not ok and "no CUDA backend" in why and "HOT_CUDA=ON" in why


class FakeCore(types.SimpleNamespace):
    """Fake of a CUDA build on a machine with GPUs, with the parts that Python calls."""

    def __init__(self, capabilities: list[tuple[int, int]], architectures: str, wgmma: bool):
        super().__init__(capabilities=capabilities)
        self.built_with_cuda = lambda: True
        self.cuda_architectures = lambda: architectures
        self.cuda_wgmma = lambda: wgmma
        self.judge_device = _core.judge_device
        self.CoreContext = lambda threads, isa, device, stream, openmp, margin: _core.CoreContext(
            threads, isa, -1, 0, openmp, margin
        )

    def cuda_device_verdict(self, device: int) -> tuple[str, str]:
        archs, wgmma = self.cuda_architectures(), self.cuda_wgmma()
        level, text = self.judge_device(*self.capabilities[device], archs, wgmma)
        return level, text


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(contexts, "_warned", set())
    monkeypatch.setattr(contexts, "_admitted", set())
    contexts._context.cache_clear()
    yield
    contexts._context.cache_clear()  # of contexts of the fake


@pytest.mark.usefixtures("fresh")
def test_a_slow_gpu_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_core", FakeCore([(9, 0), (8, 0), (9, 0)], PAIR, wgmma=False))
    with pytest.warns(RuntimeWarning, match=r"cuda:0 is slower .*mma\.sync.*fetch_cutlass"):
        contexts.cuda(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contexts.cuda(0, 0)
        contexts.cuda(0, 7)  # another stream
        contexts.cuda(1, 0)  # full speed
    with pytest.warns(RuntimeWarning, match="cuda:2 is slower"):
        contexts.cuda(2, 0)


@pytest.mark.usefixtures("fresh")
def test_an_unmeasured_gpu_is_tested_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = selftest.Access("test", lambda: False, lambda: {"g_x of 325 tokens": np.zeros(1)})
    monkeypatch.setattr(contexts, "_core", FakeCore([(9, 0), (8, 0)], PAIR, wgmma=True))
    monkeypatch.setattr(selftest, "gate", selftest.Gate(lambda device: wrong))
    contexts.cuda(0, 0)  # measured
    for stream in (0, 7):
        with pytest.raises(NotImplementedError, match=r"cuda:1: compute capability 8\.0 fails"):
            contexts.cuda(1, stream)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi on the path that prints these lines. torch sees no GPU."""
    monkeypatch.setattr(info, "_gpus_of_torch", list)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def put(*lines: str, code: int = 0) -> None:
        body = "".join(f"echo '{line}'\n" for line in lines)
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n[ $# = 2 ] || exit 9\n{body}exit {code}\n")
        script.chmod(0o755)

    return put


def test_info_has_a_verdict_for_each_gpu(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("NVIDIA H200, 9.0", "Tesla T4, 7.5", "NVIDIA L4, 8.9")
    monkeypatch.setattr(info, "_core", fake := FakeCore([], PAIR, wgmma=True))
    facts = info.table(info.collect())
    assert facts["GPUs"] == "3, by nvidia-smi"
    assert facts["GPU 0"].startswith("NVIDIA H200: ok: ") and "wgmma" in facts["GPU 0"]
    assert facts["GPU 1"].startswith("Tesla T4: cannot be used: ")
    assert facts["GPU 2"].startswith("NVIDIA L4: ok: ")
    assert facts["GPU 0, INT8"].startswith("INT8 at 2 times bf16's rate (measured: ")
    assert facts["GPU 2, INT8"].startswith("INT8 at 2 times bf16's rate (derived: no GeForce")
    assert facts["CUDA architectures"] == "80-real, 90a-real"
    assert facts["wgmma kernels"] == "yes" and "sm_90a: tested on an H200" in facts["of these"]
    assert facts["advice"] == "see the line of Tesla T4: cannot be used"

    fake.cuda_wgmma = lambda: False
    facts = info.table(info.collect())
    assert facts["GPU 0"].startswith("NVIDIA H200: usable, but slower than it could be: ")
    assert facts["wgmma kernels"].startswith("no (") and "sm_90a: tested" not in facts["of these"]

    fake.built_with_cuda = lambda: False
    facts = info.table(info.collect())
    for gpu in ("GPU 0", "GPU 2"):
        assert "cannot be used" in facts[gpu] and "HOT_CUDA=ON" in facts[gpu]


def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_core", FakeCore([], f"{PAIR};100-real", wgmma=True))
    facts = {"torch": "2.11", "driver": True, "gpus": []}
    assert info._advice(facts).startswith("a driver is loaded, but no GPU is visible")
    assert info._advice({**facts, "driver": False}).startswith("no GPU is here")
    for capability, text in (
        ((9, 0), "begin with hot.convert(model"),
        ((8, 9), "first python -m hotcore.info --self-test"),
        ((10, 3), "this GPU saves memory but no time"),
    ):
        facts["gpus"] = [info._gpu("NVIDIA", *capability, "torch")]
        assert info._advice(facts).startswith(text)


def test_info_says_what_the_runtime_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_core", fake := FakeCore([(9, 0)], PAIR, wgmma=True))
    assert info.table(info.collect())["CUDA runtime"] == "finds GPUs"

    def none(device: int) -> tuple[str, str]:
        raise ValueError("this process sees 0 CUDA device(s): the driver is too old")

    fake.__dict__["cuda_device_verdict"] = none
    said = "this process sees 0 CUDA device(s): the driver is too old"
    facts = info.collect()
    assert facts["cuda_error"] == said
    texts = ((True, f"finds no GPU: {said}"), (False, "no NVIDIA driver on this machine"))
    for driver, text in texts:
        assert info.table({**facts, "driver": driver})["CUDA runtime"] == text
    fake.built_with_cuda = lambda: False
    assert info.collect()["cuda_error"] is None
    assert info.table(info.collect())["CUDA runtime"] == "none"


def test_info_says_what_nvidia_smi_said(smi: Any) -> None:
    smi("Failed to initialize NVML", code=9)
    facts = info.collect()
    assert facts["gpus"] == {"error": "RuntimeError: nvidia-smi: Failed to initialize NVML"}
    said = "unknown (RuntimeError: nvidia-smi: Failed to initialize NVML)"
    assert info.table(facts)["GPUs"] == said


def test_info_without_a_gpu_to_test(smi: Any, capsys: pytest.CaptureFixture[str]) -> None:
    smi("Tesla T4, 7.5")
    assert info.main(["--self-test"]) == 1
    said = capsys.readouterr().out
    assert "Tesla T4: not tested: " in said and "no GPU to test" in said


def test_info_prints_the_gpus(smi: Any) -> None:
    smi("NVIDIA H200, 9.0")
    code = "import sys; sys.modules['torch'] = None; from hotcore import info; info.main()"
    facts: dict[str, Any] = json.loads(ran(sys.executable, "-c", code, "--json").stdout)
    (gpu,) = facts["gpus"]
    assert (gpu["name"], gpu["compute_capability"]) == ("NVIDIA H200", [9, 0])
    assert (gpu["source"], gpu["level"]) == ("nvidia-smi", "full" if _core.cuda_wgmma() else "none")
    assert gpu["int8_ratio"] == 2 and "measured" in gpu["int8"]
    rows = info.table(facts)
    assert rows["GPUs"] == "1, by nvidia-smi" and rows["GPU 0"].startswith("NVIDIA H200: ")
    assert rows["GPU 0"].endswith(f": {gpu['verdict']}")
    assert list(rows).index("GPU 0") == list(rows).index("GPUs") + 1
