"""``load_frozen``: a model from safetensors whose frozen weights are quantised as they are read."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import ops
from ..frozen.weights import FrozenModule
from ..ops import frozen_codes
from ..progress import shown
from .freeze import Freezing, check_inputs, sizes_of_x
from .report import listed
from .selection import Filter

FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""Dtypes of values in files."""
_DTYPES = FLOATS | {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_INDEX = ".safetensors.index.json"
Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_frozen(
    model: nn.Module,
    checkpoint: Files,
    bits: Literal[8, 4] = 4,
    filter_fn: Filter | None = None,
    *,
    inputs: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    save_codes: bool = False,
    progress: bool = True,
) -> nn.Module:
    """Load a model from safetensors files, and freeze its converted linear layers, in place.

    The result is that of ``load_state_dict``, then :func:`freeze`, but the plain weights never
    exist together: each is read, moved to ``device``, quantised there and freed. Call it before
    ``peft.get_peft_model``, with the keys of ``model.state_dict()`` in the files. A weight may also
    be there as codes (``save_codes=True``). Values are cast to the dtypes of the Parameters. The
    arguments that are not listed are those of :func:`freeze`; with ``inputs`` the files are read
    twice.

    Args:
        model: has layers that :func:`convert` made; best with Parameters on the meta device.
        checkpoint: a file, a folder, an index file of shards, or several files. In a folder the
            index file decides, then ``model.safetensors``, then all files of safetensors.
        device: the device of the loaded model; by default ``torch.get_default_device()``.

    Returns:
        The same model. Its ``freeze_report`` is the :class:`.FreezeReport` of this call.

    Raises:
        TypeError: ``model`` is no module, or ``inputs`` is no iterable.
        FileNotFoundError: ``checkpoint`` or a shard does not exist.
        ValueError: an argument is bad. A key is missing, unexpected, or in two files. A shape or
            dtype differs. A buffer on the meta device is in no checkpoint. A weight has a NaN or an
            infinity. Keys and layers are named, and the model has not changed. ``inputs`` are
            checked when they run, after the model is loaded.

    Source: docs/torch/lora.md, "Load a base that never exists in bf16".
    """
    check_inputs(model, bits, inputs)
    where = torch.get_default_device() if device is None else torch.device(device)
    freezing = Freezing(model, bits, filter_fn, save_codes=save_codes)
    entries = _entries(checkpoint)
    targets = _targets(model, freezing, entries)
    if inputs is not None and (kept := [t.key for t in targets if t.codes]):
        raise ValueError(f"inputs: expected None, because the checkpoint has codes: {listed(kept)}")
    values: dict[int, Tensor] = {}
    codes: dict[Any, nn.Parameter] = {}
    names = [target.key for target in targets]
    for target, _ in zip(targets, shown(names, "load: {}", progress), strict=True):
        tensor = _read(target, entries, where, freezing)
        if not target.layers:
            old, new = target.value, tensor
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(tensor, requires_grad=old.requires_grad)
            values[id(old)] = new
        for fqn in target.layers:
            if freezing.key(fqn) not in codes:
                encoded = tensor if target.codes else freezing.encoded_weight(fqn, tensor)
                codes[freezing.key(fqn)] = frozen_codes.parameter(encoded)
    for _, old, persistent, table, key in [*_tensors(model)]:
        if id(old) in values:
            table[key] = values[id(old)]
        elif not persistent:
            table[key] = old.to(where)
    for fqn in freezing.layers:
        freezing.freeze(fqn, codes[freezing.key(fqn)])
    freezing.report()
    if inputs is not None:
        _measure(model, freezing, targets, entries, inputs, progress)
    return model


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, key: str) -> Tensor:
        """The tensor, on the CPU, in the file's memory."""
        # Opened for each tensor: closing it gives the pages back that were read.
        with _opened(self.file) as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor


