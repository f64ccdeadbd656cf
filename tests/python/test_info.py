"""``python -m hotcore.info``, and the imports of hotcore."""

import json
import sys
from pathlib import Path

import hotcore
import numpy as np
import pytest
from hotcore import _core, info
from hotcore.config import RECIPES
from support import isas, ran, refused


def run(*arguments: str) -> str:
    done = ran(sys.executable, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_prints_what_this_is() -> None:
    lines = run("-m", "hotcore").splitlines()
    assert lines[-1].startswith("advice  ")
    facts = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in lines}
    assert facts["hotcore"] == hotcore.__version__ and facts["backends"].startswith("cpu")
    assert ("built without CUDA" in facts["backends"]) != _core.built_with_cuda()
    assert facts["instruction sets"] == ", ".join(isas())
    assert facts["instruction set used"].startswith(_core.best_isa())
    assert facts["NumPy"] == np.__version__ and Path(facts["extension"]).exists()
    assert not any("unknown (" in text for label, text in facts.items() if label != "GPUs")


def test_json_and_the_cmake_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run("-m", "hotcore.info", "--json")) == info.collect()
    folder = info.collect()["cmake_dir"]
    if folder is None:
        refused(lambda: info.main(["--cmake-dir"]), "1", SystemExit)
        assert "no CMake package" in capsys.readouterr().err
    else:
        assert run("-m", "hotcore.info", "--cmake-dir").strip() == folder


def test_json_has_values() -> None:
    """Values are numbers, bools, lists and None: a program does not have to parse sentences."""
    facts = json.loads(run("-m", "hotcore.info", "--json"))
    assert facts["threads"] == hotcore.num_threads() and facts["threads"] > 0
    assert facts["instruction_sets"] == isas() and facts["instruction_set"] == hotcore.isa()
    assert facts["backends"] == (["cpu", "cuda"] if _core.built_with_cuda() else ["cpu"])
    assert facts["wgmma"] is _core.cuda_wgmma()
    assert ";".join(facts["cuda_architectures"]) == _core.cuda_architectures()
    assert isinstance(facts["jax"], bool) and isinstance(facts["driver"], bool)
    assert isinstance(facts["gpus"], list) and facts["python"] == sys.version.split()[0]
    assert facts["cmake_dir"] is None or Path(facts["cmake_dir"]).is_dir()
    assert facts["library"] is None or Path(facts["library"]).is_file()


def test_help_names_every_recipe() -> None:
    said = " ".join(run("-m", "hotcore.info", "--help").split())
    assert f"with --explain: {', '.join(RECIPES)}" in said


@pytest.mark.parametrize("options", [["--jsn-"], ["--js"], ["all"], ["--json", "--cmake-dir"]])
def test_unknown_options_are_refused(options: list[str]) -> None:
    refused(lambda: info.main(options), "2", SystemExit)


@pytest.mark.parametrize(("name", "least"), [("torch", "2.6"), ("jax", "0.10")])
def test_an_adapter_without_its_package_says_what_to_install(name: str, least: str) -> None:
    code = (
        f"import sys; sys.modules['{name}'] = None\n"
        f"try:\n import hotcore.{name}\n"
        "except ImportError as error: print(error)\n"
        "else: raise SystemExit('imported')"
    )
    said = run("-c", code)
    # PyPI's hotcore is another project: no advice may name it.
    assert f"needs {name} {least} or newer: pip install '{name}>={least}'" in said
    assert "hotcore[" not in said
    built = name == "torch" or info.collect()["jax"]
    assert ("HOT_JAX=ON pip install '.[jax]'" in said) != built


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.5.1+cu121", True), ("1.13.1", True), ("2.6.0a0+ecf3bae40a", False), ("3.0", False)],
)
def test_the_adapter_refuses_an_old_torch(tmp_path: Path, version: str, old: bool) -> None:
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
    # A later import may fail.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "try:\n import hotcore.torch\nexcept ImportError as error: print(error)\n"
    said = run("-c", code)
    expected = f"needs torch 2.6 or newer: pip install 'torch>=2.6' (torch is {version}, in"
    assert (expected in said) == old, said


def test_every_probe_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no such thing")

    for key in info._PROBES:
        monkeypatch.setitem(info._PROBES, key, broken)
        facts = info.collect()
        assert facts[key] == {"error": "OSError: no such thing"}
        rows = info.table(facts)
        assert "unknown (OSError: no such thing)" in rows.values() and rows["advice"]
        monkeypatch.undo()


def test_imports_without_torch() -> None:
    code = (
        "import sys, hotcore; assert 'torch' not in sys.modules; sys.modules['torch'] = None;"
        "import numpy; assert hotcore.fwht(numpy.ones(16, 'f4'))[0] == 16;"
        "from hotcore import info; facts = info.collect(); assert facts['torch'] is None;"
        "assert info.table(facts)['torch'] == 'not installed'"
    )
    run("-c", code)


def test_exports() -> None:
    assert sorted(hotcore.__all__) == hotcore.__all__
    for name in hotcore.__all__:
        assert getattr(hotcore, name) is not None
        if name not in ("__version__", "Key", "Gradients"):
            assert getattr(hotcore, name).__doc__
    package = Path(hotcore.__file__).parent
    assert (package / "py.typed").exists()
