"""Losses in a simulated run: how they are noticed, and how workers are started again.

A process that ends is noticed by its exit status. A machine that fails, and a process that is
stopped, are noticed by missing heartbeats. The rules are those of a real supervisor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.launch.deadlines import SILENCE_S
from paceline.launch.restarts import RestartPolicy
from paceline.plan.pool_arrays import STARTUP_S
from paceline.protocol.messages import ServerReady
from paceline.twin.startup import describe_worker

if TYPE_CHECKING:
    from paceline.cluster.pool import Host
    from paceline.twin.simulator import Simulator

EXIT_S = 0.1
"""Time until the end of a process is noticed."""


class Failures:
    """Ends workers and machines of a simulated run, and starts them again."""

    def __init__(self, simulator: Simulator, restarts: int, seed: int) -> None:
        self._simulator = simulator
        self._restarts = RestartPolicy(restarts)
        self._seed = seed
        fleet = simulator.fleet
        self._machines: dict[str, Host] = {h.host: h for h in (*fleet.hosts, *fleet.dedicated)}
        self._workers: dict[str, list[int]] = {}
        for worker, host in enumerate(fleet.hosts):
            self._workers.setdefault(host.host, []).append(worker)
        self.died_at: dict[int, float] = {}
        """Workers that do not exist, and since when."""
        self._starts: dict[int, int] = {}
        """Number of times that each worker was started again."""
        self.dead_hosts: set[str] = set()
        self.expected = simulator.pool.mtbf_s is not None or any(
            host.fails_at_s is not None or host.down for host in self._machines.values()
        )
        """True if a worker may be lost, so that states to return to are kept."""

    def starts_of(self, worker: int) -> int:
        """Returns the number of times that a worker was started again."""
        return self._starts.get(worker, 0)

    def begin(self) -> None:
        """Schedules the failures of all machines."""
        timeline = self._simulator.timeline
        for index, host in enumerate(self._machines.values()):
            if host.fails_at_s is not None:
                timeline.schedule(host.fails_at_s, partial(self._fail_machine, host, None, None))
            for period in host.down:
                back = None if period.to_s == np.inf else period.to_s
                timeline.schedule(period.from_s, partial(self._fail_machine, host, back, None))
            if self._simulator.pool.mtbf_s is not None:
                source = np.random.Generator(np.random.PCG64([self._seed, index, 1]))
                self._draw_failure(host, source, timeline.now)

    def _draw_failure(self, host: Host, source: np.random.Generator, after: float) -> None:
        pool = self._simulator.pool
        assert pool.mtbf_s is not None
        at = after + float(source.exponential(pool.mtbf_s))
        then = partial(self._draw_failure, host, source)
        self._simulator.timeline.schedule(
            at, partial(self._fail_machine, host, at + pool.repair_s, then)
        )

    def _fail_machine(
        self, host: Host, back_at: float | None, then: Callable[[float], None] | None, now: float
    ) -> None:
        """Ends all processes of a machine; its workers join again when it is back."""
        simulator, name = self._simulator, host.host
        self.dead_hosts.add(name)
        for worker in self._workers.get(name, ()):
            step = simulator.steps_of_worker(worker)
            text = f"worker {worker} ({name}) died at step {step}"
            self.end_worker(worker, text, now, noticed_s=SILENCE_S, restart=False)
        for server in self._servers_on(name):
            text = f"server {server} ({name}) died"
            notice = partial(self._notice_server, server, text)
            simulator.timeline.schedule(now + SILENCE_S, notice)
        if back_at is not None:
            # A machine that returns at once is started again when its loss has been noticed.
            at = max(back_at, now + SILENCE_S)
            simulator.timeline.schedule(at, partial(self._return_machine, host))
            if then is not None:
                then(at)

    def _servers_on(self, name: str) -> list[int]:
        hosts = self._simulator.fleet.servers
        return [server for server, host in enumerate(hosts) if host.host == name]

    def _notice_server(self, server: int, text: str, now: float) -> None:
        simulator, coordinator = self._simulator, self._simulator.coordinator
        if simulator.end is not None:
            return
        if not coordinator.can_lose_server(server):
            simulator.fail(text, now)
            return
        serving = simulator.views.serving
        simulator.execute(coordinator.lose_server(server, text, now), now)
        serving.resume_servers()

    def _return_machine(self, host: Host, now: float) -> None:
        self.dead_hosts.discard(host.host)
        for worker in self._workers.get(host.host, ()):
            self._start(worker, now)
        startup_s = STARTUP_S if host.startup_s is None else host.startup_s
        for server in self._servers_on(host.host):
            ready = partial(self._be_ready_to_serve, server)
            self._simulator.timeline.schedule(now + startup_s, ready)

    def _be_ready_to_serve(self, server: int, now: float) -> None:
        if self._simulator.fleet.servers[server].host not in self.dead_hosts:
            self._simulator.handle(ServerReady(server, "virtual", 1), now)

    def end_worker(
        self,
        worker: int,
        text: str,
        now: float,
        *,
        noticed_s: float = EXIT_S,
        restart: bool = True,
    ) -> None:
        """Ends a worker, which is noticed after `noticed_s`."""
        simulator = self._simulator
        if worker in self.died_at:
            return
        self.died_at[worker] = now
        rank = simulator.rank_of.get(worker)
        if rank is not None:
            simulator.simulation.lose(rank, now)
        notice = partial(self._notice, worker, text, restart)
        simulator.timeline.schedule(now + noticed_s, notice)

    def _notice(self, worker: int, text: str, restart: bool, now: float) -> None:
        simulator, coordinator = self._simulator, self._simulator.coordinator
        if simulator.end is not None:
            return
        delay_s = self._restarts.next_delay_s(f"worker-{worker}", text) if restart else None
        returns = delay_s is not None
        if restart and not returns and (why := self._restarts.why_excluded(f"worker-{worker}")):
            text = f"{text}; {why}"
        if not coordinator.can_lose(worker, returns=returns):
            simulator.fail(text, now)
            return
        if delay_s is not None:
            simulator.timeline.schedule(now + delay_s, partial(self._start, worker))
        simulator.execute(coordinator.lose(worker, text, now, returns=returns), now)

    def _start(self, worker: int, now: float) -> None:
        """Starts a lost worker again, which then joins the run."""
        simulator = self._simulator
        host = simulator.host_of(worker)
        if host.host in self.dead_hosts:
            return
        self.died_at.pop(worker, None)
        start = self._starts[worker] = self._starts.get(worker, 0) + 1
        simulator.fleet.heal(worker)
        simulator.views.joining.add(worker)
        simulator.coordinator.members.add(worker, now)
        startup_s = STARTUP_S if host.startup_s is None else host.startup_s
        simulator.timeline.schedule(now + startup_s, partial(self._be_ready, worker, start))

    def _be_ready(self, worker: int, start: int, now: float) -> None:
        simulator = self._simulator
        if worker in self.died_at or self._starts[worker] != start:
            return
        simulator.handle(describe_worker(simulator.work, worker, 0.0), now)
