"""Dataclasses that are written as JSON objects: parses the objects back into them."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Check = Callable[[object], bool]


class MalformedEvent(ValueError):
    """Raised for a JSON object that does not match the fields of its type."""


def json_key(field: Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))


def from_plain(cls: type[T], plain: object) -> T:
    """Builds a dataclass from the JSON object that it was written as.

    Unknown keys are ignored and missing ones take the field's default, so that folders of older and
    newer versions can be read.

    Raises:
        MalformedEvent: A required key is missing, or a value has the wrong type.
    """
    if not isinstance(plain, Mapping):
        raise MalformedEvent(f"{cls.__name__}: not a JSON object")
    values: dict[str, object] = {}
    for name, key, hint, is_valid, required in _field_plan(typing.cast(Hashable, cls)):
        if key in plain:
            if is_valid is None:
                values[name] = from_plain(hint, plain[key])
            elif is_valid(plain[key]):
                values[name] = plain[key]
            else:
                raise MalformedEvent(f"{cls.__name__}: `{key}` has the wrong type")
        elif required:
            raise MalformedEvent(f"{cls.__name__}: `{key}` is missing")
    return cls(**values)


@functools.cache
def _field_plan(cls: Hashable) -> list[tuple[str, str, Any, Check | None, bool]]:
    """Returns the name, JSON key, type, check (None for a row) and necessity of each field."""
    assert is_dataclass(cls)
    plan = []
    for item in fields(cls):
        hint = typing.get_type_hints(cls)[item.name]
        required = item.default is MISSING and item.default_factory is MISSING
        is_valid = None if is_dataclass(hint) else _make_check(hint)
        plan.append((item.name, json_key(item), hint, is_valid, required))
    return plan


def _make_check(hint: object) -> Check:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if allowed := _scalar_types(hint):
        return lambda value: type(value) in allowed
    if origin is list and (allowed := _scalar_types(args[0])):
        # One set of types per column: checking element by element would dominate reading.
        return lambda value: type(value) is list and allowed.issuperset(map(type, value))
    if origin is list:
        is_item = _make_check(args[0])
        return lambda value: type(value) is list and all(map(is_item, value))
    if origin is dict:
        is_item = _make_check(args[1])
        return lambda value: type(value) is dict and all(map(is_item, value.values()))
    if origin is Mapping or typing.is_typeddict(hint):
        return lambda value: type(value) is dict
    assert args[1:] == (types.NoneType,), f"unsupported field type: {hint}"
    is_item = _make_check(args[0])
    return lambda value: value is None or is_item(value)


def _scalar_types(hint: object) -> frozenset[type]:
    """Returns the JSON types of a scalar: exact ones, because True is not a number here."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not {int, float, str, bool, types.NoneType}.issuperset(members):
        return frozenset()
    return frozenset(members) | ({int} if float in members else set())
