"""`paceline compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.errors import UsageError

OF_THE_MATRIX = ("job", "strategies", "seeds", "workers", "model", "data", "batch",
                 "batch_per_worker", "seed", "slow", "delay")  # fmt: skip
"""Options that say what a matrix file says itself."""

OF_A_MATRIX_ALONE = ("scale", "retry", "twin")


def compare(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The folder for all runs.", show_default=False)],
    strategies: Annotated[
        str | None, typer.Option(help='Strategies, parted by ";": "single; allreduce; ps".')
    ] = None,
    matrix: Annotated[
        str | None,
        typer.Option(help="In place of strategies and job: a matrix file, or a shipped one."),
    ] = None,
    scale: Annotated[str, typer.Option(help="full, or small: the matrix's small part.")] = "full",
    retry: Annotated[
        bool, typer.Option("--retry", help="Make failed runs of the matrix again.")
    ] = False,
    twin: Annotated[
        str | None,
        typer.Option(help="The matrix in virtual time: a pool file, or a number of machines."),
    ] = None,
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
    channels_last: opt.ChannelsLast = None,
    compile: opt.Compile = None,
    recompute: opt.Recompute = None,
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
    told = [
        name
        for name in given
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]
    if matrix is not None:
        comparison, title = compare_matrix(given, told)
        show_comparison(comparison, out, title=title)
        if comparison["runs_failed"]:
            raise typer.Exit(1)
        return
    for name in OF_A_MATRIX_ALONE:
        if name in told:
            raise UsageError(f"--{name} belongs to a matrix: add --matrix FILE, or leave it out")
    if strategies is None:
        raise UsageError('compare what? add --strategies "allreduce; ps", or --matrix FILE')
    from paceline.strategies.registry import parse_strategies

    chosen = parse_strategies(strategies)
    reference = opt.job_reference_from_options(job, workers, batch_per_worker, given)
    from paceline.launch.compare_runs import compare as run_comparison

    comparison = run_comparison(
        reference,
        list(chosen),
        workers,
        seeds=seeds,
        out=out,
        threads=threads,
        timeout_s=timeout,
        troubles=opt.parse_slowdowns(slow, delay, workers),
        force=force,
        progress=not quiet,
    )
    show_comparison(comparison, out)
    if comparison["runs_failed"]:
        raise typer.Exit(1)


def compare_matrix(given: dict[str, Any], told: list[str]) -> tuple[dict[str, Any], str]:
    """Run a matrix; its comparison and its title."""
    from paceline.job import Job
    from paceline.launch.matrix import MatrixOptions, Run, run_matrix
    from paceline.launch.matrix_file import read_matrix
    from paceline.launch.run import run_training

    for name in OF_THE_MATRIX:
        if name in told:
            word = name.replace("_", "-")
            raise UsageError(f"--{word} is for the matrix to say: change its file, or leave it out")
    matrix = read_matrix(given["matrix"], scale=given["scale"])
    fields = {name: given[name] for name in told if name in Job.model_fields}
    if "data_dir" in fields:
        fields["data_dir"] = str(Path(fields["data_dir"]).resolve())
    run: Run = run_training
    if given["twin"] is not None:
        from paceline.twin.clusters import read_cluster
        from paceline.twin.run import run_in_twin

        run = run_in_twin(read_cluster(given["twin"]))
    options = MatrixOptions(
        out=given["out"],
        given=fields,
        threads=given["threads"],
        timeout_s=given["timeout"],
        retry=given["retry"],
        force=given["force"],
        progress=not given["quiet"],
    )
    return run_matrix(matrix, options, run=run), matrix.title


def show_comparison(
    comparison: dict[str, Any], out: Path, title: str = "Strategies compared"
) -> None:
    """The table, and a report of all runs."""
    from rich.console import Console

    from paceline.report.html import write_report
    from paceline.report.summary_table import results_table

    report = write_report([out], out / "report.html", title=title)
    console = Console()
    for task in comparison.get("tasks", [comparison]):
        if "task" in task:
            console.print(task["task"], style="bold", markup=False)
        console.print(results_table(task))
    typer.echo(f"report: {report}")
