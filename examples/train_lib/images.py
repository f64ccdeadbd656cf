"""Image data from this machine: photographs, CIFAR's and MNIST's binary files, folders of images.

Nothing is downloaded or unpickled: CIFAR is read in its binary version.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .data import Batch

PIXELS = 32
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


def augmented(images: Tensor, generator: Generator) -> Tensor:
    """Flip ``[N, 3, H, W]`` floats and change contrast and brightness, at random."""
    count = len(images)
    flip = torch.rand(count, generator=generator) < 0.5
    images = torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
    contrast, shift = torch.rand(2, count, 1, 1, 1, generator=generator)
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * (0.8 + 0.4 * contrast) + 0.4 * (shift - 0.5)


def normalised(images: Tensor) -> Tensor:
    """Convert uint8 to floats of about mean 0 and variance 1."""
    return (images.float() / 255 - 0.45) / 0.25


class Photographs:
    """Tiles of 32 x 32 pixels, whose class is the part of the photograph that they come from.

    The photographs are those of scikit-learn and, if installed, scikit-image. Each is cut into
    cells of about 96 x 96 pixels, and a cell is a class. The right 32 columns of a cell are for
    validation. Training tiles are random ones of the other columns, so no pixel is in both.
    """

    CELL = 96
    pixels = PIXELS
    SKLEARN = ("china.jpg", "flower.jpg")
    SKIMAGE = (
        "astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "ihc.png",
        "motorcycle_left.png", "rocket.jpg",
    )  # fmt: skip
    VALIDATION_TILES = 6

    def __init__(self) -> None:
        paths = _bundled("sklearn", "datasets/images", self.SKLEARN)
        paths += _bundled("skimage", "data", self.SKIMAGE)
        if not paths:
            raise FileNotFoundError("the photographs need scikit-learn, or scikit-image")
        cells = [cell for path in paths for cell in self._cells(_read(path))]
        self._train = [cell[:, :, :-PIXELS] for cell in cells]
        held, labels = [], []
        for label, cell in enumerate(cells):
            strip = cell[:, :, -PIXELS:]
            for top in np.linspace(0, strip.shape[1] - PIXELS, self.VALIDATION_TILES).astype(int):
                held.append(strip[:, top : top + PIXELS])
                labels.append(label)
        self.classes = len(cells)
        self.validation: Batch = normalised(torch.stack(held)), torch.tensor(labels)
        names = ", ".join(path.stem for path in paths)
        self.description = (
            f"tiles of {len(paths)} photographs ({names}): {self.classes} classes, {len(held)} "
            "tiles to validate"
        )

    @classmethod
    def _cells(cls, image: Tensor) -> list[Tensor]:
        """Cut an image into uint8 cells ``[3, h, w]`` of at least ``CELL`` pixels a side."""
        _, height, width = image.shape
        rows = np.linspace(0, height, height // cls.CELL + 1).astype(int)
        columns = np.linspace(0, width, width // cls.CELL + 1).astype(int)
        return [
            image[:, top:bottom, left:right]
            for top, bottom in zip(rows[:-1], rows[1:], strict=True)
            for left, right in zip(columns[:-1], columns[1:], strict=True)
        ]

    def half(self, index: int) -> Photographs:
        """The upper (0) or lower (1) halves of the training cells; the same validation."""
        other = object.__new__(Photographs)
        other.__dict__ |= self.__dict__
        half = [cell.shape[1] // 2 for cell in self._train]
        other._train = [
            cell[:, :rows] if index == 0 else cell[:, rows:]
            for cell, rows in zip(self._train, half, strict=True)
        ]
        other.description = f"{self.description}, half {index} of the training pixels"
        return other

    def batch(self, size: int, generator: Generator) -> Batch:
        """Draw ``size`` random training tiles."""
        labels = torch.randint(self.classes, (size,), generator=generator)
        places = torch.rand(size, 2, generator=generator)
        tiles = []
        for label, (down, right) in zip(labels.tolist(), places.tolist(), strict=True):
            cell = self._train[label]
            top = int(down * (cell.shape[1] - PIXELS + 1))
            left = int(right * (cell.shape[2] - PIXELS + 1))
            tiles.append(cell[:, top : top + PIXELS, left : left + PIXELS])
        return augmented(normalised(torch.stack(tiles)), generator), labels


class Images:
    """Images in memory: a training and a validation set.

    Args:
        train: uint8 ``[N, 3, 32, 32]`` and their classes ``[N]``.
        validation: other images and their classes.
        description: name of the data.
    """

    pixels = PIXELS

    def __init__(self, train: Batch, validation: Batch, description: str) -> None:
        self._train = train
        self.count = len(train[0])
        self.validation: Batch = normalised(validation[0]), validation[1]
        self.classes = int(torch.cat([train[1], validation[1]]).max()) + 1
        self.description = f"{description}: {len(train[0])} images to train, " + (
            f"{len(validation[0])} to validate, {self.classes} classes"
        )

    def half(self, index: int) -> Images:
        """Every other training image, from ``index``; the same validation."""
        other = object.__new__(Images)
        other.__dict__ |= self.__dict__
        other._train = self._train[0][index::2], self._train[1][index::2]
        other.count = len(other._train[0])
        other.description = f"{self.description}, half {index} of the training images"
        return other

    def batch(self, size: int, generator: Generator) -> Batch:
        """Draw ``size`` training images, shifted by up to 4 pixels and augmented."""
        chosen = torch.randint(len(self._train[0]), (size,), generator=generator)
        places = torch.randint(9, (size, 2), generator=generator)
        # Pixels beyond the edge are mirrored.
        pixels = (places[:, :, None] - 4 + torch.arange(PIXELS)).abs()
        rows, columns = torch.minimum(pixels, 2 * PIXELS - 2 - pixels).unbind(1)
        cut = self._train[0][chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        cut = normalised(cut.permute(0, 3, 1, 2).contiguous())
        return augmented(cut, generator), self._train[1][chosen]


CIFAR = {
    # training files, validation file, bytes of labels (the last one counts), classes
    "cifar10": ([f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin", 1, 10),
    "cifar100": (["train.bin"], "test.bin", 2, 100),
}


def cifar(kind: str, folder: Path) -> Images:
    """Read CIFAR-10 or CIFAR-100 from the folder of its binary version.

    Args:
        kind: "cifar10" or "cifar100".
        folder: holds ``data_batch_1.bin``, ... or ``train.bin`` and ``test.bin``.

    Raises FileNotFoundError for a folder without them, ValueError for files of other data.

    Source: the format's description at https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    if kind not in CIFAR:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(CIFAR)}")
    train, test, labels, classes = CIFAR[kind]
    missing = [name for name in [*train, test] if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"folder: {folder} has no {', '.join(missing)}; the binary version of {kind} is read "
            f"({kind.replace('cifar', 'cifar-')}-binary.tar.gz), not the Python pickles"
        )
    parts = [_records(folder / name, labels, classes) for name in train]
    images, target = (torch.cat(part) for part in zip(*parts, strict=True))
    return Images((images, target), _records(folder / test, labels, classes), f"{kind} at {folder}")


