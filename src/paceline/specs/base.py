"""Parses and formats spec classes; each class declares one converter per field."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from paceline.errors import SpecError, suggest_name
from paceline.specs.expression import Call, Percent, Value, format_expression, parse_expression

Converter = Callable[[Value, str], Any]
"""Turns a parsed value into a field's value; the second argument names the field in errors."""


@dataclass(frozen=True)
class Spec:
    """Frozen description with a name; fields have a `read` converter in their metadata."""

    name: ClassVar[str] = ""
    positional: ClassVar[bool] = False
    """Formatted as `ssp(3)`, not as `ssp(bound=3)`."""
    explicit: ClassVar[bool] = False
    """Default values are written too: `ssp(3)` is never shortened to `ssp`."""

    def __str__(self) -> str:
        return format_expression(self.to_call())

    def to_call(self) -> Call:
        """Returns a call with the fields that differ from their defaults, or all if explicit."""
        fields = dataclasses.fields(self)
        changed = [f.name for f in fields if self.explicit or getattr(self, f.name) != f.default]
        if self.positional and changed:
            names = [f.name for f in fields]
            written = names[: names.index(changed[-1]) + 1]
            args = tuple(to_value(getattr(self, name)) for name in written)
            return Call(self.name, args, (), bare=False)
        named = tuple((name, to_value(getattr(self, name))) for name in changed)
        return Call(self.name, (), named, bare=not named)

    @classmethod
    def from_call(cls, call: Call) -> Any:
        fields = {f.name: f for f in dataclasses.fields(cls) if "read" in f.metadata}
        order = list(fields)
        if len(call.args) > len(order):
            raise SpecError(
                f"{format_expression(call)}: {cls.name} accepts at most {len(order)} values "
                f"({', '.join(order)})"
                if order
                else f"{format_expression(call)}: {cls.name} accepts no values"
            )
        given: dict[str, Value] = dict(zip(order, call.args, strict=False))
        for name, value in call.named:
            if name not in fields:
                hint = suggest_name(name, order) if order else "it has no options"
                raise SpecError(f"{cls.name} has no option {name!r}; {hint}")
            if name in given:
                raise SpecError(f"{format_expression(call)}: {name} is given twice")
            given[name] = value
        return cls(
            **{k: fields[k].metadata["read"](v, f"{cls.name}({k}=...)") for k, v in given.items()}
        )


SpecT = TypeVar("SpecT", bound=Spec)


def to_value(value: Any) -> Value:
    if isinstance(value, Spec):
        return value.to_call()
    if isinstance(value, bool):
        return Call("true" if value else "false")
    if isinstance(value, str):
        return Call(value)
    if isinstance(value, float) and math.isinf(value):
        return Call("inf")
    if isinstance(value, tuple):
        return tuple(to_value(v) for v in value)
    if isinstance(value, int | float | Percent):
        return value
    raise TypeError(f"{value!r} has no text form")


def spec_from_call(value: Value, known: Mapping[str, type[SpecT]], what: str) -> SpecT:
    """Builds the spec that a name or call refers to; raises SpecError."""
    if not isinstance(value, Call):
        raise SpecError(
            f"{format_expression(value)!r} is not the name of a {what}; {suggest_name('', known)}"
        )
    if value.name not in known:
        raise SpecError(f"unknown {what} {value.name!r}; {suggest_name(value.name, known)}")
    built: SpecT = known[value.name].from_call(value)
    return built


def parse_spec(text: str, known: Mapping[str, type[SpecT]], what: str) -> SpecT:
    if not text.strip():
        raise SpecError(f"the {what} is empty; {suggest_name('', known)}")
    return spec_from_call(parse_expression(text), known, what)


def spec_field(read: Converter, default: Any = dataclasses.MISSING) -> Any:
    """Returns a dataclass field with its converter."""
    return dataclasses.field(default=default, metadata={"read": read})


def int_field(low: int, high: int | None = None) -> Converter:
    def read(value: Value, where: str) -> int:
        if not isinstance(value, int):
            raise SpecError(f"{where} must be a whole number, got {format_expression(value)}")
        return check_range(value, where, low, high)

    return read


def float_field(
    low: float | None = None, high: float | None = None, *, above: bool = False
) -> Converter:
    """Returns a converter for numbers in [low, high]; `above` excludes `low` itself."""

    def read(value: Value, where: str) -> float:
        number = as_number(value)
        if number is None:
            raise SpecError(f"{where} must be a number, got {format_expression(value)}")
        if above and low is not None and number == low:
            raise SpecError(f"{where} must be greater than {low:g}, got {format_expression(value)}")
        return check_range(number, where, low, high)

    return read


def as_number(value: Value) -> float | None:
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # A whole number of hundreds of digits.
            return math.inf if value > 0 else -math.inf
    if isinstance(value, Call) and value.bare and value.name == "inf":
        return math.inf
    return None


NumberT = TypeVar("NumberT", int, float)


def check_range(value: NumberT, where: str, low: float | None, high: float | None) -> NumberT:
    if isinstance(value, float) and math.isnan(value):
        raise SpecError(f"{where} must be a number, got NaN")
    if low is not None and value < low:
        raise SpecError(f"{where} must be at least {low:g}, got {value}")
    if high is not None and value > high:
        raise SpecError(f"{where} must be at most {high:g}, got {value}")
    return value


def read_lr_scale(value: Value, where: str) -> float | None:
    """Parses a learning-rate factor; None, written `auto`, lets the strategy choose."""
    if value == Call("auto"):
        return None
    scale: float = float_field(0.0, above=True)(value, where)
    return scale


def bool_field(value: Value, where: str) -> bool:
    if isinstance(value, Call) and value.bare and value.name in ("true", "false"):
        return value.name == "true"
    raise SpecError(f"{where} must be true or false, got {format_expression(value)}")


def choice_field(*choices: str) -> Converter:
    def read(value: Value, where: str) -> str:
        if isinstance(value, Call) and value.bare and value.name in choices:
            return value.name
        raise SpecError(
            f"{where} must be one of {', '.join(choices)}, got {format_expression(value)}"
        )

    return read


def numbers_field(read_one: Converter) -> Converter:
    """Returns a converter for a tuple of numbers; a single number becomes a tuple of one."""

    def read(value: Value, where: str) -> tuple[Any, ...]:
        parts = value if isinstance(value, tuple) else (value,)
        return tuple(read_one(part, where) for part in parts)

    return read
