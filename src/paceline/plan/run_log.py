"""Log of measured runs next to the pool file, used to correct later plans.

One line of JSON per run in `<pool>.history.jsonl`. Two corrections are derived from the last few
runs of the same model: the compute time of a machine relative to the cost model, and then the step
time of a strategy. Both are medians, so that a single outlier does not dominate.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cluster.pool import Host, Pool, StepCost
from paceline.errors import SpecError, UsageError
from paceline.plan.cost_model import Workload, step_time_on
from paceline.plan.estimate import correction_key, estimate
from paceline.plan.learning_curve import Points
from paceline.plan.pool_arrays import Correction, PoolArrays
from paceline.strategies.registry import parse_strategy

MAX_RUNS = 5
"""Number of recent runs that are used, because machines change."""
MIN_RUNS_FOR_SPREAD = 3
"""With at least this many runs, the spread of past errors is used as the interval."""
MIN_SPREAD = 0.05


@dataclass(frozen=True)
class WorkerTiming:
    """A worker's mean share of a batch and its compute time in seconds."""

    host: str
    samples: float
    busy_s: float


@dataclass(frozen=True)
class LoggedRun:
    """One run of the log."""

    model: str
    batch: int
    strategy: str
    machines: tuple[str, ...]
    work: tuple[WorkerTiming, ...]
    step_s: float
    predicted_step_s: float
    started: str
    data: str | None = None
    epochs: int | None = None
    startup_s: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    """Samples and validation accuracy after each epoch."""

    def is_of(self, work: Workload) -> bool:
        """Returns True for a run of the same model; its size depends on the data, if known."""
        return self.model == work.model and self.data in (None, work.data)


def history_path(pool: Path) -> Path:
    """Returns the path of the log, next to the pool file, so that they can be copied together."""
    return pool.with_name(f"{pool.stem}.history.jsonl")


def read_history(path: Path) -> list[LoggedRun]:
    """Returns all runs, oldest first. Raises UsageError for an invalid line."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            plain = json.loads(line)
            work = tuple(WorkerTiming(**part) for part in plain.pop("work"))
            curve = tuple((int(samples), float(acc)) for samples, acc in plain.get("curve", ()))
            tuples = {"machines": tuple(plain["machines"]), "work": work, "curve": curve}
            record = LoggedRun(**{**plain, **tuples})
            if not all(w.samples > 0 and w.busy_s > 0 for w in work) or not record.step_s > 0:
                raise ValueError("times and samples must be greater than 0")
            records.append(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{path}, line {number} is not a run record ({error}); remove the line"
            ) from None
    return records


def add_record(path: Path, record: LoggedRun) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def calibrate_from_log(pool: Pool, work: Workload, records: Sequence[LoggedRun]) -> PoolArrays:
    """Returns the pool's machines for this job, corrected by past runs of its model."""
    same_model = [r for r in records if r.is_of(work)]
    hosts = tuple(_correct(host, pool, work, same_model) for host in pool.hosts)
    machines = PoolArrays(pool.model_copy(update={"hosts": hosts}), work)
    groups: dict[tuple[str, frozenset[str] | None], list[LoggedRun]] = {}
    for record in same_model:
        kind = _kind(record)
        for names in (None, frozenset(record.machines)):
            if kind is not None:
                groups.setdefault((kind, names), []).append(record)
    machines.corrections = {
        key: correction
        for key, group in groups.items()
        if (correction := _compare(machines, group)) is not None
    }
    startups = [r.startup_s for r in same_model if r.startup_s is not None][-MAX_RUNS:]
    if startups:
        machines.startup_s = statistics.median(startups)
    return machines


def logged_curves(records: Sequence[LoggedRun], work: Workload) -> list[Points]:
    """Returns the learning curves of the last runs of the same job by exact strategies."""
    same = (work.model, work.data, work.batch, work.epochs)
    return [
        record.curve
        for record in records
        if record.curve
        and (record.model, record.data, record.batch, record.epochs) == same
        and _kind(record) is not None
        and parse_strategy(record.strategy).exact
    ][-MAX_RUNS:]


def _correct(host: Host, pool: Pool, work: Workload, records: Sequence[LoggedRun]) -> Host:
    """Scales the modeled step time of a machine to the measured one."""
    timings = [t for record in records for t in record.work if t.host == host.host][-MAX_RUNS:]
    if not timings:
        return host
    base = step_time_on(host, work, pool)
    factor = host.speed * statistics.median(t.busy_s / base.step_s(t.samples) for t in timings)
    cost = StepCost(
        fixed_s=base.fixed_s * factor,
        per_sample_s=base.per_sample_s * factor,
        update_s=base.update_s * host.speed,
        gradient_mb=base.gradient_mb,
    )
    return host.model_copy(update={"measured": {**host.measured, work.model: cost}})


def _compare(machines: PoolArrays, records: Sequence[LoggedRun]) -> Correction | None:
    """Compares measured step times with those predicted for the corrected machines."""
    places = {host.host: place for place, host in enumerate(machines.hosts)}
    ratios = []
    for record in records:
        if not set(record.machines) <= set(places):
            continue
        arrays = PoolArrays(machines.pool, dataclasses.replace(machines.work, batch=record.batch))
        chosen = np.array(sorted(places[name] for name in record.machines))
        predicted = estimate(arrays, chosen, parse_strategy(record.strategy))
        ratios.append(record.step_s / predicted.step_s)
    ratios = ratios[-MAX_RUNS:]
    if not ratios:
        return None
    median = statistics.median(ratios)
    doubt = None
    if len(ratios) >= MIN_RUNS_FOR_SPREAD:
        doubt = max(MIN_SPREAD, max(abs(r / median - 1) for r in ratios))
    return Correction(factor=median, relative_error=doubt)


def _kind(record: LoggedRun) -> str | None:
    """Returns the correction key; None if the strategy is not registered in this process."""
    try:
        strategy = parse_strategy(record.strategy)
    except SpecError:
        return None
    return correction_key(strategy, len(record.machines))


def describe_prediction_error(
    predicted: Mapping[str, Any], result: Mapping[str, Any]
) -> str | None:
    """Compares prediction and measurement in one line; None for a run without measurements."""
    actual = result["predicted"]
    if not actual or actual["actual_step_s"] is None:
        return None
    step = 100 * (actual["actual_step_s"] / predicted["step_s"] - 1)
    total = 100 * (actual["actual_seconds"] / predicted["seconds"] - 1)
    return (
        f"predicted {predicted['step_s']:.4g} s per step, actual {actual['actual_step_s']:.4g} s "
        f"({step:+.1f}%); predicted {predicted['seconds']:.4g} s in total, "
        f"actual {actual['actual_seconds']:.4g} s ({total:+.1f}%)"
    )
