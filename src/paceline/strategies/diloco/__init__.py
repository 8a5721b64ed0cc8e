"""diloco: many local steps; an outer Nesterov step on their average."""

from __future__ import annotations

from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.registry import StrategyRecord

RECORD = StrategyRecord(
    spec=DiLoCo,
    pace="paceline.strategies.diloco.pace:make_pace",
    worker="paceline.strategies.diloco.worker:DiLoCoRunner",
    simulate="paceline.strategies.diloco.simulate:SIMULATE",
    cost="paceline.strategies.diloco.cost:COST",
    examples=("diloco(h=4)",),
)
