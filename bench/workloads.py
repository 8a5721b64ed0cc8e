"""Benchmark workloads: named networks with matching inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from paceline.job import Job


@dataclass(frozen=True)
class Workload:
    name: str
    shape: tuple[int, ...]
    batch_per_worker: int
    steps: int

    def samples(self, workers: int) -> int:
        return self.batch_per_worker * workers * self.steps

    def job(self, workers: int) -> Job:
        return Job(
            model=self.name,
            data=functools.partial(make_data, self.shape, self.samples(workers)),
            batch=self.batch_per_worker * workers,
            epochs=1,
            optimizer="sgd(momentum=0.9)",
            lr=0.01,
            checkpoint_every="never",
        )


def make_data(shape: tuple[int, ...], samples: int) -> Any:
    """Returns random inputs, the same for every side, without validation data."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, *shape, generator=generator)
    return (inputs, torch.randint(0, 10, (samples,), generator=generator)), None, None


WORKLOADS = {
    "mlp-300-100": Workload("mlp-300-100", (1, 28, 28), 128, 640),
    "resnet20": Workload("resnet20", (3, 32, 32), 32, 40),
    "mlp-wide": Workload("mlp-wide", (3, 32, 32), 32, 40),
}
