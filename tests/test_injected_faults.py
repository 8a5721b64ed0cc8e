"""Injected faults (--fault): their text form, and what they do to real and simulated runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCli, StartCli, read_events, read_result
from paceline.errors import SpecError
from paceline.launch.fault_injection import FaultInjector, FaultTarget
from paceline.specs.fault import InjectedFault, parse_fault
from paceline.specs.point import RunPoint
from paceline.telemetry.events import RunLengthKnown
from paceline.worker.faults import carry_out, cut_connections


def test_text_form() -> None:
    assert parse_fault("kill worker=1 at=30%", 2, 0) == InjectedFault(
        "kill", "worker", 1, RunPoint(fraction=0.3), None, 1.0, "kill worker=1 at=30%"
    )
    found = parse_fault("slow, coordinator, at=epoch(2), factor=3, for=500ms", 2, 0)
    assert (found.process, found.factor, found.for_s) == ("coordinator", 3.0, 0.5)
    assert found.at == RunPoint(epoch=2)
    assert parse_fault("stop server=1 at=samples(40) for=2min", 1, 2).for_s == 120.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil worker=1 at=30%", "did you mean 'kill'"),
        ("", "begins with the kind of fault"),
        ("kill worker=2 at=30%", "worker must be 0 to 1, got 2"),
        ("kill server=0 at=30%", "the strategy has no servers"),
        ("kill worker=1", "at=... are required"),
        ("kill worker=1 coordinator at=30%", "one of worker=K, server=K and coordinator"),
        ("kill worker=1 at=30% for=3s", "unknown 'for' for kill"),
        ("stop worker=1 at=30% for=soon", "for=soon is not a duration"),
        ("slow worker=1 at=30%", "factor=... between 1 and 1000 is required"),
        ("slow worker=1 at=30% factor=1", "is required, got 1"),
        ("cut coordinator=1 at=30%", "'coordinator' takes no value"),
        ("cut worker at=30%", "'worker' has no value"),
        ("cut worker=0 at=often", "is not a point of a run"),
    ],
)
def test_bad_text_is_one_line(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_fault(text, 2, 0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def make_run(
    parents: tuple[int | None, ...] = (), begun: int = 0
) -> tuple[FaultTarget, list[tuple[str, ...]]]:
    """A run that records what is injected."""
    log: list[tuple[str, ...]] = []
    memory: Any = {"history": {"samples": begun}, "elapsed_s": 0.0}

    class Process:
        def __init__(self, who: str) -> None:
            self.who = who

        def send_command(self, line: str) -> None:
            log.append((self.who, line))

    names = [*(f"worker-{i}" for i in range(2)), *(f"server-{i}" for i in range(2))]
    processes: Any = {name: Process(name) for name in names}

    def show(event: Any) -> None:
        log.append((event.text,))

    run = FaultTarget(memory, parents, processes, show, lambda: log.append(("drop",)))
    return run, log


def test_each_fault_is_injected_once_after_its_point() -> None:
    texts = ("kill worker=0 at=50%", "cut worker=1 at=samples(20)", "kill worker=1 at=samples(5)")
    run, log = make_run(begun=10)
    injector = FaultInjector([parse_fault(text, 2, 0) for text in texts], run)
    injector.inject_due(1000, 0.0)
    injector.observe(RunLengthKnown(t=0.0, epochs=2, samples_per_epoch=100))
    injector.inject_due(19, 0.0)
    assert log == []
    injector.inject_due(20, 0.0)
    assert log == [(texts[1],), ("worker-1", "fault cut 1000000000.0 1.0 -")]
    injector.inject_due(400, 0.0)
    injector.inject_due(400, 0.0)
    assert log[2:] == [(texts[0],), ("worker-0", "fault kill 1000000000.0 1.0 -")]
    assert injector.explain("worker-0") == " (injected: --fault 'kill worker=0 at=50%')"
    assert injector.explain("worker-0") == ""  # Only one failure is the consequence.


@pytest.mark.parametrize(
    ("parents", "line"),
    [
        ((0, 1), ("worker-1", "fault stop 2.0 1.0 1")),
        ((None, None), ("server-1", "fault stop 2.0 1.0 -")),
    ],
)
def test_servers_are_reached_through_their_workers(
    parents: tuple[int | None, ...], line: tuple[str, str]
) -> None:
    run, log = make_run(parents)
    faults = ["stop server=1 at=samples(1) for=2s", "cut coordinator at=samples(1)"]
    injector = FaultInjector([parse_fault(text, 2, 2) for text in faults], run)
    injector.observe(RunLengthKnown(t=0.0, epochs=2, samples_per_epoch=100))
    injector.inject_due(1, 0.0)
    assert log == [(faults[0],), line, (faults[1],), ("drop",)]


def test_a_process_is_stopped_for_a_while_and_killed() -> None:
    target = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        helper = carry_out("stop", 0.3, 1.0, target.pid)
        assert helper is not None
        deadline = time.monotonic() + 20
        while "T" not in Path(f"/proc/{target.pid}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert helper.wait(20) == 0
        assert Path(f"/proc/{target.pid}/stat").read_text().split()[2] != "T"
        carry_out("kill", 0.0, 1.0, target.pid)
        assert target.wait(10) == -signal.SIGKILL
    finally:
        target.kill()
        target.wait()


def test_cut_ends_every_connection() -> None:
    program = (
        "import socket, sys; from paceline.worker.faults import cut_connections\n"
        "c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "c.recv(1); cut_connections(); sys.stdin.read()"
    )
    assert callable(cut_connections)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        child = subprocess.Popen([sys.executable, "-c", program, port], stdin=subprocess.PIPE)
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(20)
            connection.sendall(b"x")
            assert connection.recv(1) == b""
        assert child.poll() is None
        child.communicate(timeout=10)


@pytest.mark.parametrize(
    ("strategy", "fault", "name"),
    [
        ("allreduce", "kill worker=1 at=40%", "worker 1"),
        pytest.param("ps", "kill server=0 at=40%", "server 0", marks=pytest.mark.slow),
        pytest.param("ps", "cut server=0 at=40%", "", marks=pytest.mark.slow),
    ],
)
def test_failure_names_the_injected_fault(
    run_cli: RunCli, tmp_path: Path, strategy: str, fault: str, name: str
) -> None:
    out = tmp_path / "run"
    options = ("--strategy", strategy, "--epochs", 8, "--quiet", "--out", out)
    finished = run_cli("train", *options, "--fault", fault)
    assert finished.code == 1
    assert name in finished.last_line
    assert finished.last_line.endswith(f"(injected: --fault '{fault}')")
    assert [e["text"] for e in read_events(out, "run") if e["kind"] == "fault"] == [fault]
    resumed = run_cli("resume", out, "--quiet")
    assert resumed.code == 0, resumed.stderr
    assert read_result(out)["epochs"] == 8


def test_stopped_and_slowed_workers_finish(run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = run_cli(
        *("train", "--epochs", 8, "--quiet", "--out", out),
        *("--fault", "stop worker=0 at=30% for=300ms"),
        *("--fault", "slow worker=1 at=20% factor=2 for=300ms"),
    )
    assert finished.code == 0, finished.stderr
    assert len([e for e in read_events(out, "run") if e["kind"] == "fault"]) == 2


@pytest.mark.slow
def test_killed_coordinator_is_resumed(
    start_cli: StartCli, run_cli: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = ("--epochs", 8, "--quiet", "--out", out)
    started = start_cli("train", *options, "--fault", "kill coordinator at=50%")
    assert started.wait(60).code == -signal.SIGKILL
    assert not (out / "result.json").exists()
    assert run_cli("resume", out, "--quiet").code == 0
    assert read_result(out)["epochs"] == 8
    assert os.path.exists(out / "model.safetensors")


def test_simulated_faults(run_cli: RunCli, tmp_path: Path) -> None:
    options = ("twin", "--cluster", 3, "--epochs", 4, "--depth", "cost", "--quiet", "--force")
    seconds = {}
    for name, faults in (
        ("none", ()),
        ("stop", ("--fault", "stop worker=1 at=50% for=7s")),
        ("slow", ("--fault", "slow worker=1 at=50% factor=3")),
    ):
        finished = run_cli(*options, *faults, "--out", tmp_path / name)
        assert finished.code == 0, finished.stderr
        seconds[name] = read_result(tmp_path / name)["seconds"]
    assert seconds["stop"] - seconds["none"] == pytest.approx(7.0, abs=0.2)
    assert 1.2 * seconds["none"] < seconds["slow"] < 3 * seconds["none"]
    finished = run_cli(*options, "--fault", "kill worker=2 at=25%", "--out", tmp_path / "kill")
    assert finished.code == 1
    assert "worker 2 was killed (injected: --fault 'kill worker=2 at=25%')" in finished.last_line
    finished = run_cli(*options, "--fault", "stop coordinator at=25%", "--out", tmp_path / "bad")
    assert (finished.code, "stops and slows only workers" in finished.last_line) == (2, True)
