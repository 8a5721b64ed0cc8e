"""The seam for a strategy: what a runner is given, and what it must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from paceline.accuracy import count_correct
from paceline.comm.control import ControlConnection
from paceline.comm.process_group import CollectiveGroup
from paceline.errors import PeerLost
from paceline.protocol.messages import Lease, StepStats
from paceline.state import RemoteTensor, Section, checksum, persistent_buffers
from paceline.telemetry.phase_clock import BACKWARD, FORWARD, PhaseClock

Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

INNER_PREFIX = "inner/"
"""Begins the names of what a worker's local optimizer remembers; a switch ends that."""


class Replica:
    """A worker's copy of the model, and the optimizer whose hyper-parameters are in force."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        reduce_in_backward: bool = False,
        exclusive: bool = True,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.apply_gradients: Callable[[], object] = optimizer.step
        """The optimizer's own step; a user's loop gets another one in its place."""
        self.clip = clip
        self.reduce_in_backward = reduce_in_backward
        """A user's own loop may look at gradients as soon as backward() returns."""
        self.exclusive = exclusive
        """Whether the model belongs to one runner, which may keep its weights in own buffers."""
        self.bucket_layout: list[list[str]] | None = None
        """How gradients are grouped for the exchange; fixed for a run, kept in checkpoints."""
        self.comm_backend: str | None = None
        """How they are summed, `shared` or `network`; fixed likewise, once it was chosen."""
        names = {p: n for n, p in model.named_parameters()}
        self.trained: list[tuple[str, torch.nn.Parameter]] = []
        """What the optimizer updates, in the model's order; tied parameters once."""
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        self.trained = [(n, p) for p, n in names.items() if p in mine and p.requires_grad]


@dataclass
class TrainStep:
    """One step of this worker: its lease, and what came out of it."""

    lease: Lease
    step: int
    version: int = 0
    measured: StepStats = field(default_factory=lambda: StepStats(0, 0, None, 0))

    @property
    def weight(self) -> float:
        """This worker's share of the update's samples."""
        return self.lease.samples / self.lease.batch


@dataclass(frozen=True, kw_only=True)
class CommReport:
    """How a runner exchanges gradients or weights, and why, for `result.json`."""

    backend: str
    """`shared`, `partly shared` or `network`."""
    reason: str

    def to_plain(self) -> dict[str, str]:
        return {"way": self.backend, "why": self.reason}


@dataclass(frozen=True, kw_only=True)
class PhaseContext:
    """What changes from phase to phase."""

    servers: tuple[tuple[str, int], ...] = ()
    """Addresses of the parameter servers."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of the workers that synchronize with each other."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a runner works with: the same for the whole run, but for `phase`."""

    rank: int
    size: int
    replica: Replica
    group: CollectiveGroup
    control: ControlConnection
    clock: PhaseClock
    token: str
    timeout_s: float
    phase: PhaseContext = PhaseContext()
    on_bucket_ready: Callable[[], None] | None = None
    """Called before gradients are sent in the middle of backward; None without slowdowns."""


