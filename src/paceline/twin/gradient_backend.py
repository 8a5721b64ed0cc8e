"""Weights at depth `learn`: real gradients on real data, computed in virtual-time order.

The active strategy's simulate facet decides how gradients become weights (`WeightUpdates`). Data,
loss, evaluation and checkpoints are those of real workers. Each simulated worker has its own random
state and BatchNorm statistics.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.job import Job
from paceline.protocol.divergence import DivergenceDetector
from paceline.protocol.messages import Lease, StepStats
from paceline.specs.strategy import Strategy, WorkerGroups
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
from paceline.strategies.registry import simulation
from paceline.strategies.runner import LossOf, Replica, measure
from paceline.twin.updates import StepOutcome, WeightsBackend, WeightUpdates
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
from paceline.worker.session import JOIN_STRIDE, RANK_STRIDE


class PerWorkerState:
    """Random state and buffers of each simulated worker, for workers that share one model."""

    def __init__(self, model: torch.nn.Module, workers: int, seed: int) -> None:
        self._single = workers == 1
        self._buffers = persistent_buffers(model)
        self.rng = [torch.get_rng_state()]
        for rank in range(1, workers):
            torch.manual_seed(seed + rank * RANK_STRIDE)
            self.rng.append(torch.get_rng_state())
        torch.set_rng_state(self.rng[0])
        self._kept: list[list[torch.Tensor]] = []
        self._samples = [0] * workers
        self.copy_to_all()

    def select(self, workers: Sequence[int], kept: Sequence[int | None], seed: int) -> None:
        """Continues with other workers: those at `kept` ranks, and new ones for None.

        Buffers are averaged over the workers that remain.
        """
        active = torch.get_rng_state()
        if self._single:
            self.rng[0] = active
        rng = []
        for worker, rank in zip(workers, kept, strict=True):
            if rank is None:
                torch.manual_seed(seed + worker * RANK_STRIDE)
            rng.append(torch.get_rng_state() if rank is None else self.rng[rank])
        stay = [rank for rank in kept if rank is not None]
        self._kept = [self._kept[rank] for rank in stay] if self._kept else []
        self._samples = [self._samples[rank] for rank in stay]
        self.rng, self._single = rng, len(workers) == 1
        torch.set_rng_state(rng[0])
        self.average()

    def copy_to_all(self) -> None:
        """Copies the model's buffers to all workers."""
        self._samples = [0] * len(self.rng)
        if not self._single and self._buffers:
            self._kept = [[b.clone() for b in self._buffers.values()] for _ in self.rng]

    @contextlib.contextmanager
    def random_state(self, worker: int) -> Iterator[None]:
        """Uses this worker's random state."""
        if self._single:
            yield
            return
        torch.set_rng_state(self.rng[worker])
        yield
        self.rng[worker] = torch.get_rng_state()

    @contextlib.contextmanager
    def active(self, worker: int, samples: int) -> Iterator[None]:
        """Uses this worker's random state and buffers."""
        with self.random_state(worker):
            if self._single:
                yield
                return
            self._samples[worker] += samples
            own = self._kept[worker] if self._kept else []
            for kept, buffer in zip(own, self._buffers.values(), strict=True):
                buffer.copy_(kept)
            yield
        for kept, buffer in zip(own, self._buffers.values(), strict=True):
            kept.copy_(buffer)

    def average(self) -> None:
        """Averages buffers by samples, as workers do at a quiesce; counters take the maximum."""
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


