"""What specs share whose workers take several local steps between two exchanges."""

from __future__ import annotations

from paceline.specs.strategy import Strategy


class LocalSteps(Strategy):
    """Replicas differ between two synchronizations."""

    @property
    def exact(self) -> bool:
        return False

    @property
    def steps_between_syncs(self) -> int:
        """Local steps between two synchronizations, expected where they are not fixed."""
        raise NotImplementedError
