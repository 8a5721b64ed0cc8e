"""Seconds by worker and time category, averaged over runs."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.run_loader import ReportRun


def average_phases(runs: Sequence[ReportRun]) -> dict[str, dict[str, float]]:
    """Returns the means over finished runs, or else over all runs."""
    chosen = [run for run in runs if run.is_done] or list(runs)
    gathered: dict[str, dict[str, list[float]]] = {}
    for run in chosen:
        for worker, phases in run.phases.items():
            for phase, seconds in phases.items():
                gathered.setdefault(worker, {}).setdefault(phase, []).append(seconds)
    return {
        worker: {phase: sum(values) / len(values) for phase, values in phases.items()}
        for worker, phases in gathered.items()
    }
