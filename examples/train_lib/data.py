"""Datasets that are already on the machine, so that nothing is downloaded.

* digits: scikit-learn's bundled 8x8 scans, enlarged to 32x32 with random rotation, size, place and
  noise
* text: the source of Python's standard library, a token per character

A dataset draws training batches from the caller's generator. Runs with the same seed therefore see
the same data in the same order, whatever other random numbers they draw.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs, and a class per image or per position. A class below 0 does not count."""


NO_CLASS = -100
"""Class that cross_entropy ignores."""


class Data(Protocol):
    """Dataset of a task."""

    description: str
    validation: Batch

    def batch(self, size: int, generator: Generator) -> Batch:
        """``size`` training samples."""

    def half(self, index: int) -> Data:
        """One half of the training samples, 0 or 1; the same validation."""


class Digits:
    """1297 training digits, distorted anew each time; 500 for validation, distorted once."""

    TRAIN = 1297
    VALIDATION_COPIES = 2

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images.astype(np.float32) / 16.0).unsqueeze(1)
        labels = torch.from_numpy(digits.target.astype(np.int64))
        # The split and the validation images do not depend on the run's seed.
        fixed = Generator().manual_seed(2025)
        order = torch.randperm(len(images), generator=fixed)
        train, held = order[: self.TRAIN], order[self.TRAIN :].repeat(self.VALIDATION_COPIES)
        self._images, self._labels = images[train], labels[train]
        self.validation: Batch = (self._distort(images[held], fixed), labels[held])
        self.description = (
            f"scikit-learn's digits: {len(train)} to train, {len(images) - len(train)} "
            f"x {self.VALIDATION_COPIES} distortions to validate"
        )

    @staticmethod
    def _distort(images: Tensor, generator: Generator) -> Tensor:
        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(len(images), generator=generator)

        # The affine map goes from output to input pixels: a factor above 1 makes the digit smaller.
        angle, zoom = uniform(-0.2, 0.2), uniform(1.0, 1.2)
        dx, dy = uniform(-0.125, 0.125), uniform(-0.125, 0.125)
        cos, sin = zoom * angle.cos(), zoom * angle.sin()
        affine = torch.stack([cos, -sin, dx, sin, cos, dy], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(affine, [len(images), 1, 32, 32], align_corners=False)
        large = F.grid_sample(images, grid, mode="bilinear", align_corners=False)
        large = large * uniform(0.7, 1.0).view(-1, 1, 1, 1)
        return large + 0.1 * torch.randn(large.shape, generator=generator)

    def half(self, index: int) -> Digits:
        """Every other training image, from ``index``; the same validation."""
        other = object.__new__(Digits)
        other.__dict__ |= self.__dict__
        other._images, other._labels = self._images[index::2], self._labels[index::2]
        other.description = f"{self.description}, half {index} of the images to train"
        return other

    def batch(self, size: int, generator: Generator) -> Batch:
        """``size`` training images, freshly distorted."""
        chosen = torch.randint(len(self._images), (size,), generator=generator)
        return self._distort(self._images[chosen], generator), self._labels[chosen]


class StdlibText:
    """Top-level modules of the standard library: some, by name, for validation."""

    CONTEXT = 128
    #: Modules of different kinds that every supported Python (3.10 and later) has.
    VALIDATION = (
        "argparse", "calendar", "configparser", "csv", "difflib", "fractions", "gettext", "heapq",
        "ipaddress", "mailbox", "platform", "pprint", "queue", "shutil", "statistics", "tarfile",
        "textwrap", "traceback",
    )  # fmt: skip
    #: Newline and printable ASCII; every other byte is the last symbol.
    ALPHABET = b"\n" + bytes(range(32, 127))
    VOCAB = len(ALPHABET) + 1

    def __init__(self, root: Path | None = None) -> None:
        root = root or Path(sysconfig.get_path("stdlib"))
        # Generated build data and the machine's start-up hook are not library source.
        files = sorted(
            path
            for path in root.glob("*.py")
            if not path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        )
        held = [path for path in files if path.stem in self.VALIDATION]
        train = [path for path in files if path.stem not in self.VALIDATION]
        if len(held) < 8 or len(train) < 50:
            raise FileNotFoundError(
                f"the text task needs the source of Python's standard library, but {root} holds "
                f"only {len(files)} top-level .py files"
            )
        self._text = self._encode(train)
        held_text = self._encode(held)
        starts = torch.linspace(0, len(held_text) - self.CONTEXT - 1, 256).long()
        self.validation: Batch = self._windows(held_text, starts)
        self.description = (
            f"{root}/*.py: {len(train)} modules ({len(self._text) / 1e6:.1f} MB) to train, "
            f"{len(held)} ({', '.join(path.stem for path in held[:3])}, ...) to validate"
        )

    @classmethod
    def _encode(cls, files: list[Path]) -> Tensor:
        table = np.full(256, len(cls.ALPHABET), dtype=np.uint8)
        table[np.frombuffer(cls.ALPHABET, dtype=np.uint8)] = np.arange(len(cls.ALPHABET))
        text = b"\n".join(path.read_bytes() for path in files)
        return torch.from_numpy(table[np.frombuffer(text, dtype=np.uint8)])

    @classmethod
    def _windows(cls, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts[:, None] + torch.arange(cls.CONTEXT + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def half(self, index: int) -> StdlibText:
        """The first (0) or second (1) half of the training text; the same validation."""
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__
        middle = len(self._text) // 2
        other._text = self._text[:middle] if index == 0 else self._text[middle:]
        other.description = f"{self.description}, half {index} of the text to train"
        return other

    def batch(self, size: int, generator: Generator) -> Batch:
        """Draw ``size`` windows of the training text, with the next characters as classes."""
        last = len(self._text) - self.CONTEXT
        return self._windows(self._text, torch.randint(last, (size,), generator=generator))


class MaskedText(StdlibText):
    """Text with masked characters: the model predicts 15 % of them from their context.

    80 % of these are replaced by a mask (the vocabulary's last symbol) and 10 % by another
    character; 10 % stay. Source: Devlin et al., "BERT", section 3.1.
    """

    VOCAB = StdlibText.VOCAB + 1
    SHARE = 0.15

    def __init__(self, root: Path | None = None) -> None:
        super().__init__(root)
        self.validation = self._gaps(self.validation[0], Generator().manual_seed(2025))

    @classmethod
    def _gaps(cls, text: Tensor, generator: Generator) -> Batch:
        chance, kind = torch.rand(2, *text.shape, generator=generator)
        other = torch.randint(StdlibText.VOCAB, text.shape, generator=generator)
        masked = chance < cls.SHARE
        replaced = torch.where(kind < 0.8, cls.VOCAB - 1, torch.where(kind < 0.9, other, text))
        return torch.where(masked, replaced, text), torch.where(masked, text, NO_CLASS)

    def batch(self, size: int, generator: Generator) -> Batch:
        """Draw ``size`` windows with masked characters, and those characters as classes."""
        text, _ = super().batch(size, generator)
        return self._gaps(text, generator)
