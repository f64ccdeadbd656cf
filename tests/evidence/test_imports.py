"""Imports of benchmarks/: allowed modules, and no circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHARED = {"timing", "layers", "models", "training", "steps", "kernel_classes", "plot"}


def modules() -> dict[str, Path]:
    """Return each module's file by its imported name."""
    files = {path.stem: path for path in BENCHMARKS.glob("*.py")}
    for path in (BENCHMARKS / "evidence").rglob("*.py"):
        parts = path.relative_to(BENCHMARKS).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules of benchmarks/ that a module imports when it is loaded."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    loaded: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            loaded |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = f"{package}.{node.module}" if node.level else str(node.module)
            names = {f"{source}.{alias.name}" for alias in node.names} & known
            # `from evidence import X` loads X. The package itself only extends the path.
            loaded |= names or {source}
    return (loaded & known) - {name, "evidence"}


def test_no_import_goes_in_a_circle() -> None:
    files = modules()
    assert len(files) > 35 and "evidence.rivals.methods" in files
    graph = {name: imports(name, path, set(files)) for name, path in files.items()}
    assert "evidence.rivals" in graph["training"] and "timing" in graph["evidence.bench_fwht"]
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("plot") < order.index("evidence.plot_evidence")


def test_shared_modules_take_the_rivals_alone_from_the_evidence() -> None:
    files = modules()
    assert set(files) >= SHARED
    for name in SHARED:
        imported = {
            used for used in imports(name, files[name], set(files)) if used[:9] == "evidence."
        }
        assert all(used.startswith("evidence.rivals") for used in imported), (name, imported)
