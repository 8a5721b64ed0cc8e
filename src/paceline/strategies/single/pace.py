"""All of every batch is planned ahead for worker 0."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.strategies.single.spec import Single


def make_pace(spec: Single, context: PaceContext) -> Pace:
    return PlannedPace(context, weights=spec.batch_weights(context.workers))
