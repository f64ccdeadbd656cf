"""HotConfig, its recipes, and keys."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import hotcore
import numpy as np
import pytest
from hotcore import HotConfig, Key
from hotcore.config import FIELDS, RECIPES, Field, HotConfigFields, as_config, as_key
from hypothesis import given
from hypothesis import strategies as st
from support import refused

BAD_FIELDS: list[tuple[str, object, type[Exception]]] = [
    ("basis", ["full"], ValueError),
    ("basis", np.array(["full", "sketch"]), ValueError),
    ("hadamard_block", 12, ValueError),
    ("hadamard_block", 0, ValueError),
    ("hadamard_block", 512, ValueError),
    ("hadamard_block", 16.0, TypeError),
    ("gx_bits", 5, ValueError),
    ("gx_bits", "8", TypeError),
    ("gx_bits", True, TypeError),
    ("gx_scale", "channel", ValueError),
    ("gx_rounding", "up", ValueError),
    ("basis", "high", ValueError),
    ("rank", -4, ValueError),
    ("block", 1, ValueError),
    ("block", 24, ValueError),
    ("block", 128, ValueError),
    ("gw_scale", "row", ValueError),
    ("gw_rounding", None, ValueError),
    ("storage", "fp8", ValueError),
    ("forward", "fp8", ValueError),
    ("forward", 8, ValueError),
    ("forward_block", 48, ValueError),
    ("forward_block", 512, ValueError),
    ("forward_block", 64.0, TypeError),
    ("forward_in_eval", 1, TypeError),
    ("forward_in_eval", True, ValueError),  # needs an 8-bit forward
    ("rows", (1, 2), ValueError),  # needs lowpass
    ("token_grid", (0, 4), ValueError),
    ("token_grid", (4,), TypeError),
    ("prefix_tokens", -1, ValueError),
    ("equalize_tokens", 1, TypeError),
]

BAD_PAIRS = [
    ("rank", dict(basis="lowpass", storage="int8", rank=0)),
    ("rank", dict(basis="lowpass", storage="int8", rank=17)),
    ("rank", dict(basis="sketch", storage="int8", rank=6)),
    ("rank", dict(basis="sketch", storage="int8", rank=1)),
    ("rank", dict(basis="sketch", storage="int8", rank=2, block=64)),
    ("rows", dict(basis="lowpass", storage="int8", rows=(1, 1))),
    ("rows", dict(basis="lowpass", storage="int8", rows=(16,))),
    ("rows", dict(basis="lowpass", storage="int8", rows=())),
    ("storage", dict(basis="sketch", rank=8)),
    ("prefix_tokens", dict(basis="lowpass", storage="int8", rank=8, prefix_tokens=1)),
]


def unlike_the_table(table: Mapping[str, Field]) -> list[str]:
    typed, loose = get_type_hints(HotConfig), get_type_hints(HotConfigFields)
    names = [field.name for field in dataclasses.fields(HotConfig)]
    wrong = [f"{name} is missing" for name in table if name not in names]
    if names != list(table)[: len(names)]:
        wrong.append(f"another order: {names}")
    plain = {"int": int, "bool": bool}
    plain |= {"ints": tuple[int, ...] | None, "grid": tuple[int, int] | None}
    for name in names:
        field = table[name]
        hints = {typed[name], loose.get(name)}
        if field.type == "choice":
            hints = {get_origin(hint) and frozenset(get_args(hint)) for hint in hints}
            expected: object = frozenset(field.choices)
        else:
            expected = Literal[4, 8] if name == "gx_bits" else plain[field.type]
        if hints != {expected}:
            wrong.append(f"{name} is of type {hints}; expected {expected}")
        if getattr(HotConfig, name) != field.default:
            wrong.append(f"{name} is {getattr(HotConfig, name)!r} by default")
    return wrong


def test_the_class_is_the_table() -> None:
    assert unlike_the_table(FIELDS) == []
    sauce = Field("sauce", "choice", ("mild", "hot"), "mild", "", "what goes with it", True)
    assert unlike_the_table({**FIELDS, "sauce": sauce}) == ["sauce is missing"]
    other = {**FIELDS, "rank": FIELDS["rank"]._replace(default=8)}
    assert unlike_the_table(other) == ["rank is 16 by default"]
    more = FIELDS["basis"]._replace(choices=("full", "sketch"))
    assert unlike_the_table({**FIELDS, "basis": more})[0].startswith("basis is of type")
    for field in FIELDS.values():
        assert f"\n    {field.name}: " in (inspect.getdoc(HotConfig) or "")
        assert field.doc and (field.choices or field.values or field.type == "bool")


def test_no_other_place_lists_the_fields() -> None:
    # Code that reads the table (bindings, JAX, the C ABI) names no field itself. Only hla
    # takes some as arguments.
    root = Path(__file__).resolve().parents[2]
    of_hla = {"basis", "block", "rank", "rows", "prefix_tokens", "hadamard_block", "token_grid"}
    for place in (
        *sorted((root / "python/bindings").glob("*.*")),
        *sorted((root / "python/hotcore/jax").glob("*.py")),
        root / "cpp/src/c_api.cpp",
    ):
        words = set(re.findall(r"\w+", re.sub(r"#.*|//.*", "", place.read_text())))
        named = {name for name, field in FIELDS.items() if field.backward} & words
        assert named <= of_hla, place


def test_recipes_are_the_specs() -> None:
    assert HotConfig() == HotConfig.recipe("default") and HotConfig().name == "default"
    fields = ("gx_bits", "gx_scale", "basis", "gw_scale", "storage")
    expected = {
        "default": (8, "token", "full", "channel", "int4"),
        "fast": (8, "token", "sketch", "channel", "int8"),
        "paper": (4, "tensor", "lowpass", "tensor", "int8"),
        "accurate": (8, "token", "full", "channel", "int8"),
    }
    assert set(RECIPES) == set(expected)
    for name, values in expected.items():
        config = HotConfig.recipe(name)
        assert tuple(getattr(config, field) for field in fields) == values
        assert config.name == name and not config.equalize_tokens
    for name in ("fast", "paper"):
        assert HotConfig.recipe(name).rank == 8


ALL_BAD = [(field, {field: value}, error) for field, value, error in BAD_FIELDS]
ALL_BAD += [(field, changes, ValueError) for field, changes in BAD_PAIRS]


@pytest.mark.parametrize(("field", "changes", "error"), ALL_BAD)
def test_errors_name_the_field(field: str, changes: dict, error: type[Exception]) -> None:
    refused(HotConfig, rf"^{field}: ", error, **changes)


def test_overrides() -> None:
    config = HotConfig.recipe("paper", gx_rounding="pseudo_stochastic", token_grid=[14, 14])
    fields = config.token_grid, config.gx_rounding, config.name
    assert fields == ((14, 14), "pseudo_stochastic", "custom")
    changes = "gx_rounding='pseudo_stochastic', token_grid=(14, 14)"
    assert repr(config) == f"HotConfig.recipe('paper', {changes})"
    assert repr(HotConfig.recipe("fast")) == "HotConfig.recipe('fast')"
    assert eval(repr(config)) == config
    for name, fields, message in (
        ("best", {}, "recipe: 'best' is not one of 'default', 'fast', 'paper', 'accurate'$"),
        ("int8", {}, r"recipe: 'int8' is .*; for .*: recipe\('default', forward='int8'\)"),
        (["fast"], {}, "recipe: .* is not one of 'default'"),
        (None, {"gx_bits": 4}, "recipe: no name given; expected one of 'default'"),
        (None, {"gx_bit": 4}, "no field 'gx_bit'; did you mean 'gx_bits'"),
        ("fast", {"speed": 1}, "recipe: HotConfig has no field 'speed'; fields: hadam"),
        ("fast", {"storage": "int4"}, "storage: expected basis full .*, got int4 with"),
        ("fast", {"storage": "rht4"}, "storage: 'rht4' is not one of 'int8', 'int4'"),
        ("fast", {"hadamard_block": 12}, "hadamard_block: expected a power .* to 256, got 12$"),
        ("fast", {"forward_block": 512}, "forward_block: expected a .* 1 to 64, or 256, got 512$"),
    ):
        refused(HotConfig.recipe, message, ValueError, name, **fields)


def test_the_forward_is_an_option_of_every_recipe() -> None:
    for name in RECIPES:
        plain, config = HotConfig.recipe(name), HotConfig.recipe(name, forward="int8")
        assert plain.forward == "plain" and plain.forward_block == 64
        assert repr(config) == f"HotConfig.recipe({name!r}, forward='int8')"
        assert eval(repr(config)) == config != plain
        assert HotConfig.from_json(config.to_json()) == config
        # A text from before these fields existed.
        fields = {k: v for k, v in json.loads(plain.to_json()).items() if "forward" not in k}
        assert HotConfig.from_json(json.dumps(fields)) == plain
        assert config.forward_spec is config.forward_spec
        assert config.forward_spec.hadamard_block == 64
    other = HotConfig(gx_bits=4, gx_scale="tensor", forward="int8", forward_in_eval=True)
    assert eval(repr(other)) == other
    fields = "gx_bits=4, gx_scale='tensor', forward='int8', forward_in_eval=True"
    assert str(other) == f"default, {fields}"


def test_frozen_hashable_and_replaceable() -> None:
    config = HotConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 4  # type: ignore[misc]
    assert len({config, HotConfig(), HotConfig.recipe("fast")}) == 2
    assert dataclasses.replace(config, gx_bits=4) == HotConfig(gx_bits=4)


@pytest.mark.parametrize("name", [*RECIPES, "every field"])
def test_copies_and_json(name: str) -> None:
    config = HotConfig.recipe("paper", rows=(0, 3, 5), token_grid=(2, 8), prefix_tokens=2)
    if name in RECIPES:
        config = HotConfig.recipe(name)
    assert config.spec is config.spec  # made once, and copies work
    copies = pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)
    for again in (*copies, HotConfig.from_json(config.to_json())):
        assert again == config and again.spec is not None


@given(
    block=st.sampled_from([2, 4, 8, 16, 32, 64]),
    basis=st.sampled_from(["lowpass", "sequency", "sketch"]),
    rank=st.integers(0, 70),
)
def test_what_passes_here_passes_there(block: int, basis: str, rank: int) -> None:
    # The checks of Python and of the library agree on every rank and block.
    def passes(call: Callable[..., object], *arguments: object, **more: object) -> bool:
        try:
            call(*arguments, basis=basis, block=block, rank=rank, **more)
        except ValueError:
            return False
        return True

    there = passes(hotcore.hla, np.zeros((5, 2), np.float32))
    assert passes(HotConfig, storage="int8") == there


def test_as_config() -> None:
    assert as_config("fast") == HotConfig.recipe("fast")
    config = HotConfig(gx_bits=4)
    assert as_config(config) is config
    refused(lambda: as_config(None), "config: ", TypeError)
    refused(lambda: as_config("nope", "head"), "^head: 'nope' is not one of 'default'")


def test_keys() -> None:
    assert as_key(5) == Key(5, 0, 0) == as_key(Key(5)) == as_key(np.int64(5))
    assert as_key((1, 2)) == Key(1, 2, 0)
    for bad in (Key(-1), Key(1 << 64), Key(0, -1), Key(0, 1 << 64), Key(0, 0, 8192), Key(0, 0, -1)):
        refused(as_key, r"key: (seed|offset|stream) = ", ValueError, bad)
    for wrong in ("1", 1.5, None, (1, "2"), (1, 2, 3, 8, 5), True, Key(True), Key(0, False)):
        refused(as_key, "", TypeError, wrong)


def test_an_address_is_not_pickled() -> None:
    """Regression: another process that read the address crashed."""
    key = Key(1, 2, 3)
    assert pickle.loads(pickle.dumps(key)) == key and type(copy.deepcopy(key)) is Key
    saved = hotcore.compress_activation(np.ones((4, 4), np.float32), key=key)
    again = pickle.loads(pickle.dumps(saved))
    assert again.key == key
    count = np.zeros(1, np.uint64)
    counted = key._replace(counter=count.ctypes.data)
    for holder in (counted, dataclasses.replace(saved, key=counted)):
        refused(pickle.dumps, "key: counter is an address of this process", TypeError, holder)


def test_counters_of_keys() -> None:
    assert as_key((1, 2, 3, 4096)) == Key(1, 2, 3, 4096) == as_key(Key(1, 2, 3, np.uint64(4096)))
    for bad in (-8, 1 << 64):
        refused(as_key, r"key: counter = .* < 2\*\*64", ValueError, Key(1, counter=bad))
    for odd in (1, 4, 4097):
        refused(as_key, f"key: counter = {odd} .*multiple of 8", ValueError, Key(1, counter=odd))
