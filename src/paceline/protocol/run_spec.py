"""Settings of a run, and the actions of the coordinator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.protocol.adaptive_batch import BatchRule
from paceline.protocol.block_plan import layout_fingerprint
from paceline.protocol.history import History
from paceline.protocol.journal import JournalEntry
from paceline.protocol.messages import WorkerReady
from paceline.protocol.pace import OutgoingMessage, Pace, PaceContext
from paceline.protocol.switch_policy import RunHorizon, SwitchPolicy
from paceline.specs.schedule import Constant, Schedule
from paceline.specs.stop_condition import StopCondition
from paceline.specs.strategy import Strategy
from paceline.telemetry.events import Event


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Run settings known before the workers start. The rest arrives with `WorkerReady`."""

    strategy: Strategy
    workers: int
    clip: float | None = None
    until: StopCondition | None = None
    patience: int | None = None
    checkpoint_epochs: int | None = None
    checkpoint_samples: int | None = None
    schedule: Schedule = field(default_factory=Constant)
    custom_loop: bool = False
    save_model: bool = True
    recalled: Mapping[str, float] = field(default_factory=dict)
    """Measured by predicted throughput of strategies in an earlier run of the same job."""
    batch_rule: BatchRule | None = None
    """Adapts the global batch; None if it is constant."""
    min_workers: int = 0
    """The run continues as long as this many workers remain; 0 means all of them."""
    journaled: bool = False
    """True if the workers outlive their coordinator, so that another one may continue the run."""

    @property
    def shards(self) -> int:
        """Number of parts of the weights on servers."""
        return self.strategy.servers_for(self.workers)

    @property
    def copies(self) -> int:
        """Number of servers that hold each shard."""
        return self.strategy.copies_of_shards(elastic=self.can_lose_workers)

    @property
    def servers(self) -> int:
        """Number of server processes: server `s` holds shard `s % shards`."""
        return self.shards * self.copies

    @property
    def is_elastic(self) -> bool:
        """True if the run can continue without some of its workers or servers."""
        return self.can_lose_workers or (self._can_regroup and self.servers > self.shards)

    @property
    def can_lose_workers(self) -> bool:
        """True if workers may be lost, leave or join."""
        return self.min_workers > 0 and self._can_regroup

    @property
    def _can_regroup(self) -> bool:
        # A custom training loop has consumed a batch that would have to be computed again.
        return not self.custom_loop and all(p.survives_losses for p in self.strategy.phases)

    def next_stop(
        self,
        history: History,
        ready: WorkerReady,
        frontier: int,
        switch_at: int | None,
        last_saved: int,
    ) -> int:
        """Returns the position of this epoch to run to, always the end of a global batch."""
        epoch_start = history.epoch * ready.samples
        stops = [ready.samples]
        if switch_at is not None:
            stops.append(switch_at - epoch_start)
        if self.checkpoint_samples is not None:
            stops.append(last_saved + self.checkpoint_samples - epoch_start)
        stop = max(min(stops), frontier + 1)
        return min(ready.samples, -(-stop // history.batch) * history.batch)

    def checkpoint_due(
        self, history: History, epoch_ended: bool, last_saved: int, ending: str | None
    ) -> bool:
        """Returns whether to save now; `ending` is the reason if the run ends here."""
        if ending is not None:
            return bool(self.checkpoint_samples or self.checkpoint_epochs)
        if self.checkpoint_samples is not None:
            return history.samples - last_saved >= self.checkpoint_samples
        every = self.checkpoint_epochs
        return bool(every and epoch_ended and history.epoch % every == 0)

    def stop_reason(self, history: History, epochs: int | None) -> str | None:
        """Returns the reason why a run of this many epochs ends here, or None."""
        rows = history.rows
        if self.until is not None:
            latest = rows[-1].value(self.until.metric) if rows else None
            if self.until.is_met(latest):
                return f"until {self.until}"
        if self.patience is not None:
            losses = [(r.val_loss, i) for i, r in enumerate(rows) if r.val_loss is not None]
            known = [pair for pair in losses if not math.isnan(pair[0])]
            if known and len(rows) - 1 - min(known)[1] >= self.patience:
                return f"no improvement in val_loss for {self.patience} epochs"
        if epochs is not None and not self.custom_loop and history.epoch >= epochs:
            return f"{epochs} epochs"
        return None


@dataclass(frozen=True)
class EmitEvent:
    """An event to append to run.jsonl and to display."""

    event: Event


@dataclass(frozen=True)
class EndRun:
    status: str
    error: str | None = None
    usage: bool = False
    """True for a usage error that was detected when the data was known."""


@dataclass(frozen=True)
class InterruptWorker:
    """Make a worker leave an exchange in which it may wait for a lost one."""

    worker: int
    view: int


@dataclass(frozen=True)
class WriteJournal:
    """An entry of the journal, to write before the actions that follow."""

    entry: JournalEntry


@dataclass(frozen=True)
class RefuseWorker:
    """Stop a worker that cannot join."""

    worker: int
    reason: str


@dataclass(frozen=True)
class ReleaseWorker:
    """Let a worker exit that has left the run."""

    worker: int


Action = (
    OutgoingMessage
    | EmitEvent
    | EndRun
    | InterruptWorker
    | RefuseWorker
    | ReleaseWorker
    | WriteJournal
)
PaceFactory = Callable[[Strategy, PaceContext], Pace]
PolicyFactory = Callable[[Strategy, RunHorizon], SwitchPolicy]


class RunStopped(Exception):
    """Ends the run early; raised in its sequence. The arguments are those of `EndRun`."""

    def __init__(self, status: str, error: str, *, usage: bool = False) -> None:
        super().__init__(error)
        self.end = EndRun(status, error, usage)


def check_position(
    history: History, ready: WorkerReady, position: int, layout_before: str | None
) -> None:
    """Raises RunStopped if the data differs from that of the checkpoint."""
    if not 0 <= position <= ready.samples:
        raise RunStopped(
            "failed",
            f"the checkpoint was saved after {history.samples} samples in "
            f"{history.epoch} epochs, which does not match {ready.samples} samples per "
            "epoch: the data has changed",
            usage=True,
        )
    layout = layout_fingerprint(ready.layout) if ready.layout is not None else None
    if position and layout != layout_before:
        raise RunStopped(
            "failed",
            f"the checkpoint was saved mid-epoch, after {position} samples of it, "
            "with another division of the data; resume with the same files, --shard, "
            "--shuffle and --memory",
            usage=True,
        )
