"""Train CLIP's two towers (transformers) on images and captions with HOT.

    pip install '.[torch,examples]'              # once, in a checkout of hotcore
    python clip.py                               # scikit-learn's digits and their names, on a CPU
    python clip.py --model ~/clip-vit-base --data ~/photos --device cuda --compile --batch 256

--data is a folder of images, each with its caption beside it: cat.jpg and cat.txt. --model is a
folder with the model and its processor. --recipe none trains without HOT.
"""

import argparse
from pathlib import Path

if __name__ == "__main__":
    print("Loads torch and transformers, then trains.", flush=True)

import hotcore.torch as hot
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPProcessor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TEXT = TOWER | {"vocab_size": 130, "max_position_embeddings": 24, "num_attention_heads": 2}
TEXT |= {"bos_token_id": 128, "eos_token_id": 129, "pad_token_id": 0}
VISION = TOWER | {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_attention_heads": 2}


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return images, captions (bytes between begin and end tokens) and classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    rows = [[128, *f"the digit {name}".encode(), 129] for name in NAMES]
    captions = torch.tensor([row + [0] * (24 - len(row)) for row in rows])
    target = torch.tensor(data.target)
    return images, captions[target], target


def folder(data: Path, processor: CLIPProcessor) -> tuple[Tensor, Tensor, None]:
    """Return images and captions of a folder; it has no classes."""
    from PIL import Image

    images = sorted(p for p in data.iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    captions = [path.with_suffix(".txt").read_text().strip() for path in images]
    batch = processor(
        text=captions,
        images=[Image.open(path).convert("RGB") for path in images],
        return_tensors="pt",
        padding="max_length",
        truncation=True,
    )
    return batch.pixel_values, batch.input_ids, None


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder (default: a small CLIP, random weights)")
    parser.add_argument("--data", type=Path, help="a folder (default: scikit-learn's digits)")
    parser.add_argument("--recipe", default="default", help="recipe of HOT, or none")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    if bool(options.model) != bool(options.data):
        parser.error("--model and --data come together")
    torch.manual_seed(0)
    if options.model:
        model = CLIPModel.from_pretrained(options.model)
        images, captions, classes = folder(
            options.data, CLIPProcessor.from_pretrained(options.model)
        )
    else:
        small = CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=32)
        model = CLIPModel(small)
        images, captions, classes = digits()
    model = model.to(options.device).train()
    if options.recipe != "none":  # slower=True converts a model that is too small to gain time
        config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
        print(hot.convert(model, config, slower=not options.model).hot_report)
    if options.compile:  # layer by layer, because one graph of the model takes minutes
        for layer in (*model.text_model.encoder.layers, *model.vision_model.encoder.layers):
            layer.compile(dynamic=False)  # one graph for the length of captions, one for images
    rate = 1e-5 if options.model else 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    chosen = torch.arange(len(images)) % 10 != 0  # every tenth is held back
    train, held = chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]
    for step in range(options.steps):
        part = train[torch.randint(len(train), (options.batch,))]
        pixels, words = images[part].to(options.device), captions[part].to(options.device)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
            loss = model(input_ids=words, pixel_values=pixels, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:>5}  loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():  # finds the caption of each held-back image among all captions
        texts, correct = captions[held].unique(dim=0, return_inverse=True)
        pixels, words = images[held].to(options.device), texts.to(options.device)
        logits = model(input_ids=words, pixel_values=pixels).logits_per_image
        accuracy = (logits.argmax(1).cpu() == correct).float().mean().item()
    print(f"accuracy of the caption among {len(texts)}, on images held back: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
