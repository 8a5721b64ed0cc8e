"""A group is granted its next lease when all of its members have pushed."""

from __future__ import annotations

from paceline.protocol.clock import AspClock
from paceline.protocol.pace import Pace, PaceContext
from paceline.protocol.push_pace import PushPace, PushRules
from paceline.strategies.grouped.spec import Grouped


def make_pace(spec: Grouped, context: PaceContext) -> Pace:
    rules = PushRules(
        servers=spec.servers_for(context.workers),
        lr_scale=spec.lr_scale_for,
        corrects=spec.lr_scale is None,
    )
    return PushPace(rules, AspClock(len(context.groups)), context)
