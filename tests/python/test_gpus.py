"""INT8's rate by class of GPU, and the self-test of a class. No GPU is needed."""

import re
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import hotcore
import numpy as np
import pytest
from hotcore import gpus, info, selftest
from support import isas, refused, running


@pytest.mark.parametrize(
    ("name", "capability", "ratio", "source"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), 2, "derived"),
        ("NVIDIA A40", (8, 6), 2, "derived"),
        ("NVIDIA GeForce RTX 3090", (8, 6), 4, "derived"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 4, "derived"),
        ("NVIDIA L40S", (8, 9), 2, "derived"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 2, "derived"),
        ("NVIDIA GeForce RTX 4090", (8, 9), 4, "derived"),
        ("Orin", (8, 7), 2, "derived"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 2, "measured"),
        ("NVIDIA GH200 480GB", (9, 0), 2, "measured"),
        ("NVIDIA B200", (10, 0), None, "none"),
        ("NVIDIA B300 SXM6 AC", (10, 3), 0.08, "none"),
        ("NVIDIA Rubin", (10, 7), None, "none"),
        ("NVIDIA Thor", (11, 0), None, "none"),
        ("NVIDIA GeForce RTX 5090", (12, 0), 4, "derived"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 2, "derived"),
        ("NVIDIA GB10", (12, 1), 2, "derived"),
        ("", (8, 9), 2, "derived"),  # the lower rate of its class
        ("NVIDIA X1", (13, 0), None, "unknown"),
    ],
)
def test_rates(name: str, capability: tuple[int, int], ratio: float | None, source: str) -> None:
    rate = gpus.int8_rate(name, *capability)
    assert (rate.ratio, rate.source) == (ratio, source)
    assert rate.fast == (source in ("measured", "derived"))
    assert str(rate).startswith(f"INT8 at {ratio} times" if rate.fast else "no fast INT8 (")
    assert (source == "measured") == (capability in gpus.MEASURED)
    if source == "unknown":
        assert name in str(rate) and "sm_130" in str(rate)


@pytest.mark.parametrize("device", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_explain_says_the_rate(device: str) -> None:
    """libhot's model of a card and the table have the same INT8 rate."""
    explanation = hotcore.explain(64, 64, 64, device=device)
    assert explanation.int8 in explanation.text
    assert explanation.int8.startswith("no fast INT8") == (device == "sm_100")
    if "derived" in explanation.int8:
        card, tops = re.search(r"derived: (.+): (\d+) TOPS", explanation.int8).groups()
        assert card in explanation.device and f"at {tops} TOPS" in explanation.text
    assert hotcore.explain_gemm(64, 64, 64, device=device).int8 == explanation.int8


def test_results_have_the_same_bits_for_every_instruction_set() -> None:
    expected = selftest.results()
    for isa in isas():
        with running(isa=isa):
            assert selftest.mismatches(selftest.results(), expected) == []


CLASS = (12, 0)


def way(
    change: Callable[[dict[str, Any]], object] = lambda found: None, capturing: bool = False
) -> tuple[selftest.Access, list[int]]:
    """Return a device with the CPU's results after ``change``, and the threads that called it."""
    calls: list[int] = []

    def results() -> dict[str, Any]:
        calls.append(threading.get_ident())
        arrays = selftest.results()
        change(arrays)
        return arrays

    return selftest.Access("test", lambda: capturing, results), calls


def test_a_class_is_tested_once() -> None:
    device, calls = way()
    gate = selftest.Gate(lambda number: device)
    assert gate.admits(0, (9, 0)) and not calls  # measured
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: gate.admits(number, CLASS), range(8)))
    assert gate.admits(0, CLASS) and len(calls) == 1
    assert gate.admits(0, (8, 6)) and len(calls) == 2  # another class
    assert calls[0] != threading.get_ident()  # without the caller's modes and traces


