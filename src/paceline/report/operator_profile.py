"""Operator times of one run by worker, or of two runs compared."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.errors import UsageError

HeadAndRows = tuple[list[str], list[list[Any]]]


@dataclass
class OperatorProfile:
    """Profiles of one run: milliseconds of self time per step, by operator and worker."""

    name: str
    epoch: int = 0
    """The first one."""
    epochs: int = 1
    steps_per_epoch: float = 0.0
    """Mean over the workers, also of steps that were not profiled."""
    steps: dict[int, int] = field(default_factory=dict)
    ms: dict[str, dict[int, float]] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    """Calls per step, mean over the workers."""

    def describe_epochs(self) -> str:
        if self.epochs == 1:
            return f"epoch {self.epoch}"
        return f"epochs {self.epoch} to {self.epoch + self.epochs - 1}"

    @property
    def workers(self) -> list[int]:
        return sorted(self.steps)

    def mean_ms(self, operator: str) -> float:
        return sum(self.ms.get(operator, {}).values()) / len(self.steps)

    @property
    def total_ms(self) -> float:
        return sum(self.mean_ms(operator) for operator in self.ms)

    def us_per_epoch(self, operator: str) -> float:
        """Returns microseconds of self time per epoch, mean over the workers."""
        return 1e3 * self.mean_ms(operator) * self.steps_per_epoch

    def share(self, operator: str) -> float:
        total = self.total_ms
        return self.mean_ms(operator) / total if total > 0 else 0.0


def read_profile(folder: Path) -> OperatorProfile:
    """Reads the profiles of a run. Raises UsageError if there are none, or one is not valid."""
    paths = sorted(folder.glob("profile/worker-*.json"))
    if not paths:
        raise UsageError(
            f"{folder} contains no profile; train with --profile, for example --profile epoch=2"
        )
    profile = OperatorProfile(folder.name)
    for path in paths:
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            worker, profile.epoch = int(body["worker"]), int(body["epoch"])
            profile.steps[worker] = count = max(1, int(body["steps"]))
            profile.epochs = max(1, int(body.get("epochs", 1)))
            all_steps = int(body.get("epoch_steps", count))
            profile.steps_per_epoch += all_steps / profile.epochs / len(paths)
            operators = body["operators"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a valid profile ({error}); record it again") from None
        for row in operators:
            us = row["self_us"] + row["self_device_us"]
            profile.ms.setdefault(row["name"], {})[worker] = us / 1e3 / count
            calls = row["calls"] / count / len(paths)
            profile.calls[row["name"]] = profile.calls.get(row["name"], 0.0) + calls
    return profile


def rows_for_one_run(profile: OperatorProfile, top: int | None) -> HeadAndRows:
    """Returns milliseconds per step by worker, and the fraction of the total."""
    head = ["operator", "calls a step", "share", *(f"worker {w} ms" for w in profile.workers)]
    names = sorted(profile.ms, key=profile.mean_ms, reverse=True)[:top]
    rows = [
        [
            name,
            round(profile.calls[name], 2),
            round(profile.share(name), 4),
            *(round(profile.ms[name].get(w, 0.0), 4) for w in profile.workers),
        ]
        for name in names
    ]
    return head, rows


def rows_for_two_runs(one: OperatorProfile, two: OperatorProfile, top: int | None) -> HeadAndRows:
    """Returns means over the workers; `times` is the ratio of the second run to the first."""
    head = ["operator", f"{one.name} ms", "share", f"{two.name} ms", "share ", "second/first"]
    names = sorted({*one.ms, *two.ms}, key=lambda n: -max(one.mean_ms(n), two.mean_ms(n)))[:top]
    found = [("all operators", one.total_ms, 1.0, two.total_ms, 1.0)]
    found += [(n, one.mean_ms(n), one.share(n), two.mean_ms(n), two.share(n)) for n in names]
    rows = [
        [n, *(round(x, 4) for x in (a, a_share, b, b_share)), round(b / a, 3) if a > 0 else None]
        for n, a, a_share, b, b_share in found
    ]
    return head, rows


def make_table(profiles: Sequence[OperatorProfile], top: int) -> Table:
    head, rows = _rows(profiles, top)
    steps = "; ".join(
        f"{p.name}: {p.describe_epochs()}, {min(p.steps.values())} steps, {len(p.steps)} workers"
        for p in profiles
    )
    title = f"self time by operator, milliseconds per step ({steps})"
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name.strip(), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value, name) for value, name in zip(row, head, strict=True)))
    return table


def write_csv(profiles: Sequence[OperatorProfile], path: Path) -> None:
    head, rows = _rows(profiles, None)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[h.strip() for h in head], *rows])


def _rows(profiles: Sequence[OperatorProfile], top: int | None) -> HeadAndRows:
    if len(profiles) == 1:
        return rows_for_one_run(profiles[0], top)
    return rows_for_two_runs(profiles[0], profiles[1], top)


def _cell(value: Any, name: str) -> str:
    if value is None or isinstance(value, str):
        return value or "new"
    return f"{100 * value:.1f}%" if name.startswith("share") else f"{value:.3f}"
