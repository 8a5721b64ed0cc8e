"""Elastic training: a run continues without workers that are lost, and admits them again."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCli, StartCli, pid_of_worker, read_result, wait_until
from elastic_schedules import run_schedules
from paceline.launch.remote_launcher import choose_site
from paceline.launch.restarts import SAME_PLACE, RestartPolicy
from paceline.protocol.block_plan import BlockLayout
from paceline.protocol.clock import AspClock, Push, SspClock
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.ledger import ALL_WORKERS, Ledger
from paceline.protocol.membership import Membership
from paceline.protocol.messages import ExchangeFailed, Regroup, WorkerReady
from paceline.protocol.pace import Send
from paceline.protocol.run_spec import RunSpec
from paceline.protocol.server_members import ServerMembers
from paceline.report.event_text import describe_notice
from paceline.strategies.registry import make_pace, make_switch_policy, parse_strategy
from paceline.telemetry.events import ViewChanged, ViewRow, parse_event

JOB = """
import torch
from paceline import Job


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.worker, self.steps = 0, 0

    def set_worker(self, rank):
        self.worker = rank

    def forward(self, inputs):
        self.steps += self.training
        if {condition} and self.steps > 20:
            raise ValueError("a bad sample")
        return self.layer(inputs.flatten(1))


def job():
    return Job(model=Model, data="digits", epochs=3, batch=64, lr=0.05)
