"""`paceline attach`, `paceline stop` and `paceline resume`: commands for the folder of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from paceline.cli.commands import CommonOptions, argument, command
from paceline.cli.train import DetachOption, TrainOptions, run_train
from paceline.errors import RunFailed, UsageError
from paceline.job import Job, JobRef
from paceline.launch.background import follow_run, read_config, stop_run
from paceline.launch.settings import (
    ORPHAN_GRACE_S,
    PlacementSettings,
    RunSettings,
    SlowdownSettings,
)
from paceline.options import Option, build_settings, option_fields, settings

INTERRUPTED = 130

T = TypeVar("T")
RunPath = Annotated[Path, argument("Run folder.")]


@settings()
class AttachOptions:
    quiet: bool = False
    """Do not show progress."""


@command
def attach(folder: RunPath, /, *, options: AttachOptions) -> int:
    """Follows the events of a run until it ends, and returns its exit status."""
    try:
        result = follow_run(folder, quiet=options.quiet)
    except KeyboardInterrupt:
        print("paceline: detached; the run continues", file=sys.stderr)
        return 0
    return show_result(result)


def show_result(result: Any) -> int:
    """Prints the table of a run that is done, or the error of another; returns the status."""
    from rich.console import Console

    from paceline.report.comparison import compare_results
    from paceline.report.study_tables import results_table

    status = result.get("status")
    if status == "cancelled":
        print("paceline: the run was cancelled", file=sys.stderr)
        return INTERRUPTED
    if status != "done":
        raise RunFailed(str(result.get("error") or status))
    if "history" in result:
        Console().print(results_table(compare_results([result])))
    return 0


@settings()
class StopOptions:
    timeout_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 30.0
    """Kill the run if it has not ended by then."""


@command
def stop(folder: RunPath, /, *, options: StopOptions) -> None:
    """Cancels the run in a folder; kills it if that takes too long."""
    print(f"{stop_run(folder, options.timeout_s)}: {folder}")


@settings()
class ResumeOptions:
    quiet: bool = False
    """Do not show progress."""


@command
def resume(folder: RunPath, /, *, options: ResumeOptions, background: DetachOption) -> None:
    """Continues a run from its latest checkpoint, with the options recorded in its folder."""
    config = read_config(folder)
    if config.get("virtual") or "settings" not in config or "job" not in config:
        raise UsageError(
            f"{folder} is not a run of `paceline train`; start a simulation or script again"
        )
    reference = config["job"].get("job_ref")
    if reference is None:
        raise UsageError(
            f"the job of {folder} contains live objects, which only the program that started it "
            "has; resume it there with paceline.train(..., resume=True)"
        )
    folder = folder.absolute()
    if (before := config.get("directory")) is not None and Path(before).is_dir():
        os.chdir(before)  # Paths in the options are relative to it.
    job = JobRef.model_validate(reference)
    known = {**config["settings"], "out": folder, "resume": True, "force": False, "fault": ()}
    if background.detach:
        known["orphan_grace_s"] = known.get("orphan_grace_s") or ORPHAN_GRACE_S
    background.apply(folder)
    run_train(
        None if job.file is None else Path(f"{job.file}:{job.function}"),
        options=read_settings(TrainOptions, known),
        run=read_settings(RunSettings, known),
        common=CommonOptions(quiet=options.quiet),
        fields=Job.model_construct(_fields_set=set(job.fields), **job.fields),
        where=read_settings(PlacementSettings, known),
        slowdowns=read_settings(SlowdownSettings, known),
    )


def read_settings(cls: type[T], known: Mapping[str, Any]) -> T:
    """Builds a settings object from the options of all settings classes."""
    names = {field.field for field in option_fields(cls)}
    values = {k: v for k, v in known.items() if k in names and v is not None}
    return build_settings(cls, values, prefix="--")
