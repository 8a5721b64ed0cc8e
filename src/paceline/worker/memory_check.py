"""Checks before the first step that a model fits in memory with its strategy."""

import re

import torch

from paceline.errors import SpecError, UsageError
from paceline.specs.optimizer import count_slots
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy, records
from paceline.telemetry.proc_stats import available_memory_bytes

SMALL = 64 << 20
"""Bytes of weights below which the check is skipped."""


def check_memory(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer, workers: int
) -> None:
    """Raises UsageError if weights, gradients and optimizer state do not fit in memory.

    The whole model exists already: a strategy frees what it does not need before it allocates.
    """
    weights = sum(p.nbytes for p in model.parameters())
    if weights < SMALL:
        return
    slots = count_slots(type(optimizer).__name__, optimizer.defaults)
    room = available_memory_bytes() + weights
    needed = weights * max(
        p.state_fraction(workers).floats_per_weight(slots) for p in strategy.phases
    )
    if needed <= room:
        return
    raise UsageError(
        f"{strategy} needs about {needed / 1e9:.2f} GB per worker (weights, gradients, optimizer "
        f"state), but only {room / 1e9:.2f} GB are available; "
        + suggest_memory_saving_strategies(weights, slots, workers, room)
    )


def suggest_memory_saving_strategies(weights: float, slots: int, workers: int, room: float) -> str:
    """Returns the strategies that fit with this many workers, and their memory."""
    found = []
    for template in (text for record in records().values() for text in record.memory_saving):
        text = template.format(workers=workers)
        spec = parse_strategy(text)
        needed = weights * spec.state_fraction(workers).floats_per_weight(slots)
        try:
            spec.check_workers(workers)
        except SpecError:
            continue
        if workers > 1 and needed <= room:
            found.append(f"{text} needs {needed / 1e9:.2f} GB")
    if found:
        return ", ".join(found)
    least = weights * (2 + slots) / max(room, 1.0)
    return f"split it over {max(2, int(least) + 1)} workers or more, as pipeline(stages=...) does"


def explain_out_of_memory(error: BaseException) -> str | None:
    """Returns the remedy for an out-of-memory error; None for other errors."""
    found = re.search(r"tried to allocate (\d+) bytes", str(error))
    if not isinstance(error, MemoryError) and found is None:
        return None
    wanted = f"{int(found[1]) / 1e9:.2f} GB" if found else "memory"
    return (
        f"out of memory: tried to allocate {wanted} with {available_memory_bytes() / 1e9:.2f} GB "
        "available; use --micro-batch, --recompute, or a strategy that splits the model, such as "
        "pipeline(recompute=true) or allreduce(shard=full)"
    )
