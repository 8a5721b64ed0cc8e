"""When a loss counts as diverged, in real and in virtual runs alike."""

from __future__ import annotations

import math

EXPLODES_AT = 1000.0
"""A loss this many times the first one (or 1, if that is larger) counts as diverged."""


class DivergenceDetector:
    """One worker's losses, from its first on."""

    def __init__(self) -> None:
        self._first: float | None = None

    def check(self, loss: float) -> str | None:
        """Why this loss means that training has diverged; None where it does not."""
        if not math.isfinite(loss):
            return "it is not a finite number"
        if self._first is None:
            self._first = loss
        if loss > EXPLODES_AT * max(1.0, self._first):
            return f"more than {EXPLODES_AT:g} times the first loss"
        return None
