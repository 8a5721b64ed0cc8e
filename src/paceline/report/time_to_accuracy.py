"""Time to a target accuracy, which whole runs that end at different accuracies hide."""

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
    """When the runs of one strategy first had the target at the end of an epoch."""

    label: str
    seconds: Spread
    samples: Spread
    updates: Spread
    reached: int
    runs: int


def choose_target_accuracy(task: RunGroup) -> float | None:
    """The highest half percent of validation accuracy that every strategy's runs all reached."""
    best = [find_best(run) for run in task.runs if run.is_done]
    known = [value for value in best if value is not None]
    if not known or len(known) < len(best):
        return None
    # In half percents: a target that reads like one, not the worst run's very last digit.
    return math.floor(min(known) * 200 + 1e-9) / 200


def find_best(run: ReportRun) -> float | None:
    values = [as_finite(row.get("val_acc")) for row in run.history]
    return max((value for value in values if value is not None), default=None)


def time_to_accuracy_rows(task: RunGroup, target: float) -> list[TimeToAccuracy]:
    """By strategy, over the runs that are done; one that never got there is only counted."""
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
    """Those whose runs all got there, quickest first."""
    whole = [row for row in rows if row.runs and row.reached == row.runs]
    return sorted(whole, key=lambda row: mean_of(row.seconds))
