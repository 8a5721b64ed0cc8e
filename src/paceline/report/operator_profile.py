"""Operator times of one run by worker, or of two runs compared."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.errors import UsageError


@dataclass(frozen=True)
class OperatorProfile:
    """Profiles of one run: milliseconds of self time per step, by operator and worker."""

    name: str
    epoch: int
    steps: dict[int, int]
    ms: dict[str, dict[int, float]]
    calls: dict[str, float]
    """Calls per step, mean over the workers."""

    @property
    def workers(self) -> list[int]:
        return sorted(self.steps)

    def mean_ms(self, operator: str) -> float:
        each = self.ms.get(operator, {})
        return sum(each.values()) / len(self.steps)

    @property
    def total_ms(self) -> float:
        return sum(self.mean_ms(operator) for operator in self.ms)

    def share(self, operator: str) -> float:
        total = self.total_ms
        return self.mean_ms(operator) / total if total > 0 else 0.0


def read_profile(folder: Path) -> OperatorProfile:
    """Reads the profiles of a run. Raises UsageError if there are none."""
    paths = sorted(folder.glob("profile/worker-*.json"))
    if not paths:
        raise UsageError(
            f"{folder} contains no profile; train with --profile, for example --profile epoch=2"
        )
    ms: dict[str, dict[int, float]] = {}
    calls: dict[str, float] = {}
    steps: dict[int, int] = {}
    epoch = 0
    for path in paths:
        body = _read(path)
        worker, epoch = int(body["worker"]), int(body["epoch"])
        steps[worker] = count = max(1, int(body["steps"]))
        for row in body["operators"]:
            us = row["self_us"] + row["self_device_us"]
            ms.setdefault(row["name"], {})[worker] = us / 1e3 / count
            calls[row["name"]] = calls.get(row["name"], 0.0) + row["calls"] / count / len(paths)
    return OperatorProfile(folder.name, epoch, steps, ms, calls)


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        body["operators"], body["worker"], body["epoch"], body["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a valid profile ({error}); record it again") from None
    assert isinstance(body, dict)
    return body


HEAD_ONE = ("operator", "calls a step", "share")
HEAD_TWO = ("operator", "ms", "share", "ms", "share", "times", "share change")


def rows_for_one_run(
    profile: OperatorProfile, top: int | None
) -> tuple[list[str], list[list[Any]]]:
    """Returns milliseconds per step by worker, and the fraction of the total."""
    head = ["operator", "calls a step", "share", *(f"worker {w} ms" for w in profile.workers)]
    names = sorted(profile.ms, key=profile.mean_ms, reverse=True)[:top]
    rows = []
    for name in names:
        each = [round(profile.ms[name].get(w, 0.0), 4) for w in profile.workers]
        rows.append([name, round(profile.calls[name], 2), round(profile.share(name), 4), *each])
    return head, rows


def rows_for_two_runs(
    one: OperatorProfile, two: OperatorProfile, top: int | None
) -> tuple[list[str], list[list[Any]]]:
    """Returns means over the workers; `times` is the ratio of the second run to the first."""
    head = ["operator", f"{one.name} ms", "share", f"{two.name} ms", "share ", "second/first"]
    names = sorted({*one.ms, *two.ms}, key=lambda n: -max(one.mean_ms(n), two.mean_ms(n)))[:top]
    rows: list[list[Any]] = []
    for name in ["all operators", *names]:
        whole = name == "all operators"
        a = one.total_ms if whole else one.mean_ms(name)
        b = two.total_ms if whole else two.mean_ms(name)
        shares = (1.0, 1.0) if whole else (one.share(name), two.share(name))
        ratio = round(b / a, 3) if a > 0 else None
        rows.append([name, round(a, 4), round(shares[0], 4), round(b, 4), round(shares[1], 4)])
        rows[-1].append(ratio)
    return head, rows


def make_table(profiles: Sequence[OperatorProfile], top: int) -> Table:
    head, rows = _rows(profiles, top)
    steps = "; ".join(
        f"{p.name}: epoch {p.epoch}, {min(p.steps.values())} steps, {len(p.steps)} workers"
        for p in profiles
    )
    table = Table(
        title=f"self time by operator, milliseconds per step ({steps})", title_justify="left"
    )
    for index, name in enumerate(head):
        table.add_column(name.strip(), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value, name) for value, name in zip(row, head, strict=True)))
    return table


def write_csv(profiles: Sequence[OperatorProfile], path: Path) -> None:
    head, rows = _rows(profiles, None)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[h.strip() for h in head], *rows])


def _rows(
    profiles: Sequence[OperatorProfile], top: int | None
) -> tuple[list[str], list[list[Any]]]:
    if len(profiles) == 1:
        return rows_for_one_run(profiles[0], top)
    return rows_for_two_runs(profiles[0], profiles[1], top)


def _cell(value: Any, name: str) -> str:
    if value is None:
        return "new"
    if isinstance(value, str):
        return value
    if name.startswith("share"):
        return f"{100 * value:.1f}%"
    return f"{value:.3f}"