"""


# ---- protocol ----------------------------------------------------------------------------------


def test_random_schedules() -> None:
    """Losses, cuts, joins and double failures at random moments, under all strategies."""
    assert run_schedules(range(400)) > 500


def test_ledger_goes_back_and_forward() -> None:
    ledger = Ledger(20)
    for _ in range(3):
        entry = ledger.take(ALL_WORKERS, 4, 20)
        assert entry is not None
    ledger.acknowledge(1, ALL_WORKERS)
    ledger.rewind(8)  # One more block was completed than reported.
    assert (ledger.frontier, ledger.leased_up_to) == (8, 8)
    ledger.rewind(2)
    entry = ledger.take(ALL_WORKERS, 4, 20)
    assert entry is not None
    assert (entry.lo, entry.hi) == (2, 6)


def test_rewound_rows_are_drawn_again_exactly_once() -> None:
    layout = BlockLayout(rows=(7, 7, 6), units=(0, 1, 2), window=7, seed=1)
    ledger = Ledger(20, layout=layout)
    drawn: list[tuple[int, int]] = []
    for lo in (0, 4, 8):
        entry = ledger.take(ALL_WORKERS, 4, 20)
        assert entry is not None
        rows = [r for worker in (0, 1) for r in ledger.draw_rows(entry.id, worker, 2)]
        drawn += rows if lo < 4 else []
    ledger.acknowledge(1, ALL_WORKERS)
    ledger.rewind(4)
    entry = ledger.take(ALL_WORKERS, 16, 20)
    assert entry is not None
    drawn += ledger.draw_rows(entry.id, 0, 16)
    assert sorted(row for lo, hi in drawn for row in range(lo, hi)) == list(range(20))


def test_clock_forgets_a_lost_worker() -> None:
    clock = SspClock(3, 1)
    for handle in (1, 2):
        assert clock.on_push(Push(0, handle, 1, 1.0, 0), 0.0).release == (
            [0] if handle == 1 else []
        )
    clock.on_push(Push(1, 1, 1, 1.0, 0), 0.0)
    assert clock.forget(2) == [0]
    assert clock.lag(0) == 1
    lonely = AspClock(2)
    assert lonely.forget(1) == []
    assert lonely.on_push(Push(0, 1, 1, 1.0, 0), 0.0).release == [0]


def test_workers_that_could_not_meet_form_a_group_before_they_train() -> None:
    coordinator = Coordinator(
        RunSpec(strategy=parse_strategy("allreduce"), workers=2, min_workers=1),
        now=0.0,
        paces=make_pace,
        policies=make_switch_policy,
    )
    assert coordinator.handle(ExchangeFailed(1, 0, "timed out"), 1.0, 0) == []
    assert coordinator.renew(0, "timed out", 2.0) == []  # It waits for the others.
    coordinator.handle(WorkerReady(1, 20, 4, 1, ()), 3.0, 0)
    actions = coordinator.handle(WorkerReady(0, 20, 4, 1, ()), 4.0, 0)
    sent = [action for action in actions if isinstance(action, Send)]
    assert sent == [Send(w, Regroup(1, (0, 1), 0, False)) for w in (0, 1)]


def test_silent_worker_is_found_and_a_late_supervisor_is_not_blamed_on_it() -> None:
    members = Membership(2, now=0.0)
    assert members.find_silent(99.0, 10.0) == []  # Nobody is ready.
    members.set_ready(0, 0.0)
    members.set_ready(1, 0.0)
    members.on_heartbeat(0, 1, "forward", 5, 1.0)
    members.on_heartbeat(1, 1, "forward", 5, 9.0)
    assert members.find_silent(11.5, 10.0) == [0]
    members.restart_timers(11.5)
    assert members.find_silent(12.0, 10.0) == []
    members.remove(0)
    members.on_heartbeat(0, 2, "forward", 6, 13.0)  # It is not a member any more.
    assert 0 not in members


def test_restarts_are_limited() -> None:
    policy, who = RestartPolicy(5), "worker-0"
    delays = [policy.next_delay_s(who, f"worker 0 (pid {n}) ended at step {n}") for n in range(6)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, None]
    assert policy.why_excluded(who) == "worker 0 was restarted 5 times and is excluded"
    who = "server-1"
    for n in range(SAME_PLACE):
        last = policy.next_delay_s(who, f"server 1 (pid {n}) failed at step {n}: ValueError: bad")
    assert last is None
    assert policy.why_excluded(who) == "server 1 ended 3 times at the same place and is excluded"
    assert RestartPolicy(0).next_delay_s("worker-0", "gone") is None


def test_copies_of_shards() -> None:
    """Every shard has two servers if workers may be lost, unless the strategy sets the copies."""

    def servers(strategy: str, min_workers: int) -> tuple[int, bool]:
        spec = parse_strategy(strategy)
        plan = RunSpec(strategy=spec, workers=3, min_workers=min_workers)
        return plan.servers, plan.is_elastic

    assert servers("ps(servers=3)", 0) == (3, False)
    assert servers("ps(servers=3)", 1) == (6, True)
    assert servers("ps(servers=3, copies=1)", 1) == (3, True)
    assert servers("ps(servers=3, copies=2)", 0) == (6, True)
    assert servers("switch(allreduce, grouped(size=2), at=50%)", 2) == (2, True)
    assert servers("allreduce", 1) == (0, True)


def test_server_members() -> None:
    servers = ServerMembers(2, 4)
    for server in range(4):
        assert not servers.are_ready(range(4))
        servers.set_ready(server, ("a", server), 0.0)
    assert servers.are_ready(range(4))
    members = servers.next_members(range(4))
    assert servers.places(members, 2) == ((("a", 0), ("a", 1)), ((0, "a", 2), (1, "a", 3)))
    assert servers.places(members, 1) == ((("a", 0),), ((0, "a", 2),))
    servers.holding = frozenset(members)
    servers.lost[0] = "killed"
    servers.remove(0)
    assert not servers.can_spare(2, members)
    assert servers.can_spare(1, members)
    # A server that is started again has no state before workers have loaded it.
    servers.set_ready(0, ("b", 7), 1.0)
    servers.joining.add(0)
    members = servers.next_members(members)
    assert members == (0, 1, 2, 3)
    assert not servers.can_spare(2, members)
    servers.holding = frozenset(members)
    assert servers.can_spare(2, members)
    assert servers.gone == (("a", 0),)


def test_copies_are_on_different_machines() -> None:
    names = ["a", "a", "b", "c"]
    sites = [0, 1, 2, 3]
    assert choose_site(0, sites, names, set(), []) == 0
    assert choose_site(1, sites, names, {"a"}, ["a", "b"]) == 3
    assert choose_site(2, sites, names, {"a"}, ["a", "b"]) == 2
    # A machine that is lost, and one machine for everything.
    assert choose_site(2, [0, 1, 3], names, {"a"}, ["a"]) == 3
    assert choose_site(0, [0, 1], names, {"a"}, ["a"]) == 0


def test_view_event_is_described_and_parsed() -> None:
    row = ViewRow(
        number=2,
        samples=640,
        seconds=3.5,
        members=[0, 2],
        reason="gone",
        pause_s=0.04,
        recomputed=8,
    )
    event = ViewChanged(t=3.5, row=row)
    assert parse_event(event.to_plain()) == event
    assert describe_notice(event) == (
        "view 2 at sample 640, with worker 0, 2 after 0.040 s, 8 samples are trained again: gone"
    )


# ---- real processes ----------------------------------------------------------------------------


def has_begun(out: Path, workers: int) -> bool:
    """Every worker trains: its file holds a window of steps."""
    files = [out / "events" / f"worker-{w}.jsonl" for w in range(workers)]
    return all(f.exists() and '"kind":"steps"' in f.read_text() for f in files)


def check_result(out: Path, epochs: int) -> dict[str, Any]:
    result = read_result(out)
    assert result["status"] == "done", result["error"]
    assert result["samples"] == epochs * result["history"][0]["samples"]
    return result


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_run_continues_without_a_killed_worker(
    start_cli: StartCli, tmp_path: Path, strategy: str
) -> None:
    out = tmp_path / "run"
    started = start_cli(
        *("train", "--strategy", strategy, "--workers", 3, "--min-workers", 2, "--restarts", 0),
        *("--epochs", 60, "--batch", 32, "--out", out, "--checkpoint-every", "never"),
    )
    wait_until(lambda: has_begun(out, 3) or started.ended(), "the first steps", 60)
    pid = pid_of_worker(out, 0)
    os.kill(pid, signal.SIGKILL)
    finished = started.wait(90)
    assert finished.code == 0, finished.stderr
    result = check_result(out, 60)
    (view,) = result["views"]
    assert view["members"] == [1, 2]
    assert f"worker 0 (pid {pid})" in view["reason"]
    assert "SIGKILL" in view["reason"]
    assert view["recomputed"] == 0


@pytest.mark.parametrize(
    "strategy",
    [
        "ps",
        pytest.param("ps(via=network, sync=bsp, servers=2)", marks=pytest.mark.slow),
        pytest.param("ps(sync=ssp(2))", marks=pytest.mark.slow),
        pytest.param("ps(overlap=true)", marks=pytest.mark.slow),
        pytest.param("ps(sync=gba, codec=int8)", marks=pytest.mark.slow),
        pytest.param("grouped(size=2)", marks=pytest.mark.slow),
        pytest.param("switch(allreduce, ps, at=10%)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("server", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_run_continues_without_a_killed_server(
    run_cli: RunCli, tmp_path: Path, strategy: str, server: int
) -> None:
    out = tmp_path / "run"
    ran = run_cli(
        *("train", "--strategy", strategy, "--workers", 2, "--min-workers", 1, "--out", out),
        *("--epochs", 8, "--batch", 64, "--fault", f"kill server={server} at=30%"),
        *("--restarts", 0, "--checkpoint-every", "never"),
    )
    assert ran.code == 0, ran.stderr
    (view,) = check_result(out, 8)["views"]
    assert view["members"] == [0, 1]
    assert server not in view["servers"]
    assert f"server {server} (pid" in view["reason"]
    assert view["recomputed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", servers=2", ", via=network, codec=fp16"])
def test_no_update_is_lost_with_a_server(run_cli: RunCli, tmp_path: Path, options: str) -> None:
    models = []
    for faults in ((), ("--fault", "kill server=0 at=30%", "--fault", "kill server=1 at=70%")):
        out = tmp_path / f"{len(faults)}-faults"
        ran = run_cli(
            *("train", "--strategy", f"ps(sync=bsp{options})", "--workers", 2, "--out", out),
            *("--min-workers", 1, "--epochs", 40, "--batch", 32, *faults),
        )
        assert ran.code == 0, ran.stderr
        check_result(out, 40)
        models.append((out / "model.safetensors").read_bytes())
    assert models[0] == models[1]


@pytest.mark.slow
def test_killed_server_loads_the_state_again(run_cli: RunCli, tmp_path: Path) -> None:
    """Both servers are killed one after another: the first has been replaced meanwhile."""
    out = tmp_path / "run"
    ran = run_cli(
        *("train", "--strategy", "ps", "--workers", 2, "--min-workers", 1, "--out", out),
        *("--epochs", 60, "--batch", 32, "--checkpoint-every", "never"),
        *("--fault", "kill server=0 at=20%", "--fault", "kill server=1 at=70%"),
    )
    assert ran.code == 0, ran.stderr
    views = check_result(out, 60)["views"]
    assert [view["servers"] for view in views[:3]] == [[1], [0, 1], [0]]


@pytest.mark.slow
def test_last_server_of_a_shard_ends_the_run(run_cli: RunCli, tmp_path: Path) -> None:
    ran = run_cli(
        *("train", "--strategy", "ps(copies=1)", "--workers", 2, "--min-workers", 1),
        *("--out", tmp_path / "run", "--epochs", 8, "--fault", "kill server=0 at=30%"),
    )
    assert ran.code == 1
    assert "server 0 (pid" in ran.last_line
    assert ran.last_line.endswith(
        "; no other server holds shard 0: continue from a checkpoint with --resume"
    )


@pytest.mark.slow
def test_killed_worker_joins_again(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = start_cli(
        *("train", "--strategy", "allreduce", "--workers", 3, "--min-workers", 1),
        *("--epochs", 150, "--batch", 32, "--out", out, "--checkpoint-every", "never"),
    )
    wait_until(lambda: has_begun(out, 3) or started.ended(), "the first steps", 60)
    os.kill(pid_of_worker(out, 1), signal.SIGKILL)
    finished = started.wait(120)
    assert finished.code == 0, finished.stderr
    views = check_result(out, 150)["views"]
    assert [view["members"] for view in views] == [[0, 2], [0, 1, 2]]
    assert views[1]["reason"] == "worker 1 joined"


@pytest.mark.slow
def test_stopped_worker_is_excluded_and_readmitted(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = start_cli(
        *("train", "--workers", 2, "--min-workers", 1, "--epochs", 8, "--batch", 32),
        *("--delay", "worker=0,ms=100", "--out", out, "--checkpoint-every", "never"),
    )
    wait_until(lambda: has_begun(out, 2) or started.ended(), "the first steps", 60)
    os.kill(pid_of_worker(out, 1), signal.SIGSTOP)
    finished = started.wait(300)
    assert finished.code == 0, finished.stderr
    views = check_result(out, 8)["views"]
    assert [view["members"] for view in views] == [[0], [0, 1]]
    assert views[0]["reason"].startswith("worker 1 sent no heartbeat for ")


def test_deadlines_follow_the_run() -> None:
    members = Membership(1, now=0.0)
    members.set_ready(0, 0.0)
    for turn, now in enumerate((1.0, 2.0, 9.0), start=1):
        members.on_heartbeat(0, 1, "forward", turn, now)
    assert members.longest_silence_s == 7.0
    assert members.longest_s("forward") == 7.0
    assert members.longest_s("eval") is None


def test_exception_on_every_worker_ends_the_run(run_cli: RunCli, tmp_path: Path) -> None:
    job = tmp_path / "faulty_job.py"
    job.write_text(JOB.format(condition="True"))
    out = tmp_path / "run"
    finished = run_cli("train", job, "--min-workers", 1, "--restarts", 0, "--out", out, "--quiet")
    assert finished.code == 1
    assert "ValueError: a bad sample" in finished.last_line
    assert "in forward" in finished.stderr
    assert read_result(out)["status"] == "failed"


def test_error_of_the_job_ends_the_run(run_cli: RunCli, tmp_path: Path) -> None:
    """Whichever worker computes the bad batch raises: the run must not go through all of them."""
    job = tmp_path / "faulty_job.py"
    job.write_text(JOB.format(condition="bool((self.layer.weight.abs().sum() > 0).all())"))
    out = tmp_path / "run"
    finished = run_cli(
        *("train", job, "--workers", 5, "--min-workers", 1, "--restarts", 0, "--out", out),
        "--quiet",
    )
    assert finished.code == 1
    assert "ValueError: a bad sample" in finished.last_line
    assert "in forward" in finished.stderr


@pytest.mark.slow
def test_worker_that_always_fails_is_excluded(run_cli: RunCli, tmp_path: Path) -> None:
    job = tmp_path / "faulty_job.py"
    job.write_text(JOB.format(condition="self.worker == 1").replace("epochs=3", "epochs=16"))
    out = tmp_path / "run"
    finished = run_cli(
        *("train", job, "--min-workers", 1, "--delay", "worker=0,ms=100", "--out", out),
        "--quiet",
        timeout=200,
    )
    assert finished.code == 0, finished.stderr
    views = check_result(out, 16)["views"]
    assert views[-1]["members"] == [0]
    assert views[-1]["reason"].endswith(
        "; worker 1 ended 3 times at the same place and is excluded"
    )


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("strategy", "workers", "least", "restarts", "views"),
    [
        ("allreduce", 2, 2, 3, [[0, 1]]),
        ("allreduce(shares=8)", 3, 1, 0, [[0, 2]]),
    ],
)
def test_weights_after_a_loss_are_bit_identical(
    start_cli: StartCli,
    tmp_path: Path,
    strategy: str,
    workers: int,
    least: int,
    restarts: int,
    views: list[list[int]],
) -> None:
    """With a replacement, for which the others wait; and without, by fixed shares."""

    def train(name: str, *faults: str) -> None:
        finished = start_cli(
            *("train", "--strategy", strategy, "--workers", workers, "--min-workers", least),
            *("--restarts", restarts, "--epochs", 15, "--batch", 32, "--out", tmp_path / name),
            *("--checkpoint-every", "never", *faults),
        ).wait(240)
        assert finished.code == 0, finished.stderr

    out = tmp_path / "run"
    train("calm")
    train("run", "--fault", "kill worker=1 at=30%")
    assert [view["members"] for view in check_result(out, 15)["views"]] == views
    assert digest(out) == digest(tmp_path / "calm")


def test_too_many_min_workers_are_refused(run_cli: RunCli, tmp_path: Path) -> None:
    finished = run_cli("train", "--workers", 2, "--min-workers", 3, "--out", tmp_path / "run")
    assert finished.code == 2
    assert finished.last_line == (
        "paceline: --min-workers 3 is larger than --workers 2; use at most the number of workers"
    )
