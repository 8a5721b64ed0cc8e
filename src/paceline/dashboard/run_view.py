"""Follows one run and aggregates its events for the dashboard page."""

from __future__ import annotations

import base64
import functools
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.dashboard.time_bins import Array, DownsampledCurve, TimeBins
from paceline.report.event_text import describe_event
from paceline.telemetry.events import (
    PHASES,
    CheckpointSaved,
    EpochEnded,
    EpochRow,
    Event,
    HostMetrics,
    ProcessMetrics,
    RunEnded,
    RunProgress,
    ServerEnded,
    ServerStarted,
    StepSummary,
    StepWindow,
    StrategyStarted,
    StrategySwitched,
    SwitchDecided,
    VerdictChanged,
    WorkerEnded,
    WorkerStarted,
)
from paceline.telemetry.numbers import as_finite
from paceline.telemetry.reader import RunReader
from paceline.telemetry.run_folder import COORDINATOR, RunFolder
from paceline.telemetry.schema import RunConfig
from paceline.telemetry.steps import phase_names, window_seconds

AMOUNTS = ("cpu_user", "cpu_system", "cpu_wait", "run_wait", "net_in", "net_out",
           "disk_read", "disk_write", "steps", "samples")  # fmt: skip
"""Fields of `ProcessMetrics` that are summed per bin and shown per second."""

HOST_AMOUNTS = ("cpu_user", "cpu_system", "cpu_iowait", "cpu_steal", "cpu_idle",
                   "net_in", "net_out", "loopback", "disk_read", "disk_write")  # fmt: skip

LATE_BINS = 4
"""Number of recent bins that may still change, because processes write in turn."""

READ_BYTES = 4_000_000
"""Read per file and round, so that a large run does not delay the others."""

HUGE_BYTES = 64_000_000
"""Single steps are skipped if the event files are larger than this in total."""

EVENTS_KEPT = 400


Payload = dict[str, object]
"""A JSON object for the page; app.js reads its keys."""


@dataclass
class ProcessState:
    """State of a process on the page."""

    last_event_s: float | None = None
    ended: bool = False
    has_phases: bool = False
    """True if its metrics have time categories, so that steps need not be summed."""


