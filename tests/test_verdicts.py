"""Rules over vitals: each on figures made up for it, and each in a real run with its cause."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

import bottlenecks
from conftest import RUN_S, StartCli, wait_until
from paceline.telemetry.events import (
    PHASES,
    SERVER_PHASES,
    HostMetrics,
    ProcessMetrics,
    ServerStarted,
    WorkerStarted,
)
from paceline.telemetry.live_run import LiveRun
from paceline.telemetry.reader import RunRecord, read_run
from paceline.telemetry.verdicts import RULES, verdicts

# ---- figures made up -------------------------------------------------------------------------

PER_SECOND = {"forward": 0.3, "backward": 0.6, "comm_exposed": 0.05, "optimizer": 0.05}


def vitals(t: float, names: tuple[str, ...], phases: dict[str, float], **given: Any) -> Any:
    plain = {
        "t": t,
        "dt": 1.0,
        "phases": [int(phases.get(name, 0.0) * 1e6) for name in names],
        "epoch": 0,
        "steps": 50,
        "samples": 1600,
        "comm_hidden": 0,
        "input_cpu": 0,
        "cpu_user": 0.9,
        "cpu_system": 0.05,
        "cpu_wait": None,
        "run_wait": 0.02,
        "main_wait": 0.01,
        "throttled": 0.0,
        "rss": 1 << 28,
        "threads": 5,
        "net_in": 1000,
        "net_out": 1000,
        "net_busy": 0.01,
        "net_blocked": 0.0,
        "rtt": 0.0001,
        "rtt_least": 0.00001,
        "disk_read": 0,
        "disk_write": 0,
        "gil": [20, 1, 0, 0, 0],
        "serving": None,
    }
    return ProcessMetrics(**{**plain, **given})


def make_run(
    *,
    seconds: int = 12,
    workers: list[dict[str, Any]] | None = None,
    servers: list[dict[str, Any]] | None = None,
    cores: int = 4,
    threads: int = 1,
    busy: float = 0.5,
) -> RunRecord:
    """A run on one machine whose processes do the same each second."""
    run = RunRecord()
    groups = [("worker", workers or [{}, {}], PHASES), ("server", servers or [], SERVER_PHASES)]
    for kind, made, names in groups:
        for number, given in enumerate(made):
            who = f"{kind}-{number}"
            facts: dict[str, Any] = {
                "t": 0.0,
                "host": "here",
                "pid": 1,
                "cores": list(range(cores)),
            }
            if kind == "worker":
                run.add(who, WorkerStarted(worker=number, threads=threads, **facts))
            else:
                run.add(who, ServerStarted(server=number, beside=0, **facts))
            rest = dict(given)
            phases = rest.pop("phases", PER_SECOND if kind == "worker" else {"idle": 1.0})
            for second in range(1, seconds + 1):
                run.add(who, vitals(float(second), names, phases, **rest))
    for second in range(1, seconds + 1):
        run.add("worker-0", machine(float(second), cores, busy))
    return run


def machine(t: float, cores: int, busy: float) -> HostMetrics:
    return HostMetrics(t=t, dt=1.0, host="here", cores_busy=[busy] * cores)


def rules_of(run: RunRecord, **look: Any) -> list[str]:
    return [v.rule for v in verdicts(run, **look)]


def test_nothing_is_said_of_a_calm_run() -> None:
    assert rules_of(make_run()) == []
    assert rules_of(make_run(), last_s=6.0) == []


def test_nothing_is_said_too_early() -> None:
    slow = [{}, {"phases": {**PER_SECOND, "backward": 5.0}}]
    assert rules_of(make_run(seconds=3, workers=slow)) == []


SLOW = {"phases": {"forward": 0.3, "backward": 0.65, "comm_exposed": 0.05}, "samples": 500}


def test_a_straggler_is_named() -> None:
    (verdict,) = verdicts(make_run(workers=[{}, SLOW, {}]))
    assert (verdict.rule, verdict.who) == ("straggler", "worker-1")
    assert verdict.figures["times_slower"] == pytest.approx(3.38, abs=0.05)
    assert verdict.text.startswith("worker 1 computes 3.4x slower than the median")
    assert "balance=auto" in verdict.suggestion


def test_a_quota_explains_a_straggler() -> None:
    held = {**SLOW, "throttled": 0.7, "run_wait": 0.7, "cpu_user": 0.25}
    (verdict,) = verdicts(make_run(workers=[{}, held]))
    assert (verdict.rule, verdict.who) == ("quota", "worker-1")
    assert "CPU quota" in verdict.text


def test_who_finds_no_core_is_no_straggler() -> None:
    starved = {**SLOW, "run_wait": 0.9, "main_wait": 0.7, "cpu_user": 0.25}
    assert rules_of(make_run(workers=[{}, starved])) == []


def test_own_threads_on_too_few_cores() -> None:
    crowded = {"run_wait": 1.0, "cpu_user": 0.5}
    (verdict,) = verdicts(make_run(workers=[crowded, crowded], cores=1, busy=1.0))
    assert verdict.rule == "crowding"
    assert verdict.text.startswith("2 workers with 2 threads share one core on here")


def test_others_on_the_same_cores() -> None:
    pushed = {"run_wait": 0.5, "cpu_user": 0.5}
    (verdict,) = verdicts(make_run(workers=[pushed, pushed], cores=2, busy=1.0))
    assert verdict.rule == "neighbours"
    assert verdict.figures["cores_others"] == pytest.approx(0.9, abs=0.01)


INPUT = {"input": 0.4, "forward": 0.2, "backward": 0.35, "comm_exposed": 0.05}


@pytest.mark.parametrize(
    ("gil", "input_cpu", "rule"),
    [
        ([20, 2, 8, 0, 7], 20_000, "reading"),
        ([20, 9, 8, 7, 0], 390_000, "gil"),
        ([20, 2, 8, 1, 0], 390_000, "decoding"),
        ([20, 2, 0, 0, 0], 10_000, "reading"),  # Too few probes: the clock alone tells.
        ([20, 2, 0, 0, 0], 390_000, "decoding"),
    ],
)
def test_why_steps_wait_for_input(gil: list[int], input_cpu: int, rule: str) -> None:
    waiting = {"phases": INPUT, "gil": gil, "input_cpu": input_cpu}
    (verdict,) = verdicts(make_run(workers=[waiting, waiting]))
    assert verdict.rule == rule
    assert verdict.text.startswith("input: 40% of each step")


def test_short_input_of_short_steps_is_not_worth_a_word() -> None:
    tiny = {"phases": INPUT, "steps": 2000}
    assert rules_of(make_run(workers=[tiny, tiny])) == []


EXCHANGE = {"forward": 0.1, "backward": 0.1, "comm_exposed": 0.8}
FULL = {"net_busy": 0.75, "rtt": 0.05, "net_out": 9_000_000, "cpu_user": 0.2}


def test_a_full_link_is_told_by_what_queues_up_before_it() -> None:
    (verdict,) = verdicts(make_run(workers=[{"phases": EXCHANGE, **FULL}, {"phases": EXCHANGE}]))
    assert (verdict.rule, verdict.who) == ("link", "worker-0")
    assert "12 MB/s" in verdict.text


def test_a_link_shared_by_several_is_the_servers() -> None:
    full = {"phases": EXCHANGE, **FULL}
    server = {"phases": {"receive": 0.9, "apply": 0.1}, "net_in": 18_000_000}
    (verdict,) = verdicts(make_run(workers=[full, full], servers=[server]))
    assert (verdict.rule, verdict.who) == ("link", "server-0")
    assert verdict.text.startswith("server 0's link is saturated: 18 MB/s")


@pytest.mark.parametrize(
    "instead",
    [
        {"net_blocked": 0.7},  # The peer takes nothing.
        {"rtt": 0.00004},  # Nothing queues up.
        {"run_wait": 2.0},  # No core, no answer.
        {"net_busy": 0.1},
    ],
)
def test_an_exchange_may_be_slow_on_a_free_link(instead: dict[str, float]) -> None:
    slow = {"phases": EXCHANGE, **FULL, **instead}
    assert "link" not in rules_of(make_run(workers=[slow, slow]))


def test_a_server_busy_with_updates() -> None:
    queued = {"phases": {"forward": 0.2, "backward": 0.2, "comm_exposed": 0.2, "queue": 0.4}}
    serving = {"pushes": 100, "pulls": 100, "waiting": 3, "queued_us": 700_000, "apply_us": 800_000}
    server = {"phases": {"apply": 0.8, "send": 0.2}, "serving": serving}
    (verdict,) = verdicts(make_run(workers=[queued, queued], servers=[server, {}]))
    assert (verdict.rule, verdict.who) == ("server", "server-0")
    assert verdict.figures["wait_ms_a_pull"] == pytest.approx(7.0)


def test_a_run_that_goes_on_is_told_when_it_begins_and_when_it_is_over() -> None:
    live = LiveRun({})
    run = make_run(seconds=0, workers=[{}, {}])
    for worker in run.workers:
        live.add(worker.process_name, worker.started)
    told = []
    for second in range(1, 60):
        slow = SLOW if 20 <= second < 35 else {}
        for who, given in (("worker-0", {}), ("worker-1", slow)):
            rest = {k: v for k, v in given.items() if k != "phases"}
            phases = given.get("phases", PER_SECOND)
            live.add(who, vitals(float(second), PHASES, phases, **rest))
        told += [(second, e.state, e.rule, e.who) for e in live.changed_verdicts(float(second))]
    (began, *first), (over, *last) = told
    assert first == ["began", "straggler", "worker-1"]
    assert last == ["over", "straggler", "worker-1"]
    assert 20 < began <= 30
    assert 35 < over <= 50


def test_every_rule_says_something_else() -> None:
    assert len({rule.__doc__ for rule in RULES}) == len(RULES)


# ---- real runs -------------------------------------------------------------------------------


@pytest.mark.exclusive
def test_a_straggler_is_named_in_the_terminal_within_ten_seconds(
    start_cli: StartCli, tmp_path: Path
) -> None:
    job = f"{Path(bottlenecks.__file__)}:steady"
    trouble = ("--slow", "worker=1,factor=4,from=6")
    command = start_cli("train", job, "--out", "run", "--threads", 1, *trouble)
    try:
        wait_until(
            lambda: "worker 1 computes" in command.so_far() or command.ended(),
            "the straggler is named",
            RUN_S,
        )
        assert "worker 1 computes" in command.so_far(), command.so_far()
    finally:
        command._popen.send_signal(signal.SIGTERM)
        command.wait(30)
    run = read_run(tmp_path / "run")
    began = min(s.began for s in run.process("worker-1").iter_steps() if s.epoch >= 6)
    named = [e.t for e in run.verdict_events if (e.rule, e.who) == ("straggler", "worker-1")]
    assert named[0] - began <= 10.0
    assert run.result["status"] == "cancelled"


OUTSIDE = {"neighbours"}
"""True of a machine on which tests of others run, whatever the cause made here."""
TRAIN_S = 30.0


@pytest.mark.exclusive
@pytest.mark.slow
@pytest.mark.parametrize("name", bottlenecks.CAUSES)
def test_each_rule_fires_on_its_cause_and_on_no_other(name: str, tmp_path: Path) -> None:
    cause = bottlenecks.CAUSES[name]
    missing = bottlenecks.why_not(cause)
    if missing is not None:
        pytest.skip(f"{name} left out, it cannot be made here: {missing}")
    began = time.monotonic()
    train_s = 15.0 if cause.rule is None else TRAIN_S
    folder = bottlenecks.run_with(cause, tmp_path, train_s=train_s, until=cause.rule)
    run = read_run(folder)
    found = verdicts(run)
    assert {e.rule for e in run.verdict_events} - OUTSIDE == {cause.rule} - {None}, (
        run.verdict_events
    )
    assert {v.rule for v in found} - OUTSIDE <= {cause.rule} - {None}, found
    if cause.who is not None:
        assert [e.who for e in run.verdict_events if e.rule == cause.rule] == [cause.who]
    assert time.monotonic() - began < 150
