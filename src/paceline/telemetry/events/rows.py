"""Rows of result.json that events carry too: epochs, switches and switch decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """Base of the row types. A field's JSON key is its name, unless its metadata has a `key`."""

    def to_plain(self) -> dict[str, object]:
        return {json_key(f): getattr(self, f.name) for f in fields(self)}


class NamedField(Protocol):
    """The part of `dataclasses.Field` that determines the JSON key."""

    name: str

    @property
    def metadata(self) -> Mapping[object, object]: ...


def json_key(field: NamedField) -> str:
    return str(field.metadata.get("key", field.name))


@dataclass(frozen=True, kw_only=True)
class EpochRow(ResultRow):
    """One entry of `history`: totals so far and metrics at the end of an epoch."""

    epoch: int = 0
    """Counted from 1."""
    seconds: float = 0.0
    """Since the start of the run."""
    samples: int = 0
    updates: int = 0
    lr: float | None = None
    train_loss: float | None = None
    train_acc: float | None = None
    val_loss: float | None = None
    val_acc: float | None = None

    def value(self, name: str) -> float | None:
        """Returns a metric by its key; None if it is unknown or was not measured."""
        return getattr(self, name, None)


@dataclass(frozen=True, kw_only=True)
class SwitchRow(ResultRow):
    """One entry of `switches`."""

    samples: int
    before: str = field(default="", metadata={"key": "from"})
    after: str = field(default="", metadata={"key": "to"})
    pause_s: float = 0.0
    """From the last gradient of the old strategy to the slowest worker's next forward pass."""
    drain_s: float = 0.0
    """Time spent waiting for batches in flight."""
    cause: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DecisionRow(ResultRow):
    """One entry of `decisions`: the outcome of a switch rule and the measurements behind it."""

    samples: int
    seconds: float = 0.0
    strategy: str = ""
    chosen: str = ""
    cause: str = ""
    reason: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def stays(self) -> bool:
        return self.strategy == self.chosen
