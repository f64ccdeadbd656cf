"""The CUDA backend through Python: the CPU's bits, on the caller's stream, in the adapter."""

import copy
import subprocess
import sys
from typing import Any

import pytest
from support import refused

torch = pytest.importorskip("torch")

import hotcore  # noqa: E402  (after the skip: hotcore itself needs no torch)
from support_gpu import captured, same_bits  # noqa: E402

pytestmark = pytest.mark.cuda

CONFIGS = ("default", hotcore.HotConfig.recipe("accurate", forward="int8"))


def test_torch_loads_after_hotcore() -> None:
    # libhot must not export symbols to libraries that are loaded later.
    code = "import hotcore, torch; assert torch.ones(2, device='cuda').sum() == 2"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_adapter_equals_cpu(config: str | hotcore.HotConfig) -> None:
    import hotcore.torch as hot

    w, b, x, gy = (
        torch.randn(48, 32), torch.randn(48), torch.randn(2, 65, 32), torch.randn(2, 65, 48),
    )  # fmt: skip
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [t.clone().to(device).requires_grad_() for t in (x, w, b)]
        torch.manual_seed(3)
        hot.linear(*leaves, config).backward(gy.to(device))
        grads.append([leaf.grad for leaf in leaves])
    assert all(map(same_bits, grads[0][:2], grads[1]))
    assert torch.allclose(grads[0][2], grads[1][2].cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "shape", ((1, 1, 1), (33, 31, 65), (1027, 97, 130), (2048, 64, 96), (70, 1600, 1500)), ids=str
)
def test_scales_by_token_equal_cpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Whole and partial tiles of the product with a scale per token, as LQS chooses it."""
    import hotcore.torch as hot

    tokens, outs, ins = shape
    config = hotcore.HotConfig.recipe("paper", gw_scale="token")
    x, gy = torch.randn(tokens, ins).to(dtype), torch.randn(tokens, outs).to(dtype)
    w, grads = torch.randn(outs, ins).to(dtype), []
    for device in ("cpu", "cuda"):
        weight = w.clone().to(device).requires_grad_()
        torch.manual_seed(3)
        y = hot.linear(x.to(device), weight, None, config)
        y.backward(gy.to(device), retain_graph=True)
        grads.append(weight.grad.clone())
        torch.manual_seed(3)
        y.backward(gy.to(device))  # added to what is there
        grads.append(weight.grad)
    assert all(map(same_bits, grads[:2], grads[2:]))


@pytest.mark.parametrize("autocast", (None, torch.bfloat16, torch.float16))
def test_an_8_bit_forward_equals_cpu(autocast: torch.dtype | None) -> None:
    """Layers have the CPU's bits: eager, captured, and with a weight that is not trained."""
    import hotcore.torch as hot

    config = hot.HotConfig(forward="int8", forward_in_eval=True)
    layers = [(hot.HotLinear(200, 96, config=config), (2, 65, 200)),
              (hot.HotConv2d(200, 96, 1, stride=2, config=config), (2, 200, 9, 9))]  # fmt: skip
    for model, shape in layers:
        x, outputs = torch.randn(shape), []
        for device in ("cpu", "cuda"):
            on, there = model.to(device), x.to(device).requires_grad_()
            with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
                outputs.append(on(there))
                with torch.no_grad():
                    outputs.append(on.eval()(there))
                on.train().weight.requires_grad_(False)
                outputs += [on(there), on(there)]
            on.weight.requires_grad_(True)
        assert all(same_bits(outputs[0].detach(), y.detach()) for y in outputs)
        graph, y = captured(lambda model=model, there=there: model(there))
        graph.replay()
        assert same_bits(model(there).detach().cpu(), y.detach())


