"""Clocks on traces of real runs: what a worker's steps really took, machines slow in turn."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from conftest import RunCli
from paceline.protocol.clock import AspClock, DsspClock, Push, SspClock
from paceline.twin.calibration import read_warm_steps

WORKERS = 3


def record(run_cli: RunCli, out: Path) -> list[list[float]]:
    """Seconds of every step of every worker, each slowed four times for a while, in turn."""
    spells = []
    for turn in range(9):
        begin, end = turn / 3, turn / 3 + 0.25
        spells += ["--slow", f"worker={turn % WORKERS},factor=4,from={begin:.3f},to={end:.3f}"]
    done = run_cli(
        *("train", "--out", out, "--strategy", "ps", "--workers", WORKERS, "--model", "resnet8"),
        *("--batch", 12, "--epochs", 3, "--checkpoint-every", "never", "--quiet", *spells),
    )
    assert done.code == 0, done.stderr
    return [[s.compute_s for s in read_warm_steps(out, w)] for w in range(WORKERS)]


def replay(clock: Any, trace: list[list[float]]) -> tuple[float, int]:
    """Seconds of waiting for the clock, and the largest lag at the start of a step."""
    clock.begin()
    steps = [itertools.cycle(mine) for mine in trace]
    due = {w: next(steps[w]) for w in range(WORKERS)}
    held: dict[int, float] = {}
    waited, lag = 0.0, 0
    for handle in range(3 * sum(map(len, trace))):
        worker = min(due, key=lambda w: (due[w], w))
        now = due.pop(worker)
        held[worker] = now
        for released in clock.on_push(Push(worker, handle, 1, 1 / WORKERS, 0), now).release:
            waited += now - held.pop(released)
            lag = max(lag, clock.lag(released))
            due[released] = now + next(steps[released])
        assert due, "everybody waits"
    return waited, lag


def test_dssp_waits_less_than_ssp_on_a_recorded_trace(run_cli: RunCli, tmp_path: Path) -> None:
    trace = record(run_cli, tmp_path / "run")
    assert min(map(len, trace)) > 100
    strict, dynamic, free = (
        replay(clock, trace)
        for clock in (SspClock(WORKERS, 3), DsspClock(WORKERS, 3, 15), AspClock(WORKERS))
    )
    assert dynamic[0] < strict[0]
    assert strict[1] <= 3 < dynamic[1] <= 15
    assert free[0] == 0.0
