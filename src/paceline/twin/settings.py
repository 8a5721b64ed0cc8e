"""Settings of a simulated run: which machines to simulate, and how closely."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.options import Option, settings


@settings("Simulated machines")
class TwinSettings:
    """Exactly one of `cluster`, `calibrate` and `probe` names the machines."""

    cluster: Annotated[str | None, Option(metavar="POOL|N")] = None
    """Pool file, name of a cluster that ships with Paceline, or number of equal machines."""
    calibrate: Annotated[Path | None, Option(metavar="DIR")] = None
    """Simulate the machines of a recorded run instead of --cluster."""
    probe: bool = False
    """Measure this machine and simulate it instead of --cluster."""
    without: Annotated[tuple[int, ...], Option(metavar="WORKER")] = ()
    """Remove a worker. Repeatable."""
    bandwidth: Annotated[float, Option(metavar="FACTOR"), Field(gt=0, allow_inf_nan=False)] = 1.0
    """Multiply the bandwidth of every link by this factor."""
    write_cluster: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write the simulated machines to a pool file."""
    depth: Literal["learn", "cost"] = "learn"
    """learn computes real gradients; cost computes only the time, for large clusters."""
