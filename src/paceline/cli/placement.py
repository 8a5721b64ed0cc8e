"""Checks of the options that place a run on machines, and launchers made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.cli.commands import Log, refuse_together, require_with
from paceline.errors import UsageError, suggest_name
from paceline.launch.settings import MachineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cluster.pool import Host
    from paceline.launch.engines.engine import EngineLauncher
    from paceline.launch.engines.ssh import SshLauncher
    from paceline.launch.project import ProjectBundle
    from paceline.specs.strategy import Strategy

LOCAL_WORKERS = 2
ENGINES = ("ray", "spark")


def check_machines(where: MachineSettings, workers: int | None) -> None:
    """Raises UsageError for options that cannot be combined, or that would have no effect."""
    if where.pool is not None:
        reason = "the pool file sets the number of workers"
        refuse_together("--pool", {"workers": workers}, reason)
        reason = "a run uses either a pool or an engine; remove one of them"
        others = {"engine": where.engine, "address": where.address, "master": where.master}
        refuse_together("--pool", others, reason)
        return
    require_with("--pool", {"select": where.select}, "it selects machines of the pool")
    require_with("--pool", {"servers-on": where.servers_on}, "it names machines of the pool")
    if where.engine is None:
        reason = "without them the run uses this machine and this directory"
        require_with("--pool or --engine", {"project": where.project, "venv": where.venv}, reason)
        require_with("--engine ray", {"address": where.address}, "it names a Ray cluster")
        require_with("--engine spark", {"master": where.master}, "it names a Spark cluster")
    elif where.engine not in ENGINES:
        raise UsageError(
            f"unknown --engine {where.engine!r}; {suggest_name(where.engine, ENGINES)}"
        )


def make_engine_launcher(
    where: MachineSettings, workers: int, bundle: ProjectBundle, threads: int
) -> EngineLauncher:
    from paceline.launch.engines.engine import EngineLauncher

    return EngineLauncher(_make_engine(where, threads), workers, bundle, threads=threads)


def _make_engine(where: MachineSettings, threads: int) -> Any:
    if where.engine == "ray":
        if where.master is not None:
            raise UsageError("--master applies to Spark; use --address for a Ray cluster")
        from paceline.ray import RayEngine

        return RayEngine(where.address, cpus_each=threads)
    if where.address is not None:
        raise UsageError("--address applies to Ray; use --master for a Spark cluster")
    from paceline.spark.engine import SparkEngine

    return SparkEngine(master=where.master)


def make_pool_launcher(
    hosts: Sequence[Host],
    servers_on: Sequence[Host],
    bundle: ProjectBundle,
    strategy: Strategy,
    log: Log,
) -> SshLauncher:
    from paceline.launch.engines.ssh import SshLauncher

    launcher = SshLauncher(hosts, bundle, servers_on=servers_on)
    if strategy.servers_for(launcher.workers) and servers_on:
        log(f"parameter servers run on {', '.join(host.host for host in servers_on)}")
    return launcher
