"""JSON from untrusted texts, within limits.

The standard parser accepts any depth (up to a RecursionError), any size, duplicate names and
numbers of any length. Here each of these raises a ValueError that says where it is.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_TEXT_LENGTH = 1 << 20
"""Limit of characters in a configuration's text."""

MAX_DEPTH = 16
"""Limit of nested lists and objects."""

_DIGITS = 20  # a 64-bit number with its sign
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)  # a string or a bracket


def parse(text: str, name: str) -> Any:
    """Parse ``text``. Raises a ValueError that begins with ``name``."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group(), 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"{name}: JSON nested deeper than {MAX_DEPTH} at {token.start()}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                raise ValueError(f"{name}: {key!r} occurs twice")
            fields[key] = value
        return fields

    def integer(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise ValueError(f"{name}: a number of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=once, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
