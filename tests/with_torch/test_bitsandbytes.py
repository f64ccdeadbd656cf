"""Base layers of bitsandbytes: Linear8bitLt is converted, Linear4bit where a filter says so."""

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from support import cosine, refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")
import hotcore.torch as hot
from hotcore import paper
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_graphs import imported

pytestmark = pytest.mark.usefixtures("seeded")


def linear8(ins: int = 128, outs: int = 192, bias: bool = True) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(ins, outs, bias=bias, has_fp16_weights=False)
    layer.weight.data.normal_(0, 0.05)
    return layer.to("cpu")  # quantised by this


def linear4(ins: int = 128, outs: int = 192, bias: bool = True, **options) -> nn.Module:
    options = {"compute_dtype": torch.float32, **options}
    layer = bnb.nn.Linear4bit(ins, outs, bias=bias, **options)
    layer.weight.data.normal_(0, 0.05)
    return layer.to("cpu")


class Model(nn.Module):
    def __init__(self, make: Callable[..., nn.Module] = linear8) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.up, self.down = make(), make(192, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.first(x)))))


def gx_of(layer: nn.Module, x: torch.Tensor, gy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(gy)
    return y.detach(), leaf.grad


def test_convert_and_revert() -> None:
    model = Model()
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    report = hot.convert(model).hot_report
    rows = {layer.name: layer for layer in report.converted}
    kinds = {"first": "Linear", "up": "Linear8bitLt", "down": "Linear8bitLt"}
    assert {name: row.kind for name, row in rows.items()} == kinds
    assert rows["up"].bytes_per_value == 0 and "nothing (weight frozen)" in str(report)
    assert isinstance(model.up, bnb.nn.Linear8bitLt)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == state
    hot.revert(model)
    assert type(model.up) is bnb.nn.Linear8bitLt
    # On CUDA there is no measurement to go by; it is converted, for memory.
    layers = nn.ModuleList([linear8(), linear8()])
    assert len(hot.convert(layers, device="cuda").hot_report.converted) == 2


@pytest.mark.parametrize("make", [linear8, linear4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient(dtype: torch.dtype, make: Callable[..., nn.Module]) -> None:
    """The forward pass is bitsandbytes' to the bit; g_x is the product with its weight, rounded."""
    layer = make()
    layer.bias.requires_grad_(True)
    x, gy = torch.randn(2, 40, 128, dtype=dtype), torch.randn(2, 40, 192, dtype=dtype)
    plain, exact = gx_of(layer, x, gy)
    bias_grad, layer.bias.grad = layer.bias.grad, None
    model = nn.Sequential(layer)
    assert len(hot.convert(model, filter_fn=lambda module, name: True).hot_report.converted) == 1
    y, ours = gx_of(model[0], x, gy)
    assert torch.equal(y, plain) and ours.dtype == exact.dtype == dtype
    assert 0.999 < cosine(ours.float().numpy(), exact.float().numpy()) < 1
    assert torch.allclose(model[0].bias.grad.float(), bias_grad.float(), rtol=0.02, atol=0.2)
    # The mean over the roundings of g_y is nearer; w is rounded to nearest, which stays.
    runs = [gx_of(model[0], x, gy)[1].float() for _ in range(16)]
    error = [(g - exact.float()).norm() for g in (runs[0], sum(runs) / len(runs))]
    assert error[1] < 0.7 * error[0]


def test_nothing_is_kept() -> None:
    """bitsandbytes keeps x until backward, HOT does not."""
    kept = {}
    for convert in (False, True):
        model = Model()
        if convert:
            hot.convert(model)
        alive: list[weakref.ref] = []
        model.up.register_forward_pre_hook(
            lambda m, args, alive=alive: alive.append(weakref.ref(args[0]))
        )
        y = model(torch.randn(16, 64))
        gc.collect()
        kept[convert] = alive[0]() is not None
        y.sum().backward()
        assert model.first.weight.grad is not None
    assert kept == {False: True, True: False}


def test_eval_no_grad_and_compile() -> None:
    model, x = Model(), torch.randn(16, 64)
    plain = copy.deepcopy(model)
    hot.convert(model)
    for each in (model, plain):
        each.eval()(x).sum().backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)  # plain in eval mode
    model.train()
    plain.train()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(3)
    compiled(x).sum().backward()
    assert 0.99 < cosine(model.first.weight.grad.numpy(), plain.first.weight.grad.numpy()) < 1
    refused(lambda: model.up(torch.randn(16, 5, requires_grad=True)), "^layer up: ", RuntimeError)


def test_a_reentrant_checkpoint_repeats_the_random_numbers_behind_it() -> None:
    """Its first pass is without gradients, and draws the seed all the same."""
    model = nn.Sequential(linear8(bias=False), nn.Dropout(0.5))
    hot.convert(model, "accurate", filter_fn=lambda module, name: True)
    x = torch.randn(8, 128, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=True)
    y.sum().backward()
    wanted = 2.0 * (y != 0) @ model[0].dequantized(torch.float32)
    assert cosine(x.grad.numpy(), wanted.detach().numpy()) > 0.99


def test_a_bias_alone_is_trained() -> None:
    model = hot.convert(nn.Sequential(linear8()), filter_fn=lambda module, name: True)
    model[0].bias.requires_grad_(True)
    model(torch.randn(16, 128)).sum().backward()
    assert torch.allclose(model[0].bias.grad, torch.tensor(16.0))


@pytest.mark.parametrize("options", [{"quant_type": "nf4"}, {"quant_type": "fp4"},
    {"compress_statistics": False}, {"compute_dtype": torch.bfloat16}], ids=str)  # fmt: skip
def test_4bit(options: dict) -> None:
    """A filter converts it; its state stays, and revert gives bitsandbytes' own layer."""
    model = Model(functools.partial(linear4, **options))
    plain, state = copy.deepcopy(model), set(model.state_dict())
    hot.convert(model, filter_fn=lambda module, name: name in ("up", "down"))
    assert type(model.up).__name__ == type(model.down).__name__ == "HotLinear4bit"
    assert isinstance(model.up, bnb.nn.Linear4bit) and set(model.state_dict()) == state
    x = torch.randn(64, 64)
    outputs = [each(x) for each in (model, plain)]
    assert torch.equal(*outputs)
    sum(outputs).sum().backward()
    ours, exact = model.first.weight.grad, plain.first.weight.grad
    assert 0.99 < cosine(ours.numpy(), exact.numpy()) < 1
    hot.revert(model)
    assert type(model.up) is bnb.nn.Linear4bit and torch.equal(model(x), plain(x))


def test_what_stays_plain() -> None:
    four = linear4(128, 128)
    trained = bnb.nn.Linear8bitLt(128, 128, has_fp16_weights=True)
    model = hot.convert(nn.ModuleList([four, trained, linear8()]))
    report = model.hot_report
    assert [row.name for row in report.converted] == ["2"]
    reasons = {row.name: row.reason for row in report.skipped}
    assert reasons["0"].startswith("bitsandbytes' Linear4bit, which keeps nothing of x either")
    assert reasons["1"] == "bitsandbytes' Linear8bitLt with has_fp16_weights"
    refused(lambda: hot.convert(four), "(?s)no layer can be .*: bitsandbytes' Linear4bit, wh")
    with pytest.raises(ValueError, match="no layer of it is converted"):  # nothing to measure
        hot.NoiseMonitor(nn.ModuleList([model[2]]))
    with pytest.raises(ValueError, match="no layer to measure"):
        paper.calibrate(nn.ModuleList([linear8()]), [1], lambda model, batch: None)


@pytest.mark.long
@pytest.mark.parametrize("make", [linear8, linear4])
@pytest.mark.parametrize("first", ["peft", "hot"])
def test_lora(first: str, make: Callable[..., nn.Module]) -> None:
    peft = imported("peft")
    model = Model(make)
    x = torch.randn(32, 64)

    def chosen(module: nn.Module, name: str) -> bool:
        return name.split(".")[-1] in ("up", "down", "base_layer")

    lora = peft.LoraConfig(r=4, target_modules=["up", "down"])
    if first == "hot":
        hot.convert(model, filter_fn=chosen)
    model = peft.get_peft_model(model, lora)
    if first == "peft":
        hot.convert(model, filter_fn=chosen)
    assert type(model.base_model.model.up.base_layer).__name__ == f"Hot{type(make()).__name__}"
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(15):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
