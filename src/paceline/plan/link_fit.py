"""Fits latency and bandwidth to measured collectives, and writes them into a pool.

Every collective takes `messages * a + bytes / B` (`specs.collectives`), which is linear in a and
1 / B. The fit minimizes the sum of absolute relative errors by reweighted least squares: a point
that another program disturbed changes it little, and small messages count as much as large ones.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.pool import Host, Link, Pool
from paceline.specs.collectives import collective_steps

ITERATIONS = 50
LEAST_ERROR = 1e-3
"""Errors below this have equal weights."""
LARGE_BYTES = 100_000
"""From this size on, the error of a fit is reported."""
UNLIMITED_GB_S = 1000.0
"""Rate of processes whose links explain the whole time."""


class Measured(Protocol):
    """One measured collective."""

    @property
    def collective(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def machines(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class LinkFit:
    """Latency of a message and bandwidth of a link, as seen by collectives."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, row: Measured) -> float:
        """Returns the seconds by the formula."""
        steps = collective_steps(row.collective, row.workers, row.machines, row.nbytes)
        return steps.seconds(self.latency_s, self.bytes_per_s)

    def ratio(self, row: Measured) -> float:
        """Returns measured divided by predicted seconds."""
        return row.seconds / max(self.seconds(row), 1e-12)


def held_out_sizes(sizes: Sequence[int]) -> set[int]:
    """Returns the sizes that are not used to fit: every other one, without the extremes."""
    return set(sorted(sizes)[1:-1:2])


def fit_links(rows: Sequence[Measured]) -> LinkFit:
    """Fits latency and bandwidth, which are not negative."""
    points = []
    for row in rows:
        steps = collective_steps(row.collective, row.workers, row.machines, row.nbytes)
        points.append((steps.messages / row.seconds, steps.nbytes / row.seconds))
    weights = [1.0] * len(points)
    latency, per_byte = 0.0, 0.0
    for _ in range(ITERATIONS):
        latency, per_byte = _solve(points, weights)
        errors = [abs(1 - x * latency - y * per_byte) for x, y in points]
        weights = [1 / max(error, LEAST_ERROR) for error in errors]
    return LinkFit(latency, 1 / per_byte if per_byte > 0 else math.inf)


def _solve(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted least squares of `x * latency + y * per_byte = 1`; neither result is negative."""
    xx = sum(w * x * x for (x, _), w in zip(points, weights, strict=True))
    xy = sum(w * x * y for (x, y), w in zip(points, weights, strict=True))
    yy = sum(w * y * y for (_, y), w in zip(points, weights, strict=True))
    x1 = sum(w * x for (x, _), w in zip(points, weights, strict=True))
    y1 = sum(w * y for (_, y), w in zip(points, weights, strict=True))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        latency = (x1 * yy - xy * y1) / determinant
        per_byte = (xx * y1 - xy * x1) / determinant
        if latency >= 0 and per_byte >= 0:
            return latency, per_byte
        if latency < 0 and yy > 0:
            return 0.0, max(0.0, y1 / yy)
    return (max(0.0, x1 / xx), 0.0) if xx > 0 else (0.0, y1 / yy)


@dataclass(frozen=True)
class FitErrors:
    """Relative errors of the formulas for large messages."""

    median: float
    worst: float
    count: int


def fit_errors(fit: LinkFit, rows: Sequence[Measured]) -> FitErrors | None:
    """Returns the errors from `LARGE_BYTES` on; None without such rows."""
    errors = [abs(fit.ratio(row) - 1) for row in rows if row.nbytes >= LARGE_BYTES]
    if not errors:
        return None
    return FitErrors(statistics.median(errors), max(errors), len(errors))


def write_fit(pool: Pool, hosts: Sequence[Host], fit: LinkFit) -> Pool:
    """Returns the pool with the fit, so that the formulas of the cost model equal it.

    Where the links are known (`doctor --write`), the rest is what the processes need: `hop_ms` and
    `collective_gb_s`. Otherwise the fit becomes the pool's link.
    """
    members = len(hosts)
    if len({host.host for host in hosts}) == 1:
        oversubscribed = max(1.0, *(host.workers / host.cores for host in hosts))
        rate = min(UNLIMITED_GB_S, fit.bytes_per_s * oversubscribed / 1e9)
        link_s = max(pool.link_of(host).latency_s for host in hosts)
        hop_ms = max(0.0, 1e3 * (fit.latency_s - link_s))
        changes = {"hop_ms": _rounded(hop_ms), "collective_gb_s": _rounded(rate)}
        return pool.model_copy(update=changes)
    assert members > 1
    if "link" not in pool.model_fields_set and any(host.link is None for host in hosts):
        mbit_s = fit.bytes_per_s * 8 / 1e6
        link = Link(mbit_s=_rounded(mbit_s), latency_ms=_rounded(1e3 * fit.latency_s))
        free = {"hop_ms": 0.0, "collective_gb_s": UNLIMITED_GB_S}
        return pool.model_copy(update={"link": link, **free})
    links = [pool.link_of(host) for host in hosts]
    slowest = min(link.bytes_per_s for link in links)
    own_s = 1 / fit.bytes_per_s - 1 / slowest
    rate = min(UNLIMITED_GB_S, 1e-9 / own_s) if own_s > 0 else UNLIMITED_GB_S
    hop_ms = max(0.0, 1e3 * (fit.latency_s - max(link.latency_s for link in links)))
    changes = {"hop_ms": _rounded(hop_ms), "collective_gb_s": _rounded(rate)}
    return pool.model_copy(update=changes)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