@dataclasses.dataclass(frozen=True)
class _Target:
    """Parameter or buffer of the model, and its key in the checkpoint."""

    value: Tensor
    key: str
    same: tuple[str, ...]
    """Further keys of a tied tensor, which must have the same values."""
    layers: tuple[str, ...]
    """Layers whose weight it is, which are to be frozen."""
    codes: bool = False
    """Whether the checkpoint has codes."""


def _opened(file: Path) -> Any:
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ModuleNotFoundError as error:
        text = "checkpoint: reading it needs the package safetensors: pip install safetensors"
        raise ModuleNotFoundError(text) from error
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except safetensors.SafetensorError as error:
        raise ValueError(f"checkpoint: {file} is no file of safetensors: {error}") from error


def dtypes_of(checkpoint: Files) -> dict[str, str]:
    """Dtypes of the tensors in files, a folder or an index, by their keys."""
    return {key: entry.dtype for key, entry in _entries(checkpoint).items()}


def _entries(checkpoint: Files) -> dict[str, _Entry]:
    """Tensors of the files, from their headers."""
    expected: dict[str, str] = {}
    if isinstance(checkpoint, str | os.PathLike):
        files, expected = _files(Path(checkpoint))
    else:
        files = [Path(each) for each in checkpoint]
    if not files:
        raise ValueError("checkpoint: expected at least one file of safetensors, got none")
    if absent := [str(file) for file in files if not file.is_file()]:
        raise FileNotFoundError(f"checkpoint: no such file: {listed(absent)}")
    entries: dict[str, _Entry] = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118  (no dict)
                if key in entries:
                    raise ValueError(f"checkpoint: {key} is in {entries[key].file} and in {file}")
                about = opened.get_slice(key)
                entries[key] = _Entry(file, tuple(about.get_shape()), about.get_dtype())
    wrong = [
        f"{key} in {name}"
        for key, name in expected.items()
        if key not in entries or entries[key].file.name != name
    ]
    if wrong:
        raise ValueError(
            f"checkpoint: the index file names tensors that are absent: {listed(wrong)}"
        )
    return entries


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Files of a path, and the file of each key where an index says it."""
    if path.is_dir():
        indices = sorted(path.glob(f"*{_INDEX}"))
        if len(indices) > 1:
            names = listed([index.name for index in indices])
            raise ValueError(f"checkpoint: {path} has several index files, name one: {names}")
        if not indices:
            one = path / "model.safetensors"
            files = [one] if one.exists() else sorted(path.glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"checkpoint: no file of safetensors in {path}")
            return files, {}
        path = indices[0]
    if not path.name.endswith(_INDEX):
        return [path], {}
    if not path.exists():
        raise FileNotFoundError(f"checkpoint: no such file: {path}")
    weight_map: dict[str, str] = json.loads(path.read_text())["weight_map"]
    return [path.parent / name for name in sorted(set(weight_map.values()))], weight_map


def _targets(model: nn.Module, freezing: Freezing, entries: Mapping[str, _Entry]) -> list[_Target]:
    """Targets in the order of the files. Raises ValueError where files and model do not fit."""
    layers: dict[int, list[str]] = {}
    for fqn, owner in freezing.owners.items():
        layers.setdefault(owner, []).append(fqn)
    named: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    wrong: list[str] = []
    for name, value, persistent, *_ in _tensors(model):
        if type(value) not in (Tensor, *ops.PLAIN_TYPES):
            wrong.append(f"{name} of the model is a {type(value).__name__}")
        elif persistent:
            named.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
        elif value.is_meta:
            wrong.append(
                f"buffer {name} is on the meta device and in no checkpoint (make the model under "
                "accelerate.init_empty_weights(), which keeps buffers)"
            )
    targets, used, missing = [], set[str](), []
    for owner, names in named.items():
        owned = tuple(layers.get(owner, ()))
        keys = [name for name in names if name in entries]
        coded = [f"{name}_codes" for name in names if owned and f"{name}_codes" in entries]
        used.update(keys, coded)
        if keys and coded:
            wrong.append(f"{keys[0]} is there as values and as codes")
        elif keys or coded:
            key, *same = keys or coded
            target = _Target(tensors[owner], key, tuple(same), owned, bool(coded))
            reasons = [_misfit(target, freezing, each, entries[each]) for each in (key, *same)]
            wrong += filter(None, reasons)
            targets.append(target)
        else:
            missing.append(names[0])
    unexpected = [key for key in entries if key not in used]
    lists = ((missing, "missing"), (unexpected, "unexpected"))
    wrong = [f"{word} keys: {listed(keys)}" for keys, word in lists if keys] + wrong
    if wrong:
        raise ValueError(f"checkpoint: it does not fit the model: {'; '.join(wrong)}")
    return sorted(targets, key=lambda target: entries[target.key].file)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool, dict[str, Any], str]]:
    """Parameters and buffers, also tied ones: names, whether checkpoints have them, and places."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FrozenModule):
            raise ValueError(
                f"model: {prefix or '(root)'} is frozen already; load_state_dict loads such a model"
            )
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table, name in [(each, name) for each in tables for name in each]:
            if (value := table[name]) is not None:
                persistent = name not in module._non_persistent_buffers_set
                yield f"{prefix}.{name}" if prefix else name, value, persistent, table, name


