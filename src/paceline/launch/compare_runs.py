"""Runs comparisons: several strategies with several seeds, or a matrix of runs.

A matrix is resumable and interleaved; failures are kept.
"""

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.arm_settings import ArmSettings
from paceline.launch.engines import fork_client
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
from paceline.launch.run import Run, check_sizes, run_to_result, run_training
from paceline.launch.run_options import RunOptions, new_run_name, usable_cores
from paceline.launch.settings import DEFAULT_TIMEOUT_S
from paceline.options import settings_to_plain
from paceline.report.comparison import Comparison, compare_tasks, write_comparison
from paceline.report.progress import MatrixProgress, terminal_reporter
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder, list_checkpoints, write_json
from paceline.telemetry.schema import RunResult

RETRY_STATUSES = ("cancelled",)
"""Statuses after which a run is repeated automatically."""


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
    run: Run = run_training,
    check: Callable[[int, Strategy, int], object] = check_sizes,
    place: Callable[[str], Placement] | None = None,
) -> Comparison:
    """Runs the comparison of `compare` with the given run options; `out` is its folder.

    `run` carries a run out, and `check` raises UsageError for one that it cannot carry out. `place`
    returns the place of a strategy; by default all use the launcher of the options.
    """
    folder, force = options.out, options.force

    def place_here(strategy: Strategy | str) -> Placement:
        return Placement(
            launcher=options.launcher,
            workers=options.workers,
            strategy=parse_strategy(strategy),
            job=job,
        )

    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds}")
    placed = [place_here(s) if place is None else place(str(s)) for s in strategies]
    for each in placed:
        check(resolved.batch, each.strategy, each.strategy.worker_count(each.workers))
    if (folder / "comparison.json").exists() and not force:
        raise UsageError(
            f"--out {folder} already contains a comparison; choose a new directory, or use "
            "--force to overwrite it"
        )
    clear_runs(folder)
    if run is run_training and all(each.launcher.supports_live_objects for each in placed):
        # All workers of all strategies get the same threads, including the one of `single`.
        options = replace(options, threads=options.threads_each)
        fork_client.warm_up()
    results: list[RunResult] = []
    # Seed by seed, so that a slow period of the machine affects all strategies equally.
    for seed in range(resolved.seed, resolved.seed + seeds):
        for number, each in enumerate(placed):
            strategy = each.strategy
            name = f"{number + 1}-{strategy.name}-seed{seed}"
            label = f"[{name}]" if run is run_training else "(virtual)"
            with terminal_reporter(f"{strategy} {label}", quiet=not progress) as show:
                mine = replace(
                    options,
                    out=folder / name,
                    recall=False,
                    workers=strategy.worker_count(each.workers),
                    launcher=each.launcher,
                    predicted=each.predicted,
                    labels={**options.labels, **label_as_given(strategies[number], strategy)},
                    on_event=show,
                )
                seeded = with_job_fields(each.job, seed=seed)
                result = run_to_result(run, seeded, strategy, mine)
            results.append({**result, "dir": name})
    return write_comparison(folder / "comparison.json", results)


def label_as_given(given: Strategy | str, strategy: Strategy) -> dict[str, str]:
    """Returns the label of a strategy whose text is not the canonical one.

    The canonical text omits defaults; a comparison of `ssp(3)` with `ssp(5)` must show both.
    """
    text = " ".join(str(given).rpartition(".py:")[2].split())
    if "".join(text.split()) == "".join(str(strategy).split()):
        return {}
    return {"arm": text}


