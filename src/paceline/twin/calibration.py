"""Machines as a recorded run shows them: what each worker's steps took, and each exchange."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.errors import UsageError
from paceline.job import JobRef
from paceline.plan.cost_model import exposed_without_layers_s
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.reader import read_steps
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.schema import RunResult
from paceline.telemetry.steps import StepRecord

FEWEST_STEPS = 5
WARM_UP = 0.1
"""The first share of the steps is left out: caches and allocators are cold then."""


def recorded_job(path: Path) -> tuple[JobRef, str]:
    """The job and the strategy of a recorded run; raises UsageError where they cannot be had."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UsageError(f"--calibrate {path}: no run lies there")
    config = json.loads(folder.config.read_text(encoding="utf-8"))
    reference = config["job"].get("job_ref")
    if reference is None:
        raise UsageError(f"--calibrate {path}: that run's job held live objects: name a job file")
    return JobRef.model_validate(reference), str(config["strategy"])


def calibrate_from_run(path: Path) -> Pool:
    """A pool with one machine for each worker of a run that was recorded step by step."""
    folder = RunFolder(path)
    if not folder.result.exists():
        raise UsageError(f"--calibrate {path}: no finished run lies there")
    result = folder.read_result()
    if result.get("virtual"):
        raise UsageError(f"--calibrate {path}: that run was virtual: its machines are in {path}")
    workers = int(result["workers"])
    steps = [read_warm_steps(path, worker) for worker in range(workers)]
    few = [w for w, s in enumerate(steps) if len(s) < FEWEST_STEPS]
    if few:
        raise UsageError(
            f"--calibrate {path}: worker {few[0]} has {len(steps[few[0]])} recorded steps, "
            f"at least {FEWEST_STEPS} are needed"
        )
    model = str(result["model"])
    hosts = tuple(
        Host(
            host=f"worker-{worker}",
            cores=64,  # What the processes did to each other is in the figures already.
            measured={model: fit_step(mine)},
            jitter=Jitter(cv=min(2.0, coefficient_of_variation(mine))),
        )
        for worker, mine in enumerate(steps)
    )
    pool = Pool(
        name=f"calibrated from {path.name}",
        hosts=hosts,
        link=Link(mbit_s=float("inf"), latency_ms=0.0),
    )
    return pool.model_copy(update=fit_exchange(result, result["strategy"], steps))


def read_warm_steps(path: Path, worker: int) -> list[StepRecord]:
    """Returns the single steps of a worker without its warm-up."""
    rows = read_steps(path, worker)
    return rows[int(WARM_UP * len(rows)) :]


def fit_step(steps: list[StepRecord]) -> StepCost:
    """A line through seconds over samples; with shares of one size, all of it by the sample."""
    pairs = [(s.samples, s.compute_s) for s in steps if s.samples > 0]
    update_s = trimmed_mean([s.optimizer / 1e6 for s in steps])
    sizes = {n for n, _ in pairs}
    if max(sizes) >= 2 * min(sizes):
        slope, fixed = statistics.linear_regression([n for n, _ in pairs], [s for _, s in pairs])
        if slope > 0 and fixed >= 0:
            return StepCost(fixed_s=fixed, per_sample_s=slope, update_s=update_s)
    per_sample = trimmed_mean([s / n for n, s in pairs])
    return StepCost(fixed_s=0.0, per_sample_s=per_sample, update_s=update_s)


def measure_shares(path: Path, workers: int) -> list[tuple[float, float]] | None:
    """Each worker's usual share and its seconds; None of a run too short to learn from."""
    steps = [read_warm_steps(path, worker) for worker in range(workers)]
    if any(len(mine) < FEWEST_STEPS for mine in steps):
        return None
    return [measure_share(mine) for mine in steps]


def measure_share(steps: list[StepRecord]) -> tuple[float, float]:
    """A worker's usual share of a batch, and the seconds that it computes for it."""
    worked = [s for s in steps if s.samples > 0]
    return (
        statistics.fmean(s.samples for s in worked),
        trimmed_mean([s.compute_s for s in worked]),
    )


def trim_outliers(values: list[float]) -> list[float]:
    """In order, and without the longest and the shortest fiftieth."""
    each = sorted(values)
    edge = len(each) // 50
    return each[edge : len(each) - edge] or each


def trimmed_mean(values: list[float]) -> float:
    """A mean, not a median: long steps take time that a run's rate shows."""
    return statistics.fmean(trim_outliers(values))


def coefficient_of_variation(steps: list[StepRecord]) -> float:
    """Standard deviation over mean of the seconds a sample."""
    kept = trim_outliers([s.compute_s / s.samples for s in steps if s.samples > 0])
    mean = statistics.fmean(kept)
    return statistics.pstdev(kept) / mean if mean > 0 else 0.0


def fit_exchange(
    result: RunResult, strategy: str, steps: list[list[StepRecord]]
) -> dict[str, float]:
    """How fast processes exchange, from the steps under the run's first strategy."""
    workers = len(steps)
    first = parse_strategy(strategy).phases[0]
    if workers < 2 or not result.get("parameter_bytes"):
        return {}
    nbytes = float(result["parameter_bytes"] or 0)
    until = result["switches"][0]["samples"] if result["switches"] else float("inf")
    per_epoch = result["history"][0]["samples"] if result["history"] else float("inf")
    mine = [[s for s in worker if s.epoch * per_epoch + s.start < until] for worker in steps]
    if not all(mine):
        return {}
    if isinstance(first, AllReduce):
        # The least of an exchange is what it takes when nobody has to be waited for.
        least = [min(s.comm_exposed for s in same) / 1e6 for same in zip(*mine, strict=False)]
        exposed = max(1e-9, statistics.median(least))
        busy = statistics.median(s.compute_s for worker in mine for s in worker)
        whole = total_exchange_s(exposed, busy, nbytes, first.bucket_mb * (1 << 20))
        return {"collective_gb_s": 2 * (workers - 1) / workers * nbytes / whole / 1e9}
    if isinstance(first, ParameterServer):
        each = [(s.comm_exposed + s.queue) / 1e6 for worker in mine for s in worker]
        seconds = max(1e-9, statistics.median(each))
        return {"transfer_gb_s": 2 * nbytes / seconds / 1e9}
    return {}


def total_exchange_s(exposed: float, busy: float, nbytes: float, bucket_bytes: float) -> float:
    """The whole exchange of which so much was not hidden behind the backward pass."""
    low, high = exposed, exposed + busy
    for _ in range(50):
        middle = (low + high) / 2
        seen = exposed_without_layers_s(middle, busy, nbytes, bucket_bytes)
        low, high = (middle, high) if seen < exposed else (low, middle)
    return high
