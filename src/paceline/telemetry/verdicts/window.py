"""Sums of a run's metrics over a window: the input of verdict rules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.telemetry.events import (
    PHASES,
    STEP_PHASES,
    HostMetrics,
    ProcessMetrics,
    WorkerStarted,
)
from paceline.telemetry.reader import ProcessRecord, RunRecord
from paceline.telemetry.run_folder import COORDINATOR

MIN_S = 3.0
"""Runs with less training than this are not judged."""
MIN_STEPS = 3
MAX_WINDOW_S = 60.0
"""With long steps, a run in progress is judged by more than its last seconds, up to this many."""
WARM_UP_S = 2.0
"""Ignored at the start of training, while caches, allocators and connections are cold."""

Metrics = TypeVar("Metrics", ProcessMetrics, HostMetrics)


@dataclass
class ProcessWindow:
    """Sums of the metrics of one process over the window."""

    record: ProcessRecord
    dt: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0
    cpu_s: float = 0.0
    run_wait_s: float = 0.0
    main_wait_s: float = 0.0
    throttled_s: float = 0.0
    input_cpu_s: float = 0.0
    gil: list[int] = field(default_factory=lambda: [0] * 5)
    net_out: int = 0
    net_in: int = 0
    net_busy_s: float = 0.0
    net_blocked_s: float = 0.0
    rtt_s: float = 0.0
    rtt_least_s: float = 0.0
    disk_read: int = 0
    queued_s: float = 0.0
    pulls: int = 0

    @property
    def who(self) -> str:
        return self.record.process_name

    @property
    def cores(self) -> list[int]:
        """CPU cores the process may run on; empty if unknown."""
        return self.record.started.cores if self.record.started is not None else []

    @property
    def host(self) -> str | None:
        return self.record.started.host if self.record.started is not None else None

    @property
    def threads(self) -> int:
        started = self.record.started
        return started.threads if isinstance(started, WorkerStarted) else 1

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def step_s(self) -> float:
        """Seconds inside steps, without startup, evaluation and switches."""
        return sum(self.phases.get(name, 0.0) for name in STEP_PHASES)

    def share(self, phase: str) -> float:
        whole = self.step_s
        return self.phases.get(phase, 0.0) / whole if whole > 0 else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward per sample; 0 if none was computed."""
        busy = self.phases.get("forward", 0.0) + self.phases.get("backward", 0.0)
        return busy / self.samples if self.samples else 0.0

    @property
    def compute_with_core_s(self) -> float:
        """`compute_s` without run-queue wait, which is only roughly known."""
        waited = self.main_wait_s / self.samples if self.samples else 0.0
        return max(self.compute_s - waited, 0.2 * self.compute_s)

    @property
    def run_queue_s(self) -> float:
        """Seconds of run-queue wait that a quota does not explain."""
        return max(0.0, self.run_wait_s - self.throttled_s)

    @property
    def share_running(self) -> float:
        """Fraction of the runnable time in which threads were running."""
        wanted = self.cpu_s + max(self.run_wait_s, self.throttled_s)
        return self.cpu_s / wanted if wanted > 0 else 1.0

    def add(self, event: ProcessMetrics) -> None:
        self.dt += event.dt
        for name, seconds in self.record.phase_seconds(event).items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.steps += event.steps
        self.samples += event.samples
        self.cpu_s += event.cpu_user + event.cpu_system
        self.run_wait_s += event.run_wait
        self.main_wait_s += event.main_wait
        self.throttled_s += event.throttled
        self.input_cpu_s += event.input_cpu / 1e6
        self.gil = [a + b for a, b in zip(self.gil, event.gil, strict=False)]
        self.net_out += event.net_out
        self.net_in += event.net_in
        self.net_busy_s += event.net_busy
        self.net_blocked_s += event.net_blocked
        self.rtt_s += event.rtt * event.dt
        self.rtt_least_s = event.rtt_least or self.rtt_least_s
        self.disk_read += event.disk_read
        serving = event.serving or {}
        self.queued_s += serving.get("queued_us", 0) / 1e6
        self.pulls += serving.get("pulls", 0)


@dataclass
class HostWindow:
    """A host and the processes of this run on it."""

    host: str
    processes: list[ProcessWindow]
    dt: float = 0.0
    cores_busy: list[float] = field(default_factory=list)

    @property
    def cores(self) -> list[int]:
        return sorted({c for process in self.processes for c in process.cores})

    @property
    def cores_used(self) -> float:
        """CPU cores used by this run."""
        return sum(process.cpu_s / process.dt for process in self.processes if process.dt)

    @property
    def cores_short(self) -> float:
        """Additional CPU cores this run would use if they were available."""
        return sum(process.run_queue_s / process.dt for process in self.processes if process.dt)

    @property
    def cores_others(self) -> float:
        """CPU cores that other programs use, out of those available to this run."""
        if not self.dt:
            return 0.0
        busy = [self.cores_busy[c] / self.dt for c in self.cores if c < len(self.cores_busy)]
        return max(0.0, sum(busy) - self.cores_used)


