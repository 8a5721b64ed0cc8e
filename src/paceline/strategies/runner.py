"""Interface of the worker side of a strategy."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.comm.wire import CoordinatorLink
from paceline.errors import PeerLost
from paceline.protocol.balance import split_batch
from paceline.protocol.messages import EnterPhase, Lease, StepStats
from paceline.state import (
    RemoteTensor,
    Section,
    checksum,
    load_into_model,
    persistent_buffers,
    state_from_model,
)
from paceline.strategies.running_stats import average_running_stats as average_running_stats
from paceline.strategies.running_stats import copy_flat as copy_flat
from paceline.telemetry.phase_clock import BACKWARD, FORWARD, PhaseClock

Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

INNER_PREFIX = "inner/"
"""Prefix of the local optimizer state of a worker, which is dropped at a switch."""

NORMS_EVERY = 16
"""Steps between two measurements of the gradient's norms, for the gradient noise scale."""


@dataclass(eq=False)
class Replica:
    """A worker's copy of the model, and the optimizer with the current hyper-parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    clip: float | None = None
    micro_batch: int | None = None
    """Maximum samples per forward pass; None for a whole share."""
    reduce_in_backward: bool = False
    """True for custom training loops, which may read gradients after backward()."""
    exclusive: bool = True
    """True if the model belongs to one runner, which may move its weights to other buffers."""
    bucket_layout: list[list[str]] | None = field(default=None, init=False)
    """Bucket layout of gradients; fixed for a run and stored in checkpoints."""
    comm_backend: str | None = field(default=None, init=False)
    """Backend of the sums, `shared` or `network`; fixed once it is chosen."""
    comm_algorithms: list[str] | None = field(default=None, init=False)
    """All-reduce algorithm of each bucket on the network; fixed once it is chosen."""

    def __post_init__(self) -> None:
        self.apply_gradients: Callable[[], object] = self.optimizer.step
        """The optimizer's original step, which is replaced in custom training loops."""
        mine = {p for group in self.optimizer.param_groups for p in group["params"]}
        self.trained: list[tuple[str, torch.nn.Parameter]] = [
            (n, p) for n, p in self.model.named_parameters() if p in mine and p.requires_grad
        ]
        """Parameters that the optimizer updates, in the model's order; tied parameters once."""


@dataclass
class TrainStep:
    """One step of this worker: its lease and its results."""

    lease: Lease
    step: int
    version: int = 0
    measured: StepStats = field(default_factory=lambda: StepStats(0, 0, None, 0))

    @property
    def weight(self) -> float:
        """Returns this worker's fraction of the update's samples."""
        return self.lease.samples / self.lease.batch


@dataclass(frozen=True, kw_only=True)
class CommReport:
    """Backend that a runner uses for its exchanges, and the reason, for `result.json`."""

    backend: str
    """`shared`, `partly shared` or `network`."""
    reason: str
    algorithm: str | None = None
    """All-reduce algorithm, if gradients are summed by messages."""

    def to_plain(self) -> dict[str, str | None]:
        return {"way": self.backend, "why": self.reason, "algorithm": self.algorithm}


