"""Runs that outlive the terminal: a separate session, output to a file, no hang-up signal."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from paceline.launch.watchdog import start_watchdog
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.run_lock import WATCHDOG_FILE, read_holder

DETACHED_LOG = "detached.log"
START_TIMEOUT_S = 120.0
"""Time until a run has checked its options and created its files."""
POLL_S = 0.02


def detach(out: Path) -> None:
    """Continues in a child process without a terminal; this process exits when the run has begun.

    Returns in the child only. The parent prints what the child printed, and exits with its status
    if it ends before it has begun. To be called before any thread is started.
    """
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    path = out / DETACHED_LOG
    with path.open("ab") as log:
        begin = log.tell()
        began_s = time.time()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _leave_terminal(log.fileno())
            start_watchdog(out)
            return
    status = _wait_until_begun(pid, out, began_s)
    if status is None:
        print(
            f"detached: process {pid}; `paceline attach {out}` shows the run, "
            f"`paceline stop {out}` ends it"
        )
        sys.exit(0)
    text = path.read_bytes()[begin:].decode(errors="replace")
    print(text, end="", file=sys.stderr)
    if begin == 0:
        path.unlink()
    if fresh:
        with contextlib.suppress(OSError):
            (out / WATCHDOG_FILE).unlink()
        with contextlib.suppress(OSError):
            out.rmdir()
    sys.exit(status)


def _leave_terminal(log: int) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _wait_until_begun(pid: int, out: Path, began_s: float) -> int | None:
    """Returns None when the run has written its configuration, or the status of its end."""
    config = RunFolder(out).config
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            # A short run may have begun and ended between two looks.
            return None if code == 0 else code if code > 0 else 128 - code
        holder = read_holder(out)
        if holder is not None and holder.pid == pid:
            with contextlib.suppress(FileNotFoundError):
                if config.stat().st_mtime >= began_s - 1.0:
                    return None
        time.sleep(POLL_S)
    return None
