"""History of the run as plain numbers: the input of policies and the source of result.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from paceline.protocol.messages import StepStats
from paceline.protocol.throughput import ThroughputMonitor
from paceline.telemetry.events import DecisionRow, EpochRow, SwitchRow, from_plain


@dataclass
class EpochTotals:
    """Sums over the training steps of the current epoch."""

    samples: int = 0
    predictions: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    told: bool = True
    classes: bool = True

    def add(self, measured: StepStats) -> None:
        self.samples += measured.samples
        self.predictions += measured.predictions
        self.correct += measured.correct or 0
        self.classes = self.classes and (measured.correct is not None or not measured.samples)
        if measured.loss_sum is None:
            self.told = False
        else:
            self.loss_sum += measured.loss_sum

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.samples if self.samples and self.told else None

    @property
    def accuracy(self) -> float | None:
        known = self.predictions and self.told and self.classes
        return self.correct / self.predictions if known else None


class HistoryState(TypedDict):
    """`History` as JSON, in checkpoints."""

    samples: int
    updates: int
    phase: int
    epoch: int
    tally: Mapping[str, Any]
    rows: list[dict[str, object]]
    switches: list[dict[str, object]]
    decisions: NotRequired[list[dict[str, object]]]
    staleness: list[list[int]]
    max_lag: int
    phase_samples: list[list[int]]
    train_seconds: float


class BlockProgress(TypedDict):
    """The rows left in an epoch, and the fingerprint of the block layout they belong to."""

    layout: str | None
    left: Sequence[Sequence[int]]


class CoordinatorMemory(TypedDict):
    """The coordinator's part of a checkpoint."""

    history: HistoryState
    elapsed_s: float
    shards: NotRequired[BlockProgress]


@dataclass
class History:
    """History of a run, in samples; `phase` is the index of the active strategy."""

    samples: int = 0
    updates: int = 0
    phase: int = 0
    epoch: int = 0
    tally: EpochTotals = field(default_factory=EpochTotals)
    rows: list[EpochRow] = field(default_factory=list)
    switches: list[SwitchRow] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    max_lag: int = 0
    decisions: list[DecisionRow] = field(default_factory=list)
    """Decisions of rules with their values; decisions to stay only if the reason is new."""
    phase_samples: dict[int, int] = field(default_factory=dict)
    """Samples trained in each phase so far."""
    excluded_workers: set[int] = field(default_factory=set)
    """Workers that are excluded while the current strategy is active."""
    throughput: ThroughputMonitor = field(default_factory=ThroughputMonitor, compare=False)
    train_seconds: float = 0.0
    """Wall time of training, excluding start-up, evaluation, saving and switches."""

    def add_samples(self, samples: int) -> None:
        """Adds samples that were applied by the active strategy."""
        self.samples += samples
        self.phase_samples[self.phase] = self.phase_samples.get(self.phase, 0) + samples

    def samples_under(self, phase: int) -> int:
        return self.phase_samples.get(phase, 0)

    def value_of(self, name: str) -> float | None:
        """Returns the latest value of a metric, for --until and early stopping."""
        return self.rows[-1].value(name) if self.rows else None

    def best_row_index(self, name: str, lower_is_better: bool) -> int | None:
        figures = [row.value(name) for row in self.rows]
        known = [(f, i) for i, f in enumerate(figures) if f is not None and not math.isnan(f)]
        if not known:
            return None
        chosen = min(known) if lower_is_better else max(known, key=lambda pair: (pair[0], -pair[1]))
        return chosen[1]

    def to_plain(self) -> HistoryState:
        return {
            "samples": self.samples,
            "updates": self.updates,
            "phase": self.phase,
            "epoch": self.epoch,
            "tally": vars(self.tally).copy(),
            "rows": [row.to_plain() for row in self.rows],
            "switches": [row.to_plain() for row in self.switches],
            "decisions": [row.to_plain() for row in self.decisions],
            "staleness": [[k, v] for k, v in sorted(self.staleness.items())],
            "max_lag": self.max_lag,
            "phase_samples": [[k, v] for k, v in sorted(self.phase_samples.items())],
            "train_seconds": self.train_seconds,
        }

    @classmethod
    def from_plain(cls, plain: HistoryState) -> History:
        return cls(
            samples=plain["samples"],
            updates=plain["updates"],
            phase=plain["phase"],
            epoch=plain["epoch"],
            tally=EpochTotals(**plain["tally"]),
            rows=[from_plain(EpochRow, row) for row in plain["rows"]],
            switches=[from_plain(SwitchRow, row) for row in plain["switches"]],
            decisions=[from_plain(DecisionRow, row) for row in plain.get("decisions", ())],
            staleness=Counter({int(k): int(v) for k, v in plain["staleness"]}),
            max_lag=plain["max_lag"],
            phase_samples={int(k): int(v) for k, v in plain["phase_samples"]},
            train_seconds=plain["train_seconds"],
        )
