"""Where a job runs: here, on the machines of a pool, or on an engine that runs already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.cluster.pool import Host, Pool
    from paceline.job import JobRef
    from paceline.launch.launcher import Launcher
    from paceline.plan.estimate import Estimate, PoolArrays
    from paceline.specs.strategy import Strategy

PoolFile = Annotated[
    Path | None, typer.Option(metavar="POOL", help="Train on these machines, over SSH.")
]
Select = Annotated[
    list[str] | None,
    typer.Option(help="Of the pool: all, gpu, cpu, energy, or auto (planned). [all]"),
]
ServersOn = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="The machine that serves parameters. [by the plan]"),
]
Objective = Annotated[
    str | None,
    typer.Option(help="What a plan makes small: time, energy, cost, or a mix as in plan. [time]"),
]
Project = Annotated[
    Path | None, typer.Option(help="The folder to copy. [the project around the job file]")
]
Venv = Annotated[
    bool, typer.Option("--venv", help="Make an environment from requirements.txt there.")
]
Engine = Annotated[
    str | None, typer.Option(help="Run on an engine in place of a pool: ray or spark.")
]
Address = Annotated[
    str | None, typer.Option(help="Of the engine, e.g. 10.0.0.1:6379 for Ray. [the local one]")
]
Master = Annotated[
    str | None, typer.Option(help="Of Spark, e.g. spark://10.0.0.1:7077. [as Spark is set up]")
]
LOCAL_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What a run needs to know of it; `after` is told the result."""

    launcher: Launcher
    workers: int
    strategy: Strategy
    reference: JobRef
    predicted: dict[str, Any] | None = None
    after: Callable[[dict[str, Any]], None] = lambda result: None


def choose_placement(given: dict[str, Any], tell: Callable[[str], None]) -> Placement:
    """Read the options of `paceline train`; raises UsageError before anything is started."""
    if given["pool"] is not None:
        opt.reject_conflicting("--pool", given, "workers", "engine", "address", "master")
        return _on_pool(given, tell)
    opt.require_option("--pool", given, "select", "servers_on", "objective")
    workers = LOCAL_WORKERS if given["workers"] is None else given["workers"]
    if given["engine"] is not None:
        return _on_engine(given, workers, tell)
    for name in ("project", "venv", "address", "master"):
        if given[name] not in (None, False):
            raise UsageError(f"--{name} needs --pool or --engine: here the job runs where it lies")
    from paceline.launch.engines.local import LocalLauncher

    return Placement(
        launcher=LocalLauncher(),
        workers=workers,
        strategy=_read_strategy(given),
        reference=opt.job_reference_from_options(
            given["job"], workers, given["batch_per_worker"], given
        ),
    )


def _read_strategy(given: dict[str, Any]) -> Strategy:
    from paceline.strategies.registry import parse_strategy

    if given["strategy"] == "auto":
        raise UsageError("--strategy auto needs --pool: a plan is made from what a pool says")
    return parse_strategy(given["strategy"])


# ---- engines ---------------------------------------------------------------------------------


def _on_engine(given: dict[str, Any], workers: int, tell: Callable[[str], None]) -> Placement:
    from paceline.errors import suggest_name
    from paceline.launch.engines.engine import EngineLauncher
    from paceline.launch.remote_launcher import bundle_project

    if given["engine"] not in ENGINES:
        raise UsageError(f"--engine {given['engine']}: {suggest_name(given['engine'], ENGINES)}")
    reference = opt.job_reference_from_options(
        given["job"], workers, given["batch_per_worker"], given
    )
    luggage = bundle_project(
        reference.file,
        out=given["out"],
        folder=given["project"],
        venv=given["venv"],
        tell=tell,
    )
    return Placement(
        launcher=EngineLauncher(
            ENGINES[given["engine"]](given), workers, luggage, threads=given["threads"] or 1
        ),
        workers=workers,
        strategy=_read_strategy(given),
        reference=reference,
    )


def _make_ray(given: dict[str, Any]) -> Any:
    from paceline.ray import RayEngine

    if given["master"] is not None:
        raise UsageError("--master is for spark: Ray's head node is named with --address")
    return RayEngine(given["address"], cpus_each=given["threads"] or 1)


def _make_spark(given: dict[str, Any]) -> Any:
    from paceline.spark.engine import SparkEngine

    if given["address"] is not None:
        raise UsageError("--address is for ray: Spark's master is named with --master")
    return SparkEngine(master=given["master"])


ENGINES: dict[str, Callable[[dict[str, Any]], Any]] = {"ray": _make_ray, "spark": _make_spark}


# ---- pools -----------------------------------------------------------------------------------


