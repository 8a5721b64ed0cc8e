"""Named datasets with fewer rows, with rows fetched one at a time, and without prefetching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import RunCli, read_result
from paceline.errors import UsageError
from paceline.job import Job
from paceline.worker.job_builder import load_job_data


def test_a_limit_keeps_the_first_rows_of_each_part_and_says_so() -> None:
    whole, some = (load_job_data(Job(data="digits", limit=n)) for n in (None, 250))
    assert [len(part or ()) for part in (some.train, some.val, some.test)] == [250, 200, 250]
    rows = np.arange(250)
    for a, b in zip(some.train.batch(rows), whole.train.batch(rows), strict=True):
        assert torch.equal(a, b)
    assert some.notes(2) == ("only 250 of 1,297 training rows are used (limit)",)
    with pytest.raises(IndexError):
        some.train.batch(np.array([250]))


def test_single_rows_are_the_same_rows() -> None:
    data = [load_job_data(Job(data="digits", row_by_row=one)).train for one in (False, True)]
    rows = np.array([7, 3, 1200])
    for a, b in zip(*(each.batch(rows, epoch=1) for each in data), strict=True):
        assert torch.equal(a, b)
    assert len(data[0]) == len(data[1])


def test_prefetching_can_be_turned_off() -> None:
    train: Any = load_job_data(Job(data="digits", prefetch=0, limit=100)).train
    assert train.pipeline.depth == 0
    assert len(train) == 100


@pytest.mark.parametrize("option", [{"limit": 20}, {"row_by_row": True}])
def test_other_data_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="applies only to named datasets"):
        Job(data="/tmp/rows.parquet", **option).check()


def test_several_epochs_are_profiled_with_a_limit(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli(
        *("train", "--model", "mlp-128", "--data", "digits", "--limit", 200, "--batch", 20),
        *("--epochs", 3, "--workers", 1, "--strategy", "single", "--profile", "epochs=2-3"),
        *("--row-by-row", "--out", "run"),
    )
    assert done.code == 0, done.stderr
    assert read_result(tmp_path / "run")["samples"] == 600
    assert "only 200 of 1,297" in done.stderr
    shown = run_cli("profile", "run")
    assert "epochs 2 to 3, 20 steps" in " ".join(shown.stdout.split())
