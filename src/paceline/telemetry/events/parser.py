"""Parses JSON objects back into the dataclasses that wrote them.

Unknown keys are ignored and missing ones take the field's default, so that folders of older and
newer versions can be read. A value of the wrong type raises `MalformedEvent`.
"""

from __future__ import annotations

import collections.abc
import functools
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import TypeVar

from paceline.telemetry.events import types as event_types
from paceline.telemetry.events.rows import json_key
from paceline.telemetry.events.types import Event

T = TypeVar("T")
Convert = Callable[[object], object]


class MalformedEvent(ValueError):
    """Raised for a JSON object that does not match the fields of its type."""


def _list_event_types() -> Mapping[str, type[Event]]:
    found = [
        value
        for value in vars(event_types).values()
        if isinstance(value, type) and issubclass(value, Event) and value is not Event
    ]
    by_kind = {event_type.kind: event_type for event_type in found}
    assert len(by_kind) == len(found), "two event types share a kind"
    return types.MappingProxyType(by_kind)


EVENT_TYPES = _list_event_types()
"""Event types by the `kind` they are written with."""


def parse_event(plain: object) -> Event | None:
    """Returns the event of a JSON object; None if its kind is unknown or it is malformed."""
    if not isinstance(plain, dict):
        return None
    kind = plain.get("kind")
    event_type = EVENT_TYPES.get(kind) if isinstance(kind, str) else None
    if event_type is None:
        return None
    try:
        event = from_plain(event_type, plain)
    except MalformedEvent:
        return None
    return event if math.isfinite(event.t) else None


def from_plain(cls: type[T], plain: object) -> T:
    """Builds a dataclass from a JSON object.

    Raises:
        MalformedEvent: A required key is missing, or a value has the wrong type.
    """
    if not isinstance(plain, Mapping):
        raise MalformedEvent(f"{cls.__name__}: not a JSON object")
    values: dict[str, object] = {}
    for name, key, convert, required in _field_plan(typing.cast(Hashable, cls)):
        if key in plain:
            try:
                values[name] = convert(plain[key])
            except TypeError:
                raise MalformedEvent(f"{cls.__name__}: `{key}` has the wrong type") from None
        elif required:
            raise MalformedEvent(f"{cls.__name__}: `{key}` is missing")
    return cls(**values)


@functools.cache
def _field_plan(cls: Hashable) -> list[tuple[str, str, Convert, bool]]:
    assert isinstance(cls, type)
    assert is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    return [
        (
            f.name,
            json_key(f),
            _make_converter(hints[f.name]),
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(cls)
    ]


def _make_converter(hint: object) -> Convert:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        assert args[1:] == (types.NoneType,), f"unsupported field type: {hint}"
        return _optional(_make_converter(args[0]))
    if isinstance(hint, type) and is_dataclass(hint):
        return functools.partial(_convert_dataclass, hint)
    if origin is list:
        allowed = _scalar_types(args[0])
        return _list_of_scalars(allowed) if allowed else _list_of(_make_converter(args[0]))
    if origin is dict:
        return _dict_of(_make_converter(args[1]))
    if origin is collections.abc.Mapping or typing.is_typeddict(hint):
        return _dict_of(lambda value: value)
    allowed = _scalar_types(hint)
    assert allowed is not None, f"unsupported field type: {hint}"
    return _scalar(allowed)


def _scalar_types(hint: object) -> frozenset[type] | None:
    """The JSON types of a scalar; exact types, because True is not a number here."""
    if hint is float:
        return frozenset({float, int})
    if hint in (int, str, bool):
        return frozenset({typing.cast(type, hint)})
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [_scalar_types(arg) for arg in typing.get_args(hint) if arg is not types.NoneType]
        if all(part is not None for part in inner):
            return frozenset({types.NoneType}).union(*(part for part in inner if part))
    return None


def _convert_dataclass(cls: type[T], value: object) -> T:
    try:
        return from_plain(cls, value)
    except MalformedEvent as error:
        raise TypeError(str(error)) from None


def _optional(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _scalar(allowed: frozenset[type]) -> Convert:
    def convert(value: object) -> object:
        if type(value) not in allowed:
            raise TypeError
        return value

    return convert


def _list_of_scalars(allowed: frozenset[type]) -> Convert:
    def convert(value: object) -> object:
        # One set of types per column: checking element by element would dominate reading.
        if type(value) is not list or not allowed.issuperset(map(type, value)):
            raise TypeError
        return value

    return convert


def _list_of(convert_item: Convert) -> Convert:
    def convert(value: object) -> object:
        if type(value) is not list:
            raise TypeError
        return [convert_item(item) for item in value]

    return convert


def _dict_of(convert_value: Convert) -> Convert:
    def convert(value: object) -> object:
        if type(value) is not dict:
            raise TypeError
        return {key: convert_value(item) for key, item in value.items()}

    return convert
