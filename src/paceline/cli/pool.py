"""`paceline pool show|convert|keys`, and `paceline doctor`, which checks a pool."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.cli.commands import JobFile, argument, command, make_log, print_table
from paceline.cluster.doctor import MASTER_PORT
from paceline.errors import HostError, UsageError, suggest_name
from paceline.options import TRAINING, Option, settings

if TYPE_CHECKING:
    from paceline.cluster.diagnosis import Problem
    from paceline.cluster.doctor import Examination
    from paceline.cluster.pool_file import PoolFile as LoadedPool

PoolFile = Annotated[Path, argument("Pool file (YAML or JSON), or an old blueprint.")]


@settings()
class ShowPoolOptions:
    select: Annotated[tuple[str, ...], Option(metavar="HOSTS", default="all")] = ()
    """Machines to show: all, gpu, cpu or energy."""


@settings()
class ConvertPoolOptions:
    out: Annotated[Path | None, Option(short="o", metavar="FILE", default="standard output")] = None
    """File to write."""
    force: bool = False
    """Overwrite the file."""


@settings()
class KeyOptions:
    host: Annotated[tuple[str, ...], Option(metavar="HOST", default="all")] = ()
    """Install the key only on this machine. Repeatable."""
    key: Annotated[Path | None, Option(default="the pool's, or ~/.ssh/id_*.pub")] = None
    """Public key file."""
    timeout_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 10.0
    """Time to wait for a machine."""


@command
def show(pool: PoolFile, /, *, options: ShowPoolOptions) -> None:
    from paceline.cluster.pool import select_hosts

    found = open_pool(pool)
    hosts = select_hosts(found.pool, options.select)
    shared = found.pool.link if "link" in found.pool.model_fields_set else None
    rows = []
    for host in hosts:
        link = host.link or shared
        gpus = [f"{g.count} x {g.model or 'unnamed'}" for g in host.gpus]
        rows.append(
            {
                "host": host.host,
                "user": host.user or "-",
                "port": "-" if host.is_local else str(host.port),
                "cores": str(host.cores) if "cores" in host.model_fields_set else "-",
                "memory": "-" if host.memory_gb is None else f"{host.memory_gb:g} GB",
                "GPUs": ", ".join(gpus) or "-",
                "GFLOP/s": f"{host.gflops:.3g}" if "gflops" in host.model_fields_set else "-",
                "Mbit/s": "-" if link is None else f"{link.mbit_s:.4g}",
                "green": "yes" if host.energy_efficient else "-",
            }
        )
    print_table(rows, left=("host", "user", "GPUs", "green"))
    total = "" if len(hosts) == len(found.pool.hosts) else f" of {len(found.pool.hosts)}"
    print(f"{len(hosts)}{total} machines, {sum(h.gpu_count for h in hosts)} GPUs")


@command
def convert(pool: PoolFile, /, *, options: ConvertPoolOptions) -> None:
    found = open_pool(pool)
    text, out = found.pool.to_yaml(), options.out
    if out is None:
        print(text, end="")
        return
    if out.exists() and not options.force:
        raise UsageError(f"--out {out} already exists; choose another file, or use --force")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None
    print(f"pool: {out}")


@command
def keys(pool: PoolFile, /, *, options: KeyOptions) -> int:
    import asyncio
    from getpass import getpass

    from paceline.cluster.pool_file import load_pool
    from paceline.cluster.ssh import SshTimeouts
    from paceline.cluster.ssh_keys import UserPrompts, install_key

    found = load_pool(pool)
    names = [each.host for each in found.pool.hosts]
    for name in options.host:
        if name not in names:
            raise UsageError(f"--host {name} is not in the pool; {suggest_name(name, names)}")
    prompts = UserPrompts(password=getpass, trust=confirm, print_line=print)
    timeouts = SshTimeouts(connect_s=options.timeout_s)
    failed = False
    for each in found.pool.hosts:
        if options.host and each.host not in options.host:
            continue
        try:
            outcome = asyncio.run(install_key(each, options.key, prompts, timeouts))
            print(f"{each.host} {outcome}")
        except HostError as error:
            failed = True
            print(error, file=sys.stderr)
    return 1 if failed else 0


def confirm(question: str) -> bool:
    """Asks on the terminal; anything but y or yes is a no, and so is the end of the input."""
    try:
        answer = input(f"{question}: is that right? [y/N]: ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def open_pool(path: Path) -> LoadedPool:
    """Reads a pool file; prints what was corrected in an old blueprint to stderr."""
    from paceline.cluster.pool_file import load_pool

    found = load_pool(path)
    for repair in found.repairs:
        print(f"repaired: {repair}", file=sys.stderr)
    return found


@settings()
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


@settings(TRAINING)
class TimedJob:
    """Job whose steps are timed on every machine: names only, so that it means the same on all."""

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

    from paceline.cluster.diagnosis import diagnose
    from paceline.cluster.doctor import PACKAGES, ExaminationOptions, examine
    from paceline.cluster.measurements import examination_to_json, update_pool
    from paceline.cluster.pool_file import write_pool
    from paceline.cluster.ssh import SshTimeouts

    found = open_pool(options.pool)
    if options.write and found.form == "blueprint":
        write_pool(found, found.pool)  # Raises before minutes are spent on measurements.
    examination = asyncio.run(
        examine(
            found.pool,
            ExaminationOptions(
                timeouts=SshTimeouts(connect_s=options.timeout_s),
                ports=options.port,
                packages=tuple(dict.fromkeys((*PACKAGES, *options.package))),
                job=fields_to_time(job, timed),
                on_progress=make_log(quiet=options.quiet or options.json, form="{} ..."),
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
    rows = []
    for machine in found.machines:
        facts, steps = machine.facts, machine.steps or {}
        if not facts:
            rows.append({"host": machine.name, "python": "not checked"})
            continue
        interfaces = {str(route["interface"]) for route in machine.routes.values()}
        step = f"{1e3 * steps['per_sample_s']:.3f} ms/sample" if "per_sample_s" in steps else "-"
        rows.append(
            {
                "host": machine.name,
                "python": facts["python"],
                "torch": facts["packages"].get("torch") or "-",
                "cores": str(facts["cores"]),
                "memory": f"{(facts['memory_bytes'] or 0) / 2**30:.1f} GB",
                "GPUs": ", ".join(gpu.get("model", "?") for gpu in facts["gpus"]) or "-",
                "load": f"{facts['load']:.1f}",
                "disk free": f"{facts['disk_free_bytes'] / 1e9:.0f} GB",
                "clock": f"{1e3 * (machine.clock_offset_s or 0):+.0f} ms",
                "interface": ", ".join(sorted(interfaces)) or "-",
                "GFLOP/s": "-" if machine.gflops is None else f"{machine.gflops:.1f}",
                "step": step,
            }
        )
    print_table(rows, left=("host", "GPUs"), title="machines")


def print_pairs(found: Examination) -> None:
    """Prints bandwidth and latency as one matrix: rows send, columns receive."""
    names = [machine.name for machine in found.machines if machine.facts]
    if len(names) < 2 or len(names) > 12:
        return  # A larger matrix is unreadable; --json has it.
    figures = {(pair.source, pair.target): pair for pair in found.pairs}
    rows = []
    for source in names:
        row = {"": source}
        for target in names:
            pair = figures.get((source, target))
            if pair is None or pair.bytes_per_s is None or pair.latency_s is None:
                row[target] = "" if pair is None else (pair.why_not or "-")
            else:
                row[target] = f"{pair.bytes_per_s * 8 / 1e6:.0f} {1e3 * pair.latency_s:.2f} ms"
        rows.append(row)
    print_table(rows, left=("",), title="Mbit/s and latency, from row to column")


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
