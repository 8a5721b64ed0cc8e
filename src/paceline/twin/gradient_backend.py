"""Depth learn: real gradients on real data, in the order that virtual time gives.

One model computes for all virtual workers. What must be kept apart is kept apart: each worker's
random generator and BatchNorm statistics, and the weights of every version that somebody still
computes on. The arithmetic of servers and codecs is that of real runs, the same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.accuracy import count_correct
from paceline.job import Job
from paceline.protocol.divergence import DivergenceDetector
from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.specs.strategy import Strategy
from paceline.state import (
    Section,
    TrainState,
    copy_section,
    load_checkpoint,
    load_into_model,
    persistent_buffers,
    save_checkpoint,
    state_from_model,
)
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.grouped.spec import Grouped
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.runner import Replica
from paceline.twin.backend import StepOutcome
from paceline.twin.methods import Apart, ExactUpdate, Method, SimulatedTransport
from paceline.worker.batch_loader import BatchLoader
from paceline.worker.evaluation import evaluate_shard
from paceline.worker.job_builder import (
    JobData,
    build_loss,
    build_model,
    build_optimizer,
    choose_device,
)
from paceline.worker.run_files import save_weights
from paceline.worker.session import RANK_STRIDE


class PerWorkerState:
    """What each virtual worker has for itself: its generator and its buffers."""

    def __init__(self, model: torch.nn.Module, workers: int, seed: int) -> None:
        self._alone = workers == 1
        self._buffers = persistent_buffers(model)
        self.rng = [torch.get_rng_state()]
        for rank in range(1, workers):
            torch.manual_seed(seed + rank * RANK_STRIDE)
            self.rng.append(torch.get_rng_state())
        torch.set_rng_state(self.rng[0])
        self._kept: list[list[torch.Tensor]] = []
        self._samples = [0] * workers
        self.copy_to_all()

    def copy_to_all(self) -> None:
        """Everybody's buffers become those of the model."""
        self._samples = [0] * len(self.rng)
        if not self._alone and self._buffers:
            self._kept = [[b.clone() for b in self._buffers.values()] for _ in self.rng]

    @contextlib.contextmanager
    def active(self, worker: int, samples: int) -> Iterator[None]:
        """Compute as this worker."""
        if self._alone:
            yield
            return
        self._samples[worker] += samples
        torch.set_rng_state(self.rng[worker])
        if self._kept:
            self._load(self._kept[worker])
        yield
        self.rng[worker] = torch.get_rng_state()
        if self._kept:
            for kept, buffer in zip(self._kept[worker], self._buffers.values(), strict=True):
                kept.copy_(buffer)

    def average(self) -> None:
        """By samples seen, as workers do when a run quiesces; counters take the largest."""
        total = sum(self._samples)
        if self._kept and total:
            for index, buffer in enumerate(self._buffers.values()):
                each = [kept[index] for kept in self._kept]
                if buffer.is_floating_point():
                    parts = [b.double() * n for b, n in zip(each, self._samples, strict=True)]
                    buffer.copy_(torch.stack(parts).sum(0) / total)
                else:
                    buffer.copy_(torch.stack(each).amax(0))
        self.copy_to_all()

    def _load(self, kept: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers.values(), kept, strict=True):
            buffer.copy_(value)


