"""``load_frozen``: a checkpoint read tensor by tensor, and what does not fit it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import hotcore.torch as hot
import pytest
import torch
from hotcore.torch.frozen import HotFrozenLinear
from support import ran, refused
from torch import nn

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("seeded")
both = pytest.mark.parametrize("bits", [8, 4])


class Model(nn.Module):
    """An embedding tied to a head, two tied layers, a plain one, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 64)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.b.weight = self.a.weight
        self.c, self.plain = nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("factor", torch.ones(64, device="cpu"), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(self.embed(tokens))) * self.factor
        return self.head(self.norm(self.plain(self.c(x))))


def chosen(_: nn.Module, name: str) -> bool:
    return name in ("a", "b", "c")


def converted(device: str = "meta") -> Model:
    with torch.device(device):
        model = Model().bfloat16()
    return hot.convert(model, "default", forward="int8", filter_fn=chosen)


def source() -> Model:
    model = converted("cpu")
    with torch.no_grad():  # so that features have sizes of their own
        model.a.weight *= torch.linspace(0.1, 3, 64)
        model.norm.running_mean.normal_()
    return model


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """State without the second names of tied tensors, as safetensors wants it."""
    state = model.state_dict()
    second = ("b.weight", "b.weight_codes", "head.weight")
    return {name: value for name, value in state.items() if name not in second}


