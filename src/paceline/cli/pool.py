"""`paceline pool show|convert|keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="pool",
    help="Look at a pool of machines, convert it, install keys on it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PoolFile = Annotated[
    Path, typer.Argument(metavar="POOL", help="A pool file (YAML, JSON) or an old blueprint.")
]
Select = Annotated[
    list[str] | None, typer.Option("--select", help="all, gpu, cpu or energy. [all]")
]


@app.command("show", help="The machines of a pool, as a table.")
def show(pool: PoolFile, select: Select = None) -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.cluster.pool_file import load_pool
    from paceline.cluster.selection import select_hosts

    found = load_pool(pool)
    hosts = select_hosts(found.pool, select or [])
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
    chosen = "" if len(hosts) == len(found.pool.hosts) else f" of {len(found.pool.hosts)}"
    typer.echo(f"{len(hosts)}{chosen} machines, {sum(h.gpu_count for h in hosts)} GPUs")


@app.command("convert", help="Any form of pool to YAML.")
def convert(
    pool: PoolFile,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write. [standard output]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    from paceline.cluster.pool_file import load_pool
    from paceline.errors import UsageError

    found = load_pool(pool)
    print_repairs(found.repairs)
    text = found.pool.to_yaml()
    if out is None:
        typer.echo(text, nl=False)
        return
    if out.exists() and not force:
        raise UsageError(f"--out {out} is there already: name another file or give --force")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None
    typer.echo(f"pool: {out}")


@app.command("keys", help="Ask for each machine's password once and install a public key instead.")
def keys(
    pool: PoolFile,
    host: Annotated[list[str] | None, typer.Option(help="Only this machine. [all]")] = None,
    key: Annotated[
        Path | None, typer.Option(help="The public key. [the pool's, or ~/.ssh/id_*.pub]")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a machine.")] = 10.0,
) -> None:
    import asyncio
    from getpass import getpass

    from paceline.cluster.pool_file import load_pool
    from paceline.cluster.ssh import SshTimeouts
    from paceline.cluster.ssh_keys import UserPrompts, install_key
    from paceline.errors import HostError, UsageError, suggest_name

    found = load_pool(pool)
    names = [each.host for each in found.pool.hosts]
    for name in host or []:
        if name not in names:
            raise UsageError(f"--host {name} is not in the pool: {suggest_name(name, names)}")
    asked = UserPrompts(
        password=getpass,
        trust=lambda text: typer.confirm(f"{text}: is that right?"),
        print_line=typer.echo,
    )
    failed: list[HostError] = []
    for each in found.pool.hosts:
        if host and each.host not in host:
            continue
        try:
            done = asyncio.run(install_key(each, key, asked, SshTimeouts(connect_s=timeout)))
            typer.echo(f"{each.host} {done}")
        except HostError as error:
            failed.append(error)
            typer.echo(str(error), err=True)
    if failed:
        raise typer.Exit(1)


def print_repairs(repairs: tuple[str, ...]) -> None:
    """What an old blueprint needed, beside the output proper."""
    for repair in repairs:
        typer.echo(f"repaired: {repair}", err=True)
