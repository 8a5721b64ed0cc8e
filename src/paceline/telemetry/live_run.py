"""A run as its supervisor sees it while it goes on: the last minutes, totals, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.telemetry.events import RunProgress, VerdictChanged
from paceline.telemetry.reader import Plain, RunRecord
from paceline.telemetry.verdicts import LIVE_S, Verdict, verdicts

KEEP = 75
"""Seconds of vitals that are remembered of each process."""
CLEAR_AFTER_MISSES = 3
"""A verdict is over when so many looks in a row did not find it."""


@dataclass
class ResourceTotals:
    """What a process has used so far."""

    seconds: float = 0.0
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    run_wait_s: float = 0.0
    throttled_s: float = 0.0
    cpu_peak: float = 0.0
    """Cores in its busiest second."""
    rss_sum: float = 0.0
    rss_peak: int = 0
    net_in: int = 0
    net_out: int = 0
    net_in_peak: float = 0.0
    net_out_peak: float = 0.0
    """Bytes a second."""
    disk_read: int = 0
    disk_write: int = 0
    steps: int = 0
    samples: int = 0

    def add(self, event: Plain) -> None:
        dt, cpu_s = float(event["dt"]), event["cpu_user"] + event["cpu_system"]
        self.seconds += dt
        self.cpu_user_s += event["cpu_user"]
        self.cpu_system_s += event["cpu_system"]
        self.run_wait_s += event["run_wait"]
        self.throttled_s += event["throttled"]
        self.rss_sum += event["rss"] * dt
        self.rss_peak = max(self.rss_peak, event["rss"])
        for name in ("net_in", "net_out", "disk_read", "disk_write", "steps", "samples"):
            setattr(self, name, getattr(self, name) + event[name])
        if dt >= 0.5:  # The last window of a process may be too short for a rate.
            self.cpu_peak = max(self.cpu_peak, cpu_s / dt)
            self.net_in_peak = max(self.net_in_peak, event["net_in"] / dt)
            self.net_out_peak = max(self.net_out_peak, event["net_out"] / dt)

    def describe(self) -> dict[str, Any]:
        whole = max(self.seconds, 1e-9)
        return {
            "seconds": round(self.seconds, 6),
            "cpu_user_s": round(self.cpu_user_s, 6),
            "cpu_system_s": round(self.cpu_system_s, 6),
            "cpu_mean": round((self.cpu_user_s + self.cpu_system_s) / whole, 4),
            "cpu_peak": round(self.cpu_peak, 4),
            "run_wait_s": round(self.run_wait_s, 6),
            "throttled_s": round(self.throttled_s, 6),
            "rss_mean": int(self.rss_sum / whole),
            "rss_peak": self.rss_peak,
            "net_in": self.net_in,
            "net_out": self.net_out,
            "net_in_peak": round(self.net_in_peak, 1),
            "net_out_peak": round(self.net_out_peak, 1),
            "disk_read": self.disk_read,
            "disk_write": self.disk_write,
        }


def sum_process_metrics(events: Iterable[Plain]) -> ResourceTotals:
    """The totals of recorded vitals, for a run that is read from its folder."""
    totals = ResourceTotals()
    for event in events:
        totals.add(event)
    return totals


class LiveRun:
    """Fed with events as they come; asked for what changed in its verdicts."""

    def __init__(self, config: Plain) -> None:
        self.record = RunRecord(config=config, keep=KEEP)
        self.totals: dict[str, ResourceTotals] = {}
        self.active_verdicts: dict[tuple[str, str], Verdict] = {}
        """Verdicts that hold now, by rule and whom they are about."""
        self._not_found: dict[tuple[str, str], int] = {}
        self.progress: RunProgress | None = None
        """The latest totals from the coordinator."""

    def add(self, who: str, event: Plain) -> None:
        self.record.add(who, event)
        if event.get("kind") == "vitals":
            self.totals.setdefault(who, ResourceTotals()).add(event)

    def changed_verdicts(self, now_s: float) -> list[VerdictChanged]:
        """Verdicts that began or ceased to hold since the last look."""
        found = {v.key: v for v in verdicts(self.record, last_s=LIVE_S)}
        changes = []
        for key, verdict in found.items():
            if key not in self.active_verdicts:
                changes.append(verdict.to_event(now_s, "began"))
            self.active_verdicts[key] = verdict
            self._not_found.pop(key, None)
        for key in [k for k in self.active_verdicts if k not in found]:
            self._not_found[key] = self._not_found.get(key, 0) + 1
            if self._not_found[key] >= CLEAR_AFTER_MISSES:
                changes.append(self.active_verdicts.pop(key).to_event(now_s, "over"))
                del self._not_found[key]
        return changes
