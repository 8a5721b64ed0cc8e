"""`paceline doctor`: what is wrong with a pool, on which machine, and what mends it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as opt

if TYPE_CHECKING:
    from paceline.cluster.diagnosis import Problem
    from paceline.cluster.doctor import Examination


def doctor(
    pool: Annotated[
        Path, typer.Option("--pool", help="The pool file.", metavar="POOL", show_default=False)
    ],
    job: opt.JobFile = None,
    model: opt.Model = None,
    data: opt.Data = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Holds DIR/<data set>/<files>, on every machine.")
    ] = None,
    batch: opt.Batch = None,
    port: Annotated[
        list[int] | None, typer.Option(help="A port to try between all pairs. [29500]")
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option(help="A package whose versions must be equal, beside ours.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put what was measured into the pool file.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a machine.")] = 10.0,
    quiet: opt.Quiet = False,
) -> None:
    given = locals()
    import asyncio
    from dataclasses import replace
    from shlex import quote

    from paceline.cli.pool import print_repairs
    from paceline.cluster.diagnosis import diagnose
    from paceline.cluster.doctor import MASTER_PORT, PACKAGES, ExaminationOptions, examine
    from paceline.cluster.measurements import examination_to_json, update_pool
    from paceline.cluster.pool_file import load_pool, write_pool
    from paceline.cluster.ssh import SshTimeouts
    from paceline.errors import UsageError

    found = load_pool(pool)
    print_repairs(found.repairs)
    if timeout <= 0:
        raise UsageError(f"--timeout is {timeout:g}: more than 0 seconds are needed")
    if write and found.form == "blueprint":
        write_pool(found, found.pool)  # refuses before minutes are spent
    orders = ExaminationOptions(
        timeouts=SshTimeouts(connect_s=timeout),
        ports=tuple(port) if port else (MASTER_PORT,),
        packages=tuple(dict.fromkeys((*PACKAGES, *(package or ())))),
        job=read_fields(given),
        on_progress=lambda line: None if quiet or json else typer.echo(f"{line} ...", err=True),
    )
    examination = asyncio.run(examine(found.pool, orders))
    problems = [
        replace(problem, fix=problem.fix.replace(" POOL ", f" {quote(str(pool))} "))
        for problem in diagnose(examination)
    ]
    if write:
        write_pool(found, update_pool(examination))
    if json:
        from json import dumps

        typer.echo(dumps(examination_to_json(examination, problems), indent=2))
    else:
        print_machines(examination)
        print_pairs(examination)
        print_problems(problems)
        if write:
            typer.echo(f"measured figures are in {pool}")
    if any(problem.level == "error" for problem in problems):
        raise typer.Exit(1)


def read_fields(given: dict[str, object]) -> dict[str, object] | None:
    """The job whose steps are to be timed, by names only: it must mean the same everywhere."""
    from paceline.errors import UsageError
    from paceline.job import refer_to_job
    from paceline.launch.run import plain_fields

    names = ("model", "data", "data_dir", "batch")
    fields = {name: given[name] for name in names if given[name] is not None}
    file = given["job"]
    if file is None and "model" not in fields and "data" not in fields:
        return None
    if "data_dir" in fields:
        fields["data_dir"] = str(fields["data_dir"])
    assert file is None or isinstance(file, Path)
    resolved = refer_to_job(file, fields).resolve()
    if not resolved.is_plain:
        raise UsageError(
            f"job {file} holds a model or data of its own, which the machines do not have: "
            "doctor times jobs of names (--model, --data)"
        )
    return plain_fields(resolved) or {"model": resolved.model}


def print_machines(found: Examination) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, title="machines", title_justify="left")
    for name in ("host", "python", "torch", "cores", "memory", "GPUs", "load", "disk free"):
        table.add_column(name, justify="left" if name in ("host", "GPUs") else "right")
    for name in ("clock", "interface", "GFLOP/s", "step"):
        table.add_column(name, justify="right")
    for machine in found.machines:
        facts = machine.facts
        if not facts:
            table.add_row(machine.name, "not examined")
            continue
        steps = machine.steps or {}
        interfaces = {str(route["interface"]) for route in machine.routes.values()}
        table.add_row(
            machine.name,
            facts["python"],
            facts["packages"].get("torch") or "-",
            str(facts["cores"]),
            f"{(facts['memory_bytes'] or 0) / 2**30:.1f} GB",
            ", ".join(gpu.get("model", "?") for gpu in facts["gpus"]) or "-",
            f"{facts['load']:.1f}",
            f"{facts['disk_free_bytes'] / 1e9:.0f} GB",
            f"{1e3 * (machine.clock_offset_s or 0):+.0f} ms",
            ", ".join(sorted(interfaces)) or "-",
            "-" if machine.gflops is None else f"{machine.gflops:.1f}",
            f"{1e3 * steps['per_sample_s']:.3f} ms/sample" if "per_sample_s" in steps else "-",
        )
    Console().print(table)


def print_pairs(found: Examination) -> None:
    """Bandwidth and latency as one matrix: rows send, columns receive."""
    from rich.console import Console
    from rich.table import Table

    names = [machine.name for machine in found.machines if machine.facts]
    if len(names) < 2 or len(names) > 12:
        return  # a larger matrix is read in --json
    table = Table(box=None, title="Mbit/s and latency, from row to column", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    figures = {(pair.source, pair.target): pair for pair in found.pairs}
    for source in names:
        cells = []
        for target in names:
            pair = figures.get((source, target))
            if pair is None or pair.bytes_per_s is None or pair.latency_s is None:
                cells.append("" if pair is None else (pair.why_not or "-"))
            else:
                cells.append(f"{pair.bytes_per_s * 8 / 1e6:.0f} {1e3 * pair.latency_s:.2f} ms")
        table.add_row(source, *cells)
    Console().print(table)


def print_problems(problems: list[Problem]) -> None:
    """Told as lines, not as a table: a command that is broken over two cannot be copied."""
    if not problems:
        typer.echo("nothing is wrong")
        return
    errors = sum(problem.level == "error" for problem in problems)
    typer.echo(f"\n{errors} wrong, {len(problems) - errors} to look at")
    for problem in problems:
        mark = "wrong  " if problem.level == "error" else "look at"
        typer.echo(f"{mark} {problem.host}  {problem.kind}: {problem.what}")
        if problem.fix:
            typer.echo(f"          {problem.fix}")
