"""Runs a job from start to end: check, start, supervise, summarize. The Python entry point."""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import Diverged, PacelineError, RunFailed, UsageError
from paceline.job import Job, JobRef
from paceline.launch.engines.local import LocalLauncher
from paceline.launch.live_monitor import LiveMonitor
from paceline.launch.recall import recall_corrections
from paceline.launch.remote_launcher import RemoteLauncher
from paceline.launch.resume import find_checkpoint, is_same_run, read_coordinator_state
from paceline.launch.run_options import RunOptions, new_run_name, usable_cores
from paceline.launch.settings import DEFAULT_TIMEOUT_S, RunSettings
from paceline.launch.succession import end_orphans, find_adoption
from paceline.launch.supervisor import Supervisor
from paceline.options import option_fields, settings_to_plain
from paceline.protocol.adaptive_batch import BatchRule
from paceline.protocol.run_spec import RunSpec
from paceline.specs.fault import parse_fault
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy, plugins_of
from paceline.telemetry.events import RunLengthKnown
from paceline.telemetry.result import RunOutcome, make_result
from paceline.telemetry.run_folder import (
    CollectivesNotice,
    EventLog,
    RunFolder,
    RunNotice,
    list_checkpoints,
    write_json,
)
from paceline.telemetry.run_lock import locked_folder
from paceline.telemetry.schema import RunConfig, RunResult


def train(
    job: Job | JobRef,
    strategy: Strategy | str = "allreduce",
    workers: int | None = None,
    *,
    out: str | Path | None = None,
    threads: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    resume: bool = False,
    force: bool = False,
    progress: bool = False,
    launcher: RemoteLauncher | None = None,
) -> RunResult:
    """Trains a job and returns its result (the contents of `result.json`).

    Uses local processes, two by default, or the workers that a launcher places on other machines.

    Raises UsageError for a mistake before anything starts, RunFailed or Diverged when the run
    ends early; the run folder (`out`, by default a new one under runs/) holds what is known then.
    """
    from paceline.report.progress import terminal_reporter

    if launcher is not None:
        if workers not in (None, launcher.workers):
            raise UsageError(
                f"workers={workers}, but the launcher has {launcher.workers} workers; set it once"
            )
        workers = launcher.workers
    folder = Path(out) if out is not None else Path("runs") / new_run_name(str(strategy))
    with terminal_reporter(str(strategy), quiet=not progress) as show:
        options = RunOptions(
            out=folder,
            workers=2 if workers is None else workers,
            threads=threads,
            timeout_s=timeout_s,
            resume=resume,
            force=force,
            launcher=launcher or LocalLauncher(),
            on_event=show,
        )
        return run_training(job, parse_strategy(strategy), options)


def run_training(job: Job | JobRef, strategy: Strategy, options: RunOptions) -> RunResult:
    """Trains with explicit options; raises as `train` does."""
    if getattr(current_process(), "_inheriting", False):
        raise UsageError(
            "the script starts training when a worker imports it; "
            'move the call to train() under `if __name__ == "__main__":`'
        )
    started_wall_s = time.time()
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    check_sizes(resolved.batch, strategy, options.workers)
    sizes = RunSpec(
        strategy=strategy, workers=options.workers, min_workers=options.min_workers or 0
    )
    options.launcher.check_capacity(sizes.workers, sizes.servers)
    if (profiled := options.profiled_epochs) is not None and profiled[1] > resolved.epochs:
        raise UsageError(
            f"--profile {options.profile}: the run has {resolved.epochs} epochs; choose among them"
        )
    live = None
    reference = job_reference(job, resolved)
    if reference is None:
        if not options.launcher.supports_live_objects:
            raise UsageError(
                "the job contains live objects, which cannot be sent to other machines; use names "
                "for model and data, or a job file with a function job()"
            )
        from paceline.worker.assignment import pack_live

        live = pack_live(resolved)
    files = [each.file for each in (reference, *plugins_of(strategy)) if each is not None]
    options.launcher.bundle(next((f for f in files if f is not None), None), options.out)
    plan = make_plan(resolved, strategy, options.workers)
    facts = describe_job(resolved, reference)
    with locked_folder(options.out) as fresh:
        return _run(plan, facts, {"job": reference}, live, options, started_wall_s, fresh)


Run = Callable[[Job | JobRef, Strategy, RunOptions], RunResult]
"""Carries out a run like `run_training`, on processes or in a simulation."""


def run_to_result(
    run: Run, job: Job | JobRef, strategy: Strategy, options: RunOptions
) -> RunResult:
    """Returns the result also of a run that fails or diverges; raises only UsageError."""
    try:
        return run(job, strategy, options)
    except UsageError:
        raise
    except PacelineError:
        return RunFolder(options.out).read_result()


