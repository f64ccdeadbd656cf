"""``hotcore.integrations``: the loop by hand and with accelerate, transformers' and Lightning's."""

import copy
import importlib
import inspect
import pickle
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.integrations import HotLoop, scalar_logger
from support import refused, without_broken_torchvision
from torch import nn
from torch_graphs import causal

pytestmark = pytest.mark.usefixtures("seeded")

MICRO = 2  # micro-batches of a step


class Net(nn.Module):
    """Model with the arguments and results of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(x + self.body(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def converted() -> Net:
    return hot.convert(Net())


def data(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 64, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return [{"x": x, "labels": label} for x, label in zip(images, labels, strict=True)]


def batches(steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Steps of micro-batches of 16."""
    rows = iter(data(16 * MICRO * steps))
    return [
        [torch.utils.data.default_collate([next(rows) for _ in range(16)]) for _ in range(MICRO)]
        for _ in range(steps)
    ]


def train(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """A loop without any code for HOT."""
    optimizer = next(iter(train.optimizers))
    torch.manual_seed(1)
    for step in batches(steps):
        for micro in step:
            model(**micro)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    train.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return train.optimizers[0]


def fails(*_: Any) -> None:
    raise RuntimeError("on purpose")


def no_trace(model: nn.Module) -> bool:
    """Whether no hook of a loop remains."""
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- By hand ----


def test_noise() -> None:
    model = converted()
    logged: list[tuple[int, dict]] = []
    options = {"noise_every": 3, "noise_layers": "body.2"}
    log = lambda scalars, step: logged.append((step, scalars))  # noqa: E731
    loop = HotLoop(model, sgd(model), **options, log=log)
    assert no_trace(model)  # before the loop is entered
    with loop:
        train(model, 4)
    assert no_trace(model)
    noise = {f"hot/noise_{kind}/{layer}" for kind in ("gw", "gx") for layer in ("body.2", "all")}
    assert [(step, set(scalars)) for step, scalars in logged] == [(1, noise), (4, noise)]


def test_entered_again_and_going_on() -> None:
    model = converted()
    steps: list[int] = []
    options = {"noise_every": 1, "start": 5, "log": lambda scalars, step: steps.append(step)}
    loop = HotLoop(model, sgd(model), **options)
    for _ in range(2):
        with loop:
            train(model, 1)
        assert no_trace(model)
    assert loop.steps == 7 and steps == [6, 7]


def test_an_error_leaves_no_trace() -> None:
    model = converted()
    with pytest.raises(RuntimeError, match="mat1"), HotLoop(model, sgd(model), noise_every=1):
        model(torch.randn(3, 5), torch.zeros(3, dtype=torch.long))
    assert no_trace(model)


def test_bad_arguments() -> None:
    model = converted()
    optimizer = sgd(model)
    with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer, got Net"):
        HotLoop(model, model)
    with pytest.raises(ValueError, match="layers: 'x' matches none of"):
        HotLoop(model, optimizer, noise_every=1, noise_layers="x")
    refused(lambda: HotLoop(model, optimizer, log=3), "log: expected .*, got int", TypeError)
    refused(lambda: HotLoop(model, optimizer, start="3"), "start: expected an int", TypeError)
    refused(lambda: HotLoop(model, optimizer, start=-1), "start: -1 is negative")
    says = r"^HotLoop.__init__\(\) got an unexpected keyword argument 'warm_up'$"
    with pytest.raises(TypeError, match=says):
        HotLoop(model, optimizer, warm_up=3)
    with HotLoop(model, optimizer) as loop, pytest.raises(RuntimeError, match="entered already"):
        loop.__enter__()


def test_loggers() -> None:
    got: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: got.append((name, value, step)))
    run = SimpleNamespace(log=lambda scalars, step=None: got.append((scalars, step)))
    scalar_logger(writer)({"a": 1.0, "b": 2.0}, 7)
    scalar_logger(run)({"a": 1.0}, 8)
    scalar_logger(None)({"a": 1.0}, 8)
    assert got == [("a", 1.0, 7), ("b", 2.0, 7), ({"a": 1.0}, 8)]


