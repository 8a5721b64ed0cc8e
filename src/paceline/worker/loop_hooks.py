"""Interface of a training loop to the coordinator client: required callbacks and observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.protocol.messages import Lease
from paceline.state import RemoteTensor, TrainState
from paceline.worker.evaluation import EvalShard, Predict


@dataclass(frozen=True, kw_only=True)
class LoopCallbacks:
    """Operations that a training loop performs for the coordinator besides steps."""

    evaluate: Callable[[str, EvalShard, Predict], tuple[float, int | None, int]] | None
    save: Callable[[str, TrainState], str]
    save_model: Callable[[Mapping[str, RemoteTensor]], None]


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """Observers of a training loop, each optional."""

    on_leases_known: Callable[[list[Lease]], None] = lambda leases: None
    """Receives leases well before their steps begin, to prefetch their rows."""
    on_quiesce: Callable[[], None] = lambda: None
    """Called when no more steps come until the coordinator continues."""
    on_close: Callable[[], None] = lambda: None
    """Called before a runner's connections are closed: their bytes are counted up to then."""
    input_stats: Callable[[], dict[str, Any]] = dict
    """Returns the totals of the input pipeline, for the worker's report."""
