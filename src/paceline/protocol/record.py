"""Dataclasses that are immutable for the type checker only.

The type checker treats them as frozen. At run time nothing enforces it, because the check costs
more than the rest of handling a message, and the coordinator handles one per step and worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    return dataclass(unsafe_hash=True, slots=True)(cls)
