"""Machines that join and leave a run in progress, with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import (
    Finished,
    RunCli,
    StartCli,
    Started,
    pid_of_worker,
    read_result,
    wait_until,
)
from network_namespaces import Lab, Machine
from paceline.errors import UsageError
from paceline.launch.guests import JOIN_FILE
from paceline.launch.joining import RunAddress
from paceline.protocol.handshake import HELLO, MAGIC, VERSION

JOB = """
import os

import torch

from paceline import Job


def data():
    made = torch.Generator().manual_seed(0)
    rows = int(os.environ.get("ROWS_OF_THE_TEST", "640"))
    inputs = torch.randn((rows, 1, 8, 8), generator=made)
    return (inputs, torch.randint(0, 10, (rows,), generator=made)), None, None


def job():
    return Job(model="mlp-128", data=data, epochs=100_000, batch=3, lr=1e-6)
"""
JOIN_S = 120.0
LONG = ("--epochs", 8, "--delay", "worker=0,ms=100")
"""Steps that take at least 0.1 s, on any machine: 30 s."""


def start_run(start_cli: StartCli, out: Path, *more: object) -> Started:
    """Starts a run of two workers, and waits until machines can join."""
    options = ("--workers", 2, "--min-workers", 1, "--batch", 32, "--checkpoint-every", "never")
    started = start_cli("train", *options, "--out", out, *more)
    has_begun = lambda: (out / "events" / "worker-1.jsonl").exists() or started.ended()  # noqa: E731
    wait_until(has_begun, "the workers", JOIN_S)
    assert (out / JOIN_FILE).exists(), started.so_far()
    return started


def views_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "events" / "run.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["row"] for event in events if event["kind"] == "view"]


def has_members(out: Path, members: list[int]) -> Callable[[], bool]:
    def check() -> bool:
        views = views_of(out)
        return bool(views) and views[-1]["members"] == members

    return check


def check_samples(out: Path, finished: Finished, epochs: int) -> dict[str, Any]:
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert result["samples"] == epochs * result["history"][0]["samples"]
    return result


def test_machine_joins_and_leaves(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = start_run(start_cli, out, "--epochs", 150)
    assert stat.S_IMODE((out / JOIN_FILE).stat().st_mode) == 0o600
    guest = start_cli("join", out)
    wait_until(lambda: has_members(out, [0, 1, 2])() or run.ended(), "the join", JOIN_S)
    os.kill(guest.pid, signal.SIGTERM)
    left = guest.wait(JOIN_S)
    assert (left.code, left.last_line) == (0, "worker 2 has left the run")
    wait_until(lambda: has_members(out, [0, 1])() or run.ended(), "the leave", JOIN_S)
    result = check_samples(out, run.wait(JOIN_S), 150)
    views = result["views"]
    assert [view["reason"] for view in views] == ["worker 2 joined", "worker 2 left"]
    assert [view["recomputed"] for view in views] == [0, 0]
    assert not (out / JOIN_FILE).exists()


def test_terminated_worker_leaves(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = start_run(start_cli, out, "--epochs", 60)
    wait_until(lambda: has_begun(out) or run.ended(), "the first steps", JOIN_S)
    os.kill(pid_of_worker(out, 1), signal.SIGTERM)
    (view,) = check_samples(out, run.wait(JOIN_S), 60)["views"]
    assert (view["members"], view["reason"], view["recomputed"]) == ([0], "worker 1 left", 0)


def has_begun(out: Path) -> bool:
    return '"kind":"steps"' in (out / "events" / "worker-1.jsonl").read_text()


def test_refusals_are_one_line_each(
    start_cli: StartCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, out = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB)
    options = ("--workers", 2, "--min-workers", 2, "--out", out)
    run = start_cli("train", job, *options)
    wait_until(lambda: (out / "events" / "worker-1.jsonl").exists() or run.ended(), "it", JOIN_S)
    known = json.loads((out / JOIN_FILE).read_text())
    wrong = tmp_path / "token"
    wrong.write_text("of another run")
    monkeypatch.setenv("ROWS_OF_THE_TEST", "320")

    def refusal(*args: object) -> str:
        finished = start_cli(*args).wait(JOIN_S)
        assert finished.code == 2, finished.stderr + run.so_far()
        return finished.last_line.removeprefix("paceline: ")

    at = known["address"]
    assert refusal("join", at, "--token-file", wrong) == (
        f"the run at {at} does not accept this token; use the token file of this run"
    )
    assert refusal("join", out) == (
        f"the run at {at} refused this machine: worker 2 has 320 samples in batches of 3, but "
        "worker 0 has 640 in batches of 3; all workers must have the same data and batch size"
    )
    assert refusal("leave", out, "worker=7") == "worker 7 is not part of the run"
    assert refusal("leave", out, "worker=1") == (
        "worker 1 cannot leave: fewer than --min-workers 2 would remain"
    )
    os.kill(run.pid, signal.SIGTERM)  # The workers would survive its SIGKILL.
    assert run.wait(JOIN_S).code == 130


def test_another_version_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(HELLO.pack(MAGIC, VERSION + 1, b"n" * 32))
                while peer.recv(64):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(UsageError) as refused:
            RunAddress("127.0.0.1", port, "token").connect()
        thread.join(JOIN_S)
    assert str(refused.value) == (
        f"127.0.0.1:{port}: the peer uses wire format {VERSION + 1}, this side uses {VERSION}; "
        "install the same version of Paceline on both"
    )


def test_runs_that_no_machine_can_join(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    finished = run_cli("join", tmp_path / "run")
    assert finished.code == 2
    assert "no run there accepts machines" in finished.last_line
    finished = run_cli("join", "127.0.0.1:1")
    assert (finished.code, "needs the token" in finished.last_line) == (2, True)
    finished = run_cli("join", "somewhere")
    assert finished.last_line == (
        "paceline: 'somewhere' is neither a run folder nor an address; use HOST:PORT"
    )
    finished = run_cli(
        "train", "--min-workers", 1, "--listen", "192.0.2.1", "--out", tmp_path / "no"
    )
    assert finished.code == 2
    assert finished.last_line.startswith("paceline: --listen 192.0.2.1: cannot listen there (")
    finished = run_cli("leave", tmp_path / "run")
    assert finished.last_line.endswith("name the worker that leaves, as in worker=2")


# ---- several machines ---------------------------------------------------------------------------


def join_from(machine: Machine, address: str, token: Path, log: Path) -> subprocess.Popen[bytes]:
    """Enters `paceline join` in a shell of a machine."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", machine.namespace, sys.executable),
                *("-m", "paceline.cli.main", "join", address, "--token-file", token),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "HOME": str(machine.home)},
        )


