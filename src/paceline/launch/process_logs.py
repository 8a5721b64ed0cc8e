"""Log files of a run's processes, and the stack dumps among their lines."""

from __future__ import annotations

from typing import IO

from paceline.telemetry.run_folder import RunFolder
from paceline.worker.main import STACKS_BEGIN, STACKS_END


class ProcessLogs:
    """Appends each process's output to its log; raises OSError if the disk is full."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        self._stacks: dict[str, list[str]] = {}
        self._stacks_open: set[str] = set()

    def add_output(self, who: str, line: str) -> None:
        """One line that a process printed; stack dumps are kept for `stacks` too."""
        if line.startswith(STACKS_BEGIN):
            self._stacks_open.add(who)
            self._stacks[who] = []
        elif line.startswith(STACKS_END):
            self._stacks_open.discard(who)
        elif who in self._stacks_open:
            self._stacks[who].append(line)
        self.write(who, line)

    def write(self, who: str, line: str) -> None:
        if who not in self._files:
            path = self._folder.log(who)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[who] = path.open("a", encoding="utf-8")
        self._files[who].write(line + "\n")
        self._files[who].flush()

    def stacks(self, who: str) -> str:
        """The last stack dump of a process."""
        return "\n".join(self._stacks.get(who, ["none"]))

    def last_lines(self, who: str, count: int) -> list[str]:
        path = self._folder.log(who)
        if not path.exists():
            return []
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
