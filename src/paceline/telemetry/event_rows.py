"""The rows that events carry and that become entries of result.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema

T = TypeVar("T")


class JsonRecord:
    """Base of the dataclasses that are written as JSON objects; pydantic parses them back."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # The fields are strict (True is not a number), but an object may be a dict.
        return cast(CoreSchema, {**handler(source), "strict": False})


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def from_plain(cls: type[T], plain: object) -> T:
    """Builds an event or a row from the JSON object that it was written as.

    Unknown keys are ignored and missing ones take the field's default, so that folders of older and
    newer versions can be read.
    Raises ValidationError if a required key is missing, or a value has the wrong type.
    """
    return cast(T, _adapter(cls).validate_python(plain))


@dataclass(frozen=True, kw_only=True)
class ResultRow(JsonRecord):
    """Base of the row types. A field's JSON key is its name, unless its metadata has an `alias`."""

    def to_plain(self) -> dict[str, object]:
        return {f.metadata.get("alias", f.name): getattr(self, f.name) for f in fields(self)}


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
    before: str = field(default="", metadata={"alias": "from"})
    after: str = field(default="", metadata={"alias": "to"})
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


@dataclass(frozen=True, kw_only=True)
class ViewRow(ResultRow):
    """One entry of `views`: a change of the workers and servers that take part in the run."""

    number: int
    samples: int
    """Samples of the run when training continued."""
    seconds: float = 0.0
    """Since the start of the run."""
    members: list[int] = field(default_factory=list)
    """Workers."""
    servers: list[int] = field(default_factory=list)
    reason: str = ""
    pause_s: float = 0.0
    """From the notice of the loss to the start of the view; `ps` trains on meanwhile."""
    recomputed: int = 0
    """Samples that are trained again because their update was lost."""
