"""A finished run's model, back as a torch module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model

from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.telemetry.run_folder import RunFolder
from paceline.worker.evaluation import evaluate_shard
from paceline.worker.job_builder import (
    JobData,
    build_loss,
    build_model,
    load_job_data,
    load_test_split,
)


def load(folder: str | Path, *, model: torch.nn.Module | None = None) -> torch.nn.Module:
    """The trained model of a run, in evaluation mode.

    `model` is needed only where the run's job was made of live objects or of a script: the
    weights are then loaded into it. Raises UsageError when there is no model or it does not fit.
    """
    run = RunFolder(folder)
    if not run.model.exists():
        raise UsageError(f"{run.path} has no model.safetensors: name the folder of a finished run")
    built = model if model is not None else build_model(*_parts(run))
    try:
        load_model(built, str(run.model))
    except (RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"{run.model} does not fit the model: {error}".replace("\n", " ")
        ) from None
    return built.eval()


def evaluate(
    folder: str | Path, *, data: str | None = None, data_dir: Path | None = None
) -> dict[str, Any]:
    """Loss and accuracy of a run's model on the test part of its own, or of another, data set."""
    run = RunFolder(folder)
    model = load(folder)
    job = _job(run)
    changes = {k: v for k, v in (("data", data), ("data_dir", data_dir)) if v is not None}
    if changes:
        job = job.model_copy(update=changes)
        job.check()
    table = load_test_split(job, whole=data is not None)
    if table is None:
        raise UsageError("the job's data has no test part: name another with --data")
    try:
        loss_sum, correct, count = evaluate_shard(model, build_loss(job, model), table)
    except RuntimeError as error:
        raise UsageError(f"the model cannot read {job.data}: {error}".replace("\n", " ")) from None
    return {
        "data": job.describe()["data"],
        "test_loss": loss_sum / count,
        "test_acc": None if correct is None else correct / count,
        "predictions": count,
    }


def _job(run: RunFolder) -> Job:
    facts = json.loads(run.config.read_text(encoding="utf-8"))["job"]
    if facts.get("job_ref") is None:
        raise UsageError(
            f"{run.path} was trained from live objects or a script: load it in Python with "
            "paceline.trained_model(DIR, model=...)"
        )
    return JobRef.model_validate(facts["job_ref"]).resolve()


def _parts(run: RunFolder) -> tuple[Job, JobData]:
    job = _job(run)
    return job, load_job_data(job)
