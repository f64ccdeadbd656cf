"""Train a small ViT on scikit-learn's digits in fp32, and with HOT as it was published.

    pip install '.[torch,examples]'
    python paper.py

The published method is the recipe `paper` (INT4 g_x, 8 low-pass rows of 16 tokens for g_w) with
tiles of patches and the paper's rounding. Two batches select each layer's quantiser, and g_x is
INT8 in the first eighth of the steps.
"""

import argparse

import hotcore.torch as hot
import torch
from hotcore import paper
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, gelu, interpolate, scaled_dot_product_attention

SIDE, WIDTH, HEADS, TRAIN = 8, 64, 4, 1400  # 8 x 8 patches of 4 x 4 pixels


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Conv2d(1, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(0.02 * torch.randn(1, SIDE * SIDE + 1, WIDTH))
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.token.expand(len(images), 1, -1), self.embed(images).flatten(2).mT
        return self.head(self.blocks(torch.cat(tokens, 1) + self.position)[:, 0])


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    digits, losses = load_digits(), {}
    images = interpolate(torch.tensor(digits.images[:, None]).float() / 16, 32, mode="bilinear")
    labels = torch.tensor(digits.target)
    for method in ("fp32", "published"):
        torch.manual_seed(options.seed)
        model, schedule = ViT(), None
        picks = torch.randint(TRAIN, (options.steps, 32))
        if method == "published":
            config = paper.published(token_grid=(SIDE, SIDE), prefix_tokens=1)
            few = [(images[pick], labels[pick]) for pick in picks[:2]]
            print(plan := paper.calibrate(model, few, loss_of, config))
            hot.convert(model, config, overrides=plan.overrides(model=model))
            schedule = paper.PrecisionSchedule(model, options.steps // 8)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, options.steps, pct_start=0.1)
        for step, pick in enumerate(picks):
            optimizer.zero_grad()
            (loss := loss_of(model, (images[pick], labels[pick]))).backward()
            if step % 50 == 0:
                print(f"{method:9}  step {step:>5}  loss {loss.item():.3f}", flush=True)
            for each in filter(None, (optimizer, rate, schedule)):
                each.step()
        losses[method] = loss_of(model.eval(), (images[TRAIN:], labels[TRAIN:])).item()
        print(f"{method:9}  loss on {len(images) - TRAIN} images kept back: {losses[method]:.3f}")
    return losses


if __name__ == "__main__":
    main()
