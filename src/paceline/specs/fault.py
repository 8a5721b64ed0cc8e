"""Injected faults: `kill worker=1 at=30%`, `stop server=0 at=epoch(2) for=30s`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import SpecError, suggest_name
from paceline.specs.expression import parse_expression
from paceline.specs.point import RunPoint, read_point

KINDS = ("kill", "stop", "cut", "slow")
TARGETS = ("worker", "server", "coordinator")
EXAMPLE = "'kill worker=1 at=30%'"
_AMOUNTS = {"kill": (), "stop": ("for",), "cut": (), "slow": ("factor", "for")}
_PART = re.compile(r"[^\s,()]+(?:\([^()]*\))?")


@dataclass(frozen=True)
class InjectedFault:
    """A fault that is injected once, when the run reaches a point.

    `kill` ends the process at once, `stop` pauses it, `cut` resets all of its connections, and
    `slow` lets it run for 1 / `factor` of the time. Without `for_s` it lasts to the end of the run.
    """

    kind: str
    target: str
    index: int
    at: RunPoint
    for_s: float | None
    factor: float
    text: str
    """As it was given, in one form."""

    @property
    def process(self) -> str:
        """Returns the name of the process: `worker-1`, `server-0` or `coordinator`."""
        return self.target if self.target == "coordinator" else f"{self.target}-{self.index}"


def parse_fault(text: str, workers: int, servers: int) -> InjectedFault:
    """Parses the value of --fault; raises SpecError that names the invalid part."""
    where = f"--fault {text!r}"
    parts = _PART.findall(text)
    if not parts or parts[0] not in KINDS:
        hint = suggest_name(parts[0] if parts else "", KINDS)
        raise SpecError(f"{where}: begins with the kind of fault; {hint}")
    kind, values = parts[0], dict[str, str]()
    for word in parts[1:]:
        key, sign, value = word.partition("=")
        known = (*TARGETS, "at", *_AMOUNTS[kind])
        if key not in known:
            raise SpecError(f"{where}: unknown {key!r} for {kind}; {suggest_name(key, known)}")
        if bool(sign and value) == (key == "coordinator"):
            problem = "takes no value" if key == "coordinator" else "has no value"
            raise SpecError(f"{where}: {key!r} {problem}; for example {EXAMPLE}")
        values[key] = value
    named = [target for target in TARGETS if target in values]
    if len(named) != 1 or "at" not in values:
        raise SpecError(
            f"{where}: one of worker=K, server=K and coordinator, and at=... are required; "
            f"for example {EXAMPLE}"
        )
    target, count = named[0], {"worker": workers, "server": servers, "coordinator": 1}[named[0]]
    index = _read_index(where, target, values[target], count)
    for_s = _read_seconds(where, values["for"]) if "for" in values else None
    return InjectedFault(
        kind=kind,
        target=target,
        index=index,
        at=read_point(parse_expression(values["at"])),
        for_s=for_s,
        factor=_read_factor(where, values.get("factor")) if kind == "slow" else 1.0,
        text=" ".join(parts),
    )


def _read_index(where: str, target: str, text: str, count: int) -> int:
    if target == "coordinator":
        return 0
    if count == 0:
        raise SpecError(f"{where}: the strategy has no servers; choose a worker or the coordinator")
    if not text.isdecimal() or int(text) >= count:
        raise SpecError(f"{where}: {target} must be 0 to {count - 1}, got {text}")
    return int(text)


def _read_seconds(where: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min)?", text)
    if found is None or float(found[1]) == 0:
        raise SpecError(f"{where}: for={text} is not a duration; use 30s, 500ms or 2min")
    return float(found[1]) * {"ms": 0.001, "s": 1.0, "min": 60.0}[found[2] or "s"]


def _read_factor(where: str, text: str | None) -> float:
    try:
        factor = float(text or "")
    except ValueError:
        factor = 0.0
    if not 1.0 < factor < 1000.0:
        given = "" if text is None else f", got {text}"
        raise SpecError(f"{where}: factor=... between 1 and 1000 is required{given}")
    return factor