class RunView:
    """Everything shown of one run: `poll` reads new events, `payload` returns what is new."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.viewed_s = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self.bins = TimeBins()
        self.loss = DownsampledCurve()
        self.history: dict[int, EpochRow] = {}
        self.switches: dict[int, StrategySwitched] = {}
        self.marks: list[Payload] = []
        self.verdicts: dict[tuple[str, str], Payload] = {}
        self.staleness: Counter[int] = Counter()
        self.processes: dict[str, ProcessState] = {}
        self.memory_totals: dict[str, int] = {}
        self._windows: dict[str, float] = {}
        huge = self.folder.event_bytes() > HUGE_BYTES
        self._reader = RunReader(self.folder.path, skip={StepWindow} if huge else ())
        self.born = time.time_ns()
        """Distinguishes a run from another one in the same folder."""

    # Reading

    def poll(self, budget_s: float = 0.5) -> bool:
        """Reads new events for up to `budget_s`; returns whether all were read."""
        due = time.monotonic() + budget_s
        while True:
            events = list(self._reader.poll(READ_BYTES))
            if self._reader.restarted:
                self._begin()
                continue
            for process, event in events:
                self._add(event, process)
            if self._reader.read_fraction >= 1.0:
                return True
            if time.monotonic() > due:
                return False

    def _process(self, process: str) -> ProcessState:
        return self.processes.setdefault(process, ProcessState())

    @functools.singledispatchmethod
    def _add(self, event: Event, process: str) -> None:
        """Events without a view of their own are not shown."""

    @_add.register
    def _(self, event: RunProgress, process: str) -> None:
        self.loss.add([event.t, event.samples, event.updates, as_finite(event.loss)])

    @_add.register
    def _(self, event: EpochEnded, process: str) -> None:
        self.history[event.row.epoch] = event.row

    @_add.register
    def _(self, event: StrategySwitched, process: str) -> None:
        self.switches[event.row.samples] = event
        self._mark(event)

    @_add.register
    def _(self, event: VerdictChanged, process: str) -> None:
        key = event.rule, event.who
        if event.is_over:
            self.verdicts.setdefault(key, event.to_plain())["over_t"] = event.t
        else:
            self.verdicts[key] = event.to_plain()
        self._mark(event)

    @_add.register(StrategyStarted)
    @_add.register(SwitchDecided)
    @_add.register(CheckpointSaved)
    @_add.register(RunEnded)
    def _mark(self, event: Event, process: str = COORDINATOR) -> None:
        self.marks.append({"t": event.t, "kind": event.kind, "text": describe_event(event)})
        del self.marks[:-EVENTS_KEPT]

    @_add.register(WorkerEnded)
    @_add.register(ServerEnded)
    def _(self, event: WorkerEnded | ServerEnded, process: str) -> None:
        self._process(process).ended = True

    @_add.register(WorkerStarted)
    @_add.register(ServerStarted)
    def _(self, event: WorkerStarted | ServerStarted, process: str) -> None:
        self._process(process)

    @_add.register
    def _(self, event: ProcessMetrics, process: str) -> None:
        state = self._process(process)
        t, dt = event.t, event.dt
        if event.phases:
            state.has_phases = True
            self.bins.add(("phases", process), t, dt, [us / 1e6 for us in event.phases])
        amounts = [as_finite(getattr(event, name)) or 0.0 for name in AMOUNTS]
        self.bins.add(("amounts", process), t, dt, [*amounts, dt])
        self.bins.set_max(("rss", process), t - dt / 2, [float(event.rss)])
        state.last_event_s = t

    @_add.register
    def _(self, event: HostMetrics, process: str) -> None:
        host = event.host or process
        amounts = [as_finite(getattr(event, name)) or 0.0 for name in HOST_AMOUNTS]
        t, dt = event.t, event.dt
        self.bins.add(("machine", host), t, dt, [*amounts, dt])
        self.bins.set_max(("memory", host), t - dt / 2, [float(event.memory_used)])
        self.memory_totals[host] = event.memory_total

    @_add.register(StepWindow)
    @_add.register(StepSummary)
    def _(self, event: StepWindow | StepSummary, process: str) -> None:
        state = self._process(process)
        t = event.t
        began = event.began or self._windows.get(process, t - 1.0)
        self._windows[process] = t
        if not state.has_phases:
            # A run without metrics, of an older version: take the time categories of its steps.
            seconds = window_seconds(event)
            self.bins.add(("phases", process), t, t - began, [seconds.get(n, 0.0) for n in PHASES])
            state.last_event_s = t
        counts = Counter(count_staleness(event))
        if counts:
            total = float(sum(lag * n for lag, n in counts.items()))
            self.bins.add("staleness", t, t - began, [total, float(sum(counts.values()))])
            self.bins.set_max("stalest", t, [float(max(counts))])
            self.staleness.update(counts)

    # Payloads

    def payload(self, *, generation: str, first: int, who: str | None) -> Payload:
        """Returns what is new for a page that has the bins up to `first` of a generation."""
        now = f"{self.born}.{self.bins.generation}"
        start = max(0, min(first, self.bins.used) - LATE_BINS) if generation == now else 0
        return {
            "generation": now,
            "width_s": self.bins.width_s,
            "from": start,
            "bins": self.bins.used,
            "reading": round(self._reader.read_fraction, 3),
            "timeline": self._make_timeline(start),
            "resources": self._make_resources(start, who),
            "machines": self._make_machines(start),
            "staleness": self._make_staleness(start),
            "loss": self.loss.list_points(),
            "history": [row.to_plain() for row in self.history.values()],
            "switches": [{**e.row.to_plain(), "t": e.t} for e in self.switches.values()],
            "marks": self.marks[-EVENTS_KEPT:],
            "verdicts": list(self.verdicts.values()),
        }

    def list_missing(self, config: RunConfig) -> list[str]:
        """Describes missing or incomplete event files of a run that is no longer in progress."""
        tails = self._reader.tails
        found = [problem for _, tail in sorted(tails.items()) for problem in tail.list_problems()]
        if config.get("virtual"):
            return found
        expected = [f"worker-{k}" for k in range(int(as_finite(config.get("workers")) or 0))]
        return found + [
            f"events/{process}.jsonl is missing"
            for process in (COORDINATOR, *expected)
            if process not in tails
        ]

    def list_processes(self) -> list[str]:
        def order(who: str) -> tuple[int, int]:
            role, _, number = who.partition("-")
            return ("worker", "server", "run").index(role), int(number or 0)

        known = [w for w in self.processes if w == "run" or w.startswith(("worker-", "server-"))]
        return sorted(known, key=order)

    def _make_timeline(self, start: int) -> list[Payload]:
        """Returns the bins of each process: time categories as fractions of the bin, times 255."""
        rows: list[Payload] = []
        for who in self.list_processes():
            table = self.bins.sums(("phases", who), start)
            if table is None:
                continue
            shares = np.clip(np.rint(table / self.bins.width_s * 255), 0, 255).astype(np.uint8)
            names = phase_names(who)
            rows.append(
                {
                    "who": who,
                    "phases": names[: shares.shape[1]],
                    "shares": base64.b64encode(shares.tobytes()).decode("ascii"),
                    "totals": [round(float(x), 3) for x in self._total_phases(who)],
                    "heard_s": self.processes[who].last_event_s,
                    "ended": self.processes[who].ended,
                }
            )
        return rows

    def timeline_totals(self) -> Payload:
        """Returns [time categories, seconds] per process."""
        found: Payload = {}
        for who in self.list_processes():
            if self.bins.sums(("phases", who)) is not None:
                totals = [round(float(x), 3) for x in self._total_phases(who)]
                found[who] = [phase_names(who)[: len(totals)], totals]
        return found

    def _total_phases(self, who: str) -> Array:
        table = self.bins.sums(("phases", who))
        assert table is not None
        total: Array = table.sum(axis=0)
        return total

    def _make_resources(self, start: int, chosen: str | None) -> Payload:
        """Returns the minimum, mean and maximum over the processes of each role, per bin."""
        roles: dict[str, list[str]] = {}
        for who in self.list_processes():
            roles.setdefault(who.partition("-")[0], []).append(who)
        payload: Payload = {}
        for role, members in roles.items():
            series = [s for s in (self._rates(who, start) for who in members) if s is not None]
            if series:
                payload[role] = {"count": len(series), **min_mean_max(series)}
        if chosen is not None:
            rates = self._rates(chosen, start)
            if rates is not None:
                payload["chosen"] = {"who": chosen, **min_mean_max([rates])}
        return payload

    def _rates(self, who: str, start: int) -> dict[str, Array] | None:
        table = self.bins.sums(("amounts", who), start)
        memory = self.bins.peaks(("rss", who), start)
        if table is None or memory is None:
            return None
        seconds = table[:, -1]
        safe = np.where(seconds > 1e-6, seconds, np.nan)
        per = {name: table[:, i] / safe for i, name in enumerate(AMOUNTS)}
        return {
            "cpu": per["cpu_user"] + per["cpu_system"],
            "cpu_wait": per["cpu_wait"],
            "run_wait": per["run_wait"],
            "memory": np.where(memory[:, 0] > 0, memory[:, 0], np.nan),
            "net_in": per["net_in"],
            "net_out": per["net_out"],
            "disk": per["disk_read"] + per["disk_write"],
            "steps": per["steps"],
        }

    def _make_machines(self, start: int) -> list[Payload]:
        rows = []
        for host, memory_total in sorted(self.memory_totals.items()):
            table = self.bins.sums(("machine", host), start)
            memory = self.bins.peaks(("memory", host), start)
            if table is None or memory is None:
                continue
            seconds = np.where(table[:, -1] > 1e-6, table[:, -1], np.nan)
            per = {name: table[:, i] / seconds for i, name in enumerate(HOST_AMOUNTS)}
            busy = per["cpu_user"] + per["cpu_system"] + per["cpu_iowait"] + per["cpu_steal"]
            rows.append(
                {
                    "host": host,
                    "memory_total": memory_total,
                    "busy": round_for_json(busy / np.maximum(busy + per["cpu_idle"], 1e-9)),
                    "memory": round_for_json(np.where(memory[:, 0] > 0, memory[:, 0], np.nan)),
                    "net_in": round_for_json(per["net_in"]),
                    "net_out": round_for_json(per["net_out"]),
                    "loopback": round_for_json(per["loopback"]),
                }
            )
        return rows

    def _make_staleness(self, start: int) -> Payload:
        table, most = self.bins.sums("staleness", start), self.bins.peaks("stalest", start)
        if table is None or most is None:
            return {"mean": [], "max": [], "histogram": {}}
        count = np.where(table[:, 1] > 0, table[:, 1], np.nan)
        return {
            "mean": round_for_json(table[:, 0] / count),
            "max": round_for_json(np.where(table[:, 1] > 0, most[:, 0], np.nan)),
            "histogram": {str(lag): n for lag, n in sorted(self.staleness.items())},
        }


def count_staleness(window: StepWindow | StepSummary) -> dict[int, int]:
    """Returns the number of gradients by staleness."""
    if isinstance(window, StepSummary):
        counts = {int(lag): n for lag, n in window.staleness.items() if lag.isdigit()}
    else:
        counts = Counter(lag for lag in window.staleness if lag >= 0)
    return {lag: n for lag, n in counts.items() if n}


def min_mean_max(series: list[dict[str, Array]]) -> Payload:
    payload: Payload = {}
    for name in series[0]:
        stack = np.stack([one[name] for one in series])
        known = ~np.isnan(stack)
        count = known.sum(axis=0)
        has = count > 0
        mean = np.where(known, stack, 0.0).sum(axis=0) / np.maximum(count, 1)
        payload[name] = {
            "least": round_for_json(
                np.where(has, np.where(known, stack, np.inf).min(axis=0), np.nan)
            ),
            "mean": round_for_json(np.where(has, mean, np.nan)),
            "most": round_for_json(
                np.where(has, np.where(known, stack, -np.inf).max(axis=0), np.nan)
            ),
        }
    return payload


def round_for_json(values: Array) -> list[float | None]:
    """Rounds to four significant digits; None for unknown values."""
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in values.tolist()]
