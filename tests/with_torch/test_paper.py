"""hotcore.paper: the published method, which no other module imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hotcore
import pytest
from hotcore.config import HotConfig

pytest.importorskip("torch")
from hotcore import paper  # noqa: E402  (after the skip)

PACKAGE = Path(hotcore.__file__).parent


def imported(path: Path) -> set[str]:
    """Names of the modules that a file of the package imports, relative ones in full."""
    parts = ["hotcore", *path.relative_to(PACKAGE).with_suffix("").parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: -node.level], node.module or ""] if node.level else [node.module or ""]
            module = ".".join(filter(None, base))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def test_nothing_else_imports_it() -> None:
    files = {path for path in PACKAGE.rglob("*.py")}
    own = {path for path in files if "paper" in path.relative_to(PACKAGE).parts}
    assert any("hotcore.torch.convert" in imported(path) for path in own)  # the check sees imports
    for path in files - own:
        assert not any(name.startswith("hotcore.paper") for name in imported(path)), path
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
    with pytest.raises(ValueError, match="prefix_tokens: expected 0 or more, .* got 1"):
        paper.published(prefix_tokens=1)
