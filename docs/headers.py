"""The reference of the C++ and C headers: a table of them and of their functions, then each header.

docs/conf.py puts it where docs/api/cpp.md has the line ``<!-- headers -->``, so that a new header
is on the site without being named anywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "cpp/include/hot"


def headers() -> list[Path]:
    """All public headers, the one that includes the others first."""
    return sorted((ROOT / FOLDER).glob("*.h"), key=lambda path: (path.name != "hot.h", path.name))


def purpose(text: str) -> str:
    """The first sentence of a header's opening comment."""
    lines = re.match(r"/\*.*?\*/|(?://.*\n)+", text, re.DOTALL)
    if lines is None:
        return ""
    words = re.sub(r"^\s*(//|/?\*+/?)", "", lines[0], flags=re.MULTILINE).split()
    return re.split(r"(?<=\.) ", " ".join(words))[0]


def functions(text: str) -> list[str]:
    """Names of the exported functions, in order, each once."""
    return list(dict.fromkeys(re.findall(r"^HOT_API [^;{]*?(\w+)\(", text, re.MULTILINE)))


def markdown() -> str:
    """The table and the sections, for a page in docs/api."""
    out = ["| header | what | functions |", "|---|---|---|"]
    sections = []
    for path in headers():
        text = path.read_text(encoding="utf-8")
        names = ", ".join(f"`{name}`" for name in functions(text))
        anchor = path.name.replace(".", "")
        out.append(f"| [`hot/{path.name}`](#{anchor}) | {purpose(text)} | {names} |")
        language = "c" if path.name == "hot_c.h" else "cpp"
        include = f"```{{literalinclude}} ../../{FOLDER}/{path.name}"
        sections += ["", f"## {path.name}", "", include, f":language: {language}", "```"]
    return "\n".join([*out, *sections]) + "\n"
