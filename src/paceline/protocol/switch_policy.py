"""Policies that decide on strategy switches, as pure functions of the run's history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import SpecError
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.history import History
from paceline.specs.schedule import Schedule


@dataclass(frozen=True)
class SwitchDecision:
    """Decision of a rule and its reason. The current phase means to stay."""

    phase: int
    reason: str
    cause: str
    """Short reason, for rules that refer to earlier decisions."""
    exclude_worker: int | None = None
    """A worker to exclude from now on; the strategy stays."""
    measurements: Mapping[str, Any] = field(default_factory=dict)
    snapshot: bool = False
    """Workers keep a copy of the current state for a rollback."""
    restore: bool = False
    """Continue from that copy, because the result was worse."""
    best: bool = False
    """Restore the state of the best validated epoch instead."""


@dataclass(frozen=True, kw_only=True)
class RunHorizon:
    """Length and learning-rate schedule of a run, available once the data is known."""

    workers: int
    samples_per_epoch: int
    epochs: int | None
    """None for a custom training loop that does not set it."""
    batch: int
    schedule: Schedule
    speeds: tuple[float, ...] = ()
    """Samples per second of each worker before training; empty if they were not measured."""
    cv: float = 0.0
    """Variation of a worker's step times before training, relative to their mean."""
    exchange: ExchangeProbe | None = None
    """None if it was not measured."""
    recalled: Mapping[str, float] = field(default_factory=dict)
    """Measured by predicted throughput of strategies in an earlier run of the same job."""
    validates: bool = True
    """False without validation data."""

    @property
    def total(self) -> int:
        """Total samples of the run; requires `epochs`."""
        assert self.epochs is not None
        return self.samples_per_epoch * self.epochs

    def progress(self, samples: int) -> float:
        return samples / self.total

    def lr_factor(self, samples: int) -> float:
        return self.schedule.factor(samples, per_epoch=self.samples_per_epoch, total=self.total)


class SwitchPolicy:
    """Decides on the phases of a run; by default, the first one is used for all of it."""

    def next_stop(self, history: History) -> int | None:
        """Returns the sample count of the next decision, if it is known in advance."""
        return None

    def decide(self, history: History) -> SwitchDecision | None:
        """Returns a decision if the phase should change now."""
        return None

    def keeps_state(self, history: History) -> bool:
        """Returns whether workers keep a copy of the state after this epoch."""
        return False

    def conclude(self, history: History) -> SwitchDecision | None:
        """Returns a decision to restore the kept copy at the end of the run, or a summary."""
        return None


class SwitchAtPoints(SwitchPolicy):
    """Starts phase k at points[k-1] samples; passing several points at once skips phases."""

    def __init__(self, points: Sequence[int], names: Sequence[str]) -> None:
        self._points = points
        self._names = names

    def next_stop(self, history: History) -> int | None:
        return next((p for p in self._points if p > history.samples), None)

    def decide(self, history: History) -> SwitchDecision | None:
        phase = sum(history.samples >= p for p in self._points)
        if phase == history.phase:
            return None
        name = self._names[phase - 1] if phase else "before the first point"
        return SwitchDecision(phase, name, "point")


def resolve_switch_points(
    names: list[str], points: list[int], horizon: RunHorizon
) -> SwitchAtPoints:
    """Rounds switch points up to ends of global batches. Raises SpecError for invalid points."""
    samples_per_epoch, epochs, batch = horizon.samples_per_epoch, horizon.epochs, horizon.batch
    placed = [_end_of_batch(p, samples_per_epoch, batch) for p in points]
    if placed != sorted(set(placed)):
        raise SpecError(
            "switch points must be increasing and in different batches: "
            f"{', '.join(names)} are at {', '.join(map(str, placed))} samples"
        )
    if epochs is not None and placed[-1] >= epochs * samples_per_epoch:
        raise SpecError(
            f"the switch point {names[-1]} (after {placed[-1]} samples, in full batches) "
            f"is at or beyond the end of the run ({epochs * samples_per_epoch} samples); "
            "choose an earlier one"
        )
    return SwitchAtPoints(placed, names)


def _end_of_batch(samples: int, samples_per_epoch: int, batch: int) -> int:
    """Returns the first end of a global batch at or after `samples`, where a switch happens."""
    epoch, position = divmod(samples, samples_per_epoch)
    return epoch * samples_per_epoch + min(samples_per_epoch, -(-position // batch) * batch)
