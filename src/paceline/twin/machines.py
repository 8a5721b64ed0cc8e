"""Virtual machines of a run: compute times of shares, including slowdowns."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.pool import Host, Jitter, Pool, slowness_at
from paceline.plan.cost_model import Workload, step_time_on
from paceline.protocol.run_spec import RunSpec
from paceline.specs.slowdown import ActiveSlowdown, InjectedSlowdown
from paceline.twin.timeline import Callback, SharedCores, Timeline

Floats = NDArray[np.float64]
BLOCK = 32
"""Random factors drawn at a time, per worker."""


class JitterSource:
    """Random factors with mean 1 for each worker's steps, determined by seed and rank."""

    def __init__(self, jitters: Sequence[Jitter], seed: int) -> None:
        self._jitters = jitters
        self._sources = [
            np.random.Generator(np.random.PCG64([seed, rank])) for rank in range(len(jitters))
        ]
        self._steady = all(j.cv == 0 for j in jitters)
        self._block = np.ones((len(jitters), BLOCK))
        self._at = np.full(len(jitters), BLOCK)

    def one(self, worker: int) -> float:
        if self._steady:
            return 1.0
        at = self._at.item(worker)
        if at == BLOCK:
            self._refill(worker)
            at = 0
        self._at[worker] = at + 1
        return self._block.item(worker, at)

    def each(self, workers: NDArray[np.intp]) -> Floats:
        """Returns one factor for each of these workers."""
        if self._steady:
            return np.ones(len(workers))
        at = self._at[workers]
        for worker in workers[at == BLOCK]:
            self._refill(int(worker))
        drawn: Floats = self._block[workers, self._at[workers]]
        self._at[workers] += 1
        return drawn

    def _refill(self, worker: int) -> None:
        self._block[worker] = _draw(self._sources[worker], self._jitters[worker])
        self._at[worker] = 0


def _draw(source: np.random.Generator, jitter: Jitter) -> Floats:
    cv = jitter.cv
    if cv == 0:
        return np.ones(BLOCK)
    if jitter.shape == "lognormal":
        sigma = np.sqrt(np.log1p(cv * cv))
        return source.lognormal(-sigma * sigma / 2, sigma, BLOCK)
    if jitter.shape == "uniform":
        # Times must not be negative: a wider uniform factor would reach below 0.
        half = min(0.999, cv * np.sqrt(3))
        return source.uniform(1 - half, 1 + half, BLOCK)
    # Occasionally much longer: a lower bound with an exponential tail.
    tail: Floats = source.exponential(min(cv, 1.0), BLOCK)
    return max(0.0, 1 - cv) + tail


