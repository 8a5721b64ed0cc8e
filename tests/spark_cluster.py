"""A real Spark cluster for tests: a standalone master and workers, on loopback, on free ports."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 90.0
# Read by the driver when a session is made: the Python of the executors.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def why_not() -> str | None:
    """What is missing for a cluster here; None if nothing."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed (pip install 'paceline[spark]')"
    if shutil.which("java") is None:
        return "there is no java"
    return None


@dataclass
class Cluster:
    """Its master's address, and the processes that make it up."""

    folder: Path
    master: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def open_session(self, **settings: str) -> Any:
        """Two executors of one core, one on each worker, on the Python of the tests."""
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(self.master).appName("paceline tests")
        base = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
        }
        for name, value in {
            **base,
            **{k.replace("__", "."): v for k, v in settings.items()},
        }.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        return session

    def executors(self, application: str) -> list[int]:
        """Pids of the JVMs that are an application's executors now."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes()
                    # The worker starts them; the driver's own command line has no --app-id.
                    if b"CoarseGrainedExecutorBackend" in line and application.encode() in line:
                        found.append(int(entry.name))
        return sorted(found)


@contextlib.contextmanager
def run_cluster(folder: Path, workers: int = 2, cores: int = 2) -> Iterator[Cluster]:
    """Ends with all its processes, whatever happened."""
    folder.mkdir(parents=True)
    cluster = Cluster(folder)
    try:
        log = _start(cluster, "master", "org.apache.spark.deploy.master.Master", "--port", "0")
        cluster.master = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            log = _start(
                cluster,
                f"worker-{number}",
                "org.apache.spark.deploy.worker.Worker",
                *("--cores", str(cores), "--memory", "4g"),
                *("--work-dir", str(folder / f"work-{number}"), cluster.master),
            )
            _wait_for(log, "Successfully registered with master")
        yield cluster
    finally:
        for process in reversed(cluster.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(cluster: Cluster, name: str, cls: str, *args: str) -> Path:
    import pyspark

    home = Path(pyspark.__file__).parent
    log = cluster.folder / f"{name}.log"
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(cluster.folder / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    with log.open("wb") as sink:
        cluster.processes.append(
            subprocess.Popen(
                [
                    home / "bin" / "spark-class",
                    cls,
                    "--host",
                    "127.0.0.1",
                    "--webui-port",
                    "0",
                    *args,
                ],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        )
    return log


def _wait_for(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found.group(found.lastindex or 0)
        time.sleep(0.2)
    raise TimeoutError(
        f"{pattern!r} is not in {log} after {START_S:g} s: {log.read_text()[-2000:]}"
    )
