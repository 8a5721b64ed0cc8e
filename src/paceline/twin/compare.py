"""Compares several strategies in simulated runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.errors import PacelineError, UsageError
from paceline.job import Job, JobRef
from paceline.launch.compare_runs import clear_runs, label_as_given, with_job_fields
from paceline.launch.run import check_sizes
from paceline.report.comparison import Comparison, write_comparison
from paceline.report.terminal import terminal_reporter
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.schema import RunResult
from paceline.twin.run import TwinOptions, check_servers, run_twin


def run_labelled(
    job: Job | JobRef, strategy: Strategy, options: TwinOptions, *, progress: bool
) -> RunResult:
    with terminal_reporter(f"{strategy} (virtual)", quiet=not progress) as show:
        return run_twin(job, strategy, dataclasses.replace(options, show=show))


def compare_twins(
    job: Job | JobRef,
    strategies: Sequence[Strategy | str],
    options: TwinOptions,
    seeds: int = 1,
    *,
    progress: bool = False,
) -> Comparison:
    """Simulates every strategy with every seed; failed and diverged runs are included."""
    folder = options.out
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    chosen = [parse_strategy(strategy) for strategy in strategies]
    for strategy in chosen:
        workers = strategy.worker_count(options.count)
        check_sizes(resolved.batch, strategy, workers)
        check_servers(strategy, workers)
    if (folder / "comparison.json").exists() and not options.force:
        raise UsageError(
            f"--out {folder} already contains a comparison; choose a new directory, or use "
            "--force to overwrite it"
        )
    clear_runs(folder)
    results: list[RunResult] = []
    for seed in range(resolved.seed, resolved.seed + seeds):
        for number, strategy in enumerate(chosen):
            out = folder / f"{number + 1}-{strategy.name}-seed{seed}"
            labels = {**options.labels, **label_as_given(strategies[number], strategy)}
            run_options = dataclasses.replace(options, out=out, labels=labels)
            try:
                result = run_labelled(
                    with_job_fields(job, seed=seed), strategy, run_options, progress=progress
                )
            except UsageError:
                raise
            except PacelineError:
                result = RunFolder(out).read_result()
            results.append({**result, "dir": out.name})
    return write_comparison(folder / "comparison.json", results)
