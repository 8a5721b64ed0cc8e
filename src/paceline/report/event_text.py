"""Describes events in one line each, for traces and the dashboard."""

from __future__ import annotations

import functools

from paceline.report.number_format import format_number
from paceline.telemetry.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    RunEnded,
    StrategyStarted,
    StrategySwitched,
    SwitchDecided,
    VerdictChanged,
)


@functools.singledispatch
def describe_event(event: Event) -> str | None:
    """Returns the description of an event; None for events that have none."""
    return None


@describe_event.register
def _(event: StrategyStarted) -> str:
    return f"strategy {event.strategy} from sample {format_number(event.samples)}: {event.lr}"


@describe_event.register
def _(event: StrategySwitched) -> str:
    return f"switch {event.row.before} -> {event.row.after}"


@describe_event.register
def _(event: SwitchDecided) -> str:
    return event.row.reason


@describe_event.register
def _(event: EpochEnded) -> str:
    return f"epoch {event.row.epoch} ends"


@describe_event.register
def _(event: CheckpointSaved) -> str:
    return f"checkpoint at {format_number(event.samples)} samples"


@describe_event.register
def _(event: VerdictChanged) -> str:
    return f"resolved: {event.text}" if event.is_over else event.text


@describe_event.register
def _(event: RunEnded) -> str:
    return f"ended: {event.status}" + (f", {event.error}" if event.error else "")
