"""Starts child processes: `python -m paceline.worker`, configured over stdin."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from multiprocessing import current_process, spawn
from typing import Any

from paceline.errors import UsageError
from paceline.worker.assignment import Assignment, pack_assignment

COMMAND = [sys.executable, "-m", "paceline.worker"]


def pack_live(thing: Any) -> bytes:
    """Live objects for our own children, with what they need to find the main script again."""
    preparation = spawn.get_preparation_data("paceline")
    preparation.pop("authkey", None)
    try:
        # Plain pickle: torch's reductions for multiprocessing would pass file descriptors.
        return pickle.dumps(preparation) + pickle.dumps(thing)
    except Exception as error:
        raise UsageError(
            f"the job's objects cannot be handed to worker processes ({error}): "
            "define functions and classes at the top level of a module, or use a job file"
        ) from None


def unpack_live(data: bytes) -> Any:
    buffer = io.BytesIO(data)
    # As multiprocessing marks its own children: what the script starts meanwhile is refused.
    process: Any = current_process()
    process._inheriting = True
    try:
        spawn.prepare(pickle.load(buffer))
    finally:
        del process._inheriting
    return pickle.load(buffer)


def start_child(assignment: Assignment) -> subprocess.Popen[bytes]:
    """Starts a server as a child of this worker; it ends with this process (its stdin closes)."""
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=os.environ.copy())
    assert child.stdin is not None
    child.stdin.write(pack_assignment(assignment))
    child.stdin.flush()
    return child
