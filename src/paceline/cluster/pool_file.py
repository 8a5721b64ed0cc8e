"""Reads and writes pool files: YAML, JSON or the old blueprint, detected by content.

Files are validated strictly and written atomically. Errors give the line, the key, the value and
the rule. They never quote a file that cannot be parsed, because blueprints may contain passwords.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from pydantic import BaseModel, ValidationError

from paceline.cluster.legacy_blueprint import is_blueprint, read_blueprint
from paceline.cluster.pool import Gpu, Host, Jitter, Link, Pool, SlowPeriod, StepCost, Watts
from paceline.errors import UsageError, suggest_name

_PARTS: dict[str, type[BaseModel]] = {
    "hosts": Host,
    "link": Link,
    "jitter": Jitter,
    "slow": SlowPeriod,
    "measured": StepCost,
    "watts": Watts,
    "gpus": Gpu,
}


@dataclass(frozen=True, kw_only=True)
class PoolFile:
    """A pool and the file that it was read from."""

    path: Path
    pool: Pool
    form: Literal["yaml", "json", "blueprint"]
    repairs: tuple[str, ...] = ()
    """Repairs made to an old blueprint; empty for other formats."""


def load_pool(path: Path) -> PoolFile:
    """Reads a pool file of any format. Raises UsageError with line, key, value and rule."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"pool {path} cannot be read: {reason}") from None
    if is_blueprint(text):
        plain, repairs = read_blueprint(text, str(path))
        pool = pool_from_mapping(plain, str(path))
        return PoolFile(path=path, pool=pool, form="blueprint", repairs=tuple(repairs))
    is_json = path.suffix == ".json" or (
        text.lstrip().startswith("{") and path.suffix not in (".yaml", ".yml")
    )
    form: Literal["yaml", "json"] = "json" if is_json else "yaml"
    pool = pool_from_mapping(_parse(text, form, path), str(path), text)
    return PoolFile(path=path, pool=pool, form=form)


def write_pool(found: PoolFile, pool: Pool) -> None:
    """Replaces a pool file atomically. Comments are not preserved."""
    if found.form == "blueprint":
        raise UsageError(
            f"pool {found.path} is an old blueprint, which cannot store measurements; "
            f"convert it first: paceline pool convert {found.path} -o pool.yaml"
        )
    text = pool.to_yaml()
    if found.form == "json":
        text = json.dumps(yaml.safe_load(text), indent=2) + "\n"
    partial = found.path.with_name(found.path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, found.path)
    except OSError as error:
        raise UsageError(f"pool {found.path} cannot be written: {error.strerror}") from None


def _parse(text: str, form: str, path: Path) -> Any:
    try:
        if form == "json":
            return json.loads(text)
        return yaml.safe_load(text)
    except json.JSONDecodeError as error:
        _fail(path, error.lineno, error.msg)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _fail(path, mark.line + 1 if mark else 1, error.problem or "not valid YAML")
    except (yaml.YAMLError, ValueError, RecursionError):
        _fail(path, 1, "not valid YAML or JSON")


def _fail(path: Path, line: int, reason: str) -> NoReturn:
    raise UsageError(f"pool {path}, line {line}: {' '.join(reason.split())}")


def pool_from_mapping(plain: Any, where: str, text: str | None = None) -> Pool:
    """Builds a pool from plain data, read from `text`. Raises UsageError, with a line if given."""
    if not isinstance(plain, dict):
        kind = "nothing" if plain is None else f"a {type(plain).__name__}"
        raise UsageError(f"pool {where}: must be a mapping with 'hosts', but contains {kind}")
    try:
        return Pool.model_validate(plain)
    except ValidationError as error:
        line = find_line(text, error.errors()[0]["loc"]) if text is not None else None
        location = where if line is None else f"{where}, line {line}"
        raise UsageError(f"pool {location}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    """Describes the first mistake in one line: location, value and rule."""
    first = error.errors()[0]
    location = ".".join(str(p) for p in first["loc"])
    rule = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        model: type[BaseModel] = Pool
        for part in first["loc"][:-1]:
            if isinstance(part, str):
                model = _PARTS.get(part, model)
        key = str(first["loc"][-1])
        if "password" in key.lower():
            return f"{location}: passwords are not allowed; remove it and run `paceline pool keys`"
        return f"{location} is unknown: {suggest_name(key, list(model.model_fields))}"
    if first["type"] == "missing":
        return f"{location} is missing"
    if isinstance(first["input"], dict | list | tuple) and first["input"]:
        return f"{location}: {rule}" if location else rule  # the value would fill the screen
    return f"{location} is {first['input']!r}: {rule}"


def find_line(text: str, loc: tuple[int | str, ...]) -> int | None:
    """Returns the line of a key in YAML or JSON, or that of its parent if the key is missing."""
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None  # JSON that is not valid YAML, such as JSON with tabs
    if node is None or not loc:
        return None
    line = int(node.start_mark.line) + 1
    for part in loc:
        below: Any = None
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            below = node.value[part] if part < len(node.value) else None
            line = int(below.start_mark.line) + 1 if below is not None else line
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    below, line = value, int(key.start_mark.line) + 1
        if below is None:
            break
        node = below
    return line
