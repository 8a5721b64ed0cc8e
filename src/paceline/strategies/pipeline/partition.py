"""Division of a sequence of layers into stages, by the cost of each layer on each machine."""

from collections.abc import Sequence
from dataclasses import dataclass

LINK_BYTES_S = 1e9
"""Assumed between two processes of one machine, where it was not measured."""


@dataclass(frozen=True)
class LayerCost:
    """A module with its own parameters, and all operations until the next one begins."""

    name: str
    seconds: float
    """Seconds of forward and backward of a micro-batch."""
    state_bytes: int
    """Bytes of weights, gradients and optimizer slots."""
    kept_bytes: int
    """Bytes of activations of a micro-batch that are kept for its backward pass."""
    input_bytes: int
    """Bytes passed to it if it is the first of a stage."""


@dataclass(frozen=True)
class StageBudget:
    """Resources for one stage."""

    seconds: Sequence[float]
    """Seconds of each layer on this machine."""
    memory_bytes: float
    """Bytes for state and activations."""
    in_flight_micro_batches: int
    """Micro-batches whose activations are kept at a time."""
    bytes_per_s: float = LINK_BYTES_S
    """Bandwidth to the adjacent stages."""


def stage_cost(layers: Sequence[LayerCost], place: StageBudget, start: int, stop: int) -> float:
    """Returns the seconds of a stage with these layers; infinite if they do not fit."""
    part = layers[start:stop]
    needed = sum(x.state_bytes + place.in_flight_micro_batches * x.kept_bytes for x in part)
    if needed > place.memory_bytes:
        return float("inf")
    passed = (layers[start].input_bytes if start else 0) + (
        layers[stop].input_bytes if stop < len(layers) else 0
    )
    return sum(place.seconds[start:stop]) + 2 * passed / place.bytes_per_s


def partition_layers(
    layers: Sequence[LayerCost], places: Sequence[StageBudget]
) -> list[int] | None:
    """The first layer of each stage, so that the slowest is as fast as possible; None if none fits.

    A pipeline is as fast as its slowest stage, so that is what counts.
    """
    count, stages = len(layers), len(places)
    worst = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    previous = [[0] * (count + 1) for _ in range(stages + 1)]
    worst[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                before = worst[stage - 1][start]
                if before < worst[stage][stop]:
                    cost = max(before, stage_cost(layers, places[stage - 1], start, stop))
                    if cost < worst[stage][stop]:
                        worst[stage][stop], previous[stage][stop] = cost, start
    if worst[stages][count] == float("inf"):
        return None
    starts, stop = [], count
    for stage in range(stages, 0, -1):
        stop = previous[stage][stop]
        starts.append(stop)
    return starts[::-1]