@pytest.mark.parametrize("bits", [8, 4])
def test_averages_of_frozen_codes_are_found(bits: Any) -> None:
    """Averaged codes make the next call fail. Equal bytes do not."""
    import hotcore.torch as hot

    model = torch.nn.Sequential(torch.nn.LayerNorm(200), torch.nn.Linear(200, 96)).cuda()
    hot.convert(model, hot.HotConfig(forward="int8"), lambda module, name: True)
    hot.freeze(model, bits)
    ema, x = copy.deepcopy(model), torch.randn(33, 200, device="cuda")
    y, codes = model(x).detach(), model[1].weight_codes.detach()
    with torch.no_grad():
        ema[1].weight_codes.copy_(codes)
        assert torch.equal(ema(x), y)
        ema[1].weight_codes.copy_((0.9 * codes + 0.1 * codes).to(torch.uint8))
    for call in (ema, torch.compile(ema)):
        refused(call, "weight_codes: these bytes are not codes", RuntimeError, x)
    for write in (lambda w: w[0].zero_(), lambda w: torch._foreach_mul_([w], 2)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="the weight is frozen in codes"):
            write(model[1].weight)
    refused(lambda: torch.from_dlpack(model[1].weight), "__dlpack__", RuntimeError)
    graph, still = torch.cuda.CUDAGraph(), copy.deepcopy(model)  # codes that were never read
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = still(x)
    graph.replay()
    assert torch.equal(captured, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            model(x).sum().backward()  # codes are checked only at the first read
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", ("default", "accurate"))
@pytest.mark.parametrize("shape", ((3, 67, 768), (2, 65, 3072), (130, 704), (17000, 128)), ids=str)
def test_layers_of_one_x_equal_cpu(recipe: str, shape: tuple[int, ...]) -> None:
    """q, k and v with an 8-bit forward quantise and save x once, from one read."""
    import hotcore.torch as hot

    config = hot.HotConfig.recipe(recipe, forward="int8")
    parts = torch.nn.ModuleList(hot.HotLinear(shape[-1], 48, config=config) for _ in range(3))
    parts.bfloat16()
    x, gy = torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], 48).bfloat16()
    runs = []
    for device in ("cpu", "cuda"):
        on = copy.deepcopy(parts).to(device)
        torch.manual_seed(4)
        ys = [part(x.to(device).requires_grad_() + 0) for part in on]  # in sequence
        source = x.to(device).requires_grad_() + 0
        ys += [part(source) for part in on]
        torch.autograd.backward(ys, [gy.to(device)] * len(ys))
        runs.append([*(y.detach() for y in ys), *(part.weight.grad for part in on)])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("forward", ("plain", "int8"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_frozen_weights_equal_cpu(dtype: torch.dtype, forward: str, bits: Any) -> None:
    """Frozen layers on both devices agree: codes, dequantised weight, y, g_x, also captured."""
    import hotcore.torch as hot

    config = hot.HotConfig(forward=forward)
    plain = torch.nn.Sequential(torch.nn.Linear(200, 96), torch.nn.Linear(96, 128)).to(dtype)
    hot.convert(plain, config, lambda module, name: True)
    on_cpu, moved, there = (copy.deepcopy(plain) for _ in range(3))
    for model in (on_cpu, moved, there.cuda()):
        assert len(hot.freeze(model, bits).freeze_report.layers) == 2
    moved.cuda()
    x = torch.randn(2, 65, 200, dtype=dtype)
    runs = []
    for model in (on_cpu, moved, there):
        torch.manual_seed(4)
        leaf = x.clone().to(model[0].weight.device).requires_grad_()
        y = model(leaf)
        y.float().square().sum().backward()
        values = [model[0].weight_codes, model[0].weight.dequantized(), leaf.grad]
        # y of a plain forward is torch's, and g_x follows from it.
        runs.append([*values, y.detach()] if forward == "int8" else values[:2])
    assert all(same_bits(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    state = there.state_dict()
    assert state["0.weight"].is_cpu and same_bits(state["0.weight"], runs[0][1])
    on_cpu.load_state_dict(plain.state_dict())
    there.load_state_dict(plain.state_dict())
    assert same_bits(on_cpu[0].weight_codes, there[0].weight_codes)
    leaf = x.cuda().requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        """Use autograd.grad, because a .grad belongs to the stream that created it."""
        y = there(leaf)
        return y, torch.autograd.grad(y.float().square().sum(), leaf)[0]

    graph, (y, gx) = captured(step)
    grads = []
    for _ in range(2):
        graph.replay()
        grads.append(gx.clone())
    assert torch.allclose(y, there(leaf)) and not torch.equal(*grads)  # replays round differently
    assert torch.nn.functional.cosine_similarity(*(g.float().flatten() for g in grads), 0) > 0.99
