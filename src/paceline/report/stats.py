"""Mean and spread over seeds, and whether two strategies differ by more than their seeds do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

CHANCE = 0.05
"""How often a difference may be claimed that is not there."""


def as_finite(value: object) -> float | None:
    """The number, or None for what is missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def mean_and_std(values: Iterable[object]) -> dict[str, Any]:
    """Mean, sample standard deviation, min and max of the values that are numbers.

    `std` is None with fewer than two values: one seed has no spread, which is not a spread of 0.
    """
    numbers = [x for x in map(as_finite, values) if x is not None]
    n = len(numbers)
    if n == 0:
        return {"mean": None, "std": None, "min": None, "max": None, "n": 0}
    mean = math.fsum(numbers) / n
    std = None
    if n > 1:
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (n - 1))
    return {"mean": mean, "std": std, "min": min(numbers), "max": max(numbers), "n": n}


def compare_means(
    a: dict[str, Any], b: dict[str, Any], *, comparisons: int = 1
) -> tuple[float, bool | None]:
    """The difference of two means (a - b), and whether the spread of seeds allows to claim it."""
    difference, _, sure = welch_test(a, b, comparisons=comparisons)
    return difference, sure


def welch_test(
    a: dict[str, Any], b: dict[str, Any], *, comparisons: int = 1
) -> tuple[float, float | None, bool | None]:
    """The difference (a - b), how often seeds alone would give one as large, and the verdict.

    Welch's t test; the chance is multiplied by the number of comparisons made at once. Chance and
    verdict are None when a side has fewer than two seeds: then nothing can be said.
    """
    difference = a["mean"] - b["mean"]
    if a["std"] is None or b["std"] is None:
        return difference, None, None
    part_a, part_b = a["std"] ** 2 / a["n"], b["std"] ** 2 / b["n"]
    if part_a + part_b == 0:
        return difference, float(difference == 0), difference != 0
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (a["n"] - 1) + part_b**2 / (b["n"] - 1))
    t = abs(difference) / math.sqrt(part_a + part_b)
    chance = min(1.0, 2 * student_t_tail(t, freedom) * comparisons)
    return difference, chance, chance < CHANCE


def student_t_tail(t: float, freedom: float, *, intervals: int = 400) -> float:
    """P(T > t) for Student's T, by Simpson's rule after substituting t = sqrt(freedom) tan(x)."""
    low, high = math.atan(t / math.sqrt(freedom)), math.pi / 2
    width = (high - low) / intervals
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)

    def density(x: float) -> float:
        return math.pow(max(math.cos(x), 0.0), freedom - 1)

    total = density(low) + density(high)
    total += math.fsum((4 if i % 2 else 2) * density(low + i * width) for i in range(1, intervals))
    return math.exp(log_scale) / math.sqrt(math.pi) * total * width / 3


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at x on the line through the points, held level beyond its two ends."""
    if x <= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        if x <= xs[i]:
            span = xs[i] - xs[i - 1]
            share = (x - xs[i - 1]) / span if span > 0 else 1.0
            return ys[i - 1] + share * (ys[i] - ys[i - 1])
    return ys[-1]
