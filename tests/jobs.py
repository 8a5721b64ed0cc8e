"""Small jobs for tests: models and data at the top level of a module, so that workers find them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from paceline.job import Job
from paceline.worker.batch_loader import epoch_order
from paceline.worker.job_builder import build_optimizer, cross_entropy

CLASSES = 3
FEATURES = 8


def make_rows(count: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(0, CLASSES, (count,), generator=generator)


def make_data(count: int, dtype: torch.dtype = torch.float64, held_out: int = 0) -> Any:
    inputs, targets = make_rows(count + held_out, dtype)
    rest = (inputs[count:], targets[count:]) if held_out else None
    return (inputs[:count], targets[:count]), rest, rest


class Plain(torch.nn.Module):
    """Two layers, nothing random, nothing remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, 16)
        self.out = torch.nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(inputs)))


class Moving(Plain):
    """Puts its weights elsewhere whenever it is used, as layers do that keep a norm."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.hidden.weight.data = torch.renorm(self.hidden.weight.data, 2, 0, 0.5)
        return super().forward(inputs)


class Awkward(torch.nn.Module):
    """Tied, frozen, never used, rarely used and scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, FEATURES)
        self.again = torch.nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.frozen = torch.nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.unused = torch.nn.Linear(FEATURES, FEATURES)
        self.rare = torch.nn.Linear(FEATURES, CLASSES)
        self.out = torch.nn.Linear(FEATURES, CLASSES)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.again(torch.tanh(self.first(inputs)))))
        output = self.out(hidden) * self.scale
        chosen = inputs[:, 0] > 1.8
        if chosen.any():
            extra = torch.zeros_like(output)
            extra[chosen] = self.rare(hidden[chosen])
            output = output + extra
        return output


class Remembering(torch.nn.Module):
    """BatchNorm and dropout: running statistics and a random generator to carry over."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(FEATURES, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.drop = torch.nn.Dropout(0.3)
        self.out = torch.nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.relu(self.norm(self.hidden(inputs)))))


class NormOnly(torch.nn.Module):
    """BatchNorm straight on the inputs: its statistics can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.out = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(inputs))


def synthetic_job(model: Any, *, samples: int = 220, held_out: int = 0, **fields: Any) -> Job:
    dtype = getattr(torch, fields.setdefault("dtype", "float64"))
    fields.setdefault("batch", 11)
    fields.setdefault("epochs", 1)
    fields.setdefault("checkpoint_every", "never")
    return Job(model=model, data=functools.partial(make_data, samples, dtype, held_out), **fields)


def train_plainly(job: Job) -> dict[str, torch.Tensor]:
    """What a plain PyTorch script does with the job's global batches; the weights it ends with."""
    (inputs, targets), _, _ = job.data()
    torch.manual_seed(job.seed)
    model = job.model().to(getattr(torch, job.dtype))
    optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
    model.train()
    count, schedule = len(inputs), job.schedule_spec
    for epoch in range(job.epochs):
        order = epoch_order(count, job.seed, epoch)
        for start in range(0, count, job.batch):
            seen = epoch * count + start
            factor = schedule.factor(seen, per_epoch=count, total=count * job.epochs)
            for group in optimizer.param_groups:
                group["lr"] = job.base_lr * factor
            rows = torch.from_numpy(np.asarray(order[start : start + job.batch]))
            optimizer.zero_grad()
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            if job.clip is not None:
                trained = [p for p in model.parameters() if p.requires_grad]
                torch.nn.utils.clip_grad_norm_(trained, job.clip)
            optimizer.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Over the names that both have: a tied weight is stored under one of its names."""
    shared = set(one) & set(two)
    assert shared
    return max(float((one[n].double() - two[n].double()).abs().max()) for n in shared)
