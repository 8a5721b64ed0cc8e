"""single: one worker, no communication; the reference of the exact strategies."""

from __future__ import annotations

from paceline.strategies.registry import StrategyRecord
from paceline.strategies.single.spec import Single

RECORD = StrategyRecord(
    spec=Single,
    pace="paceline.strategies.single.pace:make_pace",
    worker="paceline.strategies.single.worker:SingleRunner",
    simulate="paceline.strategies.single.simulate:SIMULATE",
    cost="paceline.strategies.single.cost:COST",
    examples=("single",),
)