class Runner(ABC):
    """Lives in a worker while its strategy is in force. Every wait has a deadline.

    The order of calls: `import_state`, then steps (`begin_step`, gradients, `finish_step`), then
    `settle` at each quiesce, `export_state` when the state is wanted, `close`.
    """

    communicates_in_backward = False
    """Gradients are on their way when backward returns: nobody may change them then."""

    def __init__(self, around: WorkerContext) -> None:
        self.context = around
        self.replica = around.replica
        self.clock = around.clock

    @abstractmethod
    def import_state(self, state: Section) -> None:
        """Take over the global state; afterwards training can go on from it."""

    def rows_for(self, lease: Lease) -> Lease:
        """The rows that this worker reads for a lease: those of its own share."""
        return lease

    def begin_step(self, work: TrainStep) -> None:
        """Make the weights ready for a forward pass."""
        return

    def forward_backward(self, work: TrainStep, batch: Batch | None, loss_of: LossOf) -> StepStats:
        """Forward and backward; without rows there is nothing to compute, yet a part to play."""
        if batch is None:
            return StepStats(0, 0, 0.0, 0)
        inputs, targets = batch
        self.clock.enter(FORWARD)
        output = self.replica.model(inputs)
        loss = loss_of(output, targets)
        self.clock.enter(BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        correct, predictions = count_correct(output, targets)
        return StepStats(work.lease.samples, predictions, loss.item() * work.lease.samples, correct)

    @abstractmethod
    def finish_step(self, work: TrainStep) -> None:
        """Gradients are ready (none for an empty share): exchange and update as one operation."""

    def sync_weights(self, version: int) -> None:
        """All work is done: bring the newest weights into this worker's model."""
        return

    @abstractmethod
    def export_state(self) -> Section:
        """The whole global state, on every worker. Called only when settled."""

    @contextmanager
    def gather_state(self, *, slots: bool) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
        """The global state for worker 0 to write down, and what of it lies with other workers.

        Everybody calls it. Tensors that lie elsewhere come when worker 0 asks for them, in the
        order of the dictionary; the others send theirs on leaving. `slots`: the optimizer's too.
        """
        yield self.export_state() if slots else Section(), {}

    @property
    def eval_shard(self) -> tuple[int, int]:
        """Of what is evaluated: which part is this worker's, and of how many."""
        return self.context.rank, self.context.size

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """The model's output; None where another worker has it."""
        output: torch.Tensor = self.replica.model(inputs)
        return output

    def average_buffers(self, samples: int) -> None:
        """Average running statistics over the workers, by the samples each has seen since."""
        average_running_stats(persistent_buffers(self.replica.model), self.context.group, samples)

    def checksum(self) -> str:
        """Of weights and buffers as they are now: the same on all workers, or something is odd."""
        return model_checksum(self.replica.model)

    def export_local_state(self) -> Section:
        """What this worker alone must remember (residuals, inner optimizers)."""
        return Section()

    def import_local_state(self, own: Section) -> None:
        return

    def pop_grad_norms(self) -> tuple[float, float, float, float] | None:
        """Squared gradient norms of the last step, where they were measured; see Measured."""
        return None

    def pop_overlapped_us(self) -> int | None:
        """Microseconds of the last step's exchange behind computing; None if not measured."""
        return None

    @property
    def bytes_received(self) -> int:
        """Payload that came from servers; what comes out of a collective is in `bytes_sent`."""
        return 0

    @property
    def bytes_sent(self) -> int:
        """Payload that this worker has handed to collectives or sent to servers."""
        return 0

    @property
    def uncompressed_bytes(self) -> int:
        """What it would have been without a codec."""
        return self.bytes_sent

    def comm_report(self) -> CommReport | None:
        """The backend that this runner chose; None if there was nothing to choose."""
        return None

    def optimizer_path(self) -> str | None:
        """How the optimizer's work is divided, and why, for the log; None if it is not divided."""
        return None

    def model_part(self) -> dict[str, object] | None:
        """Which part of the model this worker had, where it had not all of it."""
        return None

    def close(self) -> None:
        return


def model_checksum(model: torch.nn.Module) -> str:
    weights = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
    weights.update({f"buffers/{n}": b for n, b in persistent_buffers(model).items()})
    return checksum(Section(weights))


def average_running_stats(
    buffers: dict[str, torch.Tensor], group: CollectiveGroup, samples: int
) -> None:
    """Average BatchNorm's running statistics over the workers, by the samples each has seen.

    Counters (num_batches_tracked) take the largest value. One worker's buffers stay as they are.
    """
    if group.size == 1:
        return
    floats = [b for b in buffers.values() if b.is_floating_point()]
    counts = [b for b in buffers.values() if not b.is_floating_point()]
    weight = torch.tensor([float(samples)], dtype=torch.float64)
    parts = [b.detach().double().reshape(-1).cpu() * samples for b in floats]
    packed = torch.cat([weight, *parts])
    group.all_reduce(packed)
    total = float(packed[0])
    if total > 0:
        start = 1
        for buffer in floats:
            mean = packed[start : start + buffer.numel()].reshape(buffer.shape) / total
            buffer.copy_(mean)
            start += buffer.numel()
    if counts:
        whole = torch.cat([c.detach().to(torch.int64).reshape(-1).cpu() for c in counts])
        group.all_reduce_max(whole)
        start = 0
        for buffer in counts:
            buffer.copy_(whole[start : start + buffer.numel()].reshape(buffer.shape))
            start += buffer.numel()


def step_optimizer(replica: Replica) -> None:
    """Clip if the job says so, then update: gradients are complete."""
    if replica.clip is not None:
        torch.nn.utils.clip_grad_norm_([p for _, p in replica.trained], replica.clip)
    replica.apply_gradients()


def scale_to_norm(limit: float, square: float, gradients: Iterable[torch.Tensor]) -> None:
    """As torch's clip_grad_norm_, for a part of gradients whose squared norm in all is known."""
    factor = limit / (square**0.5 + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)


def as_peer_lost(error: RuntimeError, where: str) -> Exception:
    """A peer that is gone shows as an error of the exchange; anything else stays what it is."""
    if "gloo" in str(error).lower() or "connection" in str(error).lower():
        return PeerLost(f"an exchange {where} broke ({error})")
    return error
