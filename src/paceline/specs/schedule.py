"""Learning-rate schedules: pure functions of samples seen, the same under every strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import Spec, float_field, parse_spec, spec_field
from paceline.specs.expression import Call, Percent, Value, format_expression

Mark = float | Percent
"""Point in a run: a number of epochs, or a percentage of the run."""


def read_mark(value: Value, where: str) -> Mark:
    if isinstance(value, Percent):
        if not 0 <= value.value <= 100:
            raise SpecError(
                f"{where} must be 0% to 100% of the run, got {format_expression(value)}"
            )
        return value
    number: float = float_field(0.0)(value, where)
    return number


def _read_marks(value: Value, where: str) -> tuple[Mark, ...]:
    assert isinstance(value, tuple)
    return tuple(read_mark(v, "milestones(...)") for v in value)


def _mark_samples(mark: Mark, per_epoch: int, total: int) -> float:
    return mark.value / 100 * total if isinstance(mark, Percent) else mark * per_epoch


class Schedule(Spec):
    """`factor` multiplies the job's learning rate."""

    warmup: Mark

    def factor(self, samples: int, *, per_epoch: int, total: int) -> float:
        """Returns the factor for an update that begins after `samples` samples of `total`."""
        ramp = _mark_samples(self.warmup, per_epoch, total)
        if samples < ramp:
            # The first update already moves: a rate of zero would waste it.
            return min(1.0, max(samples, per_epoch * 1e-3) / ramp)
        return self.after_warmup(samples, ramp, per_epoch=per_epoch, total=total)

    def after_warmup(self, samples: int, ramp: float, *, per_epoch: int, total: int) -> float:
        raise NotImplementedError

    def drops(self, *, per_epoch: int, total: int) -> list[float]:
        """Returns the sample counts at which the learning rate drops."""
        return []


@dataclass(frozen=True)
class Constant(Schedule):
    name: ClassVar[str] = "constant"
    warmup: Mark = spec_field(read_mark, 0.0)

    def after_warmup(self, samples: int, ramp: float, *, per_epoch: int, total: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 to `floor`, from the end of the warm-up to the end of the run."""

    name: ClassVar[str] = "cosine"
    warmup: Mark = spec_field(read_mark, 0.0)
    floor: float = spec_field(float_field(0.0, 1.0), 0.0)

    def after_warmup(self, samples: int, ramp: float, *, per_epoch: int, total: int) -> float:
        if total <= ramp:
            return 1.0
        progress = min(1.0, (samples - ramp) / (total - ramp))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Milestones(Schedule):
    """Multiplies by `factor` at each mark: `milestones(80, 130)` (epochs), `milestones(50%)`."""

    name: ClassVar[str] = "milestones"
    marks: tuple[Mark, ...] = spec_field(_read_marks, ())
    drop: float = spec_field(float_field(0.0, 1.0, above=True), 0.1)
    warmup: Mark = spec_field(read_mark, 0.0)

    def __post_init__(self) -> None:
        if not self.marks:
            raise SpecError("milestones requires epochs, for example milestones(80, 130)")

    @classmethod
    def from_call(cls, call: Call) -> Milestones:
        rest = super().from_call(Call(call.name, (), (*call.named, ("marks", call.args))))
        assert isinstance(rest, Milestones)
        return rest

    def to_call(self) -> Call:
        call = super().to_call()
        named = tuple(pair for pair in call.named if pair[0] != "marks")
        return Call(self.name, self.marks, named, bare=False)

    def after_warmup(self, samples: int, ramp: float, *, per_epoch: int, total: int) -> float:
        passed = sum(samples >= _mark_samples(m, per_epoch, total) for m in self.marks)
        return float(self.drop**passed)

    def drops(self, *, per_epoch: int, total: int) -> list[float]:
        return sorted(_mark_samples(m, per_epoch, total) for m in self.marks)


SCHEDULES: Mapping[str, type[Schedule]] = {c.name: c for c in (Constant, Cosine, Milestones)}


def parse_schedule(text: str) -> Schedule:
    return parse_spec(text, SCHEDULES, "schedule")
