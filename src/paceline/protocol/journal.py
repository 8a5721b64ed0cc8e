"""The journal of a coordinator: what another one must know to continue the run with its workers.

An entry is written before the actions that it is about, so the journal is never behind what the
workers and servers know:

    SnapshotTaken     the run between two training intervals, and whenever a strategy is entered
    ViewBegun         the number of a view, before any worker moves to it
    UpdateOrdered     an update of the servers, with the samples that it contains
    StepsCounted      what workers have measured on the steps of planned work
    RowsPlanned       the rows of planned work, if workers read in blocks

How far planned work has come is not recorded: the state that the workers offer shows it.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import WireError
from paceline.protocol.block_plan import RowRange, RowRanges, merge_ranges
from paceline.protocol.history import CoordinatorMemory, History
from paceline.protocol.messages import ApplyUpdate, GradientRef, Plain, record
from paceline.protocol.pace import CoveredWork

RESTARTED = "the coordinator was restarted"
"""Reason of the first view of a coordinator that continues a run."""


@record
class SnapshotTaken:
    t: float
    view: int
    members: tuple[int, ...]
    view_samples: int
    entering: bool
    """True if workers are entering a strategy, so that servers may not hold its state yet."""
    version: int
    """Version that the servers were ordered to apply."""
    position: int
    """Position of the epoch; all before it are done."""
    done: RowRanges
    """Positions behind it that are done."""
    training: bool
    layout: str | None
    left: RowRanges
    """Rows of the epoch that are left, if workers read in blocks."""
    servers: tuple[int, ...]
    """Servers of the view; each of them has loaded the state, unless workers are entering."""
    last_saved: int
    rollback_phase: int | None
    has_best: bool
    first_rows: Plain
    """For each list of the history, the index from which on this entry contains its rows."""
    history: Plain


@record
class ViewBegun:
    t: float
    number: int
    members: tuple[int, ...]
    servers: tuple[int, ...] = ()


@record
class UpdateOrdered:
    t: float
    update: ApplyUpdate
    covers: tuple[CoveredWork, ...]
    tally: Plain


@record
class StepsCounted:
    t: float
    tally: Plain


@record
class RowsPlanned:
    t: float
    lo: int
    rows: RowRanges


JournalEntry = SnapshotTaken | ViewBegun | UpdateOrdered | StepsCounted | RowsPlanned
ENTRIES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (SnapshotTaken, ViewBegun, UpdateOrdered, StepsCounted, RowsPlanned)
}


def entry_to_plain(entry: JournalEntry) -> list[object]:
    """Returns an entry as JSON: its kind, then its fields in order."""
    fields = [getattr(entry, name) for name in entry.__match_args__]
    if type(entry) is UpdateOrdered:
        update = entry.update
        parts = [(part.worker, part.handle, part.weight) for part in update.parts]
        fields[1] = [update.version, parts, update.lr_scale, update.clip, update.fraction]
        fields[1].append(update.view)
        fields[2] = [(c.lo, c.hi, c.staleness, c.rows) for c in entry.covers]
    return [type(entry).__name__, *fields]


def entry_from_plain(plain: object) -> JournalEntry:
    """Parses what `entry_to_plain` returned. Raises WireError for anything else."""
    kind = plain[0] if isinstance(plain, list) and plain else None
    if not isinstance(plain, list) or kind not in ENTRIES:
        raise WireError(f"unknown entry {kind!r}; was the journal written by another version?")
    try:
        entry: JournalEntry = ENTRIES[kind](*map(_freeze, plain[1:]))
        if type(entry) is UpdateOrdered:
            t, (version, parts, *rest), covers, tally = plain[1:]
            entry = UpdateOrdered(
                t,
                ApplyUpdate(version, tuple(GradientRef(*p) for p in parts), *map(_freeze, rest)),
                tuple(CoveredWork(*_freeze(cover)) for cover in covers),
                tally,
            )
    except (TypeError, ValueError) as error:
        raise WireError(f"invalid {kind} entry: {error}") from None
    return entry


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if type(value) is list else value


@dataclass
class RunPosition:
    """Part of a coordinator's memory that only a journal has: the exact position of the run."""

    view: int
    """The last view that any worker may have moved to."""
    members: tuple[int, ...]
    view_samples: int
    entering: bool
    version: int
    position: int
    servers: tuple[int, ...]
    holding: tuple[int, ...]
    """Servers that have loaded the state, unless workers were entering a strategy."""
    loaded_view: int
    """View in which they have loaded it."""
    last_saved: int
    rollback_phase: int | None
    has_best: bool
    done: list[RowRange] = field(default_factory=list)
    """Positions behind `position` that updates contain."""
    planned: dict[int, list[RowRange]] = field(default_factory=dict)
    """Rows of planned work, by its first position."""
    orders: list[ApplyUpdate] = field(default_factory=list)
    """Updates since the snapshot, which servers may not have received."""


