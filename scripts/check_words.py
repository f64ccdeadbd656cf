"""Check the sentences of comments, docstrings and pages ("Words" in CONTRIBUTING.md).

    python scripts/check_words.py [--count] [PATH...]

PATH: files or folders, by default all that git knows. ``--count`` prints findings per folder.
A sentence, comment, docstring or heading must not begin with a word of ``STARTS`` or with
"The same,". ``Whether`` may begin the text of a bool. A sentence has at most ``LONGEST`` words.
Code in backticks and the text of a link count as they are read. Not checked: tables, code blocks
(also indented ones outside pages), quotations, and text between ``<!-- table`` and ``<!-- end``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 25
STARTS = ("Of", "What", "Whether", "As", "By", "Such", "So", "Those", "From")
SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:")
C_LIKE = (".h", ".cpp", ".cu", ".cuh")
SHELL_LIKE = ("CMakeLists.txt", "Dockerfile", "Makefile", "run")

Text = tuple[int, str, bool]
"""Line number, text without its markers, and whether it describes a bool."""


def of_python(source: str) -> Iterator[Text]:
    """Yield docstrings, attribute docstrings and blocks of comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, child in zip([None, *body], body, strict=False):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                continue
            if not isinstance(child.value.value, str):
                continue
            subject = before if before is not None else node
            if isinstance(subject, ast.FunctionDef | ast.AsyncFunctionDef):
                kind = subject.returns if subject is node else None
            else:
                kind = getattr(subject, "annotation", None)
            text = cleandoc(child.value.value)
            yield child.lineno, text, kind is not None and "bool" in ast.unparse(kind)
    yield from _comments(source)


def _comments(source: str) -> Iterator[Text]:
    """Yield comments of Python, those on lines below one another as one text."""
    lines = source.splitlines()
    blocks: list[tuple[int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, text = token.start[0], token.string.lstrip("#:").strip()
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        if re.match(r"(noqa|type:|mypy:|fmt:|ruff:)", text):
            continue
        alone = lines[line - 1].lstrip().startswith("#")
        if alone and blocks and line == blocks[-1][0] + len(blocks[-1][1]):
            blocks[-1][1].append(text)
        else:
            blocks.append((line, [text]))
    yield from ((start, "\n".join(block), False) for start, block in blocks)


def of_c(source: str) -> Iterator[Text]:
    """Yield ``//`` and ``/* */`` comments, lines below one another as one text."""
    lines = source.splitlines()
    block: list[str] = []
    inside = False
    for number, line in enumerate([*lines, ""], 1):
        comment = re.match(r"\s*///?!?<?\s?(.*)", line)
        if comment and not inside:
            block.append(comment[1])
            continue
        if block:
            yield number - len(block), "\n".join(block), "bool" in line
            block = []
        if inside or re.match(r"\s*/\*", line):
            inside = "*/" not in line
            text = re.sub(r"^\s*(/\*+|\*/|\*)?\s?|\*/\s*$", "", line)
            if text.strip():
                yield number, text, False
            continue
        tail = re.search(r"(?<!:)//[/!<]*\s?(.*)", re.sub(r'"(\\.|[^"\\])*"', '""', line))
        if tail:
            yield number, tail[1], "bool" in line


def of_shell(source: str) -> Iterator[Text]:
    """Yield blocks of ``#`` comments, also of CMake and Make."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if comment := re.match(r"\s*#(?!!)\s?(.*)", line):
            block.append(comment[1])
        elif block:
            yield number - len(block), "\n".join(block), False
            block = []


def paragraphs(text: str, first: int, page: bool) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items and headings of a page or a comment, but no code or table."""
    block: list[str] = []
    start = first
    fence = generated = section = code = False
    deep = 0
    for offset, line in enumerate([*text.splitlines(), ""]):
        bare = line.strip()
        number = first + offset
        if bare.startswith("```"):
            fence = not fence
            bare = ""
        if "<!-- table" in bare:
            generated = True
        if "<!-- end" in bare:
            generated, bare = False, ""
        indent = len(line) - len(line.lstrip())
        if deep and bare and indent >= deep:
            continue
        deep = 0 if bare else deep
        section = bare in SECTIONS or (section and not (bare and indent == 0))
        code = not page and not section and not block and bool(bare) and (code or indent > 1)
        if bare in SECTIONS or code:
            bare = ""
        if fence or generated or bare.startswith(("|", ">>>", ">", "<", "![", ".. ", "@")):
            bare = ""
        item = re.match(r"([*+-]|\d+\.|#+)\s+(.*)", bare)
        if section and indent == 4:  # an argument's name, then its text
            item = re.match(r"([\w, *`]+):\s+(.*)", bare)
        if (item or not bare) and block:
            joined = " ".join(block)
            yield start, joined
            if joined.endswith("::"):
                deep = indent + 1 if bare else 1
            block = []
        if item:
            start, block = number, [item[2]]
            if bare.startswith("#"):
                yield start, item[2]
                block = []
        elif bare:
            start = start if block else number
            block.append(bare)


def sentences(text: str) -> Iterator[str]:
    text = re.sub(r"``[^`]+``|`[^`]+`|\$[^$]+\$", "`x`", text)
    text = re.sub(r":\w+:`x`", "`x`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\b(e\.g|i\.e|cf|vs|etc|sec|Sec|eq|Eq|al|pp|p)\. ", r"\1 ", text)
    yield from (
        s.strip(" *_(")
        for s in re.split(r"(?<=[.!?])[)*_\"]*\s+(?=[A-Z`*_\[(\"]|--\w)", text)
        if s.strip()
    )


def faults(text: str, first: int, of_bool: bool, page: bool) -> Iterator[tuple[int, str]]:
    for line, paragraph in paragraphs(text, first, page):
        for number, sentence in enumerate(sentences(paragraph)):
            word = re.match(r"[A-Za-z]+", sentence)
            if word and word[0] in STARTS and not sentence.endswith("?"):
                if not (word[0] == "Whether" and of_bool and number == 0):
                    yield line, f'begins with "{word[0]}": {sentence[:70]}'
            elif re.match(r"The same\b,", sentence):
                yield line, f'begins with "The same,": {sentence[:70]}'
            words = [w for w in sentence.split() if re.search(r"\w", w)]
            if len(words) > LONGEST:
                yield line, f"{len(words)} words: {sentence[:70]}"


def texts(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in (".py", ".pyi"):
        yield from of_python(source)
    elif path.suffix in C_LIKE:
        yield from of_c(source)
    elif path.suffix == ".md":
        yield 1, source, False
    elif path.suffix in (".sh", ".cmake") or path.name in SHELL_LIKE:
        yield from of_shell(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument(
        "--count", action="store_true", help="print the number of findings per folder"
    )
    options = parser.parse_args()
    paths = [path.resolve().relative_to(ROOT).as_posix() for path in options.paths]
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *paths],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split("\n")
    counts: Counter[str] = Counter()
    for name in filter(None, names):
        path = ROOT / name
        if not path.is_file():
            continue
        for first, text, of_bool in texts(path):
            for line, fault in faults(text, first, of_bool, path.suffix == ".md"):
                counts["/".join(name.split("/")[:2])] += 1
                if not options.count:
                    print(f"{name}:{line}: {fault}")
    if options.count:
        for folder, number in counts.most_common():
            print(f"{number:6d} {folder}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
