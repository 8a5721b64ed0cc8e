"""Simulation of strategies whose workers share every global batch, one vectorized step at a time.

A strategy's `simulate` module subclasses `LockstepSimulation` and defines what follows the
gradients of a step (`finish_step`) and, if the model is split, their duration (`compute_step`).
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Generic

import numpy as np

from paceline.plan.cost_model import allreduce_s
from paceline.protocol.balance import split_batch
from paceline.protocol.messages import Lease, PlannedSteps, StepsApplied, StepStats
from paceline.specs.strategy import WorkerGroups
from paceline.twin.machines import Floats
from paceline.twin.simulator import Simulator
from paceline.twin.strategy_simulation import CompleteState, StrategySimulation, StrategyT
from paceline.twin.updates import StepOutcome

REPORT_S = 0.5
"""Interval between a worker's reports, as in real runs."""
MAX_CACHED_SPLITS = 64


class LockstepSimulation(StrategySimulation, ABC, Generic[StrategyT]):
    """All workers of a planned strategy at once."""

    def __init__(self, spec: StrategyT, simulator: Simulator, groups: WorkerGroups) -> None:
        self.spec = spec
        self.simulator = simulator
        self.workers = simulator.size
        self.exchange_bytes = self.bytes_per_exchange() if self.workers > 1 else 0.0
        self._allreduce_s = lru_cache(MAX_CACHED_SPLITS)(
            partial(allreduce_s, simulator.pool, simulator.fleet.hosts, algorithm=self.algorithm())
        )
        self.free = np.zeros(self.workers)
        """Time at which each worker can start its next step."""
        self._plans: deque[PlannedSteps] = deque()
        self._copies: Counter[int] = Counter()
        """Workers that have received a plan, by its first position."""
        self._newest = 0.0
        self._start = 0
        self._reported = 0.0
        self._split = lru_cache(MAX_CACHED_SPLITS)(self.cut_batch)
        self._complete: deque[tuple[float, CompleteState]] = deque()
        """The last complete update, and those in progress, with the time of their end."""
        self._steps_ended: deque[tuple[float, int]] = deque()
        """Time at which the first worker has ended a step, and the samples of the run up to it."""
        self._reset_report()

    # ---- for strategies -----------------------------------------------------------------------

    def bytes_per_exchange(self) -> float:
        """Bytes that each worker contributes to an exchange among all workers."""
        return 0.0

    def cut_batch(self, count: int, weights: tuple[int, ...] | None) -> list[int]:
        """Returns the offsets that split a global batch of `count` samples among the workers."""
        return split_batch(count, self.workers, weights)

    def algorithm(self) -> str | None:
        """Algorithm of these exchanges; None for torch's."""
        return None

    def compute_step(self, shares: Floats, epoch: float) -> tuple[Floats, Floats]:
        """Returns when each worker has its gradient, and how long it computed."""
        ends = self.simulator.fleet.compute_all(self.free, shares, epoch)
        return ends, ends - self.free

    @property
    def has_complete_state(self) -> bool:
        """True if all workers hold the result of all steps so far."""
        return True

    @abstractmethod
    def finish_step(self, ends: Floats, busy: Floats) -> None:
        """Exchanges and updates; sets `free`. Gradients are ready at `ends`."""

    def exchange_s(self, now: float, nbytes: float | None = None) -> float:
        """Returns the duration of an exchange; a slow link is one that carries more bytes."""
        nbytes = self.exchange_bytes if nbytes is None else nbytes
        return self._allreduce_s(nbytes * self.simulator.fleet.link_slowness(now))

    def wait_for_all(self, arrived: Floats, exchange_s: float) -> None:
        """A collective that starts when the last worker arrives; sets `free`."""
        if self.workers == 1:
            self.free = arrived
            return
        last = float(arrived.max())
        clocks = self.simulator.clocks
        clocks["wait"] += last - arrived
        clocks["comm_exposed"] += exchange_s
        # A worker that arrives early waits inside the collective and cannot distinguish the two.
        self._comm += last - arrived + exchange_s
        self.count_exchange()
        self.free = np.full(self.workers, last + exchange_s)

    def update_weights(self, parts: int = 1) -> None:
        """Adds every worker's optimizer step, for one of `parts` parts of the model."""
        update = self.simulator.fleet.update / parts
        self.free = self.free + update
        self.simulator.clocks["optimizer"] += update

    def count_exchange(self) -> None:
        self.bytes_sent += self.exchange_bytes * self.workers
        if self.exchange_bytes:
            self.bytes_before += self.simulator.work.bytes * self.workers

    # ---- events -------------------------------------------------------------------------------

    def on_steps(self, worker: int, steps: PlannedSteps, now: float) -> None:
        """All workers receive the same plan; it starts when the last one has it."""
        self._newest = now = max(self._newest, now)
        self._copies[steps.start] += 1
        if self._copies[steps.start] < self.workers:
            return
        del self._copies[steps.start]
        self._plans.append(steps)
        if len(self._plans) == 1:
            self._start = steps.start
            self.free = np.maximum(self.free, now)
            self._reported = now
            self._schedule_step()

    # ---- losses -------------------------------------------------------------------------------

    def settle(self, state: CompleteState) -> None:
        super().settle(state)
        self._complete.clear()
        self._steps_ended.clear()
        self._complete.append((-math.inf, state))

    def lose(self, worker: int, now: float) -> None:
        """All others wait for a lost worker in the exchange of this step."""
        self.halt(now)

    def recover(
        self, version: int, now: float, then: Callable[[float, CompleteState], None]
    ) -> None:
        state = next(s for at_s, s in reversed(self._complete) if at_s <= self.halted_at)
        ended = [samples for at_s, samples in self._steps_ended if at_s <= self.halted_at]
        then(now, dataclasses.replace(state, reached=max([state.samples, *ended])))

    def _note_step(self, samples: int, now: float) -> None:
        """Keeps the state after a step, if a loss may return to it."""
        self._steps_ended.append((float(self.free.min()), samples))
        if self.has_complete_state:
            state = CompleteState(samples, samples, self.simulator.updates.recover_state())
            self._complete.append((float(self.free.max()), state))
        for kept in (self._steps_ended, self._complete):
            while len(kept) > 1 and kept[1][0] <= now:
                kept.popleft()

    # ---- one step -----------------------------------------------------------------------------

    def _schedule_step(self) -> None:
        self.simulator.timeline.schedule(float(self.free.min()), self._step)

    def _step(self, now: float) -> None:
        """One global batch on all workers; schedules the next one for when it is finished."""
        if now > self.halted_at:
            return
        simulator, plan = self.simulator, self._plans[0]
        start, stop = self._start, min(self._start + plan.batch, plan.stop)
        cuts = self._split(stop - start, plan.batch_weights)
        shares = np.diff(cuts).astype(float)
        epoch = plan.epoch + start / simulator.work.samples
        ends, busy = self.compute_step(shares, epoch)
        late = simulator.fleet.delays(epoch)
        if late is not None:
            ends = ends + late
        leases: list[Lease] = []
        if simulator.updates.uses_leases:
            leases = [
                Lease(0, plan.epoch, start, stop, start + lo, start + hi)
                for lo, hi in pairwise(cuts)
            ]
        outcomes = simulator.updates.step(leases)
        self.finish_step(ends, busy)
        self._outcomes.append(outcomes)
        for worker, outcome in enumerate(outcomes):
            if outcome.diverged is not None:
                simulator.report_divergence(worker, outcome, leases[worker], float(ends[worker]))
        self._samples += shares.astype(np.int64)
        self._busy += busy
        self._busy_square += busy**2
        self._computed += shares > 0
        clocks = simulator.clocks
        clocks["forward"] += busy / 3
        clocks["backward"] += busy * 2 / 3
        if late is not None:
            clocks["comm_exposed"] += late
        simulator.joint_steps += 1
        if simulator.failures.expected:
            self._note_step(plan.epoch * simulator.work.samples + stop, now)
        self._start = stop
        self._continue(plan, stop)

    def _continue(self, plan: PlannedSteps, stop: int) -> None:
        now = float(self.free.max())
        if stop == plan.stop or now - self._reported >= REPORT_S:
            self._report(plan.epoch, stop)
            self._reported = now
        if stop == plan.stop:
            self._plans.popleft()
            if not self._plans:
                return
            self._start = self._plans[0].start
        self._schedule_step()

    # ---- reports ------------------------------------------------------------------------------

    def _reset_report(self) -> None:
        self._samples = np.zeros(self.workers, dtype=np.int64)
        self._busy = np.zeros(self.workers)
        self._busy_square = np.zeros(self.workers)
        self._computed = np.zeros(self.workers, dtype=np.int64)
        self._comm = np.zeros(self.workers)
        self._outcomes: list[list[StepOutcome]] = []

    def _report(self, epoch: int, position: int) -> None:
        for worker in range(self.workers):
            message = StepsApplied(
                worker, epoch, position, self.simulator.steps_of(worker), self._stats(worker)
            )
            self.simulator.send(worker, message, float(self.free[worker]), self)
        self._reset_report()

    def _stats(self, worker: int) -> StepStats:
        samples = int(self._samples[worker])
        busy_s, comm_s = float(self._busy[worker]), float(self._comm[worker])
        steps, square = int(self._computed[worker]), float(self._busy_square[worker])
        outcomes = [step[worker] for step in self._outcomes if step]
        predictions, loss_sum, correct = samples, None, None
        if outcomes:
            predictions = sum(o.predictions for o in outcomes)
            loss_sum = sum(o.loss_sum or 0.0 for o in outcomes)
            if all(o.correct is not None for o in outcomes):
                correct = sum(o.correct or 0 for o in outcomes)
        norms = next((o.norms for o in reversed(outcomes) if o.norms is not None), None)
        return StepStats(
            samples, predictions, loss_sum, correct, busy_s, comm_s, norms, steps, square
        )
