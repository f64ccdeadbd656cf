"""Layers with the same x share one compressed x and its 8-bit codes, while equal noise may be."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hotcore
import hotcore.torch as hot
import pytest
import torch
from hotcore.config import HotConfig, Key
from hotcore.torch.ops import sharing
from support import cosine, equal_bits, refused
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_graphs import Calls, drawn

pytestmark = pytest.mark.usefixtures("seeded")
WIDTH = 64
INT8 = HotConfig.recipe("accurate", forward="int8")
both = pytest.mark.parametrize("recipe", ["default", INT8], ids=str)


def layers(count: int = 3, recipe: Any = "default") -> list[hot.HotLinear]:
    return [hot.HotLinear(WIDTH, 48, config=recipe) for _ in range(count)]


def data(tokens: int = 96) -> torch.Tensor:
    return torch.randn(tokens, WIDTH)


def images(tokens: int = 96) -> torch.Tensor:
    """An activation: only those are shared."""
    return data(tokens).requires_grad_() + 0


def pixels() -> torch.Tensor:
    return torch.randn(2, WIDTH, 8, 8).requires_grad_() + 0


def kept(*outputs: torch.Tensor) -> list[torch.Tensor]:
    """The compressed x that each output's node keeps."""
    found = []
    for y in outputs:
        (saved,) = (t for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8)
        found.append(saved)
    return found


def buffers(*outputs: torch.Tensor) -> int:
    """How many different ones those are."""
    return len({saved.data_ptr() for saved in kept(*outputs)})


def quantized() -> torch.Tensor | None:
    """The 8-bit codes of the x that is remembered."""
    entry = sharing.threads.cache.entry
    return None if entry is None or entry.quantized is None else entry.quantized[1]


# ----------------------------------------------------------------------------------- What is shared


@both
def test_one_buffer_and_the_gradients_of_both_keys(recipe: Any) -> None:
    x, gy = images(97), torch.randn(97, 48)
    first, *others = drawn(5, 4)
    modules = layers(4, recipe)
    torch.manual_seed(5)
    outputs = [module(x) for module in modules]
    assert buffers(*outputs) == 1
    assert (quantized() is not None) == (recipe is INT8)
    saved = hotcore.compress_activation(x.detach(), recipe, key=first)
    for module, y, own in zip(modules, outputs, (first, *others), strict=True):
        equal_bits(kept(y)[0], saved.data)
        weight, bias = module.weight.detach(), module.bias.detach()
        if recipe is INT8:
            equal_bits(y.detach(), hotcore.forward_linear(x.detach(), weight, bias, config=recipe))
        got = torch.autograd.grad(y, (x, module.weight, module.bias), gy)
        need = ("gx", "gw", "gb")
        expected = hotcore.backward_linear(gy, weight, saved, need=need, key=own)
        for ours, theirs in zip(got, expected, strict=True):
            equal_bits(ours, theirs)


def test_other_names_of_one_x() -> None:
    """A DTensor's part is a new tensor for every layer; what has other values is not shared."""
    x, (q, k) = images(), layers(2)
    assert buffers(q(x), k(x.view_as(x))) == 1
    assert buffers(q(x.view_as(x)), k(x.view_as(x))) == 1
    for other in (torch._neg_view(x), x[1:], x.view(2, 48, WIDTH)):
        assert buffers(q(x), k(other)) == 2
    square = torch.randn(WIDTH, WIDTH).requires_grad_() + 0
    assert buffers(q(square), k(square.t())) == 2


@pytest.mark.parametrize("forward", ["plain", "int8"])
@pytest.mark.parametrize("frozen", [False, True])
def test_data_that_was_replaced_between_layers(forward: str, frozen: bool) -> None:
    """Memory, version and strides may be the same; the shape or dtype is not."""
    modules = nn.Sequential(*layers(2, HotConfig(forward=forward)))
    if frozen:
        hot.freeze_int8(modules)
    (q, k), x = modules, images()
    q(x)
    x.data = x.data[:32]
    with pytest.raises(RuntimeError, match=r"(?s)x: shape \[32, 64\].*\[96, 64\]|got \[32, 64\]"):
        k(x).sum().backward()  # a frozen layer with a plain forward shares nothing: torch's error
    if not frozen:
        x = (images() + 0).bfloat16()
        q, k = layers(2, HotConfig(forward=forward))
        q.bfloat16(), k.half()
        outputs = [q(x)]
        x.data = x.data.view(torch.float16)
        assert buffers(*outputs, k(x)) == 2


