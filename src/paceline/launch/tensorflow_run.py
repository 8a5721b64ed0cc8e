"""Runs of TensorFlow itself, with the rows, networks and settings of a job, to compare with.

TensorFlow has a separate environment, because its training needs Keras 2 (`make peers`).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UsageError
from paceline.job import Job, JobRef
from paceline.launch.run import Run, describe_job, describe_run, job_reference, make_plan
from paceline.launch.run_options import RunOptions
from paceline.specs.strategy import Strategy
from paceline.telemetry.run_folder import RunFolder, write_json
from paceline.telemetry.run_lock import locked_folder
from paceline.telemetry.schema import RunConfig, RunResult

PEER = "paceline.keras.tensorflow_peer"
USUAL_PYTHON = Path(".peers/tensorflow/bin/python")
"""Made by `make peers`."""
LIMIT_S = 3600.0
CHECK_S = 60.0
POLL_S = 0.1
SYSTEM = "TensorFlow"


def find_tensorflow(python: Path | None) -> Path | None:
    """Returns a Python with TensorFlow: the given one, or that of `make peers` if it exists.

    Raises UsageError if the given one cannot train.
    """
    if python is None:
        return USUAL_PYTHON.absolute() if USUAL_PYTHON.exists() else None
    needed = (
        f"import importlib.util as u; import tf_keras, tensorflow; assert u.find_spec({PEER!r})"
    )
    remedy = "run `make peers`, or install paceline[tensorflow] and tf_keras there"
    try:
        done = subprocess.run(
            [python, "-c", needed], capture_output=True, text=True, timeout=CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--tensorflow {python} does not run ({error}); {remedy}") from None
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise UsageError(f"--tensorflow {python} cannot be used ({why}); {remedy}")
    return python.absolute()


def run_in_tensorflow(python: Path) -> Run:
    """Returns a function that trains a job with TensorFlow in processes of this machine."""

    def run(job: Job | JobRef, strategy: Strategy, options: RunOptions) -> RunResult:
        if not isinstance(job, JobRef) or job.file is not None:
            raise UsageError("TensorFlow is compared on named models and data; remove the job file")
        with locked_folder(options.out):
            return _train(python, job, strategy, options)

    return run


def _train(python: Path, job: JobRef, strategy: Strategy, options: RunOptions) -> RunResult:
    resolved = job.resolve()
    resolved.check()
    folder = RunFolder(options.out)
    folder.prepare(force=options.force, resume=False)
    facts = describe_job(resolved, job_reference(job, resolved))
    plan = make_plan(resolved, strategy, options.workers)
    config: RunConfig = describe_run(plan, facts, (), options.labels, options.settings)
    write_json(folder.config, config)
    began = time.time()
    error: str | None = None
    parts: list[Mapping[str, Any]] = []
    try:
        parts = _run_workers(python, job, options, folder, began)
    except RunFailed as failure:
        error = str(failure)
    result = _make_result(config, parts, time.time() - began, error)
    write_json(folder.result, result)
    if error is not None:
        raise RunFailed(error)
    return result


def _run_workers(
    python: Path, job: JobRef, options: RunOptions, folder: RunFolder, began: float
) -> list[Mapping[str, Any]]:
    """Returns what each worker measured; raises RunFailed, and ends all processes."""
    outs = [folder.path / f"tensorflow-{worker}.json" for worker in range(options.workers)]
    children: list[subprocess.Popen[bytes]] = []
    addresses = _free_addresses(options.workers)
    try:
        for worker, out in enumerate(outs):
            request = {
                "job": job.fields, "worker": worker, "workers": options.workers,
                "threads": options.threads_each, "began": began, "out": str(out),
            }  # fmt: skip
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
            log = folder.log(f"worker-{worker}")
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as sink:
                child = subprocess.Popen(
                    [python, "-m", PEER],
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "TF_CONFIG": json.dumps(task)},
                )
            children.append(child)
            assert child.stdin is not None
            with child.stdin:
                child.stdin.write(json.dumps(request, default=str).encode())
        _wait_for(children, folder)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


def _wait_for(children: Sequence[subprocess.Popen[bytes]], folder: RunFolder) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(child.poll() is None for child in children):
        for worker, child in enumerate(children):
            if child.poll():
                lines = folder.log(f"worker-{worker}").read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "no output")
                raise RunFailed(
                    f"worker {worker} of TensorFlow exited with status {child.returncode}: {last}"
                )
        if time.monotonic() > deadline:
            raise RunFailed(f"TensorFlow did not finish within {LIMIT_S:g} s; use fewer epochs")
        time.sleep(POLL_S)


def _free_addresses(count: int) -> list[str]:
    """Returns loopback addresses; TensorFlow cannot choose its ports itself."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


def _make_result(
    config: RunConfig, parts: Sequence[Mapping[str, Any]], seconds: float, error: str | None
) -> RunResult:
    """Returns what TensorFlow can be asked for: no time categories, and no telemetry."""
    job = config["job"]
    result: RunResult = {
        "status": "done" if error is None else "failed",
        "error": error,
        "strategy": config["strategy"],
        "model": job.get("model"),
        "data": job.get("data"),
        "workers": config["workers"],
        "servers": 0,
        "seed": job.get("seed"),
        "batch": job.get("batch"),
        "seconds": round(seconds, 6),
        "labels": config["labels"],
        "versions": config["versions"],
    }
    if not parts:
        return result
    first = parts[0]
    rows, stages = first["history"], first["stages"]
    last = rows[-1]
    train_s = stages["train"]
    return {
        **result,
        "epochs": last["epoch"],
        "samples": last["samples"],
        "updates": last["updates"],
        "samples_per_s": round(last["samples"] / train_s, 3) if train_s else None,
        "train_loss": last["train_loss"],
        "train_acc": last["train_acc"],
        "test_loss": first.get("test_loss"),
        "test_acc": first.get("test_acc"),
        "parameter_bytes": 4 * first["parameters"],
        "stages": {**stages, "start": max(0.0, seconds - sum(stages.values()))},
        "history": rows,
        "input": {f"worker-{worker}": part["input"] for worker, part in enumerate(parts)},
        "versions": {**config["versions"], **first["versions"]},
    }