@pytest.mark.parametrize("name", ["quantize of 325 tokens", "gemm_int8 of 2048 tokens"])
def test_a_wrong_bit_refuses_the_class(name: str) -> None:
    def flip(found: dict[str, Any]) -> None:
        found[name] = np.array(found[name])
        found[name].reshape(-1)[-1:].view(np.uint8)[0] ^= 1

    device, calls = way(flip)
    gate = selftest.Gate(lambda number: device)
    words = rf"cuda:3: compute capability 12\.0 fails .* in {re.escape(name)}; hotcore refuses it"
    for _ in range(2):
        refused(lambda: gate.admits(3, CLASS), words, NotImplementedError)
    assert len(calls) == 1  # it stays refused


def test_what_differs() -> None:
    expected = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.int8), "c": np.ones(3)}
    arrays = {"a": -expected["a"], "b": expected["b"], "c": expected["c"][:2]}
    assert selftest.mismatches(arrays, expected) == ["a", "c"]
    assert selftest.mismatches({"b": expected["b"].view(np.uint8)}, expected) == ["b"]


def test_no_test_inside_of_a_capture() -> None:
    state = [way(capturing=True), way()]
    gate = selftest.Gate(lambda number: state[0][0])
    with pytest.raises(RuntimeError, match="cuda:0: .*first use.*not be inside of a stream capt"):
        gate.admits(0, CLASS)
    del state[0]
    assert gate.admits(0, CLASS)


def test_a_class_waits_for_a_framework() -> None:
    devices: list[selftest.Access | None] = [None, way()[0]]
    gate = selftest.Gate(lambda number: devices[0])
    assert not gate.admits(0, CLASS)
    del devices[0]
    assert gate.admits(0, CLASS)


def test_a_framework_that_uses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy is used if torch is not imported; the self-test imports no module."""
    monkeypatch.setitem(sys.modules, "torch", None)
    stream = types.SimpleNamespace(is_capturing=lambda: True)
    cuda = types.SimpleNamespace(Device=nullcontext, get_current_stream=lambda: stream)
    cupy = types.SimpleNamespace(asarray=np.asarray, asnumpy=np.asarray, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    access = selftest.access_of(0)
    assert access is not None and access.name == "CuPy" and access.is_capturing()
    assert selftest.mismatches(access.results(), selftest.results()) == []
    monkeypatch.delitem(sys.modules, "cupy")
    if not info.collect()["gpus"]:
        assert selftest.access_of(0) is None


def test_the_tests_own_calls_pass() -> None:
    """The test's calls pass through the gate, which must not wait for itself or admit the class."""
    inner: list[bool] = []
    device, _ = way(lambda found: inner.append(gate.admits(0, CLASS)))
    gate = selftest.Gate(lambda number: device)
    assert gate.admits(0, CLASS) and inner == [False]


def test_an_error_decides_nothing() -> None:
    def fail(found: dict[str, Any]) -> None:
        if not failed:
            failed.append(True)
            raise MemoryError("no memory")

    failed: list[bool] = []
    device, calls = way(fail)
    gate = selftest.Gate(lambda number: device)
    refused(lambda: gate.admits(0, CLASS), "no memory", MemoryError)
    assert gate.admits(0, CLASS) and len(calls) == 2


def test_a_report_has_a_line_for_each_gpu() -> None:
    def fail(found: dict[str, Any]) -> None:
        raise RuntimeError("no kernel image")

    def flip(found: dict[str, Any]) -> None:
        found["quantize of 325 tokens"] = -found["quantize of 325 tokens"]

    ways = [way()[0], way(flip)[0], way(fail)[0], None]
    passed, lines = selftest.report(enumerate("abcd"), ways.__getitem__)
    expected = (
        r"cuda:0 a: passed \(13 arrays, \d+ ms, test\)",
        "cuda:1 b: FAILED: not the CPU's bits in quantize of 325 tokens",
        "cuda:2 c: FAILED: RuntimeError: no kernel image",
        "cuda:3 d: not tested: no torch, CuPy or JAX that sees the GPU",
    )
    for line, words in zip(lines, expected, strict=True):
        assert re.fullmatch(words, line), line
    assert not passed and selftest.report([(0, "a")], ways.__getitem__)[0]
