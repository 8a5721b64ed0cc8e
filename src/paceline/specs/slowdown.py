"""Injected slowdowns: `worker=0,factor=3`, `worker=0,cores=0.25`, `worker=1,ms=10,from=2,to=5`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import SpecError, suggest_name

_KEYS = {
    "slow": ("worker", "factor", "cores", "from", "to"),
    "delay": ("worker", "ms", "from", "to"),
}
_EXAMPLES = {"slow": "worker=0,factor=3", "delay": "worker=1,ms=10"}


@dataclass(frozen=True)
class InjectedSlowdown:
    """Slows one worker down: `factor` times slower, limited to `cores` of a core, or delayed.

    `factor` stretches the measured compute time, including time lost to other processes. `cores` is
    a quota: the worker takes as long as it would alone on this fraction of a core.
    Active from epoch `begin` to epoch `end`, counted from 0; fractions are allowed.
    """

    worker: int
    factor: float = 1.0
    cores: float = 1.0
    delay_s: float = 0.0
    begin: float = 0.0
    end: float = float("inf")

    def is_active(self, epoch: float) -> bool:
        return self.begin <= epoch < self.end

    def to_plain(self) -> dict[str, float]:
        """Returns JSON-able values, without an infinite end."""
        return {name: value for name, value in vars(self).items() if value != float("inf")}

    @classmethod
    def from_plain(cls, plain: dict[str, float]) -> InjectedSlowdown:
        rest = {name: value for name, value in plain.items() if name != "worker"}
        return cls(int(plain["worker"]), **rest)


def parse_slowdown(kind: str, text: str, workers: int) -> InjectedSlowdown:
    """Parses the value of --slow or --delay; raises SpecError that names the invalid part."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, sign, value = part.strip().partition("=")
        if not sign:
            raise SpecError(f"--{kind} {text!r}: {key!r} has no value; use {_EXAMPLES[kind]}")
        if key not in _KEYS[kind]:
            raise SpecError(f"--{kind} {text!r}: unknown {key!r}; {suggest_name(key, _KEYS[kind])}")
        try:
            values[key] = float(value)
        except ValueError:
            raise SpecError(f"--{kind} {text!r}: {key} must be a number, got {value!r}") from None
    amounts = [k for k in values if k in ("factor", "cores", "ms")]
    if "worker" not in values:
        raise SpecError(f"--{kind} {text!r}: worker=... is required")
    if len(amounts) != 1:
        one = "one of factor=... and cores=..." if kind == "slow" else "ms=..."
        raise SpecError(f"--{kind} {text!r}: {one} is required")
    amount = amounts[0]
    if values["worker"] not in range(workers):
        raise SpecError(f"--{kind} {text!r}: worker must be 0 to {workers - 1}")
    if amount == "cores" and not 0 < values[amount] <= 1:
        raise SpecError(f"--{kind} {text!r}: cores must be greater than 0 and at most 1")
    least = 1.0 if amount == "factor" else 0.0
    if values[amount] < least:
        raise SpecError(f"--{kind} {text!r}: {amount} must be at least {least:g}")
    begin, end = values.get("from", 0.0), values.get("to", float("inf"))
    if not 0 <= begin < end:
        raise SpecError(f"--{kind} {text!r}: from={begin:g} must be before to={end:g}, in epochs")
    return InjectedSlowdown(
        int(values["worker"]),
        factor=values.get("factor", 1.0),
        cores=values.get("cores", 1.0),
        delay_s=values.get("ms", 0.0) / 1000,
        begin=begin,
        end=end,
    )


@dataclass(frozen=True)
class ActiveSlowdown:
    """Combined effect of all slowdowns of one worker at one time."""

    factor: float = 1.0
    cores: float = 1.0
    delay_s: float = 0.0

    @classmethod
    def of(cls, injected: Iterable[InjectedSlowdown], worker: int, epoch: float) -> ActiveSlowdown:
        found = [t for t in injected if t.worker == worker and t.is_active(epoch)]
        return cls(
            math.prod(t.factor for t in found),
            min((t.cores for t in found), default=1.0),
            sum(t.delay_s for t in found),
        )

    def wall_s(self, elapsed_s: float, busy_s: float) -> float:
        """Returns how long a computation that took this time should take when slowed down."""
        limited = busy_s / self.cores if self.cores < 1 else 0.0
        return self.factor * max(elapsed_s, limited)
