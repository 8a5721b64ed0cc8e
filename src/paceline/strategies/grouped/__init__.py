"""grouped: synchronous inside a group of workers, asynchronous between groups."""

from __future__ import annotations

from paceline.strategies.grouped.spec import Grouped
from paceline.strategies.registry import StrategyRecord

RECORD = StrategyRecord(
    spec=Grouped,
    pace="paceline.strategies.grouped.pace:make_pace",
    worker="paceline.strategies.grouped.worker:GroupedRunner",
    simulate="paceline.strategies.grouped.simulate:SIMULATE",
    cost="paceline.strategies.grouped.cost:COST",
    examples=("grouped(size=2)",),
)
