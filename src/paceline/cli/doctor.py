"""`paceline doctor`: checks the machines of a pool and suggests a fix for each problem."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from paceline.cli.commands import JobFile, command
from paceline.cluster.doctor import MASTER_PORT
from paceline.errors import UsageError
from paceline.options import TRAINING, Option

if TYPE_CHECKING:
    from paceline.cluster.diagnosis import Problem
    from paceline.cluster.doctor import Examination


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    pool: Annotated[Path, Option(metavar="POOL")]
    """Pool file."""
    port: Annotated[tuple[int, ...], Option(metavar="PORT")] = (MASTER_PORT,)
    """Port to test between all pairs of machines. Repeatable."""
    package: Annotated[tuple[str, ...], Option(metavar="NAME")] = ()
    """Further package whose version must be equal on all machines. Repeatable."""
    write: bool = False
    """Write the measurements to the pool file."""
    json: bool = False
    """Print the result as JSON."""
    timeout_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 10.0
    """Time to wait for a machine."""
    quiet: bool = False
    """Do not show progress."""


@dataclass(frozen=True, kw_only=True)
class TimedJob:
    """Job whose steps are timed on every machine: names only, so that it means the same on all."""

    option_group: ClassVar[str] = TRAINING

    model: Annotated[str | None, Option(metavar="NAME")] = None
    """Time the steps of this model on every machine."""
    data: Annotated[str | None, Option(metavar="NAME")] = None
    """Dataset of the timed steps."""
    data_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Directory with the original files, on every machine."""
    batch: Annotated[int | None, Field(ge=1)] = None
    """Batch size of the timed steps."""


@command
def doctor(job: JobFile = None, /, *, options: DoctorOptions, timed: TimedJob) -> int:
    import asyncio
    from shlex import quote

    from paceline.cli.pool import print_repairs
    from paceline.cluster.diagnosis import diagnose
    from paceline.cluster.doctor import PACKAGES, ExaminationOptions, examine
    from paceline.cluster.measurements import examination_to_json, update_pool
    from paceline.cluster.pool_file import load_pool, write_pool
    from paceline.cluster.ssh import SshTimeouts

    found = load_pool(options.pool)
    print_repairs(found.repairs)
    if options.write and found.form == "blueprint":
        write_pool(found, found.pool)  # Raises before minutes are spent on measurements.

    def log(line: str) -> None:
        if not (options.quiet or options.json):
            print(f"{line} ...", file=sys.stderr)

    examination = asyncio.run(
        examine(
            found.pool,
            ExaminationOptions(
                timeouts=SshTimeouts(connect_s=options.timeout_s),
                ports=options.port,
                packages=tuple(dict.fromkeys((*PACKAGES, *options.package))),
                job=fields_to_time(job, timed),
                on_progress=log,
            ),
        )
    )
    problems = [
        replace(problem, fix=problem.fix.replace(" POOL ", f" {quote(str(options.pool))} "))
        for problem in diagnose(examination)
    ]
    if options.write:
        write_pool(found, update_pool(examination))
    if options.json:
        print(json.dumps(examination_to_json(examination, problems), indent=2))
    else:
        print_machines(examination)
        print_pairs(examination)
        print_problems(problems)
        if options.write:
            print(f"measurements written to {options.pool}")
    return 1 if any(problem.level == "error" for problem in problems) else 0


def fields_to_time(file: Path | None, timed: TimedJob) -> dict[str, object] | None:
    """Returns the fields of the job to time, or None; raises UsageError for live objects."""
    from paceline.job import refer_to_job
    from paceline.launch.run import plain_fields

    fields = {name: value for name, value in vars(timed).items() if value is not None}
    if file is None and timed.model is None and timed.data is None:
        return None
    if timed.data_dir is not None:
        fields["data_dir"] = str(timed.data_dir)
    resolved = refer_to_job(file, fields).resolve()
    if not resolved.is_plain:
        raise UsageError(
            f"job file {file} contains its own model or data, which the machines do not have; "
            "use --model and --data with names"
        )
    return plain_fields(resolved) or {"model": resolved.model}


def print_machines(found: Examination) -> None:
    """Prints one row per machine."""
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
            table.add_row(machine.name, "not checked")
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
    """Prints bandwidth and latency as one matrix: rows send, columns receive."""
    from rich.console import Console
    from rich.table import Table

    names = [machine.name for machine in found.machines if machine.facts]
    if len(names) < 2 or len(names) > 12:
        return  # A larger matrix is unreadable; --json has it.
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
    """Prints lines rather than a table: a command that is broken over two cannot be copied."""
    if not problems:
        print("no problems found")
        return
    errors = sum(problem.level == "error" for problem in problems)
    print(f"\n{errors} errors, {len(problems) - errors} warnings")
    for problem in problems:
        mark = "error  " if problem.level == "error" else "warning"
        print(f"{mark} {problem.host}  {problem.kind}: {problem.what}")
        if problem.fix:
            print(f"          {problem.fix}")
