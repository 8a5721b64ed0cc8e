"""Splits a model into stages, separate modules that share the model's parameters.

torch.distributed.pipelining traces the model and splits the graph, so that skip connections and any
named cut are supported, not only a Sequential. Its schedules are not used: they require
micro-batches of equal size, and their errors do not name the missing stage.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import SplitPoint, pipeline

from paceline.errors import UsageError


@dataclass(frozen=True)
class StageInput:
    """Source of a stage's argument: the batch (`stage` is None), or the output of a stage."""

    stage: int | None
    index: int


@dataclass
class StageGraph:
    """A model split into stages, traced for one input shape."""

    modules: list[torch.nn.Module]
    sources: list[list[StageInput]]
    """Sources of the arguments of each stage."""
    shapes: list[list[tuple[torch.Size, torch.dtype]]]
    """Shapes and dtypes of the arguments of each stage."""
    takers: list[dict[int, list[tuple[int, int]]]] = field(default_factory=list)
    """Receivers by stage and output: stage and argument index."""

    def __post_init__(self) -> None:
        self.takers = [{} for _ in self.modules]
        for stage, sources in enumerate(self.sources):
            for place, source in enumerate(sources):
                if source.stage is not None:
                    taken = self.takers[source.stage].setdefault(source.index, [])
                    taken.append((stage, place))


def trace_stages(
    model: torch.nn.Module, cuts: tuple[str, ...], example: torch.Tensor
) -> StageGraph:
    """Splits before the named modules. Raises UsageError if the model cannot be traced."""
    spec = dict.fromkeys(cuts, SplitPoint.BEGINNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = pipeline(model, mb_args=(example,), split_spec=spec)
    except Exception as error:
        # torch's generic message comes first; the cause follows.
        why = str(error.__cause__ or error).strip().splitlines()
        raise UsageError(
            f"pipeline: torch cannot trace this model ({why[0][:200] if why else error!r}); "
            "choose other cuts, or a strategy that does not split the model"
        ) from None
    finally:
        # torch marks the cuts in the modules and does not remove the marks.
        for cut in cuts:
            module = model.get_submodule(cut)
            for mark in ("forward", "_orig_forward"):
                module.__dict__.pop(mark, None)
    if pipe.num_stages != len(cuts) + 1:
        raise UsageError(
            f"pipeline: {len(cuts)} cuts give {pipe.num_stages} stages: a cut is before the "
            "first operation, or two are at the same position"
        )
    graph = read_graph(pipe)
    for stage in graph.modules:
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            mine = model.get_parameter(name)
            if parameter is not mine:  # tracing duplicates tied weights
                owner, _, last = name.rpartition(".")
                setattr(stage.get_submodule(owner), last, mine)
    return graph


def read_graph(pipe: Any) -> StageGraph:
    graph = pipe.split_gm.graph
    inputs: dict[Any, int] = {}
    stage_of: dict[Any, int] = {}
    sources: list[list[StageInput]] = []
    shapes: list[list[tuple[torch.Size, torch.dtype]]] = []

    def find(node: Any) -> StageInput:
        if node in inputs:
            return StageInput(None, inputs[node])
        if node in stage_of:
            return StageInput(stage_of[node], 0)
        whole, index = node.args  # operator.getitem
        return StageInput(stage_of[whole], int(index))

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


def stage_schedule(stage: int, stages: int, micro: int, schedule: str) -> list[tuple[str, int]]:
    """Returns the schedule of a stage: ("forward", k) and ("backward", k) of micro-batches."""
    if schedule == "gpipe":
        return [("forward", k) for k in range(micro)] + [("backward", k) for k in range(micro)]
    ahead = min(micro, stages - 1 - stage)
    steps = [("forward", k) for k in range(ahead)]
    for k in range(micro - ahead):
        steps += [("forward", ahead + k), ("backward", k)]
    return steps + [("backward", k) for k in range(micro - ahead, micro)]
