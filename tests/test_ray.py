"""A real Ray cluster of two nodes: the same job to the same result, and a node that goes away."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file

from conftest import RunCli, StartCli, read_events, read_result, wait_until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'paceline[ray]' to test it",
)
EXAMPLES = Path(__file__).parents[1] / "examples"
CLUSTER = Path(__file__).parent / "scripts" / "ray_cluster.py"
START_S = 120.0
RUN_S = 170.0
OPTIONS = ("--seed", "3", "--batch", "64", "--dtype", "float64", "--threads", "1")


@pytest.fixture
def run_cli(run_process: RunCli) -> RunCli:
    """A new process: Ray keeps state in the process that connects to it."""
    return run_process


@dataclass
class Cluster:
    address: str
    process: subprocess.Popen[str]

    def remove_node(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "removed"


@pytest.fixture
def cluster(tmp_path: Path, no_leaks: None) -> Iterator[Cluster]:
    with (tmp_path / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(CLUSTER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=tmp_path,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, (tmp_path / "cluster.log").read_text()
        yield Cluster(address, process)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.mark.timeout(400)
def test_same_job_to_the_same_result(cluster: Cluster, run_cli: RunCli, tmp_path: Path) -> None:
    args = ("train", "--epochs", "2", *OPTIONS)
    ray = ("--engine", "ray", "--address", cluster.address)
    there = run_cli(*args, *ray, "--out", "there", timeout=RUN_S)
    assert there.code == 0, there.stderr
    here = run_cli(*args, "--out", "here")
    assert here.code == 0, here.stderr
    mine, theirs = (load_file(tmp_path / p / "model.safetensors") for p in ("here", "there"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    results = [read_result(tmp_path / place) for place in ("here", "there")]
    assert set(results[0]) == set(results[1])
    for name in ("status", "samples", "updates", "val_loss", "val_acc", "test_loss", "test_acc"):
        assert results[0][name] == results[1][name], name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_comparison_and_tune_keep_the_slots(
    cluster: Cluster, run_cli: RunCli, tmp_path: Path
) -> None:
    out, tuned = tmp_path / "compared", tmp_path / "tuned"
    where = ("--engine", "ray", "--address", cluster.address, "--workers", 2, "--threads", 1)
    args = ("--strategies", "allreduce; ps", "--seeds", 2, "--epochs", 1, "--out", out)
    done = run_cli("compare", *args, *where, timeout=RUN_S)
    assert done.code == 0, done.stderr
    results = [read_result(path) for path in sorted(out.glob("*-seed*"))]
    assert [result["status"] for result in results] == ["done"] * 4
    # Importing torch alone takes longer than these starts.
    assert max(result["stages"]["start"] for result in results) < 5.0
    args = ("--epochs", 2, "--tolerance", 0.5, "--out", tuned)
    done = run_cli("tune", *args, *where, timeout=RUN_S)
    assert done.code == 0, done.stderr
    assert "recommended: " in done.stdout
    assert read_result(tuned / "switch-at-0000")["stages"]["start"] < 5.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_scripts_from_the_command_line(cluster: Cluster, run_cli: RunCli, tmp_path: Path) -> None:
    ray = ("--engine", "ray", "--address", cluster.address, "--workers", "2", "--threads", "1")
    for script, strategy in (
        ("custom_loop.py", "switch(allreduce, ps, at=50%)"),
        ("keras_digits.py", "ps"),
    ):
        out = tmp_path / script.partition(".")[0]
        done = run_cli(
            *("launch", EXAMPLES / script, *ray, "--project", EXAMPLES),
            *("--strategy", strategy, "--out", out),
            timeout=RUN_S,
        )
        assert done.code == 0, done.stderr
        result = read_result(out)
        assert (result["status"], result["workers"]) == ("done", 2)
        assert (out / "model.safetensors").exists()
        assert (out / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ps(sync=bsp)", "switch(allreduce, ps, at=50%)"])
def test_strategies_with_servers(
    cluster: Cluster, run_cli: RunCli, tmp_path: Path, strategy: str
) -> None:
    ray = ("--engine", "ray", "--address", cluster.address)
    done = run_cli(
        "train", "--epochs", "2", *OPTIONS, *ray, "--strategy", strategy, "--out", "run",
        timeout=RUN_S,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    assert read_result(tmp_path / "run")["servers"] > 0


PROGRAM = """
import sys
from paceline import Job, train
from paceline.ray import RayLauncher

