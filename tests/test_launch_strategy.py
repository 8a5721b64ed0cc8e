"""`paceline launch --strategy` on other machines: a plain loop and a Keras script, as they are."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from conftest import RunCli, read_events, read_result
from network_namespaces import Lab
from paceline.launch.engines.engine import EngineLauncher
from paceline.launch.run import run_script
from paceline.launch.run_options import RunOptions
from paceline.strategies.registry import parse_strategy
from process_engine import Places

LOOP = """\
import sys

import torch
from torch.utils.data import DataLoader

import paceline
from parts.points import Points

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loader = DataLoader(Points(), batch_size=12)
model, optimizer, loader = paceline.prepare(model, optimizer, loader, epochs=3)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        paceline.log(loss)
    if sys.argv[1:] == ["fail"] and paceline.rank() == 1:
        raise RuntimeError("the dog ate the batch")
print("arguments", sys.argv[1:], "on", open("where.txt").read().strip())
"""
POINTS = """\
import torch
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(49, 6, generator=generator, dtype=torch.float64)
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]
"""
FIT = """\
import keras

from paceline.data.digits import read

images, labels = read()
images = images.reshape(-1, 64).astype("float32") / 16
model = keras.Sequential([keras.Input(shape=(64,)), keras.layers.Dense(10, activation="softmax")])
model.compile(
    optimizer=keras.optimizers.SGD(0.5),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
test = (images[1500:], labels[1500:])
model.fit(images[:1500], labels[:1500], batch_size=50, epochs=3, validation_data=test)
model.save("digits.keras")
assert keras.models.load_model("digits.keras").compiled
"""
ONE = ("--threads", "1")


@pytest.fixture
def run_cli(run_process: RunCli) -> RunCli:
    """A new process: machines must see a user's process, with a user's environment."""
    return run_process


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Commands run in the project's root; the scripts are below it and need a file of each."""
    folder = tmp_path / "my scripts"
    (folder / "parts").mkdir(parents=True)
    (tmp_path / ".pacelineignore").write_text("/lab\n/home\n")
    (tmp_path / "where.txt").write_text("the project\n")
    (folder / "parts" / "points.py").write_text(POINTS)
    (folder / "loop.py").write_text(LOOP)
    (folder / "fit.py").write_text(FIT)
    return folder


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = (load_file(out / "model.safetensors") for out in (one, other))
    assert set(mine) == set(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def assert_trained(out: Path, workers: int, samples: int) -> dict[str, Any]:
    result = read_result(out)
    assert (result["status"], result["workers"], result["samples"]) == ("done", workers, samples)
    assert (out / "report.html").exists()
    assert (out / "logs" / "worker-0.log").exists()
    return result


def test_this_machine_as_a_pool_trains_as_without_one(
    run_cli: RunCli, project: Path, tmp_path: Path
) -> None:
    """Two GPUs make two workers."""
    pool = tmp_path / "pool.yaml"
    hosts = [{"host": "localhost", "cores": 2, "gpus": [{"count": 2}]}]
    pool.write_text(yaml.safe_dump({"hosts": hosts}))
    common = ("--strategy", "allreduce", *ONE)
    there, here = tmp_path / "there", tmp_path / "here"
    done = run_cli(
        "launch", project / "loop.py", "--pool", pool, *common, "--out", there, "--", "a b"
    )
    assert done.code == 0, done.stderr
    assert "arguments ['a b'] on the project" in (there / "logs" / "worker-1.log").read_text()
    assert_trained(there, 2, 3 * 49)
    again = run_cli("launch", project / "loop.py", "--workers", "2", *common, "--out", here)
    assert again.code == 0, again.stderr
    assert_same_weights(here, there)
    assert read_result(here)["train_loss"] == read_result(there)["train_loss"]
    assert set(read_result(here)) == set(read_result(there))


def test_dry_run_shows_workers_and_servers(run_cli: RunCli, project: Path, tmp_path: Path) -> None:
    """One chief (this machine), six workers and two dedicated servers."""
    pool = tmp_path / "pool.yaml"
    names = [f"s{i}" for i in range(1, 9)]
    pool.write_text(yaml.safe_dump({"hosts": [{"host": name} for name in names]}))
    layout = ("--select", ",".join(names[:6]), "--servers-on", "s7,s8")
    done = run_cli(
        *("launch", project / "loop.py", "--pool", pool, "--dry-run"),
        *(*layout, "--strategy", "ps(servers=2)"),
    )
    assert done.code == 0, done.stderr
    placed = [line for line in done.stdout.splitlines() if " on s" in line]
    assert placed == [
        *(f"worker {i} on s{i + 1}" for i in range(6)),
        "server 0 on s7",
        "server 1 on s8",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp, servers=2)"])
def test_loop_on_an_engine(
    project: Path, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    options = RunOptions(
        out=tmp_path / "run", workers=2, threads=1, launcher=EngineLauncher(Places(), 2)
    )
    result = run_script(project / "loop.py", ["x"], parse_strategy(strategy), options)
    assert (result["status"], result["samples"]) == ("done", 3 * 49)
    assert "arguments ['x'] on the project" in (tmp_path / "run/logs/worker-1.log").read_text()


# ---- three machines over SSH -----------------------------------------------------------------


def write_pool(lab: Lab, tmp_path: Path, **changes: Any) -> Path:
    return lab.write_pool(tmp_path / "pool.yaml", all={"python": sys.executable}, **changes)


def hosts_of(out: Path, workers: int) -> list[str]:
    return [read_events(out, f"worker-{rank}")[0]["host"] for rank in range(workers)]


def test_loop_on_three_machines_trains_as_here(
    lab: Lab, run_cli: RunCli, project: Path, tmp_path: Path
) -> None:
    pool = write_pool(lab, tmp_path)
    common = ("--strategy", "allreduce(algorithm=ring, via=network)", *ONE)
    there, here = tmp_path / "there", tmp_path / "here"
    done = run_cli("launch", project / "loop.py", "--pool", pool, *common, "--out", there)
    assert done.code == 0, done.stderr
    assert hosts_of(there, 3) == [machine.namespace for machine in lab.machines]
    assert_trained(there, 3, 3 * 49)
    assert not lab.find_left()
    again = run_cli("launch", project / "loop.py", "--workers", "3", *common, "--out", here)
    assert again.code == 0, again.stderr
    assert_same_weights(here, there)


def test_failing_script_is_named_with_its_machine(
    lab: Lab, run_cli: RunCli, project: Path, tmp_path: Path
) -> None:
    pool = write_pool(lab, tmp_path)
    args = ("--strategy", "ps", "--out", tmp_path / "run", *ONE, "--", "fail")
    done = run_cli("launch", project / "loop.py", "--pool", pool, *args)
    assert done.code == 1, done.stderr
    assert "worker 1 failed at step " in done.last_line
    raised = 'loop.py:22: `raise RuntimeError("the dog ate the batch")`: RuntimeError: the dog'
    assert raised in done.last_line
    assert read_result(tmp_path / "run")["status"] == "failed"
    assert not lab.find_left()


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_keras_script_with_two_dedicated_servers(
    lab: Lab, run_cli: RunCli, project: Path, tmp_path: Path
) -> None:
    pool = write_pool(lab, tmp_path, h1={"workers": 2})
    first, *others = (machine.name for machine in lab.machines)
    out = tmp_path / "run"
    done = run_cli(
        *("launch", project / "fit.py", "--pool", pool, "--select", first, *ONE, "--out", out),
        *(
            "--servers-on",
            ",".join(others),
            "--strategy",
            "switch(allreduce, ps(servers=2), at=epoch(1))",
        ),
        timeout=170,
    )
    assert done.code == 0, done.stderr
    assert f"parameter servers run on {', '.join(others)}" in done.stderr
    result = assert_trained(out, 2, 3 * 1500)
    assert result["val_acc"] > 0.7
    assert hosts_of(out, 2) == [lab.machines[0].namespace] * 2
    for machine in lab.machines[1:]:
        assert list(machine.home.rglob("fit.py")), "a dedicated server has the project"
    saved = list(lab.machines[0].home.rglob("digits.keras"))
    assert len(saved) == 1, "worker 0 writes on its machine"
    assert json.loads((out / "run.json").read_text())["settings"]["select"]
    assert not lab.find_left()
