"""Host agent that an engine runs on its machines: connects to the supervisor and runs programs.

An engine (Ray, Spark) only has to start a Python function, `run_host_agent(ticket)`, once per
worker. The supervisor then controls the host agent like an SSH host: start programs, stream stdin
and stdout. When the connection ends, or the supervisor goes quiet, every program is ended.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from paceline.comm.wire import Channel
from paceline.errors import PacelineError

BEAT_S = 2.0
SILENT_S = 10.0
"""A side that receives nothing for this long considers the other lost."""
MAX_PART = 1 << 20
CHUNK = 1 << 16
CALL_S = 60.0
NOT_FOUND = 127
"""The exit status of shells for a program that does not exist."""
END_S = 8.0
"""Time for programs to exit after their stdin is closed."""


def make_agent_ticket(host: str, port: int, token: str, index: int) -> str:
    """The argument of `run_host_agent`; it holds a token, so it stays inside the engine."""
    return json.dumps({"host": host, "port": port, "token": token, "index": index})


def run_host_agent(ticket: str, node: str = "") -> None:
    """Connects to the supervisor and executes its requests until it ends the agent or is lost."""
    fields = json.loads(ticket)
    index = fields.pop("index")
    channel = Channel.connect(**fields, peer="the supervisor", timeout_s=CALL_S)
    channel.set_timeout(SILENT_S)
    outpost = HostAgent(channel)
    channel.send(
        {
            "index": index,
            "address": channel.local_address,
            "hostname": socket.gethostname(),
            "node": node,
            "python": sys.executable,
            "pid": os.getpid(),
        }
    )
    try:
        with contextlib.suppress(PacelineError):  # The supervisor is gone; the run's caller knows.
            outpost.obey()
    finally:
        outpost.end()


class HostAgent:
    """Runs programs for the supervisor at the other end of a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._programs: dict[int, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def obey(self, show: Callable[[str], None] = print) -> dict[str, Any]:
        """Executes requests until the last one, which it returns. Raises PeerLost or
        DeadlineExceeded if the supervisor is gone."""
        while True:
            head: dict[str, Any]
            head, _ = self._channel.receive()
            do = head["do"]
            if do == "leave":
                return head
            if do == "show":
                show(str(head["text"]))
            elif do == "open":
                self._start(head["id"], head["argv"])
            elif do in ("in", "eof", "kill"):
                self._pass_on(do, self._programs.get(head["id"]), head)

    def _pass_on(self, do: str, program: subprocess.Popen[bytes] | None, head: Any) -> None:
        if program is None or program.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # It has ended: its status is on the way.
            if do == "in":
                program.stdin.write(head["data"])
                program.stdin.flush()
            elif do == "eof":
                program.stdin.close()
            else:
                _kill(program)

    def _start(self, number: int, argv: list[str]) -> None:
        argv = [os.path.expanduser(argv[0]), *argv[1:]]
        try:
            program = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            why = f"{argv[0]} cannot be run: {error.strerror}"
            self._channel.send({"id": number, "end": NOT_FOUND, "why": why})
            return
        self._programs[number] = program
        threading.Thread(target=self._watch, args=(number, program), daemon=True).start()

    def _watch(self, number: int, program: subprocess.Popen[bytes]) -> None:
        def pump(kind: str, stream: IO[bytes]) -> None:
            read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
            while piece := read(CHUNK):
                self._channel.send({"id": number, kind: piece})

        assert program.stdout is not None
        assert program.stderr is not None
        with contextlib.suppress(PacelineError):  # The supervisor is gone; `end` does the rest.
            aside = threading.Thread(target=pump, args=("err", program.stderr), daemon=True)
            aside.start()
            pump("out", program.stdout)
            aside.join()
            self._channel.send({"id": number, "end": program.wait(), "why": ""})

    def _beat(self) -> None:
        with contextlib.suppress(PacelineError):
            while not self._over.wait(BEAT_S):
                self._channel.send({"beat": True})

    def end(self) -> None:
        self._over.set()
        for program in self._programs.values():
            assert program.stdin is not None
            with contextlib.suppress(OSError):
                program.stdin.close()
        deadline = time.monotonic() + END_S
        for program in self._programs.values():
            try:
                program.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(program)
                program.wait()
        self._channel.close()


def _kill(program: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
