"""When to change strategy: policies as pure functions of the run's history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.errors import SpecError
from paceline.protocol.history import History
from paceline.specs.schedule import Schedule


@dataclass(frozen=True)
class SwitchDecision:
    """What a rule says, and why. The phase in force means that it stays."""

    phase: int
    reason: str
    cause: str
    """The reason in a word or two, for rules that look back at it."""
    exclude_worker: int | None = None
    """A worker that sits out from now on; the strategy stays."""
    measurements: Mapping[str, Any] = field(default_factory=dict)
    snapshot: bool = False
    """Workers keep a copy of the state as it is now, to fall back on."""
    restore: bool = False
    """Go on from that copy: what came after it was worse."""


@dataclass(frozen=True, kw_only=True)
class RunHorizon:
    """How long the run is and which learning rate applies where, known once the data is."""

    workers: int
    samples_per_epoch: int
    epochs: int | None
    """None in a custom loop that does not state it."""
    batch: int
    schedule: Schedule

    @property
    def total(self) -> int:
        """Samples of the whole run; only where `epochs` is known."""
        assert self.epochs is not None
        return self.samples_per_epoch * self.epochs

    def progress(self, samples: int) -> float:
        return samples / self.total

    def lr_factor(self, samples: int) -> float:
        return self.schedule.factor(samples, per_epoch=self.samples_per_epoch, total=self.total)


class SwitchPolicy(Protocol):
    def next_stop(self, history: History) -> int | None:
        """The sample count at which a decision is due, if it is known beforehand."""
        ...

    def decide(self, history: History) -> SwitchDecision | None:
        """Change to another phase now?"""
        ...


class NeverSwitch:
    """One strategy from beginning to end."""

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> SwitchDecision | None:
        return None


class SwitchAtPoints:
    """Phase k begins at points[k-1] samples; several points passed at once skip phases."""

    def __init__(self, points: list[int], names: list[str]) -> None:
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
    """Phases that begin at the ends of global batches; SpecError where that cannot be."""
    samples_per_epoch, epochs, batch = horizon.samples_per_epoch, horizon.epochs, horizon.batch
    placed = [_end_of_batch(p, samples_per_epoch, batch) for p in points]
    if placed != sorted(set(placed)):
        raise SpecError(
            "switch points must come one after another and in different batches: "
            f"{', '.join(names)} come after {', '.join(map(str, placed))} samples"
        )
    if epochs is not None and placed[-1] >= epochs * samples_per_epoch:
        raise SpecError(
            f"the switch point {names[-1]} (after {placed[-1]} samples, in whole batches) "
            f"lies at or beyond the end of the run ({epochs * samples_per_epoch} samples): "
            "choose an earlier one"
        )
    return SwitchAtPoints(placed, names)


def _end_of_batch(samples: int, samples_per_epoch: int, batch: int) -> int:
    """A switch happens between two global batches: at the first end of one at or after it."""
    epoch, position = divmod(samples, samples_per_epoch)
    return epoch * samples_per_epoch + min(samples_per_epoch, -(-position // batch) * batch)
