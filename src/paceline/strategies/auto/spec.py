"""Spec of auto: candidates, of which the run chooses the one that makes the most progress."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.expression import Call
from paceline.specs.strategy import StateFraction, Strategy
from paceline.strategies.registry import StrategyRecord, parse_strategy, strategy_from_value

DEFAULT_CANDIDATES = (
    "allreduce",
    "allreduce(balance=auto)",
    "ps",
    "ps(sync=ssp(3))",
    "grouped(size=2)",
    "local_sgd(h=4)",
    "local_sgd(h=16)",
    "allreduce(codec=int8)",
    "single",
)
"""In order of preference among candidates that are equally good."""


@dataclass(frozen=True)
class Auto(Strategy):
    """Chooses among candidates before and during the run, by measurement."""

    name: ClassVar[str] = "auto"
    parts: tuple[Strategy, ...] = ()
    start: Strategy | None = None
    """Strategy to begin with, for example a planner's choice; None chooses by probed speeds."""

    def __init__(self, *parts: Strategy | str, start: Strategy | str | None = None) -> None:
        strategies = tuple(parse_strategy(p) if isinstance(p, str) else p for p in parts)
        object.__setattr__(self, "parts", strategies)
        first = parse_strategy(start) if isinstance(start, str) else start
        object.__setattr__(self, "start", first)
        if len(strategies) == 1:
            raise SpecError(
                f"auto({strategies[0]}) has one candidate; list at least two, or none for all"
            )
        for part in (*strategies, *((first,) if first is not None else ())):
            if len(part.phases) > 1:
                raise SpecError(f"auto: {part} cannot be a candidate; list its strategies instead")

    @cached_property
    def _candidates(self) -> tuple[Strategy, ...]:
        parts = self.parts or tuple(parse_strategy(text) for text in DEFAULT_CANDIDATES)
        if self.start is None or self.start in parts:
            return parts
        return (*parts, self.start)

    @property
    def phases(self) -> tuple[Strategy, ...]:
        return self._candidates

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.phases)

    @property
    def needs_worker_speeds(self) -> bool:
        return True

    @property
    def needs_exchange_probe(self) -> bool:
        return True

    def servers_for(self, workers: int) -> int:
        if workers < 2:
            return 0
        return max(part.servers_for(workers) for part in self.phases)

    def copies_of_shards(self, *, elastic: bool) -> int:
        return max(part.copies_of_shards(elastic=elastic) for part in self.phases)

    def state_fraction(self, workers: int) -> StateFraction:
        return max(
            (part.state_fraction(workers) for part in self.phases),
            key=lambda held: held.floats_per_weight(2),
        )

    def lag_bound(self, workers: int) -> float | None:
        return None

    def check_workers(self, workers: int) -> None:
        """Raises SpecError if no candidate supports this many workers."""
        if not self.usable(workers):
            raise SpecError(f"{self}: no candidate supports {workers} worker(s)")

    def check_batch(self, batch: int, workers: int) -> None:
        first = self.phases[next(iter(self.usable(workers)))]
        first.check_batch(batch, workers)

    def usable(self, workers: int) -> dict[int, Strategy]:
        """Returns the candidates that support this many workers, by phase.

        With one worker nothing is exchanged: a candidate that needs only one comes before others.
        """
        found = {}
        for phase, part in enumerate(self.phases):
            try:
                part.check_workers(part.worker_count(workers))
            except SpecError:
                continue
            if workers > 1 or not part.servers_for(workers):
                found[phase] = part
        alone = {phase: part for phase, part in found.items() if part.worker_count(2) == 1}
        return alone if workers == 1 and alone else found

    def lr_description(self, workers: int) -> str:
        return "learning rate as the active candidate defines it"

    def to_call(self) -> Call:
        named = () if self.start is None else (("start", self.start.to_call()),)
        parts = tuple(p.to_call() for p in self.parts)
        return Call("auto", parts, named, bare=not parts and not named)

    @classmethod
    def from_call(cls, call: Call) -> Auto:
        named = dict(call.named)
        start = named.pop("start", None)
        for name in named:
            raise SpecError(f"auto has no option {name!r}; it accepts candidates and start")
        first = strategy_from_value(start) if start is not None else None
        return cls(*(strategy_from_value(a) for a in call.args), start=first)


RECORD = StrategyRecord(
    spec=Auto,
    policy="paceline.strategies.auto.policy:make_policy",
    cost="paceline.strategies.auto.cost:AutoCost",
    candidates=("auto",),
    examples=("auto", "auto(allreduce, ps)"),
)
