"""`paceline tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as opt
from paceline.errors import UsageError


def tune(
    out: Annotated[Path, typer.Option(help="The folder for all probes.", show_default=False)],
    job: opt.JobFile = None,
    first: Annotated[str, typer.Option(help="The strategy to begin with.")] = "allreduce",
    second: Annotated[str, typer.Option(help="The strategy to switch to.")] = "ps",
    tolerance: Annotated[
        float, typer.Option(help="Loss of validation accuracy that is accepted.")
    ] = 0.005,
    sweep: Annotated[
        str | None, typer.Option(help='Further strategies to try, "local_sgd(h=8); ps".')
    ] = None,
    twin: Annotated[
        str | None,
        typer.Option(help="In virtual time: a pool file, or a number of equal machines."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes in all. [2, or the cluster's places]")
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
    channels_last: opt.ChannelsLast = None,
    compile: opt.Compile = None,
    recompute: opt.Recompute = None,
    threads: opt.Threads = None,
    timeout: opt.Timeout = 300.0,
    slow: opt.Slow = None,
    delay: opt.Delay = None,
) -> None:
    given = locals()
    from rich.console import Console
    from rich.table import Table

    from paceline.launch.run import RunOptions, run_training
    from paceline.launch.switch_search import Run
    from paceline.launch.switch_search import search_switch_point as search
    from paceline.strategies.registry import parse_strategies, parse_strategy

    run: Run = run_training
    where = None
    if twin is not None:
        from paceline.twin.clusters import read_cluster
        from paceline.twin.run import run_in_twin

        pool = read_cluster(twin)
        run, where = run_in_twin(pool), pool.to_plain()
        places = len(pool.slots)
        if workers is not None and not 1 <= workers <= places:
            raise UsageError(f"--workers is {workers}, but the cluster has {places} places")
        workers = workers or places
    workers = workers or 2
    reference = opt.job_reference_from_options(job, workers, batch_per_worker, given)
    options = RunOptions(
        out=out,
        workers=workers,
        threads=threads,
        timeout_s=timeout,
        slowdowns=opt.parse_slowdowns(slow, delay, workers),
    )
    found = search(
        reference,
        parse_strategy(first),
        parse_strategy(second),
        options,
        tolerance=tolerance,
        others=parse_strategies(sweep) if sweep else [],
        tell=lambda line: typer.echo(line, err=True),
        run=run,
        where=where,
    )
    table = Table(box=None, title="accuracy against time", title_justify="left")
    for column in ("strategy", "synchronous", "val acc", "test acc", "seconds", "status"):
        table.add_column(column, justify="left" if column in ("strategy", "status") else "right")
    for probe in sorted(found["probes"], key=lambda p: p["seconds"]):
        table.add_row(
            probe["strategy"],
            f"{100 * probe['share']:.0f} %",
            *("-" if probe[k] is None else f"{probe[k]:.4f}" for k in ("val_acc", "test_acc")),
            f"{probe['seconds']:.{1 if probe['seconds'] >= 10 else 3}f}",
            probe["status"],
        )
    Console().print(table)
    typer.echo(
        f"smallest share of {found['first']} that keeps the accuracy: "
        f"{100 * found['smallest_share']:.0f} %"
    )
    typer.echo(f"recommended: {found['evidence']}")
