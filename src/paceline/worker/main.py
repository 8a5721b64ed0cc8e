"""Entry point of a worker or server process: setup, the run, and the report of a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from paceline.comm.wire import ControlConnection
from paceline.errors import DeadlineExceeded, Diverged, PacelineError, PeerLost, UsageError
from paceline.protocol.messages import LeaveRequested, ProcessFailing
from paceline.worker.assignment import Assignment, pack_assignment, read_assignment
from paceline.worker.process_settings import pin, tune_malloc

COMMAND = [sys.executable, "-m", "paceline.worker"]
STACKS_BEGIN = "--- stacks of "
STACKS_END = "--- end of stacks of "
SERVER_EXIT_S = 5.0
"""Time that the servers of a finished run may take to exit."""
MARGIN_S = 30.0
"""Margin of waits inside a process over the supervisor's deadline, which names the cause."""
TERMINATION_GRACE_S = 30.0
"""Time for a worker that is terminated to finish its work and leave the run."""
POLL_S = 0.005


def main(commands: IO[bytes] | None = None, *, can_fork: bool = False) -> NoReturn:
    """Reads the assignment from `commands`, by default standard input, and carries it out.

    `can_fork`: torch has been imported and this process has a single thread, so that its servers
    can be forked.
    """
    tune_malloc()
    commands = commands or os.fdopen(os.dup(0), "rb")
    assignment, live = read_assignment(commands)
    # A user's script must not read our commands.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    servers = _start_servers(assignment, commands, can_fork)
    run_process(assignment, live, commands, servers)


