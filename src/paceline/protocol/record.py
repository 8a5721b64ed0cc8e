"""Values: dataclasses that nobody changes.

The type checker holds that, as it does for frozen dataclasses. At run time nothing does: the
check costs more than all else that a message takes, and the coordinator handles one at every step
of every worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    return dataclass(unsafe_hash=True, slots=True)(cls)
