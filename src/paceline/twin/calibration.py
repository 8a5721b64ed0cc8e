"""Fits a pool to a recorded run: step times per worker, and the cost of an exchange."""

import json
import statistics
from pathlib import Path

from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.errors import UsageError
from paceline.job import JobRef
from paceline.plan.facet import CostFacet, RecordedStep
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import cost, parse_strategy
from paceline.telemetry.reader import read_steps
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.schema import RunResult
from paceline.telemetry.steps import StepRecord

MIN_STEPS = 5
WARM_UP_FRACTION = 0.1
"""Fraction of the steps at the start that is excluded, because caches are cold."""


def recorded_job(path: Path) -> tuple[JobRef, str]:
    """Returns job and strategy of a recorded run. Raises UsageError if they are unavailable."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UsageError(f"--calibrate {path}: does not contain a run")
    config = json.loads(folder.config.read_text(encoding="utf-8"))
    reference = config["job"].get("job_ref")
    if reference is None:
        raise UsageError(
            f"--calibrate {path}: the job of that run contains live objects; use a job file"
        )
    return JobRef.model_validate(reference), str(config["strategy"])


def calibrate_from_run(path: Path) -> Pool:
    """Returns a pool with one machine per worker of a run with recorded steps."""
    folder = RunFolder(path)
    if not folder.result.exists():
        raise UsageError(f"--calibrate {path}: does not contain a finished run")
    result = folder.read_result()
    if result.get("virtual"):
        raise UsageError(f"--calibrate {path}: that run was simulated; its machines are in {path}")
    steps = [read_warm_steps(path, worker) for worker in range(int(result["workers"]))]
    for worker, rows in enumerate(steps):
        if len(rows) < MIN_STEPS:
            raise UsageError(
                f"--calibrate {path}: worker {worker} has {len(rows)} recorded steps, but at least "
                f"{MIN_STEPS} are required"
            )
    hosts = tuple(
        Host(
            host=f"worker-{worker}",
            cores=64,  # The measurements already include contention.
            measured={str(result["model"]): fit_step(rows)},
            jitter=Jitter(cv=min(2.0, coefficient_of_variation(rows))),
        )
        for worker, rows in enumerate(steps)
    )
    return Pool(
        name=f"calibrated from {path.name}",
        hosts=hosts,
        link=Link(mbit_s=float("inf"), latency_ms=0.0),
    ).model_copy(update=fit_exchange(result, steps))


def read_warm_steps(path: Path, worker: int) -> list[StepRecord]:
    """Returns the single steps of a worker without its warm-up."""
    rows = read_steps(path, worker)
    return rows[int(WARM_UP_FRACTION * len(rows)) :]


def fit_step(steps: list[StepRecord]) -> StepCost:
    """Fits seconds against samples; with equal shares, all time is attributed to samples."""
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
    """Returns each worker's mean share of a batch and compute time in seconds.

    None if the run is too short.
    """
    steps = [read_warm_steps(path, worker) for worker in range(workers)]
    if any(len(rows) < MIN_STEPS for rows in steps):
        return None
    worked = [[s for s in rows if s.samples > 0] for rows in steps]
    return [
        (statistics.fmean(s.samples for s in rows), trimmed_mean([s.compute_s for s in rows]))
        for rows in worked
    ]


def trim_outliers(values: list[float]) -> list[float]:
    """Returns sorted values without the lowest and the highest 2%."""
    ordered = sorted(values)
    edge = len(ordered) // 50
    return ordered[edge : len(ordered) - edge] or ordered


def trimmed_mean(values: list[float]) -> float:
    """Returns the mean, not the median, because long steps affect the throughput."""
    return statistics.fmean(trim_outliers(values))


def coefficient_of_variation(steps: list[StepRecord]) -> float:
    """Returns the standard deviation divided by the mean of the seconds per sample."""
    kept = trim_outliers([s.compute_s / s.samples for s in steps if s.samples > 0])
    mean = statistics.fmean(kept)
    return statistics.pstdev(kept) / mean if mean > 0 else 0.0


def fit_exchange(result: RunResult, steps: list[list[StepRecord]]) -> dict[str, float]:
    """Returns pool fields for the exchange, fitted to the steps under the run's first strategy."""
    spec = parse_strategy(result["strategy"]).phases[0]
    if len(steps) < 2 or not result.get("parameter_bytes"):
        return {}
    until = result["switches"][0]["samples"] if result["switches"] else float("inf")
    per_epoch = result["history"][0]["samples"] if result["history"] else float("inf")
    recorded = [
        [
            RecordedStep(s.compute_s, (s.comm_exposed + s.queue) / 1e6)
            for s in worker
            if s.epoch * per_epoch + s.start < until
        ]
        for worker in steps
    ]
    if not all(recorded):
        return {}
    facet: CostFacet[Strategy] = cost(spec)
    return facet.calibrate(spec, recorded, float(result["parameter_bytes"] or 0))
