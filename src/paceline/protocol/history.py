"""History of the run as plain numbers: the input of policies and the source of result.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from paceline.protocol.throughput import ThroughputMonitor, TrainTotals
from paceline.telemetry.events import (
    DecisionRow,
    EpochRow,
    ResultRow,
    RunProgress,
    SwitchRow,
    ViewRow,
    from_plain,
)

if TYPE_CHECKING:
    from paceline.protocol.journal import RunPosition


class CoordinatorMemory(TypedDict):
    """The coordinator's part of a checkpoint."""

    history: dict[str, Any]
    """`History.to_plain()`."""
    elapsed_s: float
    shards: NotRequired[dict[str, Any]]
    """The rows `left` in an epoch, and the fingerprint of the block `layout` they belong to."""
    position: NotRequired[RunPosition]
    """Exact position of the run, if its workers are still alive; only from a journal."""


_NUMBERS = ("samples", "updates", "phase", "epoch", "max_lag", "train_seconds")
_ROWS: dict[str, type[ResultRow]] = {
    "rows": EpochRow,
    "switches": SwitchRow,
    "decisions": DecisionRow,
    "views": ViewRow,
}
_DEFAULTS = {"val_rows": 0, "batch": 0, "lr_gain": 1.0}
"""Numbers that older versions did not store."""
_COUNTS = ("staleness", "phase_samples")


@dataclass
class History:
    """History of a run, in samples; `phase` is the index of the active strategy."""

    samples: int = 0
    updates: int = 0
    phase: int = 0
    epoch: int = 0
    tally: TrainTotals = field(default_factory=TrainTotals)
    rows: list[EpochRow] = field(default_factory=list)
    switches: list[SwitchRow] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    max_lag: int = 0
    decisions: list[DecisionRow] = field(default_factory=list)
    """Decisions of rules with their values; decisions to stay only if the reason is new."""
    views: list[ViewRow] = field(default_factory=list)
    """Changes of the membership."""
    phase_samples: Counter[int] = field(default_factory=Counter)
    """Samples trained in each phase so far."""
    excluded_workers: set[int] = field(default_factory=set)
    """Workers that are excluded while the current strategy is active."""
    throughput: ThroughputMonitor = field(default_factory=ThroughputMonitor, compare=False)
    train_seconds: float = 0.0
    """Wall time of training, excluding start-up, evaluation, saving and switches."""
    val_rows: int = 0
    """Rows of the validation set, once it was evaluated."""

    batch: int = 0
    """Current global batch; 0 before the workers are ready."""
    lr_gain: float = 1.0
    """Factor of the learning rate because of an adapted batch."""

    def describe_progress(self, t: float) -> RunProgress:
        return RunProgress(
            t=t,
            epoch=self.epoch,
            samples=self.samples,
            updates=self.updates,
            loss=self.tally.loss,
        )

    def add_samples(self, samples: int) -> None:
        """Adds samples that were applied by the active strategy."""
        self.samples += samples
        self.phase_samples[self.phase] += samples

    def count_rows(self) -> dict[str, int]:
        """Returns the number of rows of each kind."""
        return {name: len(getattr(self, name)) for name in _ROWS}

    def to_plain(self, first_rows: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
        """Returns the history as JSON; `first_rows` skips the earlier rows of each kind."""
        plain = {name: getattr(self, name) for name in _NUMBERS}
        plain |= {name: getattr(self, name) for name in _DEFAULTS}
        plain |= {"tally": vars(self.tally).copy()}
        plain |= {
            name: [row.to_plain() for row in getattr(self, name)[first_rows.get(name, 0) :]]
            for name in _ROWS
        }
        return plain | {name: sorted(map(list, getattr(self, name).items())) for name in _COUNTS}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> History:
        values = {name: plain[name] for name in _NUMBERS}
        values |= {name: plain.get(name, default) for name, default in _DEFAULTS.items()}
        values["tally"] = TrainTotals(**plain["tally"])
        for name, kind in _ROWS.items():
            values[name] = [from_plain(kind, row) for row in plain.get(name, ())]
        for name in _COUNTS:
            values[name] = Counter({int(k): int(v) for k, v in plain[name]})
        return cls(**values)