def _misfit(target: _Target, freezing: Freezing, key: str, entry: _Entry) -> str:
    """Difference between a tensor of a file and that of the model; empty if it can be loaded."""
    shape, dtype = tuple(target.value.shape), target.value.dtype
    if target.codes:
        for fqn in target.layers:
            size = freezing.sizes(fqn)[1]
            if entry.shape != (size,) or entry.dtype != "U8":
                block = freezing.layers[fqn].config.forward_block
                form = f"codes in {freezing.bits} bits of blocks of {block}"
                return f"{key}: {entry.dtype} {list(entry.shape)}; expected U8 [{size}], {form}"
        return ""
    if entry.shape != shape:
        return f"{key}: shape {list(entry.shape)}; expected {list(shape)}"
    fits = entry.dtype in FLOATS if dtype.is_floating_point else _DTYPES.get(entry.dtype) == dtype
    if not fits:
        expected = ", ".join(FLOATS) if dtype.is_floating_point else dtype
        return f"{key}: dtype {entry.dtype}; expected {expected}"
    return ""


def _read(
    target: _Target, entries: Mapping[str, _Entry], device: torch.device, freezing: Freezing
) -> Tensor:
    """A tensor on ``device``, in memory of its own."""
    tensor = entries[target.key].read(target.key)
    for key in target.same:
        if not torch.equal(tensor, entries[key].read(key)):
            raise ValueError(f"checkpoint: {target.key} and {key} differ; the model has one tensor")
    out = tensor.to(device).to(torch.uint8 if target.codes else target.value.dtype)
    if out is tensor and (target.codes or not target.layers):
        out = out.clone()  # which frees the file's memory
    if target.codes and not frozen_codes.intact(out, freezing.sizes(target.layers[0])[0]):
        raise ValueError(f"checkpoint: {target.key}: these bytes are not codes of a weight")
    return out


def _measure(
    model: nn.Module,
    freezing: Freezing,
    targets: Iterable[_Target],
    entries: Mapping[str, _Entry],
    inputs: Iterable[Any],
    progress: bool,
) -> None:
    """Quantise the frozen weights again, by the sizes of x in the frozen model."""
    by_owner, words = sizes_of_x(model, freezing, inputs, progress)
    read = {fqn: target for target in targets for fqn in target.layers}
    done = set[Any]()
    for fqn in shown([*read], "load: {} again", progress):
        layer, size = freezing.layers[fqn], by_owner.get(freezing.owners[fqn])
        if size is None:
            continue
        if freezing.key(fqn) not in done:
            weight = _read(read[fqn], entries, layer.weight_codes.device, freezing)
            layer.weight_codes.copy_(freezing.encoded_weight(fqn, weight, size))
            done.add(freezing.key(fqn))
        layer.weight_measured = True
        layer.on_frozen()
    freezing.report(words)
