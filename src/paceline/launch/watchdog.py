"""The watchdog of a detached run: continues it if its supervisor is killed.

It is a small process next to the supervisor and holds a lock in the run folder, so that `attach`
waits for the next supervisor and `stop` can end it first. Only a run with a journal is continued:
its workers wait. It ends when the run has ended in any other way than by the loss of its
supervisor.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.run_lock import WATCHDOG_FILE, held_lock, read_holder

MAX_RESTARTS = 5
FIRST_DELAY_S = 0.5
"""Wait before the second restart; the first is immediate, and each further wait is doubled."""


def start_watchdog(out: Path) -> None:
    """Forks the watchdog of this process, which is about to run in `out`."""
    supervisor = os.getpid()
    if os.fork() > 0:
        return
    try:
        os.setsid()
        with held_lock(out, WATCHDOG_FILE):
            _watch(out, supervisor)
    finally:
        os._exit(0)


def _watch(out: Path, supervisor: int) -> None:
    descriptor = os.pidfd_open(supervisor)
    select.select([descriptor], [], [])
    os.close(descriptor)
    for restart in range(MAX_RESTARTS):
        if not _is_lost(out, supervisor):
            return
        if restart:
            time.sleep(FIRST_DELAY_S * 2.0 ** (restart - 1))
        command = [sys.executable, "-m", "paceline.cli.main", "resume", str(out)]
        print(f"paceline: process {supervisor} was killed; continues the run", flush=True)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        supervisor = process.pid
        process.wait()


def _is_lost(out: Path, supervisor: int) -> bool:
    """Returns whether a supervisor was killed: it would have removed its lock and the journal."""
    holder = read_holder(out)
    is_holder = holder is not None and holder.pid == supervisor
    return is_holder and RunFolder(out).journal.exists()
