"""Arrays in and out: results have the framework, dtype and layout of the inputs."""

import warnings
from pathlib import Path

import hotcore
import numpy as np
import pytest
from hotcore import _core, arrays
from support import FLOATS, array, data, equal_bits, numpy_of, refused, torch

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


class Foreign:
    """Array of an unknown framework, with DLPack only."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: object) -> object:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Namespaced(Foreign):
    """Array of an unknown framework with an array API namespace, like JAX's."""

    def __array_namespace__(self) -> type["Namespaced"]:
        return Namespaced

    @staticmethod
    def from_dlpack(values: np.ndarray) -> "Namespaced":
        return Namespaced(values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_kind_and_dtype_out(rng: np.random.Generator, dtype: str) -> None:
    x = array(data(rng, (3, 32)), dtype)
    out = hotcore.fwht(x)
    assert (type(out), out.dtype, out.shape) == (type(x), x.dtype, x.shape)


def test_any_dlpack_array(rng: np.random.Generator) -> None:
    x = data(rng, (4, 16))
    out = hotcore.fwht(Foreign(x))
    assert isinstance(out, np.ndarray)
    equal_bits(out, hotcore.fwht(x))
    back = hotcore.fwht(Namespaced(x))
    assert isinstance(back, Namespaced)
    equal_bits(back.values, hotcore.fwht(x))


@needs_torch
@pytest.mark.skipif(torch is not None and torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_array_without_cuda() -> None:
    class OnCuda(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(NotImplementedError, match="x: torch reads a OnCuda .* sees no CUDA device"):
        hotcore.fwht(OnCuda(np.ones((4, 16), np.float32)))


def test_any_dlpack_array_through_a_layer(rng: np.random.Generator) -> None:
    gy, w, x = data(rng, (33, 20)), data(rng, (20, 24)), data(rng, (33, 24))
    expected = hotcore.backward_linear(gy, w, x, config="fast", key=2)
    saved = hotcore.compress_activation(Namespaced(x), "fast", key=2)
    assert isinstance(saved.data, Namespaced)
    got = hotcore.backward_linear(Namespaced(gy), Namespaced(w), saved)
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        assert isinstance(ours, Namespaced)
        equal_bits(ours.values, theirs)
    back = hotcore.decompress_activation(hotcore.compress_activation(Namespaced(x), key=2), 5, 30)
    assert isinstance(back, Namespaced)
    kept = hotcore.compress_activation(x, key=2)
    equal_bits(back.values, hotcore.decompress_activation(kept, 5, 30))


@pytest.mark.parametrize("kind", [Foreign, Namespaced])
def test_only_known_frameworks_are_written(kind: type[Foreign]) -> None:
    x = np.ones((4, 16), np.float32)
    with pytest.raises(ValueError, match="out: only NumPy, torch and CuPy arrays can be written"):
        hotcore.fwht(kind(x), out=kind(x.copy()))


@needs_torch
def test_capsules(rng: np.random.Generator) -> None:
    x = torch.from_numpy(data(rng, (4, 16)))
    out = torch.empty_like(x)
    context = _core.CoreContext(1)
    to_dlpack = torch.utils.dlpack.to_dlpack
    _core.fwht(context, to_dlpack(x), -1, 16, to_dlpack(out))
    equal_bits(out, hotcore.fwht(x))
    used = to_dlpack(x)
    _core.fwht(context, used, -1, 16, to_dlpack(out))
    with pytest.raises(TypeError):  # a capsule works once
        _core.fwht(context, used, -1, 16, to_dlpack(out))


def test_a_file_mapped_read_only(rng: np.random.Generator, tmp_path: Path) -> None:
    x = data(rng, (4, 32))
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", x.dtype, "r", shape=x.shape)
    equal_bits(hotcore.fwht(mapped), hotcore.fwht(x))
    refused(lambda: hotcore.fwht(x, out=mapped), "out: the array is read-only")


def test_threads_and_isa_of_the_process() -> None:
    before = hotcore.num_threads()
    settings = (3, "plain", (3, "plain")), (0, None, (before, _core.best_isa()))
    for threads, isa, expected in settings:
        hotcore.set_num_threads(threads)
        hotcore.set_isa(isa)
        assert (hotcore.num_threads(), hotcore.isa()) == expected


def test_version() -> None:
    assert hotcore.__version__ == _core.version()
    assert hotcore.__version__.count(".") == 2
    assert _core.built_with_cuda() == bool(_core.cuda_architectures())


def test_dtype_names() -> None:
    names = [("float16", "float16"), (np.float32, "float32"), (np.dtype("float16"), "float16")]
    for given, name in names + ([(torch.bfloat16, "bfloat16")] if torch is not None else []):
        assert arrays.dtype_name(given, "dtype", FLOATS) == name
    refused(lambda: arrays.dtype_name(np.float64, "dtype", FLOATS), "dtype: ")


@needs_torch
def test_requires_grad_is_not_dropped_silently() -> None:
    x = torch.zeros(16, requires_grad=True)
    refused(lambda: hotcore.fwht(x), "x: requires grad")
    with torch.no_grad():
        assert numpy_of(hotcore.fwht(x)).shape == (16,)
    assert hotcore.fwht(x.detach()).shape == (16,)


@needs_torch
def test_autograd_sees_that_an_output_was_written() -> None:
    """Writing to ``out`` invalidates autograd's saved tensor, as with torch's `out=`."""
    x, gy, w = torch.ones(4, 16), torch.ones(4, 8), torch.ones(8, 16)
    q, scale = torch.ones(4, 16, dtype=torch.int8), torch.ones(4)
    saved = hotcore.compress_activation(x)
    writes = {
        "fwht": (x, lambda out: hotcore.fwht(x, out=out)),
        "hla": (torch.ones(8, 16), lambda out: hotcore.hla(x, out=out)),
        "gemm_int8": (torch.ones(4, 4), lambda out: hotcore.gemm_int8(q, q, scale, scale, out=out)),
        "decompress": (x, lambda out: hotcore.decompress_activation(saved, out=out)),
        "forward_linear": (gy, lambda out: hotcore.forward_linear(x, w, out=out)),
        "gw": (w, lambda out: hotcore.backward_linear(gy, w, saved, need="gw", gw_out=out)),
        "gb": (gy[0], lambda out: hotcore.backward_linear(gy, w, saved, need="gb", gb_out=out)),
    }
    for name, (like, write) in writes.items():
        leaf = torch.ones_like(like, requires_grad=True)
        kept = leaf * 2
        loss = (kept * kept).sum()
        write(kept.detach())  # has the memory and the version of kept
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
            pytest.fail(f"{name}: a gradient of {leaf.grad}")
        with torch.inference_mode():
            of_inference = torch.ones_like(like)
        write(of_inference)  # has no version


@needs_torch
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tensors_of_torchs_transformations_are_refused() -> None:
    x = torch.ones(4, 16)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(ValueError, match="x: has a forward-mode tangent"):
        hotcore.fwht(forward_ad.make_dual(x, x))
    refused(lambda: torch.func.jvp(hotcore.fwht, (x,), (x,)), "x: has a forward-mode tangent")
    refused(lambda: torch.func.grad(lambda x: hotcore.fwht(x).sum())(x), "x: requires grad")
    refused(lambda: torch.func.vmap(hotcore.fwht)(x[None]), "x: .*storage")
    with pytest.raises(TypeError, match="x: traced by torch.jit"):
        torch.jit.trace(hotcore.fwht, (x,), check_trace=False)


@needs_torch
def test_nested_tensors_are_refused() -> None:
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype"
            nested = torch.nested.nested_tensor([torch.ones(n, 16) for n in (4, 3)], layout=layout)
        refused(hotcore.fwht, "x: .*expected a strided tensor", ValueError, nested)
