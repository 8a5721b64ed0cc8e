"""Settings of a simulation, and the machines that they select: sources and what-if changes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.cluster.pool import Link, Pool, equal_machines, read_pool
from paceline.errors import UsageError
from paceline.job import JobRef
from paceline.options import Option, settings

EXAMPLES = Path(__file__).parents[1] / "cluster" / "examples"
"""Clusters that ship with Paceline."""


@settings("Simulated machines")
class TwinSettings:
    """Exactly one of `cluster`, `calibrate` and `probe` names the machines."""

    cluster: Annotated[str | None, Option(metavar="POOL|N")] = None
    """Pool file, name of a cluster that ships with Paceline, or number of equal machines."""
    calibrate: Annotated[Path | None, Option(metavar="DIR")] = None
    """Simulate the machines of a recorded run instead of --cluster."""
    probe: bool = False
    """Measure this machine and simulate it instead of --cluster."""
    select: Annotated[tuple[str, ...], Option(metavar="HOSTS", default="all")] = ()
    """Machines that run workers: all, gpu, cpu, energy, or names separated by commas."""
    servers_on: Annotated[
        tuple[str, ...], Option(metavar="HOSTS", default="the workers' machines")
    ] = ()
    """Machines that run the parameter servers, separated by commas. Those that are not selected run
    servers only."""
    without: Annotated[tuple[int, ...], Option(metavar="WORKER")] = ()
    """Remove a worker. Repeatable."""
    bandwidth: Annotated[float, Option(metavar="FACTOR"), Field(gt=0, allow_inf_nan=False)] = 1.0
    """Multiply the bandwidth of every link by this factor."""
    mtbf_s: Annotated[
        float | None, Option(metavar="SECONDS", default="never"), Field(gt=0, allow_inf_nan=False)
    ] = None
    """Mean time between two failures of a machine; they are exponentially distributed."""
    repair_s: Annotated[
        float | None, Option(metavar="SECONDS", default="600"), Field(ge=0, allow_inf_nan=False)
    ] = None
    """Time until a machine that has failed returns."""
    write_cluster: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write the simulated machines to a pool file."""
    depth: Literal["learn", "cost"] = "learn"
    """learn computes real gradients; cost computes only the time, for large clusters."""


def resolve_cluster(machines: TwinSettings, job: Callable[[], JobRef], workers: int | None) -> Pool:
    """Returns the simulated machines. Raises UsageError unless exactly one source is given."""
    if (machines.cluster is not None) + (machines.calibrate is not None) + machines.probe != 1:
        raise UsageError(
            "exactly one of --cluster, --calibrate and --probe is required: it defines the "
            "simulated machines"
        )
    if machines.cluster is not None:
        pool = read_cluster(machines.cluster)
    elif machines.calibrate is not None:
        from paceline.twin.calibration import calibrate_from_run

        pool = calibrate_from_run(machines.calibrate)
    else:
        from paceline.twin.machine_probe import probe_machine

        if workers is not None and workers < 1:
            raise UsageError(f"--workers must be at least 1, got {workers}")
        pool = probe_machine(job().resolve(), workers or 2)
    given = {"mtbf_s": machines.mtbf_s, "repair_s": machines.repair_s}
    pool = pool.model_copy(update={k: v for k, v in given.items() if v is not None})
    return apply_what_if(pool, without=machines.without, bandwidth=machines.bandwidth)


def read_cluster(text: str) -> Pool:
    """Reads a pool file, a number of equal machines, or a cluster that ships with Paceline."""
    if re.fullmatch(r"-?[0-9]+", text):
        return equal_machines(int(text))
    path = Path(text)
    if not path.exists():
        shipped = {p.stem: p for p in EXAMPLES.glob("*.yaml")}
        if text in shipped:
            return read_pool(shipped[text])
        raise UsageError(
            f"--cluster {text} was not found; use a pool file, a number of machines, or one of "
            f"{', '.join(sorted(shipped))}"
        )
    return read_pool(path)


def apply_what_if(pool: Pool, *, without: tuple[int, ...] = (), bandwidth: float = 1.0) -> Pool:
    """Removes workers, and multiplies all bandwidths by a factor."""
    if not 0 < bandwidth < float("inf"):
        raise UsageError(f"--bandwidth must be a number greater than 0, got {bandwidth:g}")
    slots = len(pool.slots)
    for worker in without:
        if not 0 <= worker < slots:
            raise UsageError(f"--without must be a worker from 0 to {slots - 1}, got {worker}")
    hosts, first = [], 0
    for host in pool.hosts:
        ranks = range(first, first + host.workers)
        first += host.workers
        remaining = host.workers - len(set(without) & set(ranks))
        if remaining > 0:
            link = _scale_link(host.link, bandwidth) if host.link is not None else None
            hosts.append(host.model_copy(update={"workers": remaining, "link": link}))
    if not hosts:
        raise UsageError("--without removes every worker; keep at least one")
    return pool.model_copy(
        update={
            "hosts": tuple(hosts),
            "link": _scale_link(pool.link, bandwidth),
            "collective_gb_s": pool.collective_gb_s * bandwidth,
            "transfer_gb_s": pool.transfer_gb_s * bandwidth,
        }
    )


def _scale_link(link: Link, factor: float) -> Link:
    return link.model_copy(update={"mbit_s": link.mbit_s * factor})
