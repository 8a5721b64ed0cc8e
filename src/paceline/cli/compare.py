"""`paceline compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options as opt


def compare(
    out: Annotated[Path, typer.Option(help="The folder for all runs.", show_default=False)],
    strategies: Annotated[
        str, typer.Option(help='Strategies, parted by ";": "single; allreduce; ps".')
    ],
    job: opt.JobFile = None,
    seeds: Annotated[int, typer.Option(help="Runs of each strategy, seeds counted up.")] = 1,
    workers: opt.Workers = 2,
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
    timeout: opt.Timeout = 300.0,
    slow: opt.Slow = None,
    delay: opt.Delay = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
) -> None:
    given = locals()
    from paceline.specs.strategy import split_strategies

    chosen = split_strategies(strategies)
    reference = opt.make_reference(job, workers, batch_per_worker, given)
    from paceline.launch.compare import compare as run_comparison

    comparison = run_comparison(
        reference,
        list(chosen),
        workers,
        seeds=seeds,
        out=out,
        threads=threads,
        timeout_s=timeout,
        troubles=opt.read_troubles(slow, delay, workers),
        force=force,
        progress=not quiet,
    )
    show_comparison(comparison, out)
    if comparison["runs_failed"]:
        raise typer.Exit(1)


def show_comparison(
    comparison: dict[str, Any], out: Path, title: str = "Strategies compared"
) -> None:
    """The table, and a report of all runs."""
    from rich.console import Console

    from paceline.report.html import write_report
    from paceline.report.table import results_table

    report = write_report([out], out / "report.html", title=title)
    Console().print(results_table(comparison))
    typer.echo(f"report: {report}")
