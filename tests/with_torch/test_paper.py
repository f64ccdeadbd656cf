"""hotcore.paper: the published method, which no other module imports."""

import re
import subprocess
import sys
from pathlib import Path

import hotcore
import pytest
from hotcore.config import HotConfig

pytest.importorskip("torch")
from hotcore import paper  # noqa: E402  (after the skip)
from support import refused

PACKAGE = Path(hotcore.__file__).parent


def test_nothing_else_imports_it() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "paper" not in path.relative_to(PACKAGE).parts:
            assert not re.search(r"^\s*(from|import)\b.*\bpaper\b", text, re.MULTILINE), path
    code = (
        "import sys, hotcore.torch, hotcore.integrations;"
        "assert not [name for name in sys.modules if name.startswith('hotcore.paper')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_published() -> None:
    text = paper.published()
    recipe = HotConfig.recipe("paper")
    changed = {
        name for name in recipe.__dataclass_fields__ if getattr(text, name) != getattr(recipe, name)
    }
    assert changed == {"gx_rounding", "gw_rounding"}
    images = paper.published((14, 14), 1)
    assert (images.token_grid, images.prefix_tokens) == ((14, 14), 1)
    assert images.gx_rounding == "pseudo_stochastic" and images.gx_bits == 4
    refused(lambda: paper.published(prefix_tokens=1), "prefix_tokens: expected 0 or more, .* got 1")
