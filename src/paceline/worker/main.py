"""Entry point of a worker or server process: setup, the run, and the report of a failure."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from typing import IO, NoReturn

from paceline.comm.control import ControlConnection
from paceline.errors import DeadlineExceeded, Diverged, PacelineError, PeerLost, UsageError
from paceline.protocol.messages import ProcessFailing
from paceline.worker.assignment import Assignment, read_assignment
from paceline.worker.cpu_affinity import pin
from paceline.worker.malloc import tune_malloc
from paceline.worker.spawn import ChildProcess, fork_child, spawn_child

STACKS_BEGIN = "--- stacks of "
STACKS_END = "--- end of stacks of "
SERVER_EXIT_S = 5.0
"""Time that the servers of a finished run may take to exit."""
MARGIN_S = 30.0
"""Margin of waits inside a process over the supervisor's deadline, which names the cause."""


def main(*, can_fork: bool = False) -> NoReturn:
    """Reads the assignment from standard input and carries it out.

    `can_fork`: torch has been imported and this process has a single thread, so that its servers
    can be forked.
    """
    tune_malloc()
    commands = os.fdopen(os.dup(0), "rb")
    assignment, live = read_assignment(commands)
    # A user's script must not read our commands.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    servers = _start_servers(assignment, commands, can_fork)
    run_process(assignment, live, commands, servers)


def run_process(
    assignment: Assignment, live: bytes | None, commands: IO[bytes], servers: list[ChildProcess]
) -> NoReturn:
    """Runs a worker or server to its end; reports a failure to the supervisor, then exits."""
    threading.Thread(
        target=_watch_parent, args=(commands, assignment.process_name), daemon=True
    ).start()
    wait_s = 2 * assignment.timeout_s + MARGIN_S
    control = ControlConnection(
        assignment.host,
        assignment.port,
        token=assignment.token,
        who=assignment.process_name,
        pid=os.getpid(),
        timeout_s=wait_s,
    )
    code = 1
    try:
        if assignment.kind == "server":
            _serve(assignment, control, wait_s)
        else:
            _work(assignment, control, live, wait_s)
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


def _serve(assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
    from paceline.worker.server_main import run_server

    load_plugins(assignment)
    run_server(assignment, control, wait_s)


def _work(
    assignment: Assignment, control: ControlConnection, live: bytes | None, wait_s: float
) -> None:
    if assignment.pin:
        pin(*assignment.local_rank)
    from paceline.worker.session import run_worker_job, run_worker_script

    load_plugins(assignment)
    if assignment.script is not None:
        run_worker_script(assignment, control, wait_s)
    else:
        run_worker_job(assignment, control, live, wait_s)


def load_plugins(assignment: Assignment) -> None:
    """Registers the user's strategies and codecs. Raises UsageError if their file has changed."""
    for plugin in assignment.plugins:
        plugin.load()


def _report_failure(
    control: ControlConnection, assignment: Assignment, error: BaseException
) -> None:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr)
    if isinstance(error, PacelineError):
        short = str(error)
    else:
        short = f"{type(error).__name__}: {error}"
    shortage = None
    if not isinstance(error, PacelineError):
        from paceline.worker.memory_check import explain_out_of_memory

        shortage = explain_out_of_memory(error)
    short = shortage or short
    blame = "usage" if isinstance(error, UsageError) else "own"
    if isinstance(error, PeerLost | DeadlineExceeded):
        blame = "peer"
    # Our own errors are complete in one line; the log contains the traceback.
    details = "" if isinstance(error, PacelineError) or shortage else text
    try:
        control.send(
            ProcessFailing(assignment.process_name, short.replace("\n", " "), details, blame)
        )
    except PacelineError:
        pass  # The supervisor is gone.


def _watch_parent(commands: IO[bytes], who: str) -> None:
    """Carries out commands of the parent; exits at end of file, when the parent is gone."""
    for line in commands:
        if line.strip() == b"stacks":
            print(f"\n{STACKS_BEGIN}{who}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(f"{STACKS_END}{who}", file=sys.stderr, flush=True)
    os._exit(1)
