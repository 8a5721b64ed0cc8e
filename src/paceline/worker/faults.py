"""Carries out an injected fault on a process: this one, or a child of it.

A stopped process cannot continue on its own, and one that is slowed down must be stopped and
continued all the time: a helper process does both. It belongs to the session of this process and
ends with its target.
"""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys

HELPER = """
import os, signal, sys, time
pid, run_s, stop_s, for_s = int(sys.argv[1]), *map(float, sys.argv[2:])
end = time.monotonic() + for_s
try:
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(min(stop_s, max(0.0, end - time.monotonic())))
        os.kill(pid, signal.SIGCONT)
        time.sleep(run_s)
except ProcessLookupError:
    pass
"""
RUN_S = 0.02
"""Time that a slowed process runs between two stops."""
FOREVER_S = 1e9


def fault_command(kind: str, for_s: float | None, factor: float, server: int | None) -> str:
    """Returns the line by which the supervisor orders a fault from a worker."""
    place = "-" if server is None else str(server)
    return f"fault {kind} {FOREVER_S if for_s is None else for_s} {factor} {place}"


def carry_out(
    kind: str, for_s: float, factor: float, pid: int | None = None
) -> subprocess.Popen[bytes] | None:
    """Injects a fault into this process, or the one with this pid; returns the helper, if any."""
    target = os.getpid() if pid is None else pid
    if kind == "kill":
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
    elif kind == "cut":
        assert pid is None, "a process cuts its own connections"
        cut_connections()
    else:
        stop_s = for_s if kind == "stop" else RUN_S * (factor - 1)
        words = [str(target), str(RUN_S), str(stop_s), str(for_s)]
        return subprocess.Popen([sys.executable, "-S", "-c", HELPER, *words])
    return None


def cut_connections() -> None:
    """Shuts down all TCP connections of this process; none of its sockets is closed."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
