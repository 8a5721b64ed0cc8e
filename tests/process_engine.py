"""An engine for tests that is nothing but processes: what the contract asks for, and no more."""

from __future__ import annotations

import subprocess
import sys
import threading

from paceline.launch.engines.engine import OnAgentLost

CODE = (
    "import sys; from paceline.worker.outpost import run_host_agent; "
    "run_host_agent(sys.stdin.readline())"
)


class Places:
    """Runs `serve` in a process of its own for each ticket."""

    name = "places"

    def __init__(self, address: str = "127.0.0.1", late: set[int] | None = None) -> None:
        self._address = address
        self._late = late or set()
        self.processes: list[subprocess.Popen[str]] = []
        self.ended = False

    def find_address(self) -> str:
        return self._address

    def begin(self, tickets: list[str], on_lost: OnAgentLost) -> None:
        self.ended = False
        for index, ticket in enumerate(tickets):
            if index in self._late:
                continue
            process = subprocess.Popen(
                [sys.executable, "-c", CODE],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert process.stdin is not None
            process.stdin.write(ticket + "\n")
            process.stdin.flush()
            self.processes.append(process)
            threading.Thread(
                target=self._watch, args=(index, process, on_lost), daemon=True
            ).start()

    def _watch(self, index: int, process: subprocess.Popen[str], on_lost: OnAgentLost) -> None:
        status = process.wait()
        if not self.ended:
            on_lost(index, f"place {index} ended with {status}")

    def end(self) -> None:
        self.ended = True
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.processes.clear()
