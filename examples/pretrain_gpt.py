"""Pre-train a small GPT on bytes in full precision and with HOT, and compare.

    python examples/pretrain_gpt.py                          # the source of Python's own library
    python examples/pretrain_gpt.py --text ~/books.txt --width 512 --depth 8 --heads 8 \\
        --context 512 --batch 64 --steps 5000 --device cuda --bf16 --compress-saved 8

--warmup N computes g_x in 8 bits for N steps and in 4 from then on, as the paper does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import hotcore.torch as hot
import numpy as np
import torch
from torch import Generator, Tensor, nn
from train_lib import compare
from train_lib.data import Batch, StdlibText
from train_lib.models import SmallGPT

VALIDATION_WINDOWS = 128


class Text:
    """Windows of bytes; the last tenth of the text is held back."""

    def __init__(self, text: bytes, context: int, name: str) -> None:
        split = len(text) - len(text) // 10
        if len(text) // 10 <= context:
            raise ValueError(f"{name}: {len(text)} bytes; expected at least {10 * (context + 1)}")
        values = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        self._train, held = values[:split], values[split:]
        self._context = context
        starts = torch.linspace(0, len(held) - context - 1, VALIDATION_WINDOWS).long()
        self.validation: Batch = self._windows(held, starts)
        self.description = f"{name}: {split / 1e6:.1f} MB to train, {len(held) / 1e6:.2f} held back"

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        window = text[starts[:, None] + torch.arange(self._context + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def batch(self, size: int, generator: Generator) -> Batch:
        """``size`` windows, and the same windows one byte on."""
        starts = torch.randint(len(self._train) - self._context, (size,), generator=generator)
        return self._windows(self._train, starts)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a text file (default: Python's own library)")
    for name, value in (("width", 64), ("depth", 2), ("heads", 4), ("context", StdlibText.CONTEXT)):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    parser.add_argument(
        "--warmup", type=int, metavar="N", help="g_x in 8 bits for N steps, then in 4"
    )
    compare.add_options(parser, steps=60, batch=16, rate=3e-3)
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is no multiple of --heads {options.heads}")
    if options.text is None and options.context != StdlibText.CONTEXT:
        parser.error(f"--context is {StdlibText.CONTEXT} without --text")
    return options


def run(options: argparse.Namespace) -> list[compare.Outcome]:
    data: Text | StdlibText = StdlibText()
    vocabulary = StdlibText.VOCAB
    if options.text is not None:
        data = Text(options.text.read_bytes(), options.context, str(options.text))
        vocabulary = 256
    print(data.description)
    model = SmallGPT(vocabulary, options.width, options.depth, options.heads, options.context)

    def prepare(changed: nn.Module, recipe: str) -> Callable[[], None]:
        print(hot.convert(changed, recipe))
        if options.warmup is None:
            return lambda: None
        return hot.PrecisionSchedule(changed, options.warmup).step

    return compare.compare(model, data, options, prepare)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    return compare.main("pretrain_gpt", lambda: run(options), options)


if __name__ == "__main__":
    sys.exit(main())
