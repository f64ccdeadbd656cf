"""Memory after many steps of a small model, some of which are interrupted."""

import contextlib
import ctypes
import gc
import os
import sys
from dataclasses import dataclass
from typing import Any

import hotcore.torch as hot
import torch
from torch import nn


class GivenUp(Exception):
    """Raised between two parts of a step."""


@dataclass(frozen=True)
class Memory:
    """Memory of a process in bytes."""

    host: int
    """Bytes in use in glibc's malloc; 0 without it."""
    objects: int
    """Number of blocks in Python's allocator."""
    resident: int
    """Resident bytes from /proc; 0 without it."""
    device: int
    """Bytes of tensors."""
    reserved: int
    """Bytes of torch's allocator on the device."""


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO.split())


def memory(device: str) -> Memory:
    for _ in range(3):
        gc.collect()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
    host = resident = 0
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallInfo
        info = library.mallinfo2()
        host = info.uordblks + info.hblkhd
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    on_cuda = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
    return Memory(host, sys.getallocatedblocks(), resident, *on_cuda)


class Steps:
    """Steps of a layer in turns: whole ones, and every way to give one up.

    Args:
        device: "cpu" or "cuda".
        recipe: of the layer.
    """

    def __init__(self, device: str, recipe: str = "default") -> None:
        torch.manual_seed(0)
        self.layer = hot.HotLinear(48, 32, config=recipe).to(device)
        self.model = nn.Sequential(self.layer, nn.ReLU())
        self.x = torch.randn(64, 48, device=device, requires_grad=True)
        self.gy = torch.randn(64, 32, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.done = {"whole": 0, "forward": 0, "after forward": 0, "backward": 0}

    def run(self, count: int) -> None:
        for index in range(count):
            kind = {3: "forward", 5: "after forward", 7: "backward"}.get(index % 10, "whole")
            self.done[kind] += 1
            getattr(self, "_" + kind.replace(" ", "_"))()

    def _whole(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).backward(self.gy)
        self.optimizer.step()

    def _forward(self) -> None:
        self.model(self.x)  # and no backward

    def _after_forward(self) -> None:
        with contextlib.suppress(GivenUp):
            kept = self.model(self.x)
            raise GivenUp(kept.shape)

    def _backward(self) -> None:
        def stop(gradient: torch.Tensor) -> None:
            raise GivenUp(gradient.shape)

        y = self.layer(self.x)
        y.register_hook(stop)
        with contextlib.suppress(GivenUp):
            y.relu().backward(self.gy)


def growth(device: str, steps: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the growth after these steps, beyond a few hundred, and the steps of each kind."""
    load = Steps(device)
    load.run(500)
    memory(device)  # memory of the measurement itself
    before = memory(device)
    load.run(steps)
    after = memory(device)
    grown = {name: getattr(after, name) - getattr(before, name) for name in vars(before)}
    return grown, load.done