def subtract_rows(left: Iterable[RowRange], taken: Iterable[RowRange]) -> list[RowRange]:
    """Returns the rows of `left` that are not in `taken`."""
    holes = sorted(taken)
    found: list[RowRange] = []
    for lo, hi in left:
        for a, b in holes:
            if b <= lo or a >= hi:
                continue
            if a > lo:
                found.append((lo, a))
            lo = max(lo, b)
        if lo < hi:
            found.append((lo, hi))
    return found


class JournalReplay:
    """Reads a journal from its beginning; `memory` is that of the coordinator that wrote it."""

    def __init__(self) -> None:
        self._history: dict[str, Any] | None = None
        self._snapshot: SnapshotTaken | None = None
        self._position: RunPosition | None = None
        self._taken: list[RowRange] = []
        self._t = 0.0

    def add(self, entry: JournalEntry) -> None:
        self._t = entry.t
        if isinstance(entry, SnapshotTaken):
            self._take_snapshot(entry)
        elif (here := self._position) is None:
            return  # No strategy has been entered yet: there is nothing to continue.
        elif isinstance(entry, ViewBegun):
            here.view, here.members, here.servers = entry.number, entry.members, entry.servers
        elif isinstance(entry, RowsPlanned):
            here.planned.setdefault(entry.lo, []).extend(entry.rows)
            self._taken.extend(entry.rows)
        else:
            assert self._history is not None
            self._history["tally"] = entry.tally
            if isinstance(entry, UpdateOrdered):
                self._add_update(entry, here, self._history)

    def _take_snapshot(self, entry: SnapshotTaken) -> None:
        before = self._history or {}
        rows = {
            name: [*before.get(name, [])[:first], *entry.history[name]]
            for name, first in entry.first_rows.items()
        }
        self._history = {**entry.history, **rows}
        self._snapshot, self._taken = entry, []
        self._position = RunPosition(
            view=entry.view,
            members=entry.members,
            view_samples=entry.view_samples,
            entering=entry.entering,
            version=entry.version,
            position=entry.position,
            servers=entry.servers,
            holding=entry.servers,
            loaded_view=entry.view,
            last_saved=entry.last_saved,
            rollback_phase=entry.rollback_phase,
            has_best=entry.has_best,
            done=list(entry.done),
        )

    def _add_update(self, entry: UpdateOrdered, here: RunPosition, history: dict[str, Any]) -> None:
        here.orders.append(entry.update)
        here.version = entry.update.version
        staleness, phases = dict(history["staleness"]), dict(history["phase_samples"])
        samples = sum(cover.hi - cover.lo for cover in entry.covers)
        for cover in entry.covers:
            here.done.append((cover.lo, cover.hi))
            self._taken.extend(cover.rows)
            if cover.staleness >= 0:
                staleness[cover.staleness] = staleness.get(cover.staleness, 0) + 1
        phases[history["phase"]] = phases.get(history["phase"], 0) + samples
        history["samples"] += samples
        history["updates"] += 1
        history["staleness"], history["phase_samples"] = staleness.items(), phases.items()

    @property
    def snapshot(self) -> SnapshotTaken | None:
        """The last snapshot, with the whole history; valid if no entry has followed."""
        if self._snapshot is None or self._history is None:
            return None
        first_rows = dict.fromkeys(self._snapshot.first_rows, 0)
        return dataclasses.replace(
            self._snapshot, first_rows=first_rows, history=dict(self._history)
        )

    @property
    def memory(self) -> CoordinatorMemory | None:
        """The coordinator's memory; None without a snapshot."""
        entry, here = self._snapshot, self._position
        if entry is None or here is None or self._history is None:
            return None
        history = dict(self._history)
        if entry.training:
            history["train_seconds"] += max(0.0, self._t - entry.t)
        # Through the type, so that a checkpoint and a journal have one reader.
        plain = History.from_plain(history).to_plain()
        memory: CoordinatorMemory = {"history": plain, "elapsed_s": self._t, "position": here}
        if entry.layout is not None:
            left = merge_ranges(sorted(subtract_rows(entry.left, self._taken)))
            memory["shards"] = {"layout": entry.layout, "left": list(left)}
        return memory


def replay_journal(entries: Iterable[JournalEntry]) -> CoordinatorMemory | None:
    """Returns the memory of the coordinator that wrote these entries."""
    replay = JournalReplay()
    for entry in entries:
        replay.add(entry)
    return replay.memory
