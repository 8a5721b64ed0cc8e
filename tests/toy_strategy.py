"""A strategy in one file, as a user would write one: spec, pace, worker, record.

mean   gradients averaged over all workers in one exchange after the backward pass
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import paceline
from paceline.errors import PeerLost
from paceline.protocol.pace import Pace, PaceContext, PlannedPace
from paceline.specs.strategy import Strategy
from paceline.state import Section, load_into_model, state_from_model
from paceline.strategies.runner import Runner, TrainStep, WorkerContext, step_optimizer
from paceline.telemetry.phase_clock import COMM, OPTIMIZER


@dataclass(frozen=True)
class Mean(Strategy):
    """Synchronous: one all-reduce per step, without overlap."""

    name: ClassVar[str] = "mean"


def make_pace(spec: Mean, context: PaceContext) -> Pace:
    return PlannedPace(context)


class MeanRunner(Runner):
    """Sums gradients weighted by each worker's share of the samples."""

    def __init__(self, spec: Mean, context: WorkerContext) -> None:
        super().__init__(context)
        self._bytes_sent = 0

    def import_state(self, state: Section) -> None:
        load_into_model(state, self.replica.model, self.replica.optimizer)

    def finish_step(self, work: TrainStep) -> None:
        if self.context.size > 1:
            self.clock.enter(COMM)
            try:
                self._average(work)
            except RuntimeError as error:
                raise PeerLost(f"the exchange of step {work.step} broke ({error})") from None
        self.clock.enter(OPTIMIZER)
        step_optimizer(self.replica)

    def _average(self, work: TrainStep) -> None:
        used = torch.tensor([float(p.grad is not None) for _, p in self.replica.trained])
        self.context.group.all_reduce(used)
        for (_, parameter), count in zip(self.replica.trained, used.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(work.weight)
            self.context.group.all_reduce(parameter.grad)
            self._bytes_sent += parameter.grad.nbytes

    def export_state(self) -> Section:
        return state_from_model(self.replica.model, self.replica.optimizer)

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent


paceline.register_strategy(
    paceline.StrategyRecord(
        spec=Mean,
        pace=f"{__name__}:make_pace",
        worker=f"{__name__}:MeanRunner",
        examples=("mean",),
    )
)
