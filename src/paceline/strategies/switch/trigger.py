"""Triggers that switch by the state of the run: `lr_drop`, `plateau`, `straggler`, `auto`.

Their policies are pure functions of the run's history.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.protocol.history import History
from paceline.protocol.switch_policy import (
    RunHorizon,
    SwitchDecision,
    SwitchPolicy,
    resolve_switch_points,
)
from paceline.protocol.throughput import find_straggler
from paceline.specs.base import Spec, check_range, choice_field, float_field, int_field, spec_field
from paceline.specs.expression import Percent, Value
from paceline.specs.schedule import read_mark
from paceline.specs.strategy import Strategy
from paceline.strategies.auto.spec import Auto
from paceline.strategies.registry import make_switch_policy

FIRST, SECOND = 0, 1


@dataclass(frozen=True)
class SwitchTrigger(Spec):
    """A rule that decides between the first and the second strategy of a switch."""

    positional: ClassVar[bool] = True
    max_phases: ClassVar[int | None] = 2
    """Maximum number of strategies; None for any number."""
    compares_goodput: ClassVar[bool] = False
    """True if it needs to know how long an exchange takes."""

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        """Returns the policy of a run. Raises SpecError if the run does not support it."""
        raise NotImplementedError

    def check_length(self, horizon: RunHorizon) -> None:
        """Raises SpecError if the length of the run is unknown."""
        if horizon.epochs is None:
            raise SpecError(
                f"when={self} requires the length of the run; pass epochs= to prepare()"
            )


def _read_share(value: Value, where: str) -> float:
    mark = read_mark(value, where)
    return mark.value / 100 if isinstance(mark, Percent) else check_range(mark, where, 0.0, 1.0)


@dataclass(frozen=True)
class OnLrDrop(SwitchTrigger):
    """Switches at the schedule's milestones: the first one, then the next for a third strategy."""

    name: ClassVar[str] = "lr_drop"
    max_phases: ClassVar[int | None] = None

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        self.check_length(horizon)
        switches = len(phases) - 1
        drops = horizon.schedule.drops(per_epoch=horizon.samples_per_epoch, total=horizon.total)
        if len(drops) < switches:
            raise SpecError(
                f"when=lr_drop requires {switches} drop(s) of the learning rate, but "
                f"schedule {horizon.schedule} has {len(drops)}; use milestones(...)"
            )
        points = [round(d) for d in drops[:switches]]
        return resolve_switch_points(["lr_drop"] * switches, points, horizon)


@dataclass(frozen=True)
class OnPlateau(SwitchTrigger, SwitchPolicy):
    """Switch when validation loss over `window` epochs has not improved for `patience` epochs."""

    name: ClassVar[str] = "plateau"
    window: int = spec_field(int_field(1), 3)
    tolerance: float = spec_field(float_field(0.0), 0.01)
    patience: int = spec_field(int_field(1), 2)

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        return self

    def decide(self, history: History) -> SwitchDecision | None:
        """Compares the mean validation loss of two adjacent windows of epochs."""
        if history.phase != FIRST:
            return None
        losses = [row.val_loss for row in history.rows if row.val_loss is not None]
        if len(losses) < 2 * self.window + self.patience - 1:
            return None
        gains = []
        for back in range(self.patience):
            end = len(losses) - back
            now = sum(losses[end - self.window : end]) / self.window
            before = sum(losses[end - 2 * self.window : end - self.window]) / self.window
            gains.append((before - now) / max(abs(before), 1e-12))
        if max(gains) >= self.tolerance:
            return None
        return SwitchDecision(
            SECOND,
            f"plateau: val_loss improved by {100 * max(gains):.2f}% at most in {self.patience} "
            f"epochs, below {100 * self.tolerance:g}%",
            "plateau",
            measurements={"improvements": gains},
        )


@dataclass(frozen=True)
class OnStraggler(SwitchTrigger):
    """Reacts to a straggler: `greedy` leaves the first strategy, `elastic` excludes the worker.

    Once `quota` of the run was trained with the first strategy, the second one stays active.
    """

    name: ClassVar[str] = "straggler"
    policy: str = spec_field(choice_field("greedy", "elastic"), "greedy")
    quota: float = spec_field(_read_share, 0.5)
    windows: int = spec_field(int_field(1), 3)

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        self.check_length(horizon)
        return StragglerPolicy(self, horizon)


@dataclass(frozen=True)
class StragglerPolicy(SwitchPolicy):
    """greedy: second strategy while there is a straggler. elastic: excludes the straggler."""

    rule: OnStraggler
    horizon: RunHorizon

    def next_stop(self, history: History) -> int | None:
        """The sample count at which the quota is reached if nothing happens before."""
        left = self._quota_samples() - history.phase_samples[FIRST]
        return history.samples + left if history.phase == FIRST and left > 0 else None

    def _quota_samples(self) -> int:
        return round(self.rule.quota * self.horizon.total)

    def decide(self, history: History) -> SwitchDecision | None:
        if history.phase_samples[FIRST] >= self._quota_samples():
            if history.phase == SECOND:
                return None
            return SwitchDecision(
                SECOND,
                f"the first strategy has completed its quota of {100 * self.rule.quota:g}%",
                "quota",
            )
        windows = history.throughput.latest(history.phase, self.rule.windows)
        if len(windows) < self.rule.windows:
            return None
        slow = find_straggler(windows, self.rule.windows)
        if slow is not None and slow not in history.excluded_workers and history.phase == FIRST:
            speeds = windows[-1].speeds
            slower = sorted(speeds)[len(speeds) // 2] / speeds[slow]
            reason = f"worker {slow} computes {slower:.1f}x slower"
            figures = {"speeds": speeds}
            if self.rule.policy == "elastic":
                return SwitchDecision(
                    FIRST, f"{reason}; it is excluded", "straggler", slow, measurements=figures
                )
            return SwitchDecision(
                SECOND, f"{reason} than the median", "straggler", measurements=figures
            )
        if slow is None and history.phase == SECOND and self.rule.policy == "greedy":
            return SwitchDecision(FIRST, f"no straggler in {self.rule.windows} windows", "calm")
        return None


@dataclass(frozen=True)
class OnGain(SwitchTrigger):
    """Switches when it pays, and back when loss or speed regress; `auto` with two candidates."""

    name: ClassVar[str] = "auto"
    compares_goodput: ClassVar[bool] = True

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        self.check_length(horizon)
        # Without probed speeds it begins with the first.
        return make_switch_policy(Auto(*phases), dataclasses.replace(horizon, speeds=()))


TRIGGERS: Mapping[str, type[SwitchTrigger]] = {
    c.name: c for c in (OnLrDrop, OnPlateau, OnStraggler, OnGain)
}
