"""The state after a failed step: out of memory, Ctrl-C, forks, the interpreter's end.

Faults are injected at every place where hotcore takes memory or computes: the n-th of them raises,
for every n. Afterwards everything is as it was, and the next step has the bits of a process in
which nothing failed.
"""

import contextlib
import copy
import hashlib
import json
import signal
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import one_hash
import pytest
import torch
import torch_load
from hotcore import _core
from hotcore.config import RECIPES
from hotcore.torch.ops import core
from support import isas, output_of, running, saved_tensors
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_graphs import same

SMALL, LARGE = 2, 6  # images of a step


class Block(nn.Module):
    """Layers of one x, a convolution, a frozen layer, a checkpoint."""

    def __init__(self, recipe: str = "default") -> None:
        super().__init__()
        self.conv = hot.HotConv2d(3, 16, 3, padding=1, config=recipe)
        self.q, self.k = (hot.HotLinear(16, 16, config=recipe) for _ in range(2))
        self.frozen = hot.HotLinear(16, 16, config=recipe).requires_grad_(False)
        self.mlp = nn.Sequential(
            hot.HotLinear(16, 128, config=recipe), nn.ReLU(), hot.HotLinear(128, 16, config=recipe)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv(images).flatten(2).transpose(1, 2).contiguous()
        x = x + self.q(x) * self.k(x).tanh()
        x = self.frozen(self.drop(x))
        y: torch.Tensor = checkpoint(self.mlp, x, use_reentrant=False)
        return (x + y).square().mean()


Made = tuple[nn.Module, torch.optim.Optimizer]


def make(recipe: str = "default") -> Made:
    """A model and its optimizer."""
    torch.manual_seed(1)
    model = Block(recipe)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    optimizer.zero_grad()
    model(images(count)).backward()
    optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of parameters and buffers, and of everything that the optimizer keeps."""
    kept: list[Any] = [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        kept += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return [value.clone() for value in kept]


def digest(recipe: str = "default", steps: tuple[int, ...] = (SMALL, LARGE, SMALL)) -> str:
    """Results of a few steps from a seed, which other processes have to reach, too."""
    model, optimizer = make(recipe)
    torch.manual_seed(2)
    for count in steps:
        plain_step(model, optimizer, count)
    bits = b"".join(value.numpy().tobytes() for value in state(model, optimizer))
    return hashlib.sha256(bits).hexdigest()


def after_a_step() -> tuple[Any, ...]:
    """A model and its optimizer, their state, what restores it, and the state a step later."""
    model, optimizer = make()
    torch.manual_seed(2)
    plain_step(model, optimizer, SMALL)
    before, seed = state(model, optimizer), torch.get_rng_state()
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def restore(weights: bool = True) -> None:
        torch.set_rng_state(seed)
        if weights:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(copy.deepcopy(start[1]))

    plain_step(model, optimizer, SMALL)
    return model, optimizer, before, restore, state(model, optimizer)


class Faults:
    """Raises at the n-th place where hotcore takes memory or starts to compute."""

    def __init__(self) -> None:
        self.left = -1
        self.error: Callable[[], BaseException] = MemoryError
        self.where = ""

    def wrap(self, name: str, call: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if not after:
                self.pass_by(name)
            result = call(*arguments, **options)
            if after:
                self.pass_by(f"after {name}")
            return result

        return wrapped

    def pass_by(self, name: str) -> None:
        if self.left == 0:
            self.left, self.where = -1, name
            raise self.error()
        self.left -= self.left > 0

    @contextlib.contextmanager
    def at(self, n: int, error: Callable[[], BaseException]) -> Iterator[None]:
        self.left, self.error, self.where = n, error, ""
        try:
            yield
        finally:
            self.left = -1


CALLS = ("compress_activation", "decompress_activation", "backward_linear")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    injected = Faults()
    for name in CALLS:  # before, as scratch is taken; after, as Ctrl-C comes when a call is done
        call = injected.wrap(name, getattr(_core, name), after=True)
        monkeypatch.setattr(_core, name, injected.wrap(name, call))
    monkeypatch.setattr(torch, "empty", injected.wrap("torch.empty", torch.empty))
    return injected


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.long
@pytest.mark.parametrize("error", [MemoryError, out_of_memory, KeyboardInterrupt])
def test_a_step_that_fails_anywhere(
    faults: Faults, seeded: None, error: Callable[[], BaseException]
) -> None:
    model, optimizer, before, restore, expected = after_a_step()

    places = []
    stride = 7 if error is not MemoryError else 1
    for n in range(0, 10_000, stride):
        restore()
        with faults.at(n, error):
            try:
                plain_step(model, optimizer, LARGE)
            except type(error()):
                pass
        if not faults.where:
            break
        places.append(faults.where)
        # Nothing of the step is left: model, optimizer.
        assert same(state(model, optimizer), before), faults.where
        # With the generator restored, the next step is as if nothing had failed.
        restore(weights=False)
        plain_step(model, optimizer, SMALL)
        assert same(state(model, optimizer), expected), faults.where
    assert {*CALLS, "torch.empty"} <= set(places) or stride > 1
    assert len(places) > 30 // stride


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "backend"), [*((recipe, "eager mode") for recipe in RECIPES), ("fast", "aot_eager")]
)
def test_one_hash(recipe: str, backend: str, seeded_torch: None) -> None:
    # A layer's gradients are those of hotcore in NumPy (tests/python/test_faults.py), for every
    # torch, eager and compiled, any number of threads and instruction set.
    gy, w, x = map(torch.from_numpy, one_hash.layer())
    layer = hot.HotLinear(56, 72, config=recipe)
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    call: Any = layer
    if backend != "eager mode":
        torch._dynamo.reset()
        call = torch.compile(layer, backend=backend, fullgraph=True)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        for isa in isas():
            with running(0, isa), saved_tensors() as kept:
                torch.manual_seed(11)
                y = call(x)
                grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), gy)
            (codes,) = (t for t in kept if t.dtype == torch.uint8)
            bits = b"".join(t.numpy().tobytes() for t in (codes, *grads))
            assert hashlib.sha256(bits).hexdigest() == one_hash.HASHES[recipe], (threads, isa)
    torch.manual_seed(11)
    assert int(core.seed_for(x)) == one_hash.HASHES["seed"]


def test_a_compiled_step_that_fails(faults: Faults, seeded: None) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(hot.HotLinear(40, 24), nn.GELU(), hot.HotLinear(24, 40))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(48, 40)

    def grads(rows: torch.Tensor) -> list[torch.Tensor]:
        _core.torch_forget()  # Python takes the calls, in which faults are made
        torch.manual_seed(3)
        model.zero_grad()
        loss = compiled(rows).square().sum()
        _core.torch_forget()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = grads(x)
    places = []
    for n in range(100):
        with faults.at(n, MemoryError), contextlib.suppress(MemoryError):
            grads(x)
        if not faults.where:
            break
        places.append(faults.where)
        assert same(grads(x), expected), faults.where
    assert {"compress_activation", "backward_linear"} <= set(places)


def test_nothing_of_a_failed_step_is_held(faults: Faults, seeded: None) -> None:
    # Compressed bytes, and x itself, go when the exception does.
    layers = [hot.HotLinear(40, 40) for _ in range(2)]
    alive: list[weakref.ref[torch.Tensor]] = []
    for n in range(6):
        try:
            with faults.at(n, MemoryError):
                x = torch.randn(64, 40, requires_grad=True) * 1
                alive.append(weakref.ref(x))
                (layers[0](x) + layers[1](x)).sum().backward()
        except MemoryError:
            pass
        assert faults.where
        del x
        assert [ref() for ref in alive] == [None] * len(alive), faults.where


@pytest.mark.long
def test_steps_without_growth() -> None:
    # Three of ten are given up: no backward, an exception after forward, in backward.
    # In a process of its own: what a thousand tests before it have left is freed at any time.
    code = (
        "import json, torch, torch_load\n"
        "torch.set_num_threads(1)\n"  # beside other work, threads wait for each other
        "print(json.dumps(torch_load.growth('cpu', 6000)[0]))"
    )
    tests = Path(torch_load.__file__).parent
    grown = json.loads(output_of("-c", code, folder=tests, timeout=300).splitlines()[-1])
    assert grown["host"] < 12_000  # 600 steps of a kind, and 24 bytes are malloc's smallest piece
    assert grown["objects"] < 500  # Python's own caches had 305 once


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals for threads")
def test_interrupts_at_any_time(seeded: None) -> None:
    # A real SIGINT, a few milliseconds into endless steps.
    model, optimizer, _, restore, expected = after_a_step()
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for delay in range(12):
            pressed = threading.Timer(
                0.003 + delay * 0.0013, signal.pthread_kill, (main, signal.SIGINT)
            )
            until = time.monotonic() + 5
            with pytest.raises(KeyboardInterrupt):
                pressed.start()
                while time.monotonic() < until:
                    plain_step(model, optimizer, LARGE)
                # Python drops exceptions of finalizers and weak references' callbacks.
                signal.raise_signal(signal.SIGINT)
            pressed.join()
            restore()
            plain_step(model, optimizer, SMALL)
            assert same(state(model, optimizer), expected)
    finally:
        signal.signal(signal.SIGINT, before)


def run_script(tmp_path: Path, text: str, *arguments: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    return output_of(str(script), *arguments, folder=Path(__file__).parent, timeout=300)


@pytest.mark.long
def test_the_interpreter_ends_with_live_graphs(tmp_path: Path, seeded: None) -> None:
    # And a process of its own has the bits of this one.
    out = run_script(
        tmp_path,
        """
        import torch
        torch.set_num_threads(1)
        import hotcore.torch as hot
        import test_faults

        print(test_faults.digest())
        torch.set_num_threads(3)
        model, optimizer = test_faults.make()
        images = test_faults.images(2)
        whole = model(images)                          # with all of its graph
        half = model(images)
        half.backward(retain_graph=True)
        class Cycle:
            def __del__(self, hot=hot):
                pass
        cycle = Cycle()
        cycle.itself, cycle.graph = cycle, model(images)
        layer, rows = hot.HotLinear(8, 8), torch.ones(4, 8)
        by_hand = layer(rows)
        raise SystemExit(0)
        """,
    )
    assert out.split() == [digest()]


@pytest.mark.long
def test_memory_that_really_runs_out(tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("limits a process's memory as Linux does")
    run_script(
        tmp_path,
        """
        import re, resource, torch
        torch.set_num_threads(1)
        import hotcore.torch as hot

        def used():
            return int(open("/proc/self/statm").read().split()[0]) * 4096

        torch.manual_seed(0)
        model = torch.nn.Sequential(hot.HotLinear(256, 512), hot.HotLinear(512, 256))
        small = torch.randn(64, 256)
        large = torch.randn(20_000, 256, requires_grad=True)   # 20 MB

        def step(x):
            global part
            torch.manual_seed(1)
            model.zero_grad()
            part = "forward"
            loss = model(x).square().sum()
            part = "backward"
            loss.backward()
            return [p.grad.clone() for p in model.parameters()]

        expected = step(small)
        no_limit = resource.getrlimit(resource.RLIMIT_AS)
        failed = set()
        for megabytes in range(10, 600, 3):  # finer than what is compressed
            resource.setrlimit(resource.RLIMIT_AS, (used() + (megabytes << 20), no_limit[1]))
            try:
                step(large)
                ended = True
            except (MemoryError, RuntimeError) as error:
                assert re.search("memory|^$|bad_alloc", str(error)), error
                trace, ended = error.__traceback__, False
                while trace.tb_next:
                    trace = trace.tb_next
                failed.add((part, "hotcore" in trace.tb_frame.f_code.co_filename))
                del error, trace
            finally:
                resource.setrlimit(resource.RLIMIT_AS, no_limit)
            large.grad = None
            assert all(map(torch.equal, step(small), expected))
            if ended:
                break
        assert ended and ("forward", True) in failed, failed  # in the adapter's own code
        assert "backward" in dict(failed), failed  # which allocation fails there is chance
        """,
    )
