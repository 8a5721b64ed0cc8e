"""Runs simulations: validates, simulates and summarizes; writes the same folders as real runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.pool import Pool
from paceline.errors import PacelineError, UsageError
from paceline.job import Job, JobRef
from paceline.launch.compare_runs import clear_runs, label_as_given, with_job_fields
from paceline.launch.environment import versions
from paceline.launch.run import (
    check_sizes,
    describe_job,
    job_reference,
    job_settings,
    make_plan,
    raise_unless_done,
    read_coordinator_state,
)
from paceline.launch.run_options import RunOptions
from paceline.launch.supervisor import RunOutcome
from paceline.plan.cost_model import Workload, with_measured_gradient_size
from paceline.protocol.switch_policy import RunHorizon
from paceline.report.comparison import Comparison, write_comparison
from paceline.report.terminal import terminal_reporter
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import make_switch_policy, parse_strategy, simulation
from paceline.telemetry.event_log import EventLog, OnEvent, ignore_notice
from paceline.telemetry.events import RunProgress
from paceline.telemetry.result import make_result
from paceline.telemetry.run_folder import EventWriter, RunFolder, write_json
from paceline.telemetry.schema import RunConfig, RunResult
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

DEPTHS = ("learn", "cost")
PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class TwinOptions:
    """Settings of a simulation, except job and strategy."""

    out: Path
    pool: Pool
    workers: int | None = None
    """Default: one per slot of the pool."""
    depth: str = "learn"
    slowdowns: tuple[InjectedSlowdown, ...] = ()
    threads: int | None = None
    force: bool = False
    start_from: Path | None = None
    keep_checkpoints: int = 2
    labels: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Options of the command that started the run, recorded in run.json."""
    show: OnEvent = ignore_notice

    def __post_init__(self) -> None:
        if self.depth not in DEPTHS:
            raise UsageError(f"--depth must be {' or '.join(DEPTHS)}, got {self.depth!r}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {self.threads}")
        slots = len(self.pool.slots)
        if self.workers is not None and not 1 <= self.workers <= slots:
            raise UsageError(
                f"--workers must be 1 to {slots}, got {self.workers}: "
                f"the cluster has {slots} worker slots"
            )

    @property
    def count(self) -> int:
        return self.workers if self.workers is not None else len(self.pool.slots)


def run_twin(job: Job | JobRef, strategy: Strategy, options: TwinOptions) -> RunResult:
    """Simulates a job and returns its result. Raises like a real run."""
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    workers = check_workers(resolved, strategy, options)
    for phase in strategy.phases:
        simulation(phase)  # Raises UsageError where a strategy has no simulate facet.
    plan = make_plan(resolved, strategy, workers)
    folder = RunFolder(options.out)
    memory = read_coordinator_state(options.start_from) if options.start_from is not None else None
    # All usage errors are raised before anything is written or replaced.
    work, weights = prepare_twin(resolved, workers, options, folder)
    work = with_measured_gradient_size(work, options.pool.hosts[0])
    make_switch_policy(
        strategy,
        RunHorizon(
            workers=workers,
            samples_per_epoch=work.samples,
            epochs=work.epochs,
            batch=work.batch,
            schedule=plan.schedule,
        ),
    )
    slowdowns = tuple(t for t in options.slowdowns if t.worker < workers)
    folder.prepare(force=options.force, resume=False)
    facts = describe_job(resolved, job_reference(job, resolved))
    config: RunConfig = {
        "format": 1,
        "strategy": str(strategy),
        "workers": workers,
        "servers": plan.servers,
        "troubles": [t.to_plain() for t in slowdowns],
        "job": facts,
        "settings": {
            **job_settings(facts),
            "strategy": str(strategy),
            "workers": workers,
            "threads": options.threads,
            "depth": options.depth,
            **options.settings,
        },
        "labels": dict(options.labels),
        "versions": versions(),
        "virtual": True,
        "depth": options.depth,
        "pool": options.pool.to_plain(),
    }
    write_json(folder.config, config)
    writer = EventWriter(folder.events("run"))
    event_log = EventLog(writer, options.show)
    event_log.started(strategy=str(strategy), workers=workers, servers=plan.servers)
    simulator = Simulator(
        plan,
        options.pool,
        work,
        weights,
        seed=resolved.seed,
        slowdowns=slowdowns,
        note=event_log.record,
        model_path=folder.model if options.depth == "learn" else None,
        memory=memory,
    )
    _show_progress(simulator, options.show)
    end = simulator.run()
    seconds = simulator.timeline.now
    outcome = RunOutcome(end.status, end.error, seconds, simulator.coordinator, end.usage)
    event_log.ended(end.status, end.error, seconds)
    writer.close()
    result = make_result(config, outcome, folder, virtual=True)
    write_json(folder.result, result)
    return raise_unless_done(result, outcome, folder)


