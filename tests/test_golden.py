"""Frozen results of version 0.1.0: run folders, simulated runs, plans and option names.

A refactoring must not change them. Run folders must stay readable, simulated times and plans must
stay equal, and every option must keep its name.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCli, read_result
from paceline.dashboard.run_index import RunIndex

GOLDEN = Path(__file__).parent / "golden"
RUNS = sorted(path.name for path in (GOLDEN / "runs").iterdir())
VIRTUAL: dict[str, dict[str, Any]] = json.loads((GOLDEN / "virtual.json").read_text())
OPTIONS: dict[str, dict[str, list[str]]] = json.loads((GOLDEN / "options.json").read_text())
PLANS = sorted(path.stem for path in (GOLDEN / "plans").glob("*.json"))


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    """Compares JSON values; numbers may differ in the last digits, new keys are allowed."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        for key, value in expected.items():
            assert key in actual, f"{where}.{key} is missing"
            assert_equal(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list), where
        assert len(actual) == len(expected), where
        for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(a, b, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-9), where
    else:
        assert actual == expected, where


@pytest.fixture
def run_folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(GOLDEN / "runs" / request.param, tmp_path / request.param))


@pytest.mark.parametrize("run_folder", RUNS, indirect=True)
def test_report_opens_runs_of_version_0_1_0(run_cli: RunCli, run_folder: Path) -> None:
    done = run_cli("report", run_folder, "-o", "report.html")
    assert done.code == 0, done.stderr
    assert (run_folder.parent / "report.html").stat().st_size > 10_000


def test_dashboard_opens_runs_of_version_0_1_0() -> None:
    index = RunIndex(GOLDEN / "runs")
    index.refresh()
    runs = index.list_runs()
    assert sorted(run["id"] for run in runs) == RUNS
    for run in runs:
        shown = index.run_payload(run["id"], generation="", first=0, who=None)
        assert shown is not None
        assert shown["missing"] == []
        assert len(shown["history"]) >= 2
        # A simulated run has no events of processes.
        assert bool(shown["timeline"]) == (run["id"] != "virtual")


@pytest.mark.parametrize("run_folder", RUNS, indirect=True)
def test_evaluate_opens_runs_of_version_0_1_0(run_cli: RunCli, run_folder: Path) -> None:
    done = run_cli("evaluate", run_folder)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("run_folder", [r for r in RUNS if r != "virtual"], indirect=True)
def test_resume_continues_runs_of_version_0_1_0(run_cli: RunCli, run_folder: Path) -> None:
    before = read_result(run_folder)
    job = ("--model", "mlp-128", "--data", "digits", "--batch", 64, "--lr", 0.05, "--seed", 1)
    done = run_cli(
        *("train", "--out", run_folder, "--resume", "--epochs", before["epochs"] + 1, *job),
        *("--strategy", before["strategy"], "--workers", before["workers"], "--quiet"),
        *("--threads", 1),
    )
    assert done.code == 0, done.stderr
    after = read_result(run_folder)
    assert after["samples"] == before["samples"] // before["epochs"] * after["epochs"]
    assert after["history"][: before["epochs"]] == before["history"]


@pytest.mark.parametrize("strategy", VIRTUAL)
def test_simulated_times_are_unchanged(run_cli: RunCli, tmp_path: Path, strategy: str) -> None:
    done = run_cli(
        *("twin", "--cluster", GOLDEN / "unequal.yaml", "--strategy", strategy, "--depth", "cost"),
        *("--model", "mlp-128", "--data", "digits", "--epochs", 2, "--batch", 64, "--lr", 0.05),
        *("--seed", 3, "--checkpoint-every", "never", "--out", tmp_path / "run", "--quiet"),
        *(("--workers", 1) if strategy == "single" else ()),
    )
    assert done.code == 0, done.stderr
    assert_equal(read_result(tmp_path / "run"), VIRTUAL[strategy])


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_unchanged(run_cli: RunCli, name: str) -> None:
    pool, _, objective = name.rpartition("-")
    root = Path(__file__).parents[1]
    places = [root / "examples", root / "src" / "paceline" / "cluster" / "examples"]
    file = next(p for place in places if (p := place / f"{pool}.yaml").exists())
    done = run_cli(
        *("plan", "--pool", file, "--objective", objective, "--model", "cnn-small"),
        *("--data", "digits", "--json"),
    )
    assert done.code == 0, done.stderr
    assert_equal(
        json.loads(done.stdout), json.loads((GOLDEN / "plans" / f"{name}.json").read_text())
    )


@pytest.mark.parametrize("command", OPTIONS)
def test_option_names_are_unchanged(run_cli: RunCli, command: str) -> None:
    done = run_cli(*command.split(), "--help")
    assert done.code == 0, done.stderr
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", done.stdout))
    assert set(OPTIONS[command]["options"]) <= shown
