"""Base of all messages between coordinator, workers and servers."""

import dataclasses
from typing import Any, ClassVar, TypeVar, dataclass_transform

Plain = dict[str, Any]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Makes a dataclass that only the type checker treats as frozen.

    At run time, the check would cost more than the rest of handling a message, and the coordinator
    handles one per step and worker.
    """
    return dataclasses.dataclass(unsafe_hash=True, slots=True)(cls)


@dataclass_transform(frozen_default=True)
@record
class Message:
    """Base of all messages, which become dataclasses; this module defines the control messages.

    As with `record`, only the type checker enforces that they are immutable.
    """

    row_types: ClassVar[dict[str, Any]] = {}
    """Fields that hold a sequence of records or named tuples, and the type of one of them."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(unsafe_hash=True)(cls)
