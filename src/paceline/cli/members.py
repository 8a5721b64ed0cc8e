"""`paceline join` and `paceline leave`: machines that come to a run in progress, and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.errors import RunFailed, UsageError
from paceline.launch.guests import JOIN_FILE
from paceline.options import Option, settings

if TYPE_CHECKING:
    from paceline.launch.joining import RunAddress

TOKEN_VARIABLE = "PACELINE_TOKEN"
POLL_S = 0.05

RunPlace = Annotated[str, argument("Address of the run (HOST:PORT), or its folder.")]
LeavePlace = Annotated[
    str | None,
    argument("Address of the run (HOST:PORT), or its folder. Default: leave with this machine."),
]
Member = Annotated[str | None, argument("Worker that leaves: worker=K.")]
TokenFile = Annotated[
    Path | None, Option(metavar="FILE", default=f"join.json of the folder, or ${TOKEN_VARIABLE}")
]


@settings()
class JoinOptions:
    token_file: TokenFile = None
    """File with the token of the run: a copy of join.json of its folder, or the token alone."""
    threads: Annotated[int | None, Field(ge=1), Option(default="the cores of this machine")] = None
    """Threads of the worker."""
    grace_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 30.0
    """Time for the worker to finish its work when this command is terminated."""
    quiet: bool = False
    """Do not show progress."""


@command
def join(run: RunPlace, /, *, options: JoinOptions) -> None:
    """Trains on this machine as a further worker of a run, until it ends."""
    from paceline.launch.joining import join_run

    address = find_run(run, options.token_file)

    def show(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    with registered():
        reason = join_run(address, threads=options.threads or 0, grace_s=options.grace_s, show=show)
    show(reason)


@settings()
class LeaveOptions:
    token_file: TokenFile = None
    """File with the token of the run, as for `paceline join`."""
    timeout_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 60.0
    """Longest wait until the worker has left."""


@command
def leave(run: LeavePlace = None, worker: Member = None, /, *, options: LeaveOptions) -> None:
    """Lets a worker leave a run when its work is done; without arguments, all of this machine."""
    if run is None:
        leave_with_this_machine(options.timeout_s)
        return
    kind, _, number = (worker or "").partition("=")
    if kind != "worker" or not number.isdigit():
        raise UsageError(f"paceline leave {run}: name the worker that leaves, as in worker=2")
    from paceline.launch.joining import retire_worker

    retire_worker(find_run(run, options.token_file), int(number), options.timeout_s)
    print(f"worker {number} has left the run")


def find_run(place: str, token_file: Path | None) -> RunAddress:
    """Returns the address of a run and its token; raises UsageError if one is missing."""
    from paceline.launch.joining import RunAddress

    token = os.environ.get(TOKEN_VARIABLE, "") if token_file is None else read_token(token_file)
    if (folder := Path(place)).is_dir():
        if not (file := folder / JOIN_FILE).exists():
            raise UsageError(
                f"{place}: no run there accepts machines: it is over, or needs exactly its "
                "workers (--min-workers all, or a strategy that divides the model)"
            )
        known = read_join_file(file)
        place, token = known["address"], token or known["token"]
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{place!r} is neither a run folder nor an address; use HOST:PORT")
    if not token:
        raise UsageError(
            f"joining {place} needs the token of the run; give --token-file with a copy of "
            f"{JOIN_FILE} of its folder, or set {TOKEN_VARIABLE}"
        )
    return RunAddress(host.strip("[]"), int(port), token)


def read_token(path: Path) -> str:
    """Returns the token of a file: join.json, or a file that contains only the token."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path} cannot be read ({error})") from None
    return str(read_join_file(path)["token"]) if text.startswith("{") else text


def read_join_file(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {"address": str(known["address"]), "token": str(known["token"])}
    except PermissionError:
        raise UsageError(f"{path} belongs to another user; ask its owner for a copy") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} does not describe a run ({error})") from None


# ---- the processes of this machine ------------------------------------------------------------


def registration(pid: int) -> Path:
    """File of a `paceline join` of this user; home directories may be shared by machines."""
    return Path.home() / ".paceline" / "joined" / f"{socket.gethostname()}-{pid}"


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Lets `paceline leave` find this process."""
    file = registration(os.getpid())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(start_time(os.getpid())))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def start_time(pid: int) -> float | None:
    """Returns when a process was started, which distinguishes it from another with its number."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def leave_with_this_machine(timeout_s: float) -> None:
    """Terminates every `paceline join` of this user here, and waits until their workers left."""
    found = []
    for file in registration(0).parent.glob(f"{socket.gethostname()}-*"):
        pid = int(file.name.rpartition("-")[2])
        if file.read_text() == str(start_time(pid)):
            found.append(pid)
        else:
            file.unlink(missing_ok=True)  # It was killed.
    if not found:
        raise UsageError(
            "this machine has joined no run; name a run and a worker, as in "
            "paceline leave DIR worker=2"
        )
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(registration(pid).exists() for pid in found):
        if time.monotonic() > deadline:
            raise RunFailed(f"this machine has not left within {timeout_s:g} s")
        time.sleep(POLL_S)
    print("this machine has left the run")
