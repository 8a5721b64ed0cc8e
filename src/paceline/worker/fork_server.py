"""Fork server: a process that has imported torch and forks worker processes on request.

Importing torch and the worker modules takes longer than many short runs. The supervisor starts this
process once (`launch/engines/fork_client.py`) and every worker of every run is then a fork of it.

Forking is safe only while this process has a single thread: a lock held by another thread would
stay locked in the child forever. numpy's OpenBLAS starts its thread pool when it is imported, so
the process is started with `OPENBLAS_NUM_THREADS=1`, runs no torch operator, and checks its own
thread count before every fork. If the check fails, or CUDA has been initialized, it reports why and
exits, and the supervisor starts processes with `python -m paceline.worker` instead.

Requests arrive on an inherited socket pair; nothing listens. A request carries three file
descriptors: the child's standard input, its standard output and error, and a status pipe, which
receives the pid after the fork and the exit code when the child ends. Everything else (the
environment, the assignment) travels over the child's standard input.
"""

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import NoReturn

from paceline.worker.assignment import pack_block, read_block

MODULE = "paceline.worker.fork_server"
PADDING = "-" * 64
"""Last argument: room in the argument list for the title of a child."""
FORK = b"fork"
KEEP = b"keep"
"""The same for a child that outlives the supervisor, and ends on its own."""
READY = b"ready"
"""Sent once everything is imported; any other message is the reason for the end of the server."""
STATUS_BYTES = 8
PARENT_CHECK_S = 1.0
"""Interval at which the server checks that the process that started it is alive."""

PRELOADED = (
    "paceline.worker.main",
    "paceline.worker.training_loop",
    "paceline.worker.server_main",
    "paceline.worker.custom_loop",
    "paceline.data.digits",
    "paceline.models.sequential",
    "torch.distributed",
    "torch._dynamo",  # torch imports it with the first optimizer, which takes a second
)
"""Modules imported before the first fork, in addition to the strategies."""
_UNUSED_FACETS = (".simulate", ".cost")

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, kw_only=True)
class ChildSetup:
    """Process attributes that a forked child takes from the supervisor, not from the server."""

    environment: dict[str, str]
    directory: str
    umask: int
    cores: list[int]
    threads: int
    title: str

    def pack(self) -> bytes:
        """Returns the block that precedes the assignment on the child's standard input."""
        return pack_block(json.dumps(asdict(self)).encode())

    def apply(self) -> None:
        """Applies all attributes to the calling process."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.umask(self.umask)
        os.chdir(self.directory)
        os.sched_setaffinity(0, self.cores)
        sys.path[0] = self.directory  # `python -m` searches the working directory first.
        set_blas_threads(self.threads)
        set_process_title(self.title)


def main() -> NoReturn:
    """Serves fork requests until the supervisor closes its end of the socket pair."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getppid()
    try:
        preload()
        problem = fork_problem()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    server = ForkServer(control, parent)
    # If the supervisor is gone, it does not need the reason.
    with contextlib.suppress(OSError):
        if problem is None:
            control.send(READY)
            problem = server.serve()
        control.send(problem.encode())
    server.wait_for_kept()
    os._exit(0)


def preload() -> None:
    """Imports everything that a worker or server process of a typical run imports."""
    import importlib
    import pkgutil

    import paceline.strategies

    found = pkgutil.walk_packages(paceline.strategies.__path__, "paceline.strategies.")
    strategies = [module.name for module in found if not module.name.endswith(_UNUSED_FACETS)]
    for module in (*PRELOADED, *strategies):
        importlib.import_module(module)
    # Objects that the collector never visits again stay on pages shared with the children.
    gc.collect()
    gc.freeze()


def fork_problem() -> str | None:
    """Returns why this process must not fork, or None."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"importing torch started {threads - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA has been initialized"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open failed: {error}"
    return None


class ForkServer:
    """Event loop of the server: requests, ends of children, and the end of the supervisor."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int]] = {}
        """By pidfd: pid and status pipe."""
        self._kept: set[int] = set()
        """The pids of those that outlive the supervisor."""

    def serve(self) -> str:
        """Runs until the supervisor is gone or forking is unsafe; returns the reason."""
        problem = None
        while problem is None:
            for key, _ in self._selector.select(PARENT_CHECK_S):
                if key.fileobj is self._control:
                    problem = self._handle_request()
                else:
                    self._report_end(key.fd)
            if os.getppid() != self._parent:
                problem = "the supervisor ended"
        for pid, _ in self._children.values():
            if pid not in self._kept:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        return problem

    def wait_for_kept(self) -> None:
        """Waits for the children that outlive the supervisor: the kernel ends them with this
        process."""
        self._selector.unregister(self._control)
        while self._kept:
            for key, _ in self._selector.select():
                self._report_end(key.fd)

    def _handle_request(self) -> str | None:
        try:
            request, descriptors, _, _ = socket.recv_fds(self._control, len(FORK), 3)
        except OSError:
            request, descriptors = b"", []
        if request not in (FORK, KEEP):
            return "the supervisor closed the connection"
        problem = fork_problem()
        if problem is not None:
            return problem
        standard_input, output, status = descriptors
        pid = os.fork()
        if pid == 0:
            self._become_worker(standard_input, output, status)
        os.close(standard_input)
        os.close(output)
        # If the supervisor gave up waiting, the child reads end of file and exits.
        with contextlib.suppress(BrokenPipeError):
            os.write(status, pid.to_bytes(STATUS_BYTES, "little", signed=True))
        if request == KEEP:
            self._kept.add(pid)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = (pid, status)
        self._selector.register(descriptor, selectors.EVENT_READ)
        return None

    def _report_end(self, descriptor: int) -> None:
        pid, status = self._children.pop(descriptor)
        self._kept.discard(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, wait_status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(wait_status)
        with contextlib.suppress(BrokenPipeError):  # The client no longer waits for this child.
            os.write(status, code.to_bytes(STATUS_BYTES, "little", signed=True))
        os.close(status)

    def _become_worker(self, standard_input: int, output: int, status: int) -> NoReturn:
        """Runs a worker or server in the forked child; never returns to the event loop."""
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._selector.close()
            self._control.close()
            for descriptor, (_, other_status) in self._children.items():
                os.close(descriptor)
                os.close(other_status)
            os.dup2(standard_input, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for descriptor in (standard_input, output, status):
                os.close(descriptor)
            run_forked_worker()
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)


def run_forked_worker() -> None:
    """Applies the supervisor's process attributes, then runs like `python -m paceline.worker`."""
    import numpy as np

    from paceline.worker.main import main as run_worker

    commands = os.fdopen(os.dup(0), "rb")
    problem = "the supervisor ended before it sent the setup of this process"
    ChildSetup(**json.loads(read_block(commands, problem))).apply()
    np.random.seed()  # Otherwise all children would draw the same numbers.
    run_worker(commands, can_fork=True)


def set_blas_threads(threads: int) -> None:
    """Sets the threads of numpy's OpenBLAS, which read its own variable at import."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(threads)


def set_process_title(title: str) -> None:
    """Sets what `ps` shows: the short name, and the command line.

    The command line is overwritten in place. If its last byte is not zero, the kernel prints the
    text up to the first zero byte.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15])
    with open("/proc/self/stat", encoding="utf-8") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    text = f"{sys.executable} -m paceline.worker {title}".encode()[: end - start - 2]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
    ctypes.memset(end - 1, 1, 1)


if __name__ == "__main__":
    main()
