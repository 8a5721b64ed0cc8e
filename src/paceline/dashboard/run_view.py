"""Follows one run and aggregates its events for the dashboard page."""

import base64
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.dashboard.time_bins import Array, DownsampledCurve, TimeBins
from paceline.report.event_text import describe_event
from paceline.telemetry import events as ev
from paceline.telemetry.reader import RunReader
from paceline.telemetry.run_folder import COORDINATOR, RunFolder, process_order
from paceline.telemetry.schema import RunConfig, as_finite
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
        self.history: dict[int, ev.EpochRow] = {}
        self.switches: dict[int, ev.StrategySwitched] = {}
        self.marks: list[Payload] = []
        self.verdicts: dict[tuple[str, str], Payload] = {}
        self.staleness: Counter[int] = Counter()
        self.processes: defaultdict[str, ProcessState] = defaultdict(ProcessState)
        self.memory_totals: dict[str, int] = {}
        self._windows: dict[str, float] = {}
        huge = self.folder.event_bytes() > HUGE_BYTES
        self._reader = RunReader(self.folder.path, skip={ev.StepWindow} if huge else ())
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

    def _add(self, event: ev.Event, process: str) -> None:
        match event:
            case ev.RunProgress():
                self.loss.add([event.t, event.samples, event.updates, as_finite(event.loss)])
            case ev.EpochEnded():
                self.history[event.row.epoch] = event.row
            case ev.StrategySwitched():
                self.switches[event.row.samples] = event
                self._mark(event)
            case ev.VerdictChanged():
                key = event.rule, event.who
                if event.is_over:
                    self.verdicts.setdefault(key, event.to_plain())["over_t"] = event.t
                else:
                    self.verdicts[key] = event.to_plain()
                self._mark(event)
            case (
                ev.StrategyStarted()
                | ev.SwitchDecided()
                | ev.ViewChanged()
                | ev.CheckpointSaved()
                | ev.RunEnded()
            ):
                self._mark(event)
            case ev.WorkerEnded() | ev.ServerEnded():
                self.processes[process].ended = True
            case ev.WorkerStarted() | ev.ServerStarted():
                self.processes[process]  # Listed from its start.
            case ev.ProcessMetrics():
                self._add_process(event, process)
            case ev.HostMetrics():
                host, t, dt = event.host or process, event.t, event.dt
                self.bins.add(("machine", host), t, dt, _amounts(event, HOST_AMOUNTS))
                self.bins.set_max(("machine", host), t - dt / 2, [float(event.memory_used)])
                self.memory_totals[host] = event.memory_total
            case ev.StepWindow() | ev.StepSummary():
                self._add_steps(event, process)

    def _mark(self, event: ev.Event) -> None:
        self.marks.append({"t": event.t, "kind": event.kind, "text": describe_event(event)})
        del self.marks[:-EVENTS_KEPT]

    def _add_process(self, event: ev.ProcessMetrics, process: str) -> None:
        state, t, dt = self.processes[process], event.t, event.dt
        if event.phases:
            state.has_phases = True
            self.bins.add(("phases", process), t, dt, [us / 1e6 for us in event.phases])
        self.bins.add(("process", process), t, dt, _amounts(event, AMOUNTS))
        self.bins.set_max(("process", process), t - dt / 2, [float(event.rss)])
        state.last_event_s = t

    def _add_steps(self, event: ev.StepWindow | ev.StepSummary, process: str) -> None:
        state, t = self.processes[process], event.t
        began = event.began or self._windows.get(process, t - 1.0)
        self._windows[process] = t
        if not state.has_phases:
            # A run without metrics, of an older version: take the time categories of its steps.
            seconds = window_seconds(event)
            self.bins.add(
                ("phases", process), t, t - began, [seconds.get(n, 0.0) for n in ev.PHASES]
            )
            state.last_event_s = t
        counts = count_staleness(event)
        if counts:
            total = float(sum(lag * n for lag, n in counts.items()))
            self.bins.add("staleness", t, t - began, [total, float(sum(counts.values()))])
            self.bins.set_max("staleness", t, [float(max(counts))])
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
        """Returns the workers, then the servers, then the coordinator."""
        return sorted(self.processes, key=lambda who: (who == COORDINATOR, process_order(who)))

    def _make_timeline(self, start: int) -> list[Payload]:
        """Returns the time categories of each process: fractions of a bin times 255, and totals."""
        rows: list[Payload] = []
        for who in self.list_processes():
            table = self.bins.sums(("phases", who))
            if table is None:
                continue
            shares = np.clip(np.rint(table[start:] / self.bins.width_s * 255), 0, 255)
            rows.append(
                {
                    "who": who,
                    "phases": phase_names(who)[: table.shape[1]],
                    "shares": base64.b64encode(shares.astype(np.uint8).tobytes()).decode("ascii"),
                    "totals": [round(float(x), 3) for x in table.sum(axis=0)],
                    "heard_s": self.processes[who].last_event_s,
                    "ended": self.processes[who].ended,
                }
            )
        return rows

    def _make_resources(self, start: int, chosen: str | None) -> Payload:
        """Returns the minimum, mean and maximum over the processes of each role, per bin."""
        roles: dict[str, list[dict[str, Array]]] = {}
        for who in self.list_processes():
            if (rates := self._rates(who, start)) is not None:
                roles.setdefault(who.partition("-")[0], []).append(rates)
        payload: Payload = {
            role: {"count": len(series), **min_mean_max(series)} for role, series in roles.items()
        }
        if chosen is not None and (rates := self._rates(chosen, start)) is not None:
            payload["chosen"] = {"who": chosen, **min_mean_max([rates])}
        return payload

    def _rates(self, who: str, start: int) -> dict[str, Array] | None:
        found = self._per_second(("process", who), AMOUNTS, start)
        if found is None:
            return None
        per, memory = found
        return {
            "cpu": per["cpu_user"] + per["cpu_system"],
            "memory": memory,
            "disk": per["disk_read"] + per["disk_write"],
            **{name: per[name] for name in ("cpu_wait", "run_wait", "net_in", "net_out", "steps")},
        }

    def _per_second(
        self, key: tuple[str, str], names: tuple[str, ...], start: int
    ) -> tuple[dict[str, Array], Array] | None:
        """Returns the named amounts per second, and peak memory; NaN where nothing is known."""
        table, peaks = self.bins.sums(key, start), self.bins.peaks(key, start)
        if table is None or peaks is None:
            return None
        seconds = np.where(table[:, -1] > 1e-6, table[:, -1], np.nan)
        per = {name: table[:, i] / seconds for i, name in enumerate(names)}
        return per, np.where(peaks[:, 0] > 0, peaks[:, 0], np.nan)

    def _make_machines(self, start: int) -> list[Payload]:
        rows = []
        for host, memory_total in sorted(self.memory_totals.items()):
            found = self._per_second(("machine", host), HOST_AMOUNTS, start)
            if found is None:
                continue
            per, memory = found
            busy = per["cpu_user"] + per["cpu_system"] + per["cpu_iowait"] + per["cpu_steal"]
            rows.append(
                {
                    "host": host,
                    "memory_total": memory_total,
                    "busy": round_for_json(busy / np.maximum(busy + per["cpu_idle"], 1e-9)),
                    "memory": round_for_json(memory),
                    **{n: round_for_json(per[n]) for n in ("net_in", "net_out", "loopback")},
                }
            )
        return rows

    def _make_staleness(self, start: int) -> Payload:
        table, most = self.bins.sums("staleness", start), self.bins.peaks("staleness", start)
        if table is None or most is None:
            return {"mean": [], "max": [], "histogram": {}}
        count = np.where(table[:, 1] > 0, table[:, 1], np.nan)
        return {
            "mean": round_for_json(table[:, 0] / count),
            "max": round_for_json(np.where(table[:, 1] > 0, most[:, 0], np.nan)),
            "histogram": {str(lag): n for lag, n in sorted(self.staleness.items())},
        }


def _amounts(event: ev.ProcessMetrics | ev.HostMetrics, names: tuple[str, ...]) -> list[float]:
    return [*(as_finite(getattr(event, name)) or 0.0 for name in names), event.dt]


def count_staleness(window: ev.StepWindow | ev.StepSummary) -> Counter[int]:
    """Returns the number of gradients by staleness."""
    if isinstance(window, ev.StepWindow):
        return Counter(lag for lag in window.staleness if lag >= 0)
    return Counter({int(lag): n for lag, n in window.staleness.items() if lag.isdigit() and n})


def min_mean_max(series: list[dict[str, Array]]) -> Payload:
    payload: Payload = {}
    for name in series[0]:
        stack = np.ma.masked_invalid([one[name] for one in series])
        bands = {"least": stack.min(axis=0), "mean": stack.mean(axis=0), "most": stack.max(axis=0)}
        payload[name] = {key: round_for_json(band.filled(np.nan)) for key, band in bands.items()}
    return payload


def round_for_json(values: Array) -> list[float | None]:
    """Rounds to four significant digits; None for unknown values."""
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in values.tolist()]
