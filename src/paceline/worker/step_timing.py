"""Times a job's training steps on this machine, with the same code as training."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.job import Job, display_name, refer_to_job
from paceline.protocol.messages import Lease
from paceline.worker.batch_loader import BatchLoader
from paceline.worker.job_builder import (
    JobData,
    build_loss,
    build_model,
    build_optimizer,
    choose_device,
    load_job_data,
)

WARM_UP = 2
ROUNDS = 10
LONGEST_S = 20.0
"""A large model is timed over fewer steps."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step (fixed_s + samples x per_sample_s) and of an update."""

    fixed_s: float
    per_sample_s: float
    update_s: float
    cv: float
    """Standard deviation divided by mean of the larger steps."""
    parameter_bytes: int


def time_steps(job: Job, tables: JobData, share: int) -> StepTimes:
    """Times steps of a worker's share and of half of it, with torch's current threads."""
    model = build_model(job, tables).train()
    optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
    loss_of = build_loss(job, model)
    feed = BatchLoader(tables.train, job.seed, choose_device(job))
    sizes = sorted({min(feed.samples, max(2, share // 2)), min(feed.samples, max(2, share))})
    computing: dict[int, list[float]] = {size: [] for size in sizes}
    updating: list[float] = []
    deadline = time.perf_counter() + LONGEST_S
    for number in range(WARM_UP + ROUNDS):
        for size in sizes:
            began = time.perf_counter()
            inputs, targets = feed.batch(Lease(0, 0, 0, size, 0, size))
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            loss.item()
            computed = time.perf_counter()
            optimizer.step()
            if number >= WARM_UP or computed > deadline:
                computing[size].append(computed - began)
                updating.append(time.perf_counter() - computed)
        if time.perf_counter() > deadline:
            break
    fixed_s, per_sample_s = fit_line({size: statistics.median(t) for size, t in computing.items()})
    longest = computing[sizes[-1]]
    return StepTimes(
        fixed_s=fixed_s,
        per_sample_s=per_sample_s,
        update_s=statistics.median(updating),
        cv=statistics.pstdev(longest) / statistics.fmean(longest),
        parameter_bytes=sum(p.nbytes for p in model.parameters() if p.requires_grad),
    )


def time_job(fields: dict[str, Any], share: int) -> dict[str, Any]:
    """The same by a job's fields, as plain data; "failed" is why it cannot run here, if so."""
    try:
        job = refer_to_job(None, fields).resolve()
        began = time.perf_counter()
        tables = load_job_data(job)
        read_s = time.perf_counter() - began
        times = time_steps(job, tables, share)
    except PacelineError as error:
        return {"failed": str(error)}
    return {
        "model": display_name(job.model),
        "fixed_s": times.fixed_s,
        "per_sample_s": times.per_sample_s,
        "update_s": times.update_s,
        "read_s": read_s,
    }


def fit_line(medians: dict[int, float]) -> tuple[float, float]:
    """Fits a line through two sizes, or through the origin if that is not meaningful."""
    least, largest = min(medians), max(medians)
    if largest > least:
        slope = (medians[largest] - medians[least]) / (largest - least)
        fixed = medians[largest] - slope * largest
        if slope > 0 and fixed >= 0:
            return fixed, slope
    return 0.0, medians[largest] / largest


def with_threads(threads: int, job: Job, tables: JobData, share: int) -> StepTimes:
    """Times steps with this many threads, and restores torch's setting afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return time_steps(job, tables, share)
    finally:
        torch.set_num_threads(before)
