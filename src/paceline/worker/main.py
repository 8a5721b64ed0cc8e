"""A worker or server process from its first line to its last."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
import traceback
from typing import IO

from paceline.comm.control import ControlConnection
from paceline.errors import DeadlineExceeded, Diverged, PacelineError, PeerLost, UsageError
from paceline.protocol.messages import ProcessFailing
from paceline.worker.assignment import Assignment, read_assignment
from paceline.worker.cpu_affinity import pin
from paceline.worker.malloc import tune_malloc
from paceline.worker.spawn import start_child

STACKS_BEGIN = "--- stacks of "
STACKS_END = "--- end of stacks of "
_children: list[subprocess.Popen[bytes]] = []
"""This worker's servers: they end when the pipes kept here are closed."""
LAST_WORDS_S = 5.0
MARGIN_S = 30.0
"""Waits inside a process outlast the supervisor's deadline, so that it can name the culprit."""


def main() -> None:
    tune_malloc()
    commands = os.fdopen(os.dup(0), "rb")
    assignment, live = read_assignment(commands)
    # A user's script must not read our commands.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
            _wait_for_servers()
        code = 0
    except Diverged:
        pass  # The coordinator has received the failure, and ends the run.
    except BaseException as error:
        _report_failure(control, assignment, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for threads of libraries: a peer may be gone in the middle of a collective.
    os._exit(code)


def _serve(assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
    from paceline.worker.server_main import run_server

    load_plugins(assignment)
    run_server(assignment, control, wait_s)


def _work(
    assignment: Assignment, control: ControlConnection, live: bytes | None, wait_s: float
) -> None:
    # Servers are this worker's children: they start while torch is being imported here.
    for index in assignment.servers:
        changes = {"kind": "server", "index": index, "job": None, "has_live_job": False}
        _children.append(start_child(assignment.model_copy(update={**changes, "servers": ()})))
    if assignment.pin:  # servers have been started: they may run anywhere
        pin(*assignment.local_rank)
    from paceline.worker.session import run_worker_job, run_worker_script

    load_plugins(assignment)
    if assignment.script is not None:
        run_worker_script(assignment, control, wait_s)
    else:
        run_worker_job(assignment, control, live, wait_s)


def load_plugins(assignment: Assignment) -> None:
    """Strategies and codecs of the user's own; raises UsageError for a file that has changed."""
    for plugin in assignment.plugins:
        plugin.load()


def _wait_for_servers() -> None:
    """Waits for the servers of a finished run to exit and to write their last events."""
    for child in _children:
        try:
            child.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            pass  # It ends with this process.


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
    # Expected errors are complete in one line; the log has the rest.
    details = "" if isinstance(error, PacelineError) or shortage else text
    try:
        control.send(
            ProcessFailing(assignment.process_name, short.replace("\n", " "), details, blame)
        )
    except PacelineError:
        pass  # The supervisor is gone: there is no process to report to.


def _watch_parent(commands: IO[bytes], who: str) -> None:
    """Commands of the parent; the end of the stream means that the parent is gone."""
    for line in commands:
        if line.strip() == b"stacks":
            print(f"\n{STACKS_BEGIN}{who}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            print(f"{STACKS_END}{who}", file=sys.stderr, flush=True)
    os._exit(1)
