"""`paceline pool show|convert|keys`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.cli.options import print_table
from paceline.errors import HostError, UsageError, suggest_name
from paceline.options import Option, settings

if TYPE_CHECKING:
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
