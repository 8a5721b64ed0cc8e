"""Spark engine: one barrier task per worker, started by a single DataFrame operation.

`mapInArrow(..., barrier=True)` works both in classic sessions and with Spark Connect, where no JVM
is available.
"""

from __future__ import annotations

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
        if self._is_ours and self._session is not None:
            self._session.stop()


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
            frame = self._session.range(0, count, 1, count)
            rows = frame.mapInArrow(
                barrier_task(function), "index long, answer string", barrier=True
            ).collect()
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


def open_session(master: str | None) -> SparkSession:
    """Opens a session as configured by spark-defaults.conf and the environment.

    Raises UsageError if pyspark is missing, RunFailed if no session can be opened.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise UsageError("pyspark is not installed; run pip install 'paceline[spark]'") from None
    # Defaults to this interpreter's path: clusters often share their environments.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("paceline")
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
