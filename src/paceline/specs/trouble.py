"""Trouble on purpose, for studies: `worker=0,factor=3` or `worker=1,ms=10,from=2,to=5`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError, nearest

_KEYS = {"slow": ("worker", "factor", "from", "to"), "delay": ("worker", "ms", "from", "to")}


@dataclass(frozen=True)
class Trouble:
    """A worker that computes `factor` times slower, or whose every exchange begins `delay_s` late.

    In force from epoch `begin` to epoch `end`, both counted from 0 and fractions allowed.
    """

    worker: int
    factor: float = 1.0
    delay_s: float = 0.0
    begin: float = 0.0
    end: float = float("inf")

    def in_force(self, epoch: float) -> bool:
        return self.begin <= epoch < self.end

    def to_plain(self) -> dict[str, float]:
        """JSON-able: an end that never comes is left out."""
        return {name: value for name, value in vars(self).items() if value != float("inf")}

    @classmethod
    def from_plain(cls, plain: dict[str, float]) -> Trouble:
        rest = {name: value for name, value in plain.items() if name != "worker"}
        return cls(int(plain["worker"]), **rest)


def read_trouble(kind: str, text: str, workers: int) -> Trouble:
    """Read the value of --slow or --delay; raises SpecError that names the part that is wrong."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, sign, value = part.strip().partition("=")
        if key not in _KEYS[kind] or not sign:
            raise SpecError(f"--{kind} {text!r}: {key!r} is unknown: {nearest(key, _KEYS[kind])}")
        try:
            values[key] = float(value)
        except ValueError:
            raise SpecError(f"--{kind} {text!r}: {key} is {value!r}, not a number") from None
    amount = "factor" if kind == "slow" else "ms"
    for needed in ("worker", amount):
        if needed not in values:
            raise SpecError(f"--{kind} {text!r}: {needed}=... is missing")
    if values["worker"] not in range(workers):
        raise SpecError(f"--{kind} {text!r}: there are workers 0 to {workers - 1}")
    least = 1.0 if kind == "slow" else 0.0
    if values[amount] < least:
        raise SpecError(f"--{kind} {text!r}: {amount} must be at least {least:g}")
    begin, end = values.get("from", 0.0), values.get("to", float("inf"))
    if not 0 <= begin < end:
        raise SpecError(f"--{kind} {text!r}: from={begin:g} must lie before to={end:g}, in epochs")
    worker = int(values["worker"])
    if kind == "slow":
        return Trouble(worker, factor=values["factor"], begin=begin, end=end)
    return Trouble(worker, delay_s=values["ms"] / 1000, begin=begin, end=end)
