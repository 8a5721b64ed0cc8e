"""Runs one command and makes sure that none of its processes outlives the launcher.

First line of input: the command as JSON. Every further line is a heartbeat; the line "stop", the
end of the input, or no heartbeat for `beat_s` ends the command and all its descendants, including
detached ones. If `input` is given, the command's stdin receives those bytes and then the text of
lines that begin with "say". Output and exit status are the command's; 128 + n for signal n.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 1.0
"""Time for processes that are still running after the command exited to exit as well."""
KILL_S = 5.0
NOT_STARTED = 126

if TYPE_CHECKING:  # old Python versions cannot evaluate it
    Events = queue.SimpleQueue[str]


def main() -> None:
    spec = json.loads(sys.stdin.buffer.readline().decode())
    events: Events = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: events.put("stop"))
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # detached processes become our children
    lock = lock_folder(spec.get("lock"))
    try:
        child = start(spec)
    except OSError as error:
        sys.stderr.write(f"cannot run {spec['argv'][0]}: {error}\n")
        sys.exit(NOT_STARTED)
    threading.Thread(target=read_commands, args=(events, child, spec), daemon=True).start()
    threading.Thread(target=wait, args=(child, events), daemon=True).start()
    ended = watch(events, spec["beat_s"])
    terminate_all(LEFTOVER_GRACE_S if ended else spec["grace_s"])
    status = child.returncode if ended else -signal.SIGTERM
    if lock is not None:
        os.close(lock)
    sys.stderr.flush()
    # Does not wait for the thread that reads the input.
    os._exit(status if status >= 0 else 128 - status)


def start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    environment = dict(os.environb)
    environment.update((encode(name), encode(value)) for name, value in spec["env"].items())
    for name, value in spec.get("defaults", {}).items():
        environment.setdefault(encode(name), encode(value))
    return subprocess.Popen(
        [os.path.expanduser(encode(spec["argv"][0])), *map(encode, spec["argv"][1:])],
        cwd=os.path.expanduser(encode(spec["cwd"])),
        env=environment,
        stdin=subprocess.PIPE if "input" in spec else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def encode(text: str) -> bytes:
    """Returns the original bytes, regardless of this machine's locale."""
    return text.encode("utf-8", "surrogateescape")


def prctl(option: int, value: int) -> None:
    """Calls prctl on Linux; elsewhere only the process group is available."""
    if LIBC is not None:
        LIBC.prctl(option, value, 0, 0, 0)


def load_libc() -> Any:
    try:
        return ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    except OSError:
        return None


LIBC = load_libc()  # before any fork


def lock_folder(path: str | None) -> int | None:
    """Takes a shared lock that keeps file_sync from changing the folder of the command."""
    if path is None:
        return None
    import fcntl

    file = os.open(os.path.expanduser(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def read_commands(events: Events, child: subprocess.Popen[bytes], spec: dict[str, Any]) -> None:
    write_stdin(child, base64.b64decode(spec.get("input", "")))
    for line in sys.stdin.buffer:
        events.put("stop" if line.strip() == b"stop" else "beat")
        if line.startswith(b"say "):
            write_stdin(child, line[4:])
    events.put("stop")


def write_stdin(child: subprocess.Popen[bytes], data: bytes) -> None:
    try:
        if child.stdin is not None:
            child.stdin.write(data)
            child.stdin.flush()
    except OSError:
        pass  # The command has exited.


def wait(child: subprocess.Popen[bytes], events: Events) -> None:
    child.wait()
    events.put("ended")


def watch(events: Events, beat_s: float) -> bool:
    """Waits until the command exits (returns True) or must be stopped (returns False)."""
    last_beat_s = time.monotonic()
    while True:
        try:
            event = events.get(timeout=1.0)
        except queue.Empty:
            event = ""
        if event in ("ended", "stop"):
            return event == "ended"
        if event == "beat":
            last_beat_s = time.monotonic()
        elif time.monotonic() - last_beat_s > beat_s:
            sys.stderr.write(f"no heartbeat from the launcher for {beat_s:g} s: stopped\n")
            return False


def terminate_all(grace_s: float) -> None:
    """Terminates all remaining processes, then kills them after the grace period."""
    signal_all(signal.SIGTERM)
    if not wait_for_exit(grace_s):
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            signal_all(signal.SIGKILL)
            if wait_for_exit(0.2):
                return


def wait_for_exit(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while list_descendants():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def signal_all(number: int) -> None:
    for pid in list_descendants():
        try:
            os.kill(pid, number)
        except OSError:
            pass


def list_descendants() -> list[int]:
    """Returns all live descendants; reaps dead children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except OSError:
        pass
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            parents[int(name)] = int(fields[1])
    found = {os.getpid()}
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        grown = bool(below)
    return sorted(found - {os.getpid()})


if __name__ == "__main__":
    main()
