"""Detection of diverged losses, for real and simulated runs."""

import math

EXPLODES_AT = 1000.0
"""A loss this many times the first one (or 1, if that is larger) counts as diverged."""


class DivergenceDetector:
    """Checks the losses of one worker."""

    def __init__(self) -> None:
        self._first: float | None = None

    def check(self, loss: float) -> str | None:
        """Returns the reason why training has diverged, or None if it has not."""
        if not math.isfinite(loss):
            return "it is not a finite number"
        if self._first is None:
            self._first = loss
        if loss > EXPLODES_AT * max(1.0, self._first):
            return f"more than {EXPLODES_AT:g} times the first loss"
        return None
