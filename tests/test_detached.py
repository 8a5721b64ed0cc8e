"""Detached runs: they outlive their terminal; attach, stop and resume work on their folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from conftest import RunCli, StartCli, has_trained, read_result, wait_until
from paceline.telemetry.run_lock import is_running, read_holder

OPTIONS = ("--strategy", "single", "--quiet")
ENDLESS = (*OPTIONS, "--epochs", 100_000)


def detach(run_process: RunCli, out: Path, *options: object) -> psutil.Process:
    """Starts a detached run, and returns its supervisor."""
    finished = run_process("train", *options, "--detach", "--out", out)
    assert finished.code == 0, finished.stderr
    assert f"`paceline stop {out}` ends it" in finished.stdout
    holder = read_holder(out)
    assert holder is not None
    return psutil.Process(holder.pid)


def test_detached_run_is_followed_and_stopped(
    run_process: RunCli, start_cli: StartCli, run_cli: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    supervisor = detach(run_process, out, *ENDLESS)
    family = supervisor.children(recursive=True)
    try:
        wait_until(lambda: has_trained(out), "the first epoch", 60)
        assert os.getsid(supervisor.pid) == supervisor.pid
        supervisor.send_signal(signal.SIGHUP)  # as when the terminal closes
        following = start_cli("attach", out)
        wait_until(lambda: "epoch" in following.so_far() or following.ended(), "progress", 60)
        os.kill(following.pid, signal.SIGINT)
        left = following.wait(20)
        assert (left.code, left.last_line) == (0, "paceline: detached; the run continues")
        assert is_running(out)
        following = start_cli("attach", out, "--quiet")
        stopped = run_cli("stop", out)
        assert (stopped.code, stopped.stdout) == (0, f"cancelled: {out}\n"), stopped.stderr
        assert following.wait(20).code == 130
    finally:
        for process in (supervisor, *family):
            if process.is_running():
                process.kill()
    assert read_result(out)["status"] == "cancelled"
    assert not is_running(out)
    again = run_cli("stop", out)
    assert (again.code, again.last_line) == (2, f"paceline: no run is in progress in {out}")
    assert psutil.wait_procs([supervisor, *family], timeout=10)[1] == []


def test_killed_supervisor_is_reported_and_the_run_resumed(
    run_process: RunCli, run_cli: RunCli, tmp_path: Path
) -> None:
    """With the recorded options, also from another directory; slowdowns included."""
    out = tmp_path / "run"
    options = ("--strategy", "single", "--epochs", 25, "--seed", 4, "--batch", 64, "--quiet")
    supervisor = detach(run_process, out, *options, "--delay", "worker=0,ms=2")
    family = supervisor.children(recursive=True)
    wait_until(lambda: has_trained(out, 2) or not supervisor.is_running(), "two epochs", 60)
    supervisor.kill()
    assert psutil.wait_procs([supervisor, *family], timeout=20)[1] == []
    finished = run_cli("attach", out, "--quiet")
    assert finished.code == 1
    assert f"(process {supervisor.pid}) was killed before the run had ended" in finished.last_line
    assert "`paceline resume" in finished.last_line
    stopped = run_cli("stop", out)
    assert (stopped.code, "was killed" in stopped.last_line) == (2, True)
    resumed = run_cli("resume", out, "--quiet", timeout=120)
    assert resumed.code == 0, resumed.stderr
    result = read_result(out)
    assert (result["status"], result["epochs"], result["seed"]) == ("done", 25, 4)
    config = json.loads((out / "run.json").read_text())
    assert config["settings"]["delay"] == ["worker=0,ms=2"]
    assert config["settings"]["batch"] == 64
    finished = run_cli("attach", out)
    assert finished.code == 0
    assert "single" in finished.stdout
    assert "already completed its 25 epochs" in run_cli("resume", out).last_line


def test_mistake_of_a_detached_run_is_its_own(run_process: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = run_process("train", "--data", "nonsense", "--detach", "--out", out)
    assert (finished.code, len(finished.lines)) == (2, 1)
    assert "unknown dataset 'nonsense'" in finished.last_line
    assert not out.exists()


@pytest.mark.parametrize("command", ["attach", "stop", "resume"])
def test_folder_without_a_run(run_cli: RunCli, tmp_path: Path, command: str) -> None:
    finished = run_cli(command, tmp_path)
    assert (finished.code, len(finished.lines)) == (2, 1)
    assert f"{tmp_path} contains no run; choose the folder of a run" in finished.last_line


def test_what_cannot_be_resumed(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"virtual": true}')
    finished = run_cli("resume", tmp_path)
    assert (finished.code, len(finished.lines)) == (2, 1)
    assert "is not a run of `paceline train`" in finished.last_line
    (tmp_path / "run.json").write_text('{"settings": {}, "job": {"job_ref": null}}')
    assert "contains live objects" in run_cli("resume", tmp_path).last_line
