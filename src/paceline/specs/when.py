"""Switching when the run itself says so: `when=lr_drop`, `plateau`, `straggler`, `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import (
    Spec,
    choice_field,
    float_field,
    int_field,
    spec_field,
    spec_from_call,
)
from paceline.specs.expression import Percent, Value, format_expression


@dataclass(frozen=True)
class SwitchTrigger(Spec):
    """A rule that decides between the first strategy of a switch and the second."""

    positional: ClassVar[bool] = True


def _read_share(value: Value, where: str) -> float:
    if isinstance(value, Percent):
        share = value.value / 100
    else:
        share = float_field(0.0, 1.0)(value, where)
    if not 0 <= share <= 1:
        raise SpecError(
            f"{where} is {format_expression(value)}: a share of the run lies within 0..100%"
        )
    return share


@dataclass(frozen=True)
class OnLrDrop(SwitchTrigger):
    """At the schedule's milestones: the first one, then the next for a third strategy."""

    name: ClassVar[str] = "lr_drop"


@dataclass(frozen=True)
class OnPlateau(SwitchTrigger):
    """When validation loss over `window` epochs has stopped improving for `patience` epochs."""

    name: ClassVar[str] = "plateau"
    window: int = spec_field(int_field(1), 3)
    tolerance: float = spec_field(float_field(0.0), 0.01)
    patience: int = spec_field(int_field(1), 2)


@dataclass(frozen=True)
class OnStraggler(SwitchTrigger):
    """While one worker lags: `greedy` leaves the first strategy, `elastic` leaves the worker out.

    Once `quota` of the run was trained under the first strategy, the second takes over for good.
    """

    name: ClassVar[str] = "straggler"
    policy: str = spec_field(choice_field("greedy", "elastic"), "greedy")
    quota: float = spec_field(_read_share, 0.5)
    windows: int = spec_field(int_field(1), 3)


@dataclass(frozen=True)
class OnGain(SwitchTrigger):
    """When it pays: measured gain against measured risk; back when loss or speed regress."""

    name: ClassVar[str] = "auto"


WHENS: Mapping[str, type[SwitchTrigger]] = {
    c.name: c for c in (OnLrDrop, OnPlateau, OnStraggler, OnGain)
}


def trigger_from_value(value: Value) -> SwitchTrigger:
    return spec_from_call(value, WHENS, "switch rule")
