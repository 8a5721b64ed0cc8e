"""The fork server: attributes of forked processes, equal results, and handling of failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import jobs
from conftest import read_result, wait_until
from paceline.errors import RunFailed
from paceline.job import Job
from paceline.launch.engines import fork_client
from paceline.launch.engines.local import LocalLauncher
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.events import EpochEnded
from paceline.worker import fork_server

FACTS = "PACELINE_TEST_FACTS"


class Telltale(jobs.Plain):
    """A model that records what its process looks like."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np

        facts = {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "directory": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "torch_threads": torch.get_num_threads(),
            "omp": os.environ["OMP_NUM_THREADS"],
            "title": Path("/proc/self/cmdline").read_text().rstrip("\0"),
            "name": Path("/proc/self/comm").read_text().strip(),
            "numpy": int(np.random.randint(1 << 30)),
            "parent": psutil.Process().ppid(),
        }
        Path(os.environ[FACTS], f"{os.getpid()}.json").write_text(json.dumps(facts))


def small_job(**changes: Any) -> Job:
    fields = {"model": jobs.Plain, "data": (jobs.make_rows(48), None, None), "epochs": 2}
    return Job(**{**fields, "batch": 12, "lr": 0.1, "dtype": "float64", **changes})


def run(out: Path, job: Job, strategy: str = "allreduce", **changes: Any) -> dict[str, Any]:
    return run_training(job, parse_strategy(strategy), RunOptions(out=out, **changes))


def test_forked_process_takes_its_attributes_from_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_client.warm_up()  # before the changes below
    server = fork_client.get_fork_server()
    monkeypatch.setenv(FACTS, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        run(tmp_path / "run", small_job(model=Telltale), threads=2)
    finally:
        os.sched_setaffinity(0, allowed)
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(facts) == 2
    assert {f["parent"] for f in facts} == {server.pid}
    for fact in facts:
        assert fact["session"] == fact["pid"]
        assert fact["directory"] == str(tmp_path)
        assert fact["cores"] == [min(allowed)]
        assert (fact["torch_threads"], fact["omp"]) == (2, "2")
        assert fact["title"] == f"{sys.executable} -m paceline.worker {fact['name']}"
    assert sorted(f["name"] for f in facts) == ["worker-0", "worker-1"]
    assert facts[0]["numpy"] != facts[1]["numpy"]


@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp)"])
def test_forked_and_spawned_processes_train_the_same_weights(tmp_path: Path, strategy: str) -> None:
    for name, fork in (("forked", True), ("spawned", False)):
        launcher = LocalLauncher(fork=fork)
        run(tmp_path / name, small_job(), strategy, threads=2, launcher=launcher)
    forked, spawned = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("forked", "spawned")
    )
    assert forked == spawned


def test_one_server_serves_all_runs_until_the_environment_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fork_client.get_fork_server()
    run(tmp_path / "1", small_job())
    run(tmp_path / "2", small_job())
    assert fork_client.get_fork_server() is first
    monkeypatch.setenv("PACELINE_SOMETHING", "1")
    assert fork_client.get_fork_server() is first
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    second = fork_client.get_fork_server()
    assert second is not first
    assert not first.is_running()
    assert second.is_running()
    fork_client.close_fork_servers()
    assert not second.is_running()


def test_a_run_whose_fork_server_is_killed_fails_and_the_next_one_works(tmp_path: Path) -> None:
    server = fork_client.get_fork_server()

    def kill_server(notice: object) -> None:
        if isinstance(notice, EpochEnded) and server.is_running():
            os.kill(server.pid, signal.SIGKILL)

    job = small_job(epochs=100_000)
    with pytest.raises(RunFailed, match=r"^worker \d .*killed together with the fork server"):
        run(tmp_path / "1", job, on_event=kill_server)
    run(tmp_path / "2", small_job())
    assert read_result(tmp_path / "2")["status"] == "done"
    assert fork_client.get_fork_server() is not server


def test_processes_are_spawned_if_the_fork_server_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_client.close_fork_servers()
    monkeypatch.setattr(fork_client, "MODULE", "paceline.no_such_module")
    run(tmp_path / "run", small_job())
    assert read_result(tmp_path / "run")["status"] == "done"
    log = (tmp_path / "run" / "logs" / "supervisor.log").read_text()
    assert log.startswith("fork server: ")
    assert log.endswith("; spawning processes instead\n")
    fork_client.close_fork_servers()


def test_a_process_with_two_threads_refuses_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork_server.fork_problem() is None or "threads" in str(fork_server.fork_problem())
    monkeypatch.setattr(os, "listdir", lambda path: ["1", "2", "3"])
    assert fork_server.fork_problem() == "importing torch started 2 threads"


def test_the_server_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from paceline.launch.engines import fork_client\n"
        "fork_client.warm_up()\n"
        "print(fork_client.get_fork_server().pid, flush=True)\n"
        "input()\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    server = int(supervisor.stdout.readline())
    assert psutil.pid_exists(server)
    supervisor.kill()
    supervisor.communicate()
    wait_until(lambda: not is_alive(server), "the fork server has ended", 5.0)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