class GradientBackend:
    """The learner that learns."""

    uses_leases = True

    def __init__(
        self, job: Job, tables: JobData, workers: int, *, checkpoints: Path, keep: int = 2
    ) -> None:
        self._job = job
        self._tables = tables
        self.workers = workers
        model = build_model(job, tables)
        optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
        self.replica = Replica(model, optimizer, clip=job.clip)
        self._loss_of = build_loss(job, model)
        self._device = choose_device(job)
        self.feed = BatchLoader(tables.train, job.seed, self._device)
        self.seats = PerWorkerState(model, workers, job.seed)
        self._losses = [DivergenceDetector() for _ in range(workers)]
        self.residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        """What each worker's codec has not sent yet, by parameter; outlives a switch."""
        self._method: Method | None = None
        self._fallback: Section | None = None
        self._checkpoints, self._keep_checkpoints = checkpoints, keep
        model.train()

    # ---- one share ----------------------------------------------------------------------------

    def forward_backward(self, worker: int, lease: Lease) -> StepOutcome:
        """Forward and backward of a worker's share on the weights in the model."""
        model = self.replica.model
        for parameter in model.parameters():
            parameter.grad = None
        inputs, targets = self.feed.batch(lease)
        with self.seats.active(worker, lease.samples):
            output = model(inputs)
            loss = self._loss_of(output, targets)
            loss.backward()  # type: ignore[no-untyped-call]
        correct, predictions = count_correct(output, targets)
        value = loss.item()
        why = self._losses[worker].check(value)
        return StepOutcome(predictions, value * lease.samples, correct, diverged=why)

    def set_lr(self, lease: Lease, optimizer: torch.optim.Optimizer | None = None) -> None:
        job, samples = self._job, self.feed.samples
        seen = lease.epoch * samples + lease.start
        factor = job.schedule_spec.factor(seen, per_epoch=samples, total=samples * job.epochs)
        for group in (optimizer or self.replica.optimizer).param_groups:
            group["lr"] = job.base_lr * factor

    # ---- the learner's side -------------------------------------------------------------------

    def enter(self, strategy: Strategy, *, keep: bool, restore: bool) -> None:
        if self._method is not None:
            self._method.leave()
        if restore and self._fallback is not None:
            self.load(self._fallback)
        self._fallback = None
        if keep:
            self._fallback = copy_section(
                state_from_model(self.replica.model, self.replica.optimizer)
            )
        if isinstance(strategy, ParameterServer):
            self._method = SimulatedTransport(self, strategy)
        elif isinstance(strategy, Grouped):
            spec = ParameterServer(servers=strategy.servers, lr_scale=strategy.lr_scale)
            self._method = SimulatedTransport(self, spec, in_groups=True)
        elif isinstance(strategy, LocalSgd | DiLoCo):
            self._method = Apart(self, strategy)
        else:
            self._method = ExactUpdate(self, strategy if isinstance(strategy, AllReduce) else None)

    def load(self, section: Section) -> None:
        load_into_model(section, self.replica.model, self.replica.optimizer)
        self.seats.copy_to_all()

    @property
    def method(self) -> Any:
        assert self._method is not None
        return self._method

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        told: list[StepOutcome] = self.method.step(leases)
        return told

    def is_average_due(self) -> bool:
        return bool(self.method.drifted())

    def average_replicas(self) -> None:
        self.method.meet()

    def pull(self, worker: int) -> None:
        self.method.pull(worker)

    def compute(self, worker: int, lease: Lease, handle: int) -> StepOutcome:
        told: StepOutcome = self.method.compute(worker, lease, handle)
        return told

    def combine_gradients(self, parts: Sequence[tuple[int, int, float]]) -> None:
        self.method.join(parts)

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        return float(self.method.square(order))

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        self.method.apply(order, factor)

    def settle(self) -> float:
        self.method.settle()
        self.seats.average()
        return float(self.replica.optimizer.param_groups[0]["lr"])

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]:
        table = getattr(self._tables, split)
        return evaluate_shard(self.replica.model, self._loss_of, table, device=self._device)

    def save(self, name: str, memory: Mapping[str, Any]) -> str:
        self.method.export()
        shared = state_from_model(self.replica.model, self.replica.optimizer)
        shared.plain["coordinator"] = memory
        shared.plain["layout"] = None
        own = [
            Section({"rng/torch": state}, {"step": 0, "strategy": ""}) for state in self.seats.rng
        ]
        path = save_checkpoint(
            self._checkpoints, name, TrainState(shared, own), keep=self._keep_checkpoints
        )
        return str(path.relative_to(self._checkpoints.parent))

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of the same job."""
        state = load_checkpoint(checkpoint)
        self.load(state.shared)
        for rank, own in enumerate(state.workers[: self.workers]):
            self.seats.rng[rank] = own.tensors["rng/torch"]
        if self.workers == 1:
            torch.set_rng_state(self.seats.rng[0])

    def save_model(self, path: Path) -> None:
        save_weights(self.replica.model, path)
