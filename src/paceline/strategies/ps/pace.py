"""Each worker is granted its next lease when its push, or the clock, allows it."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext
from paceline.protocol.push_pace import PushPace, PushRules
from paceline.strategies.ps.spec import ParameterServer


def make_pace(spec: ParameterServer, context: PaceContext) -> Pace:
    rules = PushRules(
        servers=spec.servers_for(context.workers),
        lr_scale=spec.lr_scale_for,
        corrects=spec.corrects,
        gradient_weight=spec.sync.gradient_weight,
        aggregates=spec.sync.aggregates,
        overlap=spec.overlap,
    )
    return PushPace(rules, spec.sync.make_clock(context.workers), context)
