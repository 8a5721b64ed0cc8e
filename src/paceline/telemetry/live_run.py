"""State of a run in progress: metrics of the last minute, totals per process, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from paceline.telemetry import events as ev
from paceline.telemetry.reader import RunRecord
from paceline.telemetry.schema import ProcessResources, RunConfig
from paceline.telemetry.verdicts import LIVE_S, Verdict, verdicts

METRICS_KEPT = 75
"""Metrics events kept per process: one per second."""
CLEAR_AFTER_MISSES = 3
"""Number of consecutive checks without a match after which a verdict is cleared."""


@dataclass
class ResourceTotals:
    """Resource usage of a process so far."""

    seconds: float = 0.0
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    run_wait_s: float = 0.0
    throttled_s: float = 0.0
    cpu_peak: float = 0.0
    """CPU cores in the busiest second."""
    rss_sum: float = 0.0
    rss_peak: int = 0
    net_in: int = 0
    net_out: int = 0
    net_in_peak: float = 0.0
    net_out_peak: float = 0.0
    """Bytes per second."""
    disk_read: int = 0
    disk_write: int = 0
    steps: int = 0
    samples: int = 0

    def add(self, event: ev.ProcessMetrics) -> None:
        dt = event.dt
        self.seconds += dt
        self.cpu_user_s += event.cpu_user
        self.cpu_system_s += event.cpu_system
        self.run_wait_s += event.run_wait
        self.throttled_s += event.throttled
        self.rss_sum += event.rss * dt
        self.rss_peak = max(self.rss_peak, event.rss)
        for name in ("net_in", "net_out", "disk_read", "disk_write", "steps", "samples"):
            setattr(self, name, getattr(self, name) + getattr(event, name))
        if dt >= 0.5:  # The last window may be too short for a rate.
            self.cpu_peak = max(self.cpu_peak, (event.cpu_user + event.cpu_system) / dt)
            self.net_in_peak = max(self.net_in_peak, event.net_in / dt)
            self.net_out_peak = max(self.net_out_peak, event.net_out / dt)

    def describe(self) -> ProcessResources:
        whole = max(self.seconds, 1e-9)
        values = {
            **vars(self),
            "cpu_mean": (self.cpu_user_s + self.cpu_system_s) / whole,
            "rss_mean": int(self.rss_sum / whole),
        }
        digits = {"cpu_mean": 4, "cpu_peak": 4, "net_in_peak": 1, "net_out_peak": 1}
        names = ProcessResources.__annotations__
        described = {name: round(values[name], digits.get(name, 6)) for name in names}
        return cast(ProcessResources, described)


class LiveRun:
    """Collects events of all processes and reports changes of verdicts."""

    def __init__(self, config: RunConfig) -> None:
        self.record = RunRecord(config=config, keep=METRICS_KEPT)
        self.totals: dict[str, ResourceTotals] = {}
        self.active_verdicts: dict[tuple[str, str], Verdict] = {}
        """Current verdicts by rule and subject."""
        self._not_found: dict[tuple[str, str], int] = {}
        self.progress: ev.RunProgress | None = None
        """The latest totals from the coordinator."""

    def add(self, process: str, event: ev.Event) -> None:
        self.record.add(process, event)
        if isinstance(event, ev.ProcessMetrics):
            self.totals.setdefault(process, ResourceTotals()).add(event)

    def changed_verdicts(self, now_s: float) -> list[ev.VerdictChanged]:
        """Returns the verdicts that began or were cleared since the last call."""
        found = {v.key: v for v in verdicts(self.record, last_s=LIVE_S)}
        changes = []
        for key, verdict in found.items():
            if key not in self.active_verdicts:
                changes.append(verdict.to_event(now_s, ev.VERDICT_BEGAN))
            self.active_verdicts[key] = verdict
            self._not_found.pop(key, None)
        for key in [k for k in self.active_verdicts if k not in found]:
            self._not_found[key] = self._not_found.get(key, 0) + 1
            if self._not_found[key] >= CLEAR_AFTER_MISSES:
                changes.append(self.active_verdicts.pop(key).to_event(now_s, ev.VERDICT_OVER))
                del self._not_found[key]
        return changes
