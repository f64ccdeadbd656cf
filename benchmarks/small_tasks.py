"""The README's two tasks (examples/train_lib), and every method that they are run with."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hotcore
import torch
from timing import resumed, rounded

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_lib import training  # noqa: E402

TASKS = ("vit", "gpt")
RECIPES = ("default", "fast", "int4", "paper", "accurate")
VIT_TILES: dict[str, Any] = {"token_grid": (8, 8), "prefix_tokens": 1}


@dataclass(frozen=True)
class Contender:
    """A method of ``rivals.convert``, as it is run and shown."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def contenders(task: str) -> list[Contender]:
    """Every method by its name; tiles of tokens where there are images."""
    plain = ("bf16", "torchao_fp8", "torchao_int8", "naive_int4", "luq", "lbp_wht_flat")
    found = [Contender(name, name) for name in plain]
    if task == "vit":
        found.append(Contender("lbp_wht", "lbp_wht", VIT_TILES))
    found += [Contender(name, name) for name in ("authors_hot", "actnn_2bit")]
    found += [Contender(name, name) for name in RECIPES]
    if task == "vit":
        found.append(Contender("paper, tiles", "paper", VIT_TILES))
    return found


def chosen(task: str, names: str | None, more: tuple[Contender, ...] = ()) -> list[Contender]:
    """Those named in a list with semicolons; all for None. Raises ValueError for another name."""
    every = {contender.name: contender for contender in (*more, *contenders(task))}
    if names is None:
        return list(every.values())
    wanted = [name.strip() for name in names.split(";")]
    known = {c.name for t in TASKS for c in (*more, *contenders(t))}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"methods: {', '.join(unknown)}: none of {', '.join(sorted(known))}")
    return [contender for name, contender in every.items() if name in wanted]


def load_task(name: str) -> training.Task:
    """As examples/train.py has it."""
    return training.load_task(name)


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write the report so that a break leaves the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(_text(rounded(content)))
    os.replace(part, path)


def _text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of its inner mappings: the files are committed."""
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            inner = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def begun(
    path: Path, benchmark: str, settings: Mapping[str, Any], threads: int, lora: str, entries: str
) -> dict[str, Any]:
    """The report at ``path``, to go on with; a new one where there is none.

    Args:
        path: of the report.
        benchmark: its name.
        settings: what the figures depend on.
        threads: of the CPU.
        lora: why LoRA is left out.
        entries: key of what is filled in bit by bit.

    Raises ValueError where it was made with other settings.
    """
    found = resumed(path, settings)
    if found is not None:
        return found
    versions = {"hotcore": hotcore.__version__, "torch": torch.__version__, "isa": hotcore.isa()}
    return {
        "benchmark": benchmark,
        "device": platform.processor() or platform.machine(),
        "versions": {**versions, "threads": threads},
        "settings": settings,
        "left out": {"lora": lora},
        entries: {},
    }


def use_threads(count: int) -> None:
    """Of torch and of hotcore."""
    torch.set_num_threads(count)
    hotcore.set_num_threads(count)
