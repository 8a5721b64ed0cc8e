"""One run followed: what its files append, summed up into what a page can show."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.dashboard.time_bins import Array, DownsampledCurve, TimeBins
from paceline.report.stats import as_finite
from paceline.telemetry.events import PHASES, SERVER_PHASES
from paceline.telemetry.reader import EventTail, Plain, step_seconds
from paceline.telemetry.run_folder import RunFolder

AMOUNTS = ("cpu_user", "cpu_system", "cpu_wait", "run_wait", "net_in", "net_out",
           "disk_read", "disk_write", "steps", "samples")  # fmt: skip
"""Of a process's vitals, what is summed over a bin and shown by the second."""

MACHINE_AMOUNTS = ("cpu_user", "cpu_system", "cpu_iowait", "cpu_steal", "cpu_idle",
                   "net_in", "net_out", "loopback", "disk_read", "disk_write")  # fmt: skip

LATE_BINS = 4
"""Bins behind the newest that may still change: processes write in turn."""

READ_BYTES = 4_000_000
"""Of one file at a time, so that a large run does not hold up the others."""

HUGE_BYTES = 64_000_000
"""Event files larger than this together: single steps are passed over, the vitals tell enough."""

EVENTS_KEPT = 400


class RunView:
    """Everything that is shown of one run; `poll` reads on, `tell` says what is new."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.viewed_s = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self.bins = TimeBins()
        self.loss = DownsampledCurve()
        self.history: dict[Any, Plain] = {}
        self.switches: dict[Any, Plain] = {}
        self.marks: list[Plain] = []
        self.verdicts: dict[tuple[str, str], Plain] = {}
        self.staleness: dict[int, int] = {}
        self.processes: dict[str, Plain] = {}
        self.machines: dict[str, Plain] = {}
        self._followers: dict[str, EventTail] = {}
        self._restarts = 0
        self._windows: dict[str, float] = {}
        self._has_vitals: set[str] = set()
        self.born = time.time_ns()
        """Tells a run from another one in the same folder."""

    # Reading

    def poll(self, budget_s: float = 0.5) -> bool:
        """Read what is new for so long at most; whether all there was has been read."""
        due = time.monotonic() + budget_s
        self._open_files()
        if any(f.restarts for f in self._followers.values()):
            self._begin()
            self._open_files()
        pending = sorted(self._followers, key=lambda who: who != "run")
        while pending:
            left = []
            for who in pending:
                follower = self._followers[who]
                for event in follower.poll(READ_BYTES):
                    self._on_event(who, event)
                if follower.left_bytes > 0:
                    left.append(who)
            pending = left
            if time.monotonic() > due:
                break
        return not pending

    def _open_files(self) -> None:
        found = {p.stem: p for p in self.folder.path.glob("events/*.jsonl")}
        new = set(found) - set(self._followers)
        if not new:
            return
        huge = sum(path.stat().st_size for path in found.values()) > HUGE_BYTES
        skip = (b'{"kind":"steps"',) if huge else ()
        for who in new:
            self._followers[who] = EventTail(found[who], skip=skip)

    @property
    def read_share(self) -> float:
        whole = sum(f.size for f in self._followers.values())
        left = sum(max(0, f.left_bytes) for f in self._followers.values())
        return 1.0 - left / whole if whole else 1.0

    def _on_event(self, who: str, event: Plain) -> None:
        """One event; a strange one is passed over, as the reader of a living file must."""
        try:
            if as_finite(event.get("t")) is None:
                return
            kind = event.get("kind")
            if kind == "vitals":
                self._take_vitals(who, event)
            elif kind == "machine":
                self._take_machine(who, event)
            elif who == "run":
                self._take_run(event)
            elif kind in ("worker", "server"):
                self.processes.setdefault(who, {}).update(
                    {k: event.get(k) for k in ("host", "pid", "threads", "cores", "quota")}
                )
            elif kind in ("steps", "steps_sum"):
                self._take_steps(who, event)
            elif kind in ("worker_ended", "server_ended"):
                self.processes.setdefault(who, {})["ended"] = True
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return

    def _take_run(self, event: Plain) -> None:
        kind, t = event["kind"], event["t"]
        if kind == "progress":
            point = [event.get(k) for k in ("samples", "updates", "loss")]
            self.loss.add([t, *(as_finite(value) for value in point)])
        elif kind == "epoch":
            self.history[event["row"].get("epoch")] = event["row"]
        elif kind == "switch":
            self.switches[event["row"].get("samples")] = {**event["row"], "t": t}
        elif kind == "verdict":
            key = str(event.get("rule")), str(event.get("who"))
            if event.get("state") == "over":
                self.verdicts.setdefault(key, event)["over_t"] = t
            else:
                self.verdicts[key] = {**event}
        if kind in ("phase", "decision", "checkpoint", "ended", "verdict", "switch"):
            self.marks.append(event)
            del self.marks[:-EVENTS_KEPT]

    def _take_vitals(self, who: str, event: Plain) -> None:
        process = self.processes.setdefault(who, {})
        if who not in self._has_vitals and event.get("phases"):
            self._has_vitals.add(who)
        t, dt = event["t"], event["dt"]
        if event.get("phases"):
            self.bins.add(("phases", who), t, dt, [us / 1e6 for us in event["phases"]])
        amounts = [as_finite(event.get(name)) or 0.0 for name in AMOUNTS]
        self.bins.add(("amounts", who), t, dt, [*amounts, dt])
        self.bins.set_max(("rss", who), t - dt / 2, [as_finite(event.get("rss")) or 0.0])
        process["heard_s"] = t

    def _take_machine(self, who: str, event: Plain) -> None:
        host = str(event.get("host") or who)
        amounts = [as_finite(event.get(name)) or 0.0 for name in MACHINE_AMOUNTS]
        t, dt = event["t"], event["dt"]
        self.bins.add(("machine", host), t, dt, [*amounts, dt])
        used = as_finite(event.get("memory_used")) or 0.0
        self.bins.set_max(("memory", host), t - dt / 2, [used])
        self.machines[host] = {"memory_total": event.get("memory_total")}

    def _take_steps(self, who: str, event: Plain) -> None:
        process = self.processes.setdefault(who, {})
        t = event["t"]
        began = event.get("began") or self._windows.get(who, t - 1.0)
        self._windows[who] = t
        if who not in self._has_vitals:
            # A run without vitals (an older one): its steps tell the phases they have.
            seconds = step_seconds(event)
            self.bins.add(("phases", who), t, t - began, [seconds.get(n, 0.0) for n in PHASES])
            process["heard_s"] = t
        counts = event.get("staleness")
        if isinstance(counts, list):
            known = [s for s in counts if isinstance(s, int) and s >= 0]
            if known:
                self.bins.add("staleness", t, t - began, [float(sum(known)), float(len(known))])
                self.bins.set_max("stalest", t, [float(max(known))])
                for lag in set(known):
                    self.staleness[lag] = self.staleness.get(lag, 0) + known.count(lag)
        elif isinstance(counts, dict) and counts:
            lags = {int(lag): int(n) for lag, n in counts.items() if int(lag) >= 0}
            total = sum(lags.values())
            if total:
                mean = float(sum(lag * n for lag, n in lags.items()))
                self.bins.add("staleness", t, t - began, [mean, float(total)])
                self.bins.set_max("stalest", t, [float(max(lags))])
                for lag, n in lags.items():
                    self.staleness[lag] = self.staleness.get(lag, 0) + n

    # Telling

    def payload(self, *, generation: str, first: int, who: str | None) -> Plain:
        """What a page needs that has seen bins up to `first` of a generation."""
        now = f"{self.born}.{self.bins.generation}"
        start = max(0, min(first, self.bins.used) - LATE_BINS) if generation == now else 0
        return {
            "generation": now,
            "width_s": self.bins.width_s,
            "from": start,
            "bins": self.bins.used,
            "reading": round(self.read_share, 3),
            "timeline": self._tell_timeline(start),
            "resources": self._tell_resources(start, who),
            "machines": self._tell_machines(start),
            "staleness": self._tell_staleness(start),
            "loss": self.loss.list_points(),
            "history": list(self.history.values()),
            "switches": list(self.switches.values()),
            "marks": self.marks[-EVENTS_KEPT:],
            "verdicts": list(self.verdicts.values()),
        }

    def list_missing(self, config: Plain) -> list[str]:
        """What is not there or not whole, of a run that is no longer going on."""
        found = []
        for who, follower in sorted(self._followers.items()):
            if follower.torn_bytes:
                found.append(
                    f"events/{who}.jsonl ends in the middle of an event "
                    f"({follower.torn_bytes} bytes without an end)"
                )
            if follower.unreadable:
                found.append(
                    f"events/{who}.jsonl has {follower.unreadable} lines that are no events"
                )
        if config.get("virtual"):
            return found
        if "run" not in self._followers:
            found.append("events/run.jsonl is missing")
        for number in range(int(as_finite(config.get("workers")) or 0)):
            if f"worker-{number}" not in self._followers:
                found.append(f"events/worker-{number}.jsonl is missing")
        return found

    def list_processes(self) -> list[str]:
        def order(who: str) -> tuple[int, int]:
            role, _, number = who.partition("-")
            return ("worker", "server", "run").index(role), int(number or 0)

        known = [w for w in self.processes if w == "run" or w.startswith(("worker-", "server-"))]
        return sorted(known, key=order)

    def _tell_timeline(self, start: int) -> list[Plain]:
        """For each process its bins, each phase as a share of the bin in 255ths, row by row."""
        rows = []
        for who in self.list_processes():
            table = self.bins.sums(("phases", who), start)
            if table is None:
                continue
            shares = np.clip(np.rint(table / self.bins.width_s * 255), 0, 255).astype(np.uint8)
            names = SERVER_PHASES if who.startswith("server-") else PHASES
            rows.append(
                {
                    "who": who,
                    "phases": names[: shares.shape[1]],
                    "shares": base64.b64encode(shares.tobytes()).decode("ascii"),
                    "totals": [round(float(x), 3) for x in self._total_phases(who)],
                    "heard_s": self.processes[who].get("heard_s"),
                    "ended": bool(self.processes[who].get("ended")),
                }
            )
        return rows

    def _total_phases(self, who: str) -> Array:
        table = self.bins.sums(("phases", who))
        assert table is not None
        total: Array = table.sum(axis=0)
        return total

    def _tell_resources(self, start: int, chosen: str | None) -> Plain:
        """For each role the least, the mean and the most of its processes, bin by bin."""
        roles: dict[str, list[str]] = {}
        for who in self.list_processes():
            roles.setdefault(who.partition("-")[0], []).append(who)
        told: Plain = {}
        for role, members in roles.items():
            series = [s for s in (self._rates(who, start) for who in members) if s is not None]
            if series:
                told[role] = {"count": len(series), **min_mean_max(series)}
        if chosen is not None:
            rates = self._rates(chosen, start)
            if rates is not None:
                told["chosen"] = {"who": chosen, **min_mean_max([rates])}
        return told

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

    def _tell_machines(self, start: int) -> list[Plain]:
        rows = []
        for host, facts in sorted(self.machines.items()):
            table = self.bins.sums(("machine", host), start)
            memory = self.bins.peaks(("memory", host), start)
            if table is None or memory is None:
                continue
            seconds = np.where(table[:, -1] > 1e-6, table[:, -1], np.nan)
            per = {name: table[:, i] / seconds for i, name in enumerate(MACHINE_AMOUNTS)}
            busy = per["cpu_user"] + per["cpu_system"] + per["cpu_iowait"] + per["cpu_steal"]
            rows.append(
                {
                    "host": host,
                    "memory_total": facts.get("memory_total"),
                    "busy": round_for_json(busy / np.maximum(busy + per["cpu_idle"], 1e-9)),
                    "memory": round_for_json(np.where(memory[:, 0] > 0, memory[:, 0], np.nan)),
                    "net_in": round_for_json(per["net_in"]),
                    "net_out": round_for_json(per["net_out"]),
                    "loopback": round_for_json(per["loopback"]),
                }
            )
        return rows

    def _tell_staleness(self, start: int) -> Plain:
        table, most = self.bins.sums("staleness", start), self.bins.peaks("stalest", start)
        if table is None or most is None:
            return {"mean": [], "max": [], "histogram": {}}
        count = np.where(table[:, 1] > 0, table[:, 1], np.nan)
        return {
            "mean": round_for_json(table[:, 0] / count),
            "max": round_for_json(np.where(table[:, 1] > 0, most[:, 0], np.nan)),
            "histogram": {str(lag): n for lag, n in sorted(self.staleness.items())},
        }


def min_mean_max(series: list[dict[str, Array]]) -> Plain:
    told: Plain = {}
    for name in series[0]:
        stack = np.stack([one[name] for one in series])
        known = ~np.isnan(stack)
        count = known.sum(axis=0)
        has = count > 0
        mean = np.where(known, stack, 0.0).sum(axis=0) / np.maximum(count, 1)
        told[name] = {
            "least": round_for_json(
                np.where(has, np.where(known, stack, np.inf).min(axis=0), np.nan)
            ),
            "mean": round_for_json(np.where(has, mean, np.nan)),
            "most": round_for_json(
                np.where(has, np.where(known, stack, -np.inf).max(axis=0), np.nan)
            ),
        }
    return told


def round_for_json(values: Array) -> list[float | None]:
    """Numbers with four significant digits, null for what is not known."""
    return [float(f"{x:.4g}") if np.isfinite(x) else None for x in values.tolist()]
