"""Fine-tune a vision transformer of timm with HOT.

    pip install '.[torch,examples]'            # once, in a checkout of hotcore
    python finetune_vit.py                     # a small ViT on scikit-learn's digits, on a CPU
    python finetune_vit.py --data ~/flowers --model vit_base_patch16_224 --weights vit.pth \\
        --device cuda --compile reduce-overhead --batch 128 --workers 12   # bf16, CUDA graphs

--data is a folder with one folder of images per class; every tenth image is for validation.
--recipe none trains without HOT.
"""

import argparse
from itertools import chain, islice, repeat

if __name__ == "__main__":
    print("Loads torch and timm, then trains.", flush=True)

import hotcore.torch as hot
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset


def dataset(folder: str | None, size: tuple[int, int, int]) -> tuple[Dataset, int]:
    """Return images and the number of classes."""
    if folder is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        return TensorDataset(images, torch.tensor(digits.target)), 10
    images = timm.data.ImageDataset(folder, transform=timm.data.create_transform(size))
    return images, len(images.reader.class_to_idx)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a folder of classes (default: scikit-learn's digits)")
    parser.add_argument("--model", help="model of timm, with --data (default: a small one)")
    parser.add_argument("--weights", default="", help="file with its checkpoint")
    parser.add_argument("--recipe", default="default", help="recipe of HOT, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    for name, value in (("steps", 400), ("batch", 32), ("workers", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.model:
        model = timm.create_model(options.model, checkpoint_path=options.weights)
    else:
        small = {"in_chans": 1, "img_size": 8, "patch_size": 2, "embed_dim": 96, "num_heads": 3}
        model = timm.models.VisionTransformer(depth=2, **small)
    size = model.default_cfg["input_size"] if options.model else (1, 8, 8)
    data, classes = dataset(options.data, size)
    model.reset_classifier(classes)
    model = model.to(options.device).train()
    if options.recipe != "none":  # slower=True converts a model that is too small to gain time
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
        print(hot.convert(model, config, slower=not options.model).hot_report)
    forward = torch.compile(model, mode=options.compile) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if options.weights else 2e-3)

    train, held = (Subset(data, [i for i in range(len(data)) if bool(i % 10) == k]) for k in (1, 0))
    loader = DataLoader(
        train, options.batch, shuffle=True, drop_last=True, num_workers=options.workers
    )
    for step, (x, y) in enumerate(islice(chain.from_iterable(repeat(loader)), options.steps)):
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
            logits = forward(x.to(options.device))
            loss = nn.functional.cross_entropy(logits, y.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        right = [model(x.to(options.device)).argmax(1).cpu() == y for x, y in DataLoader(held, 64)]
    print(
        f"accuracy on images held back: {(accuracy := torch.cat(right).float().mean().item()):.3f}"
    )
    return accuracy


if __name__ == "__main__":
    main()