@dataclass
class RunWindow:
    """All processes and hosts of a run over the same window; the input of a rule."""

    workers: list[ProcessWindow]
    servers: list[ProcessWindow]
    hosts: list[HostWindow]

    @property
    def exchange(self) -> float:
        """Fraction of a step spent in communication, for the worker that waits least in it."""
        return min((w.share("comm_exposed") for w in self.workers if w.steps), default=0.0)

    def slowness(self, seen: ProcessWindow) -> float | None:
        """Returns how many times slower a worker computes than the median of the others."""
        others = [w.compute_s for w in self.workers if w is not seen and w.compute_s > 0]
        if not others or seen.compute_s <= 0:
            return None
        return seen.compute_s / statistics.median(others)


def summarize_window(run: RunRecord, last_s: float | None) -> RunWindow | None:
    """Sums the metrics of the window; None if it is too short to judge."""
    training = {w.process_name: [v for v in w.metrics if _trains(w, v)] for w in run.workers}
    training_rows = [rows for rows in training.values() if rows]
    if not training_rows:
        return None
    began = min(rows[0].t for rows in training_rows) + WARM_UP_S
    ended = max(rows[-1].t for rows in training_rows)
    if last_s is not None:
        began = max(began, _look_back(training_rows, ended, last_s))
    workers = []
    for worker in run.workers:
        seen = _sum_up(
            worker, [v for v in training[worker.process_name] if v.t - v.dt / 2 >= began]
        )
        if seen.steps:
            workers.append(seen)
    if not workers or max(w.dt for w in workers) < MIN_S:
        return None
    if min(w.steps for w in workers) < MIN_STEPS:
        return None
    # Servers and the coordinator over the same seconds.
    busy = [(v.t - v.dt / 2, v.t) for v in _rows(run.workers, began, ended)]
    inside = (min(a for a, _ in busy), ended) if busy else (began, ended)
    servers = [_sum_up(s, _between(s.metrics, inside)) for s in run.servers]
    rest = [p for who, p in run.processes.items() if who == COORDINATOR]
    others = [_sum_up(p, _between(p.metrics, inside)) for p in rest]
    return RunWindow(workers, servers, _host_windows(run, workers, servers, others, inside))


_STEP = slice(PHASES.index(STEP_PHASES[0]), PHASES.index(STEP_PHASES[-1]) + 1)


def _trains(worker: ProcessRecord, event: ProcessMetrics) -> bool:
    # Called for every metrics event: by index, without names.
    return sum(event.phases[_STEP]) > 0.5e6 * event.dt


def _look_back(training_rows: list[list[ProcessMetrics]], ended: float, last_s: float) -> float:
    """Returns the start of the window: earlier if the last seconds have too few steps."""
    since = ended - last_s
    for rows in training_rows:
        steps = 0
        for event in reversed(rows):
            steps += event.steps
            if steps >= MIN_STEPS:
                since = min(since, event.t - event.dt)
                break
    return max(since, ended - MAX_WINDOW_S)


def _rows(processes: Sequence[ProcessRecord], began: float, ended: float) -> list[ProcessMetrics]:
    return [v for p in processes for v in p.metrics if _trains(p, v) and began <= v.t <= ended]


def _between(rows: Sequence[Metrics], inside: tuple[float, float]) -> list[Metrics]:
    return [v for v in rows if inside[0] <= v.t - v.dt / 2 and v.t <= inside[1] + v.dt]


def _sum_up(record: ProcessRecord, rows: Sequence[ProcessMetrics]) -> ProcessWindow:
    seen = ProcessWindow(record)
    for event in rows:
        seen.add(event)
    if seen.dt:
        seen.rtt_s /= seen.dt
    return seen


def _host_windows(
    run: RunRecord,
    workers: list[ProcessWindow],
    servers: list[ProcessWindow],
    others: list[ProcessWindow],
    inside: tuple[float, float],
) -> list[HostWindow]:
    """Returns the hosts with metrics, each with the processes of this run on it."""
    windows: list[HostWindow] = []
    for who, rows in run.hosts.items():
        measured = _between(rows, inside)
        if not measured:
            continue
        host = measured[-1].host
        if host in {window.host for window in windows}:
            continue  # Two network namespaces of one host.
        on_it = [s for s in (*workers, *servers) if s.host == host]
        if who == COORDINATOR or any(s.who == who for s in on_it):
            # The coordinator counts on the host it samples, or on the only host.
            on_it += [s for s in others if who == COORDINATOR or len(run.hosts) == 1]
        window = HostWindow(host, on_it, dt=sum(m.dt for m in measured))
        columns = zip(*(m.cores_busy for m in measured), strict=False)
        window.cores_busy = [sum(column) for column in columns]
        if window.processes:
            windows.append(window)
    return windows