@pytest.mark.slow
def test_two_machines_join_and_one_is_lost(start_cli: StartCli, lab: Lab, tmp_path: Path) -> None:
    out = tmp_path / "run"
    here = lab.machines[0].name.rpartition(".")[0] + ".254"
    options = ("--workers", 1, "--min-workers", 1, "--batch", 32, "--checkpoint-every", "never")
    run = start_cli("train", *options, *LONG, "--listen", here, "--out", out)
    wait_until(lambda: (out / JOIN_FILE).exists() or run.ended(), "the run", JOIN_S)
    known = json.loads((out / JOIN_FILE).read_text())
    assert known["address"].startswith(f"{here}:")
    guests = []
    for number, machine in enumerate(lab.machines[:2], start=1):
        token = machine.home / "join.json"
        shutil.copy(out / JOIN_FILE, token)
        log = tmp_path / f"machine-{number}.log"
        guests.append(join_from(machine, known["address"], token, log))
        members = list(range(number + 1))
        wait_until(lambda m=members: has_members(out, m)() or run.ended(), f"{members}", JOIN_S)
    lab.machines[0].kill()
    assert guests[0].wait(JOIN_S) == -signal.SIGKILL
    result = check_samples(out, run.wait(300), 8)
    assert guests[1].wait(JOIN_S) == 0
    assert (tmp_path / "machine-2.log").read_text().splitlines()[-1] == "the run is over: done"
    assert [view["members"] for view in result["views"]] == [[0, 1], [0, 1, 2], [0, 2]]


@pytest.mark.slow
def test_host_added_to_the_pool_joins(start_cli: StartCli, lab: Lab, tmp_path: Path) -> None:
    out, pool = tmp_path / "run", tmp_path / "pool.yaml"
    everyone = yaml.safe_load(lab.write_pool(pool, all={"python": sys.executable}).read_text())
    pool.write_text(yaml.safe_dump({"hosts": everyone["hosts"][:2]}))
    options = ("--min-workers", 1, "--batch", 32, "--checkpoint-every", "never", "--threads", 1)
    run = start_cli("train", "--pool", pool, *options, *LONG, "--out", out)
    events = out / "events" / "worker-1.jsonl"
    wait_until(lambda: events.exists() or run.ended(), "the run", JOIN_S)
    pool.write_text(yaml.safe_dump(everyone))
    wait_until(lambda: has_members(out, [0, 1, 2])() or run.ended(), "the join", JOIN_S)
    result = check_samples(out, run.wait(300), 8)
    assert [view["reason"] for view in result["views"]] == ["worker 2 joined"]
    assert not lab.find_left()
