"""Every global batch is divided among all workers, planned ahead."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.strategies.local_sgd.spec import LocalSgd


def make_pace(spec: LocalSgd, context: PaceContext) -> Pace:
    return PlannedPace(context)
