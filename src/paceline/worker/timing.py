"""How long a job's training steps take on this machine, by the parts that training itself uses."""

from __future__ import annotations

import statistics
import time
from typing import Any

from paceline.errors import PacelineError
from paceline.job import name_of, refer_to_job
from paceline.protocol.messages import Lease
from paceline.worker.build import build_loss, build_model, build_optimizer, choose_device, read_data
from paceline.worker.feed import Feed

WARM_UP = 2
ROUNDS = 10
LONGEST_S = 20.0
"""A large model is timed over fewer steps."""


def time_job(fields: dict[str, Any], share: int) -> dict[str, Any]:
    """Seconds of a step (fixed, a sample, an update) at two sizes of a worker's share.

    A job that cannot be run here, because its data is missing say, is told under "failed".
    """
    try:
        job = refer_to_job(None, fields).resolve()
        tables = read_data(job)
        model = build_model(job, tables).train()
        optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
    except PacelineError as error:
        return {"failed": str(error)}
    loss_of = build_loss(job, model)
    feed = Feed(tables.train, job.seed, choose_device(job))
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
    fixed_s, per_sample_s = _fit({size: statistics.median(t) for size, t in computing.items()})
    return {
        "model": name_of(job.model),
        "fixed_s": fixed_s,
        "per_sample_s": per_sample_s,
        "update_s": statistics.median(updating),
    }


def _fit(medians: dict[int, float]) -> tuple[float, float]:
    """A straight line through two sizes, or through the origin where that makes no sense."""
    least, largest = min(medians), max(medians)
    if largest > least:
        slope = (medians[largest] - medians[least]) / (largest - least)
        fixed = medians[largest] - slope * largest
        if slope > 0 and fixed >= 0:
            return fixed, slope
    return 0.0, medians[largest] / largest
