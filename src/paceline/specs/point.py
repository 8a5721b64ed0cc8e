"""Points in a run: a fraction of it, an epoch or a sample count."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.specs.expression import Call, Percent, Value, format_expression, parse_expression


@dataclass(frozen=True)
class RunPoint:
    """Where in a run something happens. Exactly one of the three is set."""

    fraction: float | None = None
    epoch: int | None = None
    samples: int | None = None

    def resolve(self, samples_per_epoch: int, epochs: int | None) -> int:
        """The number of samples after which the point is reached."""
        if self.samples is not None:
            return self.samples
        if self.epoch is not None:
            return self.epoch * samples_per_epoch
        assert self.fraction is not None
        if epochs is None:
            raise SpecError(
                f"at={format_expression(self.to_value())} of a run of unknown length: "
                "pass epochs=... to prepare(), or use at=epoch(3)"
            )
        return round(self.fraction * samples_per_epoch * epochs)

    def to_value(self) -> Value:
        if self.samples is not None:
            return Call("samples", (self.samples,), bare=False)
        if self.epoch is not None:
            return Call("epoch", (self.epoch,), bare=False)
        assert self.fraction is not None
        percent = round(self.fraction * 100, 9)
        # A third of a run has no exact percentage: it is written as the fraction it is.
        return Percent(percent) if percent / 100 == self.fraction else self.fraction


def read_point(value: Value) -> RunPoint:
    if isinstance(value, Percent):
        return _fraction(value.value / 100, format_expression(value))
    if isinstance(value, float) or (isinstance(value, int) and value in (0, 1)):
        return _fraction(float(value), format_expression(value))
    if isinstance(value, Call) and value.name in ("epoch", "samples") and len(value.args) == 1:
        count = value.args[0]
        if not isinstance(count, int) or count < 1:
            raise SpecError(
                f"at={format_expression(value)}: {value.name} takes a whole number from 1"
            )
        return RunPoint(epoch=count) if value.name == "epoch" else RunPoint(samples=count)
    raise SpecError(
        f"at={format_expression(value)}: write at=50%, at=epoch(10) or at=samples(270000)"
    )


def _fraction(fraction: float, text: str) -> RunPoint:
    if not 0 < fraction < 1:
        raise SpecError(f"at={text}: a switch point lies above 0% and below 100% of the run")
    return RunPoint(fraction=fraction)


def read_points(at: object) -> tuple[RunPoint, ...]:
    """Points as Python callers write them: 0.5, "epoch(10)", a Point, or several in a tuple."""
    if at is None:
        raise SpecError("switch without a point: add at=0.5, or at='epoch(10)'")
    several = at if isinstance(at, list | tuple) else (at,)
    points = []
    for one in several:
        if isinstance(one, RunPoint):
            points.append(one)
        elif isinstance(one, str):
            points.append(read_point(parse_expression(one)))
        elif isinstance(one, int | float) and not isinstance(one, bool):
            points.append(_fraction(float(one), repr(one)))
        else:
            raise SpecError(f"at={one!r}: write 0.5, 'epoch(10)' or 'samples(270000)'")
    return tuple(points)
