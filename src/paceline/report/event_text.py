"""Describes events in one line each: for traces and the dashboard, and for the terminal."""

from paceline.report.number_format import format_number
from paceline.telemetry import events as ev
from paceline.telemetry.run_folder import (
    CollectivesNotice,
    ListenNotice,
    ProcessOutput,
    RunNotice,
)


def describe_event(event: ev.Event) -> str | None:
    """Returns the description of an event; None for events that have none."""
    match event:
        case ev.StrategyStarted():
            start = format_number(event.samples)
            return f"strategy {event.strategy} from sample {start}: {event.lr}"
        case ev.StrategySwitched():
            return f"switch {event.row.before} -> {event.row.after}"
        case ev.SwitchDecided():
            return event.row.reason
        case ev.ViewChanged():
            return f"view {event.row.number}: {event.row.reason}"
        case ev.EpochEnded():
            return f"epoch {event.row.epoch} ends"
        case ev.CheckpointSaved():
            return f"checkpoint at {format_number(event.samples)} samples"
        case ev.VerdictChanged():
            return f"resolved: {event.text}" if event.is_over else event.text
        case ev.FaultInjected():
            return f"injected: {event.text}"
        case ev.RunEnded():
            return f"ended: {event.status}" + (f", {event.error}" if event.error else "")
    return None


def describe_notice(notice: RunNotice) -> str | None:
    """Returns the permanent line of a notice in the terminal; None for those without one."""
    match notice:
        case ev.RunLengthKnown() if notice.notes:
            return f"note: {'; '.join(notice.notes)}"
        case ev.StrategyStarted():
            return f"strategy {notice.strategy} from sample {notice.samples}: {notice.lr}"
        case ev.StrategySwitched(row=row):
            return (
                f"switched {row.before} -> {row.after} at sample {row.samples} "
                f"({row.reason}): pause {row.pause_s:.3f} s, drain {row.drain_s:.3f} s"
            )
        case ev.ViewChanged(row=row):
            names = ", ".join(map(str, row.members))
            if row.servers:
                names += f" and server {', '.join(map(str, row.servers))}"
            again = f", {row.recomputed} samples are trained again" if row.recomputed else ""
            return (
                f"view {row.number} at sample {row.samples}, with worker {names} "
                f"after {row.pause_s:.3f} s{again}: {row.reason}"
            )
        case ev.SwitchDecided(row=row) if row.stays:  # A switch is printed when it has happened.
            return f"at sample {row.samples}: {row.reason}"
        case ev.FaultInjected():
            return f"injected: {notice.text}"
        case ev.VerdictChanged(is_over=True):
            return f"resolved: {notice.text}"
        case ev.VerdictChanged():
            return f"{notice.text}: {notice.suggestion}"
        case CollectivesNotice() if notice.path != "shared" and notice.reason:
            part = "some gradients" if notice.path == "partly shared" else "gradients"
            return f"shared memory not used for {part}: {notice.reason}"
        case ListenNotice():
            return (
                f"machines join with `paceline join {notice.address} --token-file FILE`; FILE is "
                f"a copy of {notice.token_file}"
            )
        case ProcessOutput():
            return f"[{notice.process.replace('-', ' ')}] {notice.line}"
    return None
