"""`--shard off`: every worker trains on all data, and notes are recorded with the results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline import Job, train
from paceline.telemetry.reader import read_run
from paceline.worker.batch_loader import ReplicatedOrder


@given(
    count=st.integers(1, 60),
    copies=st.integers(2, 5),
    share=st.integers(1, 80),
    shuffle=st.booleans(),
)
def test_an_epoch_contains_each_row_once_per_worker(
    count: int, copies: int, share: int, shuffle: bool
) -> None:
    order = ReplicatedOrder(count, 3, copies, share, shuffle=shuffle)
    rows = order.rows(1, 0, count * copies)
    assert np.bincount(rows, minlength=count).tolist() == [copies] * count
    parts = [order.rows(1, lo, min(lo + 7, len(rows))) for lo in range(0, len(rows), 7)]
    assert np.array_equal(np.concatenate(parts), rows)


def test_equal_shares_give_every_worker_all_rows() -> None:
    order = ReplicatedOrder(50, 0, 3, 8, shuffle=True)
    for worker in range(3):
        mine = []
        for start in range(0, 150, 24):
            share = min(24, 150 - start) // 3
            lo = start + worker * share
            mine += order.rows(0, lo, lo + share).tolist()
        assert sorted(mine) == list(range(50))


def test_a_run_counts_every_sample_once_per_worker(tmp_path: Path) -> None:
    job = Job(model="mlp-128", data="digits", epochs=1, batch=100, shard="off")
    result = train(job, "allreduce", 2, out=tmp_path / "run")
    assert result["samples"] == 2 * 1297
    (note,) = result["notes"]
    assert note.startswith("shard off: every worker trains on all 1,297 rows, so an epoch sees")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notes"] == [note]
    assert read_run(tmp_path / "run", steps=False) is not None
