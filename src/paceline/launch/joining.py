"""The machine's side of `paceline join` and `paceline leave`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.comm.wire import Channel
from paceline.errors import DeadlineExceeded, PacelineError, PeerLost, RunFailed, UsageError
from paceline.worker.outpost import SILENT_S, HostAgent

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RunAddress:
    """Address at which a run listens, and the token that it accepts."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def connect(self) -> Channel:
        """Connects; raises UsageError if there is no run, or the token belongs to another one."""
        try:
            sock = socket.create_connection((self.host, self.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise UsageError(
                f"no run listens at {self} ({error.strerror or error}); is it still in progress?"
            ) from None
        channel = Channel(sock, f"the run at {self}", CONNECT_TIMEOUT_S)
        try:
            channel.authenticate("client", self.token)
        except (PeerLost, DeadlineExceeded):
            channel.close()
            raise UsageError(
                f"the run at {self} does not accept this token; use the token file of this run"
            ) from None
        except PacelineError as error:
            channel.close()
            raise UsageError(f"{self}: {error}") from None
        return channel


def join_run(
    address: RunAddress, *, threads: int, grace_s: float, show: Callable[[str], None]
) -> str:
    """Trains on this machine until the run ends or it has left; returns the reason.

    SIGTERM and SIGINT leave the run: its worker finishes its work within `grace_s`, and is ended
    then. A second signal ends it at once. Raises UsageError if the run refuses this machine, and
    RunFailed if the run is lost.
    """
    channel = address.connect()
    channel.set_timeout(SILENT_S)
    channel.send(
        {
            "address": channel.local_address,
            "node": "",
            "python": sys.executable,
            "pid": os.getpid(),
            "threads": threads,
        }
    )
    agent = HostAgent(channel)
    leaving = threading.Event()

    def leave(number: int, frame: object) -> None:
        if leaving.is_set():
            channel.close()
            return
        leaving.set()
        # In threads: the one that was interrupted may be sending.
        threading.Thread(target=_ask_to_leave, args=(channel,), daemon=True).start()
        timer = threading.Timer(grace_s, channel.close)
        timer.daemon = True
        timer.start()

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        last: dict[str, Any] = agent.obey(show)
    except PacelineError:
        if leaving.is_set():
            return "left the run before its work was done"
        raise RunFailed(f"the connection to the run at {address} was lost") from None
    finally:
        agent.end()
        for number, handler in before.items():
            signal.signal(number, handler)
    if last.get("refused"):
        raise UsageError(f"the run at {address} refused this machine: {last['why']}")
    return str(last.get("why") or "the run is over")


def _ask_to_leave(channel: Channel) -> None:
    with contextlib.suppress(PacelineError):
        channel.send({"leave": True})


def retire_worker(address: RunAddress, worker: int, timeout_s: float) -> None:
    """Lets a worker of a run leave, and waits until it has. Raises UsageError if it cannot."""
    channel = address.connect()
    try:
        channel.set_timeout(timeout_s)
        channel.send({"leave": worker})
        answer, _ = channel.receive()
    except DeadlineExceeded:
        raise RunFailed(f"worker {worker} has not left within {timeout_s:g} s") from None
    except PacelineError:
        raise RunFailed(f"the run at {address} ended before worker {worker} had left") from None
    finally:
        channel.close()
    if not answer["left"]:
        raise UsageError(str(answer["why"]))
