"""Describes events in one line each, for traces and the dashboard."""

from __future__ import annotations

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


def describe_event(event: Event) -> str | None:
    """Returns the description of an event; None for events that have none."""
    match event:
        case StrategyStarted():
            start = format_number(event.samples)
            return f"strategy {event.strategy} from sample {start}: {event.lr}"
        case StrategySwitched():
            return f"switch {event.row.before} -> {event.row.after}"
        case SwitchDecided():
            return event.row.reason
        case EpochEnded():
            return f"epoch {event.row.epoch} ends"
        case CheckpointSaved():
            return f"checkpoint at {format_number(event.samples)} samples"
        case VerdictChanged():
            return f"resolved: {event.text}" if event.is_over else event.text
        case RunEnded():
            return f"ended: {event.status}" + (f", {event.error}" if event.error else "")
    return None
