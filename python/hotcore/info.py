"""What this installation is: ``python -m hotcore.info`` prints it, :func:`collect` returns it.

Every probe is guarded: one that fails is reported as its error, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import _core, contexts

_ISAS = ("plain", "avx2", "avx512")


def collect() -> dict[str, str]:
    """Return what is known, label to text, in the order it is printed."""
    return {label: _guarded(probe) for label, probe in _PROBES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print :func:`collect` as a table, or what the options ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m hotcore.info", description="What this installation of hotcore is."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same as one JSON object")
    form.add_argument(
        "--cmake-dir", action="store_true", help="only the folder of its CMake package"
    )
    options = parser.parse_args(arguments)
    if options.cmake_dir:
        folder = _cmake()
        if folder == "not installed":
            parser.exit(1, "hotcore.info: this installation has no CMake package\n")
        print(folder)
        return 0
    facts = collect()
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    width = max(map(len, facts))
    for label, text in facts.items():
        print(f"{label:<{width}}  {text}")
    return 0


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:  # a diagnosis must not fail
        return f"unknown ({type(error).__name__}: {error})"


def _backends() -> str:
    return "cpu, cuda" if _core.built_with_cuda() else "cpu (built without CUDA)"


def _usable_isas() -> str:
    names = []
    for name in _ISAS:
        try:
            _core.CoreContext(1, name)
        except (NotImplementedError, ValueError):
            continue
        names.append(name)
    return ", ".join(names)


def _used_isa() -> str:
    return f"{contexts.isa()}, {contexts.num_threads()} threads"


def _cuda_archs() -> str:
    return _core.cuda_architectures() or "none"


def _cuda_tested() -> str:
    # What runs in make gpu-check, and what has only been compiled.
    tested = {"80": "its kernels tested on an H200", "90a": "tested on an H200"}
    archs = dict.fromkeys(arch.split("-")[0] for arch in _core.cuda_architectures().split(";"))
    return ", ".join(f"sm_{a}: {tested.get(a, 'compiled only')}" for a in archs if a) or "none"


def _extension() -> str:
    return str(Path(_core.__file__ or "").resolve())


def _find(pattern: str) -> str:
    # An editable install keeps the Python files and what was built in two places.
    roots = dict.fromkeys([Path(__file__).resolve().parent, Path(_extension()).parent])
    for root in roots:
        found = sorted(root.rglob(pattern))
        if found:
            return str(found[0])
    return "not installed"


def _library() -> str:
    found = _find("libhot.*")
    return "inside the extension (static)" if found == "not installed" else found


def _cmake() -> str:
    found = _find("hotcoreConfig.cmake")
    return found if found == "not installed" else str(Path(found).parent)


def _version_of(name: str) -> Callable[[], str]:
    def probe() -> str:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            return "not installed"
        return str(module.__version__)

    return probe


def _gpus() -> str:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return "unknown (asked through torch, which is not installed)"
    if not torch.cuda.is_available():
        return "none"
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return ", ".join(names)


_PROBES: dict[str, Callable[[], str]] = {
    "hotcore": _core.version,
    "backends": _backends,
    "instruction sets": _usable_isas,
    "instruction set used": _used_isa,
    "CUDA architectures": _cuda_archs,
    "of these": _cuda_tested,
    "GPUs": _gpus,
    "extension": _extension,
    "library": _library,
    "CMake package": _cmake,
    "Python": lambda: f"{platform.python_version()} ({sys.executable})",
    "platform": platform.platform,
    "NumPy": _version_of("numpy"),
    "torch": _version_of("torch"),
}


if __name__ == "__main__":
    sys.exit(main())
