"""Expression syntax of specs: `name(value, key=value)`, parsed and never evaluated.

    switch(allreduce, ps(servers=2), at=50%)      sgd(momentum=0.9)      milestones(80, 130)

Values are words, calls, numbers, percentages and (tuples). A word is a call without arguments.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NoReturn

from paceline.errors import SpecError


@dataclass(frozen=True)
class Percent:
    """`50%`, distinct from the number 50."""

    value: float


@dataclass(frozen=True)
class Call:
    """Name with its arguments; `bare` if it was written without parentheses."""

    name: str
    args: tuple[Value, ...] = ()
    named: tuple[tuple[str, Value], ...] = ()
    bare: bool = True


Value = Call | int | float | Percent | tuple["Value", ...]

_TOKEN = re.compile(
    # The schedule 1f1b begins with a digit; names of layers contain dots.
    r"\s*(?:(?P<word>1f1b|[A-Za-z_][A-Za-z0-9_\-]*(?:\.[A-Za-z0-9_\-]+)*)"
    r"|(?P<number>[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)|(?P<mark>[(),=%]))"
)
_MAX_LENGTH = 4000
_MAX_DEPTH = 20


def parse_expression(text: str) -> Value:
    """Parses one expression; raises SpecError with the position of the problem."""
    if len(text) > _MAX_LENGTH:
        raise SpecError(
            f"an expression must have at most {_MAX_LENGTH} characters, got {len(text)}"
        )
    reader = _ExpressionParser(text)
    value = reader.value(0)
    kind, _, position = reader.peek()
    if kind != "end":
        reader.fail(position, "the expression should end here")
    return value


class _ExpressionParser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                self.fail(position, "unexpected character")
            assert match.lastgroup is not None
            kind = match.lastgroup
            self.tokens.append((kind, match[kind], match.start(kind)))
            position = match.end()
        self.index = 0

    def fail(self, position: int, why: str) -> NoReturn:
        found = self.text[position:].strip()
        place = f"at {found[:20]!r}" if found else "at the end"
        raise SpecError(f"cannot parse {self.text!r} {place}: {why}; use name(value, key=value)")

    def peek(self, ahead: int = 0) -> tuple[str, str, int]:
        spot = self.index + ahead
        return self.tokens[spot] if spot < len(self.tokens) else ("end", "", len(self.text))

    def next(self) -> tuple[str, str, int]:
        token = self.peek()
        self.index += 1
        return token

    def value(self, depth: int) -> Value:
        kind, text, position = self.next()
        if depth > _MAX_DEPTH:
            self.fail(position, f"nested more than {_MAX_DEPTH} levels deep")
        if kind == "number":
            if self.peek()[1] == "%":
                self.next()
                return Percent(float(text))
            return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
        if kind == "word":
            if self.peek()[1] != "(":
                return Call(text)
            self.next()
            args, named = self.arguments(depth)
            return Call(text, args, named, bare=False)
        if text == "(":
            args, named = self.arguments(depth)
            if named:
                self.fail(position, "a tuple cannot have named values")
            return args
        self.fail(position, "expected a value")

    def arguments(self, depth: int) -> tuple[tuple[Value, ...], tuple[tuple[str, Value], ...]]:
        args: list[Value] = []
        named: list[tuple[str, Value]] = []
        while self.peek()[1] != ")":
            if self.peek()[0] == "word" and self.peek(1)[1] == "=":
                _, name, position = self.next()
                if name in dict(named):
                    self.fail(position, f"{name!r} is given twice")
                self.next()
                named.append((name, self.value(depth + 1)))
            else:
                if named:
                    self.fail(self.peek()[2], "unnamed values must come before named ones")
                args.append(self.value(depth + 1))
            _, mark, position = self.peek()
            if mark == ",":
                self.next()
            elif mark != ")":
                self.fail(position, "expected a comma or a closing parenthesis")
        self.next()
        return tuple(args), tuple(named)


def format_expression(value: Value) -> str:
    """Returns the text that `parse_expression` parses back to the same value."""
    if isinstance(value, Percent):
        return f"{_write_number(value.value)}%"
    if isinstance(value, int | float):
        return _write_number(value)
    if isinstance(value, tuple):
        inside = ", ".join(format_expression(v) for v in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if value.bare:
        return value.name
    parts = [format_expression(v) for v in value.args] + [
        f"{k}={format_expression(v)}" for k, v in value.named
    ]
    return f"{value.name}({', '.join(parts)})"


def _write_number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "inf"
    whole = value == int(value) and abs(value) < 1e15
    return str(int(value)) if whole else repr(value)
