"""Measures the bubble of a pipeline next to the formula (stages - 1) / (micro + stages - 1).

python bench/bubble.py [--repeats 3] [--save]

A model of equal layers on two workers with one thread each, cut in the middle: the formula assumes
equal stages. The fraction of each stage's steps spent waiting for micro-batches is read from
`result.json`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import OrderedDict

import torch

import paceline
from paceline import Job
from results_store import keep

WIDTH, LAYERS, BATCH, STEPS = 1024, 8, 2048, 10
CASES = [(2, micro, schedule) for micro in (1, 2, 4, 8) for schedule in ("1f1b", "gpipe")]


class Scale(torch.nn.Module):
    """Gives the first layer the work of the others, which also compute an input gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.by


def model() -> torch.nn.Module:
    layers = {f"layer{i}": torch.nn.Linear(WIDTH, WIDTH) for i in range(LAYERS)}
    return torch.nn.Sequential(OrderedDict({"scale": Scale(), **layers}))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Almost no work: the formula covers only the stages."""
    return output.square().mean()


def data() -> object:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * STEPS, WIDTH, generator=made)
    return (inputs, torch.randint(0, WIDTH, (BATCH * STEPS,), generator=made)), None, None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    found: dict[str, list[list[float]]] = {}
    job = Job(
        model=model,
        data=data,
        loss=loss,
        batch=BATCH,
        epochs=1,
        lr=1e-4,
        checkpoint_every="never",
    )
    for _ in range(given.repeats):
        for stages, micro, schedule in CASES:
            cut = f"cut=layer{LAYERS // 2}"
            text = f"pipeline(stages={stages}, micro={micro}, schedule={schedule}, {cut})"
            with tempfile.TemporaryDirectory() as folder:
                result = paceline.train(job, text, stages, out=f"{folder}/run", threads=1)
            waits = [part["bubble"] for part in result["parts"].values()]
            found.setdefault(text, []).append(waits)
    print("| strategy | waited, mean of the stages (least to most) | formula | error |")
    print("|---|---:|---:|---:|")
    for (stages, micro, _), (text, runs) in zip(CASES, found.items(), strict=True):
        means = [statistics.mean(waits) for waits in runs]
        formula = (stages - 1) / (micro + stages - 1)
        middle = statistics.median(means)
        span = f"{100 * middle:.1f} % ({100 * min(means):.1f} to {100 * max(means):.1f})"
        error = f"{100 * (middle / formula - 1):+.0f} %"
        print(f"| `{text}` | {span} | {100 * formula:.1f} % | {error} |")
    if given.save:
        keep("bubble", {"waited": found})


if __name__ == "__main__":
    main()