@dataclass(frozen=True, kw_only=True)
class PhaseContext:
    """Settings of one phase."""

    servers: tuple[tuple[str, int], ...] = ()
    """Address of the server of each shard."""
    backups: tuple[tuple[int, str, int], ...] = ()
    """Shard, host and port of further servers, which hold copies."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of the workers that synchronize with each other."""

    @classmethod
    def from_message(cls, message: EnterPhase) -> Self:
        return cls(servers=message.servers, backups=message.backups, groups=message.groups)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Environment of a runner; constant for the whole run except `phase`."""

    rank: int
    size: int
    replica: Replica
    group: CollectiveGroup
    control: CoordinatorLink
    clock: PhaseClock
    token: str
    timeout_s: float
    phase: PhaseContext = PhaseContext()
    seed: int = 0
    """Seed of the run, the same on every worker."""
    view: int = 0
    """Number of the view in which `rank` and `size` hold."""
    is_elastic: bool = False
    """True if no part of the state may exist on one worker only."""
    on_bucket_ready: Callable[[], None] | None = None
    """Called before gradients are sent in the middle of backward; None without slowdowns."""


class Runner(ABC):
    """Worker side of a strategy, while it is active. Every wait has a deadline.

    The order of calls: `import_state`, then steps (`begin_step`, gradients, `finish_step`), then
    `settle` at each quiesce, `export_state` when the state is needed, `close`.
    """

    communicates_in_backward = False
    """True if gradients are being sent when backward returns and must not be changed."""

    keeps_buffers_equal = False
    """True if buffers are equal on all workers after every step."""
    can_repeat_forward = True
    """False if a forward pass exchanges data with other workers."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.replica = context.replica
        self.clock = context.clock
        self._sent = 0
        self._comm_report: CommReport | None = None

    def import_state(self, state: Section) -> None:
        """Imports the global state; training continues from it."""
        load_into_model(state, self.replica.model, self.replica.optimizer)

    def rows_for(self, lease: Lease) -> Lease:
        """Returns the lease whose rows this worker reads, by default its own share."""
        return lease

    def cut_batch(self, count: int, weights: tuple[int, ...] | None) -> list[int]:
        """Returns the offsets that split a global batch of `count` samples among the workers."""
        return split_batch(count, self.context.size, weights)

    def begin_step(self, work: TrainStep) -> None:
        """Prepares the weights for a forward pass."""
        return

    def forward_backward(self, work: TrainStep, batch: Batch | None, loss_of: LossOf) -> StepStats:
        """Runs forward and backward; without rows there is nothing to compute."""
        if batch is None:
            return StepStats(0, 0, 0.0, 0)
        samples, attempts = work.lease.samples, 2 if self.can_repeat_forward else 1
        return compute_gradients(self.replica, self.clock, batch, loss_of, samples, attempts)

    @abstractmethod
    def finish_step(self, work: TrainStep) -> None:
        """Exchanges gradients (none for an empty share) and updates the weights."""

    def sync_weights(self, version: int) -> None:
        """Copies the latest weights to this worker's model at a quiesce."""
        return

    def export_state(self) -> Section:
        """Returns the whole global state on every worker; only valid after `settle`."""
        return state_from_model(self.replica.model, self.replica.optimizer)

    @property
    def has_complete_state(self) -> bool:
        """True if this worker holds the result of all steps so far, between two steps."""
        return True

    def recover_state(self, version: int, lost_servers: Sequence[tuple[str, int]] = ()) -> Section:
        """Returns the global state of the last complete update, without the other workers.

        `finish_step` may have been interrupted; only `close` follows. Servers have been ordered to
        apply updates up to `version`; nothing answers at the addresses of lost ones.
        """
        return state_from_model(self.replica.model, self.replica.optimizer)

    @contextmanager
    def gather_state(self, *, slots: bool) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
        """Yields the global state for worker 0 to write, and its tensors on other workers.

        All workers call it. Remote tensors are received when worker 0 fetches them, in the order of
        the dictionary; the others send theirs on exit. `slots` includes those of the optimizer.
        """
        yield self.export_state() if slots else Section(), {}

    @property
    def eval_shard(self) -> tuple[int, int]:
        """Returns this worker's part of an evaluation, and the number of parts."""
        return self.context.rank, self.context.size

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Returns the model's output; None if another worker has it."""
        output: torch.Tensor = self.replica.model(inputs)
        return output

    def average_buffers(self, samples: int) -> None:
        """Averages running statistics over the workers, weighted by their samples."""
        average_running_stats(persistent_buffers(self.replica.model), self.context.group, samples)

    def checksum(self) -> str:
        """Returns a checksum of weights and buffers, which must be equal on all workers."""
        model = self.replica.model
        tensors = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
        tensors.update({f"buffers/{n}": b for n, b in persistent_buffers(model).items()})
        return checksum(Section(tensors))

    def export_local_state(self) -> Section:
        """Returns the per-worker state (residuals, inner optimizers)."""
        return Section()

    def import_local_state(self, own: Section) -> None:
        return

    def pop_grad_norms(self) -> tuple[float, float, float, float] | None:
        """Squared gradient norms of the last step, if measured; see `StepStats`."""
        return None

    def pop_overlapped_us(self) -> int | None:
        """Microseconds of the last step's exchange hidden by compute; None if not measured."""
        return None

    @property
    def bytes_received(self) -> int:
        """Payload received from servers; collectives are counted in `bytes_sent`."""
        return 0

    @property
    def bytes_sent(self) -> int:
        """Payload passed to collectives or sent to servers."""
        return self._sent

    @property
    def uncompressed_bytes(self) -> int:
        """Payload without a codec."""
        return self.bytes_sent

    def comm_report(self) -> CommReport | None:
        """The backend that this runner chose; None if there was nothing to choose."""
        return self._comm_report

    def optimizer_path(self) -> str | None:
        """Describes how the optimizer's work is divided, for the log; None if it is not."""
        return None

    def model_part(self) -> dict[str, object] | None:
        """Describes this worker's part of the model, if it does not have all of it."""
        return None

    def close(self) -> None:
        return


