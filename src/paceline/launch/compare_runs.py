"""Comparisons: several strategies with several seeds, or a matrix of runs."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.arm_settings import ArmSettings
from paceline.launch.engines.local import LocalLauncher
from paceline.launch.matrix_file import (
    JobFields,
    Matrix,
    MatrixCell,
    count_workers_here,
    list_cells,
    list_jobs,
)
from paceline.launch.placement import Placement
from paceline.launch.run import Run, check_sizes, run_training
from paceline.launch.run_list import PlannedRun, RunList
from paceline.launch.run_options import RunOptions, new_run_name, usable_cores
from paceline.launch.settings import DEFAULT_TIMEOUT_S, ProcessSettings
from paceline.options import settings_to_plain
from paceline.report.comparison import Comparison, compare_tasks, write_comparison
from paceline.report.progress import MatrixProgress, terminal_reporter
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import OnEvent, RunNotice, ignore_notice, write_json
from paceline.telemetry.schema import RunResult

RECORD = "planned.json"
"""Describes the runs of a comparison of strategies."""


def compare(
    job: Job | JobRef,
    strategies: list[Strategy | str],
    workers: int = 2,
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    threads: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    troubles: tuple[InjectedSlowdown, ...] = (),
    force: bool = False,
    progress: bool = False,
) -> Comparison:
    """Runs every strategy with every seed; returns the contents of `comparison.json`.

    A run that fails or diverges is kept and counted; the others still run. `single` always runs
    on one worker.
    """
    options = RunOptions(
        out=Path(out) if out is not None else Path("runs") / new_run_name("compare"),
        workers=workers,
        threads=threads,
        timeout_s=timeout_s,
        slowdowns=troubles,
        force=force,
    )
    return compare_strategies(job, strategies, options, seeds=seeds, progress=progress)


def compare_strategies(
    job: Job | JobRef,
    strategies: Sequence[Strategy | str],
    options: RunOptions,
    *,
    seeds: int = 1,
    progress: bool = False,
    retry: bool = False,
    run: Run = run_training,
    check: Callable[[int, Strategy, int], object] = check_sizes,
    place: Callable[[str], Placement] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Runs the comparison of `compare` with the given run options; `out` is its folder.

    `run` carries a run out, and `check` raises UsageError for one that it cannot carry out. `place`
    returns the place of a strategy; by default all use the launcher of the options. With `resume`,
    completed runs of the folder are reused, and with `retry` a run that fails is repeated once.
    """
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds}")

    def place_here(strategy: Strategy | str) -> Placement:
        return Placement(
            launcher=options.launcher,
            workers=options.workers,
            strategy=parse_strategy(strategy),
            job=job,
        )

    placed = [place_here(s) if place is None else place(str(s)) for s in strategies]
    for each in placed:
        workers = each.strategy.worker_count(each.workers)
        check(resolved.batch, each.strategy, workers)
        if (each.run or run) is run_training:
            each.launcher.check_capacity(workers, each.strategy.servers_for(workers))
    exists = any((options.out / name).exists() for name in ("comparison.json", RECORD))
    if exists and not (options.force or options.resume):
        raise UsageError(
            f"--out {options.out} already contains a comparison; choose a new directory, use "
            "--resume to continue it, or --force to overwrite it"
        )
    if run is run_training and all(each.launcher.supports_live_objects for each in placed):
        # All workers of all strategies get the same threads, including the one of `single`.
        options = replace(options, threads=options.threads_each)
    runs, titles = [], {}
    # Seed by seed, so that a slow period of the machine affects all strategies equally.
    for seed in range(resolved.seed, resolved.seed + seeds):
        for number, each in enumerate(placed):
            name = f"{number + 1}-{each.strategy.name}-seed{seed}"
            label = label_as_given(strategies[number], each.strategy)
            mine = replace(options, labels={**options.labels, **label})
            seeded = replace(each, job=with_job_fields(each.job, seed=seed))
            facts = describe_planned(seeded, mine, str(strategies[number]), seed)
            runs.append(PlannedRun(name=name, facts=facts, placement=seeded, options=mine))
            titles[name] = f"{each.strategy} " + (
                f"[{name}]" if run is run_training else "(virtual)"
            )
    results = RunList(
        out=options.out,
        runs=runs,
        record=RECORD,
        about={"format": 1},
        resume=options.resume,
        retry=retry,
        force=options.force or not options.resume,
        tell=tell,
    )
    found: list[Comparison] = []

    def summarize(done: list[RunResult]) -> None:
        found.append(write_comparison(options.out / "comparison.json", done))

    with contextlib.closing(RunByRun(titles, quiet=not progress)) as view:
        results.execute(view, run, summarize)
    return found[-1]


class RunByRun:
    """Shows each run of a comparison like a single one."""

    def __init__(self, titles: Mapping[str, str], *, quiet: bool) -> None:
        self._titles = titles
        self._quiet = quiet
        self._shown = contextlib.ExitStack()
        self._show: OnEvent = ignore_notice

    def begin(self, name: str) -> None:
        reporter = terminal_reporter(self._titles[name], quiet=self._quiet)
        self._show = self._shown.enter_context(reporter)

    def show(self, notice: RunNotice) -> None:
        self._show(notice)

    def end(self, name: str, result: Mapping[str, Any]) -> None:
        self.close()

    def skip(self, name: str, result: Mapping[str, Any]) -> None:
        """Shows nothing."""

    def close(self) -> None:
        self._shown.close()


