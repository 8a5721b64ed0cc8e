"""Switching when the run itself says so: `when=lr_drop`, `plateau`, `straggler`, `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import Spec, choice, integer, option, read_call, real
from paceline.specs.text import Percent, Value, write


@dataclass(frozen=True)
class When(Spec):
    """A rule that decides between the first strategy of a switch and the second."""

    positional: ClassVar[bool] = True


def _read_share(value: Value, where: str) -> float:
    if isinstance(value, Percent):
        share = value.value / 100
    else:
        share = real(0.0, 1.0)(value, where)
    if not 0 <= share <= 1:
        raise SpecError(f"{where} is {write(value)}: a share of the run lies within 0..100%")
    return share


@dataclass(frozen=True)
class LrDrop(When):
    """At the schedule's milestones: the first one, then the next for a third strategy."""

    word: ClassVar[str] = "lr_drop"


@dataclass(frozen=True)
class Plateau(When):
    """When validation loss over `window` epochs has stopped improving for `patience` epochs."""

    word: ClassVar[str] = "plateau"
    window: int = option(integer(1), 3)
    tolerance: float = option(real(0.0), 0.01)
    patience: int = option(integer(1), 2)


@dataclass(frozen=True)
class Straggler(When):
    """While one worker lags: `greedy` leaves the first strategy, `elastic` leaves the worker out.

    Once `quota` of the run was trained under the first strategy, the second takes over for good.
    """

    word: ClassVar[str] = "straggler"
    policy: str = option(choice("greedy", "elastic"), "greedy")
    quota: float = option(_read_share, 0.5)
    windows: int = option(integer(1), 3)


@dataclass(frozen=True)
class Auto(When):
    """When it pays: measured gain against measured risk; back when loss or speed regress."""

    word: ClassVar[str] = "auto"


WHENS: Mapping[str, type[When]] = {c.word: c for c in (LrDrop, Plateau, Straggler, Auto)}


def read_when(value: Value) -> When:
    return read_call(value, WHENS, "switch rule")
