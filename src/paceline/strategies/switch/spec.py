"""Spec of switch: several strategies in sequence in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.protocol.switch_policy import RunHorizon, SwitchPolicy, resolve_switch_points
from paceline.specs.base import spec_from_call
from paceline.specs.expression import Call, Value, format_expression, parse_expression
from paceline.specs.point import RunPoint, read_point, read_points
from paceline.specs.strategy import StateFraction, Strategy
from paceline.strategies.registry import StrategyRecord, parse_strategy, strategy_from_value
from paceline.strategies.switch.trigger import TRIGGERS, SwitchTrigger


@dataclass(frozen=True)
class Switch(Strategy):
    """Several strategies in sequence, with switches at given points or by a trigger."""

    name: ClassVar[str] = "switch"
    parts: tuple[Strategy, ...] = ()
    at: tuple[RunPoint, ...] = ()
    when: SwitchTrigger | None = None

    def __init__(self, *parts: Strategy | str, at: object = None, when: object = None) -> None:
        strategies = tuple(parse_strategy(p) for p in parts)
        object.__setattr__(self, "parts", strategies)
        if at is not None and when is not None:
            raise SpecError("switch: at and when cannot be combined; remove one of them")
        if at is None and when is None:
            raise SpecError("switch requires a switch point; add at=50%, at=epoch(10) or when=auto")
        object.__setattr__(self, "at", read_points(at) if at is not None else ())
        if isinstance(when, str):
            when = spec_from_call(parse_expression(when), TRIGGERS, "switch rule")
        object.__setattr__(self, "when", when)
        self._check()

    def _check(self) -> None:
        if len(self.parts) < 2:
            raise SpecError(f"switch has {len(self.parts)} strategies; at least two are required")
        for part in self.parts:
            if len(part.phases) > 1:
                raise SpecError(
                    "a switch inside switch is not supported; list the strategies in sequence"
                )
        if self.when is not None:
            if not isinstance(self.when, SwitchTrigger):
                raise SpecError(f"switch(when={self.when!r}): known: {', '.join(sorted(TRIGGERS))}")
            limit = self.when.max_phases
            if limit is not None and len(self.parts) > limit:
                raise SpecError(
                    f"when={self.when} supports two strategies, but {len(self.parts)} were given"
                )
        elif len(self.at) != len(self.parts) - 1:
            raise SpecError(
                f"switch: {len(self.parts)} strategies require {len(self.parts) - 1} switch "
                f"point(s), got {len(self.at)}; "
                "use at=50% for two strategies, at=(25%, 75%) for three"
            )

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)

    @property
    def phases(self) -> tuple[Strategy, ...]:
        return self.parts

    @property
    def needs_worker_speeds(self) -> bool:
        return any(part.needs_worker_speeds for part in self.parts)

    @property
    def needs_exchange_probe(self) -> bool:
        return self.when is not None and self.when.compares_goodput

    def servers_for(self, workers: int) -> int:
        return max(part.servers_for(workers) for part in self.parts)

    def copies_of_shards(self, *, elastic: bool) -> int:
        return max(part.copies_of_shards(elastic=elastic) for part in self.parts)

    def state_fraction(self, workers: int) -> StateFraction:
        return max(
            (part.state_fraction(workers) for part in self.parts),
            key=lambda held: held.floats_per_weight(2),
        )

    def lag_bound(self, workers: int) -> float | None:
        bounds = [part.lag_bound(workers) for part in self.parts]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if len(known) == len(bounds) else None

    def check_workers(self, workers: int) -> None:
        """Allows a phase of `single`: one worker computes, the others idle."""
        for part in self.parts:
            part.check_workers(part.worker_count(workers))

    def check_batch(self, batch: int, workers: int) -> None:
        for part in self.parts:
            part.check_batch(batch, workers)

    def to_call(self) -> Call:
        points = tuple(p.to_value() for p in self.at)
        at: Value = points[0] if len(points) == 1 else points
        rule = ("when", self.when.to_call()) if self.when is not None else ("at", at)
        return Call("switch", tuple(p.to_call() for p in self.parts), (rule,), bare=False)

    @classmethod
    def from_call(cls, call: Call) -> Switch:
        named = dict(call.named)
        at, when = named.pop("at", None), named.pop("when", None)
        for name in named:
            raise SpecError(f"switch has no option {name!r}; it accepts strategies, at and when")
        parts = tuple(strategy_from_value(a) for a in call.args)
        points = None
        if at is not None:
            points = tuple(read_point(p) for p in (at if isinstance(at, tuple) else (at,)))
        rule = spec_from_call(when, TRIGGERS, "switch rule") if when is not None else None
        return cls(*parts, at=points, when=rule)


def make_policy(spec: Switch, horizon: RunHorizon) -> SwitchPolicy:
    """Returns the policy of a run. Raises SpecError for a switch that the run does not support."""
    if spec.when is not None:
        return spec.when.make_policy(horizon, spec.parts)
    names = [f"at={format_expression(p.to_value())}" for p in spec.at]
    points = [p.resolve(horizon.samples_per_epoch, horizon.epochs) for p in spec.at]
    return resolve_switch_points(names, points, horizon)


RECORD = StrategyRecord(
    spec=Switch,
    policy="paceline.strategies.switch.spec:make_policy",
    cost="paceline.strategies.switch.cost:SwitchCost",
    candidates=("switch(allreduce, ps, at=50%)", "switch(ps, allreduce, at=50%)"),
    examples=(
        "switch(allreduce, ps, at=50%)",
        "switch(ps, allreduce, at=samples(13))",
        "switch(allreduce, ps(sync=bsp, servers=2), single, ps, at=(10%, 40%, 90%))",
        "switch(ps(sync=ssp(1)), grouped(size=2), ps(sync=dssp), at=(30%, 60%))",
        "switch(allreduce, ps, when=auto)",
        "switch(allreduce, ps, when=straggler(greedy, windows=1))",
        "switch(allreduce, ps, when=straggler(elastic, windows=1))",
    ),
)