def run_process(
    assignment: Assignment, live: bytes | None, commands: IO[bytes], servers: list[ChildProcess]
) -> NoReturn:
    """Runs a worker or server to its end; reports a failure to the supervisor, then exits."""
    wait_s = 2 * assignment.timeout_s + MARGIN_S
    link: list[ControlConnection] = []
    threading.Thread(
        target=_watch_parent, args=(commands, assignment, servers, link), daemon=True
    ).start()
    control = ControlConnection(
        assignment.host,
        assignment.port,
        token=assignment.token,
        who=assignment.process_name,
        pid=os.getpid(),
        timeout_s=wait_s,
        incarnation=assignment.incarnation,
        can_rejoin=assignment.may_outlive,
    )
    if assignment.kind == "worker" and assignment.elastic:
        _leave_on_sigterm(assignment, control)
    link.append(control)
    if assignment.may_outlive:
        from paceline.worker.orphan import keep_connected

        keep_connected(control, assignment)
    code = 1
    try:
        _run(assignment, control, live, wait_s)
        for server in servers:
            server.wait(SERVER_EXIT_S)  # One that is late ends with this process.
        code = 0
    except Diverged:
        pass  # The coordinator knows, and ends the run.
    except BaseException as error:
        _report_failure(control, assignment, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without joining threads of libraries: a peer may be lost in the middle of a collective.
    os._exit(code)


def _leave_on_sigterm(assignment: Assignment, control: ControlConnection) -> None:
    """Makes SIGTERM leave the run when the work is done, or exit after a grace period."""

    def ask() -> None:
        with contextlib.suppress(PacelineError):
            control.send(LeaveRequested(assignment.index))
            time.sleep(TERMINATION_GRACE_S)
        os._exit(128 + signal.SIGTERM)

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # A second one ends it at once.
        # In a thread: this one may be sending.
        threading.Thread(target=ask, daemon=True).start()

    signal.signal(signal.SIGTERM, leave)


def _start_servers(
    assignment: Assignment, commands: IO[bytes], can_fork: bool
) -> list[ChildProcess]:
    """Starts this worker's servers, before it has a second thread and before it is pinned."""
    servers: list[ChildProcess] = []
    for index in assignment.servers:
        changes = {"kind": "server", "index": index, "job": None, "has_live_job": False}
        server = assignment.model_copy(update={**changes, "servers": ()})
        servers.append(fork_child(server, commands, servers) if can_fork else spawn_child(server))
    return servers


def _run(
    assignment: Assignment, control: ControlConnection, live: bytes | None, wait_s: float
) -> None:
    if assignment.pin and assignment.kind == "worker":
        pin(*assignment.local_rank)  # Before torch is imported and starts threads.
    for plugin in assignment.plugins:
        plugin.load()
    if assignment.kind == "server":
        from paceline.worker.server_main import run_server

        run_server(assignment, control, wait_s)
    elif assignment.collectives is not None:
        from paceline.worker.collectives import measure_collectives

        measure_collectives(assignment, control, wait_s)
    elif assignment.script is not None:
        from paceline.worker.custom_loop import run_worker_script

        run_worker_script(assignment, control, wait_s)
    else:
        from paceline.worker.training_loop import run_worker_job

        run_worker_job(assignment, control, live, wait_s)


@dataclass(frozen=True)
class ChildProcess:
    """A server started by this worker. It exits when this process does, at end of its input."""

    index: int
    pid: int
    commands: IO[bytes]
    """Kept open: the server exits when it is closed."""
    spawned: subprocess.Popen[bytes] | None = None
    """Kept, because Popen warns about a child that is still running when it is deleted."""

    def wait(self, timeout_s: float) -> None:
        """Waits until the process has ended, up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def spawn_child(assignment: Assignment) -> ChildProcess:
    """Starts a server of this worker with `python -m paceline.worker`."""
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(pack_assignment(assignment))
    child.stdin.flush()
    return ChildProcess(assignment.index, child.pid, child.stdin, child)


def fork_child(
    assignment: Assignment, parent_commands: IO[bytes], siblings: list[ChildProcess]
) -> ChildProcess:
    """Forks a server of this worker; the process must have a single thread and torch imported."""
    from paceline.worker.fork_server import set_process_title

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Ends of the pipes of other processes would keep those processes alive.
        os.close(writing)
        parent_commands.close()
        for sibling in siblings:
            sibling.commands.close()
        set_process_title(assignment.process_name)
        run_process(assignment, None, os.fdopen(reading, "rb"), [])
    os.close(reading)
    return ChildProcess(assignment.index, pid, os.fdopen(writing, "wb"))


def _report_failure(
    control: ControlConnection, assignment: Assignment, error: BaseException
) -> None:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr)
    # Our own errors are complete in one line; the log contains the traceback.
    short, details = str(error), ""
    if not isinstance(error, PacelineError):
        from paceline.worker.memory_check import explain_out_of_memory

        shortage = explain_out_of_memory(error)
        where = ""
        if assignment.script is not None:
            from paceline.worker.script import find_line

            where = find_line(error, Path(assignment.script))
        short = shortage or f"{where}{type(error).__name__}: {error}"
        details = "" if shortage else text
    blame = "own"
    if isinstance(error, UsageError):
        blame = "usage"
    elif isinstance(error, PeerLost | DeadlineExceeded):
        blame = "peer"
    message = ProcessFailing(assignment.process_name, short.replace("\n", " "), details, blame)
    with contextlib.suppress(PacelineError):  # The supervisor is gone.
        control.send(message)


def _watch_parent(
    commands: IO[bytes],
    assignment: Assignment,
    servers: list[ChildProcess],
    link: list[ControlConnection],
) -> None:
    """Carries out commands of the parent. At end of file the parent is gone: exits, unless this
    process waits for another coordinator."""
    who = assignment.process_name
    for line in commands:
        if line.strip() == b"stacks":
            print(f"\n{STACKS_BEGIN}{who}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(f"{STACKS_END}{who}", file=sys.stderr, flush=True)
        elif line.startswith(b"fault "):
            _inject_fault(line.decode().split(), servers)
    if not assignment.may_outlive or not link:
        os._exit(1)
    if link[0].generation == 0:  # Otherwise it belongs to another coordinator already.
        link[0].lost.set()


def _inject_fault(words: list[str], servers: list[ChildProcess]) -> None:
    """Carries out `fault KIND SECONDS FACTOR SERVER` on this process or a server of it."""
    from paceline.worker.faults import carry_out

    kind, seconds, factor, server = words[1:]
    if server == "-":
        carry_out(kind, float(seconds), float(factor))
        return
    child = next(child for child in servers if child.index == int(server))
    if kind == "cut":
        child.commands.write(f"fault cut {seconds} {factor} -\n".encode())
        child.commands.flush()
    else:
        carry_out(kind, float(seconds), float(factor), child.pid)
