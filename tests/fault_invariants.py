"""Invariants of every simulated run: each sample once, each gradient once, bounded lag."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.specs.strategy import Strategy
from paceline.twin.simulator import Simulator
from paceline.twin.updates import NOTHING, StepOutcome, WeightsBackend, WeightUpdates

MAX_EVENTS = 100_000


class Violation(AssertionError):
    """An invariant does not hold."""


class SampleAudit(WeightsBackend, WeightUpdates):
    """Counts which samples were computed, and keeps what a checkpoint would contain."""

    uses_leases = True

    def __init__(self, seen: Counter[tuple[int, int]]) -> None:
        self.seen = seen
        self._waiting: dict[tuple[int, int], int] = {}
        """Samples in each gradient that was computed but not applied yet."""
        self.applied = 0
        self.saved: tuple[CoordinatorMemory, Counter[tuple[int, int]]] | None = None

    def enter(self, *args: Any, **settings: Any) -> WeightUpdates:
        return self

    def _count(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        for lease in leases:
            for position in range(lease.lo, lease.hi):
                self.seen[lease.epoch, position] += 1
                if self.seen[lease.epoch, position] > 1:
                    raise Violation(f"sample {position} of epoch {lease.epoch} was trained twice")
        return [NOTHING for _ in leases]

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        return self._count(leases)

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        return self._count([lease])[0]

    def push(self, worker: int, lease: Lease, handle: int) -> None:
        self._waiting[worker, handle] = lease.samples

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        self._waiting[members[0], handle] = sum(lease.samples for lease in leases)
        return self._count(leases)

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        for part in order.parts:
            if (part.worker, part.handle) not in self._waiting:
                raise Violation(f"gradient {part.handle} of worker {part.worker} is applied twice")
            self.applied += self._waiting.pop((part.worker, part.handle))

    def settle(self) -> float:
        if self._waiting:
            raise Violation(f"{len(self._waiting)} gradients were computed and never applied")
        return 0.0

    def save(self, name: str, memory: Mapping[str, Any]) -> str:
        # A checkpoint is taken when all work is applied, so the weights contain every sample.
        self.saved = (cast(CoordinatorMemory, copy.deepcopy(memory)), self.seen.copy())
        return name


class ElasticAudit(SampleAudit):
    """Counts samples when they are applied, and returns to what was complete after a loss."""

    def __init__(self, seen: Counter[tuple[int, int]]) -> None:
        super().__init__(seen)
        self._pushed: dict[tuple[int, int], list[Lease]] = {}

    def enter(self, *args: Any, **settings: Any) -> WeightUpdates:
        self._pushed.clear()  # Gradients of lost workers remain.
        return self

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        return NOTHING

    def push(self, worker: int, lease: Lease, handle: int) -> None:
        self._pushed[worker, handle] = [lease]

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        self._pushed[members[0], handle] = list(leases)
        return [NOTHING for _ in members]

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        for part in order.parts:
            self._count(self._pushed.pop((part.worker, part.handle)))

    def recover_state(self) -> Any:
        return self.seen.copy()

    def regroup(self, workers: Sequence[int], kept: Sequence[int | None], state: Any) -> None:
        if state is not None:
            self.seen = state.copy()


class InvariantChecker:
    """Checks the invariants after every message that the coordinator has handled."""

    def __init__(self, simulator: Simulator, spec: Strategy) -> None:
        self._simulator, self._spec = simulator, spec
        self._samples = simulator.coordinator.history.samples
        self._now = 0.0
        self._updates = self._view = 0
        simulator.observers.append(self._check)

    def _check(self, now: float) -> None:
        if now < self._now:
            raise Violation(f"time went back from {self._now} to {now}")
        self._now = now
        simulator = self._simulator
        history = simulator.coordinator.history
        view = history.views[-1].number if history.views else 0
        if view != simulator.coordinator.view.number or view != self._view:
            self._view = view  # What was incomplete when the view ended is repeated.
        elif history.samples < self._samples or history.updates < self._updates:
            raise Violation("samples or updates went down")
        self._samples, self._updates = history.samples, history.updates
        total = simulator.work.samples * simulator.work.epochs
        if history.samples > total:
            raise Violation(f"{history.samples} samples of {total} are counted as trained")
        self._check_lag(history.max_lag)
        if simulator.timeline.events > MAX_EVENTS:
            raise Violation("the run does not end")

    def _check_lag(self, lag: int) -> None:
        bound = self._spec.lag_bound(self._simulator.plan.workers)
        if bound is not None and lag > bound:
            raise Violation(f"a lag of {lag} under {self._spec}")
