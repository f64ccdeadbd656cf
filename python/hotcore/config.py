"""Configuration of a layer: :class:`HotConfig`, its recipes, and the random key."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json as _json
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args

from . import _core, _strict_json

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Types for editors and type checkers; a configuration checks its values when it is made.
RecipeName = Literal["default", "fast", "paper", "accurate"]
Basis = Literal["full", "lowpass", "sequency", "sketch"]
Rounding = Literal["stochastic", "nearest", "pseudo_stochastic"]
GxScale = Literal["token", "tensor"]
GwScale = Literal["channel", "tensor", "token"]
Storage = Literal["int8", "int4"]
Forward = Literal["plain", "int8"]


class HotConfigFields(TypedDict, total=False):
    """Some fields of a :class:`HotConfig`: what a recipe or an override changes."""

    hadamard_block: int
    gx_bits: Literal[4, 8]
    gx_scale: GxScale
    gx_rounding: Rounding
    basis: Basis
    rank: int
    block: int
    rows: tuple[int, ...] | None
    token_grid: tuple[int, int] | None
    prefix_tokens: int
    gw_scale: GwScale
    gw_rounding: Rounding
    storage: Storage
    equalize_tokens: bool
    forward: Forward
    forward_block: int
    forward_in_eval: bool


RECIPES: dict[RecipeName, dict[str, Any]] = {n: _core.recipe(n) for n in get_args(RecipeName)}
"""Recipe -> the fields that differ from the defaults. libhot has the table (hot::recipe)."""


class Key(NamedTuple):
    """Key of the counter-based random numbers; the same key and inputs give the same bits.

    ``seed`` and ``offset`` are 64-bit; ``stream`` (0 to 8191) distinguishes layers. ``counter`` is
    for CUDA graphs: the address of a 64-bit number (an int64 tensor's ``data_ptr()``), or 0. The
    number is added to ``offset`` modulo 2**64 when the work runs: on CUDA at every replay, on the
    CPU during the call. Its memory is on the arrays' device. The caller keeps it alive and does
    not change it between a compression and its backward. Source: docs/numerics.md, "Random bits".
    """

    seed: int
    offset: int = 0
    stream: int = 0
    counter: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        if self.counter:
            raise TypeError("key: counter is an address of this process, which cannot be pickled")
        return Key, tuple(self)


def as_key(key: Key | int | tuple[int, ...], name: str = "key") -> Key:
    """Return ``key`` as a checked :class:`Key`; a bare int is a seed. Raises ValueError."""
    fields: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    try:
        if bool in map(type, fields):  # True is an int
            raise TypeError
        full = Key(*map(operator.index, fields))
    except TypeError:
        raise TypeError(f"{name}: expected a Key or an int seed, got {key!r}") from None
    for field, value, bits in zip(full._fields, full, (64, 64, 13, 64), strict=True):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name}: {field} = {value} is outside 0 <= {field} < 2**{bits}")
    if full.counter % 8:
        raise ValueError(
            f"{name}: counter = {full.counter} is no address of 64-bit numbers; "
            "expected a multiple of 8"
        )
    return full


def as_int(value: Any, name: str, bits: int = 32) -> int:
    """Return ``value`` as an int of that many bits. Raises TypeError, ValueError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {value!r}") from None
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise ValueError(f"{name}: {number} does not fit {bits} bits")
    return number


def as_size(value: Any, name: str, bits: int = 32) -> int:
    """Return :func:`as_int`'s number. Raises ValueError for one below zero, too."""
    number = as_int(value, name, bits)
    if number < 0:
        raise ValueError(f"{name}: {number} is negative")
    return number


def as_ints(
    value: Any, name: str, expected: str, count: int | None = None, bits: int = 32
) -> tuple[int, ...]:
    """Return ``value`` as a tuple of (``count``) ints. Raises TypeError, ValueError."""
    try:
        items = tuple(value)
        if count in (None, len(items)):
            return tuple(as_int(item, name, bits) for item in items)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected {expected}, got {value!r}")


def check_ints(bits: int = 32, /, **values: Any) -> None:
    """Refuse a value that is no int of that many bits. nanobind's error would not name it."""
    for name, value in values.items():
        as_int(value, name, bits)


def check_type(kind: type[str] | type[bool], **values: Any) -> None:
    """Refuse a value of another type; see :func:`check_ints`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r}")


class Field(NamedTuple):
    """A row of libhot's table of fields (cpp/src/config_fields.h)."""

    name: str
    type: Literal["int", "bool", "choice", "ints", "grid"]
    choices: tuple[str, ...]
    default: Any
    values: str
    """Allowed values in words, for a field without choices."""
    doc: str
    backward: bool
    """Whether the field belongs to the backward pass; the others are the forward's."""

    def values_text(self, quote: str = "``") -> str:
        """Return the allowed values: the choices, or words for a number."""
        if self.type == "bool":
            return f"{quote}False{quote} or {quote}True{quote}"
        return ", ".join(f'{quote}"{choice}"{quote}' for choice in self.choices) or self.values


FIELDS = {row[0]: Field(*row) for row in _core.config_fields()}
"""Every field of a configuration, in order."""


def check_names(names: Iterable[str], where: str, arguments: Sequence[str] = ()) -> None:
    """Refuse names of no field: ValueError, or TypeError where a call has other ``arguments``."""
    for name in names:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, [*FIELDS, *arguments], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields: {', '.join(FIELDS)}"
            if arguments:
                raise TypeError(f"{where}: unexpected argument {name!r}; {hint}")
            raise ValueError(f"{where}: HotConfig has no field {name!r}; {hint}")


def _ask(call: Callable[..., Any], *arguments: Any, **names: str) -> None:
    """Let libhot check fields. Raises its ValueError as ``field: expected ..., got ...``.

    ``names`` maps libhot's name of a field to HotConfig's.
    """
    try:
        call(*arguments)
    except ValueError as error:
        parts = re.match(r"\w+: (\w+)(?:\[\d+\])?:? (is )?(.*)", str(error))
        assert parts is not None, error
        name, value, text = parts.groups()
        if value:
            text = re.sub(r"^([^;]+); (expected .*)", r"\2, got \1", text)
        raise ValueError(f"{names.get(name, name)}: {text}") from None


@dataclasses.dataclass(frozen=True)
class HotConfig:
    """Settings of one HOT linear layer; ``HotConfig()`` is the recipe ``"default"``.

    The constructor checks every field: a ValueError (TypeError for a wrong type) names it. Source:
    docs/numerics.md; docs/recipes.md.
    """

    hadamard_block: int = 16
    gx_bits: Literal[4, 8] = 8
    gx_scale: GxScale = "token"
    gx_rounding: Rounding = "stochastic"
    basis: Basis = "full"
    rank: int = 16
    block: int = 16
    rows: tuple[int, ...] | None = None
    token_grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    gw_scale: GwScale = "channel"
    gw_rounding: Rounding = "stochastic"
    storage: Storage = "int4"
    equalize_tokens: bool = False
    forward: Forward = "plain"
    forward_block: int = 64
    forward_in_eval: bool = False

    if TYPE_CHECKING:
        json: str = dataclasses.field(init=False)
        """:meth:`to_json` with apostrophes: inductor's C++ wrapper does not escape quotes."""
        spec: _core.Spec = dataclasses.field(init=False)
        """The backward's settings as a libhot object, made once."""
        forward_spec: _core.ForwardLinearSpec = dataclasses.field(init=False)
        """The forward's settings as a libhot object, made once."""

    def __post_init__(self) -> None:
        values = tuple([getattr(self, name) for name in _NAMES])
        rows, token_grid, text = _checked(values)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "token_grid", token_grid)
        # No property: torch.compile can read an attribute but cannot trace its computation.
        object.__setattr__(self, "json", own_text(text))

    def _check(self) -> None:
        for name in _NAMES:
            self._check_type(FIELDS[name])
        if self.rows is not None:
            object.__setattr__(self, "rows", as_ints(self.rows, "rows", "ints"))
        if self.token_grid is not None:
            grid = as_ints(self.token_grid, "token_grid", "(height, width)", 2)
            if min(grid) < 1:
                raise ValueError(f"token_grid: expected sides of at least 1, got {grid}")
            object.__setattr__(self, "token_grid", grid)
        if self.rows == ():  # for libhot's spec it would mean None
            raise ValueError("rows: an empty list")
        if self.forward_in_eval and self.forward == "plain":
            raise ValueError("forward_in_eval: True requires forward='int8', got 'plain'")
        _ask(_core.forward_input_bytes, 0, 0, self.forward_spec, hadamard_block="forward_block")
        _ask(_core.saved_layout, 0, 0, self.spec)
        if self.basis == "full":  # libhot ignores the fields of a low rank, which are checked here
            layout = (*(self.token_grid or (1, 1)), self.prefix_tokens)
            rank = min(self.rank, self.block)  # a block below the default rank is no error
            _ask(_core.hla_rows, 0, "sequency", self.block, rank, (), *layout)

    def _check_type(self, field: Field) -> None:
        """Refuse a value of another type, or one that is no choice. Lists are checked later."""
        value = getattr(self, field.name)
        if field.type == "int":
            if not isinstance(value, int):
                raise TypeError(f"{field.name}: expected an int, got {value!r}")
            as_int(value, field.name)
        elif field.type == "bool":
            check_type(bool, **{field.name: value})
        elif field.type == "choice" and not (isinstance(value, str) and value in field.choices):
            known = ", ".join(map(repr, field.choices))
            raise ValueError(f"{field.name}: {value!r} is not one of {known}")

    @classmethod
    def recipe(
        cls, name: RecipeName | None = None, **overrides: Unpack[HotConfigFields]
    ) -> HotConfig:
        """Return the named recipe with some fields replaced; ValueError for unknown names."""
        return cls(*_chosen(name, tuple(overrides.items())))

    @property
    def name(self) -> RecipeName | Literal["custom"]:
        """The recipe that equals this configuration, or ``"custom"``."""
        name, changed = self._nearest()
        return "custom" if changed else name

    def to_json(self) -> str:
        """All fields as one line of JSON, which :meth:`from_json` reads back."""
        return _json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> HotConfig:
        """Make a configuration from :meth:`to_json`'s text, at most 1 MiB.

        Raises ValueError for another text, and names an unknown field or a bad value.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a str, got {type(text).__name__}")
        if len(text) > _strict_json.MAX_TEXT_LENGTH:
            raise ValueError(f"text: longer than {_strict_json.MAX_TEXT_LENGTH} characters")
        fields = _strict_json.parse(text, "text")
        if not isinstance(fields, dict):
            raise ValueError(f"text: expected a JSON object, got {type(fields).__name__}")
        check_names(fields, "text")
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:  # a bad value: the names are known
            raise ValueError(f"text: {error}") from None

    def spec_fields(self) -> dict[str, Any]:
        """Return the backward's fields as libhot's bindings take them."""
        return {name: getattr(self, name) for name in _NAMES if FIELDS[name].backward}

    def __getattr__(self, name: str) -> Any:
        """Make :attr:`spec` or :attr:`forward_spec` at the first read; later reads find it."""
        # No functools.cached_property: its lock (until Python 3.12) can hang a forked process.
        if name == "spec":
            value: Any = _core.Spec(**self.spec_fields())
        elif name == "forward_spec":
            value = _core.ForwardLinearSpec(hadamard_block=self.forward_block)
        else:
            raise AttributeError(f"HotConfig has no attribute {name!r}")
        self.__dict__[name] = value
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached values (the libhot object cannot be pickled)."""
        return {name: getattr(self, name) for name in _NAMES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_names(state, "state")
        self.__dict__.update(state)
        self.__post_init__()

    def _nearest(self) -> tuple[RecipeName, dict[str, Any]]:
        """Return the first recipe that differs in the fewest fields, and those fields."""
        values = self.__getstate__().items()
        changes = [
            (name, {field: value for field, value in values if value != recipe[field]})
            for name, recipe in _RECIPES.items()
        ]
        return min(changes, key=lambda pair: len(pair[1]))

    def __str__(self) -> str:
        """The nearest recipe and the changed fields: ``default, forward='int8'``."""
        name, changed = self._nearest()
        return ", ".join([name, *(f"{field}={value!r}" for field, value in changed.items())])

    def __repr__(self) -> str:
        """An expression: ``HotConfig.recipe('default', forward='int8')``."""
        name, *fields = str(self).split(", ", 1)
        return f"HotConfig.recipe({', '.join([repr(name), *fields])})"


if HotConfig.__doc__:  # not with python -OO
    # The compiler removes a docstring's indentation from Python 3.13 on.
    HotConfig.__doc__ = inspect.cleandoc(HotConfig.__doc__) + "\n\nArgs:\n"
    for _field in FIELDS.values():
        _text = f"{_field.name}: {_field.doc}. Values: {_field.values_text()}. Default: "
        _lines = textwrap.wrap(f"{_text}``{_field.default!r}``.", 88, subsequent_indent="    ")
        HotConfig.__doc__ += textwrap.indent("\n".join(_lines), " " * 4) + "\n"

_NAMES = tuple(field.name for field in dataclasses.fields(HotConfig))

_RECIPES: dict[RecipeName, dict[str, Any]] = {
    recipe: {name: changes.get(name, getattr(HotConfig, name)) for name in _NAMES}
    for recipe, changes in RECIPES.items()
}
"""Recipe -> all of its fields."""


def own_text(config: str) -> str:
    """The text as :attr:`HotConfig.json` has it; operators called by hand may have to_json's."""
    return config.replace('"', "'")


def _checked(values: tuple[Any, ...]) -> tuple[Any, Any, str]:
    """Check the values of all fields; return ``rows``, ``token_grid`` and the JSON."""
    config = object.__new__(HotConfig)
    config.__dict__.update(zip(_NAMES, values, strict=True))
    config._check()
    return config.rows, config.token_grid, config.to_json()


def _check_recipe(recipe: Any, name: str) -> None:
    if not isinstance(recipe, str) or recipe not in RECIPES:
        hint = "; for the 8-bit forward: recipe('default', forward='int8')"
        known = ", ".join(map(repr, RECIPES)) + (hint if recipe == "int8" else "")
        raise ValueError(f"{name}: {recipe!r} is not one of {known}")


def _chosen(name: Any, overrides: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    """Return the values of all fields of a recipe with overrides. Raises ValueError."""
    check_names((field for field, _ in overrides), "recipe")
    if name is None:
        raise ValueError(f"recipe: no name given; expected one of {', '.join(map(repr, RECIPES))}")
    _check_recipe(name, "recipe")
    return tuple({**_RECIPES[name], **dict(overrides)}.values())


# A configuration is a constant of torch.compile's graph: these functions run while it traces.
# torch.compiler.assume_constant_result sets the same attribute, but would need torch.
for _function in (_checked, _chosen):
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]  # functions take any


ConfigLike = HotConfig | RecipeName
"""A configuration, or the name of a recipe."""

RECIPE_TEXTS: dict[str, str] = {name: HotConfig.recipe(name).json for name in RECIPES}
"""Every recipe as JSON."""


def as_config(config: HotConfig | str, name: str = "config") -> HotConfig:
    """Return ``config``, or the recipe of that name. ValueError and TypeError name the argument."""
    if isinstance(config, HotConfig):
        return config
    if isinstance(config, str):
        _check_recipe(config, name)
        return HotConfig.recipe(config)  # type: ignore[arg-type]  # checked
    raise TypeError(f"{name}: expected a HotConfig or a recipe's name, got {type(config).__name__}")
