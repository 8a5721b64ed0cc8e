"""Triggers that switch by the state of the run: `lr_drop`, `plateau`, `straggler`, `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.protocol.switch_policy import RunHorizon, SwitchPolicy, resolve_switch_points
from paceline.specs.base import (
    Spec,
    choice_field,
    float_field,
    int_field,
    spec_field,
    spec_from_call,
)
from paceline.specs.expression import Percent, Value, format_expression
from paceline.specs.strategy import Strategy
from paceline.strategies.switch.auto_policy import SECOND, AutoPolicy
from paceline.strategies.switch.policies import PlateauPolicy, StragglerPolicy


@dataclass(frozen=True)
class SwitchTrigger(Spec):
    """A rule that decides between the first and the second strategy of a switch."""

    positional: ClassVar[bool] = True
    max_phases: ClassVar[int | None] = 2
    """Maximum number of strategies; None for any number."""

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
    if isinstance(value, Percent):
        share = value.value / 100
    else:
        share = float_field(0.0, 1.0)(value, where)
    if not 0 <= share <= 1:
        raise SpecError(f"{where} must be 0% to 100% of the run, got {format_expression(value)}")
    return share


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
class OnPlateau(SwitchTrigger):
    """Switch when validation loss over `window` epochs has not improved for `patience` epochs."""

    name: ClassVar[str] = "plateau"
    window: int = spec_field(int_field(1), 3)
    tolerance: float = spec_field(float_field(0.0), 0.01)
    patience: int = spec_field(int_field(1), 2)

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        return PlateauPolicy(window=self.window, tolerance=self.tolerance, patience=self.patience)


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
        return StragglerPolicy(
            horizon=horizon, policy=self.policy, quota=self.quota, windows=self.windows
        )


@dataclass(frozen=True)
class OnGain(SwitchTrigger):
    """Switch when it pays: measured gain against measured risk; back when loss or speed regress."""

    name: ClassVar[str] = "auto"

    def make_policy(self, horizon: RunHorizon, phases: tuple[Strategy, ...]) -> SwitchPolicy:
        self.check_length(horizon)
        return AutoPolicy(horizon, phases[SECOND].expected_staleness(horizon.workers))


TRIGGERS: Mapping[str, type[SwitchTrigger]] = {
    c.name: c for c in (OnLrDrop, OnPlateau, OnStraggler, OnGain)
}


def trigger_from_value(value: Value) -> SwitchTrigger:
    return spec_from_call(value, TRIGGERS, "switch rule")
