"""`paceline train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from paceline.cli.commands import JobFile, command
from paceline.cli.options import CommonOptions, make_log
from paceline.cli.placement import RunRequest, choose_placement
from paceline.job import Job
from paceline.launch.settings import PlacementSettings, RunSettings, SlowdownSettings
from paceline.options import RUN, Option, field_values, settings, settings_to_plain


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
    from rich.console import Console

    from paceline.launch.run import run_training
    from paceline.launch.run_options import RunOptions
    from paceline.report.comparison import compare_results
    from paceline.report.summary_table import results_table
    from paceline.report.terminal import terminal_reporter
    from paceline.report.writer import write_report

    place = choose_placement(
        RunRequest(
            file=job,
            fields=fields,
            batch_per_worker=common.batch_per_worker,
            out=options.out,
            strategy=options.strategy,
            workers=options.workers,
            threads=run.threads,
            where=where,
        ),
        make_log(quiet=common.quiet),
    )
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
    report = options.out / "report.html"
    write_report([options.out], report, title=title)
    Console().print(results_table(compare_results([result])))
    place.after(result)
    print(f"report: {report}")
