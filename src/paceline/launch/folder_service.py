"""Writes the run folder for processes: their logs, and files that workers elsewhere send.

Nothing that a worker says becomes a path as it is: its own events go by the name that it proved to
have, files by names that are known.
"""

import os
import re
import shutil
from pathlib import Path
from typing import IO

from paceline.errors import WireError
from paceline.protocol.messages import (
    EventLine,
    FileChunk,
    FileRequest,
    FileResponse,
    FilesComplete,
    Message,
    RunClockRequest,
    RunClockResponse,
)
from paceline.telemetry.run_folder import (
    KERAS,
    EventWriter,
    RunFolder,
    commit_checkpoint,
    partial_checkpoint_path,
)
from paceline.worker.main import STACKS_BEGIN, STACKS_END

GIVE_BYTES = 1 << 20
SYNC_BYTES = 32 << 20
"""Data is synced in chunks: one long sync at the end would block the event loop and its heartbeats.
"""
FILE = re.compile(r"state\.json|state\.safetensors|worker-\d{1,6}\.safetensors")
MODELS = {"model": "model.safetensors", KERAS: KERAS}
"""Files that belong to a model, and their names in the run folder."""
CHECKPOINT = re.compile(r"\d{1,20}")


class FolderService:
    """Receives and sends files of one run."""

    def __init__(self, folder: RunFolder, checkpoint: str | None) -> None:
        self._folder = folder
        self._checkpoint = Path(checkpoint) if checkpoint is not None else None
        self._events: dict[str, EventWriter] = {}
        self._open: dict[str, IO[bytes]] = {}

    def handle(self, who: str, message: Message, age_s: float) -> tuple[bool, Message | None]:
        """True if the message was handled here, and the reply to it, if any."""
        if isinstance(message, EventLine):
            if who not in self._events:
                self._events[who] = EventWriter(self._folder.events(who))
            self._events[who].write_line(message.line.replace("\n", " "))
        elif isinstance(message, FileChunk) and message.path == f"profile/{who}":
            path = self._folder.profile(who)  # In one chunk: at most a few hundred operators.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(message.data)
        elif isinstance(message, FileChunk):
            self._write(message)
        elif isinstance(message, FilesComplete):
            self._finish(message)
        elif isinstance(message, FileRequest):
            return True, self._read_chunk(message)
        elif isinstance(message, RunClockRequest):
            return True, RunClockResponse(age_s)
        else:
            return False, None
        return True, None

    def _write(self, part: FileChunk) -> None:
        if part.path not in self._open:
            target = self._target_path(part.path)
            if target.parent.name.endswith(".partial") and not any(
                name.startswith(part.path.split("/")[0] + "/") for name in self._open
            ):
                shutil.rmtree(target.parent, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._open[part.path] = target.open("wb")
        file = self._open[part.path]
        file.write(part.data)
        if file.tell() // SYNC_BYTES != (file.tell() - len(part.data)) // SYNC_BYTES:
            os.fsync(file.fileno())

    def _target_path(self, path: str) -> Path:
        if path in MODELS:
            target = self._folder.path / MODELS[path]
            return target.with_name(target.name + ".partial")
        name, _, file = path.partition("/")
        if not CHECKPOINT.fullmatch(name) or not FILE.fullmatch(file):
            raise WireError(f"file {path!r} does not belong to a run")
        return partial_checkpoint_path(self._folder.checkpoints, name) / file

    def _finish(self, done: FilesComplete) -> None:
        if done.path not in MODELS and not CHECKPOINT.fullmatch(done.path):
            raise WireError(f"checkpoint {done.path!r} does not belong to a run")
        for path in [p for p in self._open if p.split("/")[0] == done.path]:
            self._open.pop(path).close()
        if done.path in MODELS:
            os.replace(self._target_path(done.path), self._folder.path / MODELS[done.path])
        else:
            commit_checkpoint(self._folder.checkpoints, done.path, keep=max(1, done.keep))

    def _read_chunk(self, asked: FileRequest) -> FileResponse:
        if not FILE.fullmatch(asked.name):
            raise WireError(f"file {asked.name!r} does not belong to a checkpoint")
        try:
            assert self._checkpoint is not None
            with (self._checkpoint / asked.name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(asked.offset)
                return FileResponse(file.read(GIVE_BYTES), size)
        except FileNotFoundError:
            return FileResponse(b"", -1)

    def close(self) -> None:
        """Drops unfinished files, as a process that dies while writing would."""
        for path, file in self._open.items():
            file.close()
            self._target_path(path).unlink(missing_ok=True)
        for place in self._folder.checkpoints.glob(".*.partial"):
            if self._open:
                shutil.rmtree(place, ignore_errors=True)
        self._open.clear()
        for writer in self._events.values():
            writer.close()


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
