"""A virtual run from beginning to end: check, play, sum up; the same folder as a real run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Pool
from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.compare import workers_for
from paceline.launch.run import (
    RunOptions,
    check_sizes,
    conclude,
    describe_job,
    make_plan,
    read_memory,
    refer_to,
    versions,
)
from paceline.launch.supervisor import Outcome
from paceline.plan.cost import Workload, with_stand_in
from paceline.protocol.policies import make_policy
from paceline.specs.strategy import Strategy
from paceline.specs.trouble import Trouble
from paceline.telemetry.folder import EventWriter, RunFolder, write_json
from paceline.telemetry.notes import NoteKeeper
from paceline.telemetry.result import make_result
from paceline.twin.fleet import Fleet
from paceline.twin.learner import Costs, Learner
from paceline.twin.timeline import Timeline
from paceline.twin.world import World

DEPTHS = ("learn", "cost")
SHOW_S = 0.5


@dataclass(frozen=True, kw_only=True)
class TwinOptions:
    """How to play, apart from what and by which strategy."""

    out: Path
    pool: Pool
    workers: int | None = None
    """As many as the pool has places for, unless told."""
    depth: str = "learn"
    troubles: tuple[Trouble, ...] = ()
    threads: int | None = None
    force: bool = False
    start_from: Path | None = None
    keep_checkpoints: int = 2
    labels: Mapping[str, str] = field(default_factory=dict)
    show: Callable[[str, dict[str, Any]], None] = field(default=lambda kind, facts: None)

    def __post_init__(self) -> None:
        if self.depth not in DEPTHS:
            raise UsageError(f"--depth is {self.depth!r}: known: {', '.join(DEPTHS)}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}: at least one is needed")
        places = len(self.pool.slots)
        if self.workers is not None and not 1 <= self.workers <= places:
            raise UsageError(
                f"--workers is {self.workers}, but the cluster has places for 1 to {places}"
            )

    @property
    def count(self) -> int:
        return self.workers if self.workers is not None else len(self.pool.slots)


def run_twin(job: Job | JobRef, strategy: Strategy, options: TwinOptions) -> dict[str, Any]:
    """Play a job and return its result; raises as a real run does."""
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    workers = workers_for(strategy, options.count)
    check_sizes(resolved.batch, strategy, workers)
    check_servers(strategy, workers)
    plan = make_plan(resolved, strategy, workers)
    folder = RunFolder(options.out)
    memory = read_memory(options.start_from) if options.start_from is not None else None
    # All that can be the user's mistake comes before anything is written or replaced.
    work, learner, splits = prepare(resolved, workers, options, folder)
    work = with_stand_in(work, options.pool.hosts[0])
    make_policy(
        strategy,
        workers=workers,
        samples_per_epoch=work.samples,
        epochs=work.epochs,
        batch=work.batch,
        schedule=plan.schedule,
    )
    troubles = tuple(t for t in options.troubles if t.worker < workers)
    folder.prepare(force=options.force, resume=False)
    config = {
        "format": 1,
        "strategy": str(strategy),
        "workers": workers,
        "servers": plan.servers,
        "troubles": [t.to_plain() for t in troubles],
        "job": describe_job(resolved, refer_to(job, resolved)),
        "labels": dict(options.labels),
        "versions": versions(),
        "virtual": True,
        "depth": options.depth,
        "pool": options.pool.to_plain(),
    }
    write_json(folder.config, config)
    writer = EventWriter(folder.events("run"))
    keeper = NoteKeeper(writer, options.show)
    keeper.started(config)
    timeline = Timeline(float(memory["elapsed_s"]) if memory is not None else 0.0)
    fleet = Fleet(
        options.pool,
        workers,
        work,
        timeline,
        seed=resolved.seed,
        troubles=troubles,
        servers=plan.servers,
    )
    world = World(
        plan,
        fleet,
        work,
        learner,
        timeline,
        note=keeper.note,
        model_path=folder.model if options.depth == "learn" else None,
        memory=memory,
        splits=splits,
    )
    _show_progress(world, options.show)
    end = world.run()
    outcome = Outcome(end.status, end.error, timeline.now, world.coordinator, end.usage)
    keeper.ended(end.status, end.error, timeline.now)
    writer.close()
    result = make_result(config, outcome, folder, virtual=True)
    write_json(folder.result, result)
    return conclude(result, outcome, folder)


def play_instead(pool: Pool) -> Callable[[Job | JobRef, Strategy, RunOptions], dict[str, Any]]:
    """A way to run in virtual time what was asked for on real processes."""

    def run(job: Job | JobRef, strategy: Strategy, options: RunOptions) -> dict[str, Any]:
        return run_twin(
            job,
            strategy,
            TwinOptions(
                out=options.out,
                pool=pool,
                workers=min(options.workers, len(pool.slots)),
                troubles=options.troubles,
                threads=options.threads,
                force=options.force,
                start_from=options.start_from,
                keep_checkpoints=options.keep_checkpoints,
                labels=options.labels,
                show=options.show,
            ),
        )

    return run


def check_servers(strategy: Strategy, workers: int) -> None:
    servers = strategy.servers_for(workers)
    if servers > workers:
        raise UsageError(
            f"{strategy} needs {servers} servers, but the cluster has {workers} machines: "
            "fewer servers, or more machines"
        )


def prepare(
    job: Job, workers: int, options: TwinOptions, folder: RunFolder
) -> tuple[Workload, Learner, tuple[str, ...]]:
    """Count the job's work, and make whoever learns from it."""
    import torch

    from paceline.twin.workload import measure_workload
    from paceline.worker.build import read_data

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # One process computes for all virtual workers, so that rows are leased one by one.
    tables = read_data(job.model_copy(update={"shard": "sample"}))
    work = measure_workload(job, tables)
    if options.depth == "cost":
        return work, Costs(), tables.splits
    from paceline.twin.training import Training

    training = Training(
        job, tables, workers, checkpoints=folder.checkpoints, keep=options.keep_checkpoints
    )
    if options.start_from is not None:
        training.begin_from(options.start_from)
    return work, training, tables.splits


def _show_progress(world: World, show: Callable[[str, dict[str, Any]], None]) -> None:
    """People see the run go on in their own time; the folder knows virtual time alone."""
    due = time.monotonic() + SHOW_S

    def watch(now: float) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + SHOW_S
        history = world.coordinator.history
        show(
            "progress",
            {
                "t": now,
                "epoch": history.epoch,
                "samples": history.samples,
                "updates": history.updates,
                "loss": history.tally.loss,
                "strategy": str(world.plan.strategy.phases[history.phase]),
            },
        )

    world.watchers.append(watch)
