"""`paceline train`, on this machine, on the machines of a pool, or on a running engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli.commands import (
    CommonOptions,
    JobFile,
    Log,
    command,
    make_log,
    refer_to_options,
    require_with,
)
from paceline.cli.placement import (
    LOCAL_WORKERS,
    check_machines,
    make_engine_launcher,
    make_pool_launcher,
)
from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.settings import PlacementSettings, RunSettings, SlowdownSettings
from paceline.options import RUN, Option, field_values, settings, settings_to_plain

if TYPE_CHECKING:
    from paceline.launch.launcher import Launcher
    from paceline.launch.project import ProjectBundle
    from paceline.specs.strategy import Strategy


@settings(RUN)
class TrainOptions:
    out: Annotated[Path, Option(short="o", metavar="DIR")]
    """Run folder to create."""
    strategy: Annotated[str, Option(metavar="STRATEGY")] = "allreduce"
    """Strategy, for example 'ps(sync=bsp, servers=2)' or 'switch(allreduce, ps, at=50%)'; 'auto'
    chooses by measurement."""
    workers: Annotated[int | None, Option(default="2, or 1 for single, or as the pool defines")] = (
        None
    )
    """Total number of worker processes, excluding servers."""


@command
def train(
    job: JobFile = None,
    /,
    *,
    options: TrainOptions,
    run: RunSettings,
    common: CommonOptions,
    fields: Job,
    where: PlacementSettings,
    slowdowns: SlowdownSettings,
) -> None:
    from paceline.cli.compare import show_comparison
    from paceline.launch.run import run_training
    from paceline.launch.run_options import RunOptions
    from paceline.report.comparison import compare_results
    from paceline.report.progress import terminal_reporter

    log = make_log(quiet=common.quiet)
    place = choose_placement(RunRequest(job, options, run, common, fields, where, log))
    given = {
        **settings_to_plain(options),
        **settings_to_plain(where),
        **settings_to_plain(slowdowns),
        "workers": None if where.pool is not None else place.workers,
    }
    with terminal_reporter(str(place.strategy), quiet=common.quiet) as show:
        result = run_training(
            place.reference,
            place.strategy,
            RunOptions(
                **field_values(run, RunSettings),
                out=options.out,
                workers=place.workers,
                slowdowns=slowdowns.parse(place.workers),
                predicted=place.predicted,
                launcher=place.launcher,
                settings=given,
                on_event=show,
            ),
        )
    title = f"{result['model']}: {place.strategy}"
    show_comparison(compare_results([result]), options.out, title, lambda: place.after(result))


@dataclass(frozen=True)
class RunRequest:
    """Requested run, before a place is chosen."""

    file: Path | None
    options: TrainOptions
    run: RunSettings
    common: CommonOptions
    fields: Job
    where: PlacementSettings
    log: Log

    def reference(self, workers: int) -> JobRef:
        return refer_to_options(self.file, self.fields, workers, self.common.batch_per_worker)

    def bundle(self, reference: JobRef) -> ProjectBundle:
        """Returns the project to copy to other machines."""
        from paceline.launch.project import bundle_project

        return bundle_project(
            reference.file,
            out=self.options.out,
            folder=self.where.project,
            venv=self.where.venv,
            tell=self.log,
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The chosen place of a run; `after` receives the result."""

    launcher: Launcher
    workers: int
    strategy: Strategy
    reference: JobRef
    predicted: Mapping[str, object] | None = None
    after: Callable[[Mapping[str, Any]], None] = lambda result: None


def choose_placement(request: RunRequest) -> Placement:
    """Chooses where a run takes place; raises UsageError before any process is started."""
    where = request.where
    check_machines(where, request.options.workers)
    if where.pool is not None:
        return _on_pool(request, where.pool)
    require_with("--pool", {"objective": where.objective}, "the planner needs to know the machines")
    from paceline.launch.engines.local import LocalLauncher
    from paceline.strategies.registry import parse_strategy

    strategy, workers = parse_strategy(request.options.strategy), request.options.workers
    if workers is None:
        workers = strategy.worker_count(LOCAL_WORKERS)  # A strategy may need only one worker.
    reference = request.reference(workers)
    launcher: Launcher = LocalLauncher()
    if where.engine is not None:
        bundle, threads = request.bundle(reference), request.run.threads or 1
        launcher = make_engine_launcher(where, workers, bundle, threads)
    return Placement(launcher=launcher, workers=workers, strategy=strategy, reference=reference)


def _on_pool(request: RunRequest, path: Path) -> Placement:
    from paceline.cli.plan import plan_on_pool
    from paceline.cli.pool import open_pool
    from paceline.cluster.pool import find_hosts, select_hosts
    from paceline.strategies.registry import parse_strategy

    where = request.where
    pool = open_pool(path).pool
    planned = request.options.strategy == "auto"
    selection = where.select or (("auto",) if planned else ("all",))
    choosing = selection == ("auto",)
    if where.objective is not None and not (planned or choosing):
        raise UsageError(
            "--objective requires --strategy auto or --select auto: otherwise nothing is planned"
        )
    hosts = pool.hosts if choosing else select_hosts(pool, selection)
    servers_on = find_hosts(pool, where.servers_on, "--servers-on")
    if choosing and request.common.batch_per_worker is not None:
        raise UsageError(
            "--select auto and --batch-per-worker cannot be combined: the number of machines is "
            "not known in advance; use --batch"
        )
    reference = request.reference(len(hosts) if choosing else sum(h.workers for h in hosts))
    strategy = None if planned else parse_strategy(request.options.strategy)
    plan = plan_on_pool(
        *(path, pool, hosts, reference, strategy),
        choosing=choosing,
        objective=where.objective or "time",
    )
    if planned or choosing:
        plan.show()
        hosts = tuple(plan.hosts)
    expected = chosen = strategy or plan.strategy
    if planned and len(hosts) > 1:
        chosen = parse_strategy(f"auto(start={expected})")  # Continues by measurement.
    serving = servers_on or plan.find_servers(chosen)
    launcher = make_pool_launcher(hosts, serving, request.bundle(reference), chosen, request.log)
    return Placement(
        launcher=launcher,
        workers=launcher.workers,
        strategy=chosen,
        reference=reference,
        predicted=plan.predict(expected),
        after=lambda result: plan.remember(request.options.out, launcher.worker_hosts, result),
    )
