"""`paceline demo`: the product on data that comes with it, in a minute or so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.compare import show_comparison

STRATEGIES = "single; allreduce; ps; switch(allreduce, ps, at=50%)"
ELSEWHERE = "allreduce; ps; " + "; ".join(f"switch(allreduce, ps, at={p}%)" for p in (25, 50, 75))


def demo(
    out: Annotated[
        Path | None, typer.Option(help="The folder for all runs. [runs/demo-...]")
    ] = None,
    workers: opt.Workers = 2,
    epochs: Annotated[int, typer.Option(help="Times through the 1,297 training images.")] = 50,
) -> None:
    from paceline.job import build_job
    from paceline.launch.compare_runs import compare
    from paceline.launch.run import new_run_name
    from paceline.strategies.registry import parse_strategies

    folder = out if out is not None else Path("runs") / new_run_name("demo")
    typer.echo(
        f"{workers} worker processes on this machine learn to read 8x8 digits (scikit-learn's), "
        f"{epochs} epochs, four ways of keeping in step:"
    )
    job = build_job(model="mlp-128", data="digits", epochs=epochs, batch=64, lr=0.05)
    comparison = compare(
        job, list(parse_strategies(STRATEGIES)), workers, out=folder, progress=True
    )
    show_comparison(comparison, folder, title="Paceline demo: digits, four strategies")
    virtual = run_twin_demo(folder / "five-machines", epochs)
    if comparison["runs_failed"] or virtual["runs_failed"]:
        raise typer.Exit(1)


def run_twin_demo(folder: Path, epochs: int) -> dict[str, Any]:
    """The same digits on five machines that are not here, in virtual time."""
    from paceline.job import build_job
    from paceline.strategies.registry import parse_strategies
    from paceline.twin.clusters import read_cluster
    from paceline.twin.compare import compare_twins
    from paceline.twin.run import TwinOptions

    typer.echo(
        "\nAnd on a cluster that is not here: five published machines, in virtual time, every "
        "step as long as their ResNet's:"
    )
    job = build_job(
        model="mlp-128",
        data="digits",
        epochs=epochs,
        batch=130,
        lr=0.05,
        checkpoint_every="never",
    )
    options = TwinOptions(out=folder, pool=read_cluster("published-five"), threads=1)
    comparison = compare_twins(job, list(parse_strategies(ELSEWHERE)), options)
    show_comparison(comparison, folder, title="Paceline demo: five published machines, virtual")
    return comparison