def clear_runs(folder: Path) -> None:
    """Removes the runs of the replaced comparison."""
    for old in folder.glob("*-seed*"):
        if (old / "run.json").exists():
            RunFolder(old).clear()
            with contextlib.suppress(OSError):
                old.rmdir()


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
    """Repeat runs that failed or diverged."""
    progress: bool = False


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
    that are not simulated.

    A run that fails or diverges is kept and counted, and the others continue. Runs that already
    exist in the same folder are reused, so that an interrupted matrix is resumed by the same
    command. Raises UsageError before anything starts, for a mistake in any of the runs, and if the
    folder holds runs of another matrix.
    """
    places = places or LocalPlaces()
    cells = list_cells(matrix, options.given, options.command, places.count)
    for job in list_jobs(cells):
        job.check()
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out {options.out} is a file; use a directory")
    if not options.force:
        check_folder(options.out, cells)
    options.out.mkdir(parents=True, exist_ok=True)
    placed = {cell.name: places.place(cell) for cell in cells}
    # All workers of this machine get the same threads.
    here = max((cell.workers for cell in cells if cell.is_here), default=1)
    threads_here = options.threads or max(1, usable_cores() // here)
    sizes = {cell.name: (cell.job["model"], cell.job["data"], cell.job["epochs"]) for cell in cells}
    results: dict[str, RunResult] = {}
    with lock_matrix_folder(options.out):
        if options.force:
            clear_runs(options.out)
        about = {"format": 1, **matrix.model_dump(include={"title", "about", "study"})}
        runs = [cell.facts for cell in cells]
        write_json(options.out / "matrix.json", {**about, "runs": runs})
        if run is run_training and any(cell.is_here for cell in cells):
            fork_client.warm_up()
        progress = MatrixProgress(matrix.title, sizes, quiet=not options.progress)
        with contextlib.closing(progress) as view:
            try:
                for cell in cells:
                    kept = read_existing_result(options.out / cell.name, retry=options.retry)
                    if kept is None:
                        view.begin(cell.name)
                        is_local = cell.is_here or cell.twin is not None
                        threads = threads_here if is_local else options.threads
                        mine = replace(options, threads=threads)
                        kept = run_cell(cell, placed[cell.name], mine, view, run)
                        view.end(cell.name, kept)
                    else:
                        view.skip(cell.name, kept)
                    results[cell.name] = {**kept, "dir": cell.name}
            finally:
                # Ctrl-C still writes the comparison of the finished runs.
                comparison = compare_tasks(list(results.values()))
                write_json(options.out / "comparison.json", comparison)
    return comparison


@contextlib.contextmanager
def lock_matrix_folder(out: Path) -> Iterator[None]:
    """Locks the folder, so that only one command executes its runs."""
    with (out / "matrix.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another command is running the matrix in {out}; wait for it, or stop it"
            ) from None
        yield


def run_cell(
    cell: MatrixCell, placed: Placement, options: MatrixOptions, view: MatrixProgress, run: Run
) -> RunResult:
    folder = RunFolder(options.out / cell.name)
    half_done = bool(list_checkpoints(folder.checkpoints)) and not folder.result.exists()
    workers = placed.strategy.worker_count(placed.workers)
    try:
        mine = replace(
            options,
            **cell.run_values,
            out=folder.path,
            workers=workers,
            slowdowns=cell.slowdowns.parse(placed.workers),
            launcher=placed.launcher,
            predicted=placed.predicted,
            settings={**settings_to_plain(cell.placement), **settings_to_plain(cell.slowdowns)},
            resume=half_done,
            force=not half_done,
            recall=False,
            labels=cell.labels,
            on_event=view.show,
        )
        return run_to_result(placed.run or run, placed.job, placed.strategy, mine)
    except UsageError as error:
        raise UsageError(f"run {cell.name}: {error}") from None


def read_existing_result(path: Path, *, retry: bool) -> RunResult | None:
    """Returns the result of a run that does not need to be repeated."""
    folder = RunFolder(path)
    result = folder.read_result() if folder.result.exists() else None
    status = result and result.get("status")
    return None if status in RETRY_STATUSES or (retry and status != "done") else result


def check_folder(out: Path, cells: list[MatrixCell]) -> None:
    """Raises UsageError if an existing run is not the one that the matrix defines."""
    known = out / "matrix.json"
    if not known.exists():
        if (out / "comparison.json").exists():
            raise UsageError(
                f"--out {out} already contains another comparison; choose a new directory"
            )
        return
    try:
        before = {row["name"]: row for row in json.loads(known.read_text(encoding="utf-8"))["runs"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"cannot read {known}; choose a new directory, or start over with --force"
        ) from None
    for cell in cells:
        then = before.get(cell.name) if (out / cell.name).exists() else None
        now = without_data_location(cell.facts)
        if then is not None and without_data_location(then) != now:
            raise UsageError(
                f"--out {out} contains {cell.name} of another matrix; choose a new directory, or "
                "start over with --force"
            )


def without_data_location(row: Mapping[str, Any]) -> dict[str, object]:
    """Returns the facts of a run without the location of its data, which may have moved."""
    return {**row, "job": {k: v for k, v in row.get("job", {}).items() if k != "data_dir"}}