class SimulatedMachines:
    """The machines of the workers of a view, by rank; several workers may share one.

    Faults and slowdowns name a worker by its number, which is its rank in the first view.
    """

    def __init__(
        self,
        pool: Pool,
        plan: RunSpec,
        work: Workload,
        timeline: Timeline,
        seed: int,
        slowdowns: tuple[InjectedSlowdown, ...],
        servers_on: Sequence[Host] = (),
    ) -> None:
        """`servers_on`: machines of the servers, in turn; by default those of the workers."""
        self._pool, self._slowdowns = pool, slowdowns
        self._every_host = pool.slots[: plan.workers]
        self._every_cost = [step_time_on(h, work, pool) for h in self._every_host]
        turns = servers_on or self._every_host
        self.servers = [turns[s % len(turns)] for s in range(plan.servers)]
        """The machine of each server."""
        self.dedicated = [h for h in servers_on if h.host not in {w.host for w in self._every_host}]
        self.server_update_s = [step_time_on(h, work, pool).update_s for h in self.servers]
        self._draws = JitterSource([pool.jitter_of(h) for h in self._every_host], seed)
        serving = Counter(host.host for host in self.servers)
        placed = Counter(host.host for host in self._every_host)
        machines = {host.host: host for host in (*self._every_host, *self.dedicated)}
        self._shared = {
            name: SharedCores(timeline, host.cores, placed[name] + serving[name])
            for name, host in machines.items()
        }
        self.server_cores = [self._shared[h.host] for h in self.servers]
        self._paused: dict[int, float] = {}
        """Time until which a worker is stopped by an injected fault."""
        self._slowed: dict[int, tuple[float, float]] = {}
        """Factor of an injected fault, and its end."""
        self._arrange(tuple(range(plan.workers)))

    def of_view(self, workers: tuple[int, ...]) -> SimulatedMachines:
        """Returns the machines of these workers, by rank; faults and jitter continue."""
        view = copy.copy(self)
        view._arrange(workers)
        return view

    def _arrange(self, workers: tuple[int, ...]) -> None:
        pool = self._pool
        self.workers = workers
        """The number of each worker, by rank."""
        self._numbers = np.array(workers, dtype=np.intp)
        self._rank_of = {worker: rank for rank, worker in enumerate(workers)}
        self.hosts = [self._every_host[w] for w in workers]
        self.links = [pool.link_of(h) for h in self.hosts]
        self._varying_links = any(link.slow for link in self.links)
        self.latency = [link.latency_s for link in self.links]
        self.compute = [self._every_cost[w] for w in workers]
        self._fixed = np.array([c.fixed_s for c in self.compute])
        self._per_sample = np.array([c.per_sample_s for c in self.compute])
        self.update = np.array([c.update_s for c in self.compute])
        placed: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            placed.setdefault(host.host, []).append(rank)
        self._crowds = [
            (cores, ranks)
            for ranks in placed.values()
            if len(ranks) > (cores := self.hosts[ranks[0]].cores)
        ]
        self.cores = [self._shared[h.host] for h in self.hosts]
        """Cores of each worker's machine."""
        self._slow = [r for r, h in enumerate(self.hosts) if h.slow or workers[r] in self._slowed]

    def compute_one(
        self, worker: int, samples: int, now: float, epoch: float, then: Callback
    ) -> None:
        """Computes a share from `now` on; calls `then` when the gradient is ready."""
        compute = self.compute[worker]
        number = self.workers[worker]
        seconds = (compute.fixed_s + samples * compute.per_sample_s) * self._draws.one(number)
        if self._slow:
            seconds *= self._slowness(worker, now)
        seconds += max(0.0, self._paused.get(number, 0.0) - now)
        if not self._slowdowns:
            self.cores[worker].run(now, seconds, then)
            return
        slowness = ActiveSlowdown.of(self._slowdowns, number, epoch)
        if slowness.cores < 1.0:
            # With a quota, its part of the machine is independent of the others.
            then(now + slowness.wall_s(seconds, seconds))
        else:
            # A worker with an injected slowdown sleeps and does not use more of the machine.
            self.cores[worker].run(
                now, seconds, lambda ended: then(now + slowness.factor * (ended - now))
            )

    def compute_all(self, begins: Floats, shares: Floats, epoch: float) -> Floats:
        """Returns the end times of the workers' shares; an empty share takes no time."""
        seconds = (self._fixed + shares * self._per_sample) * self._draws.each(self._numbers)
        for worker in self._slow:
            seconds[worker] *= self._slowness(worker, float(begins[worker]))
        for number, until in self._paused.items():
            if (rank := self._rank_of.get(number)) is not None:
                seconds[rank] += max(0.0, until - float(begins[rank]))
        seconds[shares == 0] = 0.0
        ends: Floats = begins + seconds
        slowed = {t.worker for t in self._slowdowns} & self._rank_of.keys()
        slow = {
            self._rank_of[w]: ActiveSlowdown.of(self._slowdowns, w, epoch) for w in sorted(slowed)
        }
        with_quota = {w for w, slowness in slow.items() if slowness.cores < 1.0}
        for cores, ranks in self._crowds:
            crowd = [w for w in ranks if w not in with_quota] if with_quota else ranks
            ends[crowd] = share_evenly(begins[crowd], seconds[crowd], cores)
        for w, slowness in slow.items():
            ends[w] = begins[w] + slowness.wall_s(float(ends[w] - begins[w]), float(seconds[w]))
        return ends

    def draw_factors(self, passes: int) -> Floats:
        """Returns random factors of this many steps of every worker."""
        return np.array([self._draws.each(self._numbers) for _ in range(passes)])

    def delays(self, epoch: float) -> Floats | None:
        """Returns the injected delay of each worker's exchange, or None without any delay."""
        late = [t for t in self._slowdowns if t.delay_s and t.is_active(epoch)]
        if not late:
            return None
        seconds = np.zeros(len(self.hosts))
        for slowdown in late:
            if (rank := self._rank_of.get(slowdown.worker)) is not None:
                seconds[rank] += slowdown.delay_s
        return seconds

    def delay(self, worker: int, epoch: float) -> float:
        if not self._slowdowns:
            return 0.0
        return ActiveSlowdown.of(self._slowdowns, self.workers[worker], epoch).delay_s

    def pause(self, number: int, until: float) -> None:
        """Stops a worker: its next share takes until then in addition."""
        self._paused[number] = until

    def slow_down(self, number: int, factor: float, until: float) -> None:
        """Slows a worker down from now on."""
        self._slowed[number] = (factor, until)
        rank = self._rank_of.get(number)
        if rank is not None and rank not in self._slow:
            self._slow.append(rank)

    def heal(self, number: int) -> None:
        """Ends the injected faults of a worker that is started again."""
        self._paused.pop(number, None)
        self._slowed.pop(number, None)

    def _slowness(self, worker: int, now: float) -> float:
        factor, until = self._slowed.get(self.workers[worker], (1.0, 0.0))
        return slowness_at(self.hosts[worker].slow, now) * (factor if now < until else 1.0)

    def link_slowness(self, now: float) -> float:
        """Returns the factor by which a transfer among all workers takes longer at this time."""
        if not self._varying_links:
            return 1.0
        return max(link.slowness(now) for link in self.links)


def share_evenly(begins: Floats, seconds: Floats, cores: int) -> Floats:
    """Returns the end times of tasks that share a machine's cores evenly."""
    left = seconds.copy()
    ends = begins.astype(float).copy()
    waiting = sorted(range(len(begins)), key=lambda i: begins[i])
    running: list[int] = []
    now = float(begins[waiting[0]]) if waiting else 0.0
    while waiting or running:
        while waiting and begins[waiting[0]] <= now:
            running.append(waiting.pop(0))
        if not running:
            now = float(begins[waiting[0]])
            continue
        rate = min(1.0, cores / len(running))
        soonest = min(left[i] for i in running) / rate
        if waiting:
            soonest = min(soonest, float(begins[waiting[0]]) - now)
        for i in running:
            left[i] -= soonest * rate
        now += soonest
        for i in [i for i in running if left[i] <= 1e-15]:
            running.remove(i)
            ends[i] = now
    return ends
