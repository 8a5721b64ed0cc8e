"""How many samples did an update of the published study hold? Asked of its own curves.

    python bench/published_updates.py --data-dir DIR [--epochs 8]

Plain PyTorch, one process: the study's perceptrons with Keras' initial weights (Glorot's uniform
ones, no bias), Adam or plain SGD with momentum, and batches from 128 (one worker's) to 2,304 (nine
workers' 256). Prints, for every published curve, how far each batch's training accuracy lies from
it: mean distance in points over the epochs. Whatever lies closest is what an update held.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from paceline.data import load
from paceline.report.published import find_curve

MODELS = {"mnist": (300, 100), "fashion-mnist": (128,)}
BATCHES = (128, 256, 768, 1152, 1536, 2304)
OPTIMIZERS = {
    "adam 0.001": lambda params: torch.optim.Adam(params, lr=0.001),
    "sgd 0.01, momentum 0.9": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def build(hidden: tuple[int, ...]) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    width = 784
    for units in hidden:
        layers += [torch.nn.Linear(width, units), torch.nn.ReLU()]
        width = units
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.xavier_uniform_(parameter)
        else:
            torch.nn.init.zeros_(parameter)
    return model


def train(x: torch.Tensor, y: torch.Tensor, hidden: tuple[int, ...], name: str, batch: int,
          epochs: int) -> list[float]:  # fmt: skip
    """Training accuracy by epoch, counted while training, as Keras counts it."""
    model = build(hidden)
    optimizer = OPTIMIZERS[name](model.parameters())
    curve = []
    for _ in range(epochs):
        right = 0
        for rows in torch.randperm(len(x)).split(batch):
            output = model(x[rows])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(output, y[rows]).backward()
            optimizer.step()
            right += int((output.argmax(1) == y[rows]).sum())
        curve.append(right / len(x))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for data, hidden in MODELS.items():
        table = load(data, data_dir=options.data_dir).train
        x, y = table.batch(np.arange(len(table)))
        x = x.reshape(len(table), -1)
        for name in OPTIMIZERS:
            curves = {batch: train(x, y, hidden, name, batch, options.epochs) for batch in BATCHES}
            for strategy in ("ps_async", "allreduce"):
                for printed in (128, 256):
                    published = find_curve(data, strategy, printed)[: options.epochs]
                    far = {
                        batch: 100
                        * sum(abs(a - b) for a, b in zip(curve, published, strict=True))
                        / len(published)
                        for batch, curve in curves.items()
                    }
                    best = min(far, key=far.__getitem__)
                    cells = "  ".join(f"{batch}: {d:5.2f}" for batch, d in far.items())
                    print(f"{data:14} {strategy:10} batch {printed}  {name:24} {cells}  -> {best}",
                          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