def test_the_bytes_depend_on_the_fields_of_the_form_alone() -> None:
    # Other fields may differ between sharing layers. libhot's table says which they are.
    changes: dict[str, Any] = {
        "hadamard_block": 32, "gx_bits": 4, "gx_scale": "tensor",
        "gx_rounding": "nearest", "gw_rounding": "nearest",
        "forward": "int8", "forward_block": 32, "forward_in_eval": True,
    }  # fmt: skip
    x = images()
    for recipe in ("default", "paper"):
        base = HotConfig.recipe(recipe)
        for name, value in changes.items():
            needed = {"forward": "int8"} if name == "forward_in_eval" else {}
            other = dataclasses.replace(base, **needed, **{name: value})
            assert sharing.config_key(other) == sharing.config_key(base)
            a, b = (hotcore.compress_activation(x.detach(), c, key=3).data for c in (base, other))
            assert torch.equal(a, b), (recipe, name)
    q, k = hot.HotLinear(WIDTH, 48), hot.HotLinear(WIDTH, 48, config=HotConfig(gx_bits=4))
    accurate = hot.HotLinear(WIDTH, 48, config="accurate")
    assert buffers(q(x), k(x)) == 1
    assert buffers(q(x), accurate(x)) == 2


def test_convolutions_that_keep_the_same_pixels() -> None:
    x = pixels()
    point = [hot.HotConv2d(WIDTH, 32, 1, config="fast") for _ in range(2)]
    strided = hot.HotConv2d(WIDTH, 32, 1, 2, config="fast")
    wide = [hot.HotConv2d(WIDTH, 32, k, padding=k // 2, config="fast") for k in (3, 5)]
    outputs = [module(x) for module in (*point, strided, *wide)]
    assert len({s.data_ptr() for s in kept(*outputs)}) == 3
    assert buffers(*outputs[:2]) == buffers(*outputs[3:]) == 1


def test_a_1x1_convolution_uses_both_keys() -> None:
    x, gy = pixels(), torch.randn(2, 32, 8, 8)
    modules = [hot.HotConv2d(WIDTH, 32, 1, bias=False, config="fast") for _ in range(2)]
    first, second = drawn(5, 2)
    torch.manual_seed(5)
    _, y = (outputs := [module(x) for module in modules])
    assert buffers(*outputs) == 1
    (got,) = torch.autograd.grad(y, modules[1].weight, gy)
    tokens, grads = (t.detach().permute(0, 2, 3, 1).reshape(-1, t.shape[1]) for t in (x, gy))
    saved = hotcore.compress_activation(tokens, "fast", key=first)
    expected = hotcore.backward_linear(grads, None, saved, need="gw", key=second)
    equal_bits(got[:, :, 0, 0], expected.gw)


def test_memory_report_counts_it_once() -> None:
    x = data(128)
    parallel = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    parallel.shift = nn.Parameter(torch.zeros(WIDTH))
    parallel.forward = lambda x: sum(layer(y) for y in [x + parallel.shift] for layer in parallel)
    report = hot.memory_report(parallel, x, "accurate", filter_fn=lambda module, name: True)
    sizes = {module.name: module.after for module in report.modules}
    assert sizes["0"] == x.numel() + 4 * WIDTH + 8  # codes, a scale a channel, the seed
    assert not sizes.get("1") and not sizes.get("2")
    assert report.before == x.nbytes


# ------------------------------------------------------------------------------- What is not shared


def test_another_x_a_changed_x_and_a_view() -> None:
    q, k = layers(2)
    x, other = images(), images()
    y, x_again = q(x), x.detach()
    assert buffers(y, k(x)) == 1
    assert buffers(y, k(x_again)) == 2
    y = q(x)
    k(other)
    assert buffers(y, k(x)) == 2  # only the last x is remembered
    y = q(x)
    x.mul_(2)
    z = k(x)
    assert buffers(y, z) == 2
    seed = next(t for t in z.grad_fn.saved_tensors if t is not None and t.dtype == torch.int64)
    wanted = hotcore.compress_activation(x.detach(), key=Key(0, int(seed))).data
    equal_bits(kept(z)[0], wanted)


def fused_step(x: torch.Tensor) -> None:
    x.grad = torch.ones_like(x)
    torch.optim.AdamW([x], lr=0.5, fused=True).step()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "fused step": fused_step,
    "as a collective": lambda x: x.detach().data.copy_(data()),  # the version stays
    "numpy": lambda x: x.detach().numpy().__setitem__(..., data().numpy()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).copy_(data()),
    "storage": lambda x: x.untyped_storage().copy_(data().untyped_storage()),
    "new data": lambda x: setattr(x, "data", data()),
}


def error(y: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Error of g_w beside the exact one for x as it is."""
    gy = torch.randn(96, 48)
    (got,) = torch.autograd.grad(y, weight, gy)
    exact = gy.t() @ x.detach()
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("write", WRITES)
def test_a_leaf_that_is_written_past_its_version(write: str) -> None:
    # While an output for the old values lives. Off by 0.7 to 1.4 with the old codes.
    for kind in ("data", "parameter", "view"):
        (q, k), leaf = layers(2), data() if kind == "data" else nn.Parameter(data())
        x = leaf.view(96, WIDTH) if kind == "view" else leaf
        y = q(x)
        WRITES[write](x if write == "new data" else leaf)
        assert error(k(x), k.weight, x) < 0.2, kind
        assert y.grad_fn is not None


@pytest.mark.parametrize("change", [torch.t, lambda x: x[:1].expand(WIDTH, -1), torch.randn_like])
def test_an_activation_that_is_another_view_of_its_memory(change: Any) -> None:
    (q, k), x = layers(2), images(WIDTH)
    y = q(x)
    x.data = change(x.data)
    assert buffers(y, z := k(x)) == 2
    (got,) = torch.autograd.grad(z, k.weight, torch.eye(WIDTH, 48))
    assert cosine(got.numpy(), x.detach()[:48].numpy()) > 0.98


def test_the_switch() -> None:
    (q, k, v), x = layers(), images()
    assert hot.share_inputs.enabled
    with hot.share_inputs(False):
        y = q(x)
        x.detach().data.copy_(data())
        z = k(x)
        assert buffers(y, z, v(x)) == 3 and error(z, k.weight, x) < 0.2
        with hot.share_inputs(True):
            assert buffers(q(x), k(x)) == 1
        with ThreadPoolExecutor(1) as other:  # the process's
            assert other.submit(lambda: buffers(q(x), k(x))).result() == 2
        assert repr(hot.share_inputs(False)) == "share_inputs(enabled=False)"
    assert buffers(q(x), k(x)) == 1
    hot.share_inputs(False)
    try:
        assert buffers(q(x), k(x)) == 2
    finally:
        hot.share_inputs(True)
    with pytest.raises(ZeroDivisionError), hot.share_inputs(False):
        raise ZeroDivisionError
    assert hot.share_inputs.enabled


def test_inference_tensors_and_subclasses_keep_their_own() -> None:
    class Watched(torch.Tensor):
        pass

    q, k = layers(2)
    with torch.inference_mode():
        inferred = images()
    # A plain layer raises for one kind; the other may intercept each operator.
    for x in (inferred, images().as_subclass(Watched)):
        assert buffers(q(x), k(x)) == 2


def test_dispatch_modes_see_every_compression() -> None:
    (q, k), x = layers(2), images()
    y = q(x)
    with Calls() as calls:
        assert buffers(y, k(x), q(x)) == 3
    assert calls.found["hotcore.compress_activation.default"] == 2


def test_layers_that_keep_nothing_share_the_codes() -> None:
    frozen, trained = layers(2, INT8)
    frozen.weight.requires_grad_(False)
    in_codes = hot.convert(nn.Sequential(nn.Linear(WIDTH, 32)), INT8, lambda *_: True)
    hot.freeze_int8(in_codes)
    for order in ((frozen, in_codes, frozen, trained), (trained, in_codes, frozen)):
        x, found = images(), set()
        for part in order:
            y = part(x)
            saves = any(t is not None and t.numel() == 96 * WIDTH for t in y.grad_fn.saved_tensors)
            assert part is trained or not saves
            found.add(quantized().data_ptr())
        assert len(found) == 1


# ------------------------------------------------------------------------------ How long it is kept


def test_a_layer_that_comes_again_draws_afresh() -> None:
    # Several samples before one backward: their noise has to average out.
    q, k, v = layers(3, "fast")
    x, gy = images(), torch.randn(96, 48)
    samples = [[module(x) for module in (q, k, v)] for _ in range(3)]
    assert [buffers(*outputs) for outputs in samples] == [1, 1, 1]
    assert buffers(*(y for outputs in samples for y in outputs)) == 3
    exact = gy.t() @ x.detach()
    errors = [torch.autograd.grad(outputs[1], k.weight, gy)[0] - exact for outputs in samples]
    assert sum(errors).norm() / 3 < 0.75 * min(e.norm() for e in errors)  # 0.58


def test_a_layer_that_passes_a_view_of_its_weight_draws_afresh() -> None:
    """Pass a new weight in every call, like transformers' Conv1D and attention."""
    x, weight = images(), torch.randn(WIDTH, 48, requires_grad=True)
    assert buffers(*(hot.linear(x, weight.t()) for _ in range(2))) == 2


@pytest.mark.parametrize(("reentrant", "thread"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_of_a_fixed_x_is_fresh_at_every_step(reentrant: bool, thread: bool) -> None:
    q, k = layers(2, "fast")
    x = images()
    found = []
    with ThreadPoolExecutor(1) as other:  # of autograd, as on CUDA
        for _ in range(2):
            y = checkpoint(lambda x: q(x) * k(x), x, use_reentrant=reentrant)
            q.weight.grad = None
            backward = y.sum().backward
            other.submit(backward).result() if thread else backward()
            found.append(q.weight.grad)
            assert sharing.threads.cache.entry is None
            assert other.submit(lambda: sharing.threads.cache.entry).result() is None
    assert not torch.equal(*found)


def test_a_forward_that_was_thrown_away_leaves_nothing() -> None:
    (q,), x = layers(1), images()
    y = q(x)
    held = weakref.ref(kept(y)[0])
    assert held() is not None
    del y
    assert held() is None and sharing.threads.cache.entry is None


def test_x_lives_no_longer_and_takes_the_entry_along() -> None:
    (q,) = layers(1, INT8)
    source = images().requires_grad_()
    x = source * 1
    gone = weakref.ref(x)
    y = q(x)
    codes = weakref.ref(quantized())
    del x
    assert gone() is None and codes() is None and sharing.threads.cache.entry is None
    # Only the graph holds the bytes now.
    held = weakref.ref(kept(y)[0])
    assert held() is not None
    del y
    assert held() is None


def test_an_x_that_only_autograd_holds_is_still_the_same() -> None:
    # The Python object is resurrected as itself while C++ holds the tensor.
    q, k = layers(2)
    source = images().requires_grad_()
    x = source * 1
    twice = x * x  # saves x
    y = q(x)
    del x
    gc.collect()
    assert sharing.threads.cache.entry is not None
    again = twice.grad_fn._saved_self
    assert buffers(y, k(again)) == 1
    del again, twice
    gc.collect()
    assert sharing.threads.cache.entry is None


def test_threads_have_entries_of_their_own() -> None:
    q, k, v = layers()
    x = images()
    barrier = threading.Barrier(2)
    found: dict[int, tuple[torch.Tensor, ...]] = {}

    def run(index: int) -> None:
        y = q(x)
        barrier.wait()
        z = k(x)
        barrier.wait()
        if index == 0:
            (y.sum() + z.sum()).backward(retain_graph=True)
        barrier.wait()
        found[index] = (y, z, v(x))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    assert buffers(*found[0]) == 2 and buffers(*found[1]) == 1  # the one ran a backward, not both
    assert buffers(*found[0], *found[1]) == 3


def test_backward_in_another_thread_ends_it() -> None:
    # Autograd has threads of its own on CUDA.
    q, k = layers(2)
    x = images()
    y = q(x)
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: y.sum().backward(retain_graph=True)).result()
    assert buffers(y, k(x)) == 2


# ---------------------------------------------------------------------- With what people use around


@pytest.mark.parametrize("ended", [False, True])
def test_checkpoint_of_one_of_them(ended: bool) -> None:
    # Recomputed bytes come with their own seed, whatever forward has shared.
    q, k = layers(2, "fast")
    x = images()
    gy = torch.randn(96, 48)
    _, own = drawn(7, 2)
    torch.manual_seed(7)
    y = q(x)
    z = checkpoint(k, x, use_reentrant=False)
    if ended:  # the entry, by a backward before the checkpoint's
        y.sum().backward(retain_graph=True)
    (got,) = torch.autograd.grad(z, k.weight, gy)
    saved = hotcore.compress_activation(x.detach(), "fast", key=own)
    equal_bits(got, hotcore.backward_linear(gy, None, saved, need="gw", key=own).gw)
    assert buffers(y) == 1


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda x, y: None, False),
        (lambda x, y: x.detach().mul_(2), True),
        (lambda x, y: y.sum().backward(), True),
        (lambda x, y: layers(1, INT8)[0](images()), True),
    ],
    ids=["nothing", "written", "backward", "another x"],
)
def test_when_the_codes_are_made_again(change: Any, again: bool) -> None:
    x, (q, k) = images(), layers(2, INT8)
    y = q(x)
    before = quantized()
    change(x, y)
    wanted = hotcore.forward_linear(x.detach(), k.weight.detach(), k.bias.detach(), config=INT8)
    equal_bits(k(x).detach(), wanted)
    assert (quantized() is not before) == again


