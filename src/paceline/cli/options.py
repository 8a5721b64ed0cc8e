"""Options that several commands share, and the job that file and options describe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.data.stores import is_url_or_path, make_absolute
from paceline.errors import UsageError
from paceline.job import Job, JobRef, refer_to_job
from paceline.options import RUN, TRAINING, Option, option_fields, settings

Log = Callable[[str], None]


@settings(RUN)
class CommonOptions:
    """Options of every command that trains."""

    batch_per_worker: Annotated[int | None, Field(ge=1), Option(group=TRAINING)] = None
    """Batch size per worker, instead of --batch."""
    quiet: bool = False
    """Do not show progress."""


def make_log(*, quiet: bool, form: str = "paceline: {}") -> Log:
    """Returns a function that prints progress messages to stderr, unless `quiet`."""

    def log(line: str) -> None:
        if not quiet:
            print(form.format(line), file=sys.stderr)

    return log


def refer_to_options(
    file: Path | None, job: Job, workers: int, batch_per_worker: int | None = None
) -> JobRef:
    """Returns a reference to the job of a file, with given options overriding its fields.

    Relative paths are resolved, because workers start in other directories.
    """
    fields = {name: getattr(job, name) for name in job.model_fields_set}
    if batch_per_worker is not None:
        if "batch" in fields:
            raise UsageError(
                "--batch and --batch-per-worker cannot be combined: the global batch is "
                "--batch-per-worker times --workers; remove one of them"
            )
        fields["batch"] = batch_per_worker * workers
    for name in ("data", "val_data"):
        if isinstance(fields.get(name), str) and is_url_or_path(fields[name]):
            fields[name] = make_absolute(fields[name])
    if fields.get("data_dir") is not None:
        fields["data_dir"] = str(Path(fields["data_dir"]).resolve())
    return refer_to_job(file, fields)


def split_list(text: str) -> list[str]:
    """Splits a list of strategies as given, "single; ps(sync=ssp(3))"."""
    return [part.strip() for part in text.split(";") if part.strip()]


def given_options(settings: object) -> dict[str, object]:
    """Returns the options of a settings object whose values are not the defaults, by name."""
    values = {f: getattr(settings, f.field) for f in option_fields(type(settings))}
    return {f.option: value for f, value in values.items() if value != f.default}


def refuse_together(option: str, others: Mapping[str, object], reason: str) -> None:
    """Raises UsageError if one of the other options was given; `reason` says why not both."""
    for name, value in others.items():
        if value not in (None, False, ()):
            raise UsageError(f"{option} and --{name} cannot be combined: {reason}")


def require_with(option: str, others: Mapping[str, object], reason: str) -> None:
    """Raises UsageError if an option was given that has no effect without `option`."""
    for name, value in others.items():
        if value not in (None, False, ()):
            raise UsageError(f"--{name} requires {option}: {reason}")


def print_table(
    rows: Sequence[Mapping[str, str]],
    *,
    left: Collection[str],
    title: str | None = None,
    no_wrap: bool = False,
) -> None:
    """Prints rows of cells by column; text is never truncated.

    Columns in `left` are text, the others are numbers; with `no_wrap`, numbers stay on one line.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        if name in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", overflow="fold", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    Console().print(table)
