"""allreduce: synchronous; gradients averaged over all workers at every step."""

from __future__ import annotations

from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.registry import StrategyRecord

RECORD = StrategyRecord(
    spec=AllReduce,
    pace="paceline.strategies.allreduce.pace:make_pace",
    worker={
        "": "paceline.strategies.allreduce.worker:AllReduceRunner",
        "optimizer": "paceline.strategies.allreduce.sharded:ShardedOptimizerRunner",
        "full": "paceline.strategies.allreduce.sharded:FullyShardedRunner",
    },
    simulate="paceline.strategies.allreduce.simulate:SIMULATE",
    cost="paceline.strategies.allreduce.cost:COST",
    candidates=(
        "allreduce",
        "allreduce(balance=auto)",
    ),
    examples=("allreduce", "allreduce(balance=auto)"),
    memory_saving=("allreduce(shard=optimizer)", "allreduce(shard=full)"),
)
