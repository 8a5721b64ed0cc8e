"""Selects where to split a model into stages: by name, evenly by parameters, or by a profile."""

import time
from typing import Any

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import UsageError
from paceline.state import Section
from paceline.strategies.model_parallel import callable_layers
from paceline.strategies.pipeline.partition import LayerCost, StageBudget, partition_layers
from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.telemetry.proc_stats import available_memory_bytes

PASSES = 3
BACKWARD_COST = 2.0
"""Cost of a layer's backward pass relative to its forward pass (input and weight gradients)."""


def parameter_modules(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Returns modules with direct parameters, in order, and their numbers of elements."""
    counts = [
        (name, sum(p.numel() for p in parameters if p.requires_grad))
        for name, _, parameters in callable_layers(model)
    ]
    return [(name, count) for name, count in counts if count]


def check_cuts(model: torch.nn.Module, cuts: tuple[str, ...]) -> None:
    known = [
        name
        for name, module in model.named_modules()
        if name and next(module.parameters(), None) is not None
    ]
    for cut in cuts:
        if cut not in known:
            shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise UsageError(
                f"pipeline(cut={cut}): the model has no such layer; known layers: {shown}"
            )


def check_count(layers: int, stages: int) -> None:
    if layers < stages:
        raise UsageError(
            f"pipeline(stages={stages}): the model has only {layers} layers with parameters; "
            f"use at most {layers} stages"
        )


def choose_cuts(
    spec: PipelineParallel,
    model: torch.nn.Module,
    example: torch.Tensor,
    slots: int,
    group: CollectiveGroup,
) -> tuple[str, ...]:
    """Returns the modules that start a stage, equal on all workers; a collective operation."""
    if spec.cuts:
        check_cuts(model, spec.cuts)
        return spec.cuts
    if spec.stages == 1:
        return ()
    if spec.cut == "even":
        return cut_evenly(model, spec.stages)
    layers = profile_layers(model, example, slots)
    check_count(len(layers), spec.stages)
    gathered = group.all_gather_sections(
        Section(plain={"seconds": [x.seconds for x in layers], "room": available_memory_bytes()})
    )
    places: list[StageBudget] = []
    for stage in range(spec.stages):
        # Every replica has a worker for this stage; the slowest and the smallest decide.
        mine = [s.plain for s in gathered[stage :: spec.stages]]
        seconds = [max(s["seconds"][i] for s in mine) for i in range(len(layers))]
        weights = sum(p.nbytes for p in model.parameters())
        room = min(s["room"] for s in mine) + weights  # the whole model is in memory at this point
        waiting = spec.micro if spec.schedule == "gpipe" else min(spec.micro, spec.stages - stage)
        places.append(StageBudget(seconds, room, waiting))
    starts = partition_layers(layers, places)
    if starts is None:
        smallest = min(place.memory_bytes for place in places)
        raise UsageError(
            f"pipeline(stages={spec.stages}): no split fits into the memory of the machines "
            f"({smallest / 1e9:.2f} GB on the smallest); use more stages or more micro-batches"
        )
    return tuple(layers[start].name for start in starts[1:])


def cut_evenly(model: torch.nn.Module, stages: int) -> tuple[str, ...]:
    """Returns the cuts that minimize the largest stage, in parameters."""
    found = parameter_modules(model)
    check_count(len(found), stages)
    layers = [LayerCost(name, float(count), 0, 0, 0) for name, count in found]
    place = StageBudget([layer.seconds for layer in layers], 0.0, 0)
    starts = partition_layers(layers, [place] * stages)
    assert starts is not None
    return tuple(found[start][0] for start in starts[1:])


def profile_layers(model: torch.nn.Module, example: torch.Tensor, slots: int) -> list[LayerCost]:
    """Profiles a few forward passes: time and saved activations per layer.

    `slots` is the number of values that the optimizer stores per weight. The model and its random
    generator are unchanged.
    """
    generator = torch.get_rng_state()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    names = dict(parameter_modules(model))
    layers = {n: (module, own) for n, module, own in callable_layers(model) if n in names}
    best: dict[str, tuple[float, int, int]] = {}
    """Seconds, saved bytes and input bytes of each layer, in the order of execution."""
    for _ in range(PASSES):
        begun: list[tuple[str, float, int, int]] = []
        kept = [0]

        def on_begin(name: str, given: Any, begun: Any = begun, kept: Any = kept) -> None:
            nbytes = sum(t.nbytes for t in given if isinstance(t, torch.Tensor))
            begun.append((name, time.perf_counter(), kept[0], nbytes))

        def on_keep(tensor: torch.Tensor, kept: Any = kept) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept[0] += tensor.nbytes
            return tensor

        hooks = [
            module.register_forward_pre_hook(lambda _, given, name=name: on_begin(name, given))
            for name, (module, _) in layers.items()
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(on_keep, lambda tensor: tensor):
                model(example)
        finally:
            for hook in hooks:
                hook.remove()
        ends = [*((t, k) for _, t, k, _ in begun[1:]), (time.perf_counter(), kept[0])]
        for (name, at, held, nbytes), (until, held_then) in zip(begun, ends, strict=True):
            seconds = min(until - at, best[name][0] if name in best else float("inf"))
            best[name] = (seconds, held_then - held, nbytes)
    torch.set_rng_state(generator)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    state_bytes = {n: (2 + slots) * sum(p.nbytes for p in own) for n, (_, own) in layers.items()}
    return [
        LayerCost(name, (1 + BACKWARD_COST) * seconds, state_bytes[name], held, nbytes)
        for name, (seconds, held, nbytes) in best.items()
    ]
