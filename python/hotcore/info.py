"""Facts about this installation: ``python -m hotcore`` prints, :func:`collect` returns them.

The report has the error of a probe that fails, and the others still run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import _core, contexts, gpus, plans, selftest
from .config import RECIPES, HotConfig

Gpu = tuple[str, int, int]
"""Name and compute capability."""

_EXTENSION = Path(_core.__file__ or "").resolve()
_VERDICTS = {"none": "cannot be used", "slow": "usable, but slower than it could be", "full": "ok"}


def collect() -> dict[str, Any]:
    """Return all facts as values of JSON, in printing order; ``--json`` prints them.

    * ``hotcore``, ``numpy``, ``torch``, ``python``: versions; None: not installed.
    * ``backends``, ``instruction_sets``, ``cuda_architectures``: names, the last in CMake's form.
      ``instruction_set``, ``threads``: those of a call.
    * ``cuda_tested``: architecture to a sentence; ``wgmma``, ``jax``: whether they were built.
    * ``cuda_error``: the CUDA runtime's message if it finds no GPU. ``driver``: whether an NVIDIA
      driver is loaded.
    * ``gpus``: a list of ``name``, ``compute_capability`` (two numbers), ``level`` ("none", "slow",
      "full"), ``verdict``, ``int8_ratio``, ``int8`` and ``source`` ("torch" or "nvidia-smi").
      ``int8_ratio`` is the rate of INT8 products as a multiple of bf16's; None: unknown.
    * ``extension``, ``library``, ``cmake_dir``, ``python_executable``: paths or None; ``platform``.

    A fact whose probe failed is a dictionary with the one key ``error``.
    """
    facts: dict[str, Any] = {}
    for key, probe in _PROBES.items():
        try:
            facts[key] = probe()
        except Exception as error:  # a diagnosis must not fail
            facts[key] = {"error": f"{type(error).__name__}: {error}"}
    return facts


def table(facts: dict[str, Any]) -> dict[str, str]:
    """Return :func:`collect`'s facts as label to text, for a person, in printing order."""
    rows: dict[str, str] = {}
    for label, keys, text in _ROWS:
        values = [facts[key] for key in keys]
        failed = [value["error"] for value in values if _failed(value)]
        rows[label] = f"unknown ({failed[0]})" if failed else text(*values)
        if label == "GPUs" and not failed:
            for index, gpu in enumerate(facts["gpus"]):
                rows[f"GPU {index}"] = f"{gpu['name']}: {_VERDICTS[gpu['level']]}: {gpu['verdict']}"
                rows[f"GPU {index}, INT8"] = gpu["int8"]
    rows["advice"] = _advice(facts)
    return rows


def _failed(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"error"}


def _advice(facts: dict[str, Any]) -> str:
    """Return the next step on this machine."""
    devices, driver, torch = (facts[key] for key in ("gpus", "driver", "torch"))
    if _failed(devices) or _failed(driver) or _failed(torch):
        return "begin with the lines that are unknown"
    if not devices and driver:
        return "a driver is loaded, but no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    for gpu in devices:
        if gpu["level"] != "full":
            return f"see the line of {gpu['name']}: {_VERDICTS[gpu['level']]}"
    if torch is None:
        return "for hotcore.torch: pip install 'torch>=2.6'"
    measure = "hot.advise(model, batch) measures your model"
    if not devices:
        return f"no GPU is here, layers run on the CPU; {measure}"
    if not (devices[0]["int8_ratio"] or 0) > 1:
        return f"this GPU saves memory but no time; {measure}"
    if tuple(devices[0]["compute_capability"]) not in gpus.MEASURED:
        return f"first python -m hotcore.info --self-test; {measure}"
    return f'begin with hot.convert(model, "default", forward="int8"); {measure}'


