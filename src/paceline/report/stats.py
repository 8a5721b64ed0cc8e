"""Mean and spread over seeds, tests of whether two strategies differ, and rates."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, TypeVar

from paceline.telemetry.schema import as_finite

T = TypeVar("T")

SIGNIFICANCE_LEVEL = 0.05
"""Differences with a smaller p-value are reported as significant."""
RATE_WINDOW_S = 30.0
"""The time left is estimated from the recent rate, which changes with a switch."""


class Spread(TypedDict):
    """A metric over seeds. `std` is None with fewer than two values, which is not a spread of 0."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    n: int


def group_by(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Returns the items by key, in the order of the first of each group."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def mean_of(spread: Spread) -> float:
    """Returns the mean of a spread that is known to have one."""
    assert spread["mean"] is not None
    return spread["mean"]


def mean_and_std(values: Iterable[object]) -> Spread:
    """Returns mean, sample standard deviation, min, max and count of the finite numbers."""
    numbers = [x for x in map(as_finite, values) if x is not None]
    n = len(numbers)
    mean = math.fsum(numbers) / n if n else None
    std = None
    if n > 1 and mean is not None:
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (n - 1))
    low, high = min(numbers, default=None), max(numbers, default=None)
    return {"mean": mean, "std": std, "min": low, "max": high, "n": n}


def ratio_or_none(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def difference_or_none(a: float | None, b: float | None) -> float | None:
    return a - b if a is not None and b is not None else None


def welch_test(
    a: Spread, b: Spread, *, comparisons: int = 1
) -> tuple[float, float | None, bool | None]:
    """Returns the difference (a - b), its p-value, and whether it is significant.

    Welch's t test with a Bonferroni correction for the number of comparisons. P-value and
    significance are None if a side has fewer than two seeds. Both means must be known.
    """
    difference = mean_of(a) - mean_of(b)
    if a["std"] is None or b["std"] is None:
        return difference, None, None
    part_a, part_b = a["std"] ** 2 / a["n"], b["std"] ** 2 / b["n"]
    if part_a + part_b == 0:
        return difference, float(difference == 0), difference != 0
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (a["n"] - 1) + part_b**2 / (b["n"] - 1))
    t = abs(difference) / math.sqrt(part_a + part_b)
    p_value = min(1.0, 2 * student_t_tail(t, freedom) * comparisons)
    return difference, p_value, p_value < SIGNIFICANCE_LEVEL


def student_t_tail(t: float, freedom: float, *, intervals: int = 400) -> float:
    """Returns P(T > t) for Student's T: Simpson's rule with t = sqrt(freedom) tan(x)."""
    low, high = math.atan(t / math.sqrt(freedom)), math.pi / 2
    width = (high - low) / intervals
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)

    def density(x: float) -> float:
        return math.pow(max(math.cos(x), 0.0), freedom - 1)

    total = density(low) + density(high)
    total += math.fsum((4 if i % 2 else 2) * density(low + i * width) for i in range(1, intervals))
    return math.exp(log_scale) / math.sqrt(math.pi) * total * width / 3


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolates linearly between the points; constant beyond the ends."""
    if x <= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        if x <= xs[i]:
            span = xs[i] - xs[i - 1]
            share = (x - xs[i - 1]) / span if span > 0 else 1.0
            return ys[i - 1] + share * (ys[i] - ys[i - 1])
    return ys[-1]


class RecentRate:
    """Rate of a counter over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, at_s: float, count: int) -> None:
        if self._points and count < self._points[-1][1]:
            self._points.clear()  # Rolled back to a checkpoint: the old points are invalid.
        self._points.append((at_s, count))
        while len(self._points) > 2 and at_s - self._points[0][0] > RATE_WINDOW_S:
            self._points.popleft()

    @property
    def per_second(self) -> float | None:
        """None before there are two points in time."""
        if not self._points:
            return None
        (began, first), (ended, last) = self._points[0], self._points[-1]
        return (last - first) / (ended - began) if ended > began else None
