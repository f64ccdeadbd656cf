"""The promises of SECURITY.md: no pickle, no code from data, no network, strict parsing, pins."""

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hotcore
import pytest
from hotcore import HotConfig, _core, _strict_json
from support import ran, refused

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "hotcore"

# Modules that run code from data, or reach the network.
MODULES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("runpy", "code", "codeop", "socket", "ssl", "http", "urllib", "urllib3", "requests"),
    *("httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc", "telnetlib", "huggingface_hub", "wget"),
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "input", "execfile", "os.system", "os.popen"),
    *("os.execv", "os.execvp", "os.spawnv", "torch.hub.load", "torch.hub.download_url_to_file"),
    "torch.package.PackageImporter",
}
# The one external program is nvidia-smi, run by python -m hotcore.info.
SUBPROCESS = {"info.py"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                if name.split(".")[0] in MODULES and not getattr(node, "level", 0):
                    yield f"{line}: import {name}"
                if name.split(".")[0] == "subprocess":
                    yield f"{line}: subprocess"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        words = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in CALLS:
            yield f"{line}: {name}"
        if name in ("torch.load", "numpy.load", "np.load"):
            safe = words.get("weights_only") or words.get("allow_pickle")
            wanted = name == "torch.load"
            if not (isinstance(safe, ast.Constant) and safe.value is wanted):
                yield f"{line}: {name} that may unpickle"
        shell = words.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield f"{line}: shell"


FORBIDDEN = (
    "import pickle | from pickle import loads | import urllib.request | import subprocess | "
    "def f():\n    import socket | eval('1') | exec(x) | torch.load(path) | os.system(x) | "
    "torch.load(path, weights_only=False) | run(x, shell=True) | np.load(path) | __import__('x')"
)


@pytest.mark.parametrize("text", FORBIDDEN.split(" | "))
def test_the_search_finds(text: str) -> None:
    assert list(findings(ast.parse(text)))


def test_the_package_runs_no_data_and_reaches_no_network() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 30
    defects = {
        f"{file.relative_to(PACKAGE)}:{what}"
        for file in files
        for what in findings(ast.parse(file.read_text()))
        if not (file.name in SUBPROCESS and what.endswith("subprocess"))
    }
    assert not defects


def test_every_fetched_wheel_has_a_checksum() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import fetch_cutlass
        import fetch_torchao
        import fetch_xla_ffi
        from pinned_wheel import Wheel
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    modules = {module.__name__: module for module in (fetch_cutlass, fetch_torchao, fetch_xla_ffi)}
    assert {path.stem for path in ROOT.glob("scripts/fetch_*.py")} == set(modules)
    page = (ROOT / "third_party" / "README.md").read_text()
    for module in modules.values():
        wheel: Wheel = module.WHEEL
        assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256), wheel.title
        assert re.fullmatch(r"[\w-]+==[\d.]+", wheel.requirement), wheel.title
        assert wheel.sha256 in page, f"third_party/README.md lacks the checksum of {wheel.title}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text is no JSON"),
        ('{"rank": 4', "text is no JSON"),
        ("[" * 100_000, "nested deeper than 16"),
        ('{"rows": ' * 17 + "1" + "}" * 17, "nested deeper than 16"),
        ('{"rank": 4, "rank": 5}', "'rank' occurs twice"),
        ('{"rank": 1' + "0" * 5000 + "}", "a number of 5001 digits"),
        ('{"rank": 4294967296}', "rank: 4294967296 does not fit 32 bits"),
        ('{"token_grid": [4294967296, 1]}', "token_grid: 4294967296 does not fit"),
        ('{"prefix_tokens": 4294967296}', "prefix_tokens: 4294967296 does not fit"),
        ('{"token_grid": [true, 2]}', "token_grid"),
        ('{"token_grid": 5}', "token_grid: expected"),
        ('{"basis": "lowpass", "storage": "int8", "rows": 5}', "rows: expected ints"),
        ('{"rank": "4"}', "rank: expected an int"),
        ('{"rank": NaN}', "rank: expected an int"),
        ('{"gx_scale": ["token"]}', "gx_scale"),
        ('{"json": "{}"}', "no field 'json'"),
        ('{"gx_bits": 2}', "gx_bits: expected 4 or 8, got 2"),
        ("null", "expected a JSON object"),
    ],
)
def test_bad_texts_of_a_config(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        HotConfig.from_json(text)
    assert str(raised.value).startswith("text")


def test_a_text_of_a_config_has_a_limit() -> None:
    text = HotConfig().to_json()
    fill = " " * (_strict_json.MAX_TEXT_LENGTH - len(text))
    assert HotConfig.from_json(text + fill) == HotConfig()
    refused(lambda: HotConfig.from_json(text + fill + " "), "text: longer than 1048576 characters")
    refused(HotConfig.from_json, "text: expected a str, got bytes", TypeError, text.encode())


def test_brackets_inside_of_texts_are_no_depth() -> None:
    assert _strict_json.parse('["' + "[" * 50 + '\\"' + "{" * 50 + '"]', "text")


def test_a_config_out_of_a_pickle_is_checked() -> None:
    config = object.__new__(HotConfig)
    with pytest.raises(ValueError, match="rank: expected .*, got 400"):
        config.__setstate__({"basis": "lowpass", "storage": "int8", "rank": 400})
    refused(lambda: config.__setstate__({"speed": 1}), "no field 'speed'")


TRAINING = """
import sys

def refuse(event, arguments):
    if event.startswith(("socket.", "urllib.", "ftplib.", "http.", "smtplib.")):
        if event != "socket.__new__" or arguments[1] not in LOCAL:
            raise RuntimeError(f"network: {event} {arguments}")

import socket
LOCAL = (getattr(socket, "AF_UNIX", None),)
sys.addaudithook(refuse)
import numpy as np
import hotcore
from hotcore import info
x = np.ones((64, 48), np.float32)
hotcore.backward_linear(x, None, x, need="gw")
info.collect()
try:
    import torch
except ImportError:
    print("done")
    raise SystemExit
import hotcore.torch as hot
from hotcore import paper
model = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.ReLU(), torch.nn.Linear(32, 48))
hot.convert(model, "default", filter_fn=lambda module, name: True)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(16, 48)).square().mean().backward()
    optimizer.step()
scales = paper.calibrate(model, [torch.ones(16, 48)], lambda m, b: m(b).square().mean())
print(scales, file=sys.stderr)
print("done")
"""


@pytest.mark.long
def test_no_network_at_run_time(tmp_path: Path) -> None:
    """Make every Python event that opens a connection raise; without network where possible."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    paths = os.pathsep.join([str(Path(hotcore.__file__).parents[1]), *sys.path])
    before = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or ran(*before, "true").returncode:
        before = []  # only the guard
    done = ran(*before, sys.executable, script, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]


SYSTEM_CALLS = {
    *("socket", "connect", "bind", "listen", "accept", "accept4", "send", "sendto", "sendmsg"),
    *("recv", "recvfrom", "recvmsg", "getaddrinfo", "gethostbyname", "gethostbyname_r"),
    *("system", "popen", "execve", "execv", "execvp", "posix_spawn", "posix_spawnp", "fork"),
    *("dlopen", "open", "open64", "fopen", "fopen64", "getenv", "secure_getenv"),
}


def test_libhot_imports_no_call_that_leaves_the_process() -> None:
    """Only a CPU build: the linked CUDA runtime opens its driver."""
    libraries = list((Path(hotcore.__file__).parent / "lib").glob("libhot.so*"))
    if shutil.which("nm") is None or not libraries or _core.built_with_cuda():
        pytest.skip("needs nm and a shared libhot without CUDA")
    done = ran("nm", "-D", "--undefined-only", libraries[0])
    names = {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    assert "memcpy" in names  # the list is not empty
    assert not names & SYSTEM_CALLS
