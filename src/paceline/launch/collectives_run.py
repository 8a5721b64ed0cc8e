"""Measures collectives among the workers of a launcher, with the processes of a training run."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UsageError
from paceline.launch.launcher import Launcher
from paceline.launch.settings import DEFAULT_TIMEOUT_S
from paceline.launch.supervisor import Supervisor
from paceline.protocol.measurement import MeasurementCoordinator
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder, ignore_notice
from paceline.worker.assignment import CollectivesPlan


@dataclass(frozen=True)
class MeasuredCollective:
    """The time of one collective: that of the slowest worker in the fastest round."""

    collective: str
    workers: int
    machines: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions:
    """Settings of a measurement."""

    workers: int
    sizes: tuple[int, ...]
    rounds: int
    out: Path
    force: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S


def run_collectives(launcher: Launcher, options: CollectivesOptions) -> list[MeasuredCollective]:
    """Returns one row per collective, number of workers and size.

    Raises UsageError if `out` contains a run, and RunFailed with the name of a worker that was
    lost, or made no progress for `timeout_s`.
    """
    folder = RunFolder(options.out)
    folder.prepare(force=options.force, resume=False)
    workers, timeout_s = options.workers, options.timeout_s
    plan = CollectivesPlan(sizes=options.sizes, rounds=options.rounds)
    supervisor = Supervisor(
        plan=RunSpec(strategy=parse_strategy("allreduce"), workers=workers),
        launcher=launcher,
        folder=folder,
        template={"strategy": "allreduce", "threads": 1, "collectives": plan, "telemetry": False},
        live=None,
        timeout_s=timeout_s,
        started_wall_s=time.time(),
        show=ignore_notice,
        memory=None,
        monitor=None,
        coordinator=MeasurementCoordinator,
    )
    outcome = launcher.run(supervisor.run)
    if outcome.status == "cancelled":
        raise KeyboardInterrupt
    if outcome.is_usage_error:
        raise UsageError(outcome.error or outcome.status)
    if outcome.status != "done":
        raise RunFailed(outcome.error or outcome.status, outcome.details)
    rows: list[dict[str, Any]] = outcome.coordinator.totals[0]["rows"]
    return [
        MeasuredCollective(
            row["collective"], row["workers"], row["machines"], row["bytes"], row["seconds"]
        )
        for row in rows
    ]
