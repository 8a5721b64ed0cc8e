"""local_sgd: local steps; weights averaged every h of them, or by drift."""

from __future__ import annotations

from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.registry import StrategyRecord

RECORD = StrategyRecord(
    spec=LocalSgd,
    pace="paceline.strategies.local_sgd.pace:make_pace",
    worker="paceline.strategies.local_sgd.worker:LocalSgdRunner",
    simulate="paceline.strategies.local_sgd.simulate:SIMULATE",
    cost="paceline.strategies.local_sgd.cost:COST",
    candidates=("local_sgd(h=8)",),
    examples=("local_sgd(h=3)",),
)
