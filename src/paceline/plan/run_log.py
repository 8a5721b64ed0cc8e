"""What runs on a pool really took, kept beside the pool; later plans are corrected by it.

One line of JSON a run in `<pool>.history.jsonl`. Two things are learnt from it, each from the last
few runs of the same model: how long a machine computes for its share of a batch, beside what the
cost model says; and how long a step takes under a strategy once that is corrected. Medians, so that
one odd run does not decide.
"""

from __future__ import annotations

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
from paceline.plan.pool_arrays import Correction, PoolArrays
from paceline.strategies.registry import parse_strategy

LAST = 5
"""Runs that count: machines change, and old figures with them."""
CERTAIN = 3
"""From so many runs on the spread of past errors is the interval of a new prediction."""
LEAST_DOUBT = 0.05


@dataclass(frozen=True)
class WorkerTiming:
    """One worker's part of a run: its usual share of a batch and the seconds it computed."""

    host: str
    samples: float
    busy_s: float


@dataclass(frozen=True)
class LoggedRun:
    """One run, as a line of the history has it."""

    model: str
    batch: int
    strategy: str
    machines: tuple[str, ...]
    work: tuple[WorkerTiming, ...]
    step_s: float
    predicted_step_s: float
    started: str

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def history_path(pool: Path) -> Path:
    """Beside the pool, so that whoever copies or shares the pool can take it along."""
    return pool.with_name(f"{pool.stem}.history.jsonl")


def read_history(path: Path) -> list[LoggedRun]:
    """All runs, oldest first; raises UsageError for a line that is none of ours."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            plain = json.loads(line)
            work = tuple(WorkerTiming(**part) for part in plain.pop("work"))
            record = LoggedRun(**{**plain, "machines": tuple(plain["machines"]), "work": work})
            if not all(w.samples > 0 and w.busy_s > 0 for w in work) or not record.step_s > 0:
                raise ValueError("figures must be above 0")
            records.append(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{path}, line {number} is no record of a run ({error}): remove the line"
            ) from None
    return records


def add_record(path: Path, record: LoggedRun) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(record.to_line() + "\n")


def calibrate_from_log(pool: Pool, work: Workload, records: Sequence[LoggedRun]) -> PoolArrays:
    """The pool's machines for this job, with what past runs of its model have taught."""
    mine = [r for r in records if r.model == work.model]
    hosts = tuple(_correct(host, pool, work, mine) for host in pool.hosts)
    machines = PoolArrays(pool.model_copy(update={"hosts": hosts}), work)
    kinds = {_kind(r) for r in mine}
    machines.corrections = {
        kind: found
        for kind in kinds
        if kind is not None and (found := _compare(machines, kind, mine)) is not None
    }
    return machines


def _correct(host: Host, pool: Pool, work: Workload, records: Sequence[LoggedRun]) -> Host:
    """Scale what the model says of this machine to what it took, at the shares it had."""
    if not any(done.host == host.host for record in records for done in record.work):
        return host
    base = step_time_on(host, work, pool)
    ratios = [
        done.busy_s / base.step_s(done.samples)
        for record in records
        for done in record.work
        if done.host == host.host
    ][-LAST:]
    factor = statistics.median(ratios) * host.speed
    cost = StepCost(
        fixed_s=base.fixed_s * factor,
        per_sample_s=base.per_sample_s * factor,
        update_s=base.update_s * host.speed,
        gradient_mb=_gradient_mb(host, work),
    )
    return host.model_copy(update={"measured": {**host.measured, work.model: cost}})


def _gradient_mb(host: Host, work: Workload) -> float | None:
    known = host.measured.get(work.model) or host.measured.get("any")
    return known.gradient_mb if known is not None else None


def _compare(machines: PoolArrays, kind: str, records: Sequence[LoggedRun]) -> Correction | None:
    """Steps as they were beside steps as the corrected machines would have them."""
    places = {host.host: place for place, host in enumerate(machines.hosts)}
    ratios = []
    for record in records:
        if _kind(record) != kind or not set(record.machines) <= set(places):
            continue
        then = PoolArrays(machines.pool, dataclasses.replace(machines.work, batch=record.batch))
        chosen = np.array(sorted(places[name] for name in record.machines))
        said = estimate(then, chosen, parse_strategy(record.strategy))
        ratios.append(record.step_s / said.step_s)
    ratios = ratios[-LAST:]
    if not ratios:
        return None
    middle = statistics.median(ratios)
    doubt = None
    if len(ratios) >= CERTAIN:
        doubt = max(LEAST_DOUBT, max(abs(r / middle - 1) for r in ratios))
    return Correction(factor=middle, relative_error=doubt)


def _kind(record: LoggedRun) -> str | None:
    """None for a strategy that this process does not know: its file was not named today."""
    try:
        strategy = parse_strategy(record.strategy)
    except SpecError:
        return None
    return correction_key(strategy, len(record.machines))


def describe_prediction_error(
    predicted: Mapping[str, Any], result: Mapping[str, Any]
) -> str | None:
    """Predicted beside actual, in one line; nothing for a run that was not measured."""
    actual = result["predicted"]
    if not actual or actual["actual_step_s"] is None:
        return None
    step = 100 * (actual["actual_step_s"] / predicted["step_s"] - 1)
    whole = 100 * (actual["actual_seconds"] / predicted["seconds"] - 1)
    return (
        f"predicted {predicted['step_s']:.4g} s a step, actual {actual['actual_step_s']:.4g} s "
        f"({step:+.1f} %); predicted {predicted['seconds']:.4g} s of training and evaluating, "
        f"actual {actual['actual_seconds']:.4g} s ({whole:+.1f} %)"
    )
