"""Sphinx's configuration of the site; ``bash scripts/docs.sh`` builds it.

The source folder is the repository's root, so that links between pages work on the site and in the
repository. Warnings are errors: a broken link, an unknown anchor, or a docstring that Sphinx cannot
read stops the build.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import headers  # noqa: E402

project = "hotcore"
author = "The hotcore authors"
project_copyright = "The hotcore authors"
(release,) = re.findall(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
version = release

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "third_party/README.md"]
exclude_patterns = [
    *(".*", "build", "out", "cpp", "cuda", "examples", "python", "scripts", "tests"),
    "third_party/*/**",
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"hotcore {release}"
html_copy_source = False
html_show_sourcelink = False
html_extra_path = ["site"]  # index.html, which leads from the site's root to docs/
html_static_path = ["static"]
html_css_files = ["hotcore.css"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("ConfigLike", "RecipeName")}  # not spelled out
napoleon_numpy_docstring = False

# References that lead nowhere are warnings, except types of other packages and hotcore's own names
# that have no entry in the reference.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|fnmatch|lightning|numpy|pathlib|torch|transformers|typing)(\..*)?"),
    (r"py:.*", r"(axolotl|flax|os|pydantic|torchao|torchtitan)\..*"),
    (r"py:class", r"NDArray|(hotcore\..*\.)?(Array|Bits|HotConfigFields|Layout|RecipeName)"),
    (r"py:class", r"Basis|ConfigLike|Filter|Forward|Granularity|G[wx]Scale|KeyLike|Need|Needed"),
    (r"py:func", r"int8_(gradients|weights)"),
    (r"py:class", r"LossFn|Override|Rounding|Storage|Tensor|_Model|nn\.Module"),
    (r"py:class", r"(hotcore\..*\.)?(ForwardLinearSpec|Share|Spec|Step)"),
    (r"py:class", r"hotcore\.torch\.layers\.modules\.HotModule"),
    (r"py:class", r"hotcore\.torch\.frozen\.weights\.(FrozenModule|ReadOnly)"),
    (r"py:(func|mod)", r"hotcore\.torch\.(conversion\.gains|ops(\.\w+)*)"),
    (r"py:class", r"hotcore\.(torch\.conversion\.convert\._Model|saved\._Weight)"),
    (r"py:class", r"hotcore\.integrations\.loop\.LoopCallback"),
    (
        r"py:(attr|data|func|meth)",
        r"ACCURACY|HEAD_NAMES|KINDS|MIN_FEATURES|backward_bops|from_plain|model",
    ),
]

# Stand-ins for the integrations' libraries, so that the site builds without them, in seconds.
autodoc_mock_imports = [
    "transformers",
    "lightning",
    "torchao",
    "torchtitan",
    "axolotl",
    "pydantic",
    "flax",
]
try:
    import hotcore.jax  # noqa: F401
except ImportError:  # without JAX or its handlers, read the docstrings with stand-ins
    for partial in [name for name in sys.modules if name.startswith("hotcore.jax")]:
        del sys.modules[partial]
    with mock(["jax", "flax", "hotcore._jax_ffi"]):
        stand_in: Any = importlib.import_module("jax")
        stand_in.__version_info__ = (sys.maxsize,)
        importlib.import_module("hotcore.jax.flax")


# Napoleon would take the words before a colon in an attribute's docstring for its type.
_aside: dict[str, list[str]] = {}


def _put_aside(
    app: Any, kind: str, name: str, subject: Any, options: Any, lines: list[str]
) -> None:
    if kind in ("attribute", "data", "property"):
        _aside[name] = lines[:]
        lines.clear()


def _put_back(app: Any, kind: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _aside.pop(name, lines)


def _read(app: Any, page: str, text: list[str]) -> None:
    if page == "docs/api/cpp":
        text[0] = text[0].replace("<!-- headers -->", headers.markdown())


def _show_one_signature(module: str) -> None:
    # Overloads are for type checkers; the function itself names every argument.
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    analyzer.overloads.clear()


def setup(app: Any) -> None:
    """Sphinx's hook."""
    _show_one_signature("hotcore.functions")
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _put_aside, priority=400)
    app.connect("autodoc-process-docstring", _put_back, priority=600)