def _records(path: Path, labels: int, classes: int) -> Batch:
    size = labels + 3 * PIXELS * PIXELS
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % size:
        raise ValueError(f"{path}: {len(content)} bytes are no records of {size}")
    rows = content.reshape(-1, size)
    chosen = torch.from_numpy(rows[:, labels - 1].astype(np.int64))
    if int(chosen.max()) >= classes:
        raise ValueError(f"{path}: class {int(chosen.max())}; expected less than {classes}")
    images = rows[:, labels:].reshape(-1, 3, PIXELS, PIXELS)
    return torch.from_numpy(images.copy()), chosen


def mnist(folder: Path) -> Images:
    """Read a data set in MNIST's format: grey images of 28 x 28 pixels, with a border of two.

    Debian's package dataset-fashion-mnist has 70,000 photographs of clothes in this format.

    Args:
        folder: holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same of
            ``t10k``, plain or as ``.gz``.

    Raises FileNotFoundError for a folder without them, ValueError for files of other data.

    Source: the format's description at https://yann.lecun.com/exdb/mnist/.
    """
    parts = []
    for part in ("train", "t10k"):
        images, labels = (
            _idx(folder, f"{part}-images-idx3-ubyte"),
            _idx(folder, f"{part}-labels-idx1-ubyte"),
        )
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise ValueError(
                f"folder: {folder} has {part} images {tuple(images.shape)} and {len(labels)} "
                "labels; expected [N, 28, 28] and N"
            )
        colours = F.pad(images, (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1)
        parts.append((colours.contiguous(), labels.long()))
    return Images(*parts, f"MNIST's format at {folder}")


def _idx(folder: Path, name: str) -> Tensor:
    packed, path = folder / f"{name}.gz", folder / name
    if not packed.is_file() and not path.is_file():
        raise FileNotFoundError(f"folder: {folder} has neither {name} nor {name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    dims = content[3] if content[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(content, ">u4", dims, 4).tolist() if len(content) > 4 * dims + 3 else []
    if not shape or len(content) != 4 + 4 * dims + np.prod(shape):
        raise ValueError(f"{folder / name}: {len(content)} bytes are no IDX file of uint8")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).copy()).view(
        shape
    )


