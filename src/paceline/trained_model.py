"""Loads and evaluates the model of a finished run."""

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
    build_loss,
    build_model,
    load_job_data,
    load_test_split,
)


def load(folder: str | Path, *, model: torch.nn.Module | None = None) -> torch.nn.Module:
    """Returns the trained model of a run, in evaluation mode.

    `model` is required only if the job was made of live objects or a script; the weights are loaded
    into it. Raises UsageError if there is no model or its weights do not match.
    """
    run = RunFolder(folder)
    if not run.model.exists():
        raise UsageError(f"{run.path} has no model.safetensors; use the folder of a finished run")
    if model is None:
        job = _job(run)
        model = build_model(job, load_job_data(job))
    try:
        load_model(model, str(run.model))
    except (RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"{run.model} does not match the model: {error}".replace("\n", " ")
        ) from None
    return model.eval()


def evaluate(
    folder: str | Path, *, data: str | None = None, data_dir: Path | None = None
) -> dict[str, Any]:
    """Returns loss and accuracy of a run's model on the test split of its, or another, dataset."""
    run = RunFolder(folder)
    model = load(folder)
    job = _job(run)
    changes = {k: v for k, v in (("data", data), ("data_dir", data_dir)) if v is not None}
    if changes:
        job = job.model_copy(update=changes)
        job.check()
    table = load_test_split(job, whole=data is not None)
    if table is None:
        raise UsageError("the job's data has no test split; choose another dataset with --data")
    try:
        loss_sum, correct, count = evaluate_shard(model, build_loss(job, model), table)
    except RuntimeError as error:
        raise UsageError(
            f"the model does not accept {job.data}: {error}".replace("\n", " ")
        ) from None
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
            f"{run.path} was trained from live objects or a script; load it in Python with "
            "paceline.load(DIR, model=...)"
        )
    return JobRef.model_validate(facts["job_ref"]).resolve()
