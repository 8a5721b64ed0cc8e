"""Checkpoint and resume: a run that was cut off ends with the very bits of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import paceline
from jobs import Remembering, largest_difference, read_weights, synthetic_job
from paceline.errors import UsageError
from paceline.job import refer_to_job
from paceline.state import list_checkpoints, load_checkpoint

SETTINGS: dict[str, Any] = {
    "samples": 110,
    "batch": 22,
    "dtype": "float32",
    "optimizer": "sgd(momentum=0.9)",
    "lr": 0.05,
    "held_out": 12,
}


def train(out: Path, strategy: str, workers: int, **fields: Any) -> dict[str, Any]:
    resume = fields.pop("resume", False)
    job = synthetic_job(Remembering, **{**SETTINGS, **fields})
    return paceline.train(job, strategy, workers, out=out, resume=resume, timeout_s=60)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("allreduce", 2),
        ("allreduce(codec=topk(0.1))", 2),
        ("ps(sync=bsp)", 2),
        ("pipeline(stages=2, micro=2)", 2),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                ("allreduce", 3),
                ("allreduce", 5),
                ("allreduce(codec=powersgd(2))", 2),
                ("ps(sync=bsp, codec=onebit)", 2),
                ("local_sgd(h=3)", 2),
                ("diloco(h=3)", 2),
            )
        ),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    """Dropout, BatchNorm, momentum and data position; the checkpoint lies in mid-epoch."""
    every = "samples(150)"
    whole = train(tmp_path / "whole", strategy, workers, epochs=4, checkpoint_every=every)
    train(tmp_path / "cut", strategy, workers, epochs=2, checkpoint_every=every)
    # Drop what came after the mid-epoch checkpoint at 154 samples, as if the run had died there.
    newest = list_checkpoints(tmp_path / "cut" / "checkpoints")
    assert [c.name for c in newest] == ["000000000154", "000000000220"]
    for file in newest[-1].iterdir():
        file.unlink()
    newest[-1].rmdir()
    again = train(
        tmp_path / "cut", strategy, workers, epochs=4, checkpoint_every=every, resume=True
    )
    assert again["samples"] == whole["samples"] == 440
    assert again["updates"] == whole["updates"]
    weights = read_weights(tmp_path / "cut"), read_weights(tmp_path / "whole")
    assert largest_difference(*weights) == 0.0
    for mine, theirs in zip(again["history"], whole["history"], strict=True):
        for name in ("epoch", "samples", "updates", "train_loss", "val_loss", "val_acc"):
            assert mine[name] == theirs[name], name


def test_what_a_codec_has_not_sent_outlives_a_switch(tmp_path: Path) -> None:
    """Residuals are kept a parameter: through all-reduce, server and a phase without codec."""
    route = (
        "switch(allreduce(codec=topk(0.05)), ps(codec=topk(0.05)), allreduce,"
        " at=(samples(44), samples(88)))"
    )
    train(tmp_path / "run", route, 2, epochs=1, checkpoint_every="epoch(1)")
    state = load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    for worker in state.workers:
        kept = {k: v for k, v in worker.tensors.items() if k.startswith("residual/")}
        assert set(kept) == {f"residual/{n}" for n in WEIGHTS}
        assert any(float(v.abs().sum()) > 0 for v in kept.values())


WEIGHTS = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias")


def test_a_run_killed_outright_is_resumed(tmp_path: Path) -> None:
    """kill -9 of the whole command in the middle; --resume ends like a run that was left alone."""
    command = [
        *(sys.executable, "-m", "paceline.cli.main", "train", "--data", "digits"),
        *("--model", "mlp-128", "--workers", "2", "--seed", "3", "--quiet"),
    ]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--epochs", "40", "--out", str(killed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list_checkpoints(killed / "checkpoints")) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    for out, extra in ((killed, ["--resume"]), (tmp_path / "whole", [])):
        subprocess.run(
            [*command, "--epochs", "40", "--out", str(out), *extra],
            check=True,
            timeout=90,
            stdout=subprocess.DEVNULL,
        )
    assert largest_difference(read_weights(killed), read_weights(tmp_path / "whole")) == 0.0


def test_the_number_of_workers_and_the_strategy_may_change_at_a_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "run", "allreduce", 2, epochs=1, checkpoint_every="epoch(1)")
    result = train(tmp_path / "run", "ps", 3, epochs=2, checkpoint_every="epoch(1)", resume=True)
    assert result["samples"] == 220
    assert [row["epoch"] for row in result["history"]] == [1, 2]
    state = load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert len(state.workers) == 3
    assert any(name.startswith("slots/") for name in state.shared.tensors)
    assert state.shared.plain["coordinator"]["history"]["samples"] == 220


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("single", 1), ("allreduce", 2), ("ps", 2), ("pipeline(stages=2, micro=2)", 2)],
)
def test_a_run_lost_in_its_last_evaluation_is_finished(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    """Only the model and the result are missing: they are made without training."""
    out, fields = tmp_path / "run", {"epochs": 2, "checkpoint_every": "epoch(1)"}
    before = train(out, strategy, workers, **fields)
    weights = read_weights(out)
    (out / "result.json").unlink()
    (out / "model.safetensors").rename(out / "model.safetensors.partial")
    after = train(out, strategy, workers, **fields, resume=True)
    assert largest_difference(read_weights(out), weights) == 0.0
    for name in ("status", "epochs", "samples", "updates", "val_loss", "test_loss", "test_acc"):
        assert after[name] == before[name], name
    assert [row["train_loss"] for row in after["history"]] == [
        row["train_loss"] for row in before["history"]
    ]
    assert list(out.glob("*.partial")) == []
    with pytest.raises(UsageError, match="has already completed its 2 epochs, and its model and"):
        train(out, strategy, workers, **fields, resume=True)


def test_a_longer_run_lost_at_its_end_is_finished(tmp_path: Path) -> None:
    """The model and the result of the shorter run before do not count."""
    out = tmp_path / "run"
    train(out, "single", 1, epochs=1, checkpoint_every="epoch(1)")
    shorter = {name: (out / name).read_bytes() for name in ("model.safetensors", "result.json")}
    train(out, "single", 1, epochs=2, checkpoint_every="epoch(1)", resume=True)
    for name, content in shorter.items():
        (out / name).write_bytes(content)
    result = train(out, "single", 1, epochs=2, checkpoint_every="epoch(1)", resume=True)
    assert (result["epochs"], result["samples"]) == (2, 220)


def test_a_met_condition_ends_a_resumed_run(tmp_path: Path) -> None:
    out, fields = tmp_path / "run", {"epochs": 5, "checkpoint_every": "epoch(1)"}
    first = train(out, "single", 1, **fields, until="val_loss<=100")
    assert first["epochs"] == 1
    with pytest.raises(UsageError, match=r"has already ended \(until val_loss<=100\), and its"):
        train(out, "single", 1, **fields, until="val_loss<=100", resume=True)
    (out / "result.json").unlink()
    assert train(out, "single", 1, **fields, until="val_loss<=100", resume=True)["epochs"] == 1
    assert train(out, "single", 1, **fields, resume=True)["epochs"] == 5


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no run"):
        train(tmp_path / "nothing", "single", 1, resume=True)
    train(tmp_path / "run", "single", 1, epochs=1, checkpoint_every="epoch(1)")
    with pytest.raises(UsageError, match="has already completed its 1 epochs"):
        train(tmp_path / "run", "single", 1, epochs=1, resume=True)
    with pytest.raises(UsageError, match="was trained with batch=22, but batch=13 was given"):
        train(tmp_path / "run", "single", 1, epochs=2, batch=13, resume=True)


JOB_FILE = """
import torch, paceline
def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, {hidden}), torch.nn.Tanh(),
                               torch.nn.Linear({hidden}, 10))
def job():
    return paceline.Job(model=net, data="digits", epochs={epochs})
"""


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """The same name, other shapes: found when the checkpoint meets the model, and said plainly."""
    file = tmp_path / "job.py"
    file.write_text(JOB_FILE.format(hidden=8, epochs=1))
    paceline.train(refer_to_job(file, {}), "single", 1, out=tmp_path / "run", timeout_s=60)
    before = read_weights(tmp_path / "run")
    file.write_text(JOB_FILE.format(hidden=9, epochs=2))
    with pytest.raises(UsageError, match="belongs to another model; resume with the model that"):
        paceline.train(
            refer_to_job(file, {}), "single", 1, out=tmp_path / "run", resume=True, timeout_s=60
        )
    assert largest_difference(before, read_weights(tmp_path / "run")) == 0.0
