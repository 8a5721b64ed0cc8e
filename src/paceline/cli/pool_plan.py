"""Plan of a job on a pool: which machines to use, what to expect, and what was learned."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.cluster.pool import Host, Pool
    from paceline.job import JobRef
    from paceline.plan.estimate import Estimate
    from paceline.plan.pool_arrays import PoolArrays
    from paceline.specs.strategy import Strategy


def plan_on_pool(
    path: Path,
    pool: Pool,
    hosts: tuple[Host, ...],
    reference: JobRef,
    strategy: Strategy | None,
    *,
    choosing: bool,
    objective: str = "time",
) -> PoolPlan:
    """Estimates the job on the pool, corrected by the measurements of earlier runs there."""
    from paceline.plan.run_log import calibrate_from_log, history_path, read_history
    from paceline.plan.search import parse_objective, search, search_strategy
    from paceline.twin.workload import workload_of_job

    job = reference.resolve()
    job.check()
    records = read_history(history_path(path))
    # The cost model covers one worker per machine.
    single = choosing or strategy is None
    used = [h.model_copy(update={"workers": 1}) for h in hosts] if single else list(hosts)
    smaller = pool.model_copy(update={"hosts": tuple(used)})
    machines = calibrate_from_log(smaller, workload_of_job(job), records)
    target = parse_objective(objective, None, None)
    plain = None
    all_machines = tuple(range(len(machines.hosts)))
    best: Estimate | None = None
    if single:
        from paceline.plan.explanation import plan_to_json

        if not choosing:
            found = search_strategy(machines, target)
        elif strategy is not None:
            found = search(
                machines, target, [str(strategy)], allow_single_host=_allows_one_worker(strategy)
            )
        else:
            found = search(machines, target)
        best = found.chosen
        plain = plan_to_json(machines, found, target)
    earlier = sum(r.model == machines.work.model for r in records)
    return PoolPlan(
        path=path,
        machines=machines,
        chosen=best.machines if best is not None else all_machines,
        best=best,
        plain=plain,
        earlier=earlier,
    )


def _allows_one_worker(strategy: Strategy) -> bool:
    try:
        strategy.check_workers(1)
    except UsageError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Machines chosen from a pool, and the expected time on them."""

    path: Path
    machines: PoolArrays
    chosen: tuple[int, ...]
    best: Estimate | None
    plain: dict[str, Any] | None
    earlier: int
    """Number of earlier runs of this model on this pool."""

    @property
    def hosts(self) -> list[Host]:
        return [self.machines.hosts[place] for place in self.chosen]

    @property
    def strategy(self) -> Strategy:
        from paceline.strategies.registry import parse_strategy

        assert self.best is not None
        return parse_strategy(self.best.strategy)

    def show(self) -> None:
        from paceline.cli.plan import print_corrections, show_plan

        assert self.plain is not None
        show_plan(self.plain)
        print_corrections(self.earlier)

    def find_servers(self, strategy: Strategy) -> list[Host]:
        from paceline.plan.search import choose_server_hosts

        count = strategy.servers_for(len(self.chosen))
        places = choose_server_hosts(self.machines, self.chosen, count)
        return [self.machines.hosts[place] for place in places]

    def predict(self, strategy: Strategy) -> dict[str, object] | None:
        """Returns None outside the cost model: several phases, or workers that share a machine."""
        import numpy as np

        from paceline.plan.estimate import estimate

        if len(strategy.phases) > 1 or any(host.workers > 1 for host in self.hosts):
            return None
        found = estimate(self.machines, np.array(self.chosen), strategy)
        return {
            "step_s": found.step_s,
            "seconds": found.seconds,
            "seconds_interval": list(found.interval),
        }

    def remember(self, out: Path, seats: list[Host], result: Mapping[str, Any]) -> None:
        """Prints prediction and measurement, and records the run for later plans."""
        from paceline.plan.run_log import (
            LoggedRun,
            WorkerTiming,
            add_record,
            describe_prediction_error,
            history_path,
        )
        from paceline.twin.calibration import measure_shares

        actual = result["predicted"]
        if actual is None:
            return
        line = describe_prediction_error(actual, result)
        if line is None:
            return
        print(line)
        shares = measure_shares(out, len(seats))
        if shares is None:
            return  # The run was too short to learn from.
        record = LoggedRun(
            model=self.machines.work.model,
            batch=self.machines.work.batch,
            strategy=str(result["strategy"]),
            machines=tuple(host.host for host in seats),
            work=tuple(
                WorkerTiming(host.host, samples, busy_s)
                for host, (samples, busy_s) in zip(seats, shares, strict=True)
            ),
            step_s=actual["actual_step_s"],
            predicted_step_s=actual["step_s"],
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        path = history_path(self.path)
        try:
            add_record(path, record)
        except OSError as error:
            print(
                f"paceline: {path} cannot be written ({error.strerror}); later plans will not use "
                "this run",
                file=sys.stderr,
            )