def saved(state: dict[str, Any], path: Path, shards: int = 1) -> Path:
    """Files of a checkpoint, with their index; three shards hold a third of the tensors each."""
    path.mkdir(exist_ok=True)
    parts: list[dict[str, Any]] = [{} for _ in range(shards)]
    for i, (name, value) in enumerate(state.items()):
        parts[i % shards][name] = value
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for name, part in zip(names, parts, strict=True):
        safetensors.save_file(part, path / name)
    if shards > 1:
        weight_map = {key: n for n, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def same_state(model: nn.Module, other: nn.Module) -> bool:
    found, expected = model.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    assert all(type(a) is type(expected[name]) for name, a in found.items())
    return all(torch.equal(a, expected[name]) for name, a in found.items())


@both
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loaded_as_frozen_after_loading(
    bits: Any, shards: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = source()
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in state_of(expected).items()}
    folder = saved(state, tmp_path, shards)
    hot.freeze(expected, bits, save_codes=True)
    model = hot.load_frozen(converted(), folder, bits, save_codes=True)
    assert same_state(model, expected)
    assert isinstance(model.a, HotFrozenLinear) and model.a.weight_codes is model.b.weight_codes
    assert model.head.weight is model.embed.weight and type(model.plain) is nn.Linear
    assert model.freeze_report.to_json() == expected.freeze_report.to_json()
    tokens = torch.randint(48, (5,))
    assert torch.equal(model.eval()(tokens), expected.eval()(tokens))
    # The codes themselves, as a file and as a list of files, into memory of their own.
    folder = saved(state_of(model), tmp_path / "codes")
    files = [*folder.glob("*.safetensors")]
    for checkpoint in (str(files[0]), files):
        again = hot.load_frozen(converted(), checkpoint, bits, save_codes=True)
        assert same_state(again, expected) and torch.equal(again.eval()(tokens), expected(tokens))


def test_sizes_of_x_from_the_frozen_model(tmp_path: Path) -> None:
    """The files are read again; the result is near that of a plain model's sizes."""
    expected = source()
    folder = saved(state_of(expected), tmp_path)
    exact = expected.a.weight.detach().float()
    batches = [torch.randint(48, (64,)) for _ in range(3)]
    hot.freeze(expected, 4, inputs=batches)
    model = hot.load_frozen(converted(), folder, 4, inputs=batches)
    assert model.freeze_report.to_json() == expected.freeze_report.to_json()
    for layer, other in ((model.a, expected.a), (model.b, expected.b), (model.c, expected.c)):
        assert layer.weight_measured
        gap = layer.weight_exponents.int() - other.weight_exponents.int()
        assert gap.abs().max() <= 2 and layer.weight_exponents.unique().numel() > 2
    assert torch.equal(model.a.weight_codes, model.b.weight_codes)
    error = (model.a.dequantized().float() - exact).norm() / exact.norm()
    assert error < 0.15 and model(batches[0]).isfinite().all()
    with pytest.raises(ValueError, match="inputs: none of 0 batches reached"):
        hot.load_frozen(converted(), folder, 4, inputs=[])
    state = state_of(source())
    state["embed.weight"] = torch.full_like(state["embed.weight"], torch.nan)
    model, folder = converted(), saved(state, tmp_path / "nan")
    with pytest.raises(ValueError, match="inputs: NaN or infinity in the x of layer a"):
        hot.load_frozen(model, folder, 4, inputs=batches)
    assert model.freeze_report.sizes == "weights" and type(model.c) is HotFrozenLinear


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def with_nan(state: dict[str, Any]) -> dict[str, Any]:
    weight = state["c.weight"].clone()
    weight[3, 4] = torch.nan
    return state | {"c.weight": weight}


WRONG: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda s: without(s, "c.weight", "norm.running_var"),
        r"missing keys: c\.weight, norm\.running_var$",
    ),
    "unexpected": (lambda s: s | {"lora.weight": s["c.bias"].clone()}, "unexpected keys: lora.w"),
    "shape": (
        lambda s: s | {"c.weight": s["c.weight"].t().contiguous()},
        r"c\.weight: shape \[64, 96\]; expected \[96, 64\]",
    ),
    "dtype": (
        lambda s: s | {"c.weight": s["c.weight"].to(torch.float8_e4m3fn)},
        r"c\.weight: dtype F8_E4M3; expected F64, F32, F16, BF16",
    ),
    "count": (
        lambda s: s | {"norm.num_batches_tracked": torch.zeros(())},
        "num_batches_tracked: dtype F32; expected torch.int64",
    ),
    "another quantiser": (
        lambda s: without(s, "c.weight") | {"c.qweight": torch.zeros(8, 96, dtype=torch.int32)},
        r"missing keys: c\.weight; unexpected keys: c\.qweight",
    ),
    "codes": (
        lambda s: without(s, "c.weight") | {"c.weight_codes": torch.zeros(9, dtype=torch.uint8)},
        r"c\.weight_codes: U8 \[9\]; expected U8 \[\d+\], codes in 4 bits of blocks of",
    ),
    "both": (
        lambda s: s | {"c.weight_codes": torch.zeros(9, dtype=torch.uint8)},
        r"c\.weight is there as values and as codes",
    ),
    "untied": (
        lambda s: s | {"head.weight": s["embed.weight"] + 1},
        r"embed\.weight and head\.weight differ; the model has one tensor",
    ),
    "nan": (with_nan, "layer c: weight: it has a NaN or an infinity"),
}


@pytest.mark.parametrize("case", WRONG)
def test_nothing_has_changed_where_files_do_not_fit(case: str, tmp_path: Path) -> None:
    change, text = WRONG[case]
    folder, model = saved(change(state_of(source())), tmp_path, 3), converted()
    before = dict(model.named_parameters())
    refused(lambda: hot.load_frozen(model, folder), text)
    assert type(model.c) is hot.HotLinear
    after = dict(model.named_parameters())
    assert all(after[name] is value and value.is_meta for name, value in before.items())
    assert hot.load_frozen(model, saved(state_of(source()), tmp_path / "whole")).c.weight_bits == 4


def test_a_second_name_with_the_same_values(tmp_path: Path) -> None:
    state = state_of(source())
    folder = saved(state | {"head.weight": state["embed.weight"].clone()}, tmp_path, 3)
    model = hot.load_frozen(converted(), folder)
    assert model.head.weight is model.embed.weight


