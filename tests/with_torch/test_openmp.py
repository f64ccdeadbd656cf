"""HOT's work on the threads of torch's OpenMP."""

import sys
from pathlib import Path

import pytest
import torch
from hotcore.torch import openmp
from support import output_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info(),
    reason="torch's threads are not OpenMP's",
)

PROGRAM = """
import hashlib, os
import torch, hotcore
import hotcore.torch as hot
from hotcore import contexts
torch.set_num_threads(3)
hotcore.set_num_threads(3)
torch.manual_seed(0)
model = hot.HotLinear(256, 192)
x = torch.randn(400, 256).requires_grad_()
torch.randn(600, 600) @ torch.randn(600, 600)
def gradients():
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    bits = [g.numpy().tobytes() for g in (x.grad, model.weight.grad)]
    return hashlib.sha256(b"".join(bits)).hexdigest()[:16]
here = gradients()
threads = len(os.listdir("/proc/self/task"))
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as in a DataLoader's worker: torch's own threads are gone, too
    os._exit(0 if gradients() == here and contexts._openmp == 0 else 1)
status = os.waitpid(child, 0)[1]
print(int(contexts._openmp != 0), threads, status, here)
"""


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> tuple[int, int, int, str]:
    monkeypatch.setenv(openmp.OWN_THREADS, own)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    shared, threads, status, bits = output_of(str(program), folder=tmp_path, timeout=100).split()
    return int(shared), int(threads), int(status), bits


@pytest.mark.long
def test_the_adapter_takes_torchs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No additional threads, and the same bits as with them and in a forked child."""
    shared, threads, status, bits = run(tmp_path, monkeypatch, "0")
    assert (shared, status) == (1, 0)
    separate = run(tmp_path, monkeypatch, "1")
    assert separate == (0, threads + 2, 0, bits)