class GradientBackend(WeightsBackend):
    """A weights backend that trains the model."""

    def __init__(
        self, job: Job, tables: JobData, workers: int, *, checkpoints: Path, keep: int = 2
    ) -> None:
        self._job = job
        self.seed = job.seed
        self._tables = tables
        self.workers = workers
        model = build_model(job, tables)
        optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
        self.replica = Replica(model, optimizer, clip=job.clip)
        self._loss_of = self.build_loss(model)
        self._device = choose_device(job)
        self.loader = BatchLoader(tables.train, job.seed, self._device)
        self.per_worker = PerWorkerState(model, workers, job.seed)
        self._losses = [DivergenceDetector() for _ in range(workers)]
        self.residuals: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        """Codec residuals per worker, as `residual/<parameter>`; kept across a switch."""
        self._updates = WeightUpdates()
        self._joins = 0
        """Workers that have joined so far."""
        self._fallback: Section | None = None
        self._best: Section | None = None
        self._checkpoints, self._keep_checkpoints = checkpoints, keep
        model.train()

    # ---- one share ----------------------------------------------------------------------------

    def forward_backward(self, worker: int, lease: Lease) -> StepOutcome:
        """Runs forward and backward on a worker's share, with the weights of the shared model."""
        model = self.replica.model
        for parameter in model.parameters():
            parameter.grad = None
        inputs, targets = self.loader.batch(lease)
        with self.per_worker.active(worker, lease.samples):
            output = model(inputs)
            loss = self._loss_of(output, targets)
            loss.backward()  # type: ignore[no-untyped-call]
        return self.outcome(worker, measure(lease.samples, loss, output, targets))

    def outcome(self, worker: int, stats: StepStats) -> StepOutcome:
        """Returns a worker's report about a share, including whether its loss diverges."""
        loss = (stats.loss_sum or 0.0) / max(1, stats.samples)
        reason = self._losses[worker].check(loss)
        return StepOutcome(stats.predictions, stats.loss_sum, stats.correct, diverged=reason)

    def build_loss(self, model: torch.nn.Module) -> LossOf:
        return build_loss(self._job, model)

    def set_lr(self, lease: Lease, optimizer: torch.optim.Optimizer | None = None) -> None:
        job, samples = self._job, self.loader.samples
        seen = lease.epoch * samples + lease.start
        factor = job.schedule_spec.factor(seen, per_epoch=samples, total=samples * job.epochs)
        for group in (optimizer or self.replica.optimizer).param_groups:
            group["lr"] = job.base_lr * factor * self.lr_gain

    # ---- weights backend ----------------------------------------------------------------------

    def enter(
        self, strategy: Strategy, groups: WorkerGroups, *, keep: bool, restore: bool, best: bool
    ) -> WeightUpdates:
        self._updates.export()
        self._updates.close()
        kept = self._best if best else self._fallback
        if restore and kept is not None:
            self.load(kept)
        self._fallback = self.copy_state() if keep else None
        self._updates = simulation(strategy).updates(strategy, self, groups)
        return self._updates

    def regroup(
        self, workers: Sequence[int], kept: Sequence[int | None], state: Section | None
    ) -> None:
        self._updates.keep_local_state()
        self._updates.close()
        self._updates = WeightUpdates()
        self.workers = len(workers)
        self.residuals = [{} if rank is None else self.residuals[rank] for rank in kept]
        self._losses = [
            DivergenceDetector() if rank is None else self._losses[rank] for rank in kept
        ]
        if state is not None:
            load_into_model(state, self.replica.model, self.replica.optimizer)
        self._joins += sum(rank is None for rank in kept)
        self.per_worker.select(workers, kept, self.seed + self._joins * JOIN_STRIDE)

    def keep(self) -> None:
        self._updates.export()
        self._best = self.copy_state()

    def copy_state(self) -> Section:
        return copy_section(state_from_model(self.replica.model, self.replica.optimizer))

    def load(self, section: Section) -> None:
        load_into_model(section, self.replica.model, self.replica.optimizer)
        self.per_worker.copy_to_all()

    def settle(self) -> float:
        self._updates.sync()
        self.per_worker.average()
        return float(self.replica.optimizer.param_groups[0]["lr"])

    def evaluate(self, split: str) -> tuple[float | None, int | None, int]:
        table = getattr(self._tables, split)
        return evaluate_shard(self.replica.model, self._loss_of, table, device=self._device)

    def save(self, name: str, memory: Mapping[str, Any]) -> str:
        self._updates.export()
        shared = state_from_model(self.replica.model, self.replica.optimizer)
        shared.plain["coordinator"] = memory
        shared.plain["layout"] = None
        own = [
            Section({"rng/torch": state}, {"step": 0, "strategy": ""})
            for state in self.per_worker.rng
        ]
        path = save_checkpoint(
            self._checkpoints, name, TrainState(shared, own), keep=self._keep_checkpoints
        )
        return str(path.relative_to(self._checkpoints.parent))

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Continues from a checkpoint of the same job."""
        state = load_checkpoint(checkpoint)
        self.load(state.shared)
        for rank, own in enumerate(state.workers[: self.workers]):
            self.per_worker.rng[rank] = own.tensors["rng/torch"]
        if self.workers == 1:
            torch.set_rng_state(self.per_worker.rng[0])

    def close(self) -> None:
        self._updates.close()

    def save_model(self, path: Path) -> None:
        save_weights(self.replica.model, path)