def test_bytes_that_are_no_codes(tmp_path: Path) -> None:
    state = state_of(hot.freeze(source(), 4, save_codes=True))
    state["c.weight_codes"] = state["c.weight_codes"].clone()
    state["c.weight_codes"][7] ^= 1
    with pytest.raises(ValueError, match="c.weight_codes: these bytes are not codes of a weight"):
        hot.load_frozen(converted(), saved(state, tmp_path))
    exact = saved(state_of(hot.freeze(source(), 4, save_codes=True)), tmp_path / "exact")
    with pytest.raises(ValueError, match="inputs: expected None, because the checkpoint has codes"):
        hot.load_frozen(converted(), exact, inputs=[torch.zeros(1, dtype=torch.long)])


def test_files(tmp_path: Path) -> None:
    folder = saved(state_of(source()), tmp_path / "a", 3)
    with pytest.raises(FileNotFoundError, match="no such file: .*nowhere"):
        hot.load_frozen(converted(), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no file of safetensors in .*empty"):
        hot.load_frozen(converted(), tmp_path / "empty")
    refused(lambda: hot.load_frozen(converted(), []), "expected at least one file")
    one = folder / "model-00001-of-00003.safetensors"
    refused(lambda: hot.load_frozen(converted(), one), "missing keys: a.weight, a.bias, c.bias")
    refused(lambda: hot.load_frozen(converted(), [one, one]), r"is in .*00001.* and in .*00001")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no header")
    refused(lambda: hot.load_frozen(converted(), bad), "bad.safetensors is no file of safetensors")
    index = folder / "model.safetensors.index.json"
    hot.load_frozen(converted(), index)
    content = json.loads(index.read_text())
    content["weight_map"]["d.weight"] = one.name
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index file names tensors that are absent: d\.weight"):
        hot.load_frozen(converted(), folder)
    (folder / "model.fp16.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(ValueError, match="has several index files, name one: model.fp16"):
        hot.load_frozen(converted(), folder)
    one.unlink()
    refused(lambda: hot.load_frozen(converted(), index), "model-00001-of-00003", FileNotFoundError)


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    folder = saved(state_of(source()), tmp_path)
    model = converted()
    model.register_buffer("table", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="buffer table is on the meta device and in no checkpoint"):
        hot.load_frozen(model, folder)
    with pytest.raises(ValueError, match="model: a is frozen already; load_state_dict loads"):
        hot.load_frozen(hot.freeze(converted(), 4, lambda _, n: n in ("a", "b")), folder)
    with torch.device("meta"), pytest.raises(ValueError, match="no converted layer; call hot.con"):
        hot.load_frozen(Model(), folder)
    with pytest.raises(ValueError, match="inputs: expected None with bits=8"):
        hot.load_frozen(converted(), folder, 8, inputs=[])
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        hot.load_frozen(folder, converted())  # type: ignore[type-var, arg-type]


PEAK = """
import sys
import torch, hotcore.torch as hot
from torch import nn

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(24)))
hot.convert(model, "default", forward="int8", filter_fn=lambda *_: True)
before = peak()
if sys.argv[2] == "whole":
    from safetensors.torch import load_file
    model.load_state_dict(load_file(sys.argv[1]), assign=True)
    hot.freeze(model, 4)
else:
    hot.load_frozen(model, sys.argv[1], 4)
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_is_bounded_by_a_tensor(tmp_path: Path) -> None:
    """192 MiB of weights are 26 MiB of codes, a tensor 8 MiB. The other way exceeds the bound."""
    state = {f"{i}.weight": torch.randn(1024, 2048) for i in range(24)}
    path, size = tmp_path / "model.safetensors", 24 * 4 * 1024 * 2048
    safetensors.save_file(state, path)
    del state

    # glibc raises this threshold while a program runs, and then keeps freed tensors by chance.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

    def peak(how: str) -> int:
        done = ran(sys.executable, "-c", PEAK, path, how, env=environment)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert peak("tensors") < size / 2 < size < peak("whole")
