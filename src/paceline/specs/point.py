"""Points in a run: a fraction of it, an epoch or a sample count."""

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.specs.expression import Call, Percent, Value, format_expression, parse_expression


@dataclass(frozen=True)
class RunPoint:
    """Point in a run. Exactly one of the three fields is set."""

    fraction: float | None = None
    epoch: int | None = None
    samples: int | None = None

    def resolve(self, samples_per_epoch: int, epochs: int | None) -> int:
        """Returns the number of samples after which the point is reached; raises SpecError."""
        if self.samples is not None:
            return self.samples
        if self.epoch is not None:
            return self.epoch * samples_per_epoch
        assert self.fraction is not None
        if epochs is None:
            raise SpecError(
                f"at={format_expression(self.to_value())} requires a known length of the run; "
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
        # A third of a run has no exact percentage, so it is formatted as a fraction.
        return Percent(percent) if percent / 100 == self.fraction else self.fraction


def read_point(value: Value) -> RunPoint:
    """Builds a point from a parsed value; raises SpecError."""
    if isinstance(value, Percent):
        return _fraction(value.value / 100, format_expression(value))
    if isinstance(value, float) or (isinstance(value, int) and value in (0, 1)):
        return _fraction(float(value), format_expression(value))
    if isinstance(value, Call) and value.name in ("epoch", "samples") and len(value.args) == 1:
        count = value.args[0]
        if not isinstance(count, int) or count < 1:
            raise SpecError(
                f"at={format_expression(value)}: {value.name} requires a whole number of at least 1"
            )
        return RunPoint(epoch=count) if value.name == "epoch" else RunPoint(samples=count)
    raise SpecError(
        f"at={format_expression(value)} is not a point of a run; "
        "use at=50%, at=epoch(10) or at=samples(270000)"
    )


def _fraction(fraction: float, text: str) -> RunPoint:
    if not 0 < fraction < 1:
        raise SpecError(f"at={text}: a switch point must be above 0% and below 100% of the run")
    return RunPoint(fraction=fraction)


def read_points(at: object) -> tuple[RunPoint, ...]:
    """Builds points from Python values: 0.5, "epoch(10)", a RunPoint, or a tuple of them."""
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
            raise SpecError(f"at={one!r} is not a point; use 0.5, 'epoch(10)' or 'samples(270000)'")
    return tuple(points)
