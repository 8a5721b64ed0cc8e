"""Estimates the samples per update and per epoch of the published study from its curves.

    python bench/published_updates.py --data-dir DIR [--epochs 25]

Plain PyTorch, one process, Adam at 0.001, Keras' initial weights (Glorot's uniform ones, no bias):
the study's perceptrons under four interpretations of "batch 128" with nine workers.

    worker      one worker's batch per update, all data per epoch
    nine        nine workers' batches per update, all data per epoch
    ninth       one batch per update, a different ninth of the data per epoch
    same ninth  one batch per update, the same ninth of the data in every epoch

Prints for every published curve the mean distance of each interpretation's training accuracy in
points over the epochs, and its test accuracy next to the published one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from paceline.data import load
from paceline.report.published_results import find_curve, read_published_json

MODELS = {"fashion-mnist": (128,), "mnist": (300, 100)}
WORKERS = 9
READINGS = ("same ninth", "ninth", "nine", "worker")
"""The quickest first."""


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


def list_epochs(reading: str, rows: int, epochs: int) -> list[torch.Tensor]:
    """Yields the rows of every epoch, in order."""
    if reading in ("worker", "nine"):
        return [torch.randperm(rows) for _ in range(epochs)]
    part = rows // WORKERS
    if reading == "same ninth":
        return [torch.randperm(part) for _ in range(epochs)]
    passes = torch.cat([torch.randperm(rows) for _ in range(epochs // WORKERS + 1)])
    return [passes[i * part : (i + 1) * part] for i in range(epochs)]


def train(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, order: list[torch.Tensor], batch: int
) -> list[float]:
    """Returns training accuracy by epoch, measured during training as in Keras."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    curve = []
    for rows in order:
        right = 0
        for chosen in rows.split(batch):
            output = model(x[chosen])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(output, y[chosen]).backward()
            optimizer.step()
            right += int((output.argmax(1) == y[chosen]).sum())
        curve.append(right / len(rows))
    return curve


def read(table: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all rows, with pixels from 0 to 1 as in Keras' examples."""
    x, y = table.batch(np.arange(len(table)))
    x = x.reshape(len(x), -1)
    return (x - x.min()) / (x.max() - x.min()), y


def find_test_accuracy(data: str, strategy: str, batch: int) -> float:
    rows = read_published_json("results")["ps_vs_allreduce_mlp"]["results"]
    name = data.replace("-", "_")
    found = [
        r for r in rows if (r["dataset"], r["strategy"], r["batch"]) == (name, strategy, batch)
    ]
    return float(found[0]["test_acc"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=READINGS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for data, hidden in MODELS.items():
        tables = load(data, data_dir=options.data_dir)
        x, y = read(tables.train)
        test_x, test_y = read(tables.test)
        for batch in (128, 256):
            for reading in options.readings:
                model = build(hidden)
                size = batch * WORKERS if reading == "nine" else batch
                curve = train(model, x, y, list_epochs(reading, len(x), options.epochs), size)
                with torch.no_grad():
                    tested = float((model(test_x).argmax(1) == test_y).float().mean())
                cells = []
                for strategy in ("ps_async", "allreduce"):
                    printed = find_curve(data, strategy, batch)[: options.epochs]
                    pairs = list(zip(curve, printed, strict=True))
                    early = 100 * sum(abs(a - b) for a, b in pairs[:5]) / 5
                    whole = 100 * sum(abs(a - b) for a, b in pairs) / len(pairs)
                    accuracy = 100 * find_test_accuracy(data, strategy, batch)
                    cells.append(
                        f"{strategy}: first 5 epochs {early:5.2f}, all {whole:5.2f} points away, "
                        f"test {accuracy:.2f}"
                    )
                print(
                    f"{data:13} batch {batch} {reading:10} train {100 * curve[0]:.2f} -> "
                    f"{100 * curve[-1]:.2f} test {100 * tested:.2f} | {' | '.join(cells)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