def test_codes_of_a_leaf_another_block_and_dtype() -> None:
    (q,) = layers(1, INT8)
    (bad,) = layers(1, HotConfig.recipe("fast", forward="int8", token_grid=(7, 7)))
    q(data())
    assert sharing.threads.cache.entry is None
    refused(lambda: bad(images()), "tokens")
    assert sharing.threads.cache.entry is None
    x, (k,) = images(), layers(1, dataclasses.replace(INT8, forward_block=16))
    for part, cast in ((q, False), (k, False), (q, False), (q, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = part(x).detach()
        of = x.detach().bfloat16() if cast else x.detach()
        weights = part.weight.detach(), part.bias.detach()
        equal_bits(y, hotcore.forward_linear(of, *weights, config=part.config))


@pytest.mark.cuda
def test_streams_and_captures_keep_their_own() -> None:
    q, k = (module.cuda() for module in layers(2))
    x = images().cuda()
    y = q(x)
    assert buffers(y, k(x)) == 1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = k(x)
        assert buffers(y, other) == 2 and buffers(other, q(x)) == 1
    torch.cuda.current_stream().wait_stream(side)
    y = q(x)
    entry = sharing.threads.cache.entry
    assert entry is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = q(x), k(x)
    assert sharing.threads.cache.entry is entry
    assert buffers(y, *captured) == 3


@pytest.mark.cuda
def test_backward_on_cuda_ends_it() -> None:
    q, k = (module.cuda() for module in layers(2, "fast"))
    x = images().cuda()
    for wrapped in (False, True):
        found = []
        for _ in range(2):
            q.weight.grad = None
            y = checkpoint(lambda x: q(x) * k(x), x, use_reentrant=False) if wrapped else q(x)
            y.sum().backward()
            found.append(q.weight.grad)
            assert sharing.threads.cache.entry is None
        assert not torch.equal(*found), wrapped
