"""Time to accuracy: when runs first reach a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.run_groups import RunGroup
from paceline.report.run_loader import ReportRun
from paceline.report.stats import Spread, as_finite, mean_and_std, mean_of


@dataclass(frozen=True, kw_only=True)
class TimeToAccuracy:
    """Time, samples and updates until the runs of one strategy first reached the target."""

    label: str
    seconds: Spread
    samples: Spread
    updates: Spread
    reached: int
    runs: int


def choose_target_accuracy(task: RunGroup) -> float | None:
    """Returns the highest multiple of 0.5% validation accuracy that all runs reached."""
    best = [find_best(run) for run in task.runs if run.is_done]
    known = [value for value in best if value is not None]
    if not known or len(known) < len(best):
        return None
    # Rounded to a readable target.
    return math.floor(min(known) * 200 + 1e-9) / 200


def find_best(run: ReportRun) -> float | None:
    values = [as_finite(row.get("val_acc")) for row in run.history]
    return max((value for value in values if value is not None), default=None)


def time_to_accuracy_rows(task: RunGroup, target: float) -> list[TimeToAccuracy]:
    """Returns one row per strategy over finished runs; runs without the target are only counted."""
    found = []
    for entry in task.entries:
        runs = [run for run in task.runs_of(entry) if run.is_done]
        rows = [row for run in runs if (row := first_row(run, target)) is not None]
        found.append(
            TimeToAccuracy(
                label=entry["label"],
                seconds=mean_and_std(row.get("seconds") for row in rows),
                samples=mean_and_std(row.get("samples") for row in rows),
                updates=mean_and_std(row.get("updates") for row in rows),
                reached=len(rows),
                runs=len(runs),
            )
        )
    return found


def first_row(run: ReportRun, target: float) -> Mapping[str, Any] | None:
    for row in run.history:
        value = as_finite(row.get("val_acc"))
        if value is not None and value >= target - 1e-12:
            return row
    return None


def fastest(rows: Sequence[TimeToAccuracy]) -> list[TimeToAccuracy]:
    """Returns the rows whose runs all reached the target, fastest first."""
    whole = [row for row in rows if row.runs and row.reached == row.runs]
    return sorted(whole, key=lambda row: mean_of(row.seconds))
