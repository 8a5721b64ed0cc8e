"""Jobs on made-up data, for measurements in which only time counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEXT = '''"""Random pictures: nothing is to be learnt from them."""

import torch

from paceline import Job


def data():
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(({samples}, *{shape}), generator=made)
    targets = torch.randint(0, 10, ({samples},), generator=made)
    return (inputs, targets), None, None


def job():
    return Job(
        model={model!r}, data=data, batch={batch}, lr=0.001, epochs=1, checkpoint_every="never"
    )
'''


def write_job(path: Path, model: str, shape: tuple[int, ...], batch: int, steps: int) -> Path:
    """A job file of so many full batches; its learning rate is small, so that nothing diverges."""
    text = TEXT.format(model=model, shape=shape, batch=batch, samples=batch * steps)
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Case:
    """A network, the shape of its inputs, and how many of them each worker takes in a step."""

    model: str
    shape: tuple[int, ...]
    share: int

    def write(self, path: Path, steps: int, workers: int = 1) -> Path:
        return write_job(path, self.model, self.shape, self.share * workers, steps)


CASES = {
    case.model: case
    for case in (
        Case("mlp-300-100", (1, 28, 28), 256),
        Case("cnn-small", (1, 28, 28), 32),
        Case("resnet8", (1, 8, 8), 64),
        Case("resnet20", (3, 32, 32), 4),
    )
}
