"""``NoiseMonitor``: the ratio is right, and measuring changes nothing."""

import copy

import hotcore.torch as hot
import pytest
import torch
from support import refused
from torch import nn
from torch_graphs import same

pytestmark = pytest.mark.usefixtures("seeded")


def net() -> nn.Sequential:
    convolutions = (nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    linears = (nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    return nn.Sequential(*convolutions, nn.Flatten(2), *linears)


def converted() -> nn.Sequential:
    return hot.convert(net(), filter_fn=lambda module, name: name != "0")


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 2, 3, 8, 8))


def train(model: nn.Module, data: list[torch.Tensor], monitor: hot.NoiseMonitor | None) -> list:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logged = []
    torch.manual_seed(1)
    for x in data:
        if monitor is not None:
            monitor.begin()
        model(x).square().mean().backward()
        logged.append(monitor.end() if monitor is not None else {})
        optimizer.step()
        optimizer.zero_grad()
    return logged


def names(*layers: str) -> set[str]:
    return {f"hot/noise_{kind}/{layer}" for kind in ("gw", "gx") for layer in layers}


def test_ratio_is_that_of_the_gradients() -> None:
    """The mean over many keys of backward's gradients beside plain torch's."""
    x = torch.randn(64, 64)
    gy = torch.randn(64, 96) * torch.rand(64, 1) ** 4  # tokens of different size
    plain = nn.Linear(64, 96)
    layer = hot.HotLinear.from_linear(copy.deepcopy(plain), "fast")

    def gradients(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        module(leaf).backward(gy)
        return module.weight.grad.clone(), leaf.grad

    exact = gradients(plain)
    wanted = torch.zeros(2, dtype=torch.double)
    runs = 40
    for _ in range(runs):
        for i, (got, true) in enumerate(zip(gradients(layer), exact, strict=True)):
            wanted[i] += (got - true).double().square().sum() / true.double().square().sum() / runs
    monitor = hot.NoiseMonitor(layer, every=1)
    found = torch.zeros(2, dtype=torch.double)
    for _ in range(runs):
        with monitor:
            gradients(layer)
        ratios = monitor.scalars
        assert set(ratios) == names("(root)", "all")
        found += torch.tensor([ratios["hot/noise_gw/all"], ratios["hot/noise_gx/all"]]) / runs
    assert wanted[0] > 0.1 > wanted[1] > 0  # half the rank is lost in g_w; g_x has 8 bits
    assert torch.allclose(found, wanted, rtol=0.1)


def test_training_goes_on_bit_for_bit() -> None:
    data = batches(5)
    model = converted()
    twin = copy.deepcopy(model)
    monitor = hot.NoiseMonitor(model, every=2)
    logged = train(model, data, monitor)
    assert [bool(scalars) for scalars in logged] == [True, False, True, False, True]
    assert set(logged[0]) == names("2", "4", "6", "all")
    assert logged[0].pop("hot/noise_gx/2") == 0  # torch's own, which reads nothing of x
    assert all(0 < ratio < 0.1 for ratio in logged[0].values())
    train(twin, data, None)
    assert same(model.parameters(), twin.parameters())


def test_layers_frozen_inputs_and_micro_batches() -> None:
    model = converted()
    model[4].weight.requires_grad_(False)
    monitor = hot.NoiseMonitor(model, every=1, layers=["4", "2"])
    assert monitor.layers == ["2", "4"]
    with monitor:
        for x in batches(2):
            model(x).square().mean().backward()
    kinds = ("gw/2", "gw/all", "gx/2", "gx/4", "gx/all")
    assert set(monitor.scalars) == {f"hot/noise_{kind}" for kind in kinds}
    with monitor, torch.no_grad():
        model(batches(1)[0])
    assert monitor.scalars == {}
    assert not any(module._forward_hooks for module in model.modules())


def test_autocast_and_compiled() -> None:
    model = converted()
    plain = dict(train(model, batches(1), hot.NoiseMonitor(model))[0])
    compiled = torch.compile(model, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        compiled(batches(1)[0])  # compiled before a hook is there
        monitor = hot.NoiseMonitor(compiled)
        with monitor:
            compiled(batches(1)[0]).square().mean().backward()
    found = monitor.scalars
    assert set(found) == set(map(_wrapped, plain))
    assert found["hot/noise_gx/all"] == pytest.approx(plain["hot/noise_gx/all"], rel=0.5)


def test_an_overflow_is_not_measured() -> None:
    """A step that a GradScaler skips stays in the measurement of the next one."""
    model, x = converted(), batches(1)[0]
    monitor = hot.NoiseMonitor(model)
    with monitor:
        (model(x).square().mean() * torch.inf).backward()
        model(x).square().mean().backward()
    assert monitor.scalars.keys() == names("2", "4", "6", "all")
    assert all(0 <= ratio < 1 for ratio in monitor.scalars.values())


def test_x_by_keyword_and_written_afterwards() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    hot.convert(model, "accurate", filter_fn=lambda module, name: True)
    monitor, x = hot.NoiseMonitor(model, every=1), torch.randn(8, 64, requires_grad=True)
    with monitor:
        model[0](input=x).sum().backward()
    assert 0 < monitor.scalars["hot/noise_gw/0"] < 1e-3
    with monitor, pytest.raises(RuntimeError, match="layer 0: its x was written in place"):
        h = x + 0
        y = model[0](h)
        h.zero_()
        y.sum().backward()


def test_layers_with_computed_weights_or_a_forward_of_their_own() -> None:
    model = converted()
    monitor = hot.NoiseMonitor(model, every=1)
    nn.utils.parametrizations.weight_norm(model[2])
    hot.recompute([model[4], nn.Sequential(nn.ReLU())])
    with monitor:
        model(batches(1)[0]).square().mean().backward()
    assert {name.rpartition("/")[2] for name in monitor.scalars} == {"4", "6", "all"}
    assert hot.NoiseMonitor(model).layers == ["4", "6"]


def _wrapped(name: str) -> str:
    head, _, layer = name.rpartition("/")
    return name if layer == "all" else f"{head}/_orig_mod.{layer}"


def test_bad_arguments() -> None:
    refused(lambda: hot.NoiseMonitor(net()), "model: no layer of it is converted")
    with pytest.raises(ValueError, match="layers: 'blocks.*' matches none of 2, 4, 6"):
        hot.NoiseMonitor(converted(), layers="blocks.*")
    refused(lambda: hot.NoiseMonitor(converted(), every=0), "every: 0; expected a number of steps")