def image_folder(folder: Path) -> Images:
    """Read images by class: ``train/CLASS/*`` and ``val/CLASS/*``, or ``CLASS/*`` alone.

    The second folder may be ``test``, too. Without them every tenth image of a class is for
    validation. The middle square of each image is resized to 32 x 32 pixels. All images stay in
    memory (3 KB each).

    Raises ValueError for fewer than two classes, and for no training or validation image.
    """
    train, held = _by_class(folder)
    return Images(_squares(train), _squares(held), f"images of {folder}")


class Photos:
    """ImageNet's training in its usual form, decoded as it is needed: 224 x 224 pixels.

    Args:
        folder: has ``train/CLASS/*`` and ``val/CLASS/*``.
        threads: threads that decode.

    A training image is a random part of 8 to 100 % of the photograph. For validation it is the
    middle of the photograph, whose shorter side has 256 pixels.
    """

    pixels = 224

    def __init__(self, folder: Path, threads: int = 16) -> None:
        self._train, held = _by_class(folder)
        self.count = len(self._train)
        self._pool = ThreadPoolExecutor(threads)
        self.validation: Any = Held(held, self._pool), torch.tensor([label for _, label in held])
        self.classes = 1 + max(label for _, label in self._train)
        self.description = f"photographs of {folder}: {self.count} images to train, " + (
            f"{len(held)} to validate, {self.classes} classes"
        )

    def half(self, index: int) -> Photos:
        """Every other training image, from ``index``; the same validation."""
        other = object.__new__(Photos)
        other.__dict__ |= self.__dict__
        other._train = self._train[index::2]
        other.count = len(other._train)
        other.description = f"{self.description}, half {index} of the training images"
        return other

    def batch(self, size: int, generator: Generator) -> Batch:
        """Draw ``size`` training images, cut and augmented at random."""
        chosen = torch.randint(self.count, (size,), generator=generator).tolist()
        draws = torch.rand(size, 4, generator=generator).tolist()
        paths = [self._train[index][0] for index in chosen]
        images = torch.stack(list(self._pool.map(_random_part, paths, draws)))
        labels = torch.tensor([self._train[index][1] for index in chosen])
        return augmented(normalised(images), generator), labels


