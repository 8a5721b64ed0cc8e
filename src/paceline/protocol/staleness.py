"""Measures the staleness of asynchronous updates, so that servers can correct for it.

An update is applied as a fraction of a synchronous step (`strategies.ps.fractional`). This module
determines the numbers that describe it: its share of a global batch, and the delay of its gradients
in global batches.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from paceline.protocol.clock import Push

MEMORY_BATCHES = 3.0
"""Global batches over which delays are averaged."""


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


class StalenessMeter:
    """Follows the pushes and updates of one phase."""

    def __init__(self) -> None:
        self._progress = array("d", [0.0])
        """Global batches applied, by version."""
        self._mean_delay = 0.0

    def on_update(self, pushes: Sequence[Push], share: float) -> Fraction:
        """Counts the next update, made of these pushes, and describes it."""
        now = self._progress[-1]
        samples = sum(p.samples for p in pushes)
        delay = sum((now - self._progress[p.base]) * p.samples for p in pushes) / samples
        self._progress.append(now + share)
        self._mean_delay += (1 - math.exp(-share / MEMORY_BATCHES)) * (delay - self._mean_delay)
        return Fraction(share, delay, min(1.0, self._mean_delay))
