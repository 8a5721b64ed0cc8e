"""pipeline: the model in stages, each on its own worker."""

from __future__ import annotations

from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.strategies.registry import StrategyRecord

RECORD = StrategyRecord(
    spec=PipelineParallel,
    pace="paceline.strategies.pipeline.pace:make_pace",
    worker="paceline.strategies.pipeline.worker:PipelineRunner",
    simulate="paceline.strategies.pipeline.simulate:SIMULATE",
    cost="paceline.strategies.pipeline.cost:COST",
    examples=("pipeline(stages=2)",),
    memory_saving=("pipeline(stages={workers})",),
)
