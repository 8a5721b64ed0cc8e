"""Base class of strategies whose workers take several local steps between two exchanges."""

from __future__ import annotations

from paceline.specs.strategy import Strategy


class LocalSteps(Strategy):
    """A strategy whose replicas differ between two synchronizations."""

    @property
    def exact(self) -> bool:
        return False

    @property
    def steps_between_syncs(self) -> int:
        """Local steps between two synchronizations; the expected number if it is not fixed."""
        raise NotImplementedError
