"""Cost of pipeline parallelism: where the model is cut, and what a step of the stages takes."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from paceline.errors import UsageError
from paceline.plan.cost_model import FORWARD_FRACTION, Workload
from paceline.plan.facet import CostFacet, StepEstimate
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.strategies.model_parallel_cost import (
    ReplicaStep,
    StageHost,
    model_parallel_step,
    stage_hosts,
)
from paceline.strategies.pipeline.partition import (
    LayerCost,
    StageBudget,
    partition_layers,
    stage_cost,
)
from paceline.strategies.pipeline.spec import PipelineParallel

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Numbers of micro-batches that the planner tries."""


def layer_shares(work: Workload) -> list[float]:
    """Fraction of a step's compute time per parameter, in the model's order."""
    if len(work.gradient_ready) != len(work.shapes):
        return [math.prod(shape) / max(1, work.parameters) for shape in work.shapes]
    shares, before = [], FORWARD_FRACTION
    for ready in reversed(work.gradient_ready):
        shares.append(max(0.0, ready - before))
        before = max(before, ready)
    total = sum(shares) or 1.0
    return [share / total for share in reversed(shares)]


def estimate_pipeline(
    work: Workload, spec: PipelineParallel, hosts: Sequence[StageHost], samples: float
) -> ReplicaStep | None:
    """Estimates a pipeline over these hosts, in their order; None if no partition fits in memory.

    Raises UsageError if there are more stages than layers.
    """
    if len(work.shapes) < spec.stages:
        raise UsageError(
            f"pipeline(stages={spec.stages}): the model has only {len(work.shapes)} parameters "
            f"to cut between; use at most {len(work.shapes)} stages"
        )
    micro = spec.micro
    each = samples / micro
    shares = layer_shares(work)
    state = [math.prod(s) * work.item_bytes * (2 + work.slots) for s in work.shapes]
    passed = work.input_bytes_per_sample
    if len(passed) != len(work.shapes):
        passed = (0.0,) * len(work.shapes)
    layers = [
        LayerCost("", share, int(size), 0, int(each * entering))
        for share, size, entering in zip(shares, state, passed, strict=True)
    ]
    times = [[share * (h.fixed_s + each * h.per_sample_s) for share in shares] for h in hosts]
    if spec.cut == "even":  # balances parameters only
        budgets = [StageBudget(state, h.memory_bytes, 0, math.inf) for h in hosts]
    else:
        budgets = [
            StageBudget(seconds, h.memory_bytes, 0, h.bytes_per_s)
            for seconds, h in zip(times, hosts, strict=True)
        ]
    starts = partition_layers(layers, budgets)
    if starts is None:
        return None
    edges = [*starts, len(layers)]
    # Of each stage: per micro-batch with communication, and per step without.
    seconds, computing = [], []
    for stage, host in enumerate(hosts):
        start, stop = edges[stage], edges[stage + 1]
        budget = StageBudget(times[stage], math.inf, 0, host.bytes_per_s)
        hops = 2 * host.latency_s * ((stage > 0) + (stop < len(layers)))
        seconds.append(stage_cost(layers, budget, start, stop) + hops)
        computing.append(micro * sum(times[stage][start:stop]))
    return ReplicaStep(pipeline_s(seconds, micro), computing)


def pipeline_s(stages: Sequence[float], micro: int) -> float:
    """Step time: one micro-batch through all stages, the rest at the pace of the slowest stage."""
    return sum(stages) + (micro - 1) * max(stages)


class PipelineParallelCost(CostFacet[PipelineParallel]):
    def step(self, arrays: PoolArrays, hosts: Ints, spec: PipelineParallel) -> StepEstimate:
        def replica_step(machines: Sequence[StageHost], samples: float) -> ReplicaStep:
            found = estimate_pipeline(arrays.work, spec, machines, samples)
            assert found is not None, "call fits() first"
            return found

        return model_parallel_step(arrays, hosts, spec.model_parts, replica_step)

    def fits(self, arrays: PoolArrays, hosts: Ints, spec: PipelineParallel) -> bool:
        """Returns whether some partition fits every stage into its host's memory."""
        places = stage_hosts(arrays, hosts)
        return estimate_pipeline(arrays.work, spec, places, arrays.work.batch) is not None

    def on_hosts(self, spec: PipelineParallel, count: int) -> PipelineParallel:
        return dataclasses.replace(spec, stages=count)

    def splits(self, arrays: PoolArrays, count: int) -> Iterator[PipelineParallel]:
        layers = sum(len(shape) > 1 for shape in arrays.work.shapes)
        if count > layers:
            return
        for micro in MICRO_BATCHES:
            if arrays.work.batch % micro == 0:
                yield PipelineParallel(stages=count, micro=micro, cut="auto")