class Held:
    """Validation images of :class:`Photos`, which exist a few at a time."""

    def __init__(self, files: Sequence[tuple[Path, int]], pool: ThreadPoolExecutor) -> None:
        self._paths, self._pool = [path for path, _ in files], pool

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield the images, ``size`` at a time."""
        for first in range(0, len(self._paths), size):
            paths = self._paths[first : first + size]
            yield normalised(torch.stack(list(self._pool.map(_middle, paths))))


def _random_part(path: Path, draw: Sequence[float]) -> Tensor:
    """Cut a part of a photograph by four numbers from 0 to 1: area, sides' ratio, place."""
    image = _read(path)
    height, width = image.shape[1:]
    area, ratio = (0.08 + 0.92 * draw[0]) * height * width, (4 / 3) ** (2 * draw[1] - 1)
    h = min(height, max(1, round((area / ratio) ** 0.5)))
    w = min(width, max(1, round((area * ratio) ** 0.5)))
    top, left = int(draw[2] * (height - h + 1)), int(draw[3] * (width - w + 1))
    return _resized(image[:, top : top + h, left : left + w], Photos.pixels, Photos.pixels)


def _middle(path: Path) -> Tensor:
    image = _read(path)
    share = 256 / min(image.shape[1:])
    height, width = (max(256, round(size * share)) for size in image.shape[1:])
    image = _resized(image, height, width)
    top, left = (height - Photos.pixels) // 2, (width - Photos.pixels) // 2
    return image[:, top : top + Photos.pixels, left : left + Photos.pixels]


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    if image.shape[1:] == (height, width):
        return image
    small = F.interpolate(image[None].float(), (height, width), mode="bilinear", antialias=True)
    return small[0].round().clamp(0, 255).to(torch.uint8)


Files = list[tuple[Path, int]]
"""Paths of images, each with its class."""


def _by_class(folder: Path) -> tuple[Files, Files]:
    """Return training and validation images."""
    second = next((name for name in ("val", "test") if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and second is not None:
        classes = _classes(folder / "train")
        unknown = set(_classes(folder / second)) - set(classes)
        if unknown:
            raise ValueError(
                f"folder: {folder}/{second} has classes without training images: {unknown}"
            )
        train = [(p, i) for i, c in enumerate(classes) for p in _files(folder / "train" / c)]
        held = [(p, i) for i, c in enumerate(classes) for p in _files(folder / second / c)]
    else:
        classes = _classes(folder)
        every = [(n, p, i) for i, c in enumerate(classes) for n, p in enumerate(_files(folder / c))]
        train = [(path, label) for n, path, label in every if n % 10]
        held = [(path, label) for n, path, label in every if n % 10 == 0]
    if len(classes) < 2 or not train or not held:
        raise ValueError(
            f"folder: {folder} has {len(classes)} classes, {len(train)} images to train and "
            f"{len(held)} to validate; expected train/CLASS/* and val/CLASS/*, or CLASS/*"
        )
    return train, held


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"folder: {folder} is no folder")
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _files(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in files if path.suffix.lower() in SUFFIXES)


def _squares(files: Sequence[tuple[Path, int]]) -> Batch:
    images = torch.empty(len(files), 3, PIXELS, PIXELS, dtype=torch.uint8)
    for index, (path, _) in enumerate(files):
        image = _read(path)
        side = min(image.shape[1:])
        top, left = ((size - side) // 2 for size in image.shape[1:])
        images[index] = _resized(image[:, top : top + side, left : left + side], PIXELS, PIXELS)
    return images, torch.tensor([label for _, label in files])


def _read(path: Path) -> Tensor:
    """Read uint8 ``[3, height, width]``. Raises ValueError if the file is no image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: {error}") from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def _bundled(package: str, folder: str, names: Iterable[str]) -> list[Path]:
    """Return files of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0]) / folder
    return [root / name for name in names if (root / name).is_file()]


READERS = {"mnist": mnist, "folder": image_folder, "imagenet": Photos} | {
    kind: functools.partial(cifar, kind) for kind in CIFAR
}


def load_images(where: str) -> Photographs | Images | Photos:
    """Read ``"tiles"``, or ``"KIND:FOLDER"`` with a kind of :data:`READERS`."""
    kind, _, path = where.partition(":")
    if where == "tiles":
        return Photographs()
    if kind in READERS and path:
        return READERS[kind](Path(path))
    kinds = ", ".join(f"{name}:FOLDER" for name in READERS)
    raise ValueError(f"images: {where!r}; expected tiles, {kinds}")
