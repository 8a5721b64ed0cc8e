"""Deprecated alias of `paceline.telemetry.reader`; will be removed in the next release."""

from paceline.telemetry.reader import EventTail as Follower
from paceline.telemetry.reader import read_run

__all__ = ["Follower", "read_run"]
