"""When to change strategy: policies as pure functions of the run's history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.errors import SpecError
from paceline.protocol.history import History
from paceline.specs.strategy import Strategy, Switch
from paceline.specs.text import write


@dataclass(frozen=True)
class Decision:
    phase: int
    reason: str


class Policy(Protocol):
    def next_stop(self, history: History) -> int | None:
        """The sample count at which a decision is due, if it is known beforehand."""
        ...

    def decide(self, history: History) -> Decision | None:
        """Change to another phase now?"""
        ...


class Stay:
    """One strategy from beginning to end."""

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> Decision | None:
        return None


class AtPoints:
    """Phase k begins at points[k-1] samples; several points passed at once skip phases."""

    def __init__(self, points: list[int], names: list[str]) -> None:
        self._points = points
        self._names = names

    def next_stop(self, history: History) -> int | None:
        return next((p for p in self._points if p > history.samples), None)

    def decide(self, history: History) -> Decision | None:
        phase = sum(history.samples >= p for p in self._points)
        if phase == history.phase:
            return None
        return Decision(phase, f"at={self._names[phase - 1]}")


def make_policy(
    strategy: Strategy, *, samples_per_epoch: int, epochs: int | None, batch: int
) -> Policy:
    """The policy of a strategy; raises SpecError for points that cannot be placed."""
    if not isinstance(strategy, Switch):
        return Stay()
    names = [write(p.to_value()) for p in strategy.at]
    points = [
        _end_of_batch(p.resolve(samples_per_epoch, epochs), samples_per_epoch, batch)
        for p in strategy.at
    ]
    if points != sorted(set(points)):
        raise SpecError(
            f"{strategy}: switch points must come one after another and in different batches, "
            f"these come after {', '.join(map(str, points))} samples"
        )
    if epochs is not None and points[-1] >= epochs * samples_per_epoch:
        raise SpecError(
            f"{strategy}: the point {names[-1]} (after {points[-1]} samples, in whole batches) "
            f"lies at or beyond the end of the run ({epochs * samples_per_epoch} samples): "
            "choose an earlier one"
        )
    return AtPoints(points, names)


def _end_of_batch(samples: int, samples_per_epoch: int, batch: int) -> int:
    """A switch happens between two global batches: at the first end of one at or after it."""
    epoch, position = divmod(samples, samples_per_epoch)
    return epoch * samples_per_epoch + min(samples_per_epoch, -(-position // batch) * batch)
