"""Matrices: read, laid out, run, cut off, gone on with; with real runs where it is about runs."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RunCli, read_result
from paceline.errors import RunFailed, UsageError
from paceline.job import Job, JobRef
from paceline.launch.arm_settings import ArmSettings
from paceline.launch.compare_runs import MatrixOptions, compare_strategies, run_matrix
from paceline.launch.matrix_file import Matrix, list_cells, list_shipped, read_matrix
from paceline.launch.run_options import RunOptions
from paceline.report.progress import MatrixProgress
from paceline.specs.strategy import Strategy
from paceline.telemetry.run_folder import write_json

PLAIN: dict[str, Any] = {
    "title": "Small",
    "job": {"epochs": 1, "checkpoint_every": "never"},
    "models": ["mlp-128"],
    "data": ["digits"],
    "strategies": ["allreduce", {"strategy": "ps", "arm": "servers"}],
    "batches": [32, 64],
    "seeds": 2,
}


def write_matrix(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**PLAIN, **changes}), encoding="utf-8")
    return path


class Runs:
    """A stand-in for a run, where the matter is which runs are made and what is kept of them."""

    def __init__(self, *, fails: str = "", interrupt_at: int | None = None) -> None:
        self.made: list[str] = []
        self._fails, self._interrupt_at = fails, interrupt_at

    def __call__(
        self, job: Job | JobRef, strategy: Strategy, options: RunOptions
    ) -> dict[str, Any]:
        if self._interrupt_at == len(self.made):
            raise KeyboardInterrupt
        name = options.out.name
        self.made.append(name)
        options.out.mkdir(parents=True, exist_ok=True)
        is_failing = bool(self._fails) and self._fails in name
        result = {"status": "failed" if is_failing else "done", "strategy": str(strategy),
                  "labels": dict(options.labels), "error": "worker 1 died" if is_failing else None,
                  "model": "mlp-128", "data": "digits", "batch": 1, "seed": 0,
                  "workers": options.workers, "servers": 0,
                  "seconds": 1.0, "test_acc": 0.9}  # fmt: skip
        write_json(options.out / "run.json", {})
        write_json(options.out / "result.json", result)
        if is_failing:
            raise RunFailed("worker 1 died")
        return result


def options_for(out: Path, **changes: Any) -> MatrixOptions:
    return MatrixOptions(**{"out": out, "given": {}, **changes})


def test_strategies_alternate_within_a_seed(tmp_path: Path) -> None:
    cells = list_cells(read_matrix(str(write_matrix(tmp_path / "m.yaml"))), {})
    assert len(cells) == 2 * 2 * 2
    assert [cell.arm for cell in cells[:4]] == ["allreduce", "servers"] * 2
    assert [cell.job["seed"] for cell in cells] == [0] * 4 + [1] * 4
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[0].task == "mlp-128 on digits, batch 32"


def test_a_batch_per_worker_and_factors_make_the_global_batch() -> None:
    matrix = Matrix(
        job={"epochs": 10},
        models=["mlp-128"],
        data=["digits"],
        batches=[128],
        batch_is="per-worker",
        strategies=[
            {"strategy": "ps", "workers": 6},
            {"strategy": "allreduce", "workers": 9, "epochs_times": 9},
            {"strategy": "allreduce", "arm": "half", "workers": 2, "batch_times": 0.5},
            {"strategy": "single"},
        ],
    )
    cells = {cell.arm: cell for cell in list_cells(matrix, {})}
    assert (cells["ps"].job["batch"], cells["ps"].workers) == (768, 6)
    assert (cells["allreduce"].job["batch"], cells["allreduce"].job["epochs"]) == (1152, 90)
    assert cells["half"].job["batch"] == 128
    assert (cells["single"].job["batch"], cells["single"].workers) == (128, 1)
    assert "per worker" in cells["ps"].task


@pytest.mark.parametrize("scale", ["full", "small"])
@pytest.mark.parametrize("path", list_shipped(), ids=lambda p: p.stem)
def test_shipped_matrices_are_whole(path: Path, scale: str) -> None:
    cells = list_cells(read_matrix(path.stem, scale=scale), {})
    assert cells
    if scale == "small":
        assert {cell.job["data"] for cell in cells} == {"digits"}
        # Others run only where TensorFlow is installed.
        assert sum(cell.peer is None for cell in cells) <= 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategies": ["alreduce"]}, "allreduce"),
        ({"colour": "red"}, "colour is not a field of a matrix"),
        ({"job": {"batch": 3}}, "one of its axes"),
        ({"job": {"epochs": 0}}, "epochs must be at least 1, got 0"),
        ({"batches": [1]}, "smaller than --workers"),
        ({"batches": [32, 32]}, "twice"),
        ({"models": []}, "has no work"),
        ({"batch_is": "local"}, "batch_is is 'local'"),
        ({"strategies": [{"strategy": "ps", "colour": 1}]}, "strategies.0.colour is not a field"),
        ({"strategies": [{"strategy": "ps", "threads": 0}]}, "--threads must be at least 1, got 0"),
        ({"strategies": [{"strategy": "ps", "resume": True}]}, "resume is not a field"),
        ({"where": {"threads": 2}}, "where has no option 'threads'"),
        ({"strategies": ["ps", {"strategy": "ps", "pin": True}]}, "two arms are called 'ps'"),
        (
            {"strategies": [{"strategy": "ps", "select": "auto"}], "batch_is": "per-worker"},
            "batch_is: per-worker and select: auto cannot be combined",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, changes: Any, words: str) -> None:
    path = write_matrix(tmp_path / "m.yaml", **changes)
    with pytest.raises(UsageError, match=words) as caught:
        list_cells(read_matrix(str(path)), {})
    assert "\n" not in str(caught.value)


def test_unknown_names_and_scales(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="published-switch"):
        read_matrix("published-swich")
    with pytest.raises(UsageError, match="does not exist"):
        read_matrix(str(tmp_path / "no.yaml"))
    with pytest.raises(UsageError, match="no part 'small:'"):
        read_matrix(str(write_matrix(tmp_path / "m.yaml")), scale="small")
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(UsageError, match="not YAML"):
        read_matrix(str(tmp_path / "bad.yaml"))


def test_a_matrix_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml")))
    first = Runs(interrupt_at=3)
    with pytest.raises(KeyboardInterrupt):
        run_matrix(matrix, options_for(tmp_path / "out"), run=first)
    kept = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert kept["runs_total"] == 3
    second = Runs()
    comparison = run_matrix(matrix, options_for(tmp_path / "out"), run=second)
    assert comparison["runs_total"] == 8
    assert len(second.made) == 5
    assert not set(first.made) & set(second.made)
    third = Runs()
    run_matrix(matrix, options_for(tmp_path / "out"), run=third)
    assert third.made == []


def test_ratios_stay_within_a_task(tmp_path: Path) -> None:
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml")))
    comparison = run_matrix(matrix, options_for(tmp_path / "out"), run=Runs())
    assert [task["task"] for task in comparison["tasks"]] == [
        "mlp-128 on digits, batch 32",
        "mlp-128 on digits, batch 64",
    ]
    for task in comparison["tasks"]:
        assert [entry["label"] for entry in task["strategies"]] == ["allreduce", "servers"]
        assert task["strategies"][0]["seconds_over_first_strategy_seconds"] == 1.0
    assert [entry["task"] for entry in comparison["strategies"]] == [
        "mlp-128 on digits, batch 32"
    ] * 2 + ["mlp-128 on digits, batch 64"] * 2


def test_failures_are_kept_and_made_again_only_when_asked(tmp_path: Path) -> None:
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml")))
    comparison = run_matrix(matrix, options_for(tmp_path / "out"), run=Runs(fails="servers"))
    assert (comparison["runs_total"], comparison["runs_failed"]) == (8, 4)
    again = Runs()
    assert run_matrix(matrix, options_for(tmp_path / "out"), run=again)["runs_failed"] == 4
    assert again.made == []
    retried = run_matrix(matrix, options_for(tmp_path / "out", retry=True), run=again)
    assert retried["runs_failed"] == 0
    assert len(again.made) == 4


def test_resume_repeats_what_failed_and_says_what_it_reuses(tmp_path: Path) -> None:
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml")))
    out, lines = tmp_path / "out", []  # type: ignore[var-annotated]
    run_matrix(matrix, options_for(out), run=Runs(fails="b64-w2-servers"))
    again = Runs()
    found = run_matrix(matrix, options_for(out, resume=True, tell=lines.append), run=again)
    assert found["runs_failed"] == 0
    assert again.made == [
        "digits-mlp-128-b64-w2-servers-seed0",
        "digits-mlp-128-b64-w2-servers-seed1",
    ]
    assert lines[0].startswith("reusing 6 of 8 runs: digits-mlp-128-b32-w2-allreduce-seed0, ")
    assert lines[1] == f"repeating or continuing 2 runs: {', '.join(again.made)}"
    rows = json.loads((out / "matrix.json").read_text())["runs"]
    assert len({row["hash"] for row in rows}) == 8
    moved = {"data_dir": "/elsewhere", "timeout": 5}
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml", timeout=moved.pop("timeout"))))
    assert run_matrix(matrix, options_for(out, given=moved), run=again)["runs_total"] == 8
    assert len(again.made) == 2
    with pytest.raises(UsageError, match=r"job\.epochs was 1, now 2"):
        run_matrix(matrix, options_for(out, given={"epochs": 2}), run=again)


def test_a_run_that_fails_is_repeated_once_if_asked(tmp_path: Path) -> None:
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml", seeds=1, batches=[32])))
    runs = Runs(fails="servers")
    comparison = run_matrix(matrix, options_for(tmp_path / "out", retry=True), run=runs)
    assert [name.split("-")[-2] for name in runs.made] == ["allreduce", "servers", "servers"]
    assert comparison["runs_failed"] == 1


def test_a_comparison_that_was_cut_off_is_resumed(tmp_path: Path) -> None:
    job, out, lines = JobRef(fields={"epochs": 1}), tmp_path / "out", []  # type: ignore[var-annotated]

    def compare(run: Runs, job: JobRef = job, **changes: Any) -> Any:
        options = RunOptions(out=out, workers=2, threads=1, **changes)
        names = ["allreduce", "ps"]
        return compare_strategies(job, names, options, seeds=2, run=run, tell=lines.append)

    with pytest.raises(KeyboardInterrupt):
        compare(Runs(fails="1-allreduce", interrupt_at=2))
    with pytest.raises(UsageError, match="use --resume to continue it, or --force"):
        compare(Runs())
    more = job.model_copy(update={"fields": {"epochs": 2}})
    with pytest.raises(UsageError, match=r"job\.fields\.epochs was 1, now 2"):
        compare(Runs(), more, resume=True)
    again = Runs()
    assert compare(again, resume=True)["runs_failed"] == 0
    assert again.made == ["1-allreduce-seed0", "1-allreduce-seed1", "2-ps-seed1"]
    assert lines == [
        "reusing 1 of 4 runs: 2-ps-seed0",
        "repeating or continuing 1 run: 1-allreduce-seed0",
    ]


def test_more_seeds_are_added_and_another_matrix_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_matrix(read_matrix(str(write_matrix(tmp_path / "m.yaml"))), options_for(out), run=Runs())
    more = Runs()
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml", seeds=3)))
    run_matrix(matrix, options_for(out), run=more)
    assert len(more.made) == 4
    changed = read_matrix(str(write_matrix(tmp_path / "m.yaml", job={"epochs": 2})))
    with pytest.raises(UsageError, match="another matrix"):
        run_matrix(changed, options_for(out), run=Runs())
    forced = Runs()
    run_matrix(changed, options_for(out, force=True), run=forced)
    assert len(forced.made) == 8


def test_two_commands_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    matrix = read_matrix(str(write_matrix(tmp_path / "m.yaml")))
    with (out / "matrix.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another command"):
            run_matrix(matrix, options_for(out), run=Runs())
    assert run_matrix(matrix, options_for(out), run=Runs())["runs_total"] == 8


def test_view_guesses_the_time_left_from_runs_alike() -> None:
    now = [0.0]
    sizes = {"a1": ("m", "d", 10), "a2": ("m", "d", 20), "b1": ("n", "d", 10)}
    view = MatrixProgress("t", sizes, quiet=True, clock=lambda: now[0])
    assert view.estimate_left_s() is None
    view.begin("a1")
    now[0] = 30.0
    view.end("a1", {"status": "done"})
    assert view.estimate_left_s() == pytest.approx(20 * 3 + 10 * 3)
    view.begin("a2")
    now[0] = 40.0
    assert view.estimate_left_s() == pytest.approx(90 - 10)
    view.end("a2", {"status": "failed", "error": "x"})
    assert view.describe().startswith("2 of 3, 1 failed")


def test_an_arm_has_its_own_place_and_run_options(tmp_path: Path) -> None:
    pools = tmp_path / "pools"
    pools.mkdir()
    path = write_matrix(
        pools / "m.yaml",
        batches=[32],
        seeds=1,
        pool="mine.yaml",
        timeout=60,
        strategies=[
            "allreduce",
            {"strategy": "ps", "select": "gpu", "servers-on": "a", "threads": 3},
            {"strategy": "ps", "arm": "here", "engine": "local", "workers": 5},
            {"strategy": "ps", "arm": "ray", "engine": "ray", "address": "10.0.0.1:6379"},
            {"strategy": "ps", "arm": "slow", "twin": 4, "slow": "worker=0,factor=2"},
        ],
    )
    cells = {cell.arm: cell for cell in list_cells(read_matrix(str(path)), {})}
    pool = str(pools / "mine.yaml")
    assert cells["allreduce"].where == {"pool": pool}
    assert cells["ps"].where == {"pool": pool, "select": ["gpu"], "servers_on": ["a"]}
    assert cells["ps"].run_values == {"timeout_s": 60.0, "threads": 3}
    assert cells["here"].is_here
    assert cells["here"].workers == 5
    assert cells["ray"].placement.address == "10.0.0.1:6379"
    assert cells["ray"].placement.pool is None
    assert cells["slow"].twin == "4"
    assert cells["slow"].slowdowns.slow == ("worker=0,factor=2",)
    # The command's place replaces that of the matrix, but not that of an arm.
    command = ArmSettings(where={"engine": "spark"}, run={"timeout": 90})
    moved = {cell.arm: cell for cell in list_cells(read_matrix(str(path)), {}, command)}
    assert moved["allreduce"].where == {"engine": "spark"}
    assert moved["allreduce"].run == {"timeout_s": 90.0}
    assert moved["here"].is_here
    with pytest.raises(UsageError, match="needs other machines"):
        run_matrix(read_matrix(str(path)), options_for(tmp_path / "out"), run=Runs())


@pytest.mark.timeout(300)
def test_arms_on_a_pool_here_and_simulated(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text("hosts: [{host: localhost, workers: 3}]\n")
    path = write_matrix(
        tmp_path / "m.yaml",
        batches=[96],
        seeds=1,
        threads=1,
        strategies=[
            {"strategy": "allreduce", "arm": "pool", "pool": "pool.yaml"},
            {"strategy": "allreduce", "arm": "here", "workers": 2},
            {"strategy": "allreduce", "arm": "twin", "twin": "pool.yaml", "workers": 3},
            {"strategy": "single", "arm": "first of the pool", "pool": "pool.yaml"},
        ],
    )
    out = tmp_path / "out"
    done = run_cli("compare", "--matrix", path, "--out", out, "--quiet")
    assert done.code == 0, done.stderr
    found = {}
    for folder in (path for path in out.iterdir() if path.is_dir()):
        result, config = read_result(folder), json.loads((folder / "run.json").read_text())
        place = "twin" if result["virtual"] else config["engine"]
        found[result["labels"]["arm"]] = (place, result["workers"])
    assert found == {
        "pool": ("ssh", 3),
        "here": ("local", 2),
        "twin": ("twin", 3),
        "first of the pool": ("ssh", 1),
    }


@pytest.mark.timeout(300)
def test_a_real_matrix_from_the_command_line(tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "m.yaml", batches=[64], seeds=1)
    command = [sys.executable, "-m", "paceline.cli.main", "compare", "--matrix", str(path),
               "--out", str(tmp_path / "out"), "--threads", "1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stderr
    runs = sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir())
    assert runs == ["digits-mlp-128-b64-w2-allreduce-seed0", "digits-mlp-128-b64-w2-servers-seed0"]
    for name in runs:
        result = json.loads((tmp_path / "out" / name / "result.json").read_text())
        assert result["status"] == "done"
        assert result["labels"]["task"] == "mlp-128 on digits, batch 64"
    assert "servers" in (tmp_path / "out" / "report.html").read_text()
    refused = subprocess.run([*command, "--batch", "3"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "--matrix and --batch cannot be combined: the matrix file defines it" in refused.stderr
