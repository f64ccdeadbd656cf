"""The C ABI: stages and layers with the bits of the binding; errors: see test_errors.py."""

import ctypes
import dataclasses
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hotcore
import numpy as np
import pytest
from c_api import (
    CONSTANTS,
    STRUCTS,
    CApi,
    HotError,
    aligned,
    library,
    make,
    prototypes,
    room,
    tensor,
)
from hotcore import HotConfig, Key, _core
from hotcore.config import FIELDS, RECIPES
from support import ALL, KEY, OTHER_KEY, all_equal_bits, data, equal_bits, parted_key, ran

INVALID, UNSUPPORTED = CONSTANTS["HOT_INVALID_ARGUMENT"], CONSTANTS["HOT_UNSUPPORTED"]


def test_stages(api: CApi, rng: np.random.Generator) -> None:
    x = data(rng, (33, 48), "special")
    half, key = data(rng, (33, 48)).astype(np.float16), {"key": KEY}
    for axis, block, values in ((-1, 16, x), (1, 4, half), (0, 1, x)):
        options = {"axis": axis, "block": block}
        equal_bits(api.fwht(values, **options), hotcore.fwht(values, **options))
    for basis in ("lowpass", "sequency"):
        assert api.basis_order(basis, 32) == hotcore.basis_order(basis, 32)
    for options in (
        {"basis": "sketch", "rank": 4, "side": "gradient"},
        {"basis": "lowpass", "rows": (0, 3, 5), "token_grid": (5, 6), "prefix_tokens": 3},
    ):
        equal_bits(api.hla(x, **options, **key), hotcore.hla(x, **options, **key))
    for scale, rounding in zip(
        ("token", "channel", "tensor"), ("stochastic", "nearest", "pseudo_stochastic"), strict=True
    ):
        for options in ({"bits": 8}, {"bits": 4}, {"bits": 4, "packed": True}):
            options = {**options, "scale": scale, "rounding": rounding, **key}
            got, wanted = api.quantize(x, **options), hotcore.quantize(x, **options)
            all_equal_bits(got, wanted, str(options))
        back = hotcore.dequantize(*hotcore.quantize(x, scale=scale), granularity=scale)
        equal_bits(api.dequantize(*hotcore.quantize(x, scale=scale), granularity=scale), back)
    q = rng.integers(-128, 128, (7, 13), np.int8)
    packed = hotcore.pack_int4(q)
    equal_bits(api.pack_int4(q), packed)
    equal_bits(api.unpack_int4(packed, 13), hotcore.unpack_int4(packed, 13))
    scales = [data(rng, (n,)) for n in (7, 1)]
    for call, operands in (("gemm_int8", (q, q[:5])), ("gemm_int4", (packed, packed[:5]))):
        equal_bits(api.gemm(*operands), getattr(hotcore, call)(*operands))
        before = data(rng, (7, 5)).astype(np.float16)
        for accumulate in (False, True):
            options = {"divisor": 16, "accumulate": accumulate}
            got, wanted = before.copy(), before.copy()
            api.gemm(*operands, *scales, out=got, **options)
            getattr(hotcore, call)(*operands, *scales, out=wanted, **options)
            equal_bits(got, wanted, call)


