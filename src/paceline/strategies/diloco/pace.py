"""Every global batch is divided among all workers, planned ahead."""

from __future__ import annotations

from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.strategies.diloco.spec import DiLoCo


def make_pace(spec: DiLoCo, context: PaceContext) -> Pace:
    return PlannedPace(context)
