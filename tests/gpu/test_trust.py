"""Load and faults of training on CUDA. Short by default; scripts/gpu_trust.py sets the sizes.

* HOT_STEPS: steps of the test of growth (100,000 there).
* HOT_LARGE=1: tensors of more than 2^31 elements, and a device that is really full.
* HOT_LOAD_SECONDS: duration of each test of several GPUs.
"""

import contextlib
import copy
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import devices_load  # noqa: E402  (after the skip)
import hotcore  # noqa: E402  (hotcore itself needs no torch)
import hotcore.torch as hot  # noqa: E402
import torch_load  # noqa: E402
from hotcore import _core  # noqa: E402
from support import output_of, refused  # noqa: E402
from support_gpu import layer, same_bits, whole_backward  # noqa: E402

pytestmark = pytest.mark.cuda

TESTS = Path(__file__).resolve().parent.parent
LARGE = os.environ.get("HOT_LARGE", "0") != "0"
LOAD_SECONDS = float(os.environ.get("HOT_LOAD_SECONDS", "2"))
Record = Callable[[str, object], None]


def torch_faults() -> ModuleType:
    """tests/with_torch/test_faults.py: its model, its state, its injected faults."""
    path = TESTS / "with_torch/test_faults.py"
    spec = importlib.util.spec_from_file_location("torch_faults", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def devices() -> list[str]:
    """Return every device; a single device twice."""
    every = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return every if len(every) > 1 else every * 2


def alike(results: list[dict[str, Any]], record_property: Record) -> None:
    record_property("devices", torch.cuda.device_count())
    record_property("layers", sum(result["layers"] for result in results))
    record_property("different", sum(result["different"] for result in results))
    assert not any(result["different"] for result in results)
    assert len({result["hash"] for result in results}) == 1, results


def test_several_gpus_of_one_process(rng: np.random.Generator, record_property: Record) -> None:
    seed = int(rng.integers(1 << 30))
    every = devices()
    with ThreadPoolExecutor(len(every)) as pool:
        results = list(pool.map(lambda one: devices_load.load(one, seed, LOAD_SECONDS), every))
    alike(results, record_property)
    assert torch.cuda.current_device() == 0


def test_several_gpus_and_a_process_each(rng: np.random.Generator, record_property: Record) -> None:
    seed = int(rng.integers(1 << 30))
    words = [sys.executable, str(TESTS / "gpu/devices_load.py")]
    commands = ([*words, device, str(seed), str(LOAD_SECONDS)] for device in devices())
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    said = [process.communicate(timeout=120 + LOAD_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    alike([json.loads(one) for one in said], record_property)


def test_steps_without_growth(record_property: Record) -> None:
    """Steps, and abandoned forwards and backwards, leave no byte on the device."""
    steps = int(os.environ.get("HOT_STEPS", "400"))
    began = time.monotonic()
    grown, kinds = torch_load.growth("cuda", steps)
    record_property("steps", steps)
    record_property("given_up", sum(kinds.values()) - kinds["whole"])
    record_property("milliseconds", int(1e3 * (time.monotonic() - began)))
    for name, value in grown.items():
        record_property(f"growth_{name}", value)
    assert grown["device"] == grown["reserved"] == 0
    assert grown["host"] < 64 << 10  # caches of libraries; a byte per step would exceed it
    assert grown["objects"] < 1000 and grown["resident"] < 8 << 20


class Trained:
    """Model on the device with layers of one x, a convolution, a frozen layer and a checkpoint."""

    def __init__(self, faults: ModuleType) -> None:
        self.faults = faults
        torch.manual_seed(1)
        self.model = faults.Block().cuda()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        torch.manual_seed(2)
        self.step(2)
        self.seeds = torch.get_rng_state(), torch.cuda.get_rng_state()
        self.start = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.before = self.state()
        self.step(2)
        self.expected = self.state()

    def step(self, images: int) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator("cuda").manual_seed(images)
        self.model(torch.randn(images, 3, 8, 8, device="cuda", generator=generator)).backward()
        self.optimizer.step()

    def state(self) -> list[Any]:
        return list(self.faults.state(self.model, self.optimizer))

    def again(self) -> None:
        self.model.load_state_dict(self.start[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.start[1]))
        self.seed()

    def seed(self) -> None:
        torch.set_rng_state(self.seeds[0])
        torch.cuda.set_rng_state(self.seeds[1])

    def check(self, where: str) -> None:
        """Check that the failed step left nothing, and that the next step has the right bits."""
        assert self.faults.same(self.state(), self.before), where
        self.seed()
        self.step(2)
        assert self.faults.same(self.state(), self.expected), where


def test_a_step_on_cuda_that_fails_anywhere(
    monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    faults = torch_faults()
    trained = Trained(faults)
    injected = faults.Faults()
    for name in faults.CALLS:
        call = injected.wrap(name, getattr(_core, name), after=True)
        monkeypatch.setattr(_core, name, injected.wrap(name, call))
    monkeypatch.setattr(torch, "empty", injected.wrap("torch.empty", torch.empty))
    places = []
    for n in range(1000):
        trained.again()
        with injected.at(n, faults.out_of_memory), contextlib.suppress(torch.OutOfMemoryError):
            trained.step(6)
        if not injected.where:
            break
        places.append(injected.where)
        trained.check(injected.where)
    record_property("places", len(places))
    assert {"compress_activation", "backward_linear", "torch.empty"} <= set(places)


@contextlib.contextmanager
def room(more: int) -> Iterator[None]:
    """Limit the allocator to the tensors' bytes plus a number."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def wide_layers() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(hot.HotLinear(1024, 2048), hot.HotLinear(2048, 1024)).cuda()
    return model, torch.randn(64, 1024, device="cuda"), torch.randn(20_000, 1024, device="cuda")


def gradients(model: Any, x: Any) -> list[Any]:
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
    model.zero_grad()
    model(x.requires_grad_()).square().sum().backward()
    x.grad = None
    return [p.grad.clone() for p in model.parameters()]


def test_memory_that_runs_out_at_a_limit(record_property: Record) -> None:
    """Raise the allocator's limit until the step fits, so that it fails at many places."""
    model, small, large = wide_layers()
    expected = gradients(model, small)
    failed: list[str] = []
    ended = False
    for megabytes in range(20, 4000, 40):
        with room(megabytes << 20):
            try:
                gradients(model, large)
                ended = True
            except torch.OutOfMemoryError as error:
                trace = error.__traceback__
                while trace is not None and trace.tb_next:
                    trace = trace.tb_next
                assert trace is not None
                failed.append(trace.tb_frame.f_code.co_name)
                del error, trace
        large.grad = None
        assert all(map(same_bits, gradients(model, small), expected)), megabytes
        if ended:
            break
    record_property("failed_steps", len(failed))
    record_property("places", ", ".join(sorted(set(failed))))
    assert ended and len(failed) >= 3


@pytest.mark.skipif(not LARGE, reason="HOT_LARGE=1 runs it: takes the whole device")
def test_memory_that_really_runs_out_on_the_device(record_property: Record) -> None:
    model, small, large = wide_layers()
    expected = gradients(model, small)
    torch.cuda.empty_cache()
    filler, size = [], 16 << 30
    while size >= 1 << 20:
        try:
            filler.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    failures = 0
    refused(lambda: gradients(model, large), "", torch.OutOfMemoryError)
    while filler:  # frees the smallest first, until the step fits
        filler.pop()
        torch.cuda.empty_cache()
        try:
            gradients(model, large)
            break
        except torch.OutOfMemoryError:
            failures += 1
    got = gradients(model, small)
    filler.clear()
    torch.cuda.empty_cache()
    record_property("failed_steps", failures + 1)
    assert all(map(same_bits, got, expected))


def program(tmp_path: Path, text: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    return output_of(str(script), folder=Path(__file__).parent, timeout=300)


def test_a_device_assertion_in_a_step(tmp_path: Path, record_property: Record) -> None:
    """After a fatal error of another library's kernel, hotcore's next call names the error."""
    out = program(
        tmp_path,
        """
        import os, sys
        import torch, hotcore, hotcore.torch as hot
        model = hot.HotLinear(64, 64).cuda()
        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        arrays = [torch.randn(32, 64, device="cuda") for _ in range(2)]
        w = torch.randn(64, 64, device="cuda")
        out = torch.empty(32, 64, device="cuda")
        model(x).sum().backward()
        hotcore.fwht(arrays[0], out=out)
        torch.cuda.synchronize()
        sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)                                  # the device prints its assertion there
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            assert "assert" in str(error), error
        errors = []
        for call in (lambda: hotcore.fwht(arrays[0], out=out), lambda: model(x).sum().backward()):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error).splitlines()[0])
        print("|".join(errors), flush=True)
        os._exit(0)
        """,
    )
    errors = out.strip().split("|")
    record_property("message", errors[0])
    assert len(errors) == 2 and "assert" in errors[1], out
    assert "fwht" in errors[0] and "cudaErrorAssert" in errors[0], out


def in_child(work: Callable[[], bytes], seconds: int = 60) -> bytes:
    """Return the result of ``work`` in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)  # a hang ends it
        try:
            os.write(write, work())
        except BaseException as error:
            os.write(write, f"ERROR {type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}, after {answer!r}"
    return answer


def test_a_fork_after_cuda_was_used(record_property: Record) -> None:
    """A forked child computes on the CPU with the parent's bits, and refuses CUDA by name."""
    arrays = tuple(np.random.default_rng(0).standard_normal((48, 32), np.float32) for _ in range(2))

    def on_cpu() -> bytes:
        return bytes(hotcore.backward_linear(arrays[0], None, arrays[1], need="gw", key=3).gw)

    expected = on_cpu()
    cuda = layer(32, 16, 16)
    whole_backward(cuda, "default", "cuda", 1)
    there, out = (torch.randn(64, 64, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    assert in_child(on_cpu) == expected

    def on_cuda() -> bytes:
        hotcore.fwht(there, out=out)
        return b"it ran"

    answer = in_child(on_cuda).decode()
    record_property("message", answer.splitlines()[0])
    assert answer.startswith("ERROR RuntimeError"), answer
    whole_backward(cuda, "default", "cuda", 1)  # the parent still works
    torch.cuda.synchronize()


@pytest.mark.skipif(not LARGE, reason="HOT_LARGE=1 runs it: tens of GB")
@pytest.mark.parametrize("recipe", ["default", "fast"])
def test_a_layer_past_two_to_the_31(recipe: str, record_property: Record) -> None:
    """In the adapter, g_x of the first and last tokens and g_w are close to exact gradients."""
    tokens, ins, outs = 131_072 + 64, 16_400, 16
    torch.manual_seed(0)
    model = hot.HotLinear(ins, outs, config=recipe, bias=False).cuda().bfloat16()
    x = torch.empty(tokens, ins, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    gy = torch.randn(tokens, outs, device="cuda").bfloat16()
    model(x).backward(gy)
    torch.cuda.synchronize()
    record_property("elements", tokens * ins)
    for rows in (slice(0, 256), slice(tokens - 256, tokens)):
        exact = gy[rows].float() @ model.weight.float()
        error = float((x.grad[rows].float() - exact).norm() / exact.norm())
        assert error < 0.05, (rows, error)
    exact = torch.zeros(outs, ins, device="cuda")
    for at in range(0, tokens, 8192):
        exact += gy[at : at + 8192].float().t() @ x.detach()[at : at + 8192].float()
    error = float((model.weight.grad.float() - exact).norm() / exact.norm())
    assert error < (0.3 if recipe == "default" else 1.5), error
