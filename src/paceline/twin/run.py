"""Runs simulations: validates, simulates and summarizes; writes the same folders as real runs."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from paceline.cluster.pool import Host, Pool
from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.compare_runs import compare_strategies
from paceline.launch.resume import read_coordinator_state
from paceline.launch.run import (
    Run,
    check_sizes,
    describe_job,
    describe_run,
    job_reference,
    make_plan,
    raise_unless_done,
)
from paceline.launch.run_options import RunOptions
from paceline.options import field_values
from paceline.plan.cost_model import Workload, with_measured_gradient_size
from paceline.protocol.switch_policy import RunHorizon
from paceline.report.comparison import Comparison
from paceline.report.progress import terminal_reporter
from paceline.specs.fault import parse_fault
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import make_switch_policy, simulation
from paceline.telemetry.result import RunOutcome, make_result
from paceline.telemetry.run_folder import EventLog, OnEvent, RunFolder, write_json
from paceline.telemetry.run_lock import locked_folder
from paceline.telemetry.schema import RunConfig, RunResult
from paceline.twin.faults import check_simulated_faults, inject_faults
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

DEPTHS = ("learn", "cost")
PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class TwinOptions(RunOptions):
    """Options of a simulated run; those of real processes, such as `pin`, have no effect."""

    pool: Pool
    workers: int = 0
    """0: one per worker slot of the pool."""
    servers_on: tuple[Host, ...] = ()
    """Machines of the servers, in turn. Default: those of the workers."""
    depth: str = "learn"

    def __post_init__(self) -> None:
        if self.depth not in DEPTHS:
            raise UsageError(f"--depth must be {' or '.join(DEPTHS)}, got {self.depth!r}")
        slots = len(self.pool.slots)
        if self.workers == 0:
            object.__setattr__(self, "workers", slots)
        if not 1 <= self.workers <= slots:
            raise UsageError(
                f"--workers must be 1 to {slots}, got {self.workers}: "
                f"the cluster has {slots} worker slots"
            )
        super().__post_init__()


def run_twin(job: Job | JobRef, strategy: Strategy, options: TwinOptions) -> RunResult:
    """Simulates a job and returns its result. Raises like a real run."""
    with locked_folder(options.out):
        return _run_twin(job, strategy, options)


def _run_twin(job: Job | JobRef, strategy: Strategy, options: TwinOptions) -> RunResult:
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    workers = strategy.worker_count(options.workers)
    check_twin_sizes(resolved.batch, strategy, workers, options.servers_on)
    for phase in strategy.phases:
        simulation(phase)  # Raises UsageError where a strategy has no simulate facet.
    plan = make_plan(resolved, strategy, workers)
    plan = dataclasses.replace(plan, min_workers=options.min_workers or 0)
    folder = RunFolder(options.out)
    checkpoint = options.from_checkpoint
    memory = read_coordinator_state(checkpoint) if checkpoint is not None else None
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
    faults = [parse_fault(text, workers, plan.servers) for text in options.faults]
    check_simulated_faults(faults, is_elastic=plan.is_elastic)
    folder.prepare(force=options.force, resume=False)
    facts = describe_job(resolved, job_reference(job, resolved))
    settings = {"threads": options.threads, "depth": options.depth, **options.settings}
    config: RunConfig = {
        **describe_run(plan, facts, slowdowns, options.labels, settings),
        "virtual": True,
        "depth": options.depth,
        "pool": options.pool.to_plain(),
    }
    write_json(folder.config, config)
    event_log = EventLog(folder.events("run"), options.on_event)
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
        servers_on=options.servers_on,
        restarts=options.restarts,
    )
    if faults:
        inject_faults(simulator, faults, event_log.record)
    _show_progress(simulator, options.on_event)
    end = simulator.run()
    seconds = simulator.timeline.now
    outcome = RunOutcome(end.status, end.error, seconds, simulator.coordinator, end.usage)
    event_log.ended(end.status, end.error, seconds)
    result = make_result(config, outcome, folder, virtual=True)
    write_json(folder.result, result)
    return raise_unless_done(result, outcome, folder)


def run_in_twin(pool: Pool, depth: str = "learn", servers_on: tuple[Host, ...] = ()) -> Run:
    """Returns a function that simulates a run with the options of a real run."""

    def run(job: Job | JobRef, strategy: Strategy, options: RunOptions) -> RunResult:
        values = field_values(options, RunOptions)
        values["workers"] = min(options.workers, len(pool.slots))
        twin = TwinOptions(**values, pool=pool, depth=depth, servers_on=servers_on)
        return run_twin(job, strategy, twin)

    return run


def run_labelled(
    job: Job | JobRef, strategy: Strategy, options: TwinOptions, *, progress: bool
) -> RunResult:
    with terminal_reporter(f"{strategy} (virtual)", quiet=not progress) as show:
        return run_twin(job, strategy, dataclasses.replace(options, on_event=show))


def compare_twins(
    job: Job | JobRef,
    strategies: Sequence[Strategy | str],
    options: TwinOptions,
    seeds: int = 1,
    *,
    progress: bool = False,
) -> Comparison:
    """Simulates every strategy with every seed; failed and diverged runs are included."""
    return compare_strategies(
        *(job, strategies, options),
        seeds=seeds,
        progress=progress,
        run=run_in_twin(options.pool, options.depth, options.servers_on),
        check=partial(check_twin_sizes, servers_on=options.servers_on),
    )


def check_twin_sizes(
    batch: int, strategy: Strategy, workers: int, servers_on: Sequence[Host] = ()
) -> None:
    """Raises UsageError if the strategy cannot run on this many simulated machines."""
    check_sizes(batch, strategy, workers)
    servers = strategy.servers_for(workers)
    if servers > workers and not servers_on:
        raise UsageError(
            f"{strategy} needs {servers} servers, but the cluster has {workers} machines; "
            "use fewer servers or more machines, or --servers-on"
        )


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
    if job.shard == "off":
        raise UsageError("shard off is not supported in simulated runs; remove it")
    tables = load_job_data(job.model_copy(update={"shard": "sample"}))
    work = count_workload(job, tables)
    if options.depth == "cost":
        return work, WeightsBackend()
    from paceline.twin.gradient_backend import GradientBackend

    training = GradientBackend(
        job, tables, workers, checkpoints=folder.checkpoints, keep=options.keep_checkpoints
    )
    if options.from_checkpoint is not None:
        training.load_checkpoint(options.from_checkpoint)
    return work, training


def _show_progress(simulator: Simulator, show: OnEvent) -> None:
    """Shows progress in real time; the run folder contains virtual time only."""
    due = time.monotonic() + PROGRESS_INTERVAL_S

    def watch(now: float) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + PROGRESS_INTERVAL_S
        show(simulator.coordinator.history.describe_progress(now))

    simulator.observers.append(watch)
