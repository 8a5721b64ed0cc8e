"""Turns a function with settings parameters into a command, and what several commands share.

    @command
    def train(job: JobFile = None, /, *, run: TrainOptions, fields: Job) -> None: ...

Each field of a settings class becomes an option. Values given on the command line take precedence
over those of a `--config` file; both are checked by the settings class, so its defaults and limits
are stated once. Commands that take a `Job` accept `--config`.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from cyclopts import Group, Parameter
from pydantic import Field

from paceline.errors import UsageError, suggest_name
from paceline.job import Job, JobRef, read_mapping, refer_to_job
from paceline.options import (
    DATA_FILES,
    PLACEMENT,
    RUN,
    SLOWDOWNS,
    TRAINING,
    Option,
    OptionField,
    build_settings,
    option_fields,
    read_values,
    settings,
)

P = ParamSpec("P")
R = TypeVar("R")
Log = Callable[[str], None]

_GROUPS = {
    name: Group(name, sort_key=place)
    for place, name in enumerate((RUN, TRAINING, DATA_FILES, PLACEMENT, SLOWDOWNS, "Options"))
}


@settings(RUN)
class ConfigOption:
    """The option that every command with a job has in addition to its own."""

    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """Read options from a YAML file; command-line options take precedence."""


@settings(RUN)
class CommonOptions:
    """Options of every command that trains."""

    batch_per_worker: Annotated[int | None, Field(ge=1), Option(group=TRAINING)] = None
    """Batch size per worker, instead of --batch."""
    quiet: bool = False
    """Do not show progress."""


def argument(help_text: str) -> Parameter:
    """Returns the annotation of a positional argument."""
    return Parameter(help=help_text, show_default=False)


JobFile = Annotated[
    Path | None,
    argument("Job file: a Python file that defines job(), or YAML. Options override its fields."),
]


def command(function: Callable[P, R]) -> Callable[..., R]:
    """Wraps a function: positional parameters stay, each settings class becomes its options."""
    hints = get_type_hints(function, include_extras=True)
    arguments, classes = [], {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint) or hasattr(hint, "model_fields"):
            classes[parameter.name] = hint
        else:
            arguments.append(parameter.replace(annotation=hint))
    fields: dict[str, OptionField] = {}
    for cls in (*classes.values(), *((ConfigOption,) if Job in classes.values() else ())):
        for each in option_fields(cls):
            assert each.field not in fields, f"two options are called {each.field}"
            fields[each.field] = each

    def run(*positional: Any, **given: Any) -> R:
        if (config := given.pop("config", None)) is not None:
            accepted = {name: field for name, field in fields.items() if name != "config"}
            given = {**read_config(Path(config), accepted), **given}
        built = {}
        for name, cls in classes.items():
            names = {each.field for each in option_fields(cls)}
            values = {field: value for field, value in given.items() if field in names}
            built[name] = build_settings(cls, values, prefix="--")
        return function(*positional, **built)

    parameters = [*arguments, *(_parameter(each) for each in fields.values())]
    run.__name__, run.__module__ = function.__name__, function.__module__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def read_config(path: Path, fields: Mapping[str, OptionField]) -> dict[str, Any]:
    """Reads option values from a YAML file; raises UsageError for unknown names.

    Names may be written as on the command line (`batch-per-worker`) or as fields
    (`batch_per_worker`).
    """
    found = read_mapping(path, f"--config {path}")
    by_name = {field.option.replace("-", "_"): field for field in fields.values()}
    by_name.update(fields)
    given = {name.replace("-", "_"): value for name, value in found.items()}
    for name in given:
        if name not in by_name:
            hint = suggest_name(name, by_name)
            raise UsageError(f"--config {path}: unknown option {name!r}; {hint}")
    return read_values(given, by_name)


def _parameter(field: OptionField) -> inspect.Parameter:
    """All options are optional text here: settings classes check presence, type and limits."""
    kind: Any = bool if field.is_flag else tuple[str, ...] if field.is_repeatable else str
    names = [f"--{field.option}", *([f"-{field.short}"] if field.short else [])]
    note = "" if field.default_text is None else f" [default: {field.default_text}]"
    if field.is_required:
        note = " [required]"
    group = _GROUPS.get(field.group) or Group(field.group, sort_key=len(_GROUPS))
    return inspect.Parameter(
        field.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            kind | None,
            Parameter(
                name=names,
                group=group,
                help=field.help + note,
                metavar=field.metavar,
                negative=f"--no-{field.option}" if field.has_negative else "",
                show_default=False,
                allow_repeating=True,
            ),
        ],
    )


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
    from paceline.data.stores import is_url_or_path, make_absolute

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

    from paceline.report.terminal_text import fit_terminal

    table = Table(box=None, title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        if name in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", overflow="fold", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(fit_terminal(row.get(name, "")) for name in names))
    Console().print(table)