def _judge(major: int, minor: int) -> tuple[str, str]:
    if not _core.built_with_cuda():
        return "none", (
            "this build has no CUDA backend; on a machine with nvcc: HOT_CUDA=ON pip install "
            "--force-reinstall --no-deps . (docs/quickstart.md)"
        )
    return _core.judge_device(major, minor, _core.cuda_architectures(), _core.cuda_wgmma())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print :func:`table` of :func:`collect`, or the output of the options."""
    parser = argparse.ArgumentParser(
        prog="python -m hotcore.info",
        description="Prints the facts of this installation of hotcore.",
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    for flag, text in (
        ("--json", "the values as one JSON object"),
        ("--cmake-dir", "only the folder of its CMake package"),
        ("--self-test", "compare products and roundings of every visible GPU with the CPU's bits"),
    ):
        form.add_argument(flag, action="store_true", help=text)
    text = "the kernels of a linear layer on a GPU, which need not be there"
    form.add_argument("--explain", nargs=3, type=int, metavar=("TOKENS", "OUT", "IN"), help=text)
    for flag, text in (
        ("--device", "sm_90 (the default), sm_80, ... or cuda:0"),
        ("--recipe", ", ".join(RECIPES)),
        ("--forward", "plain (the default) or int8"),
    ):
        parser.add_argument(flag, help=f"with --explain: {text}")
    options = parser.parse_args(arguments)
    if options.explain:
        return _explain(parser, options)
    if options.device or options.recipe or options.forward:
        parser.error("--device, --recipe and --forward are for --explain")
    if options.self_test:
        return _self_test()
    if options.cmake_dir:
        folder = _cmake()
        if folder is None:
            parser.exit(1, "hotcore.info: this installation has no CMake package\n")
        print(folder)
    elif options.json:
        print(json.dumps(collect(), indent=1))
    else:
        rows = table(collect())
        width = max(map(len, rows))
        for label, text in rows.items():
            print(f"{label:<{width}}  {text}")
    return 0


def _self_test() -> int:
    usable = []
    for number, gpu in enumerate(_gpus()):
        if gpu["level"] == "none":
            print(f"{gpu['name']}: not tested: {gpu['verdict']}")
        else:
            usable.append((number, gpu["name"]))
    passed, lines = selftest.report(usable)
    print("\n".join(lines or ["no GPU to test"]))
    return 0 if usable and passed else 1


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        config = HotConfig.recipe(options.recipe or "default", forward=options.forward or "plain")
        tokens, outs, ins = options.explain
        explanation = plans.explain(tokens, outs, ins, config, device=options.device or "sm_90")
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    print(explanation.text, end="")
    return 0


def _instruction_sets() -> list[str]:
    usable = []
    for isa in ("plain", "avx2", "avx512", "amx"):
        with contextlib.suppress(NotImplementedError, ValueError):
            usable.append(_core.CoreContext(1, isa).isa)
    return usable


def _cuda_archs() -> list[str]:
    return list(filter(None, _core.cuda_architectures().split(";")))


def _cuda_tested() -> dict[str, str]:
    # make gpu-check runs on the tested ones, hotcore.selftest on all others.
    tested = {"80": "its kernels tested on an H200"}
    tested["90a"] = "tested on an H200" if _core.cuda_wgmma() else "compiled only, without wgmma"
    archs = dict.fromkeys(arch.split("-")[0] for arch in _cuda_archs())
    other = "compiled; tests itself at its first use"
    return {f"sm_{arch}": tested.get(arch, other) for arch in archs}


def _find(pattern: str) -> str | None:
    # An editable install has Python files and built files in two places.
    roots = (Path(__file__).resolve().parent, _EXTENSION.parent)
    paths = (path for root in roots for path in sorted(root.rglob(pattern)))
    return next(map(str, paths), None)


def _cmake() -> str | None:
    path = _find("hotcoreConfig.cmake")
    return None if path is None else str(Path(path).parent)


def _version_of(name: str) -> str | None:
    try:
        return str(importlib.import_module(name).__version__)
    except ModuleNotFoundError:
        return None


def _cuda_error() -> str | None:
    # Causes are a missing or old driver, and hidden devices.
    try:
        if _core.built_with_cuda():
            _core.cuda_device_verdict(0)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def _gpus() -> list[dict[str, Any]]:
    if present := _gpus_of_torch():
        return [_gpu(*gpu, "torch") for gpu in present]
    return [_gpu(*gpu, "nvidia-smi") for gpu in _gpus_of_driver()]


def _gpu(name: str, major: int, minor: int, source: str) -> dict[str, Any]:
    level, text = _judge(major, minor)
    rate = gpus.int8_rate(name, major, minor)
    return {
        "name": name,
        "compute_capability": [major, minor],
        "level": level,
        "verdict": text,
        "int8_ratio": rate.ratio,
        "int8": str(rate),
        "source": source,
    }


def _gpus_of_torch() -> list[Gpu]:
    # torch lists the devices of this process, in its order.
    if _version_of("torch") is None:
        return []
    cuda = sys.modules["torch"].cuda
    devices = range(cuda.device_count() if cuda.is_available() else 0)
    return [(str(cuda.get_device_name(i)), *cuda.get_device_capability(i)) for i in devices]


def _gpus_of_driver() -> list[Gpu]:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        return []
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"nvidia-smi: {(error.stdout + error.stderr).strip()}") from None
    rows = re.findall(r"^(.*), *(\d+)\.(\d+)\s*$", done.stdout, re.MULTILINE)
    return [(name, int(major), int(minor)) for name, major, minor in rows]


_PROBES: dict[str, Callable[[], Any]] = {
    "hotcore": _core.version,
    "backends": lambda: ["cpu", "cuda"] if _core.built_with_cuda() else ["cpu"],
    "instruction_sets": _instruction_sets,
    "instruction_set": contexts.isa,
    "threads": contexts.num_threads,
    "cuda_architectures": _cuda_archs,
    "cuda_tested": _cuda_tested,
    "wgmma": lambda: _core.cuda_wgmma(),
    "jax": lambda: importlib.util.find_spec("hotcore._jax_ffi") is not None,
    "cuda_error": _cuda_error,
    "driver": lambda: Path("/dev/nvidiactl").exists(),
    "gpus": _gpus,
    "extension": lambda: str(_EXTENSION),
    "library": lambda: _find("libhot.*"),
    "cmake_dir": _cmake,
    "python": platform.python_version,
    "python_executable": lambda: sys.executable,
    "platform": platform.platform,
    "numpy": lambda: _version_of("numpy"),
    "torch": lambda: _version_of("torch"),
}


def _installed(version: str | None) -> str:
    return version or "not installed"


def _backends_text(names: list[str]) -> str:
    return ", ".join(names) + ("" if "cuda" in names else " (built without CUDA)")


def _wgmma_text(built: bool, backends: list[str]) -> str:
    why = " (built without the CUTLASS headers, or not for 90a)" if "cuda" in backends else ""
    return "yes" if built else f"no{why}"


def _runtime_text(error: str | None, backends: list[str], driver: bool) -> str:
    if "cuda" not in backends:
        return "none"
    if error is not None and not driver:
        return "no NVIDIA driver on this machine"
    return "finds GPUs" if error is None else f"finds no GPU: {error}"


def _gpus_text(gpus: list[dict[str, Any]], driver: bool) -> str:
    if not gpus:
        return "none" + (", but a driver (/dev/nvidiactl)" if driver else "")
    return f"{len(gpus)}, by {gpus[0]['source']}"


_ROWS: tuple[tuple[str, tuple[str, ...], Callable[..., str]], ...] = (
    ("hotcore", ("hotcore",), str),
    ("backends", ("backends",), _backends_text),
    ("instruction sets", ("instruction_sets",), ", ".join),
    ("instruction set used", ("instruction_set", "threads"), "{}, {} threads".format),
    ("CUDA architectures", ("cuda_architectures",), lambda archs: ", ".join(archs) or "none"),
    (
        "of these",
        ("cuda_tested",),
        lambda archs: ", ".join(map(": ".join, archs.items())) or "none",
    ),
    ("wgmma kernels", ("wgmma", "backends"), _wgmma_text),
    ("hotcore.jax", ("jax",), lambda built: "built" if built else "not built (HOT_JAX=ON)"),
    ("CUDA runtime", ("cuda_error", "backends", "driver"), _runtime_text),
    ("GPUs", ("gpus", "driver"), _gpus_text),
    ("extension", ("extension",), str),
    ("library", ("library",), lambda path: path or "inside the extension (static)"),
    ("CMake package", ("cmake_dir",), _installed),
    ("Python", ("python", "python_executable"), "{} ({})".format),
    ("platform", ("platform",), str),
    ("NumPy", ("numpy",), _installed),
    ("torch", ("torch",), _installed),
)


if __name__ == "__main__":
    sys.exit(main())
