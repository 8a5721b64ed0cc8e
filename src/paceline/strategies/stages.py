"""A model cut into stages, each a module of its own with the model's very parameters.

torch.distributed.pipelining traces the model and splits the graph, so that skip connections and any
module with a nameable cut work, not only a Sequential. Its schedules are not used: they want every
micro-batch of one size, and wait without saying for whom.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import SplitPoint, pipeline

from paceline.errors import UsageError


@dataclass(frozen=True)
class Source:
    """Where an argument of a stage comes from: the batch (`stage` is None), or a stage's output."""

    stage: int | None
    index: int


@dataclass
class StageGraph:
    """One way to cut a model, traced for one shape of input."""

    modules: list[torch.nn.Module]
    sources: list[list[Source]]
    """By stage, one for each argument."""
    shapes: list[list[tuple[torch.Size, torch.dtype]]]
    """By stage, of each argument."""
    takers: list[dict[int, list[tuple[int, int]]]] = field(default_factory=list)
    """By stage and output: the stages that take it, and as which argument."""

    def __post_init__(self) -> None:
        self.takers = [{} for _ in self.modules]
        for stage, sources in enumerate(self.sources):
            for place, source in enumerate(sources):
                if source.stage is not None:
                    taken = self.takers[source.stage].setdefault(source.index, [])
                    taken.append((stage, place))


def cut_points(model: torch.nn.Module) -> list[str]:
    """Names of modules before which the model can be cut: those that hold parameters themselves,
    and those that hold such, in the order of the model."""
    return [
        name
        for name, module in model.named_modules()
        if name and next(module.parameters(), None) is not None
    ]


def leaves(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Modules with parameters of their own, in order, and how many numbers each holds."""
    found = []
    for name, module in model.named_modules():
        count = sum(p.numel() for p in module.parameters(recurse=False) if p.requires_grad)
        if count:
            found.append((name, count))
    return found


def check_cuts(model: torch.nn.Module, cuts: tuple[str, ...]) -> None:
    known = cut_points(model)
    for cut in cuts:
        if cut not in known:
            shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise UsageError(f"pipeline(cut={cut}): the model has no such layer: known: {shown}")


def cut_evenly(model: torch.nn.Module, stages: int) -> tuple[str, ...]:
    """Cuts that leave the largest stage as small as can be, in parameters."""
    names = leaves(model)
    if len(names) < stages:
        raise UsageError(
            f"pipeline(stages={stages}): the model has {len(names)} layers with parameters: "
            f"use at most {len(names)} stages"
        )
    starts = balance([float(count) for _, count in names], stages)
    return tuple(names[start][0] for start in starts[1:])


def balance(costs: list[float], stages: int) -> list[int]:
    """Where each of so many runs of neighbours begins; the dearest is as cheap as can be."""
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    came: list[list[int]] = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                cost = max(best[stage - 1][start], sums[end] - sums[start])
                if cost < best[stage][end]:
                    best[stage][end], came[stage][end] = cost, start
    starts, end = [], count
    for stage in range(stages, 0, -1):
        end = came[stage][end]
        starts.append(end)
    return starts[::-1]


def trace(model: torch.nn.Module, cuts: tuple[str, ...], example: torch.Tensor) -> StageGraph:
    """Cut before the named modules; raises UsageError where the model cannot be traced."""
    spec = dict.fromkeys(cuts, SplitPoint.BEGINNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = pipeline(model, mb_args=(example,), split_spec=spec)
    except Exception as error:
        why = str(error).strip().splitlines()
        raise UsageError(
            f"pipeline: torch cannot trace this model ({why[0][:200] if why else error!r}): "
            "cut it elsewhere, or use a strategy that keeps models whole"
        ) from None
    if pipe.num_stages != len(cuts) + 1:
        raise UsageError(
            f"pipeline: {len(cuts)} cuts give {pipe.num_stages} stages: a cut lies before the "
            "first operation, or two lie together"
        )
    return read_graph(pipe)


def read_graph(pipe: Any) -> StageGraph:
    graph = pipe.split_gm.graph
    inputs: dict[Any, int] = {}
    stage_of: dict[Any, int] = {}
    sources: list[list[Source]] = []
    shapes: list[list[tuple[torch.Size, torch.dtype]]] = []

    def find(node: Any) -> Source:
        if node in inputs:
            return Source(None, inputs[node])
        if node in stage_of:
            return Source(stage_of[node], 0)
        whole, index = node.args  # operator.getitem
        return Source(stage_of[whole], int(index))

    for node in graph.nodes:
        if node.op == "placeholder":
            inputs[node] = len(inputs)
        elif node.op == "call_module":
            stage_of[node] = len(sources)
            sources.append([find(argument) for argument in node.args])
            module = pipe.split_gm.get_submodule(node.target)
            metas = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
            shapes.append([(m.shape, m.dtype) for m in metas])
    modules = [pipe.get_stage_module(i) for i in range(pipe.num_stages)]
    return StageGraph(modules, sources, shapes)


def order_of_steps(stage: int, stages: int, micro: int, schedule: str) -> list[tuple[str, int]]:
    """What a stage does in a step: ("forward", k) and ("backward", k) of its micro-batches."""
    if schedule == "gpipe":
        return [("forward", k) for k in range(micro)] + [("backward", k) for k in range(micro)]
    ahead = min(micro, stages - 1 - stage)
    steps = [("forward", k) for k in range(ahead)]
    for k in range(micro - ahead):
        steps += [("forward", ahead + k), ("backward", k)]
    return steps + [("backward", k) for k in range(micro - ahead, micro)]
