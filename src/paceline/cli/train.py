"""`paceline train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as opt
from paceline.cli import placement


def train(
    out: Annotated[Path, typer.Option(help="The run folder to write.", show_default=False)],
    job: opt.JobFile = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="E.g. 'ps(sync=bsp, servers=2)', 'switch(allreduce, ps, at=50%)'; auto: planned."
        ),
    ] = "allreduce",
    workers: Annotated[
        int | None, typer.Option(help="Worker processes in all; servers not counted. [2]")
    ] = None,
    pool: placement.PoolFile = None,
    select: placement.Select = None,
    objective: placement.Objective = None,
    servers_on: placement.ServersOn = None,
    project: placement.Project = None,
    venv: placement.Venv = False,
    engine: placement.Engine = None,
    address: placement.Address = None,
    master: placement.Master = None,
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
    until: opt.Until = None,
    patience: opt.Patience = None,
    checkpoint_every: opt.CheckpointEvery = None,
    threads: opt.Threads = None,
    pin: opt.Pin = False,
    timeout: opt.Timeout = 300.0,
    slow: opt.Slow = None,
    delay: opt.Delay = None,
    profile: opt.Profile = None,
    metrics_port: opt.MetricsPort = None,
    no_telemetry: opt.NoTelemetry = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
) -> None:
    given = locals()
    from paceline.errors import UsageError
    from paceline.launch.run import RunOptions, run_training
    from paceline.report.html import write_report
    from paceline.report.summary_table import results_table
    from paceline.report.terminal import terminal_reporter

    if resume and force:
        raise UsageError("--resume and --force exclude each other: go on, or replace")

    def tell(line: str) -> None:
        if not quiet:
            typer.echo(f"paceline: {line}", err=True)

    place = placement.choose_placement(given, tell)
    chosen = place.strategy
    with terminal_reporter(str(chosen), quiet=quiet) as show:
        options = RunOptions(
            out=out,
            workers=place.workers,
            threads=threads,
            pin=pin,
            timeout_s=timeout,
            slowdowns=opt.parse_slowdowns(slow, delay, place.workers),
            profile_epoch=opt.parse_profile_epoch(profile),
            metrics_port=metrics_port,
            telemetry=not no_telemetry,
            resume=resume,
            force=force,
            predicted=place.predicted,
            launcher=place.launcher,
            on_event=show,
        )
        result = run_training(place.reference, chosen, options)
    from rich.console import Console

    report = write_report([out], out / "report.html", title=f"{result['model']}: {chosen}")
    Console().print(results_table([result]))
    place.after(result)
    typer.echo(f"report: {report}")