CONFIGS = (
    *map(HotConfig.recipe, RECIPES),
    HotConfig(gx_bits=4, gw_scale="token", gw_rounding="nearest"),
    HotConfig(hadamard_block=32, equalize_tokens=True, storage="int8"),
    HotConfig(basis="sketch", rank=4, gw_scale="tensor", storage="int8"),
    HotConfig(basis="lowpass", rows=(0, 3, 5), token_grid=(5, 6), prefix_tokens=2, storage="int8",
              gx_rounding="pseudo_stochastic"),
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_backward_linear(api: CApi, rng: np.random.Generator, config: HotConfig) -> None:
    gy, w, x = (data(rng, shape) for shape in ((64, 21), (21, 35), (64, 35)))
    model, spec = hotcore.compress_activation(x, config, key=KEY), api.spec(config)
    kept, saved = api.compress_activation(x, spec, key=KEY)
    equal_bits(kept, model.data)
    assert (saved.tokens, saved.in_features) == (64, 35)
    assert Key(saved.key_seed, saved.key_offset, saved.key_stream) == KEY
    codes, weight = api.quantize_weight(w, spec)
    written = len(codes) - 4 * 34 * (config.gx_scale == "tensor")  # one scale of a room for 35
    equal_bits(codes[:written], hotcore.quantize_weight(w, config).data[:written])

    def same(got: Any, wanted: Any, names: Collection[str] = ALL) -> None:
        for name in names:
            equal_bits(getattr(got, name), getattr(wanted, name), name)

    expected = hotcore.backward_linear(gy, w, model, need=ALL, key=OTHER_KEY)
    more = {"in_features": 35, "key": OTHER_KEY}
    for operand in (w, weight):
        same(api.backward_linear(gy, operand, saved, spec, need=ALL, **more), expected)
    for name in ALL:  # one gradient at a time, without unneeded arguments
        operands = w if name == "gx" else None, saved if name == "gw" else None, spec
        same(api.backward_linear(gy, *operands, need=[name], **more), expected, [name])
    outputs = {"gw": data(rng, (21, 35)), "gb": data(rng, (21,))}
    ours = {f"{name}_out": values.copy() for name, values in outputs.items()}
    wanted = hotcore.backward_linear(gy, w, model, need=ALL, key=OTHER_KEY, accumulate=True, **ours)
    more |= {"need": ALL, "outputs": outputs, "accumulate": True}
    same(api.backward_linear(gy, w, saved, spec, **more), wanted)


@pytest.mark.parametrize("block", [1, 16, 64, 256])
def test_forward_linear(api: CApi, rng: np.random.Generator, block: int) -> None:
    config, spec = HotConfig(forward_block=block), api.forward_spec(block)
    for tokens, outs, ins in ((50, 21, 70), (1, 1, 1), (0, 3, 5), (33, 8, 0)):
        x, w, bias = (data(rng, shape) for shape in ((tokens, ins), (outs, ins), (outs,)))
        expected = hotcore.forward_linear(x, w, bias, config=config)
        codes, quantized, _, _ = api.quantize_forward_input(x, spec)
        equal_bits(codes, hotcore.quantize_forward_input(x, config).data)
        assert (quantized.tokens, quantized.in_features) == (tokens, ins)
        kept, weight = api.quantize_forward_weight(w, spec)
        equal_bits(kept, hotcore.quantize_forward_weight(w, config).data)
        for left in (x, quantized):
            for right in (w, weight):
                equal_bits(api.forward_linear(left, right, bias, spec), expected)
        plain = hotcore.forward_linear(x, w, config=config)
        equal_bits(api.forward_linear(quantized, w, None, spec), plain)


@pytest.mark.parametrize("exponents", [None, np.arange(-35, 35, dtype=np.int8)])
def test_weight_int4(api: CApi, rng: np.random.Generator, exponents: np.ndarray | None) -> None:
    w, x, spec, group = data(rng, (9, 70)), data(rng, (5, 70)), api.forward_spec(64), 64
    powers = None if exponents is None else tensor(exponents)
    expected = hotcore.quantize_weight_int4(w, group=group, exponents=exponents)
    codes = aligned(api.number("hot_weight_int4_bytes", 9, 70, spec, group))
    weight, wide = make("hot_weight"), make("hot_weight")
    api.on("hot_quantize_weight_int4", tensor(w), powers, spec, group, *room(codes), weight)
    equal_bits(codes, expected.data)
    memory = aligned(api.number("hot_forward_weight_bytes", 9, 70, spec))
    api.on("hot_expand_weight_int4", weight, spec, group, *room(memory), wide)
    expanded = hotcore.expand_weight_int4(expected)
    equal_bits(memory, expanded.data)
    floats = np.full((9, 70), np.nan, np.float32)
    api.on("hot_dequantize_weight", wide, spec, powers, tensor(floats))
    equal_bits(floats, hotcore.dequantize_weight(expanded))
    of_x, made = aligned(api.number("hot_forward_input_bytes", 5, 70, spec)), make("hot_input")
    end = spec, *room(of_x), made, None, None, 0, None, 0, None
    api.on("hot_quantize_forward_input_scaled", tensor(x), powers, *end)
    y = hotcore.forward_linear(x, expanded, out_dtype="float32")
    equal_bits(api.forward_linear(made, wide, None, spec), y)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_input_that_is_kept(api: CApi, rng: np.random.Generator, recipe: str) -> None:
    x, forward, kept = data(rng, (97, 35)), api.forward_spec(64), api.spec(recipe)
    codes, quantized, of_x, saved = api.quantize_forward_input(x, forward, kept, key=KEY)
    alone, other, _, _ = api.quantize_forward_input(x, forward)
    equal_bits(codes, alone)
    assert (quantized.bytes, quantized.format) == (other.bytes, other.format)
    memory, expected = api.compress_activation(x, kept, key=KEY)
    equal_bits(of_x, memory)
    expected.data = saved.data  # all fields except its address
    assert bytes(saved) == bytes(expected) and saved.data == of_x.ctypes.data


def test_inputs_that_are_missing(api: CApi, rng: np.random.Generator) -> None:
    x, w = data(rng, (48, 35)), data(rng, (6, 35))
    spec, kept = api.forward_spec(16), api.spec("default")
    codes, quantized, _, _ = api.quantize_forward_input(x, spec)
    _, weight = api.quantize_forward_weight(w, spec)
    y, scratch = np.full((48, 6), 7, np.float32), aligned(1 << 16)
    end = (None, spec, tensor(y), *room(scratch))
    for arguments, words in (
        ((quantized, None, None), "w and weight are both null; expected one"),
        ((quantized, tensor(w), weight), "w and weight are both given; expected one"),
        ((None, tensor(w), None), "x is null"),
        ((make("hot_input", struct_size=40), tensor(w), None), "x.struct_size is 40; expected the"),
    ):
        refused(api.on, words, of=("hot_forward_linear_input", *arguments, *end))
    assert (y == 7).all()
    wrong = api.spec("default")
    wrong.gx_scale = 9
    good = {"x": tensor(x), "spec": spec, "data": codes.ctypes.data, "bytes": codes.size}
    good |= {"input": make("hot_input"), "kept": kept, "room": scratch.ctypes.data, "room_bytes": 0}
    good |= {"workspace": None, "workspace_bytes": 0, "saved": make("hot_saved")}
    for name, bad, words in (
        ("x", None, "x is null"),
        ("input", None, "input is null"),
        ("input", make("hot_input", struct_size=8), "input.struct_size is 8"),
        ("saved", None, "saved is null"),
        ("spec", None, "spec is null"),
        ("kept", wrong, "kept.gx_scale is 9"),
    ):
        arguments = "hot_quantize_forward_input", *{**good, name: bad}.values()
        refused(api.on, "quantize_forward_input: ", words, of=arguments)


@pytest.mark.parametrize("recipe", RECIPES)
def test_decompress_activation(api: CApi, rng: np.random.Generator, recipe: str) -> None:
    x, spec = data(rng, (97, 35)), api.spec(recipe)
    kept, saved = api.compress_activation(x, spec, key=KEY)
    if HotConfig.recipe(recipe).basis != "full":
        words = "decompress_activation: saved has basis"
        refused(api.decompress_activation, words, of=(saved, 0, 97, spec), status=UNSUPPORTED)
        return
    model = hotcore.compress_activation(x, recipe, key=KEY)
    for first, last in ((0, 97), (63, 66), (5, 5)):
        got = api.decompress_activation(saved, first, last, spec)
        equal_bits(got, hotcore.decompress_activation(model, first, last))
    out = tensor(np.empty((97, 35), np.float32))
    refused(lambda: api.on("hot_decompress_activation", None, 0, 97, spec, out), "saved is null")
    assert len(kept) == saved.bytes


def test_layouts_and_sizes(api: CApi) -> None:
    for recipe in RECIPES:
        spec, layout = api.spec(recipe), make("hot_saved_layout")
        assert bytes(spec) == bytes(api.spec(HotConfig.recipe(recipe)))
        api.call("hot_saved_layout_of", 197, 48, spec, layout)
        wanted = _core.saved_layout(197, 48, HotConfig.recipe(recipe).spec)
        assert tuple(getattr(layout, name) for name, _ in layout._fields_[1:]) == wanted


def test_counters(api: CApi, rng: np.random.Generator) -> None:
    x = data(rng, (48, 21))
    plain, counted, counter = parted_key(rng)
    expected, _ = api.quantize(x, bits=4, key=plain)
    equal_bits(api.quantize(x, bits=4, key=counted)[0], expected)
    assert counter.size == 1  # must live until here


def test_contexts(api: CApi, rng: np.random.Generator) -> None:
    x, other = data(rng, (9, 131)), CApi(3)
    assert api.lib.hot_context_threads(api._context) == 2
    assert other.lib.hot_context_threads(None) == 0
    api.key(KEY)
    copied = ctypes.c_void_p()
    api.on("hot_context_copy", ctypes.byref(copied))
    api.key(OTHER_KEY)  # does not belong to the copy
    api._context, first = copied, api._context
    q, s = np.empty((9, 131), np.int8), np.empty(9, np.float32)
    row, stochastic = CONSTANTS["HOT_SCALE_TOKEN"], CONSTANTS["HOT_STOCHASTIC"]
    api.on("hot_quantize", tensor(x), 8, row, stochastic, tensor(q), tensor(s))
    equal_bits(q, hotcore.quantize(x, key=KEY)[0])
    api._context = first
    api.lib.hot_context_destroy(copied)
    best = api.lib.hot_best_isa()
    assert ("plain", "avx2", "avx512", "amx")[best] == _core.best_isa()
    for isa in range(best + 1):
        other.on("hot_context_set_isa", isa)
        equal_bits(other.fwht(x[:, :128]), hotcore.fwht(x[:, :128]))
    other.close()
    other.lib.hot_context_destroy(None)


def refused(
    call: Callable[..., object], *words: str, of: Sequence[Any] = (), status: int = INVALID
) -> None:
    with pytest.raises(HotError) as error:
        call(*of)
    assert error.value.status == status, error.value
    for word in words:
        assert word in str(error.value)


def test_errors_of_contexts_and_names(api: CApi) -> None:
    refused(lambda: api.basis_order("sketch", 16), "basis_order: basis is sketch")
    refused(lambda: api.spec("best"), "recipe: name is 'best'")
    refused(lambda: api.on("hot_context_set_key", 1, 2, 8192, None), "8192")
    refused(lambda: api.on("hot_context_set_key", 1, 2, 3, 4), "multiple of 8")
    refused(lambda: api.on("hot_context_set_arch", 70), "arch is 70")
    refused(lambda: api.on("hot_context_set_sm_margin", -1), "sms is -1")
    if not _core.built_with_cuda():
        out = ctypes.c_void_p()
        arguments = "hot_context_cuda", 0, None, ctypes.byref(out)
        refused(api.call, "no CUDA backend", of=arguments, status=UNSUPPORTED)
        assert out.value is None


def test_wrong_numbers_and_nulls(api: CApi) -> None:
    x = np.zeros((8, 16), np.float32)
    good, fine = tensor(x), tensor(np.empty((8, 16), np.float32))
    for field, value, words in (
        ("dtype", 6, "x.dtype is 6; expected 0 to 5"),
        ("dtype", -1, "x.dtype is -1"),
        ("device_type", 2, "x.device_type is 2"),
        ("device_type", 1, "x"),  # CUDA memory in a CPU context
        ("ndim", 5, "x.ndim is 5; expected 0 to 4"),
        ("ndim", -1, "x.ndim is -1"),
        ("ndim", 0, "x"),
        ("data", None, "x"),
        ("struct_size", 0, "x.struct_size is 0; expected the size of the struct, 96"),
        ("struct_size", 95, "x.struct_size is 95"),
    ):
        bad = tensor(x)
        setattr(bad, field, value)
        refused(api.on, "fwht", words, of=("hot_fwht", bad, -1, 16, fine))
    context, place = api._context, ctypes.byref(ctypes.c_void_p())
    for words, name, *arguments in (
        ("x is null", "fwht", context, None, -1, 16, fine),
        ("out is null", "fwht", context, good, -1, 16, None),
        ("context is null", "fwht", None, good, -1, 16, fine),
        ("out is null", "context_copy", context, None),
        ("isa is 4; expected 0 to 3", "context_set_isa", context, 4),
        ("context is null", "context_set_key", None, 0, 0, 0, None),
        ("-1", "context_cpu", -1, place),
        ("executor.run is null", "context_cpu_on", None, None, 2, place),
        ("rows is null", "basis_order", 1, 16, None),
        ("bytes is null", "gemm_workspace", context, 1, 1, 1, None),
        ("name is null", "spec_recipe", None, make("hot_spec")),
        ("spec is null", "spec_recipe", b"fast", None),
    ):
        refused(api.call, words, of=(f"hot_{name}", *arguments))
    for field, value in (
        *(("basis", 4), ("gx_scale", 3), ("storage", 7), ("gw_scale", -1), ("gw_rounding", 3)),
        *(("storage", 2), ("equalize_tokens", 2), ("row_count", 65)),  # 2 was a form of storage
        *(("gx_bits", 5), ("hadamard_block", 0)),
    ):
        spec = api.spec("default")
        setattr(spec, field, value)
        refused(api.compress_activation, f"{field} is {value}", of=(x, spec))
    spec = api.spec("paper")
    spec.row_count = 2
    refused(lambda: api.compress_activation(x, spec), "spec.rows is null")
    for wrong in ("granularity", "rounding"):
        codes, q = {"granularity": 1, "rounding": 0, wrong: 9}, tensor(np.empty((8, 16), np.int8))
        arguments = "hot_quantize", good, 8, *codes.values(), q, fine
        refused(api.on, f"{wrong} is 9", of=arguments)


def test_fields_by_name(api: CApi) -> None:
    names = [field.name for field in FIELDS.values() if field.backward]
    names_of_c = [api.lib.hot_spec_field(i) for i in range(-1, len(names) + 1)]
    assert names_of_c == [None, *(name.encode() for name in names), None]
    room = ctypes.create_string_buffer(256)

    def get(spec: ctypes.Structure, name: str) -> str:
        api.call("hot_spec_get", spec, name.encode(), room, len(room))
        return room.value.decode()

    def text(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    for config in (
        *map(HotConfig.recipe, RECIPES),
        HotConfig.recipe("paper", rows=(0, 3), token_grid=(4, 5), prefix_tokens=1),
        HotConfig(equalize_tokens=True, gw_scale="tensor", gw_rounding="pseudo_stochastic"),
    ):
        by_number, by_name = api.spec(config), api.spec("default")
        for name in names:
            value = text(getattr(config, name))
            assert get(by_number, name) == value
            if name != "rows":
                api.call("hot_spec_set", by_name, name.encode(), value.encode())
                assert get(by_name, name) == value
        by_name.rows, by_name.row_count = by_number.rows, by_number.row_count
        assert bytes(by_name) == bytes(by_number)

    spec = api.spec("default")
    before = bytes(spec)
    for name, value, words in (
        ("speed", "1", ("no field 'speed'", "hadamard_block, gx_bits")),
        ("gx_bits", "four", ("gx_bits: 'four' is not a number",)),
        ("storage", "rht4", ("storage: 'rht4' is not one of 'int8'",)),
        ("rows", "1", ("rows is the caller's array",)),
    ):
        refused(api.call, *words, of=("hot_spec_set", spec, name.encode(), value.encode()))
    refused(lambda: api.call("hot_spec_set", spec, None, b"1"), "field is null")
    refused(lambda: api.call("hot_spec_set", spec, b"rank", None), "text is null")
    refused(lambda: api.call("hot_spec_get", spec, b"storage", room, 4), "storage needs 5")
    assert bytes(spec) == before
    api.call("hot_spec_get", spec, b"storage", room, 5)


def test_nothing_wanted_and_another_spec(api: CApi, rng: np.random.Generator) -> None:
    gy, w, x = (data(rng, shape) for shape in ((64, 6), (6, 5), (64, 5)))
    spec = api.spec("accurate")
    _, saved = api.compress_activation(x, spec)
    _, weight = api.quantize_weight(w, spec)

    def run(change: dict[str, Any], operand: Any = None, need: tuple[str, ...] = ("gw",)) -> None:
        config = dataclasses.replace(HotConfig.recipe("accurate"), **change)
        api.backward_linear(gy, operand, saved, api.spec(config), in_features=5, need=need)

    refused(lambda: run({}, need=()), "out requests no gradient")
    for change in ({"basis": "sketch"}, {"gw_scale": "tensor"}, {"equalize_tokens": True}):
        refused(lambda c=change: run(c), "saved was made", "another spec")
    refused(lambda: run({"gx_bits": 4}, weight, ("gx",)), "w was made", "another spec")
    run({"gx_bits": 4})  # x does not depend on this field
    saved.format = 0
    refused(lambda: run({}), "saved.format is 0")
    saved.struct_size = 8
    refused(lambda: run({}), "saved.struct_size is 8")


def test_reserved_members_are_zero(api: CApi) -> None:
    """Other values are reserved for later versions."""
    spec, forward, w = api.spec("default"), api.forward_spec(16), np.ones((8, 16), np.float32)
    memory, saved = aligned(1 << 16), make("hot_saved")
    kept = (*room(memory), None, 0, saved)
    spec.reserved = forward.reserved = 1
    refused(lambda: api.on("hot_compress_activation", tensor(w), spec, *kept), "spec.reserved is 1")
    arguments = "hot_forward_weight_bytes", 8, 16, forward
    refused(api.number, "spec.reserved is 1; expected 0", of=arguments)
    spec.reserved = 0
    api.on("hot_compress_activation", tensor(w), spec, *kept)
    gw, workspace = np.ones((8, 16), np.float32), aligned(1 << 16)
    view = tensor(gw)
    out = make("hot_gradients", gw=ctypes.addressof(view))
    arguments = tensor(w[:, :8]), None, saved, spec, out, *room(workspace)
    for given, words in ((saved, "saved.reserved is 1"), (out, "out.reserved is 1")):
        given.reserved = 1
        refused(api.on, words, of=("hot_backward_linear", *arguments))
        given.reserved = 0
    assert (gw == 1).all()


def test_supported_says_why(api: CApi) -> None:
    spec = api.spec("paper")
    spec.grid_h = spec.grid_w = 14
    spec.prefix_tokens = 1
    api.on("hot_supported", 197, 64, 48, spec)
    refused(lambda: api.on("hot_supported", 196, 64, 48, spec), "196", status=UNSUPPORTED)
    refused(lambda: api.on("hot_supported", 197, 64, 48, None), "spec is null")


def test_errors_are_of_their_thread(api: CApi) -> None:
    refused(lambda: api.spec("best"), "best")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(api.lib.hot_last_error).result() == b""
    assert b"best" in api.lib.hot_last_error()
    api.fwht(np.zeros((1, 16), np.float32))  # a successful call keeps the text
    assert b"best" in api.lib.hot_last_error()


def test_longer_structs_of_a_later_header(api: CApi) -> None:
    x, out = np.arange(16, dtype=np.float32), np.empty(16, np.float32)

    class Longer(ctypes.Structure):
        _fields_ = [("tensor", STRUCTS["hot_tensor"]), ("later", ctypes.c_int64)]

    longer = Longer(tensor(x), 0)
    longer.tensor.struct_size = ctypes.sizeof(Longer)
    api.on("hot_fwht", longer, -1, 16, tensor(out))
    equal_bits(out, hotcore.fwht(x))
    longer.later = 1
    arguments = "hot_fwht", longer, -1, 16, tensor(out)
    refused(api.on, "x.struct_size is 104", hotcore.__version__, of=arguments)
    # The library fills the members that it knows.
    memory = ctypes.create_string_buffer(b"\x5a" * 256)
    size = ctypes.sizeof(STRUCTS["hot_spec"])
    ctypes.cast(memory, ctypes.POINTER(ctypes.c_size_t))[0] = 256
    api.call("hot_spec_recipe", b"fast", memory)
    assert memory.raw[8:size] == bytes(api.spec("fast"))[8:]
    assert memory.raw[size:256] == b"\x5a" * (256 - size)


def test_names_and_the_build() -> None:
    lib = library()
    assert lib.hot_version().decode() == hotcore.__version__ == _core.version()
    assert bool(lib.hot_built_with_cuda()) == _core.built_with_cuda()
    assert lib.hot_cuda_architectures().decode() == _core.cuda_architectures()
    names = [lib.hot_recipe_name(i) for i in range(-1, len(RECIPES) + 1)]
    assert names == [None, *(name.encode() for name in RECIPES), None]
    for name in ("OK", "INVALID_ARGUMENT", "UNSUPPORTED", "WORKSPACE_TOO_SMALL",
                 "CUDA_ERROR", "OUT_OF_MEMORY", "INTERNAL_ERROR"):  # fmt: skip
        assert lib.hot_status_name(CONSTANTS[f"HOT_{name}"]).decode() == name.lower()
    assert lib.hot_status_name(-1) == lib.hot_status_name(7) == b"unknown"
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I32": 4, "I4X2": 1}
    assert {n: lib.hot_dtype_size(CONSTANTS[f"HOT_{n}"]) for n in sizes} == sizes
    assert lib.hot_dtype_size(6) == lib.hot_dtype_size(-1) == 0


def test_libhot_exports_its_own_names_alone() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    listed = ran(nm, "-D", "--defined-only", library()._name).stdout
    symbols = {line.split()[-1] for line in listed.splitlines()}
    plain = {name for name in symbols if not re.match(r"_Z(N|NK|TIN|TSN|TVN)3hot", name)}
    assert plain == set(prototypes())
    # C++ symbols are those of the public headers; none is in hot::detail.
    assert not [name for name in symbols if "3hot6detail" in name]
