"""`paceline twin`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.cli.commands import CommonOptions, JobFile, command, refer_to_options, split_list
from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.settings import ElasticSettings, SlowdownSettings
from paceline.options import RUN, Option, settings, settings_to_plain
from paceline.twin.clusters import TwinSettings

DEFAULT_STRATEGY, PROBED_WORKERS = "allreduce", 2


@settings(RUN)
class TwinCommandOptions:
    out: Annotated[Path, Option(short="o", metavar="DIR")]
    """Run folder to create, or directory for several runs."""
    strategy: Annotated[
        str | None,
        Option(metavar="STRATEGY", default=f"{DEFAULT_STRATEGY}, or that of the calibrated run"),
    ] = None
    """Strategy, or several separated by semicolons."""
    seeds: Annotated[int, Field(ge=1)] = 1
    """Number of runs per strategy, with consecutive seeds."""
    workers: Annotated[int | None, Field(ge=1), Option(default="one per slot of the cluster")] = (
        None
    )
    """Total number of simulated workers, excluding servers."""
    threads: Annotated[int | None, Field(ge=1), Option(default="all cores")] = None
    """Threads of the simulation."""
    force: bool = False
    """Overwrite an existing run in --out."""


@command
def twin(
    job: JobFile = None,
    /,
    *,
    options: TwinCommandOptions,
    common: CommonOptions,
    machines: TwinSettings,
    elastic: ElasticSettings,
    fields: Job,
    slowdowns: SlowdownSettings,
) -> int:
    from paceline.cli.compare import show_comparison
    from paceline.cluster.pool import find_hosts, select_hosts
    from paceline.report.comparison import compare_results
    from paceline.strategies.registry import parse_strategies
    from paceline.twin.clusters import resolve_cluster
    from paceline.twin.run import TwinOptions, compare_twins, run_labelled

    if "checkpoint_every" not in fields.model_fields_set:
        fields = fields.model_copy(update={"checkpoint_every": "never"})
    strategy, recorded = options.strategy or DEFAULT_STRATEGY, None
    if machines.calibrate is not None:
        from paceline.twin.calibration import recorded_job

        recorded, recorded_strategy = recorded_job(machines.calibrate)
        strategy = options.strategy or recorded_strategy
    chosen = parse_strategies(strategy)

    def refer(count: int) -> JobRef:
        """The requested job; for a recorded run its job, with the given options."""
        reference = refer_to_options(job, fields, count, common.batch_per_worker)
        if recorded is None or job is not None:
            return reference
        return recorded.model_copy(update={"fields": {**recorded.fields, **reference.fields}})

    pool = resolve_cluster(
        machines, lambda: refer(options.workers or PROBED_WORKERS), options.workers
    )
    if machines.write_cluster is not None:
        try:
            machines.write_cluster.write_text(pool.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--write-cluster {machines.write_cluster} cannot be written: {error.strerror}"
            ) from None
    servers_on = find_hosts(pool, machines.servers_on, "--servers-on")
    pool = pool.model_copy(update={"hosts": select_hosts(pool, machines.select)})
    count = options.workers if options.workers is not None else len(pool.slots)
    reference = refer(count)
    run = TwinOptions(
        out=options.out,
        pool=pool,
        workers=count,
        servers_on=servers_on,
        min_workers=elastic.min_workers,
        restarts=elastic.restarts,
        depth=machines.depth,
        slowdowns=slowdowns.parse(count),
        faults=slowdowns.fault,
        threads=options.threads,
        force=options.force,
        settings={
            **settings_to_plain(machines),
            **settings_to_plain(elastic),
            **settings_to_plain(slowdowns),
        },
    )
    if len(chosen) > 1 or options.seeds > 1:
        given = split_list(strategy)
        comparison = compare_twins(reference, given, run, options.seeds, progress=not common.quiet)
        return show_comparison(comparison, options.out, title="Strategies compared in simulation")
    result = run_labelled(reference, chosen[0], run, progress=not common.quiet)
    title = f"{result['model']}: {chosen[0]}"
    return show_comparison(compare_results([result]), options.out, title=title)
