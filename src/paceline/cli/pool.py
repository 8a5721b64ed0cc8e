"""`paceline pool show|convert|keys`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.errors import HostError, UsageError, suggest_name
from paceline.options import Option

PoolFile = Annotated[Path, argument("Pool file (YAML or JSON), or an old blueprint.")]


@dataclass(frozen=True, kw_only=True)
class ShowPoolOptions:
    select: Annotated[tuple[str, ...], Option(metavar="HOSTS", default="all")] = ()
    """Machines to show: all, gpu, cpu or energy."""


@dataclass(frozen=True, kw_only=True)
class ConvertPoolOptions:
    out: Annotated[Path | None, Option(short="o", metavar="FILE", default="standard output")] = None
    """File to write."""
    force: bool = False
    """Overwrite the file."""


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    host: Annotated[tuple[str, ...], Option(metavar="HOST", default="all")] = ()
    """Install the key only on this machine. Repeatable."""
    key: Annotated[Path | None, Option(default="the pool's, or ~/.ssh/id_*.pub")] = None
    """Public key file."""
    timeout_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 10.0
    """Time to wait for a machine."""


@command
def show(pool: PoolFile, /, *, options: ShowPoolOptions) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.cluster.pool_file import load_pool
    from paceline.cluster.selection import select_hosts

    found = load_pool(pool)
    hosts = select_hosts(found.pool, options.select)
    print_repairs(found.repairs)
    table = Table(box=None)
    for name in ("host", "user", "port", "cores", "memory", "GPUs", "GFLOP/s", "Mbit/s", "green"):
        right = name in ("port", "cores", "memory", "GFLOP/s", "Mbit/s")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for host in hosts:
        shared = found.pool.link if "link" in found.pool.model_fields_set else None
        link = host.link or shared
        gpus = [f"{g.count} x {g.model or 'unnamed'}" for g in host.gpus]
        table.add_row(
            host.host,
            host.user or "-",
            "-" if host.is_local else str(host.port),
            str(host.cores) if "cores" in host.model_fields_set else "-",
            "-" if host.memory_gb is None else f"{host.memory_gb:g} GB",
            ", ".join(gpus) or "-",
            f"{host.gflops:.3g}" if "gflops" in host.model_fields_set else "-",
            "-" if link is None else f"{link.mbit_s:.4g}",
            "yes" if host.energy_efficient else "-",
        )
    Console().print(table)
    total = "" if len(hosts) == len(found.pool.hosts) else f" of {len(found.pool.hosts)}"
    print(f"{len(hosts)}{total} machines, {sum(h.gpu_count for h in hosts)} GPUs")


@command
def convert(pool: PoolFile, /, *, options: ConvertPoolOptions) -> None:
    from paceline.cluster.pool_file import load_pool

    found = load_pool(pool)
    print_repairs(found.repairs)
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


def print_repairs(repairs: tuple[str, ...]) -> None:
    """Prints what was corrected in an old blueprint, to stderr."""
    for repair in repairs:
        print(f"repaired: {repair}", file=sys.stderr)
