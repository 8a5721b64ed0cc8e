"""Fixtures of all tests: a leak check around each test, and the command line.

Every wait here has a deadline. Whatever a test leaves running is named, ended and counted as that
test's failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Before torch is imported anywhere: two cores are shared by everything that runs here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest
from hypothesis import settings

from network_namespaces import Lab, make_lab, why_not
from paceline.launch.engines import fork_client
from paceline.worker.fork_server import MODULE

settings.register_profile("paceline", deadline=None, print_blob=True)
settings.load_profile("paceline")

PR_SET_CHILD_SUBREAPER = 36
# Orphans become children of this process, where the leak check finds them.
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

# Tests send it to commands, which would inherit that nohup ignores it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

MARK = "PACELINE_TEST_MARK"
"""In the environment of every process that a test starts, however far down."""
LEAVE_S = 5.0
"""How long processes and threads of a test may take to be gone."""
POLL_S = 0.02
RUN_S = 90.0
"""Longest time of one run of the command line; a run takes about 5 s on two idle cores."""

_CHANGING = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_")
"""Variables that pytest, OpenMP and torch set themselves."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll until the condition is true, and return what it gave; fail at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


# ---- tests in parallel (pytest -n) ------------------------------------------------------------

GROUPS = {
    "lab": "network namespaces",
    "cluster": "engine",
    "site": "browser",
    "recorded": "recorded run",
}
"""By fixture: the group whose tests run one after another, on one pytest worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in GROUPS:
                item.add_marker(pytest.mark.xdist_group(GROUPS[fixture]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked `exclusive` waits for the tests of other pytest workers, and they for it.

    This is outside of pytest-timeout's hook, so waiting does not count. A waiting test keeps the
    entrance locked, because others would overtake it forever.
    """
    mode = fcntl.LOCK_EX if item.get_closest_marker("exclusive") else fcntl.LOCK_SH
    entrance, machine = (path.open("ab") for path in lock_files(item.config))
    with entrance, machine:
        fcntl.flock(entrance, fcntl.LOCK_EX)
        fcntl.flock(machine, mode)
        fcntl.flock(entrance, fcntl.LOCK_UN)
        return (yield)


def lock_files(config: pytest.Config) -> list[Path]:
    """Two files that all pytest workers of this run can lock, named after their parent."""
    pid = os.getppid() if hasattr(config, "workerinput") else os.getpid()
    folder = Path(tempfile.gettempdir())
    return [folder / f"paceline-tests-{pid}-{name}.lock" for name in ("entrance", "machine")]


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        for path in lock_files(config):
            path.unlink(missing_ok=True)


# ---- leaks -----------------------------------------------------------------------------------


def find_marked(mark: str) -> dict[int, str]:
    """Living processes that carry a test's mark, orphans included: pid and command line."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            marked = needle in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # It has ended, or belongs to another user.
        pid = int(entry.name)
        if marked and pid not in fork_server_pids() and (line := describe_process(pid)):
            found[pid] = line
    return found


def fork_server_pids() -> set[int]:
    """Fork servers of this process, which outlive a test on purpose."""
    return {server.pid for server in fork_client._servers.values()}


def find_descendants(known: Collection[int] = ()) -> dict[int, str]:
    """Living processes below this one, except fork servers: pid and command line.

    Forked workers show the environment of their fork server, so they carry no test's mark.
    `known` processes are left out with all that they start: a browser or an engine that serves
    several tests starts processes of its own at any time.
    """
    kept = fork_server_pids()
    found, parents = {}, [os.getpid()]
    while parents:
        parent = parents.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                pids = [int(pid) for pid in children.read_text().split()]
            except OSError:
                continue  # The thread ended meanwhile.
            for pid in pids:
                if pid in known:
                    continue
                parents.append(pid)
                line = describe_process(pid)
                if line is not None and pid not in kept:
                    found[pid] = line
    return found


def describe_process(pid: int) -> str | None:
    """The command line; None if it has ended or is one of Python's helpers, which live long."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return None
    if not line or b"from multiprocessing." in line:
        return None  # Without a command line it is a zombie.
    return line.decode(errors="replace").strip()


def list_listening() -> set[tuple[str, int]]:
    listening = set()
    for connection in psutil.Process().net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            listening.add((connection.laddr.ip, connection.laddr.port))
    return listening


def list_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def copy_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_CHANGING) and k != MARK}


def settle(look: Callable[[], Any]) -> Any:
    """What is still there after everything had its time to go; usually nothing, at once."""
    deadline = time.monotonic() + LEAVE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No process, thread, listening socket or environment variable outlives its test."""
    mark = uuid.uuid4().hex
    environment, threads, listening = copy_environment(), list_threads(), list_listening()
    processes = set(find_descendants())
    os.environ[MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
    leaks = []

    def find_left() -> dict[int, str]:
        return find_marked(mark) | find_descendants(processes)

    left = settle(find_left)
    for pid, line in left.items():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        leaks.append(f"process {pid}: {line}")
    leaks += [f"thread {t.name}" for t in settle(lambda: list_threads() - threads)]
    leaks += [f"listening socket {a}" for a in settle(lambda: list_listening() - listening)]
    now = copy_environment()
    changed = {k for k in {*environment, *now} if environment.get(k) != now.get(k)}
    leaks += [f"environment variable {name}" for name in sorted(changed)]
    if leaks:
        pytest.fail("left behind by the test: " + "; ".join(leaks))


# ---- the command line ------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """What became of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stderr.splitlines()

    @property
    def last_line(self) -> str:
        return self.lines[-1] if self.lines else ""


