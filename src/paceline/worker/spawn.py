"""Starts child processes of this one, which receive their assignment over standard input."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import time
from multiprocessing import current_process, spawn
from typing import IO, Any

from paceline.errors import UsageError
from paceline.worker.assignment import Assignment, pack_assignment

COMMAND = [sys.executable, "-m", "paceline.worker"]
POLL_S = 0.005
_running: list[subprocess.Popen[bytes]] = []
"""Kept, because Popen warns about a child that is still running when it is deleted."""


def pack_live(thing: Any) -> bytes:
    """Pickles live objects for a child process, with the path of the main script they come from."""
    preparation = spawn.get_preparation_data("paceline")
    preparation.pop("authkey", None)
    try:
        # Plain pickle: torch's reductions for multiprocessing would pass file descriptors.
        return pickle.dumps(preparation) + pickle.dumps(thing)
    except Exception as error:
        raise UsageError(
            f"the job's objects cannot be sent to worker processes ({error}); "
            "define functions and classes at the top level of a module, or use a job file"
        ) from None


def unpack_live(data: bytes) -> Any:
    buffer = io.BytesIO(data)
    # As multiprocessing marks its own children: `run_training` refuses to start in the script.
    process: Any = current_process()
    process._inheriting = True
    try:
        spawn.prepare(pickle.load(buffer))
    finally:
        del process._inheriting
    return pickle.load(buffer)


class ChildProcess:
    """A server started by this worker. It exits when this process does, at end of its input."""

    def __init__(self, pid: int, commands: IO[bytes]) -> None:
        self._pid = pid
        self._commands = commands
        """Kept open: the server exits when it is closed."""

    def wait(self, timeout_s: float) -> bool:
        """Returns True if the process has ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def disown(self) -> None:
        """Closes this process's end of the pipe; called in a fork, which must not hold it open."""
        self._commands.close()


def spawn_child(assignment: Assignment) -> ChildProcess:
    """Starts a server of this worker with `python -m paceline.worker`."""
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=os.environ.copy())
    _running.append(child)
    assert child.stdin is not None
    child.stdin.write(pack_assignment(assignment))
    child.stdin.flush()
    return ChildProcess(child.pid, child.stdin)


def fork_child(
    assignment: Assignment, parent_commands: IO[bytes], siblings: list[ChildProcess]
) -> ChildProcess:
    """Forks a server of this worker; the process must have a single thread and torch imported."""
    from paceline.worker.fork_server import set_process_title
    from paceline.worker.main import run_process

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Ends of the pipes of other processes would keep those processes alive.
        os.close(writing)
        parent_commands.close()
        for sibling in siblings:
            sibling.disown()
        set_process_title(assignment.process_name)
        run_process(assignment, None, os.fdopen(reading, "rb"), [])
    os.close(reading)
    return ChildProcess(pid, os.fdopen(writing, "wb"))
