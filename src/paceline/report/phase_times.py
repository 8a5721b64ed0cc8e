"""Seconds by worker and phase, averaged over runs."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.run_loader import ReportRun


def average_phases(runs: Sequence[ReportRun]) -> dict[str, dict[str, float]]:
    """Mean seconds a worker and phase over the runs that are done, else over all of them."""
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
