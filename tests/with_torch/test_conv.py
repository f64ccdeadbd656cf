"""hot.conv2d and HotConv2d: nn.Conv2d's forward, HOT's gradients, and only x's pixels kept."""

import copy
import itertools

import hotcore
import hotcore.torch as hot
import numpy as np
import pytest
import torch
from hotcore.config import RECIPES, HotConfig
from hotcore.torch.layers.modules import is_pointwise
from hotcore.torch.ops import codes, conv, core
from support import nbytes, saved_tensors
from torch import nn
from torch_graphs import Graphs, drawn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = ("zeros", "reflect", "replicate", "circular")
FORMATS = {False: torch.contiguous_format, True: torch.channels_last}
"""Memory formats by whether the channels are last."""

pytestmark = pytest.mark.usefixtures("seeded")


def any_conv(rng: np.random.Generator, mode: str, padding: str) -> tuple[nn.Conv2d, torch.Tensor]:
    """A plain convolution and an x that fits it."""
    kernel = (int(rng.integers(1, 5)), int(rng.integers(1, 5)))
    dilation = (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    stride = (1, 1) if padding == "same" else tuple(int(s) for s in rng.integers(1, 4, 2))
    groups = int(rng.choice([1, 1, 2, 5]))
    inputs, outputs = (groups * int(c) for c in rng.integers(1, 40 // groups, 2))
    plain = nn.Conv2d(
        *(inputs, outputs, kernel, stride),
        padding=padding if padding != "pixels" else tuple(int(p) for p in rng.integers(0, 3, 2)),
        dilation=dilation,
        groups=groups,
        bias=bool(rng.random() < 0.7),
        padding_mode=mode,
    )
    height, width = (int(side) for side in rng.integers(8, 20, 2))
    x = torch.randn(int(rng.integers(1, 5)), inputs, height, width)
    x = x.contiguous(memory_format=FORMATS[bool(rng.random() < 0.5)])
    return plain.to(memory_format=FORMATS[bool(rng.random() < 0.5)]), x.requires_grad_()


def grads(module: nn.Module, x: torch.Tensor, gy: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(module(x), (x, *module.parameters()), gy))


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("padding", ["same", "valid", "pixels"])
@pytest.mark.parametrize("mode", MODES)
def test_random_shapes(rng: np.random.Generator, mode: str, padding: str) -> None:
    plain, x = any_conv(rng, mode, padding)
    module = hot.HotConv2d.from_conv(copy.deepcopy(plain), "accurate")
    y = module(x)
    assert torch.equal(y, plain(x)) and y.stride() == plain(x).stride()
    assert torch.equal(module.eval()(x), plain(x))
    module.train()
    gy = torch.randn_like(y)
    got, exact = grads(module, x, gy), grads(plain, x, gy)
    assert got[0].stride() == x.stride()
    # INT8 operands, rounded twice: errors of a step of 1/127 of the largest value, at random.
    for ours, theirs in zip(got[:2], exact[:2], strict=True):
        assert ours.shape == theirs.shape and relative(ours, theirs) < 0.05, plain
    if not is_pointwise(plain):  # torch's own backward, and g_x reads nothing of x
        assert torch.equal(got[0], exact[0])
    if plain.bias is not None:
        assert torch.allclose(got[2], exact[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize(
    ("mode", "config", "kernel"),
    [*((mode, HotConfig(), (3, 2)) for mode in MODES), ("zeros", HotConfig(), (1, 1))],
)
def test_torch_s_backward_of_the_restored_x(
    mode: str, config: HotConfig, kernel: tuple[int, int], groups: int, dtype: torch.dtype
) -> None:
    """g_x has the plain layer's bits; g_w and g_b are the plain layer's, given the restored x."""
    options = {"padding": (1, 2), "dilation": (1, 2), "groups": groups, "padding_mode": mode}
    for x_last, weight_last in itertools.product((False, True), repeat=2):
        plain = nn.Conv2d(16, 32, kernel, (2, 1), **options).to(dtype)
        plain = plain.to(memory_format=FORMATS[weight_last])
        x = torch.randn(3, 16, 9, 10, dtype=dtype).contiguous(memory_format=FORMATS[x_last])
        x.requires_grad_()
        module = hot.HotConv2d.from_conv(copy.deepcopy(plain), config)
        torch.manual_seed(4)
        y = module(x)
        gy = torch.randn_like(y)
        gx, gw, gb = torch.autograd.grad(y, (x, *module.parameters()), gy)
        torch.manual_seed(4)
        key = hotcore.Key(0, int(core.seed_for(x)))
        rows = x.detach().permute(0, 2, 3, 1).reshape(-1, 16)
        saved = codes.compress(rows, module.config, key)
        back = codes.decompress(saved, 3 * 9 * 10, 16, module.config, key, dtype)
        back = back.view(3, 9, 10, 16).permute(0, 3, 1, 2)
        restored = (back if x_last else back.contiguous()).requires_grad_()
        exact = torch.autograd.grad(plain(x), x, gy)[0]
        expected = torch.autograd.grad(plain(restored), (restored, *plain.parameters()), gy)
        for ours, theirs in zip((gx, gx, gw, gb), (exact, *expected), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        # Some gradients alone, where nothing is restored or no weight is kept.
        assert torch.equal(torch.autograd.grad(module(x), x, gy)[0], gx)
        assert torch.equal(torch.autograd.grad(module(x), module.bias, gy)[0], gb)
        torch.manual_seed(4)
        (alone,) = torch.autograd.grad(module(x.detach()), module.weight, gy)
        (expected,) = torch.autograd.grad(plain(restored.detach()), plain.weight, gy)
        assert torch.equal(alone, expected)
        module.weight.requires_grad_(False)
        with saved_tensors() as kept:
            y = module(x)
        assert all(t.dtype != torch.uint8 and t.data_ptr() != x.data_ptr() for t in kept)
        assert torch.equal(torch.autograd.grad(y, x, gy)[0], gx)


def test_under_autocast() -> None:
    """Backward is in autocast's dtype, and padded pixels add up in x's, as with plain autocast."""
    for mode, last, inside in itertools.product(MODES, (False, True), (False, True)):
        plain = nn.Conv2d(16, 24, 3, padding=1, padding_mode=mode)
        x = torch.randn(2, 16, 9, 10).contiguous(memory_format=FORMATS[last]).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(x)
            y = (module := hot.HotConv2d.from_conv(copy.deepcopy(plain), "accurate"))(x)
        assert torch.equal(y, expected) and y.dtype == torch.bfloat16
        gy = torch.randn_like(y)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):  # also where a loop has it so
            got = torch.autograd.grad(y, (x, *module.parameters()), gy)
            exact = torch.autograd.grad(expected, (x, *plain.parameters()), gy)
        assert torch.equal(got[0], exact[0]) and torch.equal(got[2], exact[2])
        assert got[1].dtype == torch.float32 and relative(got[1], exact[1]) < 0.02


@pytest.mark.parametrize("stride", [1, 2])
def test_paper_takes_tiles_of_output_pixels(stride: int) -> None:
    # The layer's own grid replaces the configuration's token grid.
    x, gy = torch.randn(3, 32, 12, 20), torch.randn(3, 24, 12 // stride, 20 // stride)
    config = HotConfig.recipe("paper", token_grid=(5, 5), prefix_tokens=1)
    module = hot.HotConv2d(32, 24, 1, stride, bias=False, config=config)
    torch.manual_seed(8)
    (gw,) = torch.autograd.grad(module(x), module.weight, gy)
    (key,) = drawn(8, 1)
    rows = gy.permute(0, 2, 3, 1).reshape(-1, 24)
    pixels = x[:, :, ::stride, ::stride].permute(0, 2, 3, 1).reshape(-1, 32)
    config = HotConfig.recipe("paper", token_grid=(12 // stride, 20 // stride))
    expected = hotcore.backward_linear(rows, None, pixels, config=config, need="gw", key=key)
    assert torch.equal(gw[:, :, 0, 0], expected.gw)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("config", ["default", "fast"])
@pytest.mark.parametrize("size", [(3, 9, 6), (1, 2, 3)])
def test_pointwise_is_a_linear_layer_over_pixels(
    config: str, stride: tuple[int, int], channels_last: bool, size: tuple[int, int, int]
) -> None:
    plain = nn.Conv2d(24, 40, 1, stride)
    layer = hot.HotLinear(24, 40, config=config)
    layer.load_state_dict({"weight": plain.weight.detach()[:, :, 0, 0], "bias": plain.bias})
    x = torch.randn(size[0], 24, *size[1:]).contiguous(memory_format=FORMATS[channels_last])
    module = hot.HotConv2d.from_conv(plain.to(memory_format=FORMATS[channels_last]), config)
    gy = torch.randn_like(module(x))
    torch.manual_seed(3)
    got = grads(module, x.requires_grad_(), gy)
    torch.manual_seed(3)
    seen = x.detach()[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1).requires_grad_()
    expected = grads(layer, seen, gy.permute(0, 2, 3, 1))
    gx = torch.zeros_like(x)
    gx[:, :, :: stride[0], :: stride[1]] = expected[0].permute(0, 3, 1, 2)
    assert torch.equal(got[0], gx)
    assert torch.equal(got[1][:, :, 0, 0], expected[1]) and torch.equal(got[2], expected[2])


def test_gradients_keep_the_parameters_layout() -> None:
    # Also before AccumulateGrad: DDP copies gradients of another layout, and warns.
    for fmt in (torch.contiguous_format, torch.channels_last):
        for kernel in (1, 3):
            module = hot.HotConv2d(8, 16, kernel).to(memory_format=fmt)
            (gw,) = torch.autograd.grad(module(torch.randn(2, 8, 10, 12)).sum(), module.weight)
            assert gw.stride() == module.weight.stride()


@pytest.mark.parametrize(
    ("recipe", "kernel", "bound"),
    [
        ("default", 1, 0.54),
        ("default", 3, 0.54),
        ("fast", 1, 0.505),
        ("fast", 3, 0.54),
        ("paper", 3, 0.54),
        ("accurate", 3, 1.01),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_bytes_saved(recipe: str, kernel: int, bound: float, channels_last: bool) -> None:
    plain = nn.Conv2d(64, 32, kernel, padding=kernel // 2)
    module = hot.HotConv2d.from_conv(copy.deepcopy(plain), recipe)
    x = torch.randn(4, 64, 28, 28, requires_grad=True) * 1
    x = x.contiguous(memory_format=FORMATS[channels_last])
    with saved_tensors() as kept:
        module(x)
    assert nbytes(kept) / x.numel() <= bound
    assert sorted(tensor.dtype for tensor in kept if tensor.ndim) == [torch.uint8]
    with saved_tensors() as plainly:
        plain(x)
    assert nbytes(plainly) >= 4 * x.numel()


def test_a_stride_of_1x1_saves_what_it_visits() -> None:
    module = hot.HotConv2d(64, 32, 1, stride=2)
    x = torch.randn(4, 64, 32, 32, requires_grad=True) * 1
    with saved_tensors() as kept:
        module(x)
    assert nbytes(kept) <= 0.54 * x.numel() / 4


def test_compiled_layers_with_one_x_keep_it_once() -> None:
    """Whatever their kernels and strides, where they keep x whole."""
    sizes: list[dict[str, int]] = [{"kernel_size": 3}, {"kernel_size": 5, "stride": 2}]
    sizes.append({"kernel_size": 3, "padding": 1})
    layers = nn.ModuleList(hot.HotConv2d(16, 16, **size) for size in sizes)

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        return torch.stack([layer(x).sum() for layer in layers])

    x = torch.randn(2, 16, 12, 12, requires_grad=True)
    graphs = Graphs().run(call, x)
    assert graphs.count("forward", "compress") == 1
    assert graphs.count("forward", "decompress_activation") == 0
    assert graphs.count("backward", "decompress_activation") == 1
    assert graphs.calls["backward"]["aten.convolution_backward.default"] == 3
    assert sum(t.nbytes for t in graphs.kept if t.dtype == torch.uint8) <= 0.6 * x.numel()


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "recipe"), [(1, "paper"), (3, "default")])
@pytest.mark.parametrize("channels_last", [False, True])
def test_operators(kernel: int, recipe: str, channels_last: bool) -> None:
    x = torch.randn(2, 8, 10, 12).contiguous(memory_format=FORMATS[channels_last])
    weight, seed = torch.randn(16, 8, kernel, kernel), torch.tensor(11)
    window = ((kernel, kernel), (2, 1), (0, 0, 0, 0), (1, 1), "zeros", 1)
    config = HotConfig.recipe(recipe).json
    drawn = ("test_schema", "test_faketensor")  # random: the values differ from run to run
    for keep in (False, True):
        call = (x, x.bfloat16(), config, keep, *window)
        torch.library.opcheck(torch.ops.hotcore.kept_pixels_of, call, test_utils=drawn)
    rows, storage = conv._rows(x, config, conv.Window.of(*window))
    saved, _ = codes.compress_activation(rows, seed, storage)
    for bias, kept in ((None, saved), (torch.randn(16), None)):
        call = (x, weight, bias, kept, seed, config, *window)
        torch.library.opcheck(torch.ops.hotcore.conv2d, call)
        torch.library.opcheck(torch.ops.hotcore.convolution, call)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("recipe", "kernel"), [("fast", 1), ("paper", 1), *((recipe, 3) for recipe in RECIPES)]
)
def test_cuda_equals_cpu(recipe: str, dtype: torch.dtype, kernel: int) -> None:
    """The same codes, and of products of integers the same bits."""
    plain = nn.Conv2d(24, 40, kernel, (2, 1), kernel // 2, bias=False).to(dtype)
    x, gy = torch.randn(5, 24, 18, 14).to(dtype), torch.randn(5, 40, 9, 14).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        for channels_last in (False, True):
            fmt = FORMATS[channels_last]
            ours, there, g = (t.to(device, memory_format=fmt) for t in (plain, x.clone(), gy))
            module = hot.HotConv2d.from_conv(ours, recipe)
            torch.manual_seed(11)
            with saved_tensors() as kept:
                y = module(there.requires_grad_())
            grads = torch.autograd.grad(y, (there, module.weight), g)
            codes = [t.cpu() for t in kept if t.dtype == torch.uint8]
            results.append((*codes, *(t.cpu() for t in grads)))
    products = kernel == 1
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        for a, b in zip(results[0][1:], other[1:], strict=True):
            assert torch.equal(a, b) if products else relative(a.float(), b.float()) < 0.01


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_cuda(mode: str) -> None:
    plain = nn.Conv2d(16, 24, 3, padding=1, padding_mode=mode).cuda()
    module = hot.HotConv2d.from_conv(copy.deepcopy(plain), "accurate")
    x = torch.randn(3, 16, 12, 10, device="cuda", requires_grad=True)
    assert torch.equal(module(x), plain(x))
    gy = torch.randn(3, 24, 12, 10, device="cuda")
    for ours, theirs in zip(grads(module, x, gy), grads(plain, x, gy), strict=True):
        assert relative(ours, theirs) < 0.05


def test_bad_arguments() -> None:
    x, weight = torch.randn(2, 8, 10, 12, requires_grad=True), torch.randn(16, 8, 3, 3)
    for arguments, message in (
        ((x[0, 0], weight), r"x: shape \(10, 12\)"),
        ((x, weight[:, :4]), r"weight: shape \(16, 4, 3, 3\); expected .*1 groups"),
        ((x, weight, None, 1, 0, 1, 2), r"weight: shape \(16, 8, 3, 3\); expected .*C / 2, kh"),
        ((x, weight, None, 2, "same"), r"padding: 'same' with stride \(2, 2\); expected stride 1"),
        ((x, weight, None, 1, "full"), "padding: 'full' is not a number, 'same' or 'valid'"),
        ((x, weight, None, (1, 2, 3)), r"stride: \(1, 2, 3\); expected one number or"),
        ((x, weight, None, 1, 0, 1, 1, "mirror"), "padding_mode: 'mirror' is not one of 'zeros'"),
        ((x.double(), weight.double()), "x: dtype float64; expected float32"),
    ):
        with pytest.raises(ValueError, match=message):
            hot.conv2d(*arguments)