def run_in_twin(pool: Pool) -> Callable[[Job | JobRef, Strategy, RunOptions], RunResult]:
    """Returns a function that simulates a run with the options of a real run."""

    def run(job: Job | JobRef, strategy: Strategy, options: RunOptions) -> RunResult:
        return run_twin(
            job,
            strategy,
            TwinOptions(
                out=options.out,
                pool=pool,
                workers=min(options.workers, len(pool.slots)),
                slowdowns=options.slowdowns,
                threads=options.threads,
                force=options.force,
                start_from=options.from_checkpoint,
                keep_checkpoints=options.keep_checkpoints,
                labels=options.labels,
                settings=options.settings,
                show=options.on_event,
            ),
        )

    return run


def run_labelled(
    job: Job | JobRef, strategy: Strategy, options: TwinOptions, *, progress: bool
) -> RunResult:
    with terminal_reporter(f"{strategy} (virtual)", quiet=not progress) as show:
        return run_twin(job, strategy, dataclasses.replace(options, show=show))


def compare_twins(
    job: Job | JobRef,
    strategies: Sequence[Strategy | str],
    options: TwinOptions,
    seeds: int = 1,
    *,
    progress: bool = False,
) -> Comparison:
    """Simulates every strategy with every seed; failed and diverged runs are included."""
    folder = options.out
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    chosen = [parse_strategy(strategy) for strategy in strategies]
    for strategy in chosen:
        check_workers(resolved, strategy, options)
    if (folder / "comparison.json").exists() and not options.force:
        raise UsageError(
            f"--out {folder} already contains a comparison; choose a new directory, or use "
            "--force to overwrite it"
        )
    clear_runs(folder)
    results: list[RunResult] = []
    for seed in range(resolved.seed, resolved.seed + seeds):
        for number, strategy in enumerate(chosen):
            out = folder / f"{number + 1}-{strategy.name}-seed{seed}"
            labels = {**options.labels, **label_as_given(strategies[number], strategy)}
            run_options = dataclasses.replace(options, out=out, labels=labels)
            try:
                result = run_labelled(
                    with_job_fields(job, seed=seed), strategy, run_options, progress=progress
                )
            except UsageError:
                raise
            except PacelineError:
                result = RunFolder(out).read_result()
            results.append({**result, "dir": out.name})
    return write_comparison(folder / "comparison.json", results)


def check_workers(job: Job, strategy: Strategy, options: TwinOptions) -> int:
    """Returns the number of workers. Raises UsageError if the strategy cannot run on them."""
    workers = strategy.worker_count(options.count)
    check_sizes(job.batch, strategy, workers)
    servers = strategy.servers_for(workers)
    if servers > workers:
        raise UsageError(
            f"{strategy} needs {servers} servers, but the cluster has {workers} machines; "
            "use fewer servers or more machines"
        )
    return workers


def prepare_twin(
    job: Job, workers: int, options: TwinOptions, folder: RunFolder
) -> tuple[Workload, WeightsBackend]:
    """Counts the workload of a job and creates its weights backend."""
    import torch

    from paceline.twin.workload import count_workload
    from paceline.worker.job_builder import load_job_data

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # One process computes for all virtual workers, so rows are leased individually.
    tables = load_job_data(job.model_copy(update={"shard": "sample"}))
    work = count_workload(job, tables)
    if options.depth == "cost":
        return work, WeightsBackend()
    from paceline.twin.gradient_backend import GradientBackend

    training = GradientBackend(
        job, tables, workers, checkpoints=folder.checkpoints, keep=options.keep_checkpoints
    )
    if options.start_from is not None:
        training.load_checkpoint(options.start_from)
    return work, training


def _show_progress(simulator: Simulator, show: OnEvent) -> None:
    """Shows progress in real time; the run folder contains virtual time only."""
    due = time.monotonic() + PROGRESS_INTERVAL_S

    def watch(now: float) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + PROGRESS_INTERVAL_S
        history = simulator.coordinator.history
        show(
            RunProgress(
                t=now,
                epoch=history.epoch,
                samples=history.samples,
                updates=history.updates,
                loss=history.tally.loss,
            )
        )

    simulator.observers.append(watch)
