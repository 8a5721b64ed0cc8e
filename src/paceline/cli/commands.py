"""Turns a function with settings parameters into a command.

    @command
    def train(job: JobFile = None, /, *, run: TrainOptions, fields: Job) -> None: ...

Each field of a settings class becomes an option. Values given on the command line take precedence
over those of a `--config` file; both are checked by the settings class, so its defaults and limits
are stated once. Commands that take a `Job` accept `--config`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from cyclopts import Group, Parameter
from pydantic import BaseModel

from paceline.errors import UsageError, suggest_name
from paceline.job import Job, read_mapping
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
    settings,
)

P = ParamSpec("P")
R = TypeVar("R")

_GROUPS = {
    name: Group(name, sort_key=place)
    for place, name in enumerate((RUN, TRAINING, DATA_FILES, PLACEMENT, SLOWDOWNS, "Options"))
}


@settings(RUN)
class ConfigOption:
    """The option that every command with a job has in addition to its own."""

    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """Read options from a YAML file; command-line options take precedence."""


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
        if _is_settings(hint):
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
    values = {}
    for name, value in given.items():
        if (field := by_name.get(name)) is None:
            hint = suggest_name(name, by_name)
            raise UsageError(f"--config {path}: unknown option {name!r}; {hint}")
        if value is None:
            continue
        if field.is_repeatable and not isinstance(value, (list, tuple)):
            value = [value]
        elif field.type is str and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        values[field.field] = value
    return values


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or issubclass(hint, BaseModel)
    )


def _parameter(field: OptionField) -> inspect.Parameter:
    """All options are optional text here: settings classes check presence, type and limits."""
    kind: Any = bool if field.is_flag else tuple[str, ...] if field.is_repeatable else str
    names = [f"--{field.option}", *([f"-{field.short}"] if field.short else [])]
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
                help=_help(field),
                metavar=field.metavar,
                negative=f"--no-{field.option}" if field.has_negative else "",
                show_default=False,
                allow_repeating=True,
            ),
        ],
    )


def _help(field: OptionField) -> str:
    if field.is_required:
        return f"{field.help} [required]"
    if field.default_text is not None:
        return f"{field.help} [default: {field.default_text}]"
    return field.help
