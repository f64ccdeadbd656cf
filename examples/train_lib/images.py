"""Labelled images to fine-tune on: digits of another look, CIFAR, a folder of images."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .data import Batch, Digits

VALIDATION_IMAGES = 512
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp"))


class FaintDigits:
    """The digits of :class:`Digits`, faint on a bright and noisy ground."""

    def __init__(self) -> None:
        self._digits = Digits()
        fixed = Generator().manual_seed(7)
        images, labels = self._digits.validation
        self.validation: Batch = (self._faint(images, fixed), labels)
        self.classes, self.channels, self.pixels = 10, 1, 32
        self.description = f"faint on a noisy ground, {self._digits.description}"

    @staticmethod
    def _faint(images: Tensor, generator: Generator) -> Tensor:
        return 0.3 + 0.5 * images + 0.1 * torch.randn(images.shape, generator=generator)

    def batch(self, size: int, generator: Generator) -> Batch:
        """``size`` training images ``[N, 1, 32, 32]`` and their labels."""
        images, labels = self._digits.batch(size, generator)
        return self._faint(images, generator), labels

    @property
    def before(self) -> Digits:
        """The digits as they were, to pre-train on."""
        return self._digits


class Cifar:
    """CIFAR-10 or CIFAR-100 in its Python form, from the folder that it was unpacked to."""

    FOLDERS = {10: "cifar-10-batches-py", 100: "cifar-100-python"}

    def __init__(self, kind: int, root: Path, pixels: int) -> None:
        folder = root if root.name == self.FOLDERS[kind] else root / self.FOLDERS[kind]
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no {folder}; unpack the Python version of CIFAR-{kind} and pass its folder "
                "with --root (nothing is downloaded)"
            )
        train = [f"data_batch_{i}" for i in range(1, 6)] if kind == 10 else ["train"]
        held = ["test_batch"] if kind == 10 else ["test"]
        self.classes, self.channels, self.pixels = kind, 3, pixels
        self._images, self._labels = self._read(folder, train)
        images, labels = self._read(folder, held)
        keep = slice(VALIDATION_IMAGES)
        self.validation: Batch = (self._prepared(images[keep]), labels[keep])
        self.description = f"CIFAR-{kind}: {len(self._labels)} to train, {folder}"

    @staticmethod
    def _read(folder: Path, names: list[str]) -> Batch:
        images, labels = [], []
        for name in names:
            # The dataset's own format; only open files that come from its makers.
            with (folder / name).open("rb") as file:
                content = pickle.load(file, encoding="bytes")
            images.append(np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32))
            labels += content.get(b"labels") or content[b"fine_labels"]
        return torch.from_numpy(np.concatenate(images)), torch.tensor(labels)

    def _prepared(self, images: Tensor) -> Tensor:
        values = images.float() / 127.5 - 1
        if self.pixels == 32:
            return values
        return F.interpolate(values, size=self.pixels, mode="bilinear", align_corners=False)

    def batch(self, size: int, generator: Generator) -> Batch:
        """``size`` training images, half of them mirrored, and their labels."""
        chosen = torch.randint(len(self._labels), (size,), generator=generator)
        return _mirrored(self._prepared(self._images[chosen]), generator), self._labels[chosen]


class Folder:
    """A folder of classes, each a folder of images; ``train`` and ``val`` in it if they are there.

    Without ``val`` every tenth image is held back.
    """

    def __init__(self, root: Path, pixels: int) -> None:
        if not root.is_dir():
            raise FileNotFoundError(f"no folder {root}")
        base = root / "train" if (root / "train").is_dir() else root
        names = sorted(path.name for path in base.iterdir() if path.is_dir())
        train = self._files(base, names)
        if (root / "val").is_dir():
            held = self._files(root / "val", names)
        else:
            held = train[::10]
            train = [item for i, item in enumerate(train) if i % 10]
        if len(names) < 2 or not train or not held:
            raise ValueError(
                f"{root}: {len(names)} classes with {len(train)} images to train and {len(held)} "
                f"to validate; expected a folder for each class, with {', '.join(sorted(SUFFIXES))}"
            )
        self.classes, self.channels, self.pixels = len(names), 3, pixels
        self._train = train
        step = max(1, len(held) // VALIDATION_IMAGES)
        self.validation: Batch = self._load(held[::step][:VALIDATION_IMAGES])
        self.description = f"{root}: {len(names)} classes, {len(train)} images to train"

    @staticmethod
    def _files(base: Path, names: list[str]) -> list[tuple[Path, int]]:
        return [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((base / name).glob("*"))
            if path.suffix.lower() in SUFFIXES
        ]

    def _load(self, items: list[tuple[Path, int]]) -> Batch:
        from PIL import Image, ImageOps

        images = []
        for path, _ in items:
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (self.pixels, self.pixels))
            images.append(torch.from_numpy(np.array(square)).permute(2, 0, 1))
        return torch.stack(images).float() / 127.5 - 1, torch.tensor([label for _, label in items])

    def batch(self, size: int, generator: Generator) -> Batch:
        """``size`` training images, half of them mirrored, and their labels."""
        chosen = torch.randint(len(self._train), (size,), generator=generator)
        images, labels = self._load([self._train[i] for i in chosen.tolist()])
        return _mirrored(images, generator), labels


def _mirrored(images: Tensor, generator: Generator) -> Tensor:
    flip = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flip[:, None, None, None], images.flip(-1), images)
