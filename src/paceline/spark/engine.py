"""Spark engine: one barrier task per worker, started by a single DataFrame operation.

`mapInArrow(..., barrier=True)` works both in classic sessions and with Spark Connect, where no JVM
is available. `run` calls a function of the user in such tasks.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.errors import RunFailed, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from paceline.launch.engines.engine import OnAgentLost

SLOTS_TIMEOUT_S = 60.0
"""Time limit for executors to register."""
EXIT_TIMEOUT_S = 20.0
"""Tasks end when the run does; after this time they are cancelled."""
CAUSES = (
    (r"paceline error: (.+)", "{}"),
    (
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "package {} is missing on the executors; install paceline there, or set PYSPARK_PYTHON to "
        "an environment that has it",
    ),
    (r"ExecutorLostFailure \((executor \S+) exited[^)]*\) Reason: ([^\n]+)", "{} was lost: {}"),
    (r"((?:Executor|Worker|Task) \S+ (?:lost|is lost|from barrier)[^\n]*)", "{}"),
)
"""Patterns in Spark's stack traces, and the messages for them; the first match is reported."""


class SparkEngine:
    """Slots on the executors of a session.

    Without a session, one is opened for the run, at `master` or as configured.
    """

    name = "spark"

    def __init__(self, session: SparkSession | None = None, *, master: str | None = None) -> None:
        self._is_ours = session is None
        self._master = master
        self._session = session
        self._job: BarrierJob | None = None

    def find_address(self) -> str:
        if self._session is None:
            self._session = open_session(self._master)
        check_session(self._session)
        return driver_address(self._session)

    def begin(self, tickets: list[str], on_lost: OnAgentLost) -> None:
        assert self._session is not None
        wait_for_slots(self._session, len(tickets))

        def lost(reason: str) -> None:
            for index in range(len(tickets)):
                on_lost(index, reason)

        self._job = BarrierJob(self._session, len(tickets), host_agent_task(tickets), lost)

    def end(self) -> None:
        if self._job is not None:
            self._job.end()
            self._job = None
        if self._is_ours and self._session is not None:
            self._session.stop()
            self._session = None


def host_agent_task(tickets: list[str]) -> Callable[[int], str]:
    """Returns the task function. It is pickled by value, so it can report a missing Paceline."""

    def run(index: int) -> str:
        import socket

        try:
            from paceline.worker.outpost import run_host_agent
        except ModuleNotFoundError as error:
            import sys

            raise RuntimeError(
                f"paceline error: package {error.name} is missing for {sys.executable} on executor "
                f"{socket.gethostname()}; install paceline there, or set PYSPARK_PYTHON to "
                "an environment that has it"
            ) from None
        try:
            run_host_agent(tickets[index], socket.gethostname())
        except Exception as error:
            raise RuntimeError(
                f"paceline error: executor {socket.gethostname()} cannot reach the driver "
                f"({error}); open the driver's ports to the executors, or set spark.driver.host "
                "to an address that they can reach"
            ) from None
        return ""

    return run


