"""Models in parts: where a pipeline is cut, and what a step of it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.plan.cost_model import Workload
from paceline.specs.model_parallel import ModelParallel
from paceline.strategies.pipeline.partition import (
    LayerCost,
    StageBudget,
    partition_layers,
    stage_cost,
)
from paceline.strategies.pipeline.spec import PipelineParallel

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class StageHost:
    """What a stage is put on."""

    fixed_s: float
    per_sample_s: float
    memory_bytes: float
    """Bytes for state; infinite where nobody said."""
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class PipelineEstimate:
    """A cut, and what a step of it takes."""

    seconds: tuple[float, ...]
    """Of each stage for a micro-batch, with what it passes on."""
    computing: tuple[float, ...]
    """Of each stage for a whole step."""
    step_s: float
    state_bytes: tuple[float, ...]


def layer_shares(work: Workload) -> list[float]:
    """The share of a step's computing that belongs to each parameter, in the model's order."""
    if len(work.gradient_ready) != len(work.shapes):
        return [math.prod(shape) / max(1, work.parameters) for shape in work.shapes]
    shares, before = [], FORWARD_SHARE
    for ready in reversed(work.gradient_ready):
        shares.append(max(0.0, ready - before))
        before = max(before, ready)
    total = sum(shares) or 1.0
    return [share / total for share in reversed(shares)]


def estimate_pipeline(
    work: Workload, strategy: PipelineParallel, machines: Sequence[StageHost], rows: float
) -> PipelineEstimate | None:
    """A pipeline over these machines, in their order; None where no cut fits their memory.

    Raises UsageError for more stages than there are layers.
    """
    if len(work.shapes) < strategy.stages:
        raise UsageError(
            f"pipeline(stages={strategy.stages}): the model has {len(work.shapes)} parameters to "
            f"cut between: use at most {len(work.shapes)} stages"
        )
    micro = strategy.micro
    each = rows / micro
    shares = layer_shares(work)
    state = [math.prod(s) * work.item_bytes * (2 + work.slots) for s in work.shapes]
    passed = (
        work.input_bytes_per_sample
        if len(work.input_bytes_per_sample) == len(work.shapes)
        else (0.0,) * len(work.shapes)
    )
    even = strategy.cut == "even"
    layers = [
        LayerCost("", share, int(size), 0, int(each * entering))
        for share, size, entering in zip(shares, state, passed, strict=True)
    ]
    places = [
        StageBudget(
            # An even cut looks at parameters alone.
            [float(size) for size in state]
            if even
            else [share * (m.fixed_s + each * m.per_sample_s) for share in shares],
            m.memory_bytes,
            0,
            math.inf if even else m.bytes_per_s,
        )
        for m in machines
    ]
    starts = partition_layers(layers, places)
    if starts is None:
        return None
    edges = [*starts, len(layers)]
    seconds, computing, held = [], [], []
    for stage, machine in enumerate(machines):
        start, stop = edges[stage], edges[stage + 1]
        alone = machine.fixed_s + each * machine.per_sample_s
        times = [share * alone for share in shares]
        place = StageBudget(times, math.inf, 0, machine.bytes_per_s)
        hops = 2 * machine.latency_s * ((stage > 0) + (stop < len(layers)))
        seconds.append(stage_cost(layers, place, start, stop) + hops)
        computing.append(micro * sum(times[start:stop]))
        held.append(float(sum(state[start:stop])))
    return PipelineEstimate(
        tuple(seconds), tuple(computing), pipeline_s(seconds, micro), tuple(held)
    )


def pipeline_s(stages: Sequence[float], micro: int) -> float:
    """A micro-batch through all stages, then one after another at the pace of the slowest."""
    return sum(stages) + (micro - 1) * max(stages)


def bubble_fraction(stages: int, micro: int) -> float:
    """The share of a step that equal stages wait."""
    return (stages - 1) / (micro + stages - 1)


def tensor_step_s(
    work: Workload, strategy: ModelParallel, machines: Sequence[StageHost], rows: float
) -> float:
    """A step of layers in slices: each machine its part, and an exchange in every layer."""
    parts = strategy.model_parts
    slowest = max(m.fixed_s + rows * m.per_sample_s / parts for m in machines)
    if parts == 1:
        return slowest
    latency = max(m.latency_s for m in machines)
    rate = min(m.bytes_per_s for m in machines)
    layers = sum(len(shape) > 1 for shape in work.shapes)
    entering = sum(
        n
        for n, shape in zip(work.input_bytes_per_sample, work.shapes, strict=False)
        if len(shape) > 1
    )
    # Outputs are gathered going forward, gradients of inputs added up going back.
    nbytes = 3 * rows * entering * (parts - 1) / parts
    return slowest + nbytes / rate + 4 * layers * (parts - 1) * latency
