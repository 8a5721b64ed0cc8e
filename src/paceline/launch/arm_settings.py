"""Settings of the arms of a matrix: any placement or run option, under its command-line name."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.errors import UsageError
from paceline.launch.settings import PlacementSettings, RunSettings, SlowdownSettings
from paceline.options import (
    PLACEMENT,
    Option,
    OptionField,
    build_settings,
    option_fields,
    read_values,
    settings,
    settings_to_plain,
)

T = TypeVar("T")
Values = dict[str, Any]
"""Options by field, as plain data."""
KINDS_OF_PLACE = ("pool", "engine", "twin", "peer")
"""An arm that names one of these has its own place; otherwise it changes the common one."""
OF_ARMS = ("twin", "peer")
"""Kinds of places that are not options of a single run."""
LOCAL = "local"
OF_THE_COMMAND = ("resume", "force")
"""Run options that concern all runs of a matrix."""


@settings(PLACEMENT)
class ArmPlacement(PlacementSettings):
    """Place of the runs of an arm. `engine: local` is this machine."""

    twin: Annotated[str | None, Option(metavar="POOL|N")] = None
    """Simulate the runs on a pool file or on this many equal machines."""
    peer: Literal["tensorflow"] | None = None
    """Train with this framework instead, in processes of this machine, to compare with it."""


class ArmSettings(BaseModel):
    """Options of an arm. They are written next to its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: Values = Field(default_factory=dict)
    """Options of its place; those of the matrix or the command apply if empty."""
    run: Values = Field(default_factory=dict)
    """Options of its runs."""

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        left = dict(value)
        for part, classes in (("where", (ArmPlacement,)), ("run", (RunSettings, SlowdownSettings))):
            known = _options_by_name(classes)
            flat = [name for name in left if _field_name(name) in known]
            given = {**_as_mapping(left.pop(part, {}), part), **{n: left.pop(n) for n in flat}}
            if unknown := [name for name in given if _field_name(name) not in known]:
                raise ValueError(f"{part} has no option {unknown[0]!r}")
            values = read_values({_field_name(n): v for n, v in given.items()}, known)
            left[part] = _check_values(classes, values)
        return left

    def on_top_of(self, base: "ArmSettings") -> "ArmSettings":
        """Returns these settings with those of `base` where they say nothing."""
        alone = any(kind in self.where for kind in KINDS_OF_PLACE)
        where = self.where if alone else {**base.where, **self.where}
        return ArmSettings(where=where, run={**base.run, **self.run})

    def located_in(self, folder: Path) -> Self:
        """Returns them with paths that are relative to a folder."""
        where = dict(self.where)
        for name in ("pool", "project", "twin"):
            # The machines of a simulation may also be a number, or the name of a cluster.
            if name in where and (name != "twin" or (folder / where[name]).is_file()):
                where[name] = str(folder / where[name])
        return self.model_copy(update={"where": where})

    @property
    def twin(self) -> str | None:
        return self.where.get("twin")

    @property
    def peer(self) -> str | None:
        return self.where.get("peer")

    @property
    def placement(self) -> PlacementSettings:
        """The options of the place; those of this machine for a simulation."""
        where = {name: value for name, value in self.where.items() if name not in OF_ARMS}
        if where.get("engine") == LOCAL:
            del where["engine"]
        return build_settings(PlacementSettings, where)

    @property
    def is_here(self) -> bool:
        """True if the runs are processes of this machine."""
        where = self.placement
        return (
            self.twin is None and self.peer is None and where.pool is None and where.engine is None
        )

    @property
    def is_local(self) -> bool:
        """True if this machine computes, in processes or in a simulation."""
        return self.is_here or self.twin is not None or self.peer is not None

    @property
    def slowdowns(self) -> SlowdownSettings:
        return _build(SlowdownSettings, self.run)

    @property
    def run_values(self) -> Values:
        """Fields of `RunSettings` that are given."""
        names = {each.field for each in option_fields(RunSettings)}
        return {name: value for name, value in self.run.items() if name in names}


@cache
def _options_by_name(classes: tuple[type, ...]) -> dict[str, OptionField]:
    fields = [each for cls in classes for each in option_fields(cls)]
    named = {each.option.replace("-", "_"): each for each in fields}
    named.update({each.field: each for each in fields})
    return {n: each for n, each in named.items() if each.field not in OF_THE_COMMAND}


def _field_name(name: Any) -> str:
    return str(name).replace("-", "_")


def _as_mapping(value: Any, part: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{part} must be a mapping of options, got {value!r}")
    return value


def _check_values(classes: tuple[type, ...], values: Values) -> Values:
    """Returns given values as plain data; raises ValueError for one that an option refuses."""
    plain: Values = {}
    for cls in classes:
        try:
            plain |= settings_to_plain(_build(cls, values))
        except UsageError as error:
            raise ValueError(str(error)) from None
    return {name: plain[name] for name in values}


def _build(cls: type[T], values: Values) -> T:
    names = {each.field for each in option_fields(cls)}
    return build_settings(cls, {n: v for n, v in values.items() if n in names})
