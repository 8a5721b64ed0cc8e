"""Every global batch is divided among all workers, planned ahead."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.strategies.allreduce.spec import AllReduce


def make_pace(spec: AllReduce, context: PaceContext) -> Pace:
    return PlannedPace(context, balance=spec.balance == "auto")
