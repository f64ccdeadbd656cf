"""The compiler and the operators: what it counts, shares, keeps, recomputes and caches."""

import contextlib
import copy
import functools
import gc
import math
import os
import subprocess
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hotcore
import hotcore.torch as hot
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torch_graphs import Attention, Graphs, Mlp, Symbolic, converted, every, gradients, same

pytestmark = pytest.mark.usefixtures("seeded", "compiled_afresh")
INT8 = hot.HotConfig.recipe("fast", forward="int8")
SKETCH = hot.HotConfig.recipe("fast", forward="int8", basis="sketch")


@pytest.mark.parametrize("config", ["fast", INT8], ids=str)
@pytest.mark.parametrize("kind", ["linear", "1x1", "3x3"])
def test_flops_are_those_of_the_plain_layer(kind: str, config: Any) -> None:
    plain: nn.Module
    if kind == "linear":
        plain, x = nn.Linear(64, 96), torch.randn(2, 50, 64, requires_grad=True)
    else:
        size = int(kind[0])
        plain = nn.Conv2d(32, 48, size, stride=2, padding=size // 2)
        x = torch.randn(2, 32, 9, 9, requires_grad=True)
    counts = []
    for model in (plain, converted(nn.Sequential(copy.deepcopy(plain)), config)[0]):
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_flops_of_the_operators_of_a_graph() -> None:
    x, weight = torch.randn(50, 64), torch.randn(96, 64)
    config = hot.HotConfig().json
    saved, seed = torch.ops.hotcore.compress(x, config)
    for call, products in (
        (lambda: torch.ops.hotcore.product(x, weight, None, saved, seed, config), 1),
        (lambda: torch.ops.hotcore.compress(x, config), 0),
        (lambda: torch.ops.hotcore.backward_linear(torch.randn(50, 96), weight, saved, seed, seed,
            config, 64, "float32 float32 float32"), 2),
        (lambda: torch.ops.hotcore.backward_linear(
            torch.randn(50, 96), weight, None, None, seed, config, 64, "float32 None float32"), 1),
    ):  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == products * 2 * 50 * 64 * 96


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", ["default", INT8], ids=str)
def test_layers_with_one_x_compress_it_once(config: Any, autocast: bool) -> None:
    model = converted(Attention(), config)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model(x)

    graphs = Graphs().run(call, torch.randn(256, 64))
    assert graphs.count("forward", "product") == 4
    # x of q, k and v; x of o
    of = {name: graphs.count("forward", name) for name in ("compress", "quantize_input")}
    assert of == ({"compress": 0, "quantize_input": 2} if config is INT8 else
                  {"compress": 2, "quantize_input": 0})  # fmt: skip
    assert graphs.count("forward", "forward_input") == 0
    assert graphs.count("backward", "backward_linear") == 4
    assert sum("compress" in n or "quantize" in n for n in graphs.calls["backward"]) == 0
    assert sum(t.dtype == torch.uint8 for t in graphs.kept) == 2


def test_codes_where_x_is_not_compressed_in_the_same_place() -> None:
    """Where the compiler decides when x is compressed, and where the weights are frozen."""
    frozen = hot.freeze_int8(converted(Attention(), INT8))
    for model in (converted(Attention(), INT8, defer=True), frozen):
        graphs = Graphs().run(model, torch.randn(96, 64).requires_grad_())
        names = ("forward_input", "quantize_input", "product")
        assert [graphs.count("forward", name) for name in names] == [2, 0, 4]


@pytest.mark.parametrize("policy", ["keep_codes", "keep_products"])
def test_a_policy_keeps_no_codes_of_the_forward(policy: str) -> None:
    keep, sizes = getattr(hot.policies, policy), []
    for config in ("fast", INT8):
        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        model, x = converted(Attention(), config), torch.randn(96, 64).requires_grad_()
        call = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
        graphs = Graphs().run(call, x)
        sizes.append(sum(t.nbytes for t in graphs.kept if isinstance(t.numel(), int)))
        assert graphs.count("forward", "quantize_input") == 0
    assert sizes[1] <= sizes[0]


def test_opcheck_of_the_codes() -> None:
    text = INT8.json
    for x in (torch.randn(50, 70), torch.randn(2, 3, 65).bfloat16(), torch.randn(8, 60).t()):
        torch.library.opcheck(torch.ops.hotcore.forward_input.default, (x, text))
        tests = ("test_schema", "test_faketensor")  # random: its values differ from run to run
        call = (rows := x.contiguous(), text)
        torch.library.opcheck(torch.ops.hotcore.quantize_input.default, call, test_utils=tests)
        for keep in (False, True):
            call = (rows, rows.bfloat16(), text, keep)
            torch.library.opcheck(torch.ops.hotcore.input_of.default, call, test_utils=tests)


def test_another_configuration_compresses_for_itself() -> None:
    model = converted(Attention())
    model.k.config = "fast"
    assert Graphs().run(model, torch.randn(256, 64)).count("forward", "compress") == 3


def test_an_x_that_is_written_between_is_another() -> None:
    q, k = converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = q(y)
        y.add_(1)
        return first + k(y)

    x = torch.randn(256, 64)
    assert Graphs().run(call, x).count("forward", "compress") == 2
    exact = (2 * torch.ones(256, 64).t()) @ (2 * x + 1)  # g_y is 2 y, nearly: compare directions
    torch._dynamo.reset()
    k.weight.grad = None
    torch.compile(call, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert F.cosine_similarity(k.weight.grad.flatten(), exact.flatten(), 0) > 0.97


def test_frozen_layers_compress_nothing() -> None:
    model = converted(Attention())
    for layer in (model.q, model.k, model.v):
        layer.weight.requires_grad_(False)
    graphs = Graphs().run(model, torch.randn(256, 64))
    assert graphs.count("forward", "compress") == 1
    assert graphs.count("forward", "draw_seed") == 1


def test_codes_are_kept_unless_the_compiler_may_choose() -> None:
    """A norm's output, of a tensor that is kept anyway: deferred, it is compressed in backward."""
    x = torch.randn(512, 64)
    kept = {}
    for defer in (False, True):
        graphs = Graphs().run(converted(Mlp(), defer=defer), x.clone().requires_grad_())
        in_backward = sum(graphs.count("backward", n) for n in ("compress", "compress_activation"))
        assert graphs.count("forward", "compress") == (0 if defer else 2)
        assert in_backward == 0 or defer
        kept[defer] = sum(t.nbytes for t in graphs.kept)
    assert kept[True] <= kept[False]


@pytest.mark.parametrize("autocast", [False, True])
def test_an_x_that_is_written_is_compressed_as_it_is(autocast: bool) -> None:
    """Also with a compiler that may choose; and no state outlives a trace."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return self.fc(self.norm(x).mul_(-3)).float()

    plain = Shifted()
    x = torch.randn(512, 64)
    exact = gradients(plain, plain, x)
    model = Shifted()
    model.load_state_dict(plain.state_dict())
    hot.convert(model, "accurate", every)
    model.fc.defer = True
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(gradients(model, compiled, x), exact, strict=True):
        assert (ours - theirs).norm() < 0.06 * theirs.norm()
    gc.collect()
    assert len(hot.ops.codes._traced) == 0


def test_nothing_of_a_graph_stands_elsewhere() -> None:
    """Seeds are on x's device; a graph on the meta device holds no CPU tensor."""
    seed = torch.ops.hotcore.draw_seed(torch.empty(3, device="meta"))
    assert seed.device.type == "meta"
    saved, seed = torch.ops.hotcore.compress(torch.empty(64, 64, device="meta"),
                                             hot.HotConfig().json)  # fmt: skip
    assert saved.device.type == seed.device.type == "meta"


@pytest.mark.long
def test_inductor_writes_what_operators_share_once() -> None:
    """GELU's result goes to the compression and to the product: one store, in any strides."""
    from torch._inductor.utils import run_and_get_code

    model = converted(nn.Sequential(nn.GELU(), nn.Linear(64, 64)))
    x = torch.randn(4, 24, 64, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    kernels = [k for code in codes for k in code.split("async_compile.cpp")[1:] if "erf" in k]
    forward = kernels[0].split("'''")[1]
    assert forward.count("out_ptr0") > 0
    assert "out_ptr1" not in forward


@pytest.mark.long
def test_inductors_wrapper_in_cpp() -> None:
    """It writes an operator's text into C++ as it is."""
    model, x = converted(nn.Linear(64, 64), INT8), torch.randn(96, 64)
    expected = gradients(model, model, x)
    with torch._inductor.config.patch(cpp_wrapper=True):
        found = gradients(model, torch.compile(model, fullgraph=True), x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.long
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_memory_budget_knows_what_a_product_costs(budget: float) -> None:
    import torch._functorch.config as functorch

    model = converted(nn.Sequential(*(Mlp() for _ in range(4))))
    with functorch.patch(activation_memory_budget=budget):
        graphs = Graphs().run(model, torch.randn(512, 64, requires_grad=True))
    again = graphs.count("backward", "product")
    # At 0 everything is recomputed but what no later layer needs; at 0.5 what costs least.
    assert again >= 7 if budget == 0.0 else 0 < again <= 5
    full = Graphs().run(model, torch.randn(512, 64, requires_grad=True))
    assert full.count("backward", "product") == 0
    assert sum(t.nbytes for t in graphs.kept) < sum(t.nbytes for t in full.kept)


@pytest.mark.parametrize("config", ["fast", INT8], ids=str)
@pytest.mark.parametrize(("policy", "products"), [("keep_products", 0), ("keep_codes", 2)])
def test_selective_checkpoints(policy: str, products: int, config: Any) -> None:
    model = converted(Mlp(), config)
    keep = getattr(hot.policies, policy)
    contexts = functools.partial(create_selective_checkpoint_contexts, keep)
    call = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
    x = torch.randn(256, 64)
    expected = gradients(model, model, x)
    # Eager: what is multiplied, the recomputation counted.
    with FlopCounterMode(display=False) as counter:
        assert same(gradients(model, call, x), expected)
    forward = 2 * 256 * 64 * 256
    assert counter.get_total_flops() == (2 * 3 + products) * forward
    # Compiled: by operators, what is compressed, too.
    graphs = Graphs().run(call, x.requires_grad_())
    assert graphs.count("forward", "compress") == 2
    assert graphs.count("backward", "compress") == 0
    # Nothing in the region needs its last product.
    assert graphs.count("backward", "product") == max(0, products - 1)


def compile_twice() -> None:
    import torch._functorch.config as functorch
    from torch._dynamo.utils import counters

    model = converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    x = torch.randn(128, 64)
    for start in ("cold", "warm"):
        torch._dynamo.reset()
        counters.clear()
        with functorch.patch(enable_autograd_cache=True):  # the default since 2.7
            torch.compile(model, fullgraph=True)(x).sum().backward()
        found = counters["aot_autograd"]
        assert found["autograd_cache_bypass"] == 0
        assert found["autograd_cache_miss"] == (start == "cold")
        assert found["autograd_cache_hit"] == (start == "warm")


@pytest.mark.long
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """In a process of its own: torch 2.6 finds its header's place once a process.

    In this process, later tests would include a header from this test's folder. Their code would
    stay in the machine's cache when the folder is gone.
    """
    folders = [str(Path(__file__).parent), *sys.path]
    # Not by support.output_of: some versions of torch warn while they compile.
    command = [sys.executable, "-c", "import test_operators; test_operators.compile_twice()"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(folders)}
    env = {**os.environ, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sizes_of_fakes() -> None:
    for tokens, width, block in ((0, 8, 64), (5, 0, 64), (7, 65, 16), (33, 100, 1), (2, 7, 256)):
        config = hot.HotConfig(forward="int8", forward_block=block)
        size = torch.ops.hotcore.forward_input(torch.randn(tokens, width), config.json).numel()
        assert hot.ops.codes.input_bytes(Symbolic(tokens), width, config) == size


NAMES = ("compress", "quantize_input", "forward_input", "product", "backward_linear")
in_cpp = pytest.mark.skipif(
    not hasattr(torch.ops.hotcore, "product_python"), reason="torch before 2.10: Python alone"
)


def python_form(name: str) -> Any:
    return getattr(torch.ops.hotcore, f"{name}_python").default


def entered(call: Callable[[], Any]) -> list[str]:
    """The functions of hotcore's operators that a call runs in Python."""
    names: list[str] = []

    def see(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and "hotcore/torch/ops" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def calls_of_a_layer(
    shape: tuple[int, ...], dtype: torch.dtype, config: hot.HotConfig, bias: bool
) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator of a layer with fp32 parameters."""
    text, kind = config.json, str(dtype).removeprefix("torch.")
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(24, shape[-1])
    x = x.transpose(0, 1) if len(shape) == 3 else x
    gy, b = torch.randn(math.prod(shape[:-1]), 24, dtype=dtype), torch.randn(24) if bias else None
    saved, seed = python_form("compress")(x, text)
    codes = torch.ops.hotcore.forward_input(x, text) if config.forward == "int8" else None
    dtypes = f"{kind} float32 " + ("float32" if bias else "None")
    return {
        "compress": (x, text),
        "quantize_input": (x, text),
        "forward_input": (x, text),
        "product": (x, weight, b, saved, seed, text, codes),
        "backward_linear": (gy, weight, saved, seed, torch.tensor(12), text, shape[-1], dtypes),
    }


@in_cpp
@pytest.mark.parametrize("config", ["default", "paper", "accurate", SKETCH], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_operators_in_cpp_have_the_bits_of_python(dtype: torch.dtype, config: Any) -> None:
    settings = hot.HotConfig.recipe(config) if isinstance(config, str) else config
    for shape in ((48, 64), (3, 16, 64), (2, 3, 8, 64), (1, 64)):
        calls = calls_of_a_layer(shape, dtype, settings, len(shape) != 3)
        held: list[Any] = []
        for name, arguments in calls.items():
            form, results = getattr(torch.ops.hotcore, name).default, []
            with torch.no_grad():
                form(*arguments)  # Python teaches C++ the configuration
                for function in (python_form(name), form):
                    torch.manual_seed(5)
                    results.append(function(*arguments))
                assert entered(functools.partial(form, *arguments)) == []
            assert same(*results)
            made = results[1] if isinstance(results[1], tuple) else results[1:]
            held += map(weakref.ref, (arguments[0], *made))
            del arguments, results, made
        calls.clear()
        assert not any(tensor() is not None for tensor in held)


@in_cpp
def test_what_operators_in_cpp_leave_to_python() -> None:
    """New settings, x of five dimensions, tensors with a minus sign, bad arguments."""
    calls = calls_of_a_layer((48, 64), torch.float32, INT8, True)
    products = {name: getattr(torch.ops.hotcore, name).default for name in NAMES}

    def ways(name: str, *arguments: Any) -> list[list[str]]:
        with torch.no_grad():
            return [entered(lambda: products[name](*arguments)) for _ in range(2)]

    for name in NAMES:
        ways(name, *calls[name])
        with changed_threads():
            first, second = ways(name, *calls[name])
            assert first and not second
    x, *rest = calls["quantize_input"]
    assert all(ways("quantize_input", torch.randn(1, 2, 3, 4, 64), *rest))
    torch.manual_seed(3)
    expected = products["quantize_input"](x, *rest)
    torch.manual_seed(3)
    assert same(products["quantize_input"](torch._neg_view(-x), *rest), expected)
    gy, weight, saved, *rest = calls["backward_linear"]
    for bad, message in (
        ((gy, weight, saved[:-16], *rest), "saved"),
        ((gy, weight[:, :-1], saved, *rest), "saved has 64 in_features"),
        ((gy.to(torch.float64), weight, saved, *rest), "gy: dtype float64"),
    ):
        with pytest.raises(ValueError, match=message), torch.no_grad():
            products["backward_linear"](*bad)
    with pytest.raises(RuntimeError, match="taken apart"):
        products["backward_linear"](gy, weight.requires_grad_(), saved, *rest)
    with torch.no_grad():
        forms = products["backward_linear"], python_form("backward_linear")
        assert same(*(form(gy, weight, saved, *rest) for form in forms))


FREEZES: dict[str, Callable[[Any], Any]] = {
    "int8": hot.freeze_int8,
    "int4": functools.partial(hot.freeze, bits=4),
    "convrot": functools.partial(hot.freeze_int8, convrot=True),
}


def frozen_calls(kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """A frozen layer, and arguments of its operators."""
    width = 128 if kind == "convrot" else 80  # of ConvRot whole groups
    layer: Any = converted(nn.Sequential(nn.Linear(width, 48, dtype=dtype)), INT8)
    FREEZES[kind](layer)
    layer = layer[0]
    with torch.no_grad():
        layer(torch.randn(4, width, dtype=dtype))  # checks the codes
    codes, *fields = layer.frozen
    x, gy = torch.randn(2, 6, width, dtype=dtype), torch.randn(12, 48, dtype=dtype)
    text, seed, dtypes = layer._config_json, torch.tensor(7), f"{dtype} None {dtype}"
    inner = torch.ops.hotcore.forward_input(x, text, fields[-1])
    dtypes = dtypes.replace("torch.", "")
    return layer, {
        "forward_input": (x, text, fields[-1]),
        "product": (x, codes, torch.randn(48), None, seed, text, inner, *fields),
        "backward_linear": (gy, codes, None, seed, seed, text, width, dtypes, *fields),
    }


@in_cpp
@pytest.mark.parametrize("kind", FREEZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_frozen_weights_in_cpp(dtype: torch.dtype, kind: str) -> None:
    """The bits of Python; changed codes are checked anew, and wrong ones refused."""
    layer, calls = frozen_calls(kind, dtype)
    forms = {name: getattr(torch.ops.hotcore, name).default for name in calls}

    def ways(name: str) -> list[list[str]]:
        with torch.no_grad():
            return [entered(lambda: forms[name](*calls[name])) for _ in range(2)]

    with torch.no_grad():
        for name, arguments in calls.items():
            forms[name](*arguments)
            assert same(forms[name](*arguments), python_form(name)(*arguments))
            assert ways(name) == [[], []]
    good, codes = layer.weight_codes.detach().clone(), layer.weight_codes
    with torch.no_grad():
        codes.copy_(good)  # a new version: checked once more
        first, second = ways("product")
        assert first and not second
        for wrong in (good.roll(1), torch.zeros_like(good)):
            codes.copy_(wrong)
            for name in ("product", "backward_linear"):
                with pytest.raises(RuntimeError, match="not codes of a weight"):
                    forms[name](*calls[name])
        codes.data = good.clone()
        first, second = ways("backward_linear")
        assert first and not second
        if kind == "int4":
            *others, exponents = calls["product"]
            with pytest.raises(RuntimeError, match="other sizes of x's features"):
                forms["product"](*others, exponents + 1)


@in_cpp
def test_codes_are_forgotten_with_their_weight() -> None:
    """Memory and addresses of a weight that is gone may serve other bytes."""
    layer, calls = frozen_calls("int8", torch.float32)
    token = weakref.ref(layer.weight_codes._hot_seen[3])
    seen = getattr(layer.weight_codes.detach(), "_hot_seen", ())  # before torch 2.13 it has none
    assert seen[3:] == () and copy.copy(token()) is None
    del layer, calls
    gc.collect()
    assert token() is None


@in_cpp
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_operators_in_cpp_after_a_fork() -> None:
    arguments = calls_of_a_layer((48, 64), torch.float32, INT8, True)["backward_linear"]
    form = torch.ops.hotcore.backward_linear.default
    with torch.no_grad():
        expected = form(*arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, 3.12 warns
            child = os.fork()
        if child == 0:
            os._exit(not same(form(*arguments), expected))
        assert os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def changed_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    hotcore.set_isa("plain")
    try:
        yield
    finally:
        torch.set_num_threads(before)
        hotcore.set_isa(None)
