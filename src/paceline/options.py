"""Options declared as fields: each field of a settings class is a command-line option.

A settings class is a frozen dataclass or a pydantic model. The type, default and constraints of a
field apply to the command line, to `--config` files and to Python alike, and the string below a
field is its help text:

    @dataclass(frozen=True, kw_only=True)
    class RunSettings:
        pin: bool = False
        \"\"\"Pin each worker to its own CPU cores.\"\"\"

Nothing here imports the command-line library, so worker processes can import settings cheaply.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from paceline.errors import UsageError

T = TypeVar("T")

RUN = "Run"
TRAINING = "Training"
DATA_FILES = "Data from files"
PLACEMENT = "Placement"
SLOWDOWNS = "Simulated slowdowns"

_known_fields: dict[type[object], tuple[OptionField, ...]] = {}
_METAVARS: dict[object, str] = {int: "N", float: "FLOAT", Path: "PATH", str: "TEXT"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """Presentation of a field on the command line, given as `Annotated[type, Option(...)]`."""

    name: str | None = None
    """Option name without dashes. Default: the field's name without its unit suffix `_s`."""
    short: str | None = None
    """One-letter alias without its dash."""
    metavar: str | None = None
    """Placeholder for the value. Default: derived from the type."""
    group: str | None = None
    """Help group. Default: `option_group` of the class, or "Options"."""
    default: str | None = None
    """Description of a default that depends on other values, for fields that default to None."""
    hidden: bool = False
    """The field is not an option, for example because its value is a live object."""


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """One field of a settings class, as the command line and `--config` files see it."""

    field: str
    option: str
    short: str | None
    group: str
    type: Any
    """Type without None and Annotated; `Any` counts as text."""
    default: Any
    """`PydanticUndefined` for a required field."""
    default_text: str | None
    metavar: str | None
    help: str
    has_negative: bool
    """A flag that also has the form --no-NAME."""

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def is_repeatable(self) -> bool:
        return get_origin(self.type) in (tuple, list)

    @property
    def is_required(self) -> bool:
        return self.default is PydanticUndefined


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(group: str = "Options") -> Callable[[type[T]], type[T]]:
    """Returns a class decorator: a frozen dataclass whose options are in this help group."""

    def decorate(cls: type[T]) -> type[T]:
        cls.option_group = group  # type: ignore[attr-defined]
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def option_fields(cls: type[object]) -> tuple[OptionField, ...]:
    """Returns the options that a settings class declares, in order."""
    if cls in _known_fields:
        return _known_fields[cls]
    hints = get_type_hints(cls, include_extras=True)
    docs, defaults = _attribute_docstrings(cls), _defaults(cls)
    negatives = getattr(cls, "option_negatives", False)
    group = getattr(cls, "option_group", "Options")
    parts = {name: _split_annotation(hints[name]) for name in defaults}
    _known_fields[cls] = tuple(
        OptionField(
            field=name,
            option=option.name or name.removesuffix("_s").replace("_", "-"),
            short=option.short,
            group=option.group or group,
            type=kind,
            default=defaults[name],
            default_text=option.default or _default_text(defaults[name]),
            metavar=option.metavar or _metavar(kind),
            help=docs.get(name, ""),
            has_negative=kind is bool and (defaults[name] is True or negatives),
        )
        for name, (kind, option) in parts.items()
        if not option.hidden
    )
    return _known_fields[cls]


def build_settings(cls: type[T], values: Mapping[str, Any], *, prefix: str = "") -> T:
    """Builds a settings object from field values of any origin, converting text to field types.

    Raises UsageError in one line; `prefix` ("--") precedes the option's name in it.
    """
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        names = {each.field: each.option for each in option_fields(cls)}
        raise UsageError(explain(error, lambda name: prefix + names.get(name, name))) from None


def read_values(values: Mapping[str, Any], fields: Mapping[str, OptionField]) -> dict[str, Any]:
    """Returns option values of a file by field; `fields` maps the accepted names to options.

    Values may be written as YAML reads them: a number for text, one value for a list.
    """
    found = {}
    for name, value in values.items():
        field = fields[name]
        if value is None:
            continue
        if field.is_repeatable and not isinstance(value, (list, tuple)):
            value = [value]
        elif field.type is str and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        found[field.field] = value
    return found


def field_values(settings: object, cls: type) -> dict[str, Any]:
    """Returns the fields that an object has from a base dataclass, to pass them to another."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(cls)}


def settings_to_plain(settings: object, cls: type | None = None) -> dict[str, Any]:
    """Returns the effective value of every option of a settings object, JSON-able.

    `cls` restricts it to the options of one of its base classes.
    """
    values = {f.field: getattr(settings, f.field) for f in option_fields(cls or type(settings))}
    plain: dict[str, Any] = TypeAdapter(dict[str, Any]).dump_python(values, mode="json")
    return plain


def explain(error: ValidationError, rename: Callable[[str], str] = str) -> str:
    """Returns the first problem of a pydantic error in one line: name, rule, value."""
    first = error.errors()[0]
    name = rename(".".join(str(part) for part in first["loc"] if isinstance(part, str)) or "job")
    if first["type"] == "missing":
        return f"{name} is required"
    if first["type"] == "value_error":
        problem = first["msg"].removeprefix("Value error, ")
        return f"{name} {problem}" if problem.startswith("must ") else f"{name}: {problem}"
    return f"{name} must be {_rule(first)}, got {_show_value(first['input'])}"


def _rule(problem: ErrorDetails) -> str:
    context, kind = problem.get("ctx", {}), problem["type"]
    limits = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    for key, words in limits.items():
        if key in context:
            limit = context[key]
            return f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}"
    if kind == "literal_error":
        return str(context["expected"])
    rules = {
        "int": "a whole number",
        "float": "a number",
        "finite": "a finite number",
        "bool": "true or false",
        "string": "text",
        "path": "a path",
        "tuple": "a list",
        "list": "a list",
        "callable": "a function",
    }
    return rules.get(kind.partition("_")[0], problem["msg"])


def _show_value(value: object) -> str:
    """Values from the command line are text: numbers are shown without quotes."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return repr(value)
        return value
    return str(value) if isinstance(value, (bool, int, float)) else repr(value)


def _defaults(cls: type) -> dict[str, Any]:
    if issubclass(cls, BaseModel):
        return {name: field.default for name, field in cls.model_fields.items()}
    assert dataclasses.is_dataclass(cls)
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        defaults[field.name] = PydanticUndefined if default is dataclasses.MISSING else default
    return defaults


def _split_annotation(hint: Any) -> tuple[Any, Option]:
    hint, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    option = next((each for each in metadata if isinstance(each, Option)), Option())
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [each for each in get_args(hint) if each is not type(None)]
        hint = kinds[0] if len(kinds) == 1 else str
    return (str if hint is Any else hint), option


def _metavar(kind: Any) -> str | None:
    if kind is bool:
        return None
    if get_origin(kind) is Literal:
        return "|".join(str(value) for value in get_args(kind))
    if get_origin(kind) in (tuple, list):
        return _metavar(get_args(kind)[0])
    return _METAVARS.get(kind, "TEXT")


def _default_text(default: Any) -> str | None:
    if isinstance(default, bool) or default in (PydanticUndefined, None, ()):
        return None
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """Returns the string literals that follow the fields of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is object or base is BaseModel:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        assert isinstance(tree.body[0], ast.ClassDef)
        for pair in itertools.pairwise(tree.body[0].body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = inspect.cleandoc(text).replace("\n", " ")
    return found
