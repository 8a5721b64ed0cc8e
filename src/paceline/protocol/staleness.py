"""Measures the staleness of asynchronous updates, so that servers can correct for it.

An update is applied as a fraction of a synchronous step (`strategies.ps.fractional`). This module
determines the numbers that describe it: its share of a global batch, the delay of its gradients in
global batches, and a factor on the learning rate near the limit of stability.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from paceline.protocol.clock import Push

MEMORY_BATCHES = 3.0
"""Global batches over which delays and alignments are averaged."""


class Fraction(NamedTuple):
    """Size of an update relative to a synchronous step."""

    share: float
    """Share of a global batch."""
    delay: float
    """Global batches that were applied between the pull and this update."""
    lookahead: float
    """Mean delay of recent updates, at most 1: how far to look ahead along the momentum."""

    @property
    def is_whole(self) -> bool:
        """True for an update that is a synchronous step."""
        return self.share == 1.0 and self.lookahead == 0.0


class RateGovernor:
    """Lowers the learning rate near the limit of stability, which delays lower.

    A worker reports the alignment `x = <g, dw> / |dw|` of its gradient with the last change of its
    weights. Far below the limit, gradients point back to where the weights came from as often as
    noise makes them; close to it, the weights overshoot and most gradients do. `rho`, the mean of
    `x` over the mean of `|x|`, is then close to 1.

    Target and gain were chosen among three each on nine scenarios near and far from the limit: a
    target of 0.6 fails near it, 0.2 slows training down elsewhere.
    """

    TARGET = 0.4
    """Value of rho at which the rate stays as it is."""
    GAIN = 0.3
    """Relative change of the rate per global batch and unit of rho."""
    MIN_RATE = 0.05

    def __init__(self, units: int) -> None:
        self.rate = 1.0
        self._mean = [0.0] * units
        self._magnitude = [0.0] * units
        self._reported_at = [0.0] * units

    def add(self, unit: int, alignment: float, share: float, progress: float) -> None:
        """Adds the alignment of a push with a share of a global batch, after `progress` batches."""
        since = max(share, progress - self._reported_at[unit])
        self._reported_at[unit] = progress
        kept = math.exp(-since / MEMORY_BATCHES)
        self._mean[unit] = kept * self._mean[unit] + (1 - kept) * alignment
        self._magnitude[unit] = kept * self._magnitude[unit] + (1 - kept) * abs(alignment)
        if self._magnitude[unit] > 0:
            rho = self._mean[unit] / self._magnitude[unit]
            factor = math.exp(-self.GAIN * (rho - self.TARGET) * share)
            self.rate = min(1.0, max(self.MIN_RATE, self.rate * factor))


class StalenessMeter:
    """Follows the pushes and updates of one phase."""

    def __init__(self, units: int) -> None:
        self._progress = array("d", [0.0])
        """Global batches applied, by version."""
        self._mean_delay = 0.0
        self._governor = RateGovernor(units)

    @property
    def rate(self) -> float:
        """Factor on the learning rate, as the governor sets it."""
        return self._governor.rate

    def on_push(self, unit: int, alignment: float | None, share: float) -> None:
        if alignment is not None and math.isfinite(alignment):
            self._governor.add(unit, alignment, share, self._progress[-1])

    def on_update(self, pushes: Sequence[Push], share: float) -> Fraction:
        """Counts the next update, made of these pushes, and describes it."""
        now = self._progress[-1]
        samples = sum(p.samples for p in pushes)
        delay = sum((now - self._progress[p.base]) * p.samples for p in pushes) / samples
        self._progress.append(now + share)
        self._mean_delay += (1 - math.exp(-share / MEMORY_BATCHES)) * (delay - self._mean_delay)
        return Fraction(share, delay, min(1.0, self._mean_delay))
