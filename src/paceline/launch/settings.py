"""Settings of a run: how to run a job, as opposed to what to train. Each field is an option."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.errors import UsageError
from paceline.options import PLACEMENT, RUN, SLOWDOWNS, Option, settings
from paceline.specs.slowdown import InjectedSlowdown, parse_slowdown

MIN_TIMEOUT_S = 2.0
DEFAULT_TIMEOUT_S = 300.0
ORPHAN_GRACE_S = 60.0
"""Time in which a user can notice that a supervisor was killed, and type `paceline resume`."""


PROFILED = re.compile(r"epochs?\s*=\s*(\d+)(?:\s*-\s*(\d+))?")


def parse_profile(text: str) -> tuple[int, int]:
    """Returns the first and the last epoch of `epoch=N` or `epochs=A-B`; raises ValueError."""
    if (match := PROFILED.fullmatch(text.strip())) is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if 1 <= first <= last:
            return first, last
    raise ValueError(f"must be epoch=N or epochs=A-B, from 1, got {text!r}")


def check_profile(text: str) -> str:
    parse_profile(text)
    return text


def parse_min_workers(value: object) -> object:
    """Returns None for `all`, and the number of a text; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    if value.strip() == "all":
        return None
    if not value.strip().isdigit() or int(value) < 1:
        raise ValueError(f"must be a number of at least 1, or all, got {value!r}")
    return int(value)


@settings(RUN)
class ElasticSettings:
    """Settings of runs that continue without lost workers, real or simulated."""

    min_workers: Annotated[
        int | None, BeforeValidator(parse_min_workers), Option(metavar="N|all", default="all")
    ] = None
    """Continue without workers that are lost, as long as this many remain; all: the first loss
    ends the run."""
    restarts: Annotated[int, Option(metavar="N")] = 3
    """Start a lost worker again, up to this often; requires --min-workers."""

    def __post_init__(self) -> None:
        if self.min_workers is not None and self.min_workers < 1:
            raise UsageError(f"--min-workers must be at least 1, got {self.min_workers}")
        if self.restarts < 0:
            raise UsageError(f"--restarts must be at least 0, got {self.restarts}")


@settings(RUN)
class ProcessSettings(ElasticSettings):
    """Settings of the processes of a run, which apply equally to several runs of a comparison."""

    threads: Annotated[int | None, Option(default="cores / workers")] = None
    """Threads per worker."""
    pin: bool = False
    """Pin each worker to its own CPU cores."""
    timeout_s: Annotated[float, Option(metavar="SECONDS")] = DEFAULT_TIMEOUT_S
    """Stop the run if a worker makes no progress for this long."""
    telemetry: bool = True
    """Record each step, resource usage and bottlenecks; otherwise only totals are recorded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {self.threads}")
        if self.timeout_s < MIN_TIMEOUT_S:
            raise UsageError(
                f"--timeout must be at least {MIN_TIMEOUT_S:g} s, got {self.timeout_s:g}: "
                "workers report once per second"
            )


@settings(RUN)
class RunSettings(ProcessSettings):
    """Settings of a single run."""

    listen: Annotated[str | None, Option(metavar="ADDRESS", default="loopback")] = None
    """Address of this machine at which others can join the run; see `paceline join`."""
    profile: Annotated[
        Annotated[str, AfterValidator(check_profile)] | None,
        Option(metavar="epoch=N|epochs=A-B"),
    ] = None
    """Profile the operators of one epoch or of several, counted from 1."""
    metrics_port: Annotated[int | None, Field(ge=0, le=65535), Option(metavar="PORT")] = None
    """Serve Prometheus metrics on this localhost port; 0 picks a free port."""
    orphan_grace_s: Annotated[
        float | None,
        Option(
            name="orphan-grace",
            metavar="SECONDS",
            default="60 with --min-workers or --detach, or 0",
        ),
    ] = None
    """If the supervisor is killed, workers on this machine wait this long for `paceline resume`,
    provided that the run can continue without some of them; 0 ends them at once."""
    resume: bool = False
    """Resume from the latest checkpoint in --out."""
    force: bool = False
    """Overwrite an existing run in --out."""

    @property
    def profiled_epochs(self) -> tuple[int, int] | None:
        return parse_profile(self.profile) if self.profile is not None else None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.orphan_grace_s is not None and self.orphan_grace_s < 0:
            raise UsageError(f"--orphan-grace must be at least 0, got {self.orphan_grace_s:g}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise UsageError(f"--metrics-port must be 0 to 65535, got {self.metrics_port}")
        if self.metrics_port is not None and not self.telemetry:
            raise UsageError(
                "--metrics-port and --no-telemetry cannot be combined: metrics are computed from "
                "telemetry; remove one of them"
            )
        if self.resume and self.force:
            raise UsageError(
                "--resume and --force cannot be combined: resume the run, or overwrite it"
            )


@settings(SLOWDOWNS)
class SlowdownSettings:
    """Slowdowns that are injected into workers, to study strategies under unequal speed."""

    slow: Annotated[tuple[str, ...], Option(metavar="worker=K,factor=F")] = ()
    """Slow a worker down; optionally from=EPOCH,to=EPOCH. cores=C limits it to a fraction of a
    core instead. Repeatable."""
    delay: Annotated[tuple[str, ...], Option(metavar="worker=K,ms=M")] = ()
    """Delay a worker's communication; optionally from=EPOCH,to=EPOCH. Repeatable."""

    fault: Annotated[tuple[str, ...], Option(metavar="FAULT")] = ()
    """Inject a fault: 'kill worker=1 at=30%', 'stop server=0 at=epoch(2) for=30s', 'cut', or 'slow
    coordinator at=50% factor=3 for=10s'. Repeatable."""

    def parse(self, workers: int) -> tuple[InjectedSlowdown, ...]:
        """Returns the slowdowns of a run with this many workers; raises SpecError."""
        return (
            *(parse_slowdown("slow", text, workers) for text in self.slow),
            *(parse_slowdown("delay", text, workers) for text in self.delay),
        )


@settings(PLACEMENT)
class MachineSettings:
    """Machines of a run: those of a pool, or of an engine; by default this machine."""

    pool: Annotated[Path | None, Option(metavar="POOL")] = None
    """Pool file: run on these machines over SSH."""
    select: Annotated[tuple[str, ...], Option(metavar="HOSTS", default="all")] = ()
    """Machines of the pool to use: all, gpu, cpu, energy, auto (chosen by the planner), or names
    separated by commas."""
    servers_on: Annotated[
        tuple[str, ...], Option(metavar="HOSTS", default="the workers' machines")
    ] = ()
    """Machines of the pool that run the parameter servers, separated by commas. Those that are not
    selected run servers only."""
    project: Annotated[
        Path | None, Option(metavar="DIR", default="directory of the job file or script")
    ] = None
    """Project directory to copy to the machines."""
    venv: bool = False
    """Create a virtual environment from requirements.txt on the machines."""
    engine: Annotated[str | None, Option(metavar="ray|spark")] = None
    """Run on a Ray or Spark cluster instead of a pool."""
    address: Annotated[str | None, Option(default="the local cluster")] = None
    """Address of the Ray cluster, for example 10.0.0.1:6379."""
    master: Annotated[str | None, Option(metavar="URL", default="Spark's configuration")] = None
    """Spark master, for example spark://10.0.0.1:7077."""


@settings(PLACEMENT)
class PlacementSettings(MachineSettings):
    """Placement of a job."""

    objective: Annotated[str | None, Option(default="time")] = None
    """Objective of a planned run: time, energy, cost, or a mix such as 'time=0.7,energy=0.3'."""
