"""Machines stay ready between the runs of a comparison; what is lost in between is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import read_result, wait_until
from paceline.errors import RunFailed, UsageError
from paceline.job import JobRef
from paceline.launch.compare_runs import compare_strategies
from paceline.launch.engines.engine import EngineLauncher
from paceline.launch.run import run_training
from paceline.launch.run_loop import LoopThread, run_async
from paceline.launch.run_options import RunOptions
from paceline.strategies.registry import parse_strategy
from process_engine import Places

JOB = JobRef(fields={"epochs": 1, "batch": 64, "seed": 3})


class Kept:
    """A launcher whose two slots are kept, and its engine."""

    def __init__(self) -> None:
        self.engine = Places()
        self.loop = LoopThread()
        self.launcher = EngineLauncher(self.engine, 2, threads=1)
        self.launcher.keep_open(self.loop)

    def options(self, out: Path, **more: Any) -> RunOptions:
        return RunOptions(out=out, workers=2, launcher=self.launcher, timeout_s=60, **more)

    def run(self, out: Path, job: JobRef = JOB) -> Any:
        return run_training(job, parse_strategy("allreduce"), self.options(out))

    def close(self) -> None:
        self.loop.run(self.launcher.disconnect)
        self.loop.close()


@pytest.fixture
def kept(no_leaks: None) -> Iterator[Kept]:
    made = Kept()
    try:
        yield made
    finally:
        made.close()


def find_worker(kept: Kept, rank: int) -> psutil.Process:
    below = [
        child
        for place in kept.engine.processes
        for child in psutil.Process(place.pid).children(recursive=True)
    ]
    return next(p for p in below if f"paceline.worker worker-{rank}" in " ".join(p.cmdline()))


@pytest.mark.timeout(240)
def test_later_runs_start_on_what_is_ready(kept: Kept, tmp_path: Path) -> None:
    kept.launcher.warm_up()
    places = [process.pid for process in kept.engine.processes]
    comparison = compare_strategies(
        JOB, ["allreduce", "ps", "single"], kept.options(tmp_path / "out"), seeds=2
    )
    assert comparison["runs_failed"] == 0
    assert [process.pid for process in kept.engine.processes] == places
    for entry in comparison["strategies"]:
        assert entry["train_seconds"]["mean"] > 0
    starts = [
        stages["start"]
        for folder in sorted((tmp_path / "out").glob("*-seed*"))
        for stages in [read_result(folder)["stages"]]
    ]
    # Importing torch alone takes longer than all of these starts together.
    assert len(starts) == 6
    assert max(starts) < 5.0


@pytest.mark.timeout(240)
def test_killed_worker_fails_its_run_and_the_next_one_works(kept: Kept, tmp_path: Path) -> None:
    kept.launcher.warm_up()
    out = tmp_path / "killed"
    long = JOB.model_copy(update={"fields": {**JOB.fields, "epochs": 100_000}})

    def kill() -> None:
        events = out / "events" / "worker-1.jsonl"
        wait_until(lambda: events.exists() and '"steps"' in events.read_text(), "it trains", 60)
        find_worker(kept, 1).kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(RunFailed, match=r"worker 1 .*SIGKILL"):
        kept.run(out, long)
    killing.join()
    assert kept.run(tmp_path / "next")["status"] == "done"


@pytest.mark.timeout(240)
def test_lost_slots_are_requested_again(kept: Kept, tmp_path: Path) -> None:
    kept.launcher.warm_up()
    before = [process.pid for process in kept.engine.processes]
    os.killpg(kept.engine.processes[0].pid, signal.SIGKILL)
    wait_until(lambda: kept.launcher.remote_hosts[0].shell.is_lost, "the loss is noticed", 30)
    assert kept.run(tmp_path / "run")["status"] == "done"
    assert not set(before) & {process.pid for process in kept.engine.processes}


def test_a_run_on_the_loop_of_a_thread_returns_and_raises() -> None:
    async def fail() -> None:
        raise UsageError("no")

    async def nest() -> int:
        return run_async(answer)

    async def answer() -> int:
        return 42

    with LoopThread() as thread:
        assert thread.run(answer) == 42
        assert thread.run(nest) == 42
        with pytest.raises(UsageError, match="no"):
            thread.run(fail)


def test_an_interrupt_cancels_the_run_and_waits_for_its_end() -> None:
    ended: list[bool] = []

    async def wait() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            ended.append(True)
            return "cancelled"
        return "slept"

    with LoopThread() as thread:
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        timer.start()
        assert thread.run(wait) == "cancelled"
        timer.join()
    assert ended == [True]
