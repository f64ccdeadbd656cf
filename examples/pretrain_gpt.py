"""Pre-train a small GPT on the bytes of a text with HOT.

    pip install '.[torch,examples]'              # once, in a checkout of hotcore
    python pretrain_gpt.py                       # the source of Python's own library, on a CPU
    python pretrain_gpt.py --text books.txt --width 512 --depth 8 --context 512 --batch 64 \\
        --steps 5000 --device cuda --compile     # bf16 on CUDA

--micro N splits a batch into N parts. --recipe none trains without HOT.
"""

import argparse
import sysconfig
from pathlib import Path

import hotcore.torch as hot
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file (default: Python's own library)")
    for name, value in (("width", 64), ("depth", 2), ("context", 128), ("batch", 16), ("micro", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipe", default="default", help="recipe of HOT, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(p.read_bytes() for p in ([options.text] if options.text else library))
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    torch.manual_seed(0)
    width, device = options.width, options.device
    blocks = (Block(width) for _ in range(options.depth))
    model = nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width))
    model.append(nn.Linear(width, 256)).to(device)
    if options.recipe != "none":  # slower=True converts a model that is too small to gain time
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
        print(hot.convert(model, config, slower=True).hot_report)
    forward = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(0)  # the same batches with and without HOT
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=order)
        for part in starts.chunk(options.micro):
            window = text[part + torch.arange(options.context + 1)].long().to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                loss = cross_entropy(forward(window[:, :-1]).mT, window[:, 1:])
            (loss / options.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    main()
