"""The lock of a run folder: one run at a time, released with the process that holds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import RunCli, StartCli, has_trained, read_result, wait_until
from paceline.errors import UsageError
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.run_lock import LOCK_FILE, is_running, locked_folder, read_holder

HOLD = """
import sys
from pathlib import Path
from paceline.telemetry.run_lock import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_second_holder_is_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with locked_folder(out) as fresh:
        assert fresh
        assert is_running(out)
        with pytest.raises(UsageError) as refused, locked_folder(out):
            pass
        assert f"a run is in progress there (process {os.getpid()})" in str(refused.value)
        (out / "run.json").write_text("{}")
    assert not is_running(out)
    assert [path.name for path in out.iterdir()] == ["run.json"]
    with locked_folder(out) as fresh:
        assert not fresh


def test_folder_without_a_run_is_removed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mine"), locked_folder(tmp_path / "run"):
        raise UsageError("mine")
    assert not (tmp_path / "run").exists()


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdout, holder.stdin:
        assert holder.stdout.readline() == b"locked\n"
        assert is_running(out)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    assert not is_running(out)
    assert (known := read_holder(out)) is not None
    assert known.pid == holder.pid
    with locked_folder(out):
        assert is_running(out)
    assert not (out / LOCK_FILE).exists()


def test_concurrent_runs_on_one_folder(
    start_cli: StartCli, run_cli: RunCli, tmp_path: Path
) -> None:
    """--force, --resume and a simulation are refused; the run in progress is not disturbed."""
    out = tmp_path / "run"
    options = ("--strategy", "single", "--quiet", "--out", out)
    started = start_cli("train", *options, "--epochs", 100_000)
    wait_until(lambda: has_trained(out) or started.ended(), "the first epoch", 60)
    for command in (
        ("train", *options, "--force"),
        ("train", *options, "--resume", "--epochs", 200_000),
        ("twin", "--cluster", 2, "--out", out, "--force"),
    ):
        finished = run_cli(*command)
        assert (finished.code, len(finished.lines)) == (2, 1), finished.stderr
        assert f"a run is in progress there (process {started.pid})" in finished.last_line
    assert not started.ended()
    os.kill(started.pid, signal.SIGHUP)
    assert started.wait(10).code == 130
    assert read_result(out)["status"] == "cancelled"
    assert not (out / LOCK_FILE).exists()
    assert list(out.rglob("*partial*")) == []


def test_partial_files_of_a_killed_run(tmp_path: Path) -> None:
    """What was being written is removed, and a checkpoint that was set aside comes back."""
    folder = RunFolder(tmp_path)
    folder.prepare(force=False, resume=False)
    for name in (".000000000010.partial", ".000000000005.old", "000000000007", ".000000000007.old"):
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "state.json").write_text(name)
    (tmp_path / "model.safetensors.partial").write_text("half")
    (tmp_path / "mine.partial").write_text("not of a run")
    folder.prepare(force=False, resume=True)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["000000000005", "000000000007"]
    assert (folder.checkpoints / "000000000007" / "state.json").read_text() == "000000000007"
    assert (tmp_path / "mine.partial").exists()
    assert not (tmp_path / "model.safetensors.partial").exists()
