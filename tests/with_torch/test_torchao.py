"""``torchao.quantization.quantize_`` with HOT's configuration."""

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
quantization = pytest.importorskip("torchao.quantization")
import hotcore.torch as hot  # noqa: E402
from hotcore.integrations.torchao import HotTrainingConfig  # noqa: E402
from support import refused  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 1)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = self.conv(x[:, :, None, None]).flatten(1)
        return self.head(x + self.body(x))


def converted(model: nn.Module) -> dict[str, str]:
    kinds = (hot.HotLinear, hot.HotConv2d)
    return {name: m.config.name for name, m in model.named_modules() if isinstance(m, kinds)}


def test_the_layers_of_torchaos_filter_train() -> None:
    model, x = Net(), torch.randn(32, 64)
    plain, weight = model(x), model.body[0].weight
    plain.square().mean().backward()
    exact = weight.grad.clone()
    weight.grad = None
    quantization.quantize_(model, HotTrainingConfig("accurate"))
    assert converted(model) == dict.fromkeys(("body.0", "body.2", "head"), "accurate")
    assert model.body[0].weight is weight  # the same Parameter
    y = model(x)
    assert torch.equal(y, plain)
    y.square().mean().backward()
    cosine = torch.nn.functional.cosine_similarity(weight.grad.flatten(), exact.flatten(), 0)
    assert 0.99 < cosine < 1 - 1e-7
    quantization.quantize_(model, HotTrainingConfig())  # what is HOT stays
    assert set(converted(model).values()) == {"accurate"}


def test_the_whole_model_is_converted_by_converts_own_rules() -> None:
    model, ours = Net(), Net()
    quantization.quantize_(model, HotTrainingConfig(), filter_fn=lambda module, fqn: fqn == "")
    hot.convert(ours)
    assert converted(model) == converted(ours) and "head" not in converted(model)


def test_filters_and_a_configuration_by_name() -> None:
    model = Net()
    quantization.quantize_(model, HotTrainingConfig("fast"), filter_fn=lambda m, fqn: fqn == "conv")
    assert converted(model) == {"conv": "fast"}
    by_name = {"body.0": HotTrainingConfig(), "body.2": HotTrainingConfig("accurate")}
    quantization.quantize_(model, quantization.FqnToConfig(by_name), filter_fn=None)
    assert converted(model) == {"conv": "fast", "body.0": "default", "body.2": "accurate"}


def test_code_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/torch/integrations.md"
    text = page.read_text(encoding="utf-8").split("\n## torchao\n")[1]
    (code,) = re.findall(r"^```py\n(.*?)^```", text.split("\n## ")[0], re.MULTILINE | re.DOTALL)
    model = Net()
    exec(compile(code, str(page), "exec"), {"model": model})
    # convert's own rules leave the convolution and the head; then the head.
    layers = {name: m for name, m in model.named_modules() if isinstance(m, hot.HotLinear)}
    assert {name: layer.config.forward for name, layer in layers.items()} == dict.fromkeys(
        ("body.0", "body.2", "head"), "int8"
    )


def test_a_filter_by_name_meets_containers_and_activations() -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"a": nn.Linear(64, 64), "act": nn.GELU()})})
    model["mlp"]["attention"] = nn.MultiheadAttention(64, 4)
    quantization.quantize_(model, HotTrainingConfig(), filter_fn=lambda module, fqn: "mlp." in fqn)
    kinds = {name: type(module).__name__ for name, module in model["mlp"].items()}
    assert kinds == {"a": "HotLinear", "act": "GELU", "attention": "HotMultiheadAttention"}


def test_bad_arguments() -> None:
    refused(lambda: HotTrainingConfig("fest"), "config: 'fest' is not one of")

    class Mine(nn.Linear):
        pass

    with pytest.raises(TypeError, match="expected a plain Linear, got Mine"):
        quantization.quantize_(nn.Sequential(Mine(64, 64)), HotTrainingConfig())
