"""tensor: each layer in slices, one per worker."""

from __future__ import annotations

from paceline.strategies.registry import StrategyRecord
from paceline.strategies.tensor.spec import TensorParallel

RECORD = StrategyRecord(
    spec=TensorParallel,
    pace="paceline.strategies.tensor.pace:make_pace",
    worker="paceline.strategies.tensor.worker:TensorRunner",
    simulate="paceline.strategies.tensor.simulate:SIMULATE",
    cost="paceline.strategies.tensor.cost:COST",
    examples=("tensor(size=2)",),
    memory_saving=("tensor(size={workers})",),
)
