"""`paceline train`, on this machine, on the machines of a pool, or on a running engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from paceline.cli.commands import CommonOptions, JobFile, command, make_log, refer_to_options
from paceline.cli.placement import PlaceRequest, Places
from paceline.job import Job
from paceline.launch.settings import (
    ORPHAN_GRACE_S,
    PlacementSettings,
    RunSettings,
    SlowdownSettings,
)
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


@settings(RUN)
class DetachOption:
    detach: bool = False
    """Run in the background, independent of this terminal; see `paceline attach`."""

    def apply(self, out: Path) -> None:
        """Continues in a background process if requested; the calling process then exits."""
        if self.detach:
            from paceline.launch.detach import detach

            detach(out)


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
    background: DetachOption,
) -> None:
    background.apply(options.out)
    if background.detach and run.orphan_grace_s is None:
        run = dataclasses.replace(run, orphan_grace_s=ORPHAN_GRACE_S)
    run_train(
        job,
        options=options,
        run=run,
        common=common,
        fields=fields,
        where=where,
        slowdowns=slowdowns,
    )


def run_train(
    job: Path | None,
    *,
    options: TrainOptions,
    run: RunSettings,
    common: CommonOptions,
    fields: Job,
    where: PlacementSettings,
    slowdowns: SlowdownSettings,
) -> None:
    """Trains, and prints the result."""
    from paceline.cli.compare import show_comparison
    from paceline.launch.run import run_training
    from paceline.launch.run_options import RunOptions
    from paceline.report.comparison import compare_results
    from paceline.report.progress import terminal_reporter

    place = Places(make_log(quiet=common.quiet)).place(
        PlaceRequest(
            strategy=options.strategy,
            where=where,
            refer=lambda n: refer_to_options(job, fields, n, common.batch_per_worker),
            out=options.out,
            workers=options.workers,
            threads=run.threads,
            batch_is_per_worker=common.batch_per_worker is not None,
        )
    )
    given = {
        **settings_to_plain(options),
        **settings_to_plain(where),
        **settings_to_plain(slowdowns),
        "workers": None if where.pool is not None else place.workers,
    }
    with terminal_reporter(str(place.strategy), quiet=common.quiet) as show:
        result = run_training(
            place.job,
            place.strategy,
            RunOptions(
                **field_values(run, RunSettings),
                out=options.out,
                workers=place.workers,
                slowdowns=slowdowns.parse(place.workers),
                faults=slowdowns.fault,
                predicted=place.predicted,
                launcher=place.launcher,
                settings=given,
                on_event=show,
            ),
        )
    title = f"{result['model']}: {place.strategy}"
    show_comparison(compare_results([result]), options.out, title, lambda: place.after(result))
