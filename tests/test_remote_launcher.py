"""Workers that share neither a parent nor a file system with the supervisor.

The engine is as small as the contract allows (tests/process_engine.py); what it starts is real:
host agents, programs, watchdogs, workers and servers, whose files reach the run folder by
connection.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import read_events
from jobs import Plain, make_data
from paceline.errors import RunFailed, UsageError
from paceline.job import Job, JobRef, refer_to_job
from paceline.launch.engines.engine import EngineLauncher
from paceline.launch.engines.local import LocalLauncher
from paceline.launch.folder_service import FolderService
from paceline.launch.project import bundle_project
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.protocol.messages import EventLine, FileChunk, FileRequest, FilesComplete
from paceline.report.operator_profile import read_profile
from paceline.state import list_checkpoints
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder
from process_engine import Places

FIELDS: dict[str, Any] = {"epochs": 2, "batch": 64, "seed": 3, "dtype": "float64"}


def run_on(launcher: Any, out: Path, strategy: str, job: Any = None, **options: Any) -> Any:
    job = job if job is not None else JobRef(fields=FIELDS)
    chosen = RunOptions(out=out, workers=2, threads=1, timeout_s=60, launcher=launcher, **options)
    return run_training(job, parse_strategy(strategy), chosen)


def run_there(out: Path, strategy: str, job: Any = None, **options: Any) -> Any:
    return run_on(EngineLauncher(Places(), 2), out, strategy, job, **options)


def read_weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = read_weights(one), read_weights(other)
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_folder_is_the_same_as_that_of_a_local_run(tmp_path: Path) -> None:
    here = run_on(LocalLauncher(), tmp_path / "here", "allreduce")
    there = run_there(tmp_path / "there", "allreduce")
    assert set(here) == set(there)
    assert_same_weights(tmp_path / "here", tmp_path / "there")
    for name in ("status", "samples", "updates", "epochs", "val_loss", "test_acc"):
        assert here[name] == there[name], name

    def list_files(out: Path) -> set[str]:
        return {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}

    assert list_files(tmp_path / "here") == list_files(tmp_path / "there")
    kinds = [
        [event["kind"] for event in read_events(tmp_path / place, "worker-1")]
        for place in ("here", "there")
    ]
    assert kinds[0][0] == kinds[1][0]
    assert kinds[0][-1] == kinds[1][-1]
    assert json.loads((tmp_path / "there" / "run.json").read_text())["engine"] == "places"


def test_servers_and_a_switch(tmp_path: Path) -> None:
    result = run_there(tmp_path / "run", "switch(allreduce, ps(sync=bsp, servers=2), at=50%)")
    assert result["status"] == "done"
    assert len(result["switches"]) == 1


def test_profiles_of_other_machines_reach_the_run_folder(tmp_path: Path) -> None:
    run_there(tmp_path / "run", "allreduce", profile="epochs=1-2")
    profile = read_profile(tmp_path / "run")
    assert (profile.workers, profile.epoch, profile.epochs) == ([0, 1], 1, 2)
    assert profile.total_ms > 0


@pytest.mark.slow
def test_servers_with_places_of_their_own(tmp_path: Path) -> None:
    launcher = EngineLauncher(Places(), 2, own_servers=1)
    result = run_on(launcher, tmp_path / "run", "ps(sync=bsp, servers=2)")
    assert result["status"] == "done"
    local = run_on(LocalLauncher(), tmp_path / "here", "ps(sync=bsp, servers=2)")
    assert local["samples"] == result["samples"]


def test_a_job_file_goes_along_with_its_project(tmp_path: Path) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    (project / "parts.py").write_text("EPOCHS = 1\n")
    (project / "job.py").write_text(
        "from parts import EPOCHS\nfrom pathlib import Path\nfrom paceline import Job\n"
        "def job():\n"
        "    print('read in', Path(__file__).parent)\n"
        "    return Job(epochs=EPOCHS, batch=64)\n"
    )
    (project / "requirements.txt").write_text("")
    out = tmp_path / "run"
    reference = refer_to_job(project / "job.py", {})
    launcher = EngineLauncher(Places(), 2, bundle_project(reference.file, out=out))
    result = run_on(launcher, out, "allreduce", reference)
    assert result["epochs"] == 1
    read_in = {(out / "logs" / f"worker-{k}.log").read_text().split("read in ")[1] for k in (0, 1)}
    assert len(read_in) == 2, "each place has a copy of its own"
    assert not any(str(project) in place for place in read_in)


def test_live_objects_are_refused_in_one_line(tmp_path: Path) -> None:
    live = Job(model=Plain, data=make_data(64), epochs=1, batch=8, dtype="float64")
    with pytest.raises(UsageError, match="live objects") as told:
        run_there(tmp_path / "run", "allreduce", live)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_resumes_from_a_checkpoint_that_only_the_supervisor_has(tmp_path: Path) -> None:
    longer = JobRef(fields={**FIELDS, "epochs": 4})
    run_on(LocalLauncher(), tmp_path / "whole", "allreduce", longer)
    run_there(tmp_path / "cut", "allreduce")
    assert len(list_checkpoints(tmp_path / "cut" / "checkpoints")) == 2
    run_there(tmp_path / "cut", "allreduce", longer, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")


def kill_when_training(out: Path, find: Any) -> threading.Thread:
    def act() -> None:
        deadline = time.monotonic() + 60
        events = out / "events" / "worker-1.jsonl"
        while time.monotonic() < deadline:
            if events.exists() and '"steps"' in events.read_text():
                os.kill(find(), signal.SIGKILL)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


LONG = JobRef(fields={**FIELDS, "epochs": 400, "checkpoint_every": "never"})


def test_a_killed_place_is_named(tmp_path: Path) -> None:
    engine = Places()
    out = tmp_path / "run"
    killing = kill_when_training(out, lambda: engine.processes[1].pid)
    with pytest.raises(RunFailed, match=r"worker 1 \(on 127.0.0.1\) ended at step \d+: host"):
        run_on(EngineLauncher(engine, 2), out, "allreduce", LONG)
    killing.join(10)
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "failed"
    assert "was lost" in result["error"]


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def find() -> int:
        return next(
            int(event["pid"]) for event in read_events(out, "worker-1") if event["kind"] == "worker"
        )

    killing = kill_when_training(out, find)
    with pytest.raises(RunFailed, match=r"worker 1 \(on 127.0.0.1\).*killed by signal 9"):
        run_there(out, "ps(sync=asp, servers=1)", LONG)
    killing.join(10)


def test_a_place_that_never_calls_is_told(tmp_path: Path) -> None:
    launcher = EngineLauncher(Places(late={1}), 2, arrive_s=3.0)
    with pytest.raises(RunFailed, match=r"1 of 2 slots did not connect .*\(slot 1\)"):
        run_on(launcher, tmp_path / "run", "allreduce")


def test_mistakes_there_are_mistakes_here(tmp_path: Path) -> None:
    wrong = JobRef(fields={**FIELDS, "device": "cuda"})
    with pytest.raises(UsageError, match="device=cuda: torch finds no CUDA device"):
        run_there(tmp_path / "run", "allreduce", wrong)
    assert not (tmp_path / "run").exists()


# ---- the desk --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../x", "000/../../x", "/etc/passwd", "000/evil", "x/state.json", "", "000/", "0\n/a"]
)
def test_no_file_leaves_the_run_folder(tmp_path: Path, path: str) -> None:
    from paceline.errors import WireError

    folder = RunFolder(tmp_path / "run")
    folder.prepare(force=False, resume=False)
    desk = FolderService(folder, None)
    with pytest.raises(WireError):
        desk.handle("worker-0", FileChunk(path, b"x"), 0.0)
    with pytest.raises(WireError):
        desk.handle("worker-0", FilesComplete(path, 1), 0.0)
    with pytest.raises(WireError):
        desk.handle("worker-0", FileRequest(path, 0), 0.0)
    desk.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "events",
        "logs",
    ]


def test_half_a_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.prepare(force=False, resume=False)
    desk = FolderService(folder, None)
    desk.handle("worker-0", FileChunk("000000000064/state.safetensors", b"half"), 0.0)
    desk.handle("worker-0", EventLine('{"kind":"x"}'), 0.0)
    desk.close()
    assert list(folder.checkpoints.iterdir()) == []
    assert read_events(folder.path, "worker-0") == [{"kind": "x"}]
