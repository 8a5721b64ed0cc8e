"""Processes that outlive their coordinator: they wait for another one, or end after a while.

The run folder contains the address of the coordinator. Another one that takes over the run writes
its own address there, with a higher number, and finds these processes with their state. What they
were doing they complete; what they report meanwhile is dropped.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from paceline.comm.wire import ControlConnection
from paceline.errors import PacelineError
from paceline.telemetry.run_folder import RunFolder, read_address
from paceline.worker.assignment import Assignment

CHECK_S = 1.0
"""Interval at which the address is read while the coordinator seems to be well."""
RETRY_S = 0.05


def keep_connected(control: ControlConnection, assignment: Assignment) -> None:
    """Connects to another coordinator when this one is lost or replaced, in a thread."""
    threading.Thread(target=_watch, args=(control, assignment), daemon=True).start()


def _watch(control: ControlConnection, assignment: Assignment) -> None:
    assert assignment.folder is not None
    folder = RunFolder(Path(assignment.folder))
    while not control.closed:
        is_lost = control.lost.wait(CHECK_S)
        address = read_address(folder)
        is_replaced = address is not None and address.incarnation > control.incarnation
        if (is_lost or is_replaced) and not control.closed:
            _find_coordinator(control, assignment, folder)


def _find_coordinator(
    control: ControlConnection, assignment: Assignment, folder: RunFolder
) -> None:
    who = assignment.process_name
    if not control.greeting():
        os._exit(1)  # It is not ready, so it has nothing that another coordinator could use.
    _leave_pipes(folder.log(who))
    print(f"{who} lost its coordinator, and waits for another one", flush=True)
    deadline = time.monotonic() + assignment.orphan_grace_s
    while time.monotonic() < deadline and not control.closed:
        address = read_address(folder)
        if address is None:
            print(f"{who} ends: the run is over", flush=True)
            os._exit(1)
        if address.incarnation >= control.incarnation:
            try:
                control.rejoin(address.host, address.port, address.incarnation)
                return
            except PacelineError:
                pass  # It does not listen, or not yet.
        time.sleep(RETRY_S)
    if not control.closed:
        print(f"{who} ends: no coordinator for {assignment.orphan_grace_s:g} s", flush=True)
        os._exit(1)


def _leave_pipes(log: Path) -> None:
    """Prints to the log from now on: the pipes led to the supervisor that is lost."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        os._exit(1)  # The run folder was removed.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
