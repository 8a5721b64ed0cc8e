"""Real runners in one process: each simulated worker has a replica of the model and its runner.

Gradients are computed one worker after another, so results are deterministic. Calls that may
communicate run in one thread per worker, over an `InProcessGroup`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from paceline.comm.in_process_group import InProcessGroup
from paceline.protocol.messages import Lease, Message
from paceline.specs.strategy import Strategy
from paceline.state import Section, copy_section, load_into_model, state_from_model
from paceline.strategies.registry import make_runner
from paceline.strategies.runner import PhaseContext, Replica, Runner, TrainStep, WorkerContext
from paceline.telemetry.phase_clock import PhaseClock
from paceline.twin.updates import EMPTY, StepOutcome, WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend

T = TypeVar("T")
RunnerT = TypeVar("RunnerT", bound=Runner)
TIMEOUT_S = 300.0


class RunnerUpdates(WeightUpdates, Generic[RunnerT]):
    """The runners of all simulated workers, and the calls that concern all of them."""

    version = 0
    """Newest version of the weights on the servers, if there are any."""

    def __init__(
        self,
        backend: GradientBackend,
        make: Callable[[WorkerContext], RunnerT],
        phase: PhaseContext,
    ) -> None:
        self.backend = backend
        source = backend.replica
        self._groups = InProcessGroup.create(backend.workers, TIMEOUT_S)
        self.runners: list[RunnerT] = []
        for group in self._groups:
            model, optimizer = copy.deepcopy((source.model, source.optimizer))
            context = WorkerContext(
                rank=group.rank,
                size=group.size,
                replica=Replica(model, optimizer, clip=source.clip),
                group=group,
                control=_NoCoordinator(),
                clock=PhaseClock(0.0),
                token="",
                timeout_s=TIMEOUT_S,
                phase=phase,
            )
            self.runners.append(make(context))
        self._losses = [backend.build_loss(runner.replica.model) for runner in self.runners]
        self._samples = [0] * backend.workers
        self._pool = ThreadPoolExecutor(backend.workers, "simulated-worker")
        state = state_from_model(source.model, source.optimizer)
        self.call_all(lambda worker, runner: runner.import_state(state))

    def call_all(self, call: Callable[[int, RunnerT], T]) -> list[T]:
        return self.call(range(len(self.runners)), call)

    def call(self, workers: Sequence[int], call: Callable[[int, RunnerT], T]) -> list[T]:
        """Calls these workers' runners concurrently; raises the first error of any of them."""

        def guarded(worker: int) -> T:
            try:
                return call(worker, self.runners[worker])
            except BaseException:
                self._groups[worker].abort()
                raise

        if len(workers) == 1:
            return [guarded(workers[0])]
        return list(self._pool.map(guarded, workers))

    def forward_backward(self, worker: int, step: TrainStep) -> StepOutcome:
        """Computes a worker's share on its own replica, after `begin_step`."""
        if not step.lease.samples:
            return EMPTY
        backend, runner = self.backend, self.runners[worker]
        for parameter in runner.replica.model.parameters():
            parameter.grad = None
        with backend.per_worker.random_state(worker):
            batch = backend.loader.batch(step.lease)
            step.measured = runner.forward_backward(step, batch, self._losses[worker])
        self._samples[worker] += step.lease.samples
        return backend.outcome(worker, step.measured)

    def recover_state(self) -> Section:
        return copy_section(self.runners[0].recover_state(self.version))

    def sync(self) -> None:
        """Settles all runners as a quiesce does, and copies the result to the backend's model."""
        self.call_all(lambda _, runner: runner.sync_weights(self.version))
        self.call_all(lambda worker, runner: runner.average_buffers(self._samples[worker]))
        self._samples = [0] * len(self.runners)
        theirs, ours = self.runners[0].replica.model, self.backend.replica.model
        with torch.no_grad():
            for weights, current in zip(ours.parameters(), theirs.parameters(), strict=True):
                weights.copy_(current)
            for buffer, newest in zip(ours.buffers(), theirs.buffers(), strict=True):
                buffer.copy_(newest)

    def export(self) -> None:
        self.sync()
        section = self.call_all(lambda _, runner: runner.export_state())[0]
        replica = self.backend.replica
        load_into_model(section, replica.model, replica.optimizer)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self._pool.shutdown()


class LocalReplicas(RunnerUpdates[Runner]):
    """Strategies whose workers take local steps and average their replicas by themselves."""

    uses_leases = True

    def __init__(self, backend: GradientBackend, spec: Strategy) -> None:
        phase = PhaseContext()
        super().__init__(backend, lambda context: make_runner(spec, context, phase), phase)
        self._steps = 0
        self._bytes_sent = 0
        self._averaged = False

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        steps = [TrainStep(lease, self._steps) for lease in leases]
        self.call_all(lambda worker, runner: runner.begin_step(steps[worker]))
        outcomes = []
        for worker, step in enumerate(steps):
            self.backend.set_lr(step.lease, self.runners[worker].replica.optimizer)
            outcomes.append(self.forward_backward(worker, step))
        self.backend.set_lr(leases[0])
        self.call_all(lambda worker, runner: runner.finish_step(steps[worker]))
        self._steps += 1
        sent = self.runners[0].bytes_sent
        self._averaged, self._bytes_sent = sent > self._bytes_sent, sent
        return outcomes

    def is_average_due(self) -> bool:
        return self._averaged

    def average_replicas(self) -> None:
        """Runners average by themselves in `step`; at a quiesce they average what is left."""
        self.call_all(lambda _, runner: runner.sync_weights(0))
        self._bytes_sent = self.runners[0].bytes_sent


class _NoCoordinator:
    """Discards what a runner reports: the simulation reports for it, at the simulated time."""

    def send(self, message: Message) -> None:
        return

    def receive(self) -> Message:
        raise AssertionError("a simulated worker receives no messages")
