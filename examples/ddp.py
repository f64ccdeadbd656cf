"""Train a small ResNet with HOT on several processes, by DDP or FSDP2.

    pip install '.[torch,examples]'              # once, in a checkout of hotcore
    torchrun --nproc-per-node 2 ddp.py           # gloo on the CPU; --device cuda: NCCL
    torchrun --nproc-per-node 2 ddp.py --fsdp

Convert first, wrap afterwards. Every process draws its own random numbers for the rounding, so the
errors of the processes average out. The data is scikit-learn's digits.
"""

import argparse
import gc
import os

import hotcore.torch as hot
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, 64, 1)),
            *(nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)),
            *(nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def train(options: argparse.Namespace, rank: int, world: int) -> None:
    torch.manual_seed(0)  # the same weights everywhere
    layers = [nn.Conv2d(1, 96, 3, padding=1), Block(96), Block(96), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64 * 96, 10)).to(options.device)
    report = "plain fp32"
    if options.recipe != "none":  # slower=True converts a model that is too small to gain time
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
        report = hot.convert(model, config, slower=True).hot_report
    if options.fsdp:
        mesh = dist.init_device_mesh(options.device, (world,))
        for block in (model[1], model[2], model):
            fully_shard(block, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)  # each process has its own rounding and batches
    if rank == 0:
        print(f"{report}\n{world} processes, {'FSDP2' if options.fsdp else 'DDP'}")
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 8 - 1, digits.target
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        chosen = torch.randint(len(images), (options.batch,))
        targets = torch.tensor(labels)[chosen].to(options.device)
        loss = nn.functional.cross_entropy(model(images[chosen].to(options.device)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:>4}  loss {mean.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="default", help="HOT recipe, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--fsdp", action="store_true", help="shard by FSDP2 instead of DDP")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="images a process (default: 32)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    train(options, dist.get_rank(), dist.get_world_size())
    gc.collect()  # frees the sharded model, whose reference keeps gloo's threads alive
    dist.destroy_process_group()
