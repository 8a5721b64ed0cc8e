"""Process server: starts the workers of several runs on a machine, as forks of one fork server.

The supervisor of a comparison starts it once on each machine, under a watchdog. Each line of its
input is a request in JSON: start a process with its assignment, send it a command, or kill it. Each
line of its output is an output line or the end of a process. It ends with its input, and all its
processes with it.
"""

import asyncio
import base64
import contextlib
import io
import json
import sys
from typing import Any

from paceline.launch.engines import fork_client
from paceline.launch.engines.local import LocalLauncher, LocalProcess
from paceline.worker.assignment import read_assignment

MODULE = "paceline.launch.engines.process_server"
MAX_REQUEST = 1 << 26
"""Longest line of input: an assignment with its job."""
MAX_TEXT = 1 << 14
"""Longer output lines are split, because those of a watchdog are limited."""

Frame = dict[str, Any]


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(ProcessServer().serve())


class ProcessServer:
    def __init__(self) -> None:
        self._processes: dict[int, LocalProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader = asyncio.StreamReader(MAX_REQUEST)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await asyncio.to_thread(fork_client.warm_up)
        send({"ready": True})
        while line := await reader.readline():
            self._handle(json.loads(line))
        for process in self._processes.values():
            process.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _handle(self, request: Frame) -> None:
        number, do = request["id"], request["do"]
        process = self._processes.get(number)
        if do == "start":
            task = asyncio.create_task(self._run(number, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif process is not None and do == "command":
            process.send_command(request["line"])
        elif process is not None and do == "kill":
            process.kill()

    async def _run(self, number: int, request: Frame) -> None:
        launcher = LocalLauncher()
        try:
            block = io.BytesIO(base64.b64decode(request["assignment"]))
            assignment, _ = read_assignment(block)
            process = await launcher.start_placed(
                assignment, None, lambda _, line: say(number, line), request["defaults"]
            )
            self._processes[number] = process
            how = await process.wait()
        except Exception as error:
            how = f"it could not be started: {type(error).__name__}: {error}"
        await launcher.close()  # Reads the rest of the output.
        self._processes.pop(number, None)
        send({"id": number, "end": how})


def say(number: int, line: str) -> None:
    for at in range(0, max(1, len(line)), MAX_TEXT):
        send({"id": number, "line": line[at : at + MAX_TEXT]})


def send(frame: Frame) -> None:
    sys.stdout.write(json.dumps(frame) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
