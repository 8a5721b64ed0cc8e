"""`paceline tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from paceline.cli.commands import (
    CommonOptions,
    JobFile,
    command,
    make_log,
    print_table,
    refer_to_options,
)
from paceline.errors import UsageError
from paceline.job import Job
from paceline.launch.settings import ProcessSettings, SlowdownSettings
from paceline.options import RUN, Option, field_values, settings, settings_to_plain

DEFAULT_WORKERS = 2


@settings(RUN)
class TuneOptions:
    out: Annotated[Path, Option(short="o", metavar="DIR")]
    """Directory for all runs."""
    first: Annotated[str, Option(metavar="STRATEGY")] = "allreduce"
    """Strategy to begin with."""
    second: Annotated[str, Option(metavar="STRATEGY")] = "ps"
    """Strategy to switch to."""
    tolerance: Annotated[float, Field(ge=0)] = 0.005
    """Acceptable loss of validation accuracy."""
    sweep: Annotated[str | None, Option(metavar="LIST")] = None
    """Further strategies to try, separated by semicolons: "local_sgd(h=8); ps"."""
    twin: Annotated[str | None, Option(metavar="POOL|N")] = None
    """Simulate all runs on a pool file or on this many equal machines."""
    workers: Annotated[
        int | None,
        Field(ge=1),
        Option(default=f"{DEFAULT_WORKERS}, or one per slot of --twin"),
    ] = None
    """Total number of worker processes, excluding servers."""


@command
def tune(
    job: JobFile = None,
    /,
    *,
    options: TuneOptions,
    processes: ProcessSettings,
    common: CommonOptions,
    fields: Job,
    slowdowns: SlowdownSettings,
) -> None:
    from paceline.launch.run import Run, run_training
    from paceline.launch.run_options import RunOptions
    from paceline.launch.switch_search import search_switch_point
    from paceline.strategies.registry import parse_strategies, parse_strategy

    for name in ("until", "patience", "checkpoint_every"):
        if name in fields.model_fields_set:
            raise UsageError(
                f"--{name.replace('_', '-')} cannot be combined with tune: runs are compared at "
                "full length, and each one saves a checkpoint per epoch; remove the option"
            )
    run: Run = run_training
    pool, workers = None, options.workers or DEFAULT_WORKERS
    if options.twin is not None:
        from paceline.twin.clusters import read_cluster
        from paceline.twin.run import run_in_twin

        cluster = read_cluster(options.twin)
        run, pool = run_in_twin(cluster), cluster.to_plain()
        slots = len(cluster.slots)
        workers = options.workers or slots
        if workers > slots:
            raise UsageError(
                f"--workers must be 1 to {slots}, got {workers}: the cluster has {slots} worker "
                "slots"
            )

    found = search_switch_point(
        refer_to_options(job, fields, workers, common.batch_per_worker),
        parse_strategy(options.first),
        parse_strategy(options.second),
        RunOptions(
            **field_values(processes, ProcessSettings),
            out=options.out,
            workers=workers,
            slowdowns=slowdowns.parse(workers),
            settings=settings_to_plain(slowdowns),
        ),
        tolerance=options.tolerance,
        others=parse_strategies(options.sweep) if options.sweep else [],
        tell=make_log(quiet=common.quiet, form="{}"),
        run=run,
        where=pool,
    )
    show_search(found)


def show_search(found: dict[str, Any]) -> None:
    """Prints all runs by time, and the recommendation."""
    rows = [
        {
            "strategy": probe["strategy"],
            "synchronous": f"{100 * probe['share']:.0f}%",
            "val acc": "-" if probe["val_acc"] is None else f"{probe['val_acc']:.4f}",
            "test acc": "-" if probe["test_acc"] is None else f"{probe['test_acc']:.4f}",
            "seconds": f"{probe['seconds']:.{1 if probe['seconds'] >= 10 else 3}f}",
            "status": probe["status"],
        }
        for probe in sorted(found["probes"], key=lambda p: p["seconds"])
    ]
    print_table(rows, left=("strategy", "status"), title="Accuracy and time")
    print(
        f"smallest share of {found['first']} that keeps the accuracy: "
        f"{100 * found['smallest_share']:.0f}%"
    )
    print(f"recommended: {found['evidence']}")
