"""Workers under planned work: all-reduce in lock-step, local steps with meetings, or one alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from paceline.plan.cost_model import (
    allreduce_s,
    exchanged_bytes,
    exposed_s,
    exposed_without_layers_s,
    fill_buckets,
)
from paceline.plan.split import StageHost, estimate_pipeline, pipeline_s, tensor_step_s
from paceline.protocol.messages import (
    Lease,
    LeaseGranted,
    Message,
    PlannedSteps,
    StepsApplied,
    StepStats,
    split_batch,
)
from paceline.specs.model_parallel import ModelParallel
from paceline.specs.strategy import Strategy
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.twin.backend import StepOutcome
from paceline.twin.machines import Floats
from paceline.twin.simulator import Simulator

REPORT_S = 0.5
"""Workers report this often, as real ones do."""


class LockstepSimulation:
    """All workers at once, a step at a time, in vectors."""

    def __init__(self, world: Simulator, strategy: Strategy) -> None:
        self._world = world
        self._strategy = strategy
        self._workers = world.plan.workers
        self._plans: deque[PlannedSteps] = deque()
        self._running = False
        self._copies: dict[int, int] = {}
        """How many workers have a plan, by where it starts; and when the last copy came."""
        self._newest = 0.0
        self._start = 0
        self._free = np.zeros(self._workers)
        """When each worker can begin its next step."""
        self._reported = 0.0
        self._since_meeting = 0
        self._stage_shares: Floats | None = None
        self._machines = [
            StageHost(c.fixed_s, c.per_sample_s, math.inf, link.bytes_per_s, link.latency_s)
            for c, link in zip(world.fleet.compute, world.fleet.links, strict=True)
        ]
        self._cuts: dict[tuple[int, tuple[int, ...] | None], list[int]] = {}
        self.bytes_sent = self.bytes_before = 0.0
        self._exchange_s, self._bytes = self._cost_exchange()
        self._buckets: list[tuple[float, float]] = []
        """When each bucket is ready, as a share of computing, and the seconds of its exchange."""
        if isinstance(strategy, AllReduce) and self._workers > 1:
            self._buckets = [
                (b.ready, allreduce_s(world.pool, world.fleet.hosts, b.share * self._bytes))
                for b in fill_buckets(world.work, strategy.bucket_mb * (1 << 20))
            ]
        self._forget()

    def _cost_exchange(self) -> tuple[float, float]:
        """Seconds and bytes of one exchange among all workers."""
        world, strategy = self._world, self._strategy
        if not isinstance(strategy, AllReduce | LocalSgd | DiLoCo) or self._workers == 1:
            return 0.0, 0.0
        nbytes = exchanged_bytes(strategy, world.work)
        return allreduce_s(world.pool, world.fleet.hosts, nbytes), nbytes

    def _forget(self) -> None:
        workers = self._workers
        self._samples = np.zeros(workers, dtype=np.int64)
        self._busy = np.zeros(workers)
        self._comm = np.zeros(workers)
        self._told: list[list[StepOutcome]] = []

    # ---- work ---------------------------------------------------------------------------------

    def on_steps(self, worker: int, steps: PlannedSteps, now: float) -> None:
        """Everybody gets the same plan: it is begun when the last one has it."""
        copies = self._copies.pop(steps.start, 0) + 1
        self._newest = max(self._newest, now)
        if copies < self._workers:
            self._copies[steps.start] = copies
            return
        now = self._newest
        self._plans.append(steps)
        if not self._running:
            self._running = True
            self._start = steps.start
            self._free = np.maximum(self._free, now)
            self._reported = now
            self._world.timeline.schedule(float(self._free.min()), self._step)

    def on_go(self, worker: int, go: LeaseGranted, now: float) -> None:
        raise AssertionError("a lease by itself under planned work")

    def on_order(self, message: Message, now: float) -> None:
        raise AssertionError("an order to servers under planned work")

    def leave(self) -> None:
        return

    def settle(self, worker: int, version: int, now: float, then: Callable[[float], None]) -> None:
        ends = now
        if worker == 0 and self._since_meeting:
            self._since_meeting = 0
            self._world.learner.average_replicas()
            self._count_bytes()
            ends += self._exchange_s
        then(ends)

    def _step(self, now: float) -> None:
        """One global batch on all workers; the next one is planned for when this is over."""
        world, plan = self._world, self._plans[0]
        start, stop = self._start, min(self._start + plan.batch, plan.stop)
        cuts = self._cut(stop - start, plan.batch_weights)
        shares = np.diff(cuts).astype(float)
        epoch = plan.epoch + start / world.work.samples
        began = self._free
        if isinstance(self._strategy, ModelParallel):
            ends, busy = self._pass_through(self._strategy, shares, epoch)
        else:
            ends = world.fleet.compute_all(began, shares, epoch)
            busy = ends - began
        late = world.fleet.delays(epoch)
        if late is not None:
            ends = ends + late
        leases: list[Lease] = []
        if world.learner.uses_leases:
            leases = [
                Lease(0, plan.epoch, start, stop, start + lo, start + hi)
                for lo, hi in pairwise(cuts)
            ]
        told = self._exchange(leases, ends, busy)
        self._told.append(told)
        for worker, one in enumerate(told):
            if one.diverged is not None:
                world.diverging(worker, one, leases[worker], float(ends[worker]))
        self._samples += shares.astype(np.int64)
        self._busy += busy
        clocks = world.clocks
        clocks.add_all("forward", busy / 3)
        clocks.add_all("backward", busy * 2 / 3)
        if late is not None:
            clocks.add_all("comm_exposed", late)
        world.joint_steps += 1
        self._start = stop
        self._go_on(plan, stop)

    def _pass_through(
        self, strategy: ModelParallel, shares: Floats, epoch: float
    ) -> tuple[Floats, Floats]:
        """Every replica as one: its parts work on the rows that one of them answers for."""
        world, parts = self._world, strategy.model_parts
        rows = shares.reshape(-1, parts).sum(1).repeat(parts)
        began = self._free.reshape(-1, parts).max(1).repeat(parts)
        samples = self._samples_alike(strategy, rows)
        busy = world.fleet.compute_all(began, samples, epoch) - began
        lasts = []
        for first in range(0, len(busy), parts):
            mine = busy[first : first + parts]
            if isinstance(strategy, PipelineParallel):
                passing = self._passing_s(float(rows[first]) / strategy.micro)
                stages = [float(b) / strategy.micro + passing for b in mine]
                lasts.append(pipeline_s(stages, strategy.micro))
            else:
                machines = self._machines[first : first + parts]
                whole = tensor_step_s(world.work, strategy, machines, float(rows[first]))
                slowest = max(m.fixed_s + rows[first] * m.per_sample_s / parts for m in machines)
                lasts.append(float(mine.max()) + whole - slowest)
        ends = began + np.repeat(lasts, parts)
        world.clocks.add_all("wait", ends - self._free - busy)
        return ends, busy

    def _samples_alike(self, strategy: ModelParallel, rows: Floats) -> Floats:
        """For each worker as many samples of the whole model as take it what its part takes."""
        portions = self._portions(strategy)
        micro = strategy.micro if isinstance(strategy, PipelineParallel) else 1
        fixed = np.array([m.fixed_s for m in self._machines])
        each = np.array([m.per_sample_s for m in self._machines])
        # A stage's fixed cost comes with every micro-batch.
        alike: Floats = (portions * (micro * fixed + rows * each) - fixed) / each
        return np.where(rows > 0, np.maximum(alike, 1e-9), 0.0)

    def _portions(self, strategy: ModelParallel) -> Floats:
        """The share of a model's computing that each worker has."""
        if not isinstance(strategy, PipelineParallel):
            return np.full(self._workers, 1 / strategy.model_parts)
        if self._stage_shares is None:
            work, found = self._world.work, []
            rows = work.batch / (self._workers // strategy.model_parts)
            for first in range(0, self._workers, strategy.model_parts):
                machines = self._machines[first : first + strategy.model_parts]
                stages = estimate_pipeline(work, strategy, machines, rows)
                assert stages is not None  # memory was looked at before
                total = [strategy.micro * m.fixed_s + rows * m.per_sample_s for m in machines]
                found += [c / t for c, t in zip(stages.computing, total, strict=True)]
            self._stage_shares = np.array(found)
        return self._stage_shares

    def _passing_s(self, rows: float) -> float:
        """Of a micro-batch between two stages, there and back."""
        passed = self._world.work.input_bytes_per_sample
        nbytes = rows * (sum(passed) / len(passed) if passed else 0.0)
        slowest = min(m.bytes_per_s for m in self._machines)
        return 2 * nbytes / slowest + 2 * max(m.latency_s for m in self._machines)

    def _cut(self, count: int, weights: tuple[int, ...] | None) -> list[int]:
        key = (count, weights)
        if key not in self._cuts:
            if len(self._cuts) > 64:
                self._cuts.clear()
            self._cuts[key] = split_batch(count, self._workers, weights)
        return self._cuts[key]

    def _exchange(self, leases: list[Lease], ends: Floats, busy: Floats) -> list[StepOutcome]:
        """What follows the gradients: the exchange, the waiting for others, the update."""
        world, strategy = self._world, self._strategy
        update = world.fleet.update
        told = world.learner.step(leases)
        if isinstance(strategy, LocalSgd | DiLoCo):
            world.clocks.add_all("optimizer", update)
            self._free = ends + update
            self._since_meeting += 1
            if self._is_due(strategy):
                self._since_meeting = 0
                world.learner.average_replicas()
                self._wait_for_all(self._free, self._exchange_s)
            return told
        if isinstance(strategy, ModelParallel):
            # Twins of different replicas add up their gradients.
            exchange = self._twins_s(strategy)
            if exchange:
                self._wait_for_all(ends, exchange)
            else:
                self._free = ends
            part = update / strategy.model_parts
            self._free = self._free + part
            world.clocks.add_all("optimizer", part)
            return told
        if isinstance(strategy, AllReduce):
            longest = float(busy.max())
            if self._buckets:
                exposed = exposed_s(longest, self._buckets)
            else:
                size = strategy.bucket_mb * (1 << 20)
                exposed = exposed_without_layers_s(self._exchange_s, longest, self._bytes, size)
            self._wait_for_all(ends, exposed)
            self._free = self._free + update
            world.clocks.add_all("optimizer", update)
        else:
            self._free = ends.copy()
            self._free[0] += update[0]
            world.clocks.add("optimizer", 0, float(update[0]))
        return told

    def _twins_s(self, strategy: ModelParallel) -> float:
        hosts = self._world.fleet.hosts[:: strategy.model_parts]
        nbytes = self._world.work.bytes / strategy.model_parts
        return allreduce_s(self._world.pool, hosts, nbytes) if len(hosts) > 1 else 0.0

    def _is_due(self, strategy: LocalSgd | DiLoCo) -> bool:
        if isinstance(strategy, LocalSgd) and strategy.drift is not None:
            return self._world.learner.is_average_due()
        steps = strategy.steps_between_syncs
        return self._since_meeting >= steps

    def _wait_for_all(self, arrived: Floats, exchange_s: float) -> None:
        """A collective begins with the last to come."""
        if self._workers == 1:
            self._free = arrived
            return
        last = float(arrived.max())
        self._world.clocks.add_all("wait", last - arrived)
        self._world.clocks.add_all("comm_exposed", exchange_s)
        # A worker that comes early spends its waiting inside the exchange: it cannot tell them
        # apart.
        self._comm += last - arrived + exchange_s
        self._count_bytes()
        self._free = np.full(self._workers, last + exchange_s)

    def _count_bytes(self) -> None:
        self.bytes_sent += self._bytes * self._workers
        self.bytes_before += self._world.work.bytes * self._workers if self._bytes else 0.0

    def _go_on(self, plan: PlannedSteps, stop: int) -> None:
        now = float(self._free.max())
        if stop == plan.stop or now - self._reported >= REPORT_S:
            self._report(plan.epoch, stop)
            self._reported = now
        if stop < plan.stop:
            self._world.timeline.schedule(float(self._free.min()), self._step)
            return
        self._plans.popleft()
        if self._plans:
            self._start = self._plans[0].start
            self._world.timeline.schedule(float(self._free.min()), self._step)
        else:
            self._running = False

    def _report(self, epoch: int, position: int) -> None:
        for worker in range(self._workers):
            message = StepsApplied(
                worker, epoch, position, self._world.steps_of(worker), self._measured(worker)
            )
            self._world.send(worker, message, float(self._free[worker]))
        self._forget()

    def _measured(self, worker: int) -> StepStats:
        samples = int(self._samples[worker])
        busy_s, comm_s = float(self._busy[worker]), float(self._comm[worker])
        told = [step[worker] for step in self._told if step]
        if not told:
            return StepStats(samples, samples, None, None, busy_s, comm_s)
        corrects = [t.correct for t in told]
        return StepStats(
            samples,
            sum(t.predictions for t in told),
            sum(t.loss_sum or 0.0 for t in told),
            None if any(c is None for c in corrects) else sum(c or 0 for c in corrects),
            busy_s,
            comm_s,
            next((t.norms for t in reversed(told) if t.norms is not None), None),
        )
