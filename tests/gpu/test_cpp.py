"""C and C++ on a GPU: a consumer of the package and of a static libhot, cpp_trainer, the C ABI."""

import ctypes
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import hotcore  # noqa: E402  (after the skip: hotcore itself needs no torch)
from c_api import CONSTANTS, DTYPES, CApi, make  # noqa: E402
from cpp_projects import CONSUMER, TRAINER, build, check_curves, curves, run  # noqa: E402
from hotcore import Key, _core  # noqa: E402
from support_gpu import RECIPES  # noqa: E402

pytestmark = pytest.mark.cuda
ARCHS = _core.cuda_architectures()


def test_consumer_of_the_package(tmp_path: Path) -> None:
    folder = build(CONSUMER, tmp_path, CONSUMER_CUDA="ON")
    assert "GPU: g_x and g_w as on the CPU" in run(folder / "consumer", "--cuda")
    run(folder / "consumer_c")


def test_consumer_of_a_static_library(tmp_path: Path) -> None:
    # Builds libhot inside the consumer, without CUTLASS, whose kernels take minutes.
    folder = build(
        CONSUMER, tmp_path / "build", HOTCORE_FROM="subdirectory", HOT_SHARED="OFF",
        HOT_INSTALL="ON", HOT_CUDA="ON", HOT_CUTLASS="OFF", CMAKE_CUDA_ARCHITECTURES=ARCHS,
        CONSUMER_CUDA="ON",
    )  # fmt: skip
    assert "GPU: g_x and g_w as on the CPU" in run(folder / "consumer", "--cuda")
    # Also builds from a prefix, whose package must list the dependencies of a static libhot.
    prefix = tmp_path / "prefix"
    run("cmake", "--install", folder, "--prefix", prefix, "--component", "devel")
    other = build(CONSUMER, tmp_path / "other", CONSUMER_CUDA="ON", CMAKE_PREFIX_PATH=prefix)
    assert "GPU: g_x and g_w as on the CPU" in run(other / "consumer", "--cuda")


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    digits = tmp_path / "digits.bin"
    run(sys.executable, TRAINER / "export_digits.py", digits)
    folder = build(TRAINER, tmp_path / "build", TRAINER_CUDA="ON", CMAKE_CUDA_ARCHITECTURES=ARCHS)
    program = folder / "cpp_trainer"
    for recipe in ("default", "fast"):
        text = run(program, digits, "--epochs", 8, "--device", "cuda", "--recipe", recipe)
        assert "on cuda" in text
        check_curves(curves(text))
        on_cpu = curves(run(program, digits, "--epochs", 8, "--recipe", recipe))
        # fp32 sums have another order; integers are equal.
        assert abs(curves(text)[0][3] - on_cpu[0][3]) < 0.01


def view(value: torch.Tensor) -> ctypes.Structure:
    """Return the view of a contiguous tensor on CUDA device 0."""
    tensor = make("hot_tensor", data=value.data_ptr(), ndim=value.dim(), device_index=0)
    tensor.device_type = CONSTANTS["HOT_CUDA"]
    tensor.dtype = CONSTANTS["HOT_" + DTYPES[str(value.dtype).removeprefix("torch.")]]
    for axis in range(value.dim()):
        tensor.shape[axis], tensor.stride[axis] = value.shape[axis], value.stride(axis)
    return tensor


def on_cuda(key: Key) -> tuple[CApi, ctypes.c_void_p]:
    """Return the C ABI, and a context of the current stream with a key."""
    api, context = CApi(), ctypes.c_void_p()
    stream = torch.cuda.current_stream().cuda_stream
    api.call("hot_context_cuda", 0, stream, ctypes.byref(context))
    api.call("hot_context_set_key", context, *key)
    return api, context


@pytest.mark.parametrize("recipe", RECIPES)
def test_c_abi(recipe: str) -> None:
    tokens, outs, ins, key = 200, 64, 96, Key(1, 2, 3)
    shapes = ((tokens, outs), (outs, ins), (tokens, ins))
    gy, w, x = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    model = hotcore.compress_activation(x, recipe, key=key)
    need = ("gx", "gw", "gb")
    expected = hotcore.backward_linear(gy, w, model, need=need, key=key)

    api, context = on_cuda(key)
    spec, layout, saved = api.spec(recipe), make("hot_saved_layout"), make("hot_saved")
    api.call("hot_supported", context, tokens, outs, ins, spec)
    api.call("hot_saved_layout_of", tokens, ins, spec, layout)
    forward = api.number("hot_compress_activation_workspace", context, tokens, ins, spec)
    backward = api.number("hot_backward_linear_workspace", context, tokens, outs, ins, spec, 1, 1)
    saved_bytes = torch.empty(layout.bytes, dtype=torch.uint8, device="cuda")
    scratch = torch.empty(max(forward, backward, 1), dtype=torch.uint8, device="cuda")
    api.call(
        *("hot_compress_activation", context, view(x), spec, saved_bytes.data_ptr(), layout.bytes),
        *(scratch.data_ptr(), forward, saved),
    )
    assert torch.equal(saved_bytes, model.data)

    out = {name: torch.empty_like(value) for name, value in zip(need, expected, strict=True)}
    views = {name: view(value) for name, value in out.items()}
    addresses = {name: ctypes.addressof(one) for name, one in views.items()}
    gradients = make("hot_gradients", **addresses)
    api.call(
        *("hot_backward_linear", context, view(gy), view(w), saved, spec, gradients),
        *(scratch.data_ptr(), backward),
    )
    torch.cuda.synchronize()
    for name, wanted in zip(need, expected, strict=True):
        assert torch.equal(out[name], wanted), name
    api.lib.hot_context_destroy(context)
    api.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_c_abi_of_a_quantised_input(recipe: str) -> None:
    tokens, outs, ins, key = 200, 64, 1024, Key(1, 2, 3)
    x, w = (torch.randn(n, ins, device="cuda").bfloat16() for n in (tokens, outs))
    codes, model = hotcore.quantize_forward_input(x, recipe, keep=True, key=key)
    expected = hotcore.forward_linear(codes, w)

    api, context = on_cuda(key)
    spec, forward, layout = api.spec(recipe), api.forward_spec(64), make("hot_saved_layout")
    api.call("hot_saved_layout_of", tokens, ins, spec, layout)
    count = api.number("hot_forward_input_bytes", tokens, ins, forward)
    keeping = api.number("hot_compress_activation_workspace", context, tokens, ins, spec)
    sizes = tokens, outs, ins, forward, 0
    product = api.number("hot_forward_linear_input_workspace", context, *sizes)
    rooms = (count, layout.bytes, max(keeping, product, 1))
    data, saved_bytes, scratch = (torch.empty(n, dtype=torch.uint8, device="cuda") for n in rooms)
    handle, saved = make("hot_input"), make("hot_saved")
    api.call(
        *("hot_quantize_forward_input", context, view(x), forward, data.data_ptr(), count, handle),
        *(spec, saved_bytes.data_ptr(), layout.bytes, scratch.data_ptr(), keeping, saved),
    )
    y = torch.empty_like(expected)
    api.call(
        *("hot_forward_linear_input", context, handle, view(w), None, None, forward, view(y)),
        *(scratch.data_ptr(), product),
    )
    torch.cuda.synchronize()
    wanted = codes.data, model.data, expected
    assert all(map(torch.equal, (data, saved_bytes, y), wanted))
    api.lib.hot_context_destroy(context)
    api.close()
