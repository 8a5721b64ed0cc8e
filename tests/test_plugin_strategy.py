"""A strategy from a user's own file: it trains in real processes, and lacks only what it lacks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import paceline
import test_contract as contract
from conftest import RunCli
from jobs import Plain, largest_difference, read_weights, synthetic_job, train_plainly
from paceline.errors import PacelineError, SpecError, UsageError
from paceline.job import JobRef
from paceline.launch.engines.engine import EngineLauncher
from paceline.launch.project import bundle_project
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.plan.estimate import estimate
from paceline.plan.pool_arrays import PoolArrays
from paceline.plugins import load_plugin_file, plugin_for
from paceline.strategies import registry
from paceline.strategies.registry import parse_strategies, parse_strategy, plugins_of, records
from process_engine import Places
from test_facets import POOL, WORK

TOY = Path(__file__).with_name("toy_strategy.py")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests must not find the toy among the strategies."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("toy_strategy", "broken", "changing", "travelling"):
        sys.modules.pop(name, None)


def test_one_worker_equals_plain_pytorch(tmp_path: Path) -> None:
    contract.test_one_worker_equals_plain_pytorch_bit_for_bit(tmp_path, f"{TOY}:mean")


def test_three_workers_equal_one_process(tmp_path: Path) -> None:
    contract.check_equal_to_one_process(tmp_path, f"{TOY}:mean", 3, "adam", 1e-9)


def test_every_sample_counts_once_and_telemetry_is_complete(tmp_path: Path) -> None:
    contract.test_every_sample_exactly_once_an_epoch_and_telemetry_complete(tmp_path, f"{TOY}:mean")


def test_state_survives_a_switch_to_and_from_it(tmp_path: Path) -> None:
    """Server processes import the file too: without it they could not start under this text."""
    job = synthetic_job(Plain, optimizer="adam", schedule="cosine", samples=115, epochs=2)
    text = f"{TOY}:switch(allreduce, mean, ps(sync=bsp), mean, at=(samples(22), 50%, 80%))"
    result = paceline.train(job, text, 3, out=tmp_path / "run", timeout_s=60)
    assert result["strategy"].startswith("switch(allreduce, mean, ps(sync=bsp), mean,")
    assert [s["to"] for s in result["switches"]] == ["mean", "ps(sync=bsp)", "mean"]
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= 1e-9


def test_a_file_is_named_in_front_of_a_strategy() -> None:
    first, second = parse_strategies(f"allreduce; {TOY}:mean")
    assert (str(first), str(second)) == ("allreduce", "mean")
    assert "mean" in records()
    # Known from now on, and the file may be named again.
    assert parse_strategy("mean") == parse_strategy(f"{TOY}:mean") == second
    (plugin,) = plugins_of(parse_strategy("switch(ps, mean, at=50%)"))
    assert (plugin.module, plugin.file) == ("toy_strategy", TOY.resolve())
    assert plugins_of(first) == ()


def test_a_missing_facet_is_named() -> None:
    spec = parse_strategy(f"{TOY}:mean")
    with pytest.raises(UsageError) as caught:
        registry.simulation(spec)
    assert str(caught.value) == "mean cannot be simulated: it has no simulate facet"
    with pytest.raises(UsageError) as caught:
        registry.cost(spec)
    assert str(caught.value) == "mean cannot be planned: it has no cost facet"


def test_twin_and_planner_refuse_it_before_anything_is_written(
    tmp_path: Path, run_cli: RunCli
) -> None:
    options = ("--model", "mlp-128", "--data", "digits", "--epochs", "1", "--out", "run")
    for text in ("mean", "switch(allreduce, mean, at=50%)"):
        done = run_cli("twin", *options, "--cluster", "2", "--strategy", f"{TOY}:{text}")
        assert done.code == 2
        assert done.stderr == "paceline: mean cannot be simulated: it has no simulate facet\n"
        assert not (tmp_path / "run").exists()
        with pytest.raises(UsageError, match=r"^mean cannot be planned: it has no cost facet$"):
            estimate(PoolArrays(POOL, WORK), np.arange(3), parse_strategy(text))


def test_names_are_taken_once() -> None:
    load_plugin_file(TOY)
    record = records()["mean"]
    registry.register_strategy(record)  # The same module: imported twice.
    with pytest.raises(SpecError, match="a strategy named 'mean' already exists"):
        registry.register_strategy(paceline.StrategyRecord(spec=other_mean(), pace="", worker=""))
    with pytest.raises(SpecError, match="'mean' has no worker facet; pace and worker are required"):
        registry.register_strategy(paceline.StrategyRecord(spec=record.spec, pace="x:y"))


def other_mean() -> type[paceline.Single]:
    class Mean(paceline.Single):
        name = "mean"

    return Mean


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:mean", "plugin nowhere.py does not exist; use a Python file"),
        (f"{TOY}:meen", "unknown strategy 'meen'; did you mean 'mean'?"),
    ],
)
def test_mistakes_in_the_text_are_one_line(text: str, message: str) -> None:
    with pytest.raises(PacelineError) as caught:
        parse_strategy(text)
    assert message in str(caught.value)


def test_an_error_in_the_file_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("x = 1\nx.gossip\n")
    with pytest.raises(UsageError, match=r"broken.py:2: AttributeError: 'int' object"):
        parse_strategy(f"{file}:mean")


def test_a_file_that_changed_is_refused_in_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    shutil.copy(TOY, file)
    parse_strategy(f"{file}:mean")
    plugin = plugin_for("changing")
    plugin.load()
    file.write_text(file.read_text() + "\n# later\n")
    with pytest.raises(UsageError, match="has changed since the run was started"):
        plugin.load()


def test_it_travels_with_its_project_to_other_machines(tmp_path: Path) -> None:
    project, out = tmp_path / "my project", tmp_path / "run"
    project.mkdir()
    shutil.copy(TOY, project / "travelling.py")
    (project / "requirements.txt").write_text("")
    spec = parse_strategy(f"{project / 'travelling.py'}:mean")
    launcher = EngineLauncher(Places(), 2)
    options = RunOptions(out=out, workers=2, threads=1, timeout_s=60, launcher=launcher)
    job = JobRef(fields={"epochs": 1, "batch": 64, "seed": 3})
    assert run_training(job, spec, options)["strategy"] == "mean"
    assert launcher.project_bundle.project is not None
    assert launcher.project_bundle.project.folder == project


def test_a_file_outside_the_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / "travelling.py").write_text(TOY.read_text())
    (tmp_path / "project").mkdir()
    spec = parse_strategy(f"{tmp_path / 'travelling.py'}:mean")
    bundle = bundle_project(None, out=tmp_path / "run", folder=tmp_path / "project")
    options = RunOptions(
        out=tmp_path / "run",
        workers=2,
        threads=1,
        timeout_s=60,
        launcher=EngineLauncher(Places(), 2, bundle),
    )
    with pytest.raises(UsageError, match=r"travelling.py is outside the project that is copied"):
        run_training(JobRef(fields={"epochs": 1, "batch": 64}), spec, options)


def test_a_strategy_of_the_started_script_is_refused() -> None:
    with pytest.raises(UsageError, match="move it to a separate file"):
        plugin_for("__main__")
