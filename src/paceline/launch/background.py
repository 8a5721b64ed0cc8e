"""Runs in progress in other processes: their recorded configuration, progress and end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UsageError
from paceline.launch.succession import end_orphans
from paceline.report.progress import terminal_reporter
from paceline.telemetry.events import RunEnded, RunStarted
from paceline.telemetry.reader import EventTail
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.run_lock import WATCHDOG_FILE, LockHolder, is_running, read_holder
from paceline.telemetry.schema import RunResult

POLL_S = 0.3
KILL_TIMEOUT_S = 10.0
"""Time for the processes of a killed supervisor to exit."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """Returns run.json; raises UsageError if the folder contains no run."""
    path = RunFolder(folder).config
    try:
        config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} contains no run; choose the folder of a run") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error})") from None
    return config


def follow_run(folder: Path, *, quiet: bool) -> RunResult:
    """Shows the progress of a run until its end, and returns its result.

    Raises RunFailed if its supervisor was killed.
    """
    run, label = RunFolder(folder), str(read_config(folder).get("strategy", "run"))
    ended = False
    tail = EventTail(run.events("run"))
    with terminal_reporter(label, quiet=quiet) as show:
        while True:
            running = is_running(folder)
            for event in tail.poll():
                if isinstance(event, RunStarted | RunEnded):
                    ended = isinstance(event, RunEnded)
                show(event)
            if not running and (ended or not is_running(folder, WATCHDOG_FILE)):
                break
            time.sleep(POLL_S)
    if not (ended and run.result.exists()):
        raise RunFailed(
            f"the supervisor of {folder} ({read_holder(folder) or 'unknown'}) was killed before "
            f"the run had ended; continue with `paceline resume {folder}`"
        )
    return run.read_result()


def stop_run(folder: Path, timeout_s: float) -> str:
    """Cancels a run and returns its status; kills it and raises RunFailed after `timeout_s`."""
    read_config(folder)
    holder = read_holder(folder)
    if holder is None or not is_running(folder):
        if _end_remains(folder):
            return "killed"
        reason = "" if holder is None else f" (its supervisor, {holder}, was killed)"
        raise UsageError(f"no run is in progress in {folder}{reason}")
    if holder.host != socket.gethostname():
        raise UsageError(f"the run in {folder} is {holder}; run `paceline stop` on that machine")
    if _signal_until_ended(folder, holder, signal.SIGTERM, timeout_s):
        return str(RunFolder(folder).read_result().get("status"))
    _end_watchdog(folder)
    _signal_until_ended(folder, holder, signal.SIGKILL, KILL_TIMEOUT_S)
    _end_remains(folder)
    raise RunFailed(
        f"the run in {folder} did not end within {timeout_s:g} s and was killed; "
        f"`paceline resume {folder}` continues from its latest checkpoint"
    )


def _end_watchdog(folder: Path) -> bool:
    """Ends the process that would continue the run; returns whether there was one."""
    holder = read_holder(folder, WATCHDOG_FILE)
    if holder is None or not is_running(folder, WATCHDOG_FILE):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(holder.pid, signal.SIGKILL)
    (folder / WATCHDOG_FILE).unlink(missing_ok=True)
    return True


def _end_remains(folder: Path) -> bool:
    """Ends what waits for another supervisor of a run; returns whether there was anything."""
    was_watched = _end_watchdog(folder)
    return end_orphans(RunFolder(folder)) > 0 or was_watched


def _signal_until_ended(
    folder: Path, holder: LockHolder, number: signal.Signals, timeout_s: float
) -> bool:
    """Signals the supervisor; returns whether the run ended within the time."""
    deadline = time.monotonic() + timeout_s
    try:
        os.kill(holder.pid, number)
    except ProcessLookupError:
        pass  # It has just ended.
    except PermissionError:
        raise UsageError(
            f"the run in {folder} belongs to another user ({holder}); ask its owner to stop it"
        ) from None
    while is_running(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S / 10)
    return True
