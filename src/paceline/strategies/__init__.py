"""The runners behind the strategies: what each worker does to keep in step.

Adding a strategy: one spec in `paceline.specs.strategy`, one runner, one line here, and the
contract tests.
"""

from __future__ import annotations

import importlib

from paceline.specs.strategy import Strategy
from paceline.strategies.runner import Runner, WorkerContext

RUNNERS = {
    "single": "paceline.strategies.single:SingleRunner",
    "allreduce": "paceline.strategies.allreduce:AllReduceRunner",
    "allreduce/optimizer": "paceline.strategies.sharded:ShardedOptimizerRunner",
    "allreduce/full": "paceline.strategies.sharded:FullyShardedRunner",
    "diloco": "paceline.strategies.local_sgd:DiLoCoRunner",
    "grouped": "paceline.strategies.grouped:GroupedRunner",
    "local_sgd": "paceline.strategies.local_sgd:LocalSgdRunner",
    "pipeline": "paceline.strategies.pipeline:PipelineRunner",
    "ps": "paceline.strategies.ps.worker:ParameterServerRunner",
    "tensor": "paceline.strategies.tensor:TensorRunner",
}


def make_runner(strategy: Strategy, around: WorkerContext) -> Runner:
    module, name = RUNNERS[strategy.worker_variant(around.size)].split(":")
    runner: Runner = getattr(importlib.import_module(module), name)(strategy, around)
    return runner
