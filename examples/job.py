"""A job file with its own model, data and loss.

    paceline train examples/job.py --strategy ps --workers 2 --out runs/spirals

Every worker process imports this file and calls job(). Command-line options override its fields:
`paceline train examples/job.py --epochs 5 ...`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline import Job

CLASSES = 3
POINTS_PER_CLASS = 600


class SpiralNet(nn.Module):
    """Two hidden layers with batch normalization: small, but with every kind of state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.layers(points)
        return logits


def make_spirals() -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns points on three intertwined spirals, as (inputs, targets) for train, val and test.

    The generator has a fixed seed, because every worker must see the same rows.
    """
    generator = torch.Generator().manual_seed(20)
    inputs, targets = [], []
    for label in range(CLASSES):
        radius = torch.linspace(0.1, 1.0, POINTS_PER_CLASS)
        angle = 4.0 * radius + 2 * torch.pi * label / CLASSES
        angle = angle + 0.15 * torch.randn(POINTS_PER_CLASS, generator=generator)
        inputs.append(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))
        targets.append(torch.full((POINTS_PER_CLASS,), label))
    order = torch.randperm(CLASSES * POINTS_PER_CLASS, generator=generator)
    x, y = torch.cat(inputs)[order], torch.cat(targets)[order]
    return (x[:1400], y[:1400]), (x[1400:1600], y[1400:1600]), (x[1600:], y[1600:])


def smoothed_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of a batch; without `loss` a job uses cross-entropy."""
    return nn.functional.cross_entropy(output, target, label_smoothing=0.05)


def job() -> Job:
    return Job(
        model=SpiralNet,
        data=make_spirals,
        loss=smoothed_loss,
        optimizer="adam",
        lr=0.01,
        schedule="cosine(warmup=5%)",
        batch=100,
        epochs=15,
    )