def describe_job(job: Job, reference: JobRef | None) -> Mapping[str, Any]:
    """The description of a job in run.json, with the reference to load it again."""
    facts = job.describe()
    facts["job_file"] = str(reference.file) if reference and reference.file else None
    if reference is not None:
        facts["job_ref"] = reference.model_dump(mode="json")
    return facts


def job_reference(job: Job | JobRef, resolved: Job) -> JobRef | None:
    """A reference to the job; None for one that holds live objects."""
    if isinstance(job, JobRef):
        return job
    return JobRef(fields=plain_fields(resolved)) if resolved.is_plain else None


def make_plan(job: Job, strategy: Strategy, workers: int) -> RunSpec:
    """The run settings of a job for the coordinator, in real and simulated runs."""
    point = job.checkpoint_point
    if job.micro_batch is not None and not all(p.accumulates_gradients for p in strategy.phases):
        raise UsageError(
            f"--micro-batch is not supported with {strategy}, which divides the model; remove it"
        )
    rule = None
    if (limit := job.adapt_batch) is not None:
        if limit <= job.batch:
            raise UsageError(f"--adapt-batch {limit} must be larger than --batch {job.batch}")
        if workers < 2 or len(strategy.phases) > 1 or not strategy.measures_noise:
            raise UsageError(
                f"--adapt-batch needs the gradient noise scale, which {strategy} with --workers "
                f"{workers} does not measure; use allreduce and at least 2 workers"
            )
        rule = BatchRule(job.batch, limit, "sgd" not in job.optimizer_spec.name)
    return RunSpec(
        strategy=strategy,
        workers=workers,
        clip=job.clip,
        until=job.until_spec,
        schedule=job.schedule_spec,
        patience=job.patience,
        checkpoint_epochs=point.epoch if point else None,
        checkpoint_samples=point.samples if point else None,
        batch_rule=rule,
    )


