"""hotcore.torch._compat: torch's private names, what they tell, and where they stand."""

import ast
import subprocess
import sys
from pathlib import Path

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch import _compat
from support import refused

PACKAGE = Path(hot.__file__).parent


def test_a_torch_without_a_private_name() -> None:
    message = r"torch .* has no torch\._C\.gone; install a newer hotcore, or torch 2\.6 to 2\.15"
    refused(lambda: _compat._private("gone"), message, ImportError)


@pytest.mark.long
def test_what_is_compiled() -> None:
    plain, inner = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    assert not _compat.is_compiled(plain)
    assert _compat.is_compiled(torch.compile(plain))
    assert not _compat.is_compiled(plain)  # only what torch.compile returned
    inner.compile()
    assert _compat.is_compiled(inner)
    assert not _compat.is_compiled(torch.nn.Sequential(inner))


def test_products_are_named_to_the_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import partitioners

    before = partitioners.get_default_op_list
    monkeypatch.setattr(partitioners, "get_default_op_list", before)  # restored afterwards
    operator = torch.ops.hotcore.draw_seed
    assert operator not in before().compute_intensive_ops
    _compat.count_as_products([operator])
    assert operator in partitioners.get_default_op_list().compute_intensive_ops


def test_private_names_stand_in_one_file() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [
                    part for a in node.names for part in a.name.split(".") if "torch" in a.name
                ]
            elif isinstance(node, ast.Attribute):
                names, inner = [node.attr], node.value
                while isinstance(inner, ast.Attribute):
                    names.append(inner.attr)
                    inner = inner.value
                if not (isinstance(inner, ast.Name) and inner.id == "torch"):
                    continue
            else:
                continue
            private = [n for n in names if n.startswith("_") and not n.startswith("__")]
            assert not private, f"{path.name}:{node.lineno}: torch's {private}"


@pytest.mark.long
def test_the_adapter_imports_no_compiler() -> None:
    """The import costs seconds and happens only during compilation."""
    code = (
        "import sys, torch; before = set(sys.modules); import hotcore.torch; "
        "print([m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', "
        "'torch._inductor', 'torch._functorch.partitioners'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
