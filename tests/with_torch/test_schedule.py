"""PrecisionSchedule: the layers' configurations change in time, and are restored."""

import dataclasses

import hotcore.torch as hot
import pytest
import torch
from hotcore import paper
from hotcore.config import HotConfig
from support import refused
from torch import nn


def converted() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 64))
    hot.convert(model, "fast", lambda module, name: name == "0")
    model[2] = hot.HotLinear.from_linear(model[2], HotConfig(gx_bits=4))
    return model


def configs(model: nn.Sequential) -> list[HotConfig]:
    return [model[0].config, model[2].config]


def expected(bits: int) -> list[HotConfig]:
    return [HotConfig.recipe("fast", gx_bits=bits), HotConfig(gx_bits=bits)]


def test_callback() -> None:
    model = converted()
    schedule = paper.PrecisionSchedule(model, 3)
    for step in range(6):
        assert schedule.count == step
        assert schedule.bits == (8 if step < 3 else 4)
        assert configs(model) == expected(8 if step < 3 else 4)
        schedule.step()
    schedule.close()
    assert configs(model) == [HotConfig.recipe("fast"), HotConfig(gx_bits=4)]


def test_other_fields_that_change_stay() -> None:
    model = converted()
    schedule = paper.PrecisionSchedule(model, 1)
    model[0].config = dataclasses.replace(model[0].config, gw_scale="token")
    schedule.step()
    assert model[0].config == HotConfig.recipe("fast", gx_bits=4, gw_scale="token")
    schedule.close()
    assert model[0].config == HotConfig.recipe("fast", gw_scale="token")


def test_layers_reverted_meanwhile_stay_plain() -> None:
    model = converted()
    with paper.PrecisionSchedule(model, 1) as schedule:
        hot.revert(model)
        schedule.step()
    assert not any(hasattr(module, "config") for module in model.modules())


def test_context() -> None:
    model = converted()
    with paper.PrecisionSchedule(model, 1) as schedule:
        assert configs(model) == expected(8)
        schedule.step()
        assert configs(model) == expected(4)
    assert configs(model) == [HotConfig.recipe("fast"), HotConfig(gx_bits=4)]
    with pytest.raises(RuntimeError, match="stop"), paper.PrecisionSchedule(model, 1):
        raise RuntimeError("stop")
    assert configs(model) == [HotConfig.recipe("fast"), HotConfig(gx_bits=4)]


def test_closed_until_it_is_entered_again() -> None:
    model = converted()
    schedule = paper.PrecisionSchedule(model, 2)
    schedule.step()
    schedule.close()
    own = configs(model)
    schedule.step()  # an optimizer's hook outlives the schedule
    schedule.load_state_dict(schedule.state_dict())
    assert configs(model) == own and schedule.count == 2
    with schedule:
        assert configs(model) == expected(4)
    assert configs(model) == own


def test_own_bits_after_the_warmup() -> None:
    model = converted()
    schedule = paper.PrecisionSchedule(model, 1, then_bits=None)
    assert configs(model) == expected(8)
    schedule.step()
    assert schedule.bits is None
    assert configs(model) == [HotConfig.recipe("fast"), HotConfig(gx_bits=4)]


def test_resume() -> None:
    model = converted()
    schedule = paper.PrecisionSchedule(model, 2)
    schedule.step()
    state = schedule.state_dict()
    resumed = paper.PrecisionSchedule(other := converted(), 2)
    resumed.load_state_dict(state)
    assert configs(other) == expected(8)
    resumed.step()
    assert configs(other) == expected(4)
    resumed.load_state_dict({"count": 0})
    assert configs(other) == expected(8)


def test_bad_arguments() -> None:
    model = converted()
    for arguments, options, message in (
        ((-1,), {}, "warmup: -1"),
        ((1.5,), {}, "warmup: expected an int"),
        ((1,), {"then_bits": 2}, "then_bits: .*got 2"),
        ((1,), {"bits": None}, "^bits: .*got None"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            paper.PrecisionSchedule(model, *arguments, **options)
    refused(lambda: paper.PrecisionSchedule(hot.revert(model), 1), "no layer is converted")
    assert configs(converted()) == [HotConfig.recipe("fast"), HotConfig(gx_bits=4)]


def test_an_optimizer_drives_it() -> None:
    """The schedule follows a trainer's optimizer (docs/paper.md)."""
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = paper.PrecisionSchedule(model, 2)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    seen = []
    for _ in range(3):
        seen.append({config.gx_bits for config in configs(model)})
        model(torch.randn(64, 64)).square().sum().backward()
        optimizer.step()
    assert seen == [{8}, {8}, {4}] and schedule.count == 3
