"""`paceline launch`: a script with its own training loop, here, on a pool or on an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.cli.commands import argument, command, make_log, refuse_together, require_with
from paceline.cli.placement import (
    LOCAL_WORKERS,
    check_machines,
    make_engine_launcher,
    make_pool_launcher,
    report_server_hosts,
)
from paceline.errors import UsageError
from paceline.launch.settings import DEFAULT_TIMEOUT_S, MachineSettings
from paceline.options import PLACEMENT, RUN, Option, settings, settings_to_plain

if TYPE_CHECKING:
    from paceline.cluster.pool import Host, Pool
    from paceline.launch.launcher import Launcher

DEFAULT_STRATEGY, DEFAULT_CONNECT_S = "allreduce", 10.0


@settings(RUN)
class LaunchOptions:
    """Options of a launched script."""

    out: Annotated[
        Path | None, Option(short="o", metavar="DIR", default="runs/<time>-<script>")
    ] = None
    """Run folder to create."""
    strategy: Annotated[
        str | None, Option(metavar="STRATEGY", default=f"{DEFAULT_STRATEGY}; none with --pool")
    ] = None
    """Strategy of Paceline for a script that calls paceline.prepare() or fit() of a Keras model."""
    workers: Annotated[
        int | None, Field(ge=1), Option(default=f"{LOCAL_WORKERS}, or 1 for single")
    ] = None
    """Number of worker processes, without --pool."""
    threads: Annotated[int | None, Field(ge=1), Option(default="cores / workers")] = None
    """Threads per worker."""
    timeout_s: Annotated[
        float | None,
        Field(gt=0),
        Option(
            metavar="SECONDS",
            default=f"{DEFAULT_TIMEOUT_S:g}; {DEFAULT_CONNECT_S:g} without a strategy",
        ),
    ] = None
    """Stop the run if a worker makes no progress for this long; without a strategy, time to wait
    for a machine."""
    fault: Annotated[tuple[str, ...], Option(metavar="FAULT")] = ()
    """With a strategy: inject a fault, such as 'kill worker=1 at=epoch(2)'. Repeatable."""
    force: bool = False
    """Overwrite an existing run in --out."""
    quiet: bool = False
    """Do not show progress."""


@settings(PLACEMENT)
class ScriptPlacement(MachineSettings):
    """Machines of a script, and options for scripts that communicate by themselves."""

    job: Annotated[Path | None, Option(metavar="FILE")] = None
    """Job file similar to what the script trains, for --select auto."""
    roles: Annotated[str | None, Option(default="one worker per slot of each machine")] = None
    """Without --strategy: roles of the tasks, for example chief=1,worker=6,ps=2."""
    dry_run: bool = False
    """Show what would run on which machine, without running it."""


@command
def launch(
    script: Annotated[
        Path,
        argument(
            "Python script: calls paceline.prepare() or fit() of a Keras model; any script with "
            "--pool and no --strategy."
        ),
    ],
    /,
    *args: Annotated[str, argument("Arguments of the script, after --.")],
    options: LaunchOptions,
    where: ScriptPlacement,
) -> None:
    from paceline.launch.run_options import new_run_name

    folder = options.out if options.out is not None else Path("runs") / new_run_name(script.stem)
    check_machines(where, options.workers)
    if where.pool is not None and options.strategy is None:
        reason = "without it the script handles communication"
        given = {
            "threads": options.threads,
            "servers-on": where.servers_on,
            "fault": options.fault,
        }
        require_with("--strategy", given, reason)
        launch_unchanged(script, args, folder, options, where)
        return
    reason = "a strategy has workers and servers; use --servers-on to place the servers"
    refuse_together("--strategy", {"roles": where.roles}, reason)
    only_pool = {"job": where.job, "dry-run": where.dry_run}
    if where.pool is None:
        require_with("--pool", only_pool, "it applies to machines of a pool")
    launch_with_strategy(script, args, folder, options, where)


def launch_with_strategy(
    script: Path, args: Sequence[str], folder: Path, options: LaunchOptions, where: ScriptPlacement
) -> None:
    """Runs a script with `paceline.prepare()` or `fit` under a strategy of Paceline."""
    from paceline.cli.compare import show_comparison
    from paceline.launch.engines.local import LocalLauncher
    from paceline.launch.project import bundle_project
    from paceline.launch.run import run_script
    from paceline.launch.run_options import RunOptions
    from paceline.report.comparison import compare_results
    from paceline.report.progress import terminal_reporter
    from paceline.strategies.registry import parse_strategy

    strategy = parse_strategy(options.strategy or DEFAULT_STRATEGY)
    workers = options.workers or strategy.worker_count(LOCAL_WORKERS)
    log = make_log(quiet=options.quiet)
    launcher: Launcher = LocalLauncher()
    if where.pool is not None or where.engine is not None:
        bundle = bundle_project(
            script, out=folder, folder=where.project, venv=where.venv, kind="script", tell=log
        )
        if where.pool is None:
            launcher = make_engine_launcher(where, workers, bundle, options.threads or 1)
        else:
            hosts, servers_on = choose_hosts(where)
            launcher = make_pool_launcher(hosts, servers_on, bundle)
            workers = launcher.workers
            report_server_hosts(servers_on, strategy, workers, log)
            if where.dry_run:
                print(launcher.describe(strategy.servers_for(workers)))
                return
    with terminal_reporter(str(strategy), quiet=options.quiet) as show:
        run = RunOptions(
            out=folder,
            workers=workers,
            threads=options.threads,
            timeout_s=options.timeout_s or DEFAULT_TIMEOUT_S,
            force=options.force,
            faults=options.fault,
            launcher=launcher,
            settings=settings_to_plain(where),
            on_event=show,
        )
        result = run_script(script, args, strategy, run)
    show_comparison(compare_results([result]), folder, f"{script.name}: {strategy}")
    print(
        f"{result['status']}: {result['samples']:,} samples, {result['updates']:,} updates in "
        f"{result['seconds']:.1f} s; run folder {folder}"
    )


def launch_unchanged(
    script: Path, args: Sequence[str], folder: Path, options: LaunchOptions, where: ScriptPlacement
) -> None:
    """Runs any script on machines over SSH; the script handles communication."""
    from paceline.cluster.ssh import SshTimeouts
    from paceline.launch.script_run import ScriptRun
    from paceline.launch.script_tasks import read_roles

    run = ScriptRun(
        script=script,
        args=tuple(args),
        hosts=tuple(choose_hosts(where)[0]),
        out=folder,
        roles=read_roles(where.roles),
        project=where.project,
        venv=where.venv,
        force=options.force,
        patience=SshTimeouts(connect_s=options.timeout_s or DEFAULT_CONNECT_S),
        tell=make_log(quiet=options.quiet),
        on_line=lambda label, line: print(f"[{label}] {line}", flush=True),
    )
    if where.dry_run:
        print(run.describe())
        return
    result = run.launch()
    print(f"done: {len(result['tasks'])} tasks in {result['seconds']:.1f} s; {run.out}")


def choose_hosts(where: ScriptPlacement) -> tuple[Sequence[Host], Sequence[Host]]:
    """Returns the machines of the processes, and those named for parameter servers."""
    from paceline.cli.pool import open_pool
    from paceline.cluster.pool import find_hosts, select_hosts

    assert where.pool is not None
    pool = open_pool(where.pool).pool
    servers_on = find_hosts(pool, where.servers_on, "--servers-on")
    if where.select == ("auto",):
        return plan_machines(where.pool, pool, where.job), servers_on
    if where.job is not None:
        raise UsageError("--job requires --select auto: the planner chooses machines for the job")
    return select_hosts(pool, where.select), servers_on


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
