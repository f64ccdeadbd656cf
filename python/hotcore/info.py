"""Facts about this installation: ``python -m hotcore.info`` prints, :func:`collect` returns them.

A probe that fails is reported as its error, and the others still run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import _core, contexts, plans
from .config import RECIPES, HotConfig

Probe = Callable[[], str | dict[str, str]]
"""One line's text, or several lines."""
Gpu = tuple[str, int, int]
"""Name and compute capability."""

_ISAS = ("plain", "avx2", "avx512", "amx")
_VERDICTS = {"none": "cannot be used", "slow": "usable, but slower than it could be", "full": "ok"}


def collect() -> dict[str, str]:
    """Return all facts, label to text, in printing order."""
    facts: dict[str, str] = {}
    for label, probe in _PROBES.items():
        facts |= _guarded(label, probe)
    return facts


def verdict(major: int, minor: int) -> str:
    """One line on how this build runs on a GPU of compute capability ``major.minor``."""
    if not _core.built_with_cuda():
        return (
            f"{_VERDICTS['none']}: compute capability {major}.{minor}, and this build has no CUDA "
            "backend; where there is a CUDA compiler: HOT_CUDA=ON pip install --force-reinstall "
            "--no-deps . (docs/quickstart.md)"
        )
    archs, wgmma = _core.cuda_architectures(), _core.cuda_wgmma()
    level, text = _core.judge_device(major, minor, archs, wgmma)
    return f"{_VERDICTS[level]}: {text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print :func:`collect` as a table, or the output of the options."""
    parser = argparse.ArgumentParser(
        prog="python -m hotcore.info",
        description="What this installation of hotcore is.",
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same as one JSON object")
    form.add_argument(
        "--cmake-dir", action="store_true", help="only the folder of its CMake package"
    )
    form.add_argument(
        "--explain",
        nargs=3,
        type=int,
        metavar=("TOKENS", "OUT", "IN"),
        help="the kernels of a linear layer on a GPU, which need not be there",
    )
    parser.add_argument(
        "--device", help="with --explain: sm_90 (the default), sm_80, ... or cuda:0"
    )
    parser.add_argument(
        "--recipe", help="with --explain: default, fast, paper, accurate or compact"
    )
    parser.add_argument("--forward", help="with --explain: plain (the default) or int8")
    options = parser.parse_args(arguments)
    if options.explain:
        return _explain(parser, options)
    if options.device or options.recipe or options.forward:
        parser.error("--device, --recipe and --forward are for --explain")
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


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    tokens, out_features, in_features = options.explain
    try:
        config = HotConfig.recipe(options.recipe or "default", forward=options.forward or "plain")
        explanation = plans.explain(
            tokens,
            out_features,
            in_features,
            config,
            device=options.device or "sm_90",
        )
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    print(explanation.text, end="")
    return 0


def _guarded(label: str, probe: Probe) -> dict[str, str]:
    try:
        found = probe()
    except Exception as error:  # a diagnosis must not fail
        found = f"unknown ({type(error).__name__}: {error})"
    return {label: found} if isinstance(found, str) else found


def _cuda() -> bool:
    return _core.built_with_cuda()


def _backends() -> str:
    return "cpu, cuda" if _cuda() else "cpu (built without CUDA)"


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


def _wgmma() -> str:
    if _core.cuda_wgmma():
        return "yes"
    return "no (built without the CUTLASS headers, or not for 90a)" if _cuda() else "no"


def _cuda_tested() -> str:
    # Architectures that make gpu-check runs on, and architectures that are only compiled.
    tested = {"80": "its kernels tested on an H200"}
    tested["90a"] = "tested on an H200" if _core.cuda_wgmma() else "compiled only, without wgmma"
    archs = dict.fromkeys(arch.split("-")[0] for arch in _core.cuda_architectures().split(";"))
    return ", ".join(f"sm_{a}: {tested.get(a, 'compiled only')}" for a in archs if a) or "none"


def _extension() -> str:
    return str(Path(_core.__file__ or "").resolve())


def _find(pattern: str) -> str:
    # An editable install has Python files and built files in two places.
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


def _runtime() -> str:
    # The driver is too old for the build, or devices are hidden.
    if not _cuda():
        return "none"
    try:
        _core.cuda_device_verdict(0)
    except (RuntimeError, ValueError) as error:
        return f"finds no GPU: {error}"
    return "finds GPUs"


def _gpus() -> dict[str, str]:
    found, source = _gpus_of_torch(), "torch"
    if not found:
        found, source = _gpus_of_driver(), "nvidia-smi"
    if not found:
        driver = Path("/dev/nvidiactl").exists()
        return {"GPUs": "none" + (", but a driver (/dev/nvidiactl)" if driver else "")}
    facts = {"GPUs": f"{len(found)}, by {source}"}
    for index, (name, major, minor) in enumerate(found):
        facts[f"GPU {index}"] = f"{name}: {verdict(major, minor)}"
    return facts


def _gpus_of_torch() -> list[Gpu]:
    # The devices that this process may use, in its order.
    try:
        cuda = importlib.import_module("torch").cuda
    except ModuleNotFoundError:
        return []
    if not cuda.is_available():
        return []
    return [
        (str(cuda.get_device_name(index)), *cuda.get_device_capability(index))
        for index in range(cuda.device_count())
    ]


def _gpus_of_driver() -> list[Gpu]:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        return []
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"nvidia-smi: {(error.stdout + error.stderr).strip()}") from None
    found = []
    for line in done.stdout.splitlines():
        name, _, capability = line.rpartition(",")
        major, _, minor = capability.strip().partition(".")
        found.append((name.strip(), int(major), int(minor)))
    return found


_PROBES: dict[str, Probe] = {
    "hotcore": _core.version,
    "backends": _backends,
    "instruction sets": _usable_isas,
    "instruction set used": _used_isa,
    "CUDA architectures": _cuda_archs,
    "of these": _cuda_tested,
    "wgmma kernels": _wgmma,
    "CUDA runtime": _runtime,
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
