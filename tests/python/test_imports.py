"""Imports of benchmarks/ and of hotcore.torch: allowed modules, few floors, no circle."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, TORCH = ROOT / "benchmarks", ROOT / "python/hotcore/torch"
SHARED = {"timing", "layers", "models", "training", "steps", "kernel_classes"}

Graph = dict[str, set[str]]


def named(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """Each module's file by the name under which it is imported from ``root``."""
    parts = {path: path.relative_to(root).with_suffix("").parts for path in paths}
    return {".".join(p for p in parts[path] if p != "__init__"): path for path in parts}


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """The known modules that a module imports, also inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    loaded: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            loaded |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (source, node.module)))
            names = {f"{source}.{alias.name}" for alias in node.names} & known
            # `from evidence import X` loads X. The package itself only extends the path.
            loaded |= names or {source}
    return (loaded & known) - {name, "evidence"}


def graph_of(files: Mapping[str, Path]) -> Graph:
    return {name: imports(name, path, set(files)) for name, path in files.items()}


def grouped(graph: Graph, room: Mapping[str, str]) -> Graph:
    """The graph of rooms: ``room`` names that of a module."""
    rooms: Graph = {name: set() for name in room.values()}
    for name, used in graph.items():
        rooms[room[name]] |= {room[other] for other in used} - {room[name]}
    return rooms


def floors(graph: Graph) -> dict[str, int]:
    """1 for a module that imports none, else 1 more than the highest one that it imports."""
    found: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():  # raises CycleError
        found[name] = 1 + max((found[used] for used in graph[name]), default=0)
    return found


def benchmarks() -> Graph:
    evidence = (BENCHMARKS / "evidence").rglob("*.py")
    return graph_of(named(BENCHMARKS, [*BENCHMARKS.glob("*.py"), *evidence]))


def adapter() -> Graph:
    return graph_of(named(ROOT / "python", TORCH.rglob("*.py")))


def folder(name: str) -> str:
    """The folder of a module of hotcore.torch, or the module itself beside the folders."""
    return ".".join(name.split(".")[:3])


def ops_as_one(name: str) -> str:
    return folder(name) if name.startswith("hotcore.torch.ops") else name


def test_no_import_goes_in_a_circle() -> None:
    graph = benchmarks()
    assert len(graph) > 35 and "evidence.rivals.methods" in graph
    assert "evidence.rivals" in graph["training"] and "timing" in graph["evidence.bench_fwht"]
    assert floors(graph)["timing"] < floors(graph)["evidence.bench_fwht"]


def test_shared_modules_take_the_rivals_alone_from_the_evidence() -> None:
    graph = benchmarks()
    assert set(graph) >= SHARED
    for name in SHARED:
        imported = {used for used in graph[name] if used.startswith("evidence.")}
        assert all(used.startswith("evidence.rivals") for used in imported), (name, imported)


def test_the_adapter_has_eight_floors() -> None:
    """No circle of modules or of folders, also of late imports, and at most eight floors.

    The modules of ops/ count as one room, those of other folders each for itself.
    """
    graph = adapter()
    assert "hotcore.torch.layers.modules" in graph["hotcore.torch.frozen.weights"]
    assert "hotcore.torch.frozen.conv1d" in graph["hotcore.torch.conversion.freeze"]  # a late one
    floors(graph)
    modules = floors(grouped(graph, {name: ops_as_one(name) for name in graph}))
    assert max(modules.values()) <= 8, modules
    folders = floors(grouped(graph, {name: folder(name) for name in graph}))
    assert max(folders.values()) <= 8, folders
    order = [f"hotcore.torch.{name}" for name in ("ops", "layers", "frozen", "conversion", "tools")]
    assert sorted(order, key=lambda name: folders[name]) == order


def late() -> Iterator[tuple[str, str]]:
    """Modules of hotcore.torch that import others of it only inside functions, with those."""
    for path in TORCH.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in set(ast.walk(tree)) - set(tree.body):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield path.stem, str(node.module)


def test_only_modules_that_load_transformers_are_imported_late() -> None:
    assert set(late()) == {("selection", "layers.conv1d"), ("freeze", "frozen.conv1d")}
