"""Sums of a run's metrics over a window: the input of verdict rules."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.telemetry.events import PHASES, STEP_PHASES, ProcessMetrics, WorkerStarted
from paceline.telemetry.reader import ProcessRecord, RunRecord
from paceline.telemetry.run_folder import COORDINATOR
from paceline.telemetry.steps import Metrics, merge_metrics

MIN_S = 3.0
"""Runs with less training than this are not judged."""
MIN_STEPS = 3
MAX_WINDOW_S = 60.0
"""With long steps, a run in progress is judged by more than its last seconds, up to this many."""
WARM_UP_S = 2.0
"""Ignored at the start of training, while caches, allocators and connections are cold."""


class ProcessWindow:
    """Metrics of one process over the window, merged into one event."""

    def __init__(self, record: ProcessRecord, rows: Sequence[ProcessMetrics]) -> None:
        self.record, started = record, record.started
        self.who, self.name = record.process_name, record.name
        self.host = started.host if started is not None else None
        self.cores = started.cores if started is not None else []
        """CPU cores the process may run on; empty if unknown."""
        self.threads = started.threads if isinstance(started, WorkerStarted) else 1
        self.sums = merge_metrics(rows) if rows else ProcessMetrics(t=0.0, dt=0.0)
        self.phases = record.phase_seconds(self.sums)
        self.cpu_s = self.sums.cpu_user + self.sums.cpu_system
        self.rtt_s = sum(row.rtt * row.dt for row in rows) / self.sums.dt if self.sums.dt else 0.0
        self.rtt_least_s = next((row.rtt_least for row in reversed(rows) if row.rtt_least), 0.0)

    def per_second(self, amount: str) -> float:
        """Returns an amount of `ProcessMetrics` per second; 0 for an empty window."""
        return float(getattr(self.sums, amount)) / self.sums.dt if self.sums.dt else 0.0

    def share(self, phase: str) -> float:
        """Returns the fraction of a category in the time inside steps."""
        whole = sum(self.phases.get(name, 0.0) for name in STEP_PHASES)
        return self.phases.get(phase, 0.0) / whole if whole > 0 else 0.0

    @property
    def cores_used(self) -> float:
        return self.cpu_s / self.sums.dt if self.sums.dt else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward per sample; 0 if none was computed."""
        busy = self.phases.get("forward", 0.0) + self.phases.get("backward", 0.0)
        return busy / self.sums.samples if self.sums.samples else 0.0

    @property
    def compute_with_core_s(self) -> float:
        """`compute_s` without run-queue wait, which is only roughly known."""
        waited = self.sums.main_wait / self.sums.samples if self.sums.samples else 0.0
        return max(self.compute_s - waited, 0.2 * self.compute_s)

    @property
    def run_queue_s(self) -> float:
        """Seconds of run-queue wait that a quota does not explain."""
        return max(0.0, self.sums.run_wait - self.sums.throttled)

    @property
    def share_running(self) -> float:
        """Fraction of the runnable time in which threads were running."""
        wanted = self.cpu_s + max(self.sums.run_wait, self.sums.throttled)
        return self.cpu_s / wanted if wanted > 0 else 1.0


@dataclass
class HostWindow:
    """A host and the processes of this run on it."""

    host: str
    processes: list[ProcessWindow]
    dt: float
    cores_busy: list[float]

    @property
    def cores(self) -> list[int]:
        return sorted({c for process in self.processes for c in process.cores})

    @property
    def cores_used(self) -> float:
        """CPU cores used by this run."""
        return sum(process.cores_used for process in self.processes)

    @property
    def cores_short(self) -> float:
        """Additional CPU cores this run would use if they were available."""
        running = [process for process in self.processes if process.sums.dt]
        return sum(process.run_queue_s / process.sums.dt for process in running)

    @property
    def share_waiting(self) -> float:
        """Fraction of the runnable time of this run spent waiting for a core."""
        return self.cores_short / (self.cores_used + self.cores_short)

    @property
    def figures(self) -> dict[str, object]:
        """The measurements that verdicts about a host have in common."""
        wanted = self.cores_used + self.cores_short
        used = {"cores_used": round(self.cores_used, 3), "cores_wanted": round(wanted, 3)}
        return {"cores": len(self.cores), **used}

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
        return min((w.share("comm_exposed") for w in self.workers if w.sums.steps), default=0.0)

    def slowness(self, seen: ProcessWindow) -> float | None:
        """Returns how many times slower a worker computes than the median of the others."""
        others = [w.compute_s for w in self.workers if w is not seen and w.compute_s > 0]
        if not others or seen.compute_s <= 0:
            return None
        return seen.compute_s / statistics.median(others)


def summarize_window(run: RunRecord, last_s: float | None) -> RunWindow | None:
    """Sums the metrics of the window; None if it is too short to judge."""
    training = [(worker, [v for v in worker.metrics if _trains(v)]) for worker in run.workers]
    training_rows = [rows for _, rows in training if rows]
    if not training_rows:
        return None
    began = min(rows[0].t for rows in training_rows) + WARM_UP_S
    ended = max(rows[-1].t for rows in training_rows)
    if last_s is not None:
        began = max(began, _look_back(training_rows, ended, last_s))
    windows = [
        ProcessWindow(worker, [v for v in rows if v.t - v.dt / 2 >= began])
        for worker, rows in training
    ]
    workers = [seen for seen in windows if seen.sums.steps]
    if not workers or max(w.sums.dt for w in workers) < MIN_S:
        return None
    if min(w.sums.steps for w in workers) < MIN_STEPS:
        return None
    # Servers and the coordinator over the same seconds.
    busy = [v.t - v.dt / 2 for rows in training_rows for v in rows if v.t >= began]
    inside = min(busy, default=began), ended
    servers = [ProcessWindow(s, _between(s.metrics, inside)) for s in run.servers]
    rest = [p for who, p in run.processes.items() if who == COORDINATOR]
    others = [ProcessWindow(p, _between(p.metrics, inside)) for p in rest]
    return RunWindow(workers, servers, _host_windows(run, [*workers, *servers], others, inside))


_STEP = slice(PHASES.index(STEP_PHASES[0]), PHASES.index(STEP_PHASES[-1]) + 1)


def _trains(event: ProcessMetrics) -> bool:
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


def _between(rows: Sequence[Metrics], inside: tuple[float, float]) -> list[Metrics]:
    return [v for v in rows if inside[0] <= v.t - v.dt / 2 and v.t <= inside[1] + v.dt]


def _host_windows(
    run: RunRecord,
    members: list[ProcessWindow],
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
        on_it = [s for s in members if s.host == host]
        if who == COORDINATOR or any(s.who == who for s in on_it):
            # The coordinator counts on the host it samples, or on the only host.
            on_it += [s for s in others if who == COORDINATOR or len(run.hosts) == 1]
        columns = zip(*(m.cores_busy for m in measured), strict=False)
        if on_it:
            seconds = sum(m.dt for m in measured)
            windows.append(HostWindow(host, on_it, seconds, [sum(c) for c in columns]))
    return windows
