"""The examples are short, stand alone and run at toy size; ddp.py runs under torchrun."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALONE = {
    **dict.fromkeys(("ddp", "lightning_trainer", "paper", "pretrain_gpt", "trainer"), 86),
    **{"finetune_vit": 88, "continue_llama": 104, "clip": 112, "lora": 130, "diffusion": 143},
}
"""Examples, and the highest number of their lines."""
Main, Capture = Callable[..., Any], pytest.CaptureFixture[str]
LIMIT = 900  # seconds; an idle machine takes about 6
pytestmark = pytest.mark.long


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``main(name, *arguments)`` runs an example in this process, on one thread."""
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "benchmarks"))
    from models import mend_torchvision

    def run(name: str, *arguments: str) -> Any:
        mend_torchvision()
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
            return module.main(list(arguments))

    torch.set_num_threads(1)
    return run


@pytest.mark.parametrize(("name", "lines"), ALONE.items())
def test_short_and_alone(name: str, lines: int) -> None:
    """It names what to install, and imports nothing else of the repository."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("\n") <= lines and "\n    pip install '.[torch,examples]'" in text
    beside = {path.stem for path in EXAMPLES.iterdir()}
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {module.split(".")[0] for module in names} & beside


def needs(*libraries: str) -> None:
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")


def saved_llama(folder: Path) -> str:
    """Save a model with its tokenizer, a token a character. Returns their folder."""
    import tokenizers
    from models import mend_torchvision

    mend_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
    tokens = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, **tokens)).save_pretrained(folder)
    letters = tokenizers.models.BPE({chr(i): i for i in range(128)}, [])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(letters))
    tokenizer.save_pretrained(folder)
    return str(folder)


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (.*)$", printed, re.MULTILINE)]


def test_first_hour(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Every code cell of the notebook runs at toy size."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {"__name__": "first_hour"}
    for cell in json.loads((EXAMPLES / "first_hour.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], "first_hour.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "8 of 9 layers run HOT" in printed and "x the speed of plain" in printed
    assert names["ours"][0] == pytest.approx(names["plain"][0], rel=0.01)


def test_lora(main: Main, capsys: Capture) -> None:
    needs("transformers", "peft")
    options = ["--steps", "21", "--base-steps", "25"]
    first, plain = main("lora", *options, "--recipe", "none")
    same, ours = main("lora", *options)
    assert first == same  # equal model and forward
    assert plain < 0.97 * first  # it learns
    assert ours != plain and ours == pytest.approx(plain, rel=0.01)
    capsys.readouterr()
    for form in ("int8", "int4"):
        frozen = main("lora", *options, "--forward", "int8", "--freeze", form, "--checkpoint")
        printed = capsys.readouterr().out
        assert "10 of 15 layers run HOT" in printed
        assert f"10 layers frozen in {form.upper()}" in printed
        assert frozen[0] != first
        assert frozen == pytest.approx((first, plain), rel=0.01 if form == "int8" else 0.05)


def test_lora_on_a_folder(main: Main, capsys: Capture, tmp_path: Path) -> None:
    """Each weight of the folder is frozen as it is read."""
    needs("transformers", "peft", "tokenizers", "accelerate")
    options = ["--model", saved_llama(tmp_path), "--steps", "1", "--context", "16"]
    plain = main("lora", *options, "--recipe", "none")
    frozen = main("lora", *options, "--forward", "int8", "--freeze", "int4")
    assert "7 layers frozen in INT4" in capsys.readouterr().out
    assert frozen != plain and frozen == pytest.approx(plain, rel=0.05)


def test_an_import_error_is_the_real_one() -> None:
    """A library that exists but fails to import is not reported as missing."""
    code = "import sys; sys.modules['peft.utils'] = None; sys.argv = ['lora.py']; import runpy; "
    code += f"runpy.run_path({str(EXAMPLES / 'lora.py')!r}, run_name='__main__')"
    needs("peft")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install" not in done.stderr
    assert "import of peft.utils halted" in done.stderr


def test_finetune_vit(main: Main, tmp_path: Path, capsys: Capture) -> None:
    needs("sklearn", "timm")
    accuracy = main("finetune_vit", "--steps", "81")
    printed = capsys.readouterr().out
    assert "8 of 10 layers run HOT" in printed
    losses = losses_of(printed)
    assert len(losses) == 5 and losses[-1] < 0.97 * losses[0] and 0.1 < accuracy <= 1
    # This run has a folder of images, a model of timm and its checkpoint.
    image = pytest.importorskip("PIL.Image")
    for label in range(3):
        (tmp_path / "data" / f"class{label}").mkdir(parents=True)
        for i in range(12):
            pixels = np.full((20, 30, 3), 60 * label + i, np.uint8)
            image.fromarray(pixels).save(tmp_path / "data" / f"class{label}" / f"{i}.png")
    import timm

    name, weights = "test_vit2", tmp_path / "vit.pth"
    torch.manual_seed(5)
    torch.save(timm.create_model(name).state_dict(), weights)
    options = ["--data", str(tmp_path / "data"), "--model", name, "--weights", str(weights)]
    main("finetune_vit", *options, "--steps", "1")
    assert "the output head" in capsys.readouterr().out


def test_pretrain_gpt(main: Main, tmp_path: Path, capsys: Capture) -> None:
    runs = {}
    for options in ((), ("--recipe", "none"), ("--micro", "2"),
                    ("--forward", "int8"), ()):  # fmt: skip
        runs.setdefault(options, []).append(main("pretrain_gpt", "--steps", "3", *options))
    printed = capsys.readouterr().out
    assert printed.count("8 of 9 layers run HOT") == 4
    assert "forward='int8'" in printed
    ours, again = runs[()]
    assert ours == again  # a seed repeats a run
    (plain,), (micro,) = runs["--recipe", "none"], runs["--micro", "2"]
    (int8,) = runs["--forward", "int8"]
    assert len({ours, plain, micro, int8}) == 4
    assert int8 == pytest.approx(plain, rel=0.01)
    assert ours == pytest.approx(plain, rel=0.01)
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(64)) * 40)
    options = ["--text", str(text), "--context", "32", "--width", "64", "--depth", "1"]
    assert main("pretrain_gpt", *options, "--steps", "40") < 1  # a cycle of 64 bytes is easy


def test_continue_llama(main: Main, tmp_path: Path, capsys: Capture) -> None:
    transformers = pytest.importorskip("transformers")
    options = ["--steps", "21", "--batch", "4", "--context", "64", "--checkpoint"]
    before, after = main("continue_llama", *options, "--out", str(tmp_path))
    assert "layers run HOT" in capsys.readouterr().out and after < 0.9 * before
    plain = main("continue_llama", *options, "--recipe", "none")
    assert plain[0] == before and plain[1] == pytest.approx(after, rel=0.02)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)  # a plain Llama
    assert type(again.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_clip(main: Main, capsys: Capture) -> None:
    needs("transformers", "sklearn")
    assert main("clip", "--steps", "61", "--batch", "32") > 0.2  # of ten captions
    printed = capsys.readouterr().out
    losses = losses_of(printed)
    assert "layers run HOT" in printed and losses[-1] < 0.9 * losses[0]


def test_diffusion(main: Main, tmp_path: Path, capsys: Capture) -> None:
    needs("sklearn")
    drawn = tmp_path / "drawn.pt"
    ours = main("diffusion", "--steps", "41", "--draw", str(drawn))
    assert "12 of 14 layers run HOT" in capsys.readouterr().out and ours < 1.2
    assert ours == pytest.approx(main("diffusion", "--steps", "41", "--recipe", "none"), rel=0.02)
    assert torch.load(drawn).shape == (10, 1, 8, 8)
    torch.save((torch.randn(40, 4, 8, 8), torch.arange(40) % 3), tmp_path / "latents.pt")
    main("diffusion", "--data", str(tmp_path / "latents.pt"), "--steps", "1", "--width", "128")


def test_paper(main: Main, capsys: Capture) -> None:
    needs("sklearn")
    losses = main("paper", "--steps", "100")
    assert "of 8 layers over 2 batches" in capsys.readouterr().out
    assert losses["fp32"] < 1.9 and losses["published"] < 1.9  # 2.30 at first
    assert losses["published"] != losses["fp32"]


def test_trainer(main: Main, tmp_path: Path, capsys: Capture) -> None:
    needs("transformers", "accelerate")
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 300)
    options = ["--text", str(text), "--out", str(tmp_path)]
    history = main("trainer", *options, "--steps", "4")
    measured = history[0]
    assert 0 < measured["hot/noise_gx/all"] < measured["hot/noise_gw/all"] < 0.1
    assert "10 of 15 layers run HOT" in capsys.readouterr().out
    # from_pretrained converts a folder with a model and its tokenizer.
    history = main("trainer", *options, "--steps", "3", "--model", saved_llama(tmp_path))
    assert any("hot/noise_gx/all" in e for e in history)


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(main: Main, tmp_path: Path, capsys: Capture) -> None:
    needs("sklearn", "lightning")
    assert main("lightning_trainer", "--steps", "12", "--out", str(tmp_path)).loop.steps == 12
    (table,) = tmp_path.rglob("metrics.csv")
    assert {"hot/noise_gw/model.0", "loss"} <= set(table.read_text().splitlines()[0].split(","))
    assert "layers run HOT" in capsys.readouterr().out


def output_of(command: list[str]) -> str:
    """Return a launcher's output. A time-out terminates it, because a kill leaves its workers."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, cwd=EXAMPLES.parent, **pipes) as process:
        try:
            printed, errors = process.communicate(timeout=LIMIT)
        except BaseException:
            process.terminate()
            raise
    assert process.returncode == 0, errors
    return printed


@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_ddp(options: tuple[str, ...]) -> None:
    needs("sklearn")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ("--steps", "21", "--batch", "16", *options)
    printed = output_of([*launcher, str(EXAMPLES / "ddp.py"), *options])
    losses = losses_of(printed)
    assert len(losses) == 3 and losses[2] < 0.8 * losses[0]
    assert f"2 processes, {'FSDP2' if '--fsdp' in options else 'DDP'}" in printed
    assert "6 of 8 layers run HOT" in printed
