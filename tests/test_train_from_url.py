"""Runs on data at a URL: every sample once, resumed mid-epoch, with input statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conftest import RUN_S
from paceline.job import Job
from paceline.launch.run import train
from paceline.telemetry.reader import read_run
from paceline.telemetry.run_folder import RunFolder
from test_data_url import SIDE, write_set


def places_of(folder: Path) -> dict[int, Counter[int]]:
    """All places that the workers of a run recorded, by epoch."""
    seen: dict[int, Counter[int]] = {}
    for worker in read_run(folder).workers:
        for step in worker.iter_steps():
            for lo, hi in step.pieces:
                seen.setdefault(step.epoch, Counter()).update(range(lo, hi))
    return seen


def make_job(folder: Path, **fields: Any) -> Job:
    given: dict[str, Any] = {
        "model": "mlp-128",
        "data": str(folder),
        "shape": f"1x{SIDE}x{SIDE}",
        "batch": 32,
        "epochs": 2,
        "lr": 0.01,
    }
    return Job(**{**given, **fields})


@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize(
    ("strategy", "shard"), [("allreduce", "row_group"), ("ps", "file"), ("allreduce", "sample")]
)
def test_a_run_reads_every_row_once_an_epoch(tmp_path: Path, strategy: str, shard: str) -> None:
    write_set(tmp_path / "set", [230, 40, 170], group=30)
    write_set(tmp_path / "val", [50])
    job = make_job(tmp_path / "set", shard=shard, val_data=str(tmp_path / "val"), shuffle=60)
    result = train(job, strategy, 2, out=tmp_path / "run")
    assert (result["status"], result["samples"]) == ("done", 880)
    assert result["val_loss"] is not None
    if shard != "sample":
        assert places_of(tmp_path / "run") == {e: Counter(range(440)) for e in (0, 1)}
    for facts in result["input"].values():
        assert facts["batches"] > 0
        assert facts["wait_s"] >= 0
        if shard != "sample":
            # Two workers, two epochs: each block twice in all, and a few more at the ends.
            assert facts["blocks"] <= 2 * 16
    # The whole of other data by URL, which has no test part.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paceline.cli.main", "evaluate", str(tmp_path / "run")),
            *("--data", str(tmp_path / "val"), "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["predictions"] == 50
    if shard == "row_group":
        blocks = sum(facts["blocks"] for facts in result["input"].values())
        assert blocks <= 2 * 16 + 8


@pytest.mark.timeout(4 * RUN_S)
def test_a_run_broken_off_in_mid_epoch_goes_on_with_other_workers(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [230, 40, 170], group=30)
    write_set(tmp_path / "val", [50])
    fields = {
        "shard": "row_group",
        "val_data": str(tmp_path / "val"),
        "shuffle": 60,
        "checkpoint_every": "samples(128)",
    }
    out = tmp_path / "run"
    train(make_job(tmp_path / "set", epochs=1, **fields), "allreduce", 2, out=out)
    # As if it had been interrupted after 384 samples: later checkpoints and events are gone.
    folder = RunFolder(out)
    kept = {int(p.name): p for p in folder.checkpoints.glob("[0-9]*")}
    assert 384 in kept
    for samples, path in kept.items():
        if samples != 384:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    memory = json.loads((kept[384] / "state.json").read_text())["plain"]["coordinator"]
    left = Counter(p for lo, hi in memory["shards"]["left"] for p in range(lo, hi))
    assert sum(left.values()) == 440 - 384
    for path in (out / "events").glob("worker-*.jsonl"):
        path.unlink()
    result = train(
        make_job(tmp_path / "set", epochs=1, **fields), "allreduce", 3, out=out, resume=True
    )
    assert result["samples"] == 440
    assert places_of(out) == {0: left}


@pytest.mark.timeout(2 * RUN_S)
def test_a_damaged_block_ends_the_run_with_its_name(tmp_path: Path) -> None:
    from paceline.errors import UsageError

    write_set(tmp_path / "set", [100, 100], group=50)
    path = tmp_path / "set" / "part-01.parquet"
    content = bytearray(path.read_bytes())
    content[8:300] = bytes(292)
    path.write_bytes(bytes(content))
    with pytest.raises(UsageError, match=r"part-01\.parquet, row group 0 \(at byte 4\)"):
        train(make_job(tmp_path / "set", shard="row_group"), "allreduce", 2, out=tmp_path / "run")