def compute_gradients(
    replica: Replica,
    clock: PhaseClock,
    batch: Batch,
    loss_of: LossOf,
    samples: int,
    attempts: int = 2,
) -> StepStats:
    """Computes the gradient of the mean loss of a share, in micro-batches if these are limited.

    If a forward pass does not fit in memory, the limit is halved for the rest of the run and the
    share is computed again, up to this many `attempts`.
    """
    inputs, targets = batch
    count = len(targets)
    for attempt in range(attempts):
        size = min(count, replica.micro_batch or count)
        try:
            if size < count:
                return _accumulate_gradients(replica, clock, batch, loss_of, size)
            clock.enter(FORWARD)
            output = replica.model(inputs)
            loss = loss_of(output, targets)
            break
        except (MemoryError, RuntimeError) as error:
            if attempt + 1 == attempts or size == 1 or not is_out_of_memory(error):
                raise
            replica.micro_batch = size // 2
            print(
                f"out of memory in a forward pass of {size} samples: continues with micro-batches "
                f"of {size // 2}",
                flush=True,
            )
    clock.enter(BACKWARD)
    loss.backward()  # type: ignore[no-untyped-call]
    return measure(samples, loss, output, targets)


def _accumulate_gradients(
    replica: Replica, clock: PhaseClock, batch: Batch, loss_of: LossOf, size: int
) -> StepStats:
    """Sums the gradients of micro-batches, weighted by samples, then passes them to all hooks."""
    parameters = [p for _, p in replica.trained]
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    count = len(batch[1])
    totals = StepStats(0, 0, 0.0, 0)
    for inputs, targets in zip(*(torch.split(part, size) for part in batch), strict=True):
        clock.enter(FORWARD)
        output = replica.model(inputs)
        loss = loss_of(output, targets)
        clock.enter(BACKWARD)
        weighted = loss * (len(targets) / count)
        for i, part in enumerate(torch.autograd.grad(weighted, parameters, allow_unused=True)):
            if part is not None:
                total = sums[i]
                sums[i] = part if total is None else total.add_(part)
        totals = add_stats(totals, measure(len(targets), loss, output, targets))
    # The gradient of sum(weight * gradient): hooks send a gradient when it is complete.
    used = [(p, g) for p, g in zip(parameters, sums, strict=True) if g is not None]
    torch.autograd.backward([p for p, _ in used], [g for _, g in used])
    return totals


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an allocation failed, on the CPU or on a device."""
    text = str(error)
    is_cpu = "DefaultCPUAllocator" in text or "can't allocate memory" in text
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_cpu


def add_stats(total: StepStats, measured: StepStats) -> StepStats:
    """Returns the sum of the statistics of two steps or micro-batches."""
    loss_sum = None
    if total.loss_sum is not None and (measured.loss_sum is not None or not measured.samples):
        loss_sum = total.loss_sum + (measured.loss_sum or 0.0)
    return StepStats(
        total.samples + measured.samples,
        total.predictions + measured.predictions,
        loss_sum,
        None if measured.correct is None else (total.correct or 0) + measured.correct,
        total.busy_s + measured.busy_s,
        total.comm_s + measured.comm_s,
        measured.norms or total.norms,
        total.steps + measured.steps,
        total.busy_square_s2 + measured.busy_square_s2,
    )


def count_correct(output: torch.Tensor, target: torch.Tensor) -> tuple[int | None, int]:
    """Returns correct predictions (None without classes) and the number of predictions."""
    if target.is_floating_point() or output.dim() != target.dim() + 1:
        return None, int(target.shape[0])
    return int((output.argmax(-1) == target).sum()), target.numel()


def measure(
    samples: int, loss: torch.Tensor, output: torch.Tensor, targets: torch.Tensor
) -> StepStats:
    """Returns the results of a forward pass with a mean loss over these samples."""
    correct, predictions = count_correct(output, targets)
    return StepStats(samples, predictions, loss.item() * samples, correct)


def step_optimizer(replica: Replica) -> None:
    """Clips complete gradients if configured, then updates."""
    if replica.clip is not None:
        torch.nn.utils.clip_grad_norm_([p for _, p in replica.trained], replica.clip)
    replica.apply_gradients()


def scale_to_norm(limit: float, square: float, gradients: Iterable[torch.Tensor]) -> None:
    """Scales a part of the gradients like clip_grad_norm_, given the total squared norm."""
    factor = limit / (square**0.5 + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)


def clip_parts(
    limit: float | None,
    counted: Iterable[torch.Tensor],
    gradients: Iterable[torch.Tensor],
    group: CollectiveGroup,
) -> None:
    """Clips gradients that are distributed over workers; each is counted by one of them."""
    if limit is not None:
        square = torch.zeros(1, dtype=torch.float64)
        for gradient in counted:
            square += gradient.double().square().sum()
        group.all_reduce(square)
        scale_to_norm(limit, float(square), gradients)


def copy_options(optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Copies the options of these parameter groups, such as the learning rate."""
    for mine, current in zip(optimizer.param_groups, groups, strict=True):
        mine.update({k: v for k, v in current.items() if k != "params"})


@contextmanager
def peer_errors(problem: str, *, inside_layers: bool = False) -> Iterator[None]:
    """Converts errors of an exchange to PeerLost; inside layers, others pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if inside_layers and not re.search("gloo|connection", str(error), re.IGNORECASE):
            raise
        raise PeerLost(f"{problem} ({error})") from None
