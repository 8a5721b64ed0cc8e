"""ps: weights and optimizer on servers; workers pull, compute and push."""

from __future__ import annotations

from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.registry import StrategyRecord

RECORD = StrategyRecord(
    spec=ParameterServer,
    pace="paceline.strategies.ps.pace:make_pace",
    worker="paceline.strategies.ps.worker:ParameterServerRunner",
    simulate="paceline.strategies.ps.simulate:SIMULATE",
    cost="paceline.strategies.ps.cost:COST",
    candidates=(
        "ps",
        "ps(servers=8)",
    ),
    examples=(
        "ps",
        "ps(sync=bsp)",
        "ps(sync=ssp(0))",
        "ps(sync=ssp(2))",
        "ps(sync=dssp(1, 4))",
        "ps(sync=kasync(2))",
        "ps(sync=gba, servers=2)",
        "ps(overlap=true)",
        "ps(sync=gba, overlap=true)",
    ),
)