class Started:
    """A command that is running, in a session of its own."""

    def __init__(self, args: tuple[object, ...], cwd: Path, preexec: Callable[[], None] | None):
        # A shell's background jobs ignore Ctrl-C, and so would the command tested here, which has
        # it from this process. (Not in the child, between fork and exec: libraries with threads
        # of their own have locks there that nobody will ever open.)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._files = [cwd / f".{uuid.uuid4().hex[:8]}-{name}" for name in ("out", "err")]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli.main", *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=preexec,
            )
        self.pid = self._popen.pid

    def wait(self, timeout_s: float) -> Finished:
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still running after {timeout_s:g} s: {self._popen.args}\n{self.so_far()}")
        return Finished(code, *(path.read_text(errors="replace") for path in self._files))

    def so_far(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self._files)

    def ended(self) -> bool:
        return self._popen.poll() is not None

    def family(self) -> list[psutil.Process]:
        """All workers and servers below this command, without the fork server."""
        below = psutil.Process(self.pid).children(recursive=True)
        return [p for p in below if (line := describe_process(p.pid)) and MODULE not in line]

    def kill(self) -> None:
        """Its session; the workers, in sessions of their own, must then end by themselves."""
        if not self.ended():
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(LEAVE_S)


class RunCli(Protocol):
    def __call__(self, *args: object, timeout: float = RUN_S) -> Finished: ...


class StartCli(Protocol):
    def __call__(self, *args: object, preexec: Callable[[], None] | None = None) -> Started: ...


@pytest.fixture
def start_cli(tmp_path: Path, no_leaks: None) -> Iterator[StartCli]:
    """Start `paceline ...` inside tmp_path as a new process, killed at the end of the test."""
    started: list[Started] = []

    def start(*args: object, preexec: Callable[[], None] | None = None) -> Started:
        started.append(Started(args, tmp_path, preexec))
        return started[-1]

    yield start
    for command in started:
        command.kill()


@pytest.fixture
def run_process(start_cli: StartCli) -> RunCli:
    """Run `paceline ...` inside tmp_path as a new process: code, stdout, stderr."""

    def run(*args: object, timeout: float = RUN_S) -> Finished:
        return start_cli(*args).wait(timeout)

    return run


@pytest.fixture
def run_cli(tmp_path: Path, no_leaks: None) -> RunCli:
    """Run `paceline ...` inside tmp_path, in this process: code, stdout, stderr.

    Equal to a new process for a command that ends by itself, without the seconds of imports; runs
    use this process's fork server. `timeout` is that of the test.
    """

    def run(*args: object, timeout: float = RUN_S) -> Finished:
        return call_main([str(arg) for arg in args], tmp_path)

    return run


def call_main(args: list[str], cwd: Path) -> Finished:
    """Call the entry point as a new process would, and undo what it leaves behind."""
    from paceline.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, open(os.devnull) as nothing:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["paceline", *args])
        patch.setattr(sys, "path", ["", *sys.path])
        patch.setattr(sys, "stdin", nothing)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        if "COLUMNS" not in os.environ:
            patch.setenv("COLUMNS", "80")  # as without a terminal
        known = set(sys.modules)
        try:
            with keep_torch_settings(), warnings.catch_warnings():
                main()
            code: object = 0
        except SystemExit as done:
            code = done.code
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            traceback.print_exc(file=err)
            code = 1
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(cwd)):
                del sys.modules[name]  # The next job file may have the same name.
    texts = []
    for stream in (out, err):
        buffer = stream.detach()
        assert isinstance(buffer, io.BytesIO)
        texts.append(buffer.getvalue().decode(errors="replace"))
    return Finished(code if isinstance(code, int) else int(code is not None), *texts)


@contextlib.contextmanager
def keep_torch_settings() -> Iterator[None]:
    """Restore torch's global settings, which a command may change for its own process."""
    import torch

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)


# ---- several machines ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def lab_missing() -> str | None:
    return why_not()


@pytest.fixture
def lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None, lab_missing: str | None
) -> Iterator[Lab]:
    """Three machines of this test's own; whatever still runs on one at the end is its failure."""
    if lab_missing is not None:
        pytest.skip(f"three machines cannot be made here: {lab_missing}")
    with make_lab(tmp_path / "lab") as machines:
        monkeypatch.setenv("HOME", str(machines.home))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        yield machines
        left = settle(machines.find_left)
        assert not left, f"left running: {left}"


# ---- run folders -----------------------------------------------------------------------------


def read_result(folder: Path) -> dict[str, Any]:
    value = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def read_events(folder: Path, who: str) -> list[dict[str, Any]]:
    """Whole events written so far."""
    path = folder / "events" / f"{who}.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def has_trained(folder: Path, epochs: int = 1) -> bool:
    return sum(event["kind"] == "epoch" for event in read_events(folder, "run")) >= epochs


def pid_of_worker(folder: Path, rank: int) -> int:
    first = read_events(folder, f"worker-{rank}")[0]
    return int(first["pid"])
