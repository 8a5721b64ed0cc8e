"""Incremental readers of files that another process writes: event files and JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from paceline.telemetry.events import Event, parse_event


class EventTail:
    """Reads the events appended to a file; leaves an incomplete line for the next poll."""

    def __init__(self, path: Path, *, skip: Iterable[type[Event]] = ()) -> None:
        """Lines of the types in `skip` are dropped unparsed, which is much faster."""
        self.path = path
        # `kind` is the first key of every line; the closing quote keeps prefixes apart.
        self._skip = tuple(f'{{"kind":"{event_type.kind}"'.encode() for event_type in skip)
        self._offset = 0
        self.size = 0
        """After a poll: size of the file in bytes."""
        self.restarts = 0
        """Number of times the file was found shorter than before, which means replaced."""
        self.torn_bytes = 0
        """After a poll: bytes at the end that do not form a complete line."""
        self.unreadable = 0
        """Lines that are not valid events."""

    @property
    def left_bytes(self) -> int:
        """Bytes that a poll with a limit left for the next one."""
        return self.size - self._offset - self.torn_bytes

    def poll(self, limit_bytes: int = -1) -> list[Event]:
        """Returns the events appended since the last poll; none if the file does not exist.

        Reads at most `limit_bytes`, plus the rest of the last line.
        """
        try:
            with self.path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < self._offset:
                    self._offset = 0
                    self.restarts += 1
                file.seek(self._offset)
                data = file.read(limit_bytes)
                if limit_bytes >= 0 and not data.endswith(b"\n"):
                    data += file.readline()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        self.torn_bytes = len(data) - whole
        found = []
        for line in data[:whole].split(b"\n")[:-1]:
            if self._skip and line.startswith(self._skip):
                continue
            try:
                event = parse_event(json.loads(line))
            except (ValueError, RecursionError):
                event = None
            if event is None:
                self.unreadable += 1
            else:
                found.append(event)
        return found

    def list_problems(self) -> list[str]:
        """Describes what the last poll could not read."""
        name = f"events/{self.path.name}"
        found = []
        if self.torn_bytes:
            found.append(
                f"{name} ends in the middle of an event ({self.torn_bytes} bytes without a newline)"
            )
        if self.unreadable:
            found.append(f"{name} has {self.unreadable} lines that are not valid events")
        return found


class JsonFile:
    """A JSON object in a file that may be missing, incomplete, or replaced at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value: dict[str, object] = {}
        """The last object read; empty if the file is missing or was never readable."""
        self.problem: str | None = None
        """Description of why the file could not be read; None if it was."""
        self._stamp: tuple[int, int] | None = None

    @property
    def exists(self) -> bool:
        return self._stamp is not None

    def refresh(self) -> None:
        """Reads the file again if it has changed."""
        name = self.path.name
        try:
            stat = self.path.stat()
        except OSError:
            self.value, self.problem, self._stamp = {}, f"{name} is missing", None
            return
        stamp = stat.st_mtime_ns, stat.st_size
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            value = json.loads(self.path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            self.problem = f"{name} is truncated or not valid JSON"
            return
        if not isinstance(value, dict) or not value:
            self.problem = f"{name} is empty"
            return
        self.value, self.problem = value, None
