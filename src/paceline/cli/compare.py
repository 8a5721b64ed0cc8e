"""Commands that run one job several times: `paceline compare`, `demo` and `tune`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from paceline.cli.commands import (
    CommonOptions,
    JobFile,
    command,
    given_options,
    make_log,
    print_table,
    refer_to_options,
    refuse_together,
    require_with,
    split_list,
)
from paceline.cli.placement import LOCAL_WORKERS, MatrixPlaces, PlaceRequest, Places
from paceline.errors import UsageError
from paceline.job import Job
from paceline.launch.settings import PlacementSettings, ProcessSettings, SlowdownSettings
from paceline.options import RUN, Option, field_values, settings, settings_to_plain

if TYPE_CHECKING:
    from paceline.launch.placement import Placement
    from paceline.report.comparison import Comparison

DEFAULT_SEEDS, DEFAULT_SCALE = 1, "full"
"""Defaults of options that cannot be combined with --matrix, or that require it."""


@settings(RUN)
class CompareOptions:
    out: Annotated[Path, Option(short="o", metavar="DIR")]
    """Directory for all runs."""
    strategies: Annotated[str | None, Option(metavar="LIST")] = None
    """Strategies, separated by semicolons: "single; allreduce; ps". Required without --matrix."""
    seeds: Annotated[int | None, Field(ge=1), Option(default=str(DEFAULT_SEEDS))] = None
    """Number of runs per strategy, with consecutive seeds."""
    workers: Annotated[
        int | None, Field(ge=1), Option(default=f"{LOCAL_WORKERS}, or as the pool defines")
    ] = None
    """Total number of worker processes, excluding servers."""
    resume: bool = False
    """Continue the comparison in --out: completed runs are reused, the others are repeated."""
    retry: bool = False
    """Repeat a run that fails once, and failed or diverged runs of the comparison in --out."""
    force: bool = False
    """Overwrite an existing comparison in --out."""


@settings("Experiment matrix")
class MatrixChoice:
    """A matrix, and options that apply only to its runs."""

    matrix: Annotated[str | None, Option(metavar="FILE|NAME")] = None
    """Matrix file, or name of a matrix that ships with Paceline, instead of --strategies."""
    scale: Annotated[Literal["full", "small"] | None, Option(default=DEFAULT_SCALE)] = None
    """Run the full matrix or its small part."""
    twin: Annotated[str | None, Option(metavar="POOL|N")] = None
    """Simulate the matrix on a pool file or on this many equal machines."""


@command
def compare(
    job: JobFile = None,
    /,
    *,
    options: CompareOptions,
    processes: ProcessSettings,
    common: CommonOptions,
    fields: Job,
    matrix: MatrixChoice,
    where: PlacementSettings,
    slowdowns: SlowdownSettings,
) -> int:
    if matrix.matrix is not None:
        reason = "the matrix file defines it; change the file instead"
        if job is not None:
            raise UsageError(f"--matrix and a job file cannot be combined: {reason}")
        in_matrix = {
            "strategies": options.strategies,
            "seeds": options.seeds,
            "workers": options.workers,
            "batch-per-worker": common.batch_per_worker,
            **given_options(slowdowns),
            **{n: n in fields.model_fields_set for n in ("model", "data", "batch", "seed")},
        }
        refuse_together("--matrix", in_matrix, reason)
        return compare_matrix(matrix, options, processes, common, fields, where)
    require_with("--matrix", given_options(matrix), "it applies to the runs of a matrix")
    if options.strategies is None:
        raise UsageError(
            '--strategies or --matrix is required, for example --strategies "allreduce; ps"'
        )
    from paceline.launch.compare_runs import compare_strategies
    from paceline.launch.run_options import RunOptions
    from paceline.strategies.registry import parse_strategies

    parse_strategies(options.strategies)  # Raises before anything else is checked.
    places = Places(make_log(quiet=common.quiet))
    workers = places.count_workers(where, options.workers)

    def request(strategy: str) -> PlaceRequest:
        return PlaceRequest(
            strategy=strategy,
            where=where,
            refer=lambda n: refer_to_options(job, fields, n, common.batch_per_worker),
            out=options.out,
            workers=None if where.pool is not None else workers,
            threads=processes.threads,
            batch_is_per_worker=common.batch_per_worker is not None,
        )

    with places:
        comparison = compare_strategies(
            refer_to_options(job, fields, workers, common.batch_per_worker),
            split_list(options.strategies),
            RunOptions(
                **field_values(processes, ProcessSettings),
                out=options.out,
                workers=workers,
                slowdowns=slowdowns.parse(workers),
                faults=slowdowns.fault,
                resume=options.resume,
                force=options.force,
                settings={**settings_to_plain(where), **settings_to_plain(slowdowns)},
            ),
            seeds=options.seeds or DEFAULT_SEEDS,
            progress=not common.quiet,
            retry=options.retry,
            place=lambda strategy: places.place(request(strategy)),
            tell=make_log(quiet=common.quiet),
        )
    return show_comparison(comparison, options.out)


def compare_matrix(
    chosen: MatrixChoice,
    options: CompareOptions,
    processes: ProcessSettings,
    common: CommonOptions,
    fields: Job,
    where: PlacementSettings,
) -> int:
    from paceline.launch.arm_settings import ArmSettings
    from paceline.launch.compare_runs import MatrixOptions, run_matrix
    from paceline.launch.matrix_file import read_matrix
    from paceline.launch.reproduction import omit_peers

    assert chosen.matrix is not None
    matrix = read_matrix(chosen.matrix, scale=chosen.scale or DEFAULT_SCALE)
    matrix, omitted = omit_peers(matrix)
    for text in omitted:
        make_log(quiet=common.quiet)(f"omitted arm: {text}")
    given = {field: getattr(fields, field) for field in fields.model_fields_set}
    if given.get("data_dir") is not None:
        given["data_dir"] = str(Path(given["data_dir"]).resolve())
    place = given_options(where)
    if chosen.twin is not None:
        refuse_together("--twin", place, "a simulation has its own machines")
        place["twin"] = chosen.twin
    matrix_options = MatrixOptions(
        **field_values(processes, ProcessSettings),
        out=options.out,
        given=given,
        command=ArmSettings(where=place, run=given_options(processes)),
        resume=options.resume,
        retry=options.retry,
        force=options.force,
        progress=not common.quiet,
        tell=make_log(quiet=common.quiet),
    )
    with Places(make_log(quiet=common.quiet)) as places:
        comparison = run_matrix(matrix, matrix_options, places=MatrixPlaces(places, options.out))
    return show_comparison(comparison, options.out, title=matrix.title)


def show_comparison(
    comparison: Comparison,
    out: Path,
    title: str = "Strategies compared",
    after_table: Callable[[], None] = lambda: None,
) -> int:
    """Prints the table and writes a report of all runs; returns 1 if a run failed, else 0."""
    from rich.console import Console

    from paceline.report.study_tables import results_table
    from paceline.report.writer import write_report

    report = out / "report.html"
    write_report([out], report, title=title)
    console = Console()
    for task in comparison.get("tasks", [comparison]):
        if "task" in task:
            console.print(task["task"], style="bold", markup=False)
        console.print(results_table(task))
    after_table()
    print(f"report: {report}")
    if comparison["runs_failed"]:
        print(f"paceline: {name_failed_runs(comparison)}", file=sys.stderr)
        return 1
    return 0


def name_failed_runs(comparison: Comparison) -> str:
    """Returns one line with all runs that are not done, and why."""
    failed = [
        f"{run['dir']} {run['status']}" + (f" ({run['error']})" if run["error"] else "")
        for entry in comparison["strategies"]
        for run in entry["runs"]
        if run["status"] != "done"
    ]
    return f"{len(failed)} of {comparison['runs_total']} runs are not done: {'; '.join(failed)}"


@settings(RUN)
class TuneOptions:
    out: Annotated[Path, Option(short="o", metavar="DIR")]
    """Directory for all runs."""
    first: Annotated[str, Option(metavar="STRATEGY")] = "allreduce"
    """Strategy to begin with."""
    second: Annotated[str, Option(metavar="STRATEGY")] = "ps"
    """Strategy to switch to."""
    tolerance: Annotated[float, Field(ge=0)] = 0.005
    """Acceptable loss of validation accuracy."""
    sweep: Annotated[str | None, Option(metavar="LIST")] = None
    """Further strategies to try, separated by semicolons: "local_sgd(h=8); ps"."""
    twin: Annotated[str | None, Option(metavar="POOL|N")] = None
    """Simulate all runs on a pool file or on this many equal machines."""
    workers: Annotated[
        int | None,
        Field(ge=1),
        Option(default=f"{LOCAL_WORKERS}, or as the pool or --twin defines"),
    ] = None
    """Total number of worker processes, excluding servers."""


@command
def tune(
    job: JobFile = None,
    /,
    *,
    options: TuneOptions,
    processes: ProcessSettings,
    common: CommonOptions,
    fields: Job,
    where: PlacementSettings,
    slowdowns: SlowdownSettings,
) -> None:
    from paceline.launch.arm_settings import ArmSettings
    from paceline.launch.engines.local import LocalLauncher
    from paceline.launch.launcher import Launcher
    from paceline.launch.run import Run, run_training
    from paceline.launch.run_options import RunOptions
    from paceline.launch.switch_search import SwitchSearch
    from paceline.strategies.registry import parse_strategies, parse_strategy

    for name in ("until", "patience", "checkpoint_every"):
        if name in fields.model_fields_set:
            raise UsageError(
                f"--{name.replace('_', '-')} cannot be combined with tune: runs are compared at "
                "full length, and each one saves a checkpoint per epoch; remove the option"
            )
    run: Run = run_training
    places = Places(make_log(quiet=common.quiet))
    machines: dict[str, Any] = ArmSettings(where=given_options(where)).where
    workers = places.count_workers(where, options.workers)
    if options.twin is not None:
        refuse_together("--twin", machines, "a simulation has its own machines")
        from paceline.twin.clusters import read_cluster
        from paceline.twin.run import run_in_twin

        cluster = read_cluster(options.twin)
        run, machines = run_in_twin(cluster), cluster.to_plain()
        slots = len(cluster.slots)
        workers = options.workers or slots
        if workers > slots:
            raise UsageError(
                f"--workers must be 1 to {slots}, got {workers}: the cluster has {slots} worker "
                "slots"
            )

    reference = refer_to_options(job, fields, workers, common.batch_per_worker)
    with places:
        launcher: Launcher = LocalLauncher()
        if where.pool is not None or where.engine is not None:
            # All runs use the machines of the first strategy.
            placed = places.place(
                PlaceRequest(
                    strategy=str(parse_strategy(options.first)),
                    where=where,
                    refer=lambda n: reference,
                    out=options.out,
                    workers=options.workers,
                    threads=processes.threads,
                    batch_is_per_worker=common.batch_per_worker is not None,
                )
            )
            launcher, workers = placed.launcher, placed.workers
        search = SwitchSearch(
            reference,
            parse_strategy(options.first),
            parse_strategy(options.second),
            RunOptions(
                **field_values(processes, ProcessSettings),
                out=options.out,
                workers=workers,
                slowdowns=slowdowns.parse(workers),
                faults=slowdowns.fault,
                launcher=launcher,
                settings={**settings_to_plain(where), **settings_to_plain(slowdowns)},
            ),
            tolerance=options.tolerance,
            others=parse_strategies(options.sweep) if options.sweep else [],
            tell=make_log(quiet=common.quiet, form="{}"),
            run=run,
            where=machines or None,
        )
        show_search(search.search())


def show_search(found: dict[str, Any]) -> None:
    """Prints all runs by time, and the recommendation."""
    rows = [
        {
            "strategy": probe["strategy"],
            "synchronous": f"{100 * probe['share']:.0f}%",
            "val acc": "-" if probe["val_acc"] is None else f"{probe['val_acc']:.4f}",
            "test acc": "-" if probe["test_acc"] is None else f"{probe['test_acc']:.4f}",
            "seconds": f"{probe['seconds']:.{1 if probe['seconds'] >= 10 else 3}f}",
            "status": probe["status"],
        }
        for probe in sorted(found["probes"], key=lambda p: p["seconds"])
    ]
    print_table(rows, left=("strategy", "status"), title="Accuracy and time")
    print(
        f"smallest share of {found['first']} that keeps the accuracy: "
        f"{100 * found['smallest_share']:.0f}%"
    )
    print(f"recommended: {found['evidence']}")


DEMO_WORKERS = 4


@settings()
class DemoOptions:
    out: Annotated[Path | None, Option(short="o", metavar="DIR", default="runs/<time>-demo")] = None
    """Directory for all runs."""
    workers: Annotated[
        int | None, Field(ge=1), Option(default=f"{DEMO_WORKERS}, or as the pool defines")
    ] = None
    """Total number of worker processes, excluding servers; the last one is slowed down."""
    epochs: Annotated[int, Field(ge=1)] = 10
    """Number of epochs over the 1,297 training images."""


SLOWDOWN = 3.0
"""Factor by which the demo slows its last worker down."""


@command
def demo(*, options: DemoOptions, where: PlacementSettings) -> int:
    from paceline.job import JobRef, build_job
    from paceline.launch.compare_runs import compare_strategies
    from paceline.launch.run_options import RunOptions, new_run_name
    from paceline.specs.slowdown import InjectedSlowdown
    from paceline.twin.clusters import read_cluster
    from paceline.twin.run import TwinOptions, compare_twins

    folder = options.out if options.out is not None else Path("runs") / new_run_name("demo")
    fields: dict[str, Any] = {"data": "digits", "lr": 0.05, "checkpoint_every": "never"}
    places = Places(make_log(quiet=False))
    own = options.workers if where.pool is not None else options.workers or DEMO_WORKERS
    workers = places.count_workers(where, own)
    slow = (InjectedSlowdown(workers - 1, factor=SLOWDOWN),) if workers > 1 else ()
    machines = "the cluster" if where.engine is not None else "this machine"
    machines = "the machines of the pool" if where.pool is not None else machines
    print(
        f"Training a digit classifier with {workers} worker processes on {machines}, "
        f"{options.epochs} epochs, with four strategies.\n"
        f"The last worker is {SLOWDOWN:g} times slower than the others:",
        flush=True,
    )
    job = JobRef(fields={**fields, "model": "resnet8", "epochs": options.epochs, "batch": 128})

    def place(strategy: str) -> Placement:
        request = PlaceRequest(
            strategy=strategy, where=where, refer=lambda n: job, out=folder, workers=own
        )
        return places.place(request)

    with places:
        comparison = compare_strategies(
            job,
            ["allreduce", "allreduce(balance=auto)", "ps", "auto"],
            RunOptions(out=folder, workers=workers, slowdowns=slow),
            progress=True,
            place=place,
        )
    title = f"Paceline demo: one slow worker of {workers}"
    real = show_comparison(comparison, folder, title=title)
    print(_conclude(folder, slow=bool(slow)))
    print(
        "\nThe same on a simulated cluster of eight published machines, whose step times vary; "
        "time is virtual, gradients are real:",
        flush=True,
    )
    virtual = folder / "eight-machines"
    comparison = compare_twins(
        build_job(**fields, model="mlp-128", epochs=options.epochs, batch=64),
        ["allreduce", "ps", "switch(allreduce, ps, at=50%)", "auto"],
        TwinOptions(out=virtual, pool=read_cluster("published-eight"), threads=1),
    )
    title = "Paceline demo: eight published machines, simulated"
    return max(real, show_comparison(comparison, virtual, title=title))


def _conclude(folder: Path, *, slow: bool) -> str:
    """Returns what the comparison shows, in training time without startup."""
    from paceline.report.runs import load_runs

    train_s = {
        run.result["strategy"]: run.result["stages"]["train"] or 0.0
        for run in load_runs([folder])
        if run.result["status"] == "done"
    }
    base, chosen = train_s.get("allreduce", 0.0), train_s.get("auto", 0.0)
    if not (slow and base and chosen):
        return ""
    return (
        f"allreduce waits for the slow worker in every step: {base:.1f} s of training. "
        f"auto measured the workers and needed {chosen:.1f} s, {100 * chosen / base:.0f}% of that."
    )