def describe_run(
    plan: RunSpec,
    facts: Mapping[str, Any],
    slowdowns: Sequence[InjectedSlowdown],
    labels: Mapping[str, str],
    settings: Mapping[str, object],
) -> RunConfig:
    """The part of run.json that real and simulated runs have in common.

    `facts` describes the job; `settings` are the options of the run besides those of the job.
    """
    what = {"strategy": str(plan.strategy), "workers": plan.workers}
    of_job = {each.field: facts[each.field] for each in option_fields(Job) if each.field in facts}
    return {
        "format": 1,
        "strategy": str(plan.strategy),
        "workers": plan.workers,
        "servers": plan.servers,
        "troubles": [slowdown.to_plain() for slowdown in slowdowns],
        "job": facts,
        "settings": {**of_job, **what, **settings},
        "labels": dict(labels),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's results, for run.json."""
    found = {"python": platform.python_version()}
    for name in ("paceline", "torch", "numpy", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def run_script(
    script: Path, args: Sequence[str], strategy: Strategy, options: RunOptions
) -> RunResult:
    """Runs a script with its own training loop, or with `fit` of a Keras model, on all workers."""
    started_wall_s = time.time()
    if not script.is_file():
        raise UsageError(f"script {script} was not found; use the path of a Python file")
    options.launcher.bundle(script, options.out)
    strategy.check_workers(options.workers)
    options.launcher.check_capacity(options.workers, strategy.servers_for(options.workers))
    plan = RunSpec(strategy=strategy, workers=options.workers, custom_loop=True)
    facts = {"model": script.stem, "data": "own loop", "seed": 0, "script": str(script)}
    template = {"script": str(script.resolve()), "script_args": tuple(args)}
    with locked_folder(options.out) as fresh:
        return _run(plan, facts, template, None, options, started_wall_s, fresh)


def check_sizes(batch: int, strategy: Strategy, workers: int) -> None:
    strategy.check_workers(workers)
    strategy.check_batch(batch, workers)


def plain_fields(job: Job) -> dict[str, object]:
    return job.model_dump(mode="json", exclude_defaults=True)


def _run(
    plan: RunSpec,
    facts: Mapping[str, Any],
    template: Mapping[str, Any],
    live: bytes | None,
    options: RunOptions,
    started_wall_s: float,
    fresh: bool,
) -> RunResult:
    """Runs in a locked folder; `fresh` if it did not exist before."""
    plan = dataclasses.replace(plan, min_workers=options.min_workers or 0)
    if options.listen is not None and not plan.can_lose_workers:
        raise UsageError(
            f"--listen {options.listen}: no machine can join a run that needs exactly its workers; "
            "add --min-workers 1, with a strategy that does not divide the model"
        )
    survives = options.grace_s > 0 and options.launcher.processes_survive
    plan = dataclasses.replace(plan, journaled=plan.is_elastic and survives)
    folder = RunFolder(options.out)
    faults = [parse_fault(text, plan.workers, plan.servers) for text in options.faults]
    adoption = None
    if options.resume and plan.journaled and is_same_run(folder, plan, facts):
        adoption = find_adoption(folder, plan.min_workers)
    checkpoint = options.from_checkpoint
    if checkpoint is None and options.resume and adoption is None:
        checkpoint = find_checkpoint(folder, facts, plan)
    memory = read_coordinator_state(checkpoint) if checkpoint is not None else None
    if adoption is not None:
        memory = adoption.memory  # Its processes may be writing files in the folder.
    elif options.resume or options.force:
        end_orphans(folder)
    if adoption is None:
        folder.prepare(force=options.force, resume=options.resume)
    earlier = folder.config.read_bytes() if options.resume else None
    if memory is not None:
        started_wall_s -= float(memory["elapsed_s"])
    if adoption is not None:
        started_wall_s = adoption.journal.head.started_wall_s
    settings = {**settings_to_plain(options, RunSettings), **options.settings}
    if options.grace_s > 0:  # A run that is resumed waits as long.
        settings["orphan_grace_s"] = options.grace_s
    config: RunConfig = {
        **describe_run(plan, facts, options.slowdowns, options.labels, settings),
        "engine": options.launcher.engine,
        "threads": options.threads_each,
        "pin": options.pin,
        "timeout_s": options.timeout_s,
        "predicted": options.predicted,
        "directory": os.getcwd(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "system": platform.platform(),
            "cores": usable_cores(),
            "memory_bytes": psutil.virtual_memory().total,
        },
    }
    write_json(folder.config, config)
    if plan.strategy.needs_exchange_probe and options.recall:
        recalled = recall_corrections(options.out, config)
        plan = dataclasses.replace(plan, recalled=recalled)
    event_log = EventLog(folder.events("run"), options.on_event)
    event_log.started(strategy=str(plan.strategy), workers=options.workers, servers=plan.servers)
    template = {
        **template,
        "strategy": str(plan.strategy),
        "plugins": plugins_of(plan.strategy),
        "threads": options.threads_each,
        "pin": options.pin,
        "checkpoint": str(checkpoint.resolve()) if checkpoint is not None else None,
        "keep_checkpoints": options.keep_checkpoints,
        "slowdowns": tuple(t.to_plain() for t in options.slowdowns),
        "telemetry": options.telemetry,
        "profile_epochs": options.profiled_epochs,
    }
    watch = None
    if options.telemetry:
        watch = LiveMonitor(config, event_log, folder.metrics, options.metrics_port)

    def record(event: RunNotice) -> None:
        event_log.record(event)
        if isinstance(event, RunLengthKnown) and event.notes:
            write_json(folder.config, {**config, "notes": list(event.notes)})

    supervisor = Supervisor(
        plan=plan,
        launcher=options.launcher,
        folder=folder,
        template=template,
        live=live,
        timeout_s=options.timeout_s,
        started_wall_s=started_wall_s,
        show=record,
        memory=memory,
        monitor=watch,
        restarts=options.restarts if plan.is_elastic else 0,
        faults=faults,
        listen=options.listen,
        adoption=adoption,
        orphan_grace_s=options.grace_s,
    )

    def leave_nothing() -> None:
        """Removes a run that ended by a user error before its first step."""
        event_log.close()
        if earlier is not None:
            folder.config.write_bytes(earlier)
        elif fresh:
            folder.clear()

    try:
        outcome = options.launcher.run(supervisor.run)
    except UsageError:
        leave_nothing()
        raise
    if outcome.status == "superseded":
        event_log.close()
        raise RunFailed(outcome.error or outcome.status)
    folder.remove_partial_files()
    trained = outcome.coordinator.history.samples - (memory["history"]["samples"] if memory else 0)
    if outcome.is_usage_error and trained == 0 and (fresh or earlier is not None):
        leave_nothing()
        raise UsageError(outcome.error)
    event_log.ended(outcome.status, outcome.error, outcome.seconds)
    result = make_result(config, outcome, folder, live=watch.live if watch is not None else None)
    write_json(folder.result, result)
    if (way := result["collectives"]) is not None:
        options.on_event(CollectivesNotice(path=way["way"] or "", reason=way["why"] or ""))
    return raise_unless_done(result, outcome, folder)


def raise_unless_done(result: RunResult, outcome: RunOutcome, folder: RunFolder) -> RunResult:
    """The result of a run that is done; raises the error of any other."""
    if outcome.status == "done":
        return result
    if outcome.status == "cancelled":
        raise KeyboardInterrupt
    if outcome.is_usage_error:
        raise UsageError(outcome.error)
    text = outcome.error or outcome.status
    if outcome.status == "diverged":
        if kept := list_checkpoints(folder.checkpoints):
            text += f"; the last good checkpoint is {kept[-1]}"
        raise Diverged(text)
    raise RunFailed(text, outcome.details)
