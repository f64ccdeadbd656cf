"""Tools of torch around a whole converted model: compile, AMP, EMA, ..."""

import copy
import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from support import nbytes, saved_tensors
from torch import nn
from torch_graphs import same

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")
CONVERTED = ["stages.0.conv", "stages.0.mix", "stages.1.conv", "stages.1.mix", "q", "k"]


class Stage(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, stride, padding=1)
        self.norm = nn.GroupNorm(4, 64)
        self.mix = nn.Conv2d(64, 64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.mix(nn.functional.gelu(self.norm(self.conv(x)))))


class Model(nn.Module):
    """Convolutions, then two linear layers that share their input, as q and k do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, 4)
        self.stages = nn.ModuleList([Stage(1), Stage(2)])
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        x = torch.relu(x.flatten(2).transpose(1, 2))
        return self.head((self.q(x) * self.k(x)).mean(1))


def converted(recipe: str = "default") -> nn.Module:
    model = Model()
    report = hot.convert(model, recipe).hot_report
    assert [layer.name for layer in report.converted] == CONVERTED
    return model


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32)


def step(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, all gradients, and a number that torch's generator draws next."""
    torch.manual_seed(3)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    y = call(x)
    y.square().sum().backward()
    leaves = (x, *(p for p in model.parameters() if p.requires_grad))
    return [y.detach(), *(leaf.grad for leaf in leaves), torch.rand(())]


def test_seeds_are_those_of_eager_where_x_is_kept_anyway() -> None:
    # ReLU keeps its output, so a partitioner would rather compress it (and draw) in backward.
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 64))
    hot.convert(model, "fast")
    x = torch.randn(40, 64)
    for frozen in (False, True):
        model[2].weight.requires_grad_(not frozen)
        for backend in ("aot_eager", "aot_eager_decomp_partition"):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            assert same(step(compiled, model, x), step(model, model, x))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1, "stride": 2, "padding_mode": "reflect"},
        {"kernel_size": 4, "padding": "same"},
        {"kernel_size": (3, 1), "dilation": 2},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "groups": 4},
    ],
    ids=["reflect", "same", "dilated", "1x1", "groups"],
)
def test_compiled_convolutions_of_any_size(options: dict[str, Any]) -> None:
    dynamic = None if "reflect" in options.values() else True
    module = hot.HotConv2d(64, 48, config="fast", **options)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for shape in ((2, 8, 8), (3, 8, 8), (2, 9, 7)):
        x = torch.randn(shape[0], 64, *shape[1:])
        assert same(step(compiled, module, x), step(module, module, x))


