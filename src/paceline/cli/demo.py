"""`paceline demo`: a comparison on data that ships with Paceline, in about a minute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.cli.commands import command
from paceline.cli.compare import show_comparison
from paceline.options import Option

if TYPE_CHECKING:
    from paceline.report.comparison import Comparison

STRATEGIES = "single; allreduce; ps; switch(allreduce, ps, at=50%)"
SIMULATED = "allreduce; ps; " + "; ".join(f"switch(allreduce, ps, at={p}%)" for p in (25, 50, 75))


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    out: Annotated[Path | None, Option(short="o", metavar="DIR", default="runs/<time>-demo")] = None
    """Directory for all runs."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Total number of worker processes, excluding servers."""
    epochs: Annotated[int, Field(ge=1)] = 50
    """Number of epochs over the 1,297 training images."""


@command
def demo(*, options: DemoOptions) -> int:
    from paceline.job import build_job
    from paceline.launch.compare_runs import compare
    from paceline.launch.run_options import new_run_name
    from paceline.strategies.registry import parse_strategies

    folder = options.out if options.out is not None else Path("runs") / new_run_name("demo")
    print(
        f"Training a digit classifier with {options.workers} worker processes on this machine, "
        f"{options.epochs} epochs, with four strategies:",
        flush=True,
    )
    job = build_job(model="mlp-128", data="digits", epochs=options.epochs, batch=64, lr=0.05)
    comparison = compare(
        job, list(parse_strategies(STRATEGIES)), options.workers, out=folder, progress=True
    )
    real = show_comparison(comparison, folder, title="Paceline demo: digits, four strategies")
    virtual = folder / "five-machines"
    simulated = show_comparison(
        run_twin_demo(virtual, options.epochs),
        virtual,
        title="Paceline demo: five published machines, simulated",
    )
    return max(real, simulated)


def run_twin_demo(folder: Path, epochs: int) -> Comparison:
    """Compares strategies on five simulated machines with the same data."""
    from paceline.job import build_job
    from paceline.strategies.registry import parse_strategies
    from paceline.twin.clusters import read_cluster
    from paceline.twin.compare import compare_twins
    from paceline.twin.run import TwinOptions

    print(
        "\nThe same on a simulated cluster of five published machines; each step takes as long as "
        "a step of their ResNet:",
        flush=True,
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
    return compare_twins(job, list(parse_strategies(SIMULATED)), options)
