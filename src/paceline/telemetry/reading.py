"""The old name of `paceline.telemetry.reader`, for one release."""

from paceline.telemetry.reader import EventTail as Follower
from paceline.telemetry.reader import read_run

__all__ = ["Follower", "read_run"]