def describe_planned(
    placed: Placement, options: RunOptions, strategy: str, seed: int
) -> dict[str, object]:
    """Returns the facts on which the result of a run depends."""
    if isinstance(placed.job, JobRef):
        job: dict[str, object] = placed.job.model_dump(mode="json", exclude={"file"})
        job["file"] = placed.job.file.name if placed.job.file is not None else None
    else:
        job = dict(placed.job.describe())
    of_processes = settings_to_plain(options, ProcessSettings)
    return {
        "strategy": strategy,
        "seed": seed,
        "workers": placed.workers,
        "engine": placed.launcher.engine,
        "job": job,
        "options": {**options.settings, **of_processes},
        "slowdowns": [slowdown.to_plain() for slowdown in options.slowdowns],
    }


def label_as_given(given: Strategy | str, strategy: Strategy) -> dict[str, str]:
    """Returns the label of a strategy whose text is not the canonical one.

    The canonical text omits defaults; a comparison of `ssp(3)` with `ssp(5)` must show both.
    """
    text = " ".join(str(given).rpartition(".py:")[2].split())
    if "".join(text.split()) == "".join(str(strategy).split()):
        return {}
    return {"arm": text}


def with_job_fields(job: Job | JobRef, **changes: object) -> Job | JobRef:
    if isinstance(job, JobRef):
        return job.model_copy(update={"fields": {**job.fields, **changes}})
    return job.model_copy(update=changes)


@dataclass(frozen=True, kw_only=True)
class MatrixOptions(RunOptions):
    """Options of running a matrix, except its contents; `workers` is that of each cell."""

    given: JobFields
    """Job fields that replace those of the file, such as `data_dir`."""
    command: ArmSettings = ArmSettings()
    """Settings that replace those of the file, but not those of an arm."""
    retry: bool = False
    """Repeat runs that failed or diverged, and once those that fail."""
    progress: bool = False
    tell: Callable[[str], None] = lambda line: None


class CellPlaces(Protocol):
    """Chooses the places of the runs of a matrix. Raises UsageError before anything starts."""

    def count(self, settings: ArmSettings, own: int | None, axis: int) -> int:
        """Returns the number of workers of an arm: of its place, its own, or that of the axis."""
        ...

    def place(self, cell: MatrixCell) -> Placement: ...


class LocalPlaces:
    """Places all runs on this machine."""

    def count(self, settings: ArmSettings, own: int | None, axis: int) -> int:
        return count_workers_here(settings, own, axis)

    def place(self, cell: MatrixCell) -> Placement:
        if not cell.is_here:
            raise UsageError(f"run {cell.name} needs other machines; use `paceline compare`")
        return Placement(
            launcher=LocalLauncher(),
            workers=cell.workers,
            strategy=cell.spec,
            job=JobRef(fields=cell.job),
        )


def run_matrix(
    matrix: Matrix,
    options: MatrixOptions,
    *,
    run: Run = run_training,
    places: CellPlaces | None = None,
) -> Comparison:
    """Executes every missing run; returns the contents of `comparison.json`.

    `places` chooses where the runs of each arm take place, and `run` carries out those of arms
    that are not simulated. A run that fails or diverges is kept and counted, and the others
    continue. Runs that already exist in the same folder are reused, so that an interrupted matrix
    is resumed by the same command. Raises UsageError before anything starts, for a mistake in any
    of the runs, and if the folder holds runs of another matrix.
    """
    places = places or LocalPlaces()
    cells = list_cells(matrix, options.given, options.command, places.count)
    for job in list_jobs(cells):
        job.check()
    placed = {cell.name: places.place(cell) for cell in cells}
    # All workers of this machine get the same threads.
    here = max((cell.workers for cell in cells if cell.is_local), default=1)
    local = replace(options, threads=options.threads or max(1, usable_cores() // here))
    runs = [
        plan_cell(cell, placed[cell.name], local if cell.is_local else options) for cell in cells
    ]
    found: list[Comparison] = []

    def summarize(done: list[RunResult]) -> None:
        found.append(compare_tasks(done))
        write_json(options.out / "comparison.json", found[-1])

    listed = RunList(
        out=options.out,
        runs=runs,
        record="matrix.json",
        about={"format": 1, **matrix.model_dump(include={"title", "about", "study"})},
        resume=options.resume,
        retry=options.retry,
        force=options.force,
        tell=options.tell,
    )
    sizes = {cell.name: (cell.job["model"], cell.job["data"], cell.job["epochs"]) for cell in cells}
    progress = MatrixProgress(matrix.title, sizes, quiet=not options.progress)
    with contextlib.closing(progress) as view:
        listed.execute(view, run, summarize)
    return found[-1]


def plan_cell(cell: MatrixCell, placed: Placement, options: MatrixOptions) -> PlannedRun:
    try:
        mine = replace(
            options,
            **cell.run_values,
            slowdowns=cell.slowdowns.parse(placed.workers),
            faults=cell.slowdowns.fault,
            settings={**settings_to_plain(cell.placement), **settings_to_plain(cell.slowdowns)},
            labels=cell.labels,
        )
    except UsageError as error:
        raise UsageError(f"run {cell.name}: {error}") from None
    return PlannedRun(name=cell.name, facts=cell.facts, placement=placed, options=mine)
