"""From the coordinator's notes to typed events in the run folder, and on to whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.telemetry.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    RunEnded,
    RunLengthKnown,
    RunProgress,
    RunStarted,
    StrategyStarted,
    StrategySwitched,
    SwitchDecided,
    VerdictChanged,
)
from paceline.telemetry.run_folder import EventWriter


class EventLog:
    def __init__(self, writer: EventWriter, show: Callable[[str, dict[str, Any]], None]) -> None:
        self._writer = writer
        self._show = show

    def started(self, config: dict[str, Any]) -> None:
        event = RunStarted(
            t=0.0,
            strategy=config["strategy"],
            workers=config["workers"],
            servers=config["servers"],
        )
        self._writer.write(event)

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        event = to_event(kind, facts)
        if event is not None:
            self._writer.write(event)
        self._show(kind, facts)

    def ended(self, status: str, error: str | None, seconds: float) -> None:
        self._writer.write(RunEnded(t=round(seconds, 6), status=status, error=error))
        self._show("ended", {"status": status, "error": error, "seconds": seconds})


def to_event(kind: str, facts: dict[str, Any]) -> Event | None:
    """The event of a note; None for what only people watching now care about."""
    t = round(float(facts.get("t", 0.0)), 6)
    if kind == "totals":
        return RunLengthKnown(
            t=t, epochs=facts["epochs"], samples_per_epoch=facts["samples_per_epoch"]
        )
    if kind == "progress":
        return RunProgress(
            t=t,
            epoch=facts["epoch"],
            samples=facts["samples"],
            updates=facts["updates"],
            loss=facts["loss"],
        )
    if kind == "phase":
        return StrategyStarted(
            t=t, strategy=facts["strategy"], samples=facts["samples"], lr=facts["lr"]
        )
    if kind == "epoch":
        return EpochEnded(t=t, row=facts["row"])
    if kind == "switch":
        return StrategySwitched(t=t, row=facts["row"])
    if kind == "decision":
        return SwitchDecided(t=t, row=facts["row"])
    if kind == "verdict":
        names = ("state", "rule", "who", "text", "suggestion", "figures")
        return VerdictChanged(t=t, **{name: facts[name] for name in names})
    if kind == "checkpoint":
        return CheckpointSaved(t=t, samples=facts["samples"], path=facts["path"])
    return None
