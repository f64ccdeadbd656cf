"""Train with Lightning's Trainer and HOT: HotCallback measures noise.

    pip install '.[torch,examples]'
    python lightning_trainer.py

The model is an MLP on scikit-learn's digits. The Trainer's loggers get HOT's scalars.
"""

import argparse

if __name__ == "__main__":
    print("Loads torch and Lightning, then trains.", flush=True)

import hotcore.torch as hot
import lightning.pytorch as pl
import torch
from hotcore.integrations.lightning import HotCallback
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()]
        self.model = nn.Sequential(*layers, nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> HotCallback:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="default", help="recipe of HOT")
    parser.add_argument("--forward", choices=("plain", "int8"), default="plain")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="out", help="folder for the scalars (CSV)")
    options = parser.parse_args(arguments)
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    data = TensorDataset(images, torch.tensor(digits.target))
    module = Digits()
    config = hot.HotConfig.recipe(options.recipe, forward=options.forward)
    print(hot.convert(module, config).hot_report)
    callback = HotCallback(noise_every=50)
    trainer = pl.Trainer(
        max_steps=options.steps,
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=CSVLogger(options.out),
        log_every_n_steps=10,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data, 64, shuffle=True))
    return callback


if __name__ == "__main__":
    main()