@pytest.mark.parametrize(
    "config", [hot.HotConfig.recipe("fast"), hot.HotConfig(forward="int8")], ids=str
)
def test_a_changed_configuration_recompiles(config: hot.HotConfig) -> None:
    layer = hot.HotLinear(64, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(40, 64)
    before = step(compiled, layer, x)
    layer.config = config  # as PrecisionSchedule does
    after = step(compiled, layer, x)
    assert not torch.equal(before[2], after[2])
    assert same(after, step(layer, layer, x))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["default", "fast"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_convolutions_keep_compressed_x(recipe: str, dynamic: bool | None) -> None:
    layer = hot.HotConv2d(64, 64, 3, padding=1, padding_mode="reflect", config=recipe)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(3, 64, 9, 10).contiguous(memory_format=fmt).requires_grad_()
        with saved_tensors() as kept:
            y = compiled(x * 1)
        y.sum().backward()
        assert nbytes(kept) < 0.7 * x.numel() and x.grad.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grad_scaler_sees_an_overflow(dtype: torch.dtype) -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for factor, finite in ((1.0, True), (1e36, False), (1.0, True)):
        before = [p.detach().clone() for p in model.parameters()]
        scale = scaler.get_scale()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(images()).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(moved) if finite else not any(moved)
        assert scaler.get_scale() == (2 * scale if finite else scale / 2)
        assert all(p.isfinite().all() for p in model.parameters())


INSIDE = """
import copy, json, warnings
import torch, torch._dynamo, torch.nn.functional as F  # torch 2.6 imports dynamo in no mode
import hotcore.torch as hot
from hotcore import paper
from torch import nn

warnings.simplefilter("ignore")
net = nn.Sequential(
    *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.Flatten(2)),
    *(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)),
)
attention = nn.MultiheadAttention(64, 2, batch_first=True)
x, target = torch.randn(2, 3, 10, 10), torch.arange(32)
weight = torch.randn(50, 64, requires_grad=True)
text = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
served = {
    "4.weight": torch.randint(-127, 127, (32, 64), dtype=torch.int8),
    "4.weight_scale": torch.rand(32, 1),
    "4.comfy_quant": torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8),
}

def step(model):
    torch.manual_seed(0)
    y = model(x)
    loss = hot.linear_cross_entropy(y.flatten(0, 1), weight, target, config="default")
    wanted = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, [weight, *wanted])

def made(frozen=None, **fields):
    layers = nn.ModuleList([copy.deepcopy(net), copy.deepcopy(attention)])
    hot.convert(layers, hot.HotConfig.recipe("default", **fields), lambda module, name: True)
    model = layers[0]
    model.append(layers[1])
    model[-1].register_forward_pre_hook(lambda module, args: args * 3)
    model[-1].register_forward_hook(lambda module, args, y: y[0])
    if frozen is not None:
        hot.freeze_int8(model, save_codes=True, convrot=frozen)
        model.load_state_dict(served if frozen else model.state_dict(), strict=False)
    return model

def everything():
    found = [*step(made()), *step(made(forward="int8")), *step(made(False)), *step(made(True))]
    model = made(True)
    found += [*model.state_dict().values()]
    hot.memory_report(made(), x), paper.compute_report(made(), x)
    with hot.NoiseMonitor(made()):
        found += step(made())
    hot.thaw(model)
    return found + [*step(hot.revert(model))]

with torch.device("meta"):
    inside = everything()
outside = everything()
assert len(inside) == len(outside) and all(map(torch.equal, inside, outside))
"""


@pytest.mark.long
def test_inside_of_another_default_device() -> None:
    """Nothing is made on the default device, nor kept from there for later calls."""
    subprocess.run([sys.executable, "-c", INSIDE], check=True)


def test_meta_device_and_assigned_state() -> None:
    source = Model()
    with torch.device("meta"):
        model = converted()
    model.load_state_dict(source.state_dict(), assign=True)
    x = images()
    assert torch.equal(model(x), source(x))


def test_tied_weights() -> None:
    model = Model()
    model.k.weight = model.q.weight
    hot.convert(model, "accurate")
    assert model.k.weight is model.q.weight
    assert sum(p is model.q.weight for p in model.parameters()) == 1
    plain = hot.revert(copy.deepcopy(model))
    assert plain.k.weight is plain.q.weight
    x = images()
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    exact = plain.q.weight.grad
    assert (model.q.weight.grad - exact).norm() < 0.05 * exact.norm()


FORMER = {
    "attention": "HotMultiheadAttention",
    "convert": "convert",
    "convrot": "HotConvRotLinear",
    "custom": "CustomBackward",
    "freeze": "FreezeReport",
    "frozen": "HotFrozenLinear",
    "head": "LinearCrossEntropy",
    "memory": "MemoryReport",
    "modules": "HotLinear",
    "noise": "NoiseMonitor",
    "policies": "keep_codes",
    "recompute": "Recomputed",
    "report": "ConversionReport",
}


@pytest.mark.parametrize("module", FORMER)
def test_pickles_and_imports_from_before_the_folders(module: str) -> None:
    """The module paths of hotcore.torch without folders; functions keep their names."""
    path, name = f"hotcore.torch.{module}", FORMER[module]
    found = pickle.loads(f"c{path}\n{name}\n.".encode())
    assert found is getattr(importlib.import_module(path), name)
    assert found.__module__.startswith("hotcore.torch.") and found.__module__ != path
    functions = {"convert", "freeze", "recompute", "report"}
    assert callable(getattr(hot, module)) == (module in functions)
