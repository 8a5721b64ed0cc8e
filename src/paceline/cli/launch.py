"""`paceline launch`: a script on several workers here, or any script on the machines of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt

if TYPE_CHECKING:
    from paceline.cluster.pool import Host, Pool


def launch(
    script: Annotated[
        Path,
        typer.Argument(help="With --pool any Python script, else one that calls prepare()."),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, behind --.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="How the workers keep in step. [allreduce]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes on this machine. [2]")
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(metavar="POOL", help="Run on these machines, over SSH.")
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(help="Of the pool: all, gpu, cpu, energy, or auto (planned). [all]"),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="For --select auto: a job file like what the script trains."),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(help="E.g. chief=1,worker=6,ps=2. [a worker for each of a host's workers]"),
    ] = None,
    project: Annotated[
        Path | None, typer.Option(help="The folder to copy. [the project around the script]")
    ] = None,
    venv: Annotated[
        bool, typer.Option("--venv", help="Make an environment from requirements.txt there.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run where, and do nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The run folder. [runs/...]")] = None,
    threads: opt.Threads = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds a worker may stay in one phase [300]; to reach a machine [10]."),
    ] = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
) -> None:
    given = locals()
    from paceline.launch.run import new_run_name

    folder = out if out is not None else Path("runs") / new_run_name(script.stem)
    if pool is not None:
        opt.reject_conflicting("--pool", given, "workers", "strategy", "threads")
        launch_on_pool({**given, "folder": folder})
    else:
        opt.require_option("--pool", given, "select", "job", "roles", "project", "venv", "dry_run")
        launch_here({**given, "folder": folder})


def launch_here(given: dict[str, Any]) -> None:
    """A loop of the user's own with `paceline.prepare()`, on processes of this machine."""
    from paceline.launch.run import DEFAULT_TIMEOUT_S, RunOptions, run_local_script
    from paceline.report.terminal import terminal_reporter
    from paceline.strategies.registry import parse_strategy

    chosen = parse_strategy(given["strategy"] or "allreduce")
    timeout, workers = given["timeout"], given["workers"]
    with terminal_reporter(str(chosen), quiet=given["quiet"]) as show:
        options = RunOptions(
            out=given["folder"],
            workers=2 if workers is None else workers,
            threads=given["threads"],
            timeout_s=DEFAULT_TIMEOUT_S if timeout is None else timeout,
            force=given["force"],
            on_event=show,
        )
        result = run_local_script(given["script"], given["args"] or [], chosen, options)
    typer.echo(
        f"{result['status']}: {result['samples']} samples, {result['updates']} updates in "
        f"{result['seconds']:.1f} s; run folder {given['folder']}"
    )


def launch_on_pool(given: dict[str, Any]) -> None:
    """Any script, on machines over SSH."""
    from paceline.cli.pool import print_repairs
    from paceline.cluster.pool_file import load_pool
    from paceline.cluster.selection import select_hosts
    from paceline.cluster.ssh import SshTimeouts
    from paceline.errors import UsageError
    from paceline.launch.script_run import ScriptRun, describe_launch, launch_script, prepare_script
    from paceline.launch.script_tasks import read_roles

    timeout = 10.0 if given["timeout"] is None else given["timeout"]
    if timeout <= 0:
        raise UsageError(f"--timeout is {timeout:g}: more than 0 seconds are needed")
    found = load_pool(given["pool"])
    print_repairs(found.repairs)
    if given["select"] == ["auto"]:
        hosts = plan_machines(given["pool"], found.pool, given["job"])
    elif given["job"] is not None:
        raise UsageError("--job needs --select auto: it is what machines are planned for")
    else:
        hosts = select_hosts(found.pool, given["select"] or [])
    run = ScriptRun(
        script=given["script"],
        args=tuple(given["args"] or ()),
        hosts=tuple(hosts),
        out=given["folder"],
        roles=read_roles(given["roles"]),
        project=given["project"],
        venv=given["venv"],
        force=given["force"],
        patience=SshTimeouts(connect_s=timeout),
        tell=lambda line: None if given["quiet"] else typer.echo(f"paceline: {line}", err=True),
        on_line=lambda label, line: typer.echo(f"[{label}] {line}"),
    )
    if given["dry_run"]:
        typer.echo(describe_launch(run, prepare_script(run)))
        return
    result = launch_script(run)
    typer.echo(f"done: {len(result['tasks'])} tasks in {result['seconds']:.1f} s; {run.out}")


def plan_machines(path: Path, pool: Pool, job: Path | None) -> Sequence[Host]:
    """Machines for a script: by a job like it, or by how fast each of them computes."""
    from paceline.cli.placement import plan_on_pool
    from paceline.job import refer_to_job
    from paceline.plan.search import choose_hosts_by_speed
    from paceline.strategies.registry import parse_strategy

    if job is None:
        hosts, why = choose_hosts_by_speed(pool)
        typer.echo(f"plan: {why}")
        return hosts
    # Scripts keep in step, as a rule; which machines are worth having depends on that.
    strategy = parse_strategy("allreduce")
    plan = plan_on_pool(path, pool, pool.hosts, refer_to_job(job, {}), strategy, choosing=True)
    plan.show()
    return plan.hosts