# ---- accelerate ----


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    rows = [micro for step in batches(3) for micro in step]
    loader = torch.utils.data.DataLoader(rows, batch_size=None)
    net = converted()
    model, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
    logged = []
    options = {"noise_every": 2, "log": lambda scalars, step: logged.append(step)}
    with HotLoop(model, optimizer, **options) as loop:
        for micro in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**micro)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        assert loop.steps == 3
    assert logged == [1, 3] and no_trace(model)


@pytest.mark.parametrize("what", ["head", "recompute"])
def test_accelerate_unwraps_what_was_set_on_a_model(what: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = causal("Llama", use_cache=False)
    signature = inspect.signature(model.forward)
    hot.convert(model, "default", lambda *_: True, head=what == "head")
    handle = hot.recompute(model) if what == "recompute" else None
    ids = torch.randint(1, 101, (2, 40))

    def loss_of(each: Any) -> torch.Tensor:
        return each(input_ids=ids, labels=ids).loss.detach()

    def same_as_before(each: Any) -> None:
        """A copy computes with its weights; a change of them affects only the copy."""
        assert inspect.signature(each.forward) == signature
        twin = copy.deepcopy(each)
        before = loss_of(each)
        with torch.no_grad():
            twin.lm_head.weight.zero_()
        assert loss_of(each) == before
        torch.testing.assert_close(loss_of(twin), torch.tensor(101.0).log())

    same_as_before(pickle.loads(pickle.dumps(model)))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.native_amp = True  # like mixed_precision, which a process sets once
    for _ in range(2):
        prepared = accelerator.prepare_model(model)
        same_as_before(prepared)
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
        same_as_before(model)
    if handle is not None:
        handle.remove()
    hot.revert(model)
    same_as_before(model)
    left = {"forward", "_hot_own_forward", "_loss_function"}
    assert not left & {*vars(model), *vars(model.lm_head)}


# ---- transformers ----


def trainer_of(tmp_path: Path, model: nn.Module, steps: int, **options: Any) -> Any:
    with without_broken_torchvision():
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        from transformers import Trainer, TrainingArguments
    assert transformers
    batch = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": MICRO}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    options = {"max_steps": steps, "logging_steps": 1, "remove_unused_columns": False, **options}
    arguments = TrainingArguments(str(tmp_path), **{**batch, **quiet, **options})
    return Trainer(model, arguments, train_dataset=data(64))


def test_transformers_before_5_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_broken_torchvision():
        transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    name = "hotcore.integrations.transformers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match="expected transformers 5 or newer, got 4.57.6; hot.conv"):
        importlib.import_module(name)


@pytest.mark.long
def test_transformers_trainer(tmp_path: Path) -> None:
    model = converted()
    trainer = trainer_of(tmp_path, model, 4)
    from hotcore.integrations.transformers import HotCallback

    callback = HotCallback.add_to(trainer, noise_every=2, noise_layers=["body.0"])
    trainer.train()
    assert callback.loop.steps == 4 and no_trace(model)
    history = trainer.state.log_history
    assert [e["step"] for e in history if "hot/noise_gw/body.0" in e] == [1, 3]
    assert [e["step"] for e in history if "loss" in e] == [1, 2, 3, 4]


def test_transformers_checkpoint_and_error(tmp_path: Path) -> None:
    model = converted()
    trainer = trainer_of(tmp_path, model, 2, save_strategy="steps", save_steps=2)
    from hotcore.integrations.transformers import HotCallback

    trainer.add_callback(HotCallback(noise_every=1, noise_layers="body.0"))
    trainer.train()
    model = converted()
    again = trainer_of(tmp_path, model, 4)
    callback = HotCallback(noise_every=1, noise_layers="body.0")
    again.add_callback(callback)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    entries = [e for e in again.state.log_history if "hot/noise_gw/body.0" in e]  # without add_to
    assert [e["step"] for e in entries] == [1, 2, 3, 4] and callback.loop.steps == 4

    handle = model.body[0].register_forward_hook(fails)
    refused(again.train, "on purpose", RuntimeError)
    handle.remove()
    assert not no_trace(model)
    callback.close()
    assert no_trace(model)
    refused(lambda: HotCallback(warm_up=3), "expected options log, .*, got warm_up", TypeError)


# ---- Lightning ----


def lightning() -> Any:
    from models import mend_torchvision

    mend_torchvision()  # torchmetrics expects that every installed package can be imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning.pytorch")


def module_of(pl: Any, model: nn.Module, manual: bool = False) -> Any:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.calls = model, 0
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Any:
            self.calls += 1
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    return Module()


def lightning_trainer(pl: Any, path: Path, callback: Any, **options: Any) -> Any:
    names = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet = {**dict.fromkeys(names, False), "log_every_n_steps": 1, "default_root_dir": path}
    options = {**quiet, "logger": pl.loggers.CSVLogger(path), **options}
    return pl.Trainer(accelerator="cpu", devices=1, callbacks=[callback], **options)


@pytest.mark.filterwarnings("ignore")
def test_fabric() -> None:
    """Fabric's wrappers of the model and the optimizer, and its ``log_dict``."""
    lightning()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    logged: list[tuple[int, set[str]]] = []
    fabric.log_dict = lambda scalars, step=None: logged.append((step, set(scalars)))
    net = converted()
    model, optimizer = fabric.setup(net, sgd(net))
    before = [p.detach().clone() for p in net.parameters()]
    with HotLoop(model, optimizer, noise_every=2, log=fabric) as loop:
        for step in batches(3):
            for micro in step:
                fabric.backward(model(**micro)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        assert loop.steps == 3
    assert [step for step, _ in logged] == [1, 3] and "hot/noise_gw/all" in logged[0][1]
    assert no_trace(net)
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    pl = lightning()
    from hotcore.integrations.lightning import HotCallback

    model = converted()
    module = module_of(pl, model)
    callback = HotCallback(noise_every=2, noise_layers="model.body.0")
    logged: list[tuple[int, dict]] = []
    logger = pl.loggers.CSVLogger(tmp_path)
    logger.log_metrics = lambda metrics, step=None: logged.append((step, metrics))
    trainer = lightning_trainer(
        pl, tmp_path, callback, max_steps=4, accumulate_grad_batches=MICRO, logger=logger
    )
    loader = torch.utils.data.DataLoader(data(16 * MICRO * 4), batch_size=16)
    trainer.fit(module, loader)
    assert callback.loop.steps == trainer.global_step == 4 and no_trace(model)
    ours = [
        (step, set(found)) for step, found in logged if any(k.startswith("hot/") for k in found)
    ]
    noise = {"hot/noise_gw/model.body.0", "hot/noise_gw/all"}  # without g_x, as x is the data
    assert ours == [(1, noise), (3, noise)]
    assert sum("loss" in found for _, found in logged) == 4


@pytest.mark.filterwarnings("ignore")
def test_lightning_checkpoint_error_and_manual(tmp_path: Path) -> None:
    pl = lightning()
    from hotcore.integrations.lightning import HotCallback

    loader = torch.utils.data.DataLoader(data(64), batch_size=16)
    model = converted()
    trainer = lightning_trainer(pl, tmp_path, HotCallback(), max_steps=2)
    trainer.fit(module_of(pl, model), loader)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    model = converted()
    callback = HotCallback(noise_every=1)
    trainer = lightning_trainer(pl, tmp_path, callback, max_steps=4)
    trainer.fit(module_of(pl, model), loader, ckpt_path=tmp_path / "two.ckpt")
    assert callback.loop.steps == 4
    failing = model.head.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        lightning_trainer(pl, tmp_path, callback, max_steps=4).fit(module_of(pl, model), loader)
    failing.remove()
    assert no_trace(model)
    model = converted()
    manual = HotCallback()
    trainer = lightning_trainer(pl, tmp_path, manual, max_steps=2)
    trainer.fit(module_of(pl, model, manual=True), loader)
    assert manual.loop.steps == 2
