"""Samples to a validation accuracy, from the learning curves of earlier runs of a job."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from paceline.errors import UsageError

Points = tuple[tuple[int, float], ...]
"""Samples trained and validation accuracy after each epoch of one run."""

Z_90 = NormalDist().inv_cdf(0.95)
"""Half-width of a 90% interval, in standard deviations."""
SEED_FRACTION = 0.83
"""Standard deviation between seeds relative to the standard error of one validation.

The root mean square over 25 simulated jobs with three seeds each, which ranged from 0.27 to 1.9. It
is below 1 because the runs share their validation data.
"""


@dataclass(frozen=True)
class LearningCurve:
    """Runs of a job that differ in their seeds. Accuracies are means over the runs."""

    runs: tuple[Points, ...]
    validation_samples: int

    @property
    def mean(self) -> list[tuple[float, float]]:
        return [
            (statistics.fmean(s for s, _ in same), statistics.fmean(a for _, a in same))
            for same in zip(*self.runs, strict=False)
        ]

    @property
    def best(self) -> float:
        return max(accuracy for _, accuracy in self.mean)

    def samples_to(self, target: float) -> float:
        """Returns the samples at which the best accuracy so far reaches `target`, or infinity.

        Values between validations are interpolated.
        """
        best, before = 0.0, 0.0
        for samples, accuracy in self.mean:
            if accuracy >= target:
                share = (target - best) / (accuracy - best) if accuracy > best else 0.0
                return before + share * (samples - before)
            best, before = max(best, accuracy), samples
        return math.inf

    def interval(self, target: float) -> tuple[float, float]:
        """Returns the 90% interval of the samples to `target` in a further run.

        The accuracies of a further run and of the mean of n runs differ by a standard deviation of
        s sqrt(1 + 1/n), where s is that of one run near the target.
        """
        margin = Z_90 * self._deviation(target) * math.sqrt(1 + 1 / len(self.runs))
        return self.samples_to(target - margin), self.samples_to(target + margin)

    def _deviation(self, target: float) -> float:
        """Returns the standard deviation of one run's accuracy around the mean near `target`.

        It is taken from the validations next to the one that reaches the target. One run does not
        show it: then it is assumed from the standard error of one validation.
        """
        if len(self.runs) < 2:
            sampling = math.sqrt(max(0.0, target * (1 - target)) / self.validation_samples)
            return SEED_FRACTION * sampling
        reached = [place for place, (_, a) in enumerate(self.mean) if a >= target]
        place = reached[0] if reached else len(self.mean) - 1
        columns = list(zip(*self.runs, strict=False))[max(0, place - 1) : place + 2]
        return math.sqrt(
            statistics.fmean(statistics.variance(a for _, a in same) for same in columns)
        )


@dataclass(frozen=True)
class AccuracyGoal:
    """A validation accuracy to reach, and what is known about how many samples that takes."""

    target: float
    curve: LearningCurve


def read_run(path: Path) -> Points:
    """Reads the curve of a run folder. Raises UsageError if it has none."""
    try:
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
        points = curve_points(result["history"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"--like {path} is not a finished run; it must contain a result.json"
        ) from None
    if not points:
        raise UsageError(f"--like {path}: the run has no validation accuracies; choose another")
    return points


def curve_points(history: Sequence[Mapping[str, Any]]) -> Points:
    """Returns the validated epochs of a result's `history`."""
    return tuple((int(h["samples"]), h["val_acc"]) for h in history if h["val_acc"] is not None)
