"""Worker side of grouped: groups are synchronous inside and share servers asynchronously."""

import torch

from paceline.errors import UsageError
from paceline.strategies.grouped.spec import Grouped
from paceline.strategies.ps.connect import Connect, connect
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.worker import ParameterServerRunner
from paceline.strategies.runner import TrainStep, WorkerContext, peer_errors
from paceline.telemetry.phase_clock import COMM


class GroupedRunner(ParameterServerRunner):
    """The first worker of a group pulls and pushes for the group, and broadcasts the weights.

    If a worker dies, the collective of its group fails and the run ends.
    """

    def __init__(self, spec: Grouped, context: WorkerContext, connect: Connect = connect) -> None:
        servers = ParameterServer(servers=spec.servers, lr_scale=spec.lr_scale)
        super().__init__(servers, context, connect)
        self._mine = next(g for g in context.phase.groups if context.rank in g)
        self._leads = self._mine[0] == context.rank
        self._inner = context.group.new_subgroup(context.phase.groups)
        self._dtype, *others = {p.dtype for p in self._parameters}
        if others:
            raise UsageError("grouped requires parameters of one dtype; use ps for mixed dtypes")

    def begin_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        with peer_errors(f"group {self._mine} failed at step {work.step}"):
            if self._leads:
                self._pull(work.version)
            if len(self._mine) > 1:
                self._inner.broadcast(self._incoming, self._mine[0])
                if not self._leads:
                    self._load_pulled_weights()

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        if len(self._mine) > 1:
            with peer_errors(f"group {self._mine} failed at step {work.step}"):
                self._sum_in_group(work)
        self._send(work, samples=work.lease.batch if self._leads else 0)

    def _sum_in_group(self, work: TrainStep) -> None:
        """Reduces the group's mean gradient to the leader."""
        used = torch.zeros(len(self._parameters))
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                view = self._out_views[index]
                if parameter.grad is None:
                    view.zero_()
                else:
                    torch.mul(parameter.grad, work.weight, out=view)
                    used[index] = 1
        self._inner.all_reduce(self._outgoing.view(self._dtype))
        self._inner.all_reduce(used)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._out_views[index].clone() if used[index] else None
