"""Compares several strategies with several seeds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.engines import fork_client
from paceline.launch.run import Run, check_sizes, run_to_result, run_training
from paceline.launch.run_options import RunOptions, new_run_name
from paceline.launch.settings import DEFAULT_TIMEOUT_S
from paceline.report.comparison import Comparison, write_comparison
from paceline.report.terminal import terminal_reporter
from paceline.specs.slowdown import InjectedSlowdown
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.schema import RunResult


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
) -> Comparison:
    """Runs the comparison of `compare` with the given run options; `out` is its folder.

    `run` carries a run out, and `check` raises UsageError for one that it cannot carry out.
    """
    folder, workers, force = options.out, options.workers, options.force
    chosen = [parse_strategy(s) for s in strategies]
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds}")
    for strategy in chosen:
        check(resolved.batch, strategy, strategy.worker_count(workers))
    if (folder / "comparison.json").exists() and not force:
        raise UsageError(
            f"--out {folder} already contains a comparison; choose a new directory, or use "
            "--force to overwrite it"
        )
    clear_runs(folder)
    if run is run_training:
        # All workers of all strategies get the same threads, including the one of `single`.
        options = dataclasses.replace(options, threads=options.threads_each)
        fork_client.warm_up()
    results: list[RunResult] = []
    # Seed by seed, so that a slow period of the machine affects all strategies equally.
    for seed in range(resolved.seed, resolved.seed + seeds):
        for number, strategy in enumerate(chosen):
            name = f"{number + 1}-{strategy.name}-seed{seed}"
            label = f"[{name}]" if run is run_training else "(virtual)"
            with terminal_reporter(f"{strategy} {label}", quiet=not progress) as show:
                mine = dataclasses.replace(
                    options,
                    out=folder / name,
                    workers=strategy.worker_count(workers),
                    labels={**options.labels, **label_as_given(strategies[number], strategy)},
                    on_event=show,
                )
                seeded = with_job_fields(job, seed=seed)
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
