"""Worker side of local_sgd: replicas are averaged every `h` steps, or when they drift apart.

`LocalStepsRunner` is shared with diloco. Between two synchronizations the replicas differ; each of
them, and every quiesce, makes them equal again. Optimizer slots stay local: a checkpoint keeps each
worker's own and their average, which is what another strategy continues with.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import StateError
from paceline.specs.strategy import LocalSteps
from paceline.state import Section, checksum, slots_by_parameter, state_from_model
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.runner import (
    INNER_PREFIX,
    Runner,
    TrainStep,
    WorkerContext,
    copy_flat,
    peer_errors,
    step_optimizer,
)
from paceline.telemetry.phase_clock import COMM, OPTIMIZER


class LocalStepsRunner(Runner):
    """Local steps and synchronization; subclasses define how replicas are combined."""

    def __init__(self, spec: LocalSteps, context: WorkerContext) -> None:
        super().__init__(context)
        self._steps_between_syncs = spec.steps_between_syncs
        self._inner_rate = spec.inner_rate(context.size)
        self._parameters = [p for _, p in self.replica.trained]
        self._anchor: list[torch.Tensor] = []
        self._samples = 0
        self._whole = 0
        self._steps = 0

    def import_state(self, state: Section) -> None:
        check_replicas_equal(state, self.context.group)
        super().import_state(state)
        self._set_anchor()

    def _set_anchor(self) -> None:
        """Remember these weights: the replicas are equal now."""
        self._anchor = [p.detach().clone() for p in self._parameters]
        self._samples = self._whole = self._steps = 0

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(OPTIMIZER)
        if work.lease.samples:
            self._step_locally()
        self._samples += work.lease.samples
        self._whole += work.lease.batch
        self._steps += 1
        self.clock.enter(COMM)
        with peer_errors(f"the synchronization at step {work.step} failed"):
            if self._is_due():
                self._synchronize()

    def _step_locally(self) -> None:
        """Steps at the rate of local steps; the optimizer keeps the schedule's."""
        groups = self.replica.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._inner_rate
        step_optimizer(self.replica)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _is_due(self) -> bool:
        return self._steps >= self._steps_between_syncs

    def _synchronize(self) -> None:
        """Makes the replicas equal; every worker calls it after the same step."""
        raise NotImplementedError

    def sync_weights(self, version: int) -> None:
        if self._steps:
            self._synchronize()

    def _average_in_place(self, tensors: list[torch.Tensor]) -> None:
        """Averages in place over the workers, weighted by the samples since the last time."""
        weight = self._samples / self._whole
        with torch.no_grad():
            for dtype in dict.fromkeys(t.dtype for t in tensors):
                together = [t for t in tensors if t.dtype == dtype]
                flat = torch.cat([t.reshape(-1) for t in together]).mul_(weight)
                self.context.group.all_reduce(flat)
                self._sent += flat.nbytes
                copy_flat(flat, together)

    @property
    def has_complete_state(self) -> bool:
        return self._steps == 0

    def recover_state(self, version: int, lost_servers: Sequence[tuple[str, int]] = ()) -> Section:
        """Returns the state of the last synchronization; the slots are those of this worker."""
        with torch.no_grad():
            for parameter, anchor in zip(self._parameters, self._anchor, strict=True):
                parameter.copy_(anchor)
        return super().recover_state(version, lost_servers)

    def export_state(self) -> Section:
        """Averages slots with equal weights over the workers that have them."""
        section = super().export_state()
        mine = {k: v for k, v in section.tensors.items() if k.startswith("slots/")}
        # A parameter that only some workers use has slots only there.
        held = Section(plain={k: [list(v.shape), str(v.dtype)] for k, v in mine.items()})
        every = [s.plain for s in self.context.group.all_gather_sections(held)]
        for key in sorted({key for held_by in every for key in held_by}):
            having = [held_by[key] for held_by in every if key in held_by]
            shape, dtype = having[0]
            kind = getattr(torch, dtype.removeprefix("torch."))
            mean = mine[key].detach().clone() if key in mine else torch.zeros(shape, dtype=kind)
            if mean.is_floating_point():
                mean /= len(having)
                self.context.group.all_reduce(mean)
            section.tensors[key] = mean
        return section

    def export_local_state(self) -> Section:
        mine = state_from_model(self.replica.model, self.replica.optimizer).tensors
        return Section({f"{INNER_PREFIX}{k}": v for k, v in mine.items() if k.startswith("slots/")})

    def import_local_state(self, own: Section) -> None:
        mine = [(k, v) for k, v in own.tensors.items() if k.startswith(INNER_PREFIX)]
        slots = slots_by_parameter(Section({k.removeprefix(INNER_PREFIX): v for k, v in mine}))
        for name, parameter in self.replica.trained:
            if name in slots:
                kept = {slot: value.clone() for slot, value in slots[name].items()}
                self.replica.optimizer.state[parameter] = kept


def check_replicas_equal(state: Section, group: CollectiveGroup) -> None:
    """Raises StateError on every worker if replicas start from different weights."""
    if group.size == 1:
        return
    mine = int(checksum(state)[:12], 16)
    pair = torch.tensor([mine, -mine], dtype=torch.int64)
    group.all_reduce(pair, largest=True)
    if int(pair[0]) != -int(pair[1]):
        raise StateError(
            "the workers start from different weights; local steps require equal replicas"
        )


class LocalSgdRunner(LocalStepsRunner):
    """Weights are averaged every `h` steps, or when a replica has drifted too far."""

    def __init__(self, spec: LocalSgd, context: WorkerContext) -> None:
        super().__init__(spec, context)
        self._spec = spec
        self._vote: tuple[torch.Tensor, dist.Work | None] | None = None

    def _is_due(self) -> bool:
        if self._spec.drift is None:
            return super()._is_due()
        # The vote of a step is read one step later, so that no worker waits for it.
        verdict = self._finish_drift_check() > self._spec.drift
        ballot = torch.tensor([0.0 if verdict else self._drift()], dtype=torch.float64)
        self._vote = (ballot, self.context.group.all_reduce_async(ballot, largest=True))
        return verdict

    def _synchronize(self) -> None:
        self._average_in_place([p.detach() for p in self._parameters])
        self._set_anchor()

    def sync_weights(self, version: int) -> None:
        self._finish_drift_check()
        super().sync_weights(version)

    def _drift(self) -> float:
        """Returns the relative distance from the weights of the last synchronization."""
        with torch.no_grad():
            moved = sum(
                float((p - a).square().sum())
                for p, a in zip(self._parameters, self._anchor, strict=True)
            )
            size = sum(float(a.square().sum()) for a in self._anchor)
        return float((moved / max(size, 1e-30)) ** 0.5)

    def _finish_drift_check(self) -> float:
        if self._vote is None:
            return 0.0
        ballot, work = self._vote
        self._vote = None
        if work is not None:
            work.wait()
        return float(ballot)