launcher = RayLauncher(workers=1, address=sys.argv[1], server_places=1)
result = train(Job(epochs=1, batch=64), "ps", out="run", launcher=launcher)
print(result["status"], result["workers"], result["servers"])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_from_python_with_a_server_in_a_place_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cluster.address],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "1", "1"]


LAY_OUT = """
import numpy as np, ray, sys
from paceline import Job, train
from paceline.errors import UsageError
from paceline.ray import RayLauncher, write_dataset

address, folder = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
made = np.random.default_rng(0)
images = made.standard_normal((300, 1, 8, 8)).astype("float32")
rows = [{"image": image, "label": int(k % 10)} for k, image in enumerate(images)]
source = ray.data.from_items(rows, override_num_blocks=4)
data = write_dataset(source, folder + "/laid")
try:
    write_dataset(source, folder + "/laid")
except UsageError as error:
    print("refused:", error)
job = Job(model="cnn-small", data=data, features="image", label="label", shape="1x8x8", epochs=2)
result = train(job, "allreduce", launcher=RayLauncher(workers=2), out=folder + "/run")
print("samples", result["samples"], result["status"])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_ray_dataset_is_laid_out_and_trained_on(cluster: Cluster, tmp_path: Path) -> None:
    """Three hundred rows in four blocks, each once an epoch: val and test are cut off them."""
    script = tmp_path / "lay_out.py"
    script.write_text(LAY_OUT)
    command = [sys.executable, str(script), cluster.address, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    assert "laid is not empty; choose another directory" in done.stdout
    samples, status = done.stdout.split("samples ")[1].split()
    assert status == "done"
    tables = [parquet.read_table(p) for p in sorted((tmp_path / "laid").glob("*.parquet"))]
    assert sum(table.num_rows for table in tables) == 300
    assert int(samples) % 2 == 0
    assert 0 < int(samples) <= 600


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_removed_node_is_named(cluster: Cluster, start_cli: StartCli, tmp_path: Path) -> None:
    ray = ("--engine", "ray", "--address", cluster.address)
    command = start_cli("train", "--epochs", "100000", *OPTIONS, *ray, "--out", "run")

    def trains() -> bool:
        if command.ended():
            pytest.fail(command.so_far())
        return any(event["kind"] == "steps" for event in read_events(tmp_path / "run", "worker-1"))

    wait_until(trains, "it trains on both nodes", RUN_S)
    cluster.remove_node()
    began = time.monotonic()
    done = command.wait(30)
    assert done.code == 1, done.stderr
    assert "Ray node " in done.last_line, done.stderr
    assert "was lost" in done.last_line, done.stderr
    assert time.monotonic() - began < 20
    assert read_result(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_too_many_workers_are_told_at_once(
    cluster: Cluster, run_cli: RunCli, tmp_path: Path
) -> None:
    ray = ("--engine", "ray", "--address", cluster.address, "--workers", "3")
    done = run_cli("train", *OPTIONS, *ray, "--out", "run", timeout=RUN_S)
    assert done.code == 2, done.stderr
    assert "3 slots of 1 CPU were requested, but the Ray cluster has 2 in total" in done.last_line
    assert not (tmp_path / "run").exists()


def test_no_cluster_is_told(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli(
        "train", *OPTIONS, "--engine", "ray", "--address", "127.0.0.1:1", "--out", "run",
        timeout=RUN_S,
    )  # fmt: skip
    assert done.code == 2, done.stderr
    assert "no Ray cluster found at 127.0.0.1:1" in done.last_line
    assert not (tmp_path / "run").exists()
