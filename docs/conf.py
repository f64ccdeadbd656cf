"""Sphinx's configuration of the site: ``bash scripts/docs.sh`` builds it.

The source folder is the repository's root, so that a link from one page to another is the same on
the site and in the repository. Warnings are errors: a broken link, an unknown name or a docstring
that Sphinx cannot read stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "hotcore"
author = "The hotcore authors"
project_copyright = "The hotcore authors"
(release,) = re.findall(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
version = release

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "third_party/README.md",
    "docs/**",
]
exclude_patterns = [
    ".*",
    "build",
    "out",
    "cpp",
    "cuda",
    "examples",
    "python",
    "tests",
    "third_party/*/**",
]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
nitpicky = False

myst_heading_anchors = 4
myst_enable_extensions = ["smartquotes"]
html_theme = "furo"
html_title = f"hotcore {release}"
html_copy_source = False
html_show_sourcelink = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_google_docstring = True
