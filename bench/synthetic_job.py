"""Jobs on synthetic data, for measurements of time only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEXT = '''"""Random images, for timing only."""

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
    """Writes a job file with this many full batches and a learning rate that cannot diverge."""
    text = TEXT.format(model=model, shape=shape, batch=batch, samples=batch * steps)
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Case:
    """A network, its input shape, and the samples per worker and step."""

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
