"""A coordinator that is lost: another one continues the run with the workers that are left."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import Finished, RunCli, StartCli, Started, read_result, wait_until
from jobs import largest_difference, read_weights
from paceline.errors import WireError
from paceline.launch import succession
from paceline.launch.succession import Succession, read_journal
from paceline.protocol.history import History
from paceline.protocol.journal import (
    RowsPlanned,
    SnapshotTaken,
    StepsCounted,
    UpdateOrdered,
    ViewBegun,
    entry_from_plain,
    entry_to_plain,
    replay_journal,
    subtract_rows,
)
from paceline.protocol.ledger import Ledger
from paceline.protocol.messages import ApplyUpdate, GradientRef
from paceline.protocol.pace import CoveredWork
from paceline.telemetry.run_folder import RunFolder, read_address
from paceline.telemetry.run_lock import WATCHDOG_FILE, is_running, read_holder

EPOCHS = 30
SAMPLES = 1297


def snapshot(t: float = 1.0, **changes: Any) -> SnapshotTaken:
    history = History(samples=64, updates=2, epoch=0, train_seconds=0.5)
    fields: dict[str, Any] = {
        "t": t,
        "view": 0,
        "members": (0, 1),
        "view_samples": 0,
        "entering": False,
        "version": 2,
        "position": 64,
        "done": (),
        "training": True,
        "layout": "f",
        "left": ((64, 200),),
        "servers": (0,),
        "last_saved": 0,
        "rollback_phase": None,
        "has_best": False,
        "first_rows": history.count_rows(),
        "history": history.to_plain(),
    }
    return SnapshotTaken(**{**fields, **changes})


def update(version: int, lo: int, hi: int) -> UpdateOrdered:
    order = ApplyUpdate(version, (GradientRef(0, version, 1.0),), 0.5, None, (0.5, 0.0, 0.1))
    tally = {**vars(History().tally), "samples": hi - lo}
    return UpdateOrdered(2.5, order, (CoveredWork(lo, hi, 1, ((lo, hi),)),), tally)


# ---- the journal -------------------------------------------------------------------------------


def test_entries_are_parsed_back_into_their_types() -> None:
    tally = vars(History().tally)
    entries = [
        snapshot(),
        ViewBegun(1.5, 1, (0, 1)),
        update(3, 64, 80),
        StepsCounted(2.0, tally),
        RowsPlanned(2.0, 64, ((64, 80), (90, 96))),
    ]
    lines = [json.dumps(entry_to_plain(entry)) for entry in entries]
    assert [entry_from_plain(json.loads(line)) for line in lines] == entries


@pytest.mark.parametrize("plain", [{}, [], ["Guess", 1], ["ViewBegun", 1.0], None])
def test_other_entries_are_refused(plain: object) -> None:
    with pytest.raises(WireError, match="entry"):
        entry_from_plain(plain)


def test_updates_after_the_snapshot_count() -> None:
    memory = replay_journal([snapshot(), ViewBegun(1.5, 4, (0,)), update(3, 80, 96)])
    assert memory is not None
    history, position = History.from_plain(memory["history"]), memory["position"]
    assert (history.samples, history.updates, history.staleness[1]) == (80, 3, 1)
    assert history.train_seconds == pytest.approx(0.5 + 1.5)
    assert (position.view, position.members, position.version) == (4, (0,), 3)
    assert position.done == [(80, 96)]
    assert [order.version for order in position.orders] == [3]
    assert memory["shards"] == {"layout": "f", "left": [(64, 80), (96, 200)]}


def test_ledger_continues_around_work_that_is_done() -> None:
    ledger = Ledger(40, position=4)
    ledger.restore([(12, 16), (4, 8), (20, 24)], {})
    assert (ledger.frontier, ledger.leased_up_to) == (8, 24)
    assert ledger.done_ranges == ((12, 16), (20, 24))
    taken = [ledger.take(0, 4, 40) for _ in range(3)]
    assert [(entry.lo, entry.hi) for entry in taken if entry] == [(8, 12), (16, 20), (24, 28)]
    for entry in taken:
        assert entry is not None
        ledger.acknowledge(entry.id, 0)
    assert ledger.frontier == 28


def test_rows_are_subtracted() -> None:
    assert subtract_rows([(0, 10), (20, 30)], [(25, 27), (0, 2), (8, 22)]) == [
        (2, 8), (22, 25), (27, 30),
    ]  # fmt: skip


def test_journal_is_private_and_outlives_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "MAX_BYTES", 3000)
    folder = RunFolder(tmp_path)
    first = Succession(folder, "secret", 5.0, None)
    first.announce("127.0.0.1", 1234)
    assert stat.S_IMODE(folder.journal.stat().st_mode) == 0o600
    first.add_process("worker-0", os.getpid())
    first.write(snapshot())
    for version in range(3, 40):
        first.write(update(version, 64, 64))
    assert folder.journal.stat().st_size > 3000
    first.write(snapshot(9.0, version=39))  # Replaces all before it.
    assert folder.journal.stat().st_size < 2000
    with folder.journal.open("ab") as file:
        file.write(b'["ViewBegun", 9.5, 7')  # It was killed while it wrote this.
    journal = read_journal(folder)
    assert journal is not None
    assert (journal.head.token, journal.head.started_wall_s) == ("secret", 5.0)
    assert journal.live["worker-0"].pid == os.getpid()
    assert journal.memory is not None
    assert journal.memory["position"].version == 39
    assert journal.memory["position"].view == 0
    # A second one takes over; the first, which was only stopped, changes nothing.
    adoption = succession.find_adoption(folder, 1)
    assert adoption is None, "server 0 is not alive"
    before = folder.journal.read_bytes().partition(b"\n")[2]
    lines = before[: before.rfind(b"\n") + 1]
    adopted = succession.Adoption(journal, journal.memory, lines)
    second = Succession(folder, "secret", 5.0, adopted)
    second.announce("127.0.0.1", 4321)
    first.write(ViewBegun(10.0, 99, ()))
    assert first.why_superseded(check=True) is not None
    first.close()
    assert second.why_superseded(check=True) is None
    address = read_address(folder)
    assert address is not None
    assert (address.incarnation, address.port) == (1, 4321)
    after = read_journal(folder)
    assert after is not None
    assert after.memory is not None
    assert after.memory["position"].view == 0
    second.close()
    assert list(tmp_path.iterdir()) == []


# ---- real runs ---------------------------------------------------------------------------------


def arguments(out: Path, strategy: str, *more: object) -> tuple[object, ...]:
    return (
        *("train", "--strategy", strategy, "--workers", 2, "--min-workers", 1, "--quiet"),
        *("--epochs", EPOCHS, "--batch", 64, "--seed", 3, "--out", out, *more),
    )


def lose_coordinator(start_cli: StartCli, out: Path, strategy: str, *more: object) -> None:
    fault = ("--fault", "kill coordinator at=50%")
    finished = start_cli(*arguments(out, strategy, *fault, *more)).wait(120)
    assert finished.code == -signal.SIGKILL, finished.stderr


def live_processes(out: Path) -> dict[str, psutil.Process]:
    journal = read_journal(RunFolder(out))
    assert journal is not None
    return {name: psutil.Process(record.pid) for name, record in journal.live.items()}


def check_continued(out: Path, finished: Finished) -> dict[str, Any]:
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert (result["status"], result["samples"]) == ("done", EPOCHS * SAMPLES)
    assert [row["samples"] for row in result["history"]] == [
        SAMPLES * epoch for epoch in range(1, EPOCHS + 1)
    ]
    (view,) = result["views"]
    assert view["reason"] == "the coordinator was restarted"
    assert view["pause_s"] < 3.0
    assert view["recomputed"] == 0
    assert not (out / "journal.jsonl").exists()
    return result


def test_resumed_run_continues_with_its_live_workers(
    start_cli: StartCli, run_cli: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    lose_coordinator(start_cli, out, "allreduce", "--checkpoint-every", "never")
    workers = live_processes(out)
    assert sorted(workers) == ["worker-0", "worker-1"]
    finished = run_cli("resume", out, "--quiet")
    result = check_continued(out, finished)
    assert result["updates"] == EPOCHS * -(-SAMPLES // 64)
    assert psutil.wait_procs(list(workers.values()), timeout=10)[1] == []


@pytest.mark.slow
def test_restart_of_the_coordinator_changes_no_bit(
    start_cli: StartCli, run_process: RunCli, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_process(*arguments(whole, "allreduce")).code == 0
    lose_coordinator(start_cli, cut, "allreduce")
    check_continued(cut, run_process("resume", cut, "--quiet"))
    assert largest_difference(read_weights(whole), read_weights(cut)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ps", "ps(sync=bsp, servers=2)", "local_sgd(h=4)", "switch(ps, allreduce, at=40%)"]
)
def test_coordinator_is_lost_under_other_strategies(
    start_cli: StartCli, run_process: RunCli, tmp_path: Path, strategy: str
) -> None:
    out = tmp_path / "run"
    lose_coordinator(start_cli, out, strategy)
    check_continued(out, run_process("resume", out, "--quiet"))


@pytest.mark.slow
def test_worker_that_is_lost_with_the_coordinator_is_replaced(
    start_cli: StartCli, run_process: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    lose_coordinator(start_cli, out, "ps", "--delay", "worker=1,ms=5")
    live_processes(out)["worker-0"].kill()
    finished = run_process("resume", out, "--quiet")
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert result["samples"] == EPOCHS * SAMPLES
    assert result["views"][0]["members"] == [1]
    assert "the coordinator was restarted" in result["views"][0]["reason"]
    assert "worker 0" in result["views"][0]["reason"]


def test_orphans_end_by_themselves(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before = set(os.listdir("/dev/shm"))
    lose_coordinator(start_cli, out, "ps", "--orphan-grace", 1)
    family = list(live_processes(out).values())
    assert psutil.wait_procs(family, timeout=15)[1] == []
    assert {n for n in os.listdir("/dev/shm") if n.startswith("paceline-")} <= before
    assert "no coordinator for 1 s" in (out / "logs" / "worker-0.log").read_text()


@pytest.mark.slow
def test_live_run_has_one_coordinator(start_cli: StartCli, run_cli: RunCli, tmp_path: Path) -> None:
    """A second command is refused; one that replaces a lost run ends its orphans first."""
    out = tmp_path / "run"
    started = start_cli(*arguments(out, "allreduce", "--epochs", 100_000))
    wait_until(lambda: read_journal_views(out) or started.ended(), "the first steps", 60)
    for command in (("resume", out), arguments(out, "allreduce", "--force")):
        finished = run_cli(*command)
        assert (finished.code, len(finished.lines)) == (2, 1)
        assert f"a run is in progress there (process {started.pid})" in finished.last_line
    os.kill(started.pid, signal.SIGKILL)
    started.wait(10)
    orphans = list(live_processes(out).values())
    assert len(orphans) == 2
    finished = run_cli(*arguments(out, "allreduce", "--force"))
    assert finished.code == 0, finished.stderr
    assert psutil.wait_procs(orphans, timeout=5)[1] == []
    assert read_result(out)["views"] == []


def read_journal_views(out: Path) -> bool:
    journal = read_journal(RunFolder(out))
    return journal is not None and journal.memory is not None


@pytest.mark.slow
def test_detached_run_continues_without_a_user(run_process: RunCli, tmp_path: Path) -> None:
    """The watchdog restarts the coordinator, `attach` waits for it, and both end with the run."""
    out = tmp_path / "run"
    finished = run_process(*arguments(out, "ps", "--delay", "worker=0,ms=10"), "--detach")
    assert finished.code == 0, finished.stderr
    wait_until(lambda: read_journal_views(out), "the first steps", 60)
    holder = read_holder(out)
    assert holder is not None
    assert is_running(out, WATCHDOG_FILE)
    os.kill(holder.pid, signal.SIGKILL)
    finished = run_process("attach", out, "--quiet", timeout=120)
    check_continued(out, finished)
    wait_until(lambda: not (out / WATCHDOG_FILE).exists(), "the end of the watchdog", 10)


@pytest.mark.slow
def test_stopped_run_is_not_continued(run_process: RunCli, run_cli: RunCli, tmp_path: Path) -> None:
    """Not even if its supervisor must be killed."""
    out = tmp_path / "run"
    options = arguments(out, "allreduce", "--epochs", 100_000)
    assert run_process(*options, "--detach").code == 0
    wait_until(lambda: read_journal_views(out), "the first steps", 60)
    holder = read_holder(out)
    assert holder is not None
    family = list(live_processes(out).values())
    os.kill(holder.pid, signal.SIGSTOP)
    finished = run_cli("stop", out, "--timeout", 1)
    assert finished.code == 1
    assert "was killed" in finished.last_line
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert not is_running(out)
    assert not (out / "journal.jsonl").exists()


def freeze(started: Started, out: Path) -> None:
    """Stops a coordinator in the middle of a run, without the lock of the folder."""
    wait_until(lambda: read_journal_views(out) or started.ended(), "the first steps", 60)
    os.kill(started.pid, signal.SIGSTOP)
    (out / "run.lock").unlink()  # As on a file system that has no locks.


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_coordinator_that_returns_changes_nothing(
    start_cli: StartCli, tmp_path: Path, strategy: str
) -> None:
    out = tmp_path / "run"
    delay = ("--delay", "worker=0,ms=10")
    stale = start_cli(*arguments(out, strategy, *delay))
    freeze(stale, out)
    second = start_cli("resume", out, "--quiet")

    def has_taken_over() -> bool:
        return "the coordinator was restarted" in (out / "events" / "run.jsonl").read_text()

    wait_until(lambda: has_taken_over() or second.ended(), "the next view", 60)
    os.kill(stale.pid, signal.SIGCONT)
    finished = stale.wait(30)
    assert (finished.code, len(finished.lines)) == (1, 1)
    assert f"process {second.pid} has taken over the run in" in finished.last_line
    assert not second.ended()
    check_continued(out, second.wait(120))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "ps(servers=2)"])
def test_cut_connections_are_restored(run_process: RunCli, tmp_path: Path, strategy: str) -> None:
    """Messages in both directions are lost, and no process is."""
    out = tmp_path / "run"
    fault = ("--fault", "cut coordinator at=50%")
    finished = run_process(*arguments(out, strategy, *fault), timeout=200)
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert result["samples"] == EPOCHS * SAMPLES
    (view,) = result["views"]
    assert view["members"] == [0, 1]
    assert view["reason"] == "the connections to the coordinator were cut"
