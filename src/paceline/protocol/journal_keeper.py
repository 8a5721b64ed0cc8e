"""The part of a coordinator that writes the journal and continues the run of another one."""

from paceline.protocol.block_plan import layout_fingerprint
from paceline.protocol.history import History
from paceline.protocol.journal import (
    JournalEntry,
    RowsPlanned,
    SnapshotTaken,
    StepsCounted,
    UpdateOrdered,
)
from paceline.protocol.ledger import Ledger
from paceline.protocol.messages import ApplyUpdate
from paceline.protocol.pace import Pace, SendToServers
from paceline.protocol.run_spec import Action, RunSpec, WriteJournal
from paceline.protocol.view import MembershipView


class JournalKeeper:
    """Writes an entry before the actions that it is about, if the run has a journal."""

    plan: RunSpec
    history: History
    view: MembershipView
    _now: float
    _actions: list[Action]
    _ledger: Ledger
    _pace: Pace | None
    _view_samples: int
    _last_saved: int
    _rollback_phase: int | None
    _has_best: bool
    _first_rows: dict[str, int]
    """Rows of the history that the journal has already."""

    def _write(self, entry: JournalEntry) -> None:
        if self.plan.journaled:
            self._actions.append(WriteJournal(entry))

    def _take_snapshot(self, *, entering: bool = False, training: bool = False) -> None:
        """Records the run where it is settled: no work is in progress."""
        if not self.plan.journaled:
            return
        history, ledger = self.history, self._ledger
        # The pause of the last switch is known only after the switch.
        first = {**self._first_rows, "switches": max(0, self._first_rows.get("switches", 0) - 1)}
        self._first_rows = history.count_rows()
        layout = ledger.layout
        self._write(
            SnapshotTaken(
                t=self._now,
                view=self.view.number,
                members=self.view.workers,
                view_samples=self._view_samples,
                entering=entering,
                version=0 if entering or self._pace is None else self._pace.version,
                position=ledger.frontier,
                done=ledger.done_ranges,
                training=training,
                layout=None if layout is None else layout_fingerprint(layout),
                left=() if layout is None else tuple(ledger.remaining_rows()),
                servers=self.view.servers,
                last_saved=self._last_saved,
                rollback_phase=self._rollback_phase,
                has_best=self._has_best,
                first_rows={name: first.get(name, 0) for name in self._first_rows},
                history=history.to_plain(first),
            )
        )

    def _note_planned_rows(self) -> None:
        if self._pace is not None and self._pace.planned_rows:
            for lo, rows in self._pace.planned_rows:
                self._write(RowsPlanned(self._now, lo, rows))
            self._pace.planned_rows.clear()

    def _note_update(self, order: SendToServers) -> None:
        if self.plan.journaled and isinstance(order.message, ApplyUpdate):
            tally = vars(self.history.tally).copy()
            self._write(UpdateOrdered(self._now, order.message, order.covers, tally))

    def _note_steps(self) -> None:
        if self.plan.journaled:
            self._write(StepsCounted(self._now, vars(self.history.tally).copy()))
