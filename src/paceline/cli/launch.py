"""`paceline launch`: a script with its own training loop, here or on the machines of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.cli.commands import (
    argument,
    command,
    given_options,
    make_log,
    refuse_together,
    require_with,
)
from paceline.errors import UsageError
from paceline.launch.settings import DEFAULT_TIMEOUT_S
from paceline.options import PLACEMENT, RUN, Option, settings

if TYPE_CHECKING:
    from paceline.cluster.pool import Host, Pool

DEFAULT_STRATEGY, DEFAULT_WORKERS, DEFAULT_CONNECT_S = "allreduce", 2, 10.0


@settings(RUN)
class LaunchOptions:
    """Options of both ways to launch."""

    out: Annotated[
        Path | None, Option(short="o", metavar="DIR", default="runs/<time>-<script>")
    ] = None
    """Run folder to create."""
    timeout_s: Annotated[
        float | None,
        Field(gt=0),
        Option(
            metavar="SECONDS",
            default=f"{DEFAULT_TIMEOUT_S:g} without --pool, {DEFAULT_CONNECT_S:g} with it",
        ),
    ] = None
    """Stop the run if a worker makes no progress for this long; with --pool, time to wait for a
    machine."""
    force: bool = False
    """Overwrite an existing run in --out."""
    quiet: bool = False
    """Do not show progress."""


@settings("On this machine")
class LocalOptions:
    """Options of a script that calls prepare(), on processes of this machine."""

    strategy: Annotated[str | None, Option(metavar="STRATEGY", default=DEFAULT_STRATEGY)] = None
    """Strategy of the training loop."""
    workers: Annotated[
        int | None, Field(ge=1), Option(default=f"{DEFAULT_WORKERS}, or 1 for single")
    ] = None
    """Number of worker processes."""
    threads: Annotated[int | None, Field(ge=1), Option(default="cores / workers")] = None
    """Threads per worker."""


@settings(PLACEMENT)
class PoolOptions:
    """Options of any script, on machines over SSH."""

    pool: Annotated[Path | None, Option(metavar="POOL")] = None
    """Pool file: run on these machines over SSH."""
    select: Annotated[tuple[str, ...], Option(metavar="HOSTS", default="all")] = ()
    """Machines of the pool to use: all, gpu, cpu, energy, or auto (chosen by the planner)."""
    job: Annotated[Path | None, Option(metavar="FILE")] = None
    """Job file similar to what the script trains, for --select auto."""
    roles: Annotated[str | None, Option(default="one worker per slot of each machine")] = None
    """Roles of the tasks, for example chief=1,worker=6,ps=2."""
    project: Annotated[Path | None, Option(metavar="DIR", default="directory of the script")] = None
    """Project directory to copy to the machines."""
    venv: bool = False
    """Create a virtual environment from requirements.txt on the machines."""
    dry_run: bool = False
    """Show what would run on which machine, without running it."""


@command
def launch(
    script: Annotated[
        Path, argument("Python script; without --pool it must call paceline.prepare().")
    ],
    /,
    *args: Annotated[str, argument("Arguments of the script, after --.")],
    options: LaunchOptions,
    here: LocalOptions,
    remote: PoolOptions,
) -> None:
    from paceline.launch.run_options import new_run_name

    folder = options.out if options.out is not None else Path("runs") / new_run_name(script.stem)
    if remote.pool is not None:
        refuse_together("--pool", {"workers": here.workers}, "the pool file sets the workers")
        reason = "the script sets it itself on the machines of a pool"
        refuse_together("--pool", {"strategy": here.strategy, "threads": here.threads}, reason)
        launch_on_pool(script, args, folder, options, remote)
        return
    require_with("--pool", given_options(remote), "it applies to machines of a pool")
    launch_here(script, args, folder, options, here)


def launch_here(
    script: Path, args: Sequence[str], folder: Path, options: LaunchOptions, here: LocalOptions
) -> None:
    """Runs a script with `paceline.prepare()` on processes of this machine."""
    from paceline.launch.run import run_local_script
    from paceline.launch.run_options import RunOptions
    from paceline.report.progress import terminal_reporter
    from paceline.strategies.registry import parse_strategy

    chosen = parse_strategy(here.strategy or DEFAULT_STRATEGY)
    with terminal_reporter(str(chosen), quiet=options.quiet) as show:
        run = RunOptions(
            out=folder,
            workers=here.workers or chosen.worker_count(DEFAULT_WORKERS),
            threads=here.threads,
            timeout_s=options.timeout_s or DEFAULT_TIMEOUT_S,
            force=options.force,
            on_event=show,
        )
        result = run_local_script(script, list(args), chosen, run)
    print(
        f"{result['status']}: {result['samples']:,} samples, {result['updates']:,} updates in "
        f"{result['seconds']:.1f} s; run folder {folder}"
    )


def launch_on_pool(
    script: Path, args: Sequence[str], folder: Path, options: LaunchOptions, remote: PoolOptions
) -> None:
    """Runs any script on machines over SSH."""
    from paceline.cli.pool import open_pool
    from paceline.cluster.pool import select_hosts
    from paceline.cluster.ssh import SshTimeouts
    from paceline.launch.script_run import ScriptRun
    from paceline.launch.script_tasks import read_roles

    assert remote.pool is not None
    pool = open_pool(remote.pool).pool
    hosts: Sequence[Host]
    if remote.select == ("auto",):
        hosts = plan_machines(remote.pool, pool, remote.job)
    elif remote.job is not None:
        raise UsageError("--job requires --select auto: the planner chooses machines for the job")
    else:
        hosts = select_hosts(pool, remote.select)
    run = ScriptRun(
        script=script,
        args=tuple(args),
        hosts=tuple(hosts),
        out=folder,
        roles=read_roles(remote.roles),
        project=remote.project,
        venv=remote.venv,
        force=options.force,
        patience=SshTimeouts(connect_s=options.timeout_s or DEFAULT_CONNECT_S),
        tell=make_log(quiet=options.quiet),
        on_line=lambda label, line: print(f"[{label}] {line}", flush=True),
    )
    if remote.dry_run:
        print(run.describe())
        return
    result = run.launch()
    print(f"done: {len(result['tasks'])} tasks in {result['seconds']:.1f} s; {run.out}")


def plan_machines(path: Path, pool: Pool, job: Path | None) -> Sequence[Host]:
    """Chooses machines for a script: by a similar job, or by how fast each machine computes."""
    from paceline.cli.plan import plan_on_pool
    from paceline.job import refer_to_job
    from paceline.plan.search import choose_hosts_by_speed
    from paceline.strategies.registry import parse_strategy

    if job is None:
        hosts, why = choose_hosts_by_speed(pool)
        print(f"plan: {why}")
        return hosts
    # Most scripts synchronize at every step, which decides which machines are worth using.
    strategy = parse_strategy("allreduce")
    plan = plan_on_pool(path, pool, pool.hosts, refer_to_job(job, {}), strategy, choosing=True)
    plan.show()
    return plan.hosts
