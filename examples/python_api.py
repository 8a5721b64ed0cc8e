"""Paceline from Python: train, load, resume, compare.

    python examples/python_api.py

Strategies are text or objects; both are equivalent.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import paceline
from paceline import AllReduce, Job, ParameterServer, Switch
from paceline.errors import PacelineError


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    job = Job(model="mlp-128", data="digits", batch=64, lr=0.05, epochs=4)

    # One run. The result is the content of result.json.
    strategy = Switch(AllReduce(), ParameterServer(servers=2), at=0.5)
    result = paceline.train(job, strategy, workers=2, out=folder / "switch")
    switch = result["switches"][0]
    print(
        f"{result['strategy']}: test accuracy {result['test_acc']:.3f}; "
        f"switched after {switch['samples']} samples, pause {switch['pause_s']:.3f} s"
    )

    # The trained model is a plain torch module, in evaluation mode.
    model = paceline.load(folder / "switch")
    with torch.no_grad():
        print("logits of one blank image:", tuple(model(torch.zeros(1, 1, 8, 8)).shape))

    # A longer run continues from the last checkpoint of the folder.
    longer = job.model_copy(update={"epochs": 6})
    result = paceline.train(longer, strategy, workers=2, out=folder / "switch", resume=True)
    print(f"resumed to {result['epochs']} epochs, {result['samples']} samples")

    # Several strategies, several seeds: mean and spread of each.
    comparison = paceline.compare(
        job, ["single", "ps(sync=bsp)", "ps"], workers=2, seeds=2, out=folder / "compared"
    )
    for entry in comparison["strategies"]:
        accuracy = entry["test_acc"]
        print(f"{entry['label']:>13}: {accuracy['mean']:.4f} +- {accuracy['std']:.4f}")

    # Errors are reported before anything starts.
    try:
        paceline.train(job, "allreduse", workers=2, out=folder / "never")
    except PacelineError as error:
        print("refused:", error)
    print("run folders:", folder)


# Workers may import this file again: keep the guard.
if __name__ == "__main__":
    main()
