"""Failures during a run: it ends soon, names the process and the cause, and cleans up."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from conftest import (
    Finished,
    RunCli,
    StartCli,
    Started,
    has_trained,
    pid_of_worker,
    read_result,
    wait_until,
)
from paceline.state import list_checkpoints, load_checkpoint

END_S = 10.0
"""A dead process ends the run within this time."""
ENDLESS = ("--epochs", 100_000, "--checkpoint-every", "never", "--quiet")

JOB = """
import time

import torch
import torch.distributed as dist

from paceline import Job


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.steps = 0

    def forward(self, inputs):
        output = self.layer(inputs.flatten(1))
        if self.training:
            self.steps += 1
            if self.steps > {steps} and dist.get_rank() == {rank}:
                output = misbehave(output)
        return output


def misbehave(output):
{body}


def job():
    return Job(model=Model, data="digits", epochs=1000, lr=0.05)
"""


def write_job(folder: Path, body: str, *, steps: int, rank: int) -> Path:
    path = folder / "faulty_job.py"
    path.write_text(JOB.format(body=f"    {body}", steps=steps, rank=rank))
    return path


def start_training(start_cli: StartCli, out: Path, strategy: str, *more: object) -> Started:
    """A run on digits that would go on for hours, seen to have trained an epoch."""
    started = start_cli("train", "--strategy", strategy, "--out", out, *ENDLESS, *more)
    wait_until(lambda: has_trained(out) or started.ended(), "the first epoch", 60)
    assert not started.ended(), started.so_far()
    return started


def find_servers(started: Started, out: Path, workers: int = 2) -> list[psutil.Process]:
    """Servers are children of workers."""
    pids = [pid_of_worker(out, rank) for rank in range(workers)]
    return [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]


def assert_gone(family: list[psutil.Process]) -> None:
    left = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def assert_failed(finished: Finished, out: Path, *words: str) -> str:
    """Exit 1, the last line names the cause, and result.json says the same."""
    assert finished.code == 1, finished.stderr
    line = finished.last_line
    assert line.startswith("paceline: ")
    for word in words:
        assert word in line
    result = read_result(out)
    assert result["status"] == "failed"
    assert result["error"] == line.removeprefix("paceline: ")
    return line


def step_in(line: str) -> int:
    found = re.search(r"at step (\d+)", line)
    assert found, line
    return int(found[1])


# ---- death -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        ("allreduce", 1),
        ("allreduce(algorithm=butterfly)", 1),
        ("ps", 1),
        ("ps", 0),
        ("pipeline", 0),
        ("tensor", 1),
    ],
    ids=["allreduce", "butterfly", "ps", "ps-beside-its-server", "pipeline", "tensor"],
)
def test_killed_worker_is_named(
    start_cli: StartCli, tmp_path: Path, strategy: str, rank: int
) -> None:
    out = tmp_path / "run"
    started = start_training(start_cli, out, strategy)
    family = started.family()
    assert len(family) == (3 if strategy == "ps" else 2)
    pid = pid_of_worker(out, rank)
    os.kill(pid, signal.SIGKILL)
    finished = started.wait(END_S)
    line = assert_failed(finished, out, f"worker {rank}", f"pid {pid}", "SIGKILL")
    assert f"worker {1 - rank}" not in line
    assert step_in(line) > 0
    assert_gone(family)


def test_killed_server_is_named(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = start_training(start_cli, out, "ps(servers=2)", "--model", "mlp-300-100")
    family, servers = started.family(), find_servers(started, out)
    assert len(servers) == 2
    # The second server is the one that worker 1 started.
    victim = psutil.Process(pid_of_worker(out, 1)).children()[0]
    victim.kill()
    finished = started.wait(END_S)
    line = assert_failed(finished, out, "server 1", "started by worker 1")
    updates = re.search(r"after (\d+) updates", line)
    assert updates
    assert int(updates[1]) > 0
    assert_gone(family)


def test_killed_supervisor_takes_all_with_it(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = start_training(start_cli, out, "ps(servers=2)")
    family = started.family()
    assert len(family) == 4
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait(END_S).code == -signal.SIGKILL
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_interrupt_cancels(start_cli: StartCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = start_training(start_cli, out, "ps")
    family = started.family()
    os.kill(started.pid, signal.SIGINT)
    finished = started.wait(END_S)
    assert finished.code == 130
    assert finished.lines == ["paceline: interrupted"]
    result = read_result(out)
    assert result["status"] == "cancelled"
    assert result["samples"] > 0
    assert_gone(family)


# ---- the user's own code ---------------------------------------------------------------------


@pytest.mark.exclusive
def test_hang_in_a_model_is_ended_at_the_deadline(run_cli: RunCli, tmp_path: Path) -> None:
    body = "while True:\n        time.sleep(3600)"
    job = write_job(tmp_path, body, steps=20, rank=1)
    out = tmp_path / "run"
    began = time.monotonic()
    finished = run_cli("train", job, "--timeout", 3, "--out", out, "--quiet")
    line = assert_failed(finished, out, "worker 1", "step 20", "forward", "3 s")
    assert "worker 0" not in line
    assert time.monotonic() - began < 40
    stacks = finished.stderr
    assert "stacks of worker 1" in stacks
    assert re.search(r'faulty_job\.py", line \d+ in misbehave', stacks)
    assert re.search(r'faulty_job\.py", line \d+ in forward', stacks)


@pytest.mark.parametrize(("strategy", "rank"), [("allreduce", 1), ("ps", 0)])
def test_exception_in_a_model_is_not_blamed_on_others(
    run_cli: RunCli, tmp_path: Path, strategy: str, rank: int
) -> None:
    """Under ps worker 0 has a server beside it, which goes away with it."""
    body = "raise ValueError('the cat sat on the keyboard')"
    job = write_job(tmp_path, body, steps=15, rank=rank)
    out = tmp_path / "run"
    finished = run_cli("train", job, "--strategy", strategy, "--out", out, "--quiet")
    line = assert_failed(
        finished, out, f"worker {rank} failed", "ValueError: the cat sat on the keyboard"
    )
    assert f"worker {1 - rank}" not in line
    assert "server" not in line
    step_in(line)
    # The traceback leads into the user's file.
    assert re.search(r'faulty_job\.py", line \d+, in misbehave', finished.stderr)


# ---- divergence ------------------------------------------------------------------------------


def assert_diverged(finished: Finished, out: Path) -> str:
    assert finished.code == 1, finished.stderr
    line = finished.last_line
    result = read_result(out)
    assert result["status"] == "diverged"
    assert line.removeprefix("paceline: ").startswith(result["error"])
    assert finished.lines == [line]
    return line


def test_nan_loss_keeps_the_last_good_checkpoint(run_cli: RunCli, tmp_path: Path) -> None:
    job = write_job(tmp_path, "return output * float('nan')", steps=30, rank=1)
    out = tmp_path / "run"
    line = assert_diverged(run_cli("train", job, "--out", out, "--quiet"), out)
    assert "NaN at step 30 of worker 1" in line
    # Eleven steps an epoch: the third epoch diverges, the second one's checkpoint is the last.
    kept = list_checkpoints(out / "checkpoints")
    assert [path.name for path in kept] == ["000000001297", "000000002594"]
    assert str(kept[-1]) in line
    state = load_checkpoint(kept[-1])
    assert len(state.workers) == 2
    assert all(torch.isfinite(t).all() for t in state.shared.tensors.values())
    assert [row["epoch"] for row in read_result(out)["history"]] == [1, 2]


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_huge_learning_rate_diverges(run_cli: RunCli, tmp_path: Path, strategy: str) -> None:
    out = tmp_path / "run"
    finished = run_cli(
        "train", "--lr", 1e8, "--strategy", strategy, "--out", out, "--epochs", 50, "--quiet"
    )
    line = assert_diverged(finished, out)
    assert re.search(r"the loss is \S+ at step \d+ of worker [01]", line)
    assert list_checkpoints(out / "checkpoints") == []


def test_weights_that_exploded_are_no_good_checkpoint(run_cli: RunCli, tmp_path: Path) -> None:
    """The only update of the epoch ruins the weights: no training loss has seen them yet."""
    out = tmp_path / "run"
    finished = run_cli("train", "--lr", 1e30, "--batch", 1297, "--out", out, "--quiet")
    line = assert_diverged(finished, out)
    assert "checkpoint" not in line
    assert list_checkpoints(out / "checkpoints") == []


# ---- disk ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small tmpfs cannot be mounted here (root in a real container is needed)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, capture_output=True, timeout=10)


def assert_no_room(finished: Finished, out: Path, why: str) -> None:
    line = assert_failed(finished, out, "worker 0", "checkpoints/000000001297", why)
    assert finished.lines == [line]
    assert list(out.glob("checkpoints/*")) == []
    assert not math.isnan(read_result(out)["seconds"])


def test_full_disk_is_one_line(run_cli: RunCli, small_disk: Path) -> None:
    args = ("--model", "mlp-300-100", "--epochs", 3, "--out", small_disk, "--quiet")
    assert_no_room(run_cli("train", *args), small_disk, "No space left on device")


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on file sizes as Linux has it")
def test_file_size_limit_is_one_line(start_cli: StartCli, tmp_path: Path) -> None:
    """The write is cut off in the middle of the file, as a quota does it; needs no root."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    out = tmp_path / "run"
    args = ("--model", "mlp-300-100", "--epochs", 3, "--out", out, "--quiet")
    finished = start_cli("train", *args, preexec=limit).wait(60)
    assert_no_room(finished, out, "File too large")


@pytest.mark.slow
def test_auto_undoes_a_switch_that_spoils_the_weights(run_cli: RunCli, tmp_path: Path) -> None:
    """At 400 times the learning rate the servers' strategy diverges within a few updates."""
    wild = "grouped(size=1, lr_scale=400)"
    strategy = f"switch(allreduce, {wild}, when=auto)"
    done = run_cli(
        *("train", "--out", tmp_path / "run", "--strategy", strategy, "--workers", 2),
        *("--model", "resnet8", "--batch", 64, "--epochs", 12, "--slow", "worker=1,factor=8"),
        *("--checkpoint-every", "never", "--quiet"),
    )
    assert done.code == 0, done.stderr
    result = read_result(tmp_path / "run")
    assert result["status"] == "done"
    there, back = result["switches"][:2]
    assert (there["to"], back["to"]) == (wild, "allreduce")
    assert back["cause"] in ("diverged", "regressed")
    assert "continues from the" in back["reason"]
    assert result["test_acc"] > 0.9
    # The learning rate stays the same, so that there is no second attempt.
    assert len(result["switches"]) == 2
    assert result["samples"] == 12 * result["history"][0]["samples"]