def _on_pool(given: dict[str, Any], tell: Callable[[str], None]) -> Placement:
    from paceline.cli.pool import print_repairs
    from paceline.cluster.pool_file import load_pool
    from paceline.cluster.selection import select_hosts
    from paceline.launch.engines.ssh import SshLauncher, find_host
    from paceline.launch.remote_launcher import bundle_project
    from paceline.strategies.registry import parse_strategy

    found = load_pool(given["pool"])
    print_repairs(found.repairs)
    pool = found.pool
    planned = given["strategy"] == "auto"
    words = given["select"] or (["auto"] if planned else ["all"])
    choosing = words == ["auto"]
    if given["objective"] is not None and not (planned or choosing):
        raise UsageError("--objective needs --strategy auto or --select auto: nothing is planned")
    hosts = pool.hosts if choosing else select_hosts(pool, words)
    servers_on = given["servers_on"] and find_host(pool.hosts, given["servers_on"], "--servers-on")
    if choosing and given["batch_per_worker"] is not None:
        raise UsageError("--select auto needs --batch: how many machines take part is not known")
    workers = len(hosts) if choosing else sum(host.workers for host in hosts)
    reference = opt.job_reference_from_options(
        given["job"], workers, given["batch_per_worker"], given
    )
    strategy = None if planned else parse_strategy(given["strategy"])
    plan = plan_on_pool(
        *(given["pool"], pool, hosts, reference, strategy),
        choosing=choosing,
        objective=given["objective"] or "time",
    )
    if planned or choosing:
        plan.show()
        hosts = tuple(plan.hosts)
    chosen = strategy or plan.strategy
    serving = [servers_on] if servers_on else plan.find_servers(chosen)
    launcher = SshLauncher(
        hosts,
        bundle_project(
            reference.file,
            out=given["out"],
            folder=given["project"],
            venv=given["venv"],
            tell=tell,
        ),
        servers_on=serving,
    )
    if chosen.servers_for(launcher.workers) and serving:
        tell(f"parameters are served on {', '.join(host.host for host in serving)}")
    return Placement(
        launcher=launcher,
        workers=launcher.workers,
        strategy=chosen,
        reference=reference,
        predicted=plan.predict(chosen),
        after=lambda result: plan.remember(given["out"], launcher.worker_hosts, result),
    )


def plan_on_pool(
    path: Path,
    pool: Pool,
    hosts: tuple[Host, ...],
    reference: JobRef,
    strategy: Strategy | None,
    *,
    choosing: bool,
    objective: str = "time",
) -> PoolPlan:
    """What is expected of the job on the pool, corrected by what earlier runs there took."""
    from paceline.plan.run_log import calibrate_from_log, history_path, read_history
    from paceline.plan.search import parse_objective, search, search_strategy
    from paceline.twin.workload import workload_of_job

    job = reference.resolve()
    job.check()
    records = read_history(history_path(path))
    # One worker a machine: more of them are not in the cost model.
    single = choosing or strategy is None
    used = [h.model_copy(update={"workers": 1}) for h in hosts] if single else list(hosts)
    smaller = pool.model_copy(update={"hosts": tuple(used)})
    machines = calibrate_from_log(smaller, workload_of_job(job), records)
    wish = parse_objective(objective, None, None)
    plain = None
    everybody = tuple(range(len(machines.hosts)))
    best: Estimate | None = None
    if single:
        from paceline.plan.explanation import plan_to_json

        if not choosing:
            found = search_strategy(machines, wish)
        elif strategy is not None:
            found = search(
                machines, wish, [str(strategy)], may_be_alone=_allows_one_worker(strategy)
            )
        else:
            found = search(machines, wish)
        best = found.chosen
        plain = plan_to_json(machines, found, wish)
    earlier = sum(r.model == machines.work.model for r in records)
    return PoolPlan(
        path=path,
        machines=machines,
        chosen=best.machines if best is not None else everybody,
        best=best,
        plain=plain,
        earlier=earlier,
    )


def _allows_one_worker(strategy: Strategy) -> bool:
    try:
        strategy.check_workers(1)
    except UsageError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A choice of machines of a pool, and what is expected of it."""

    path: Path
    machines: PoolArrays
    chosen: tuple[int, ...]
    best: Estimate | None
    plain: dict[str, Any] | None
    earlier: int
    """Past runs of this model on this pool."""

    @property
    def hosts(self) -> list[Host]:
        return [self.machines.hosts[place] for place in self.chosen]

    @property
    def strategy(self) -> Strategy:
        from paceline.strategies.registry import parse_strategy

        assert self.best is not None
        return parse_strategy(self.best.strategy)

    def show(self) -> None:
        from paceline.cli.plan import print_corrections, show_plan

        assert self.plain is not None
        show_plan(self.plain)
        print_corrections(self.earlier)

    def find_servers(self, strategy: Strategy) -> list[Host]:
        from paceline.plan.search import choose_server_hosts

        count = strategy.servers_for(len(self.chosen))
        places = choose_server_hosts(self.machines, self.chosen, count)
        return [self.machines.hosts[place] for place in places]

    def predict(self, strategy: Strategy) -> dict[str, Any] | None:
        """None for what the cost model does not know: several phases, several workers a machine."""
        import numpy as np

        from paceline.plan.estimate import estimate

        if len(strategy.phases) > 1 or any(host.workers > 1 for host in self.hosts):
            return None
        found = estimate(self.machines, np.array(self.chosen), strategy)
        return {
            "step_s": found.step_s,
            "seconds": found.seconds,
            "seconds_interval": list(found.interval),
        }

    def remember(self, out: Path, seats: list[Host], result: dict[str, Any]) -> None:
        """Say predicted beside actual, and keep it for later plans."""
        from paceline.plan.run_log import (
            LoggedRun,
            WorkerTiming,
            add_record,
            describe_prediction_error,
            history_path,
        )
        from paceline.twin.calibration import measure_shares

        actual = result["predicted"]
        if actual is None:
            return
        line = describe_prediction_error(actual, result)
        if line is None:
            return
        typer.echo(line)
        shares = measure_shares(out, len(seats))
        if shares is None:
            return  # Too short a run to learn from.
        record = LoggedRun(
            model=self.machines.work.model,
            batch=self.machines.work.batch,
            strategy=str(result["strategy"]),
            machines=tuple(host.host for host in seats),
            work=tuple(
                WorkerTiming(host.host, samples, busy_s)
                for host, (samples, busy_s) in zip(seats, shares, strict=True)
            ),
            step_s=actual["actual_step_s"],
            predicted_step_s=actual["step_s"],
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        path = history_path(self.path)
        try:
            add_record(path, record)
        except OSError as error:
            typer.echo(f"{path} cannot be written ({error.strerror}): nothing is learnt", err=True)