class BarrierJob:
    """Runs `function(index)` in `count` simultaneous tasks, in a background thread."""

    def __init__(
        self,
        session: SparkSession,
        count: int,
        function: Callable[[int], str],
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._session = session
        self._tag = f"paceline-{secrets.token_hex(4)}"
        self._on_failure = on_failure
        self._ending = False
        self.results: list[str] | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(
            target=self._run, args=(count, function), name=self._tag, daemon=True
        )
        self.thread.start()

    def _run(self, count: int, function: Callable[[int], str]) -> None:
        try:
            self._session.addTag(self._tag)
            task = barrier_task(function)
            frame = self._session.range(0, count, 1, count)
            rows = frame.mapInArrow(task, "index long, answer string", barrier=True).collect()
            self.results = [row["answer"] for row in sorted(rows, key=lambda r: r["index"])]
        except BaseException as error:
            self.error = error
            if self._on_failure is not None and not self._ending:
                self._on_failure(summarize_spark_error(error))

    def end(self) -> None:
        self._ending = True
        self.thread.join(EXIT_TIMEOUT_S)
        self.cancel()

    def cancel(self) -> None:
        """Cancels the tasks, unless they have ended."""
        self._ending = True
        if self.thread.is_alive():
            self._session.interruptTag(self._tag)
            self.thread.join(EXIT_TIMEOUT_S)


def barrier_task(function: Callable[[int], str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        assert context is not None
        index = context.partitionId()
        if context.attemptNumber() > 0:
            raise RuntimeError("paceline error: a barrier task was restarted")
        answer = function(index)
        yield pyarrow.RecordBatch.from_pydict({"index": [index], "answer": [answer]})

    return task


def load_session_class() -> Any:
    """Imports pyspark. Raises UsageError if it is missing."""
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise UsageError("pyspark is not installed; run pip install 'paceline[spark]'") from None
    return SparkSession


def open_session(master: str | None) -> SparkSession:
    """Opens a session as configured by spark-defaults.conf and the environment.

    Raises UsageError if pyspark is missing, RunFailed if no session can be opened.
    """
    session_class = load_session_class()
    # Defaults to this interpreter's path: clusters often share their environments.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = session_class.builder.appName("paceline")
    if master is not None:
        builder = builder.master(master)
    try:
        session = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    except Exception as error:
        raise RunFailed(
            f"cannot open a Spark session at {master or 'the configured master'}: "
            f"{summarize_spark_error(error)}"
        ) from None
    if not is_connect(session):
        session.sparkContext.setLogLevel("ERROR")
    return session


def setting(session: SparkSession, name: str, default: str = "") -> str:
    return str(session.conf.get(name, default) or default)


def is_connect(session: SparkSession) -> bool:
    return "connect" in type(session).__module__


def check_session(session: SparkSession) -> None:
    """Raises UsageError for settings that keep workers from running simultaneously."""
    if setting(session, "spark.dynamicAllocation.enabled").lower() == "true":
        raise UsageError(
            "spark.dynamicAllocation.enabled is true, but all workers must run simultaneously; "
            "set it to false and request enough executors (spark.executor.instances)"
        )


def driver_address(session: SparkSession) -> str:
    """Returns the address at which executors reach this process."""
    if is_connect(session):
        client: Any = session.client
        where = str(getattr(client, "host", "")).removeprefix("sc://")
        host, _, port = where.partition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host or "127.0.0.1", int(port.split("/")[0] or 15002)))
            return str(probe.getsockname()[0])
    host = setting(session, "spark.driver.host", "127.0.0.1")
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise UsageError(
            f"spark.driver.host {host} cannot be resolved; "
            "set it to an address that executors can reach"
        ) from None


def wait_for_slots(session: SparkSession, needed: int, timeout_s: float = SLOTS_TIMEOUT_S) -> None:
    """Waits until all tasks of a barrier stage can run; Spark itself would wait ten minutes."""
    if is_connect(session):
        return
    context = session.sparkContext._jsc.sc()
    deadline = time.monotonic() + timeout_s
    while True:
        profile = context.resourceProfileManager().defaultResourceProfile()
        slots = int(context.maxNumConcurrentTasks(profile))
        if slots >= needed:
            return
        if time.monotonic() > deadline:
            raise UsageError(
                f"{needed} workers need {needed} simultaneous task slots, but the cluster has "
                f"{slots}; use fewer workers, or request more executors or cores"
            )
        time.sleep(0.5)


def summarize_spark_error(error: BaseException) -> str:
    """Returns the most informative line of Spark's stack traces."""
    text = str(error)
    for pattern, message in CAUSES:
        found = re.search(pattern, text)
        if found:
            return message.format(*(group.strip() for group in found.groups()))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def run(
    function: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    session: SparkSession | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in `num_workers` simultaneous barrier tasks.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in each, so
    that `torch.distributed.init_process_group("gloo")` works. Return values must be
    JSON-compatible; the list is in the order of ranks. Raises RunFailed with the worker's error if
    one fails, or on timeout.
    """
    if num_workers < 1:
        raise UsageError(f"num_workers {num_workers}: must be at least 1")
    session = session or load_session_class().getActiveSession()
    if session is None:
        raise UsageError("no active Spark session; create one with SparkSession.builder")
    check_session(session)
    wait_for_slots(session, num_workers)
    task = make_task_function(function, args, kwargs or {}, num_workers)
    job = BarrierJob(session, num_workers, task)
    try:
        job.thread.join(timeout_s)
        if job.thread.is_alive():
            raise RunFailed(f"the function did not return on all workers within {timeout_s:g} s")
    finally:
        job.cancel()
    if job.error is not None:
        raise RunFailed(summarize_spark_error(job.error), str(job.error))
    assert job.results is not None
    return [json.loads(text) for text in job.results]


def make_task_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> Callable[[int], str]:
    def call(index: int) -> str:
        import json
        import os
        import socket
        import traceback

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        # The address at which other executors reach this one.
        address = context.getTaskInfos()[index].address.rsplit(":", 1)[0]
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
            local = json.dumps({"address": address, "port": port})
            others = [json.loads(text) for text in context.allGather(local)]
        local_ranks = [rank for rank, other in enumerate(others) if other["address"] == address]
        os.environ.update(
            RANK=str(index),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(local_ranks.index(index)),
            LOCAL_WORLD_SIZE=str(len(local_ranks)),
            MASTER_ADDR=others[0]["address"],
            MASTER_PORT=str(others[0]["port"]),
        )
        try:
            answer = function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            # Not in the raise statement: Spark's traceback contains the source line, too.
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            text = f"paceline error: worker {index} on {socket.gethostname()}: {text}"
            raise RuntimeError(text) from error
        try:
            return json.dumps(answer)
        except (TypeError, ValueError) as error:
            raise RuntimeError(
                f"paceline error: worker {index} returned a value that is not JSON-compatible "
                f"({error}); return numbers, text, lists or dicts, and write tensors to a file"
            ) from None

    return call
