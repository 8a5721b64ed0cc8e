"""The last stage of each replica is leased its rows, planned ahead."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.strategies.pipeline.spec import PipelineParallel


def make_pace(spec: PipelineParallel, context: PaceContext) -> Pace:
    return PlannedPace(context, weights=spec.batch_weights(context.workers))
