"""`paceline twin`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as opt
from paceline.errors import UsageError
from paceline.job import JobRef


def twin(
    out: Annotated[Path, typer.Option(help="The run folder to write.", show_default=False)],
    job: opt.JobFile = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="A strategy, or several parted by ';'. [allreduce, or the run's]"),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="A pool file, or a number of equal machines.", show_default=False),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="In place of --cluster: the machines as a recorded run shows them."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="In place of --cluster: this machine, measured now.")
    ] = False,
    without: Annotated[
        list[int] | None, typer.Option(help="What if: leave this worker out.")
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(help="What if: every link and exchange this many times faster.")
    ] = 1.0,
    write_cluster: Annotated[
        Path | None, typer.Option(help="Write the machines as a cluster file.")
    ] = None,
    depth: Annotated[
        str, typer.Option(help="learn: real gradients. cost: time alone, for large clusters.")
    ] = "learn",
    seeds: Annotated[int, typer.Option(help="Runs of each strategy, seeds counted up.")] = 1,
    workers: Annotated[
        int | None, typer.Option(help="Workers in all. [as many as the cluster has places for]")
    ] = None,
    model: opt.Model = None,
    data: opt.Data = None,
    data_dir: opt.DataDir = None,
    features: opt.Features = None,
    label: opt.Label = None,
    val_data: opt.ValData = None,
    format: opt.Format = None,
    shape: opt.Shape = None,
    classes: opt.Classes = None,
    fill: opt.Fill = None,
    skip_empty: opt.SkipEmpty = None,
    shard: opt.Shard = None,
    shuffle: opt.Shuffle = None,
    cache: opt.Cache = None,
    prefetch: opt.Prefetch = None,
    memory: opt.Memory = None,
    epochs: opt.Epochs = None,
    batch: opt.Batch = None,
    batch_per_worker: opt.BatchPerWorker = None,
    lr: opt.Lr = None,
    optimizer: opt.Optimizer = None,
    schedule: opt.Schedule = None,
    clip: opt.Clip = None,
    seed: opt.Seed = None,
    augment: opt.Augment = None,
    dtype: opt.Dtype = None,
    until: opt.Until = None,
    patience: opt.Patience = None,
    checkpoint_every: opt.CheckpointEvery = None,
    threads: opt.Threads = None,
    slow: opt.Slow = None,
    delay: opt.Delay = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
) -> None:
    given = locals()
    from paceline.cli.compare import show_comparison
    from paceline.strategies.registry import parse_strategies
    from paceline.twin.clusters import resolve_cluster
    from paceline.twin.compare import compare_twins, run_labelled
    from paceline.twin.run import TwinOptions

    if checkpoint_every is None:
        given["checkpoint_every"] = "never"
    if calibrate is not None:
        from paceline.twin.calibration import recorded_job

        recorded, recorded_strategy = recorded_job(calibrate)
        strategy = strategy or recorded_strategy

    def refer(count: int) -> JobRef:
        """The job that was asked for; of a recorded run its own, with what was said here."""
        reference = opt.job_reference_from_options(job, count, batch_per_worker, given)
        if calibrate is None or job is not None:
            return reference
        return recorded.model_copy(update={"fields": {**recorded.fields, **reference.fields}})

    chosen = parse_strategies(strategy or "allreduce")
    pool = resolve_cluster(
        cluster,
        calibrate=calibrate,
        probe=probe,
        without=tuple(without or ()),
        bandwidth=bandwidth,
        job=lambda: refer(workers or 2),
        workers=workers,
    )
    if write_cluster is not None:
        write_cluster.write_text(pool.to_yaml(), encoding="utf-8")
    count = workers if workers is not None else len(pool.slots)
    reference = refer(count)
    options = TwinOptions(
        out=out,
        pool=pool,
        workers=workers,
        depth=depth,
        slowdowns=opt.parse_slowdowns(slow, delay, count),
        threads=threads,
        force=force,
    )
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}: at least one is needed")
    if len(chosen) > 1 or seeds > 1:
        comparison = compare_twins(reference, list(chosen), options, seeds, progress=not quiet)
        show_comparison(comparison, out, title="Strategies compared in virtual time")
        if comparison["runs_failed"]:
            raise typer.Exit(1)
        return
    result = run_labelled(reference, chosen[0], options, progress=not quiet)
    from rich.console import Console

    from paceline.report.html import write_report
    from paceline.report.summary_table import results_table

    report = write_report([out], out / "report.html", title=f"{result['model']}: {chosen[0]}")
    Console().print(results_table([result]))
    typer.echo(f"report: {report}")
