"""Train a small ResNet with HOT on several processes, by DDP or FSDP2.

    torchrun --nproc-per-node 2 examples/ddp.py           # gloo on the CPU; --device cuda: NCCL
    torchrun --nproc-per-node 2 examples/ddp.py --fsdp

Convert first, wrap afterwards. Every process draws its own random numbers for the rounding, so that
the errors of the processes average out; the data is scikit-learn's digits, nothing is downloaded.
Without torchrun it runs in one process.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile

import hotcore.torch as hot
import torch
import torch.distributed as dist
from torch import Generator, nn
from torch.nn.parallel import DistributedDataParallel
from train_lib.data import Digits


class Block(nn.Module):
    """A bottleneck's convolutions, 1x1, 3x3, 1x1, around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, 64, 1)),
            *(nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)),
            *(nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, width, 1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, width, H, W]`` to the same shape."""
        return x + self.body(x)


class SmallResNet(nn.Module):
    """Grey images of 32x32 to ten classes."""

    def __init__(self, width: int = 96, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=4, padding=2)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(64 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``[N, 1, 32, 32]`` to logits ``[N, 10]``."""
        return self.head(self.blocks(self.stem(images)).flatten(1))


def start(device: str) -> torch.device:
    """Join the processes that torchrun started (or be the only one); this process's device."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = os.path.join(tempfile.mkdtemp(), "store")
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    return (
        torch.device(device, torch.cuda.current_device())
        if device == "cuda"
        else torch.device(device)
    )


def wrap(model: nn.Module, fsdp: bool, device: torch.device) -> nn.Module:
    """``model`` under DDP, or its blocks and itself sharded by FSDP2."""
    if not fsdp:
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mean(value: torch.Tensor) -> float:
    """Mean over the processes."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train and print the loss."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    torch.manual_seed(options.seed)  # the same weights everywhere
    model = SmallResNet().to(device)
    report = None
    if options.recipe != "fp32":
        report = hot.convert(model, options.recipe, slower=True)  # so small a model gains no time
    model = wrap(model, options.fsdp, device)
    torch.manual_seed(options.seed + 1 + rank)  # rounding of its own for each process
    order = Generator().manual_seed(options.seed + 1 + rank)
    data = Digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(report or "plain fp32")
        print(f"{world} processes, {'FSDP2' if options.fsdp else 'DDP'}, {dist.get_backend()}")
    for step in range(options.steps):
        images, labels = (part.to(device) for part in data.batch(options.batch, order))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            shown = mean(loss)
            if rank == 0:
                print(f"step {step:>4}  loss {shown:.3f}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Read the options, join the other processes, train."""
    parser = argparse.ArgumentParser(prog="ddp", description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="default", help="HOT recipe, or fp32 for none")
    parser.add_argument("--fsdp", action="store_true", help="shard by FSDP2 instead of DDP")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="images a process (default: 32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = start(options.device)
    try:
        train(options, device)
    finally:
        # A sharded model holds on to gloo's group, whose threads must end before the process does.
        gc.collect()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
