"""Train a diffusion transformer (DiT, flow matching) on images with HOT.

    pip install '.[torch,examples]'              # once, in a checkout of hotcore
    python diffusion.py                          # scikit-learn's digits, on a CPU
    python diffusion.py --data latents.pt --width 768 --depth 12 --patch 2 --batch 128 \\
        --steps 100000 --device cuda --compile reduce-overhead   # bf16, CUDA graphs

--data is a file of torch.save: images or latents [N, C, H, W] and classes [N]. --draw saves samples
of every class as a tensor. --recipe none trains without HOT.
"""

import argparse
import math

import hotcore.torch as hot
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention, silu


class Block(nn.Module):
    """DiT block; time and class give shifts, scales and gates (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        inner = self.norm(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(inner).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.proj(mixed)
        inner = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(gelu(self.fc1(inner), approximate="tanh"))


class DiT(nn.Module):
    def __init__(
        self, shape: tuple[int, int, int], classes: int, width: int, depth: int, patch: int
    ) -> None:
        super().__init__()
        channels, height, _ = shape
        self.side, self.patch, self.width = height // patch, patch, width
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(torch.randn(1, self.side**2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, channels * patch**2)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        """Return the velocity ``[N, C, H, W]`` at times ``t [N]``, 0 for noise and 1 for images."""
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-8 / self.width))
        angles = 1000 * t[:, None] * rates
        condition = self.time(torch.cat([angles.cos(), angles.sin()], 1)) + self.label(label)
        tokens = self.embed(x).flatten(2).mT + self.position
        for block in self.blocks:
            tokens = block(tokens, condition)
        return nn.functional.pixel_shuffle(
            self.head(self.norm(tokens)).mT.unflatten(2, (self.side, self.side)), self.patch
        )


@torch.no_grad()
def sample(model: nn.Module, noise: Tensor, label: Tensor, steps: int = 30) -> Tensor:
    """Compute images from noise by Euler's method."""
    x = noise
    for step in range(steps):
        x = x + model(x, torch.full((len(x),), step / steps, device=x.device), label) / steps
    return x


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a file (default: scikit-learn's digits)")
    for name, value in (("width", 64), ("depth", 2), ("patch", 2), ("batch", 64), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--recipe", default="default", help="recipe of HOT, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--draw", help="file for samples of every class")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.data:
        images, labels = torch.load(options.data)
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(digits.target)
    classes, device = int(labels.max()) + 1, options.device
    model = DiT(tuple(images.shape[1:]), classes, options.width, options.depth, options.patch)
    model = model.to(device).train()
    if options.recipe != "none":  # slower=True converts a model that is too small to gain time
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
        print(hot.convert(model, config, slower=not options.data).hot_report)
    forward = torch.compile(model, mode=options.compile) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if options.width < 256 else 1e-4)
    draws = torch.Generator().manual_seed(0)  # the same batches with and without HOT

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn(images.shape, generator=draws).to(device)
        t = torch.rand(len(images), generator=draws).to(device)
        images, at = images.to(device), t.view(-1, 1, 1, 1)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            velocity = forward(noise + at * (images - noise), t, labels.to(device))
        return mse_loss(velocity.float(), images - noise)

    held = torch.arange(len(images)) % 10 == 0
    train = (~held).nonzero()[:, 0]
    for step in range(options.steps):
        part = train[torch.randint(len(train), (options.batch,), generator=draws)]
        loss = loss_of(images[part], labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        final = loss_of(images[held], labels[held]).item()
    if not math.isfinite(final):
        raise SystemExit("the loss is not finite")
    print(f"loss on images held back: {final:.3f}")
    if options.draw:
        noise = torch.randn(classes, *images.shape[1:], device=device)
        torch.save(sample(model, noise, torch.arange(classes, device=device)).cpu(), options.draw)
    return final


if __name__ == "__main__":
    main()
