"""Helpers for tests of torch's compiler: partitioned graphs, a model's gradients."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import hotcore.torch as hot
import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hotcore import Key
from support import without_broken_torchvision
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def every(module: nn.Module, fqn: str) -> bool:
    """Filter for models that are too small for the default filter."""
    return True


def without_chance(forward: str) -> hot.HotConfig:
    """Settings where only an INT8 x has random rounding, which leaves :func:`whole` values."""
    names = ("gx_rounding", "gw_rounding")
    return hot.HotConfig.recipe("accurate", forward=forward, **dict.fromkeys(names, "nearest"))


def whole(*shape: int, **kind: Any) -> torch.Tensor:
    """Values equal to their INT8 codes: integers, with 127, the largest, in every column."""
    x = torch.randint(-126, 127, shape, **kind).to(kind.get("dtype", torch.float32))
    x.view(-1, shape[-1])[:1] = 127
    return x


def same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def converted(model: nn.Module, recipe: Any = "default", **fields: Any) -> nn.Module:
    hot.convert(model, recipe, every)
    for module in model.modules():
        if isinstance(module, hot.HotLinear):
            for name, value in fields.items():
                setattr(module, name, value)
    return model


class Attention(nn.Module):
    """Block whose q, k and v take the same x."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.o(F.silu(self.q(y)) * self.k(y) + self.v(y))


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Graphs:
    """Backend that records the partitioned graphs: calls per operator, and saved tensors."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.kept: list[torch.Tensor] = []

    def __call__(self, module: Any, example: Any) -> Any:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def noted(stage: str) -> Callable[..., Any]:
            def compiler(graph: Any, inputs: Any) -> Any:
                for node in graph.graph.nodes:
                    if node.op == "call_function":
                        inner = next((a for a in node.args if isinstance(a, OpOverload)), None)
                        # An operator with a generator's state is an argument of another operator.
                        self.calls[stage][str(inner or node.target)] += 1
                if stage == "backward":
                    self.kept += [t for t in inputs if isinstance(t, torch.Tensor)]
                return make_boxed_func(graph.forward)

            return compiler

        return aot_autograd(
            fw_compiler=noted("forward"),
            bw_compiler=noted("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )(module, example)

    def run(self, call: Callable[..., torch.Tensor], x: torch.Tensor) -> "Graphs":
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=self, fullgraph=True)
        compiled(x).float().square().sum().backward()
        return self

    def count(self, stage: str, name: str) -> int:
        """Calls of an operator, in C++ or in Python."""
        calls = self.calls[stage]
        return calls[f"hotcore.{name}.default"] + calls[f"hotcore.{name}_python.default"]


def causal(kind: str, **fields: Any) -> Any:
    """A small causal LM model of transformers in training mode, of 2 layers and 101 tokens."""
    with without_broken_torchvision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", minversion="5")
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": 101}
        if kind == "GPT2":
            dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, **dropout}
        else:
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **heads}
        config = getattr(transformers, f"{kind}Config")(**{**ids, **sizes, **fields})
        name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        return getattr(transformers, name)(config).train()


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Symbolic(int):
    """A size that libhot is not asked for."""


def drawn(seed: int, count: int) -> list[Key]:
    """The keys of layers that draw after ``manual_seed(seed)``."""
    torch.manual_seed(seed)
    return [Key(0, int(torch.randint(2**63 - 1, (), dtype=torch.int64))) for _ in range(count)]


def conv1d(ins: int, outs: int) -> nn.Module:
    """A layer of transformers, whose weight is that of a linear layer transposed."""
    return imported("transformers.pytorch_utils").Conv1D(outs, ins)


def imported(name: str) -> Any:
    """A library that imports torchvision where it can. Without it the test is skipped."""
    with without_broken_torchvision():
        return pytest.importorskip(name)


def adapted(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """``model`` with random values in peft's adapters, of which B is zero at first."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator).mul_(0.1)
    return model


def gradients(model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> Any:
    torch.manual_seed(11)
    model.zero_grad()
    x = x.clone().requires_grad_()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def task_of(name: str, rng: np.random.Generator) -> tuple[nn.Module, models.Batch, models.Task]:
    """A small model of benchmarks/models.py with fresh random weights, and a batch."""
    task = models.TASKS[name]
    torch.manual_seed(int(rng.integers(2**31)))
    try:
        model = task.small.build()
    except ModuleNotFoundError as missing:
        if missing.name is None:  # an installed package that does not work
            raise
        pytest.skip(f"{task.title}: {missing}")
    batch = task.small.batch(torch.Generator().manual_seed(int(rng.integers(2**31))))
    return model.train(), batch, task


def gradient_of(model: nn.Module, batch: models.Batch, task: models.Task) -> torch.Tensor:
    model.zero_grad()
    loss = task.loss(model, batch)
    assert math.isfinite(loss.item())
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).double()
