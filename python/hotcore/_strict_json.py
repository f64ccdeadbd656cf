"""JSON from untrusted files and texts: limits first, then the expected fields and types.

The standard parser accepts any depth (up to a RecursionError), any size, duplicate names and
numbers of any length. Here every such defect raises a ValueError that says where it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_TEXT_LENGTH = 1 << 20
"""Most characters of a configuration's text."""

MAX_FILE_BYTES = 64 << 20
"""Most bytes of a plan's file: about 4,000 layers with their patterns."""

MAX_DEPTH = 16
"""Most levels of nested lists and objects."""

_DIGITS = 20  # of a 64-bit number with its sign
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)  # texts hide their brackets


def parse(text: str, name: str) -> Any:
    """Parse ``text``. Raises a ValueError that begins with ``name``."""
    depth = 0
    for token in _TOKEN.finditer(text):
        bracket = token.group()
        if bracket in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"{name}: JSON nested deeper than {MAX_DEPTH} at {token.start()}")
        elif bracket in ("]", "}"):
            depth -= 1

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{name}: {key!r} occurs twice")
            found[key] = value
        return found

    def integer(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise ValueError(f"{name}: a number of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=once, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON ({error})") from None


def read(path: str | Path, name: str) -> Any:
    """Parse a file of at most :data:`MAX_FILE_BYTES` bytes."""
    with Path(path).open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{name}: larger than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
    return parse(text, name)


class Fields:
    """The fields of a JSON object, taken one by one; every ValueError names object and field."""

    def __init__(self, content: Any, name: str) -> None:
        """Take ``content``, which has to be an object."""
        if not isinstance(content, dict):
            raise ValueError(f"{name}: expected a JSON object, got {_kind(content)}")
        self._content: Mapping[str, Any] = content
        self._name = name
        self._taken: set[str] = set()

    def take(self, field: str, kind: type[T] | tuple[type[T], ...]) -> T:
        """Return a field of that type."""
        self._taken.add(field)
        if field not in self._content:
            raise ValueError(f"{self._name}: {field!r} is missing")
        return expect(self._content[field], kind, f"{self._name}: {field}")

    def end(self) -> None:
        """Refuse fields that were not taken."""
        for field in self._content:
            if field not in self._taken:
                raise ValueError(f"{self._name}: unknown field {field!r}")


def expect(value: Any, kind: type[T] | tuple[type[T], ...], name: str) -> T:
    """Return ``value`` if it has that type; a bool is no number. Raises ValueError."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
        raise ValueError(f"{name}: expected {expected}, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)


_NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "a bool",
    type(None): "null",
}
