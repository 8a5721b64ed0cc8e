"""The part of a worker that moves from view to view: keep the last complete state, meet again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.errors import DeadlineExceeded, PeerLost
from paceline.protocol.messages import (
    ExchangeFailed,
    FormGroup,
    GroupFormed,
    Regroup,
    StateOffered,
)
from paceline.state import Section, TrainState, load_into_model, persistent_buffers
from paceline.strategies.runner import Runner, average_running_stats, peer_errors
from paceline.worker.session import Session


class ViewMember:
    """State of a worker across views; `CoordinatorClient` trains inside one."""

    def __init__(self, session: Session, state: TrainState) -> None:
        self._session, self._context = session, session.context
        self._control = session.control
        self._rank, self._size = session.context.rank, session.context.size
        self._runner: Runner | None = None
        self._state: Section | None = state.shared
        """Complete global state, between two runners."""
        self._local_state = Section()
        """Per-worker state, kept through phases that do not use it."""
        self.step = 0
        """Steps of this worker so far, including those before a resume."""
        self._samples_since_settle = 0
        self._holds_state = not session.assignment.joins
        self._complete_at = self._reached = -1
        """Samples of the run in the last complete state of this worker, and after its last step;
        -1 before the first step."""
        self._is_fresh = True
        """True if no work was received since the runner was made; `_state` is kept until then."""
        self._interrupted = False
        """True after an exchange failed, until the next view begins."""
        self._rollback_state: tuple[Section, Section] | None = None
        """Global and local state for a rollback, during a trial switch."""
        self._best_state: tuple[Section, Section] | None = None
        """The same of the best validated epoch, if the policy may restore it."""

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Runs an exchange with other workers; if one is lost, waits for the next view instead."""
        if not self._context.is_elastic:
            yield
            return
        try:
            with peer_errors("an exchange failed", inside_layers=True):
                yield
        except (PeerLost, DeadlineExceeded) as error:
            self._interrupted = True
            self._control.send(ExchangeFailed(self._rank, self.step, str(error)))

    def _close_runner(self) -> None:
        raise NotImplementedError

    def _save_local_state(self) -> None:
        raise NotImplementedError

    def _note_step(self, samples: int) -> None:
        """Notes how far this worker has come, in samples of the run."""
        assert self._runner is not None
        self._reached = samples
        if self._runner.has_complete_state:
            self._complete_at = samples

    def _regroup(self, message: Regroup) -> None:
        """Keeps the last complete state, and leaves the view."""
        self._interrupted = False
        if self._runner is not None:
            self._save_local_state()
            if self._runner.keeps_buffers_equal:
                self._samples_since_settle = 0
            if not (message.entering and self._is_fresh):
                self._recover_state(message)
            self._close_runner()
        self._rank, self._size = message.workers.index(self._session.rank), len(message.workers)
        self._session.leave_group(message.view)
        offer = StateOffered(self._rank, self._complete_at, self._reached, self._holds_state)
        self._control.send(offer)

    def _recover_state(self, message: Regroup) -> None:
        assert self._runner is not None
        try:
            with peer_errors("the state cannot be recovered", inside_layers=True):
                self._state = self._runner.recover_state(message.version, message.lost_servers)
        except (PeerLost, DeadlineExceeded) as error:
            print(f"view {message.view}: {error}", flush=True)
            self._state, self._holds_state = None, False

    def _form_group(self, message: FormGroup) -> None:
        """Meets the other workers of the view, and takes over the newest state."""
        context = self._session.form_group(self._rank, self._size)
        self._context = context
        group, replica = context.group, context.replica
        is_source = self._rank == message.source
        if self._state is not None and not is_source and message.broadcast:
            self._state = None
        average_running_stats(persistent_buffers(replica.model), group, self._samples_since_settle)
        self._samples_since_settle = 0
        facts: dict[str, Any] = {
            "layout": replica.bucket_layout,
            "way": replica.comm_backend,
            "algorithms": replica.comm_algorithms,
            "kept": [kept is not None for kept in (self._rollback_state, self._best_state)],
        }
        first = Section(plain=facts) if is_source else None
        facts = group.broadcast_section(first, message.source).plain
        replica.bucket_layout, replica.comm_backend = facts["layout"], facts["way"]
        replica.comm_algorithms = facts["algorithms"]
        if message.broadcast:
            self._state = group.broadcast_section(self._state, message.source)
            load_into_model(self._state, replica.model, replica.optimizer)
        if message.joining:
            self._share_kept_states(facts["kept"], message.source)
        self._complete_at = self._reached = message.samples
        self._holds_state = True
        self._control.send(GroupFormed(self._rank))

    def _share_kept_states(self, kept: list[bool], source: int) -> None:
        """Gives states that a rollback may need to workers that have just joined."""
        group = self._context.group
        for name, exists in zip(("_rollback_state", "_best_state"), kept, strict=True):
            mine: tuple[Section, Section] | None = getattr(self, name)
            if exists:
                shared = group.broadcast_section(mine[0] if mine else None, source)
                if mine is None:
                    setattr(self, name, (shared, Section()))
