"""paceline tune: one synchronous run, probes from its checkpoints, nothing run twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import Plain, synthetic_job
from paceline.errors import UsageError
from paceline.launch.run_options import RunOptions
from paceline.launch.switch_search import SwitchSearch
from paceline.strategies.registry import parse_strategy


def search(folder: Path, tolerance: float, lines: list[str]) -> dict:  # type: ignore[type-arg]
    job = synthetic_job(Plain, samples=110, held_out=60, epochs=4, dtype="float32", lr=0.5)
    return SwitchSearch(
        job,
        parse_strategy("single"),
        # A rate far too small: the tail learns next to nothing, so that the share decides.
        parse_strategy("ps(lr_scale=0.00001)"),
        RunOptions(out=folder, workers=1, timeout_s=60),
        tolerance=tolerance,
        others=[],
        tell=lines.append,
    ).search()


def test_bisects_over_one_run_and_resumes(tmp_path: Path) -> None:
    lines: list[str] = []
    found = search(tmp_path, 0.0, lines)
    shares = [p["share"] for p in found["probes"]]
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert all(p["status"] == "done" for p in found["probes"])
    assert 0 < found["smallest_share"] <= 1
    probed = next(p for p in found["probes"] if 0 < p["share"] < 1)
    # A probe goes on from the checkpoint: its history begins with the first strategy's epochs.
    result = json.loads((tmp_path / probed["folder"] / "result.json").read_text())
    first = json.loads((tmp_path / "first" / "result.json").read_text())
    kept = round(probed["share"] * 4)
    assert result["history"][:kept] == first["history"][:kept]
    assert result["samples"] == 440
    before = (tmp_path / probed["folder"] / "result.json").stat().st_mtime_ns
    again = search(tmp_path, 0.0, lines)
    assert again["smallest_share"] == found["smallest_share"]
    assert (tmp_path / probed["folder"] / "result.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "tune.json").read_text())["evidence"] in again["evidence"]


def test_bad_tolerance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a fraction from 0 to 1"):
        search(tmp_path / "out", 1.5, [])
    assert not (tmp_path / "out").exists()
