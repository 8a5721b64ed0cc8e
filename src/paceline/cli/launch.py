"""`paceline launch`: a script with its own loop, on several workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as opt


def launch(
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.prepare().")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, behind --.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="How the workers keep in step.")] = "allreduce",
    workers: opt.Workers = 2,
    out: Annotated[Path | None, typer.Option(help="The run folder. [runs/...]")] = None,
    threads: opt.Threads = None,
    timeout: opt.Timeout = 300.0,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
) -> None:
    from paceline.launch.run import RunOptions, new_run_name, run_script
    from paceline.report.show import make_show
    from paceline.specs.strategy import read_strategy

    chosen = read_strategy(strategy)
    folder = out if out is not None else Path("runs") / new_run_name(script.stem)
    with make_show(str(chosen), quiet=quiet) as show:
        options = RunOptions(
            out=folder, workers=workers, threads=threads, timeout_s=timeout, force=force, show=show
        )
        result = run_script(script, args or [], chosen, options)
    typer.echo(
        f"{result['status']}: {result['samples']} samples, {result['updates']} updates in "
        f"{result['seconds']:.1f} s; run folder {folder}"
    )
