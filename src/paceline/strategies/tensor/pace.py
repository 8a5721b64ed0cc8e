"""The first part of each replica is leased its rows, planned ahead."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.strategies.tensor.spec import TensorParallel


def make_pace(spec: TensorParallel, context: PaceContext) -> Pace:
    return PlannedPace(context, weights=spec.batch_weights(context.workers))
