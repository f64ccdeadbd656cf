"""Fine-tune a vision transformer in full precision and with HOT, and compare.

    python examples/finetune_vit.py                          # digits, half a minute on a CPU
    python examples/finetune_vit.py --data cifar100 --root ~/data --device cuda --bf16 \\
        --model vit_base_patch16_224 --weights vit_base.safetensors --compress-saved 8
    python examples/finetune_vit.py --data folder --root ~/flowers --model vit_small_patch16_224

Models are timm's where it is installed. Nothing is downloaded: --weights takes a checkpoint on this
machine, and without one a model of timm starts from random weights. On digits the small model is
first trained on clear digits, and then fine-tuned to faint ones on a noisy ground.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import hotcore.torch as hot
from torch import Generator, nn, optim
from train_lib import compare
from train_lib.images import Cifar, FaintDigits, Folder
from train_lib.models import SmallViT
from train_lib.training import loss_of

PRETRAINING_STEPS = 250


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune_vit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data", choices=("digits", "cifar10", "cifar100", "folder"), default="digits"
    )
    parser.add_argument("--root", type=Path, help="where CIFAR or the folder of classes is")
    parser.add_argument("--model", help="a ViT of timm (default on digits: a small one)")
    parser.add_argument("--weights", type=Path, help="checkpoint for --model")
    parser.add_argument("--pixels", type=int, help="images' side (default: 32 for digits, or 224)")
    parser.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="BATCHES",
        help="choose every layer's quantisers by that many batches (LQS)",
    )
    compare.add_options(parser, steps=60, batch=32, rate=5e-4)
    options = parser.parse_args(arguments)
    if options.data != "digits" and (options.root is None or options.model is None):
        parser.error(f"--data {options.data} needs --root and --model")
    if options.weights is not None and options.model is None:
        parser.error("--weights needs --model")
    return options


def data_of(options: argparse.Namespace) -> FaintDigits | Cifar | Folder:
    pixels = options.pixels or 224
    if options.data == "digits":
        return FaintDigits()
    if options.data == "folder":
        return Folder(options.root, pixels)
    return Cifar(int(options.data.removeprefix("cifar")), options.root, pixels)


def model_of(options: argparse.Namespace, data: FaintDigits | Cifar | Folder) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another torch
        if options.model is not None:
            raise ImportError(f"--model needs timm: {error}") from error
        print("timm cannot be imported; the model is this repository's SmallViT")
        return SmallViT(width=96)
    if options.model is None:
        small: nn.Module = timm.models.VisionTransformer(
            img_size=32,
            patch_size=4,
            in_chans=1,
            num_classes=10,
            embed_dim=96,
            depth=2,
            num_heads=3,
        )
        return small
    settings = {}
    if options.weights is not None:
        if not options.weights.is_file():
            raise FileNotFoundError(f"no file {options.weights}")
        settings = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(options.weights)}}
    model: nn.Module = timm.create_model(
        options.model,
        num_classes=data.classes,
        in_chans=data.channels,
        img_size=data.pixels,
        **settings,
    )
    return model


def pretrain(model: nn.Module, data: FaintDigits, options: argparse.Namespace) -> None:
    """Plain training on the digits as they are."""
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)
    order = Generator().manual_seed(options.seed)
    model.to(options.device).train()
    for _ in compare.progress(PRETRAINING_STEPS, "pre-training"):
        images, labels = data.before.batch(32, order)
        loss = loss_of(model, (images.to(options.device), labels.to(options.device)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run(options: argparse.Namespace) -> list[compare.Outcome]:
    data = data_of(options)
    print(data.description)
    model = model_of(options, data)
    if isinstance(data, FaintDigits) and options.model is None:
        pretrain(model, data, options)

    def prepare(changed: nn.Module, recipe: str) -> Callable[[], None]:
        overrides = None
        toy = options.model is None  # too small to gain time on a GPU; converted all the same
        if options.calibrate:
            order = Generator().manual_seed(options.seed + 1)
            batches = [data.batch(options.batch, order) for _ in range(options.calibrate)]
            changed.to(options.device).train()
            batches = [(x.to(options.device), y.to(options.device)) for x, y in batches]
            plan = hot.calibrate(changed, batches, loss_of, recipe, slower=toy)
            print(plan)
            overrides = plan.overrides(recipe)
        print(hot.convert(changed, recipe, overrides=overrides, slower=toy))
        return lambda: None

    return compare.compare(model, data, options, prepare)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    return compare.main("finetune_vit", lambda: run(options), options)


if __name__ == "__main__":
    sys.exit(main())
