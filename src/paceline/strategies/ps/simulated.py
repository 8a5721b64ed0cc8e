"""The parameter server inside one process: real runners and a real store, in virtual-time order.

`SimulatedTransport` connects a runner to the store without messages or threads. A pull returns the
weights that were current when the simulation pinned them for the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.codecs.compressor import Compressor
from paceline.comm.flat_layout import FlatLayout
from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.protocol.shard import Handle
from paceline.specs.strategy import WorkerGroups
from paceline.state import Section
from paceline.strategies.ps.connect import Connect
from paceline.strategies.ps.messages import PushHeader
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.store import ParameterStore, PendingGradient, ShardState, Slot
from paceline.strategies.ps.transport import Connected, DeferredExchanges, Pulled, TransportKind
from paceline.strategies.ps.worker import ParameterServerRunner
from paceline.strategies.runner import CommReport, PhaseContext, TrainStep, WorkerContext
from paceline.twin.replicas import RunnerUpdates
from paceline.twin.updates import StepOutcome

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend

ONE_SERVER = (("simulated", 0),)
"""A single shard holds the whole model: several shards would compute the same."""


class SimulatedTransport:
    """A runner's link to the store of `ServedReplicas`; never blocks."""

    kind: TransportKind = "simulated"

    def __init__(self, servers: ServedReplicas, worker: int, compressor: Compressor | None) -> None:
        self._servers = servers
        self._worker = worker
        self._compressor = compressor
        self._exact = False
        self.bytes_sent = 0
        self.bytes_received = 0

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        store = self._servers.store
        buffer = store.borrow_buffer()
        if self._compressor is None:
            buffer.copy_(gradient)
        else:
            dtype = store.slices[0].parameter.dtype
            payload = self._compressor.encode(gradient.view(dtype))
            self._compressor.coder.decode(payload, buffer.view(dtype))
        store.gradients[self._worker, self._servers.handles[self._worker]] = PendingGradient(
            buffer, frozenset(header.missing), header.options
        )
        self.bytes_sent += gradient.numel()

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        self._exact = exact

    def receive(self, out: torch.Tensor) -> Pulled:
        servers = self._servers
        # With `exact` the newest weights, which no codec has changed.
        newest = servers.version, servers.store.weights
        version, weights = newest if self._exact else servers.pinned[self._worker]
        out.copy_(weights)
        self.bytes_received += out.numel()
        return Pulled(version, 0)

    def load(self, state: ShardState) -> None:
        self._servers.load(state)

    def request_slots(self, at_least: int) -> None:
        return

    def receive_slots(self) -> list[Slot]:
        return [Slot(i, name, value.clone()) for i, name, value in self._servers.store.slots()]

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


class ServedReplicas(RunnerUpdates[ParameterServerRunner]):
    """Runners of all workers on one simulated server, and the weights that each has pulled."""

    def __init__(
        self,
        backend: GradientBackend,
        make: Callable[[WorkerContext, Connect], ParameterServerRunner],
        groups: WorkerGroups = (),
    ) -> None:
        self.store = ParameterStore(use_shared_memory=False)
        self.handles = [0] * backend.workers
        """Number of each worker's next push, as the coordinator knows it."""
        self.pinned: dict[int, tuple[int, torch.Tensor]] = {}
        """Weights, and their version, that each worker has pulled but not yet read."""
        self._snapshot: tuple[int, torch.Tensor] | None = None
        phase = PhaseContext(servers=ONE_SERVER, groups=groups)
        super().__init__(backend, lambda context: make(context, self.connect), phase)
        self._steps = [TrainStep(_NO_LEASE, -1) for _ in self.runners]
        for runner, kept in zip(self.runners, backend.residuals, strict=True):
            runner.import_local_state(Section(kept))

    def connect(
        self,
        spec: ParameterServer,
        context: WorkerContext,
        layout: FlatLayout,
        compressors: Sequence[Compressor],
    ) -> Connected:
        compressor = compressors[0] if compressors else None
        return Connected(
            transports=(SimulatedTransport(self, context.rank, compressor),),
            send_buffer=layout.new_buffer(),
            report=CommReport(backend="simulated", reason=""),
            exchanges=DeferredExchanges() if spec.overlap else None,
        )

    def load(self, state: ShardState) -> None:
        self.store.load(state)
        self.version, self._snapshot = 0, None

    def pull(self, worker: int) -> None:
        """Fixes the weights that the worker's next pull returns; copied once per version."""
        if self._snapshot is None or self._snapshot[0] != self.version:
            weights = self.store.weights.clone()
            coder = self.store.weight_coder
            if coder is not None:
                values = weights.view(self.store.slices[0].parameter.dtype)
                coder.decode(coder.encode(values), values)
            self._snapshot = (self.version, weights)
        self.pinned[worker] = self._snapshot

    def compute(self, worker: int, lease: Lease) -> StepOutcome:
        step = self._next_step(worker, lease)
        self.runners[worker].begin_step(step)
        return self.forward_backward(worker, step)

    def push(self, worker: int, lease: Lease, handle: int) -> None:
        self.handles[worker] = handle
        self.runners[worker].finish_step(self._steps[worker])

    def push_group(
        self, members: Sequence[int], leases: Sequence[Lease], handle: int
    ) -> list[StepOutcome]:
        self.handles[members[0]] = handle
        for worker, lease in zip(members, leases, strict=True):
            self._next_step(worker, lease)
        self.call(members, lambda worker, runner: runner.begin_step(self._steps[worker]))
        outcomes = [self.forward_backward(worker, self._steps[worker]) for worker in members]
        self.call(members, lambda worker, runner: runner.finish_step(self._steps[worker]))
        return outcomes

    def _next_step(self, worker: int, lease: Lease) -> TrainStep:
        self.backend.set_lr(lease, self.runners[worker].replica.optimizer)
        self.backend.set_lr(lease)
        step = TrainStep(lease, self._steps[worker].step + 1, self.version)
        self._steps[worker] = step
        return step

    def grad_sq_norm(self, order: ApplyUpdate) -> float:
        return self.store.sum_up(order)

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        # Summed again even if its norm was computed: other updates may have used the buffer.
        self.store.gather_gradient(order)
        self.store.step(order, factor)
        self.store.release_gradients(order)
        self.version += 1

    def export(self) -> None:
        super().export()
        self.keep_local_state()

    def keep_local_state(self) -> None:
        for runner, kept in zip(self.runners, self.backend.residuals, strict=True):
            own = runner.export_local_state().tensors
            kept.update({k: v.clone() for k, v in own.items() if k.startswith("residual/")})


_NO_LEASE = Lease(0, 0, 0, 0, 0, 0)
