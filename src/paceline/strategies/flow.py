"""Activations and their gradients on their way between the stages of one replica."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.comm.group import Group
from paceline.errors import PeerLost
from paceline.strategies.stages import StageGraph
from paceline.telemetry.phases import BACKWARD, COMM, FORWARD, WAIT, PhaseClock

PLACES = 64
"""Values that may pass between two stages; skip connections make them more than one."""


class Flow:
    """The micro-batches of one step, as one stage sees them. Raises PeerLost."""

    def __init__(
        self,
        group: Group,
        clock: PhaseClock,
        stage: int,
        first: int,
        step: int,
        *,
        recompute: bool = False,
    ) -> None:
        """`first` is the rank of the replica's first stage."""
        self._group = group
        self._clock = clock
        self._stage = stage
        self._first = first
        self._step = step
        self._recompute = recompute
        self._graphs: dict[int, StageGraph] = {}
        self._arguments: dict[int, list[torch.Tensor]] = {}
        self._outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self.bytes_sent = 0

    def forward(self, k: int, graph: StageGraph, part: torch.Tensor) -> torch.Tensor:
        """Of a micro-batch; what the stage puts out first, which of the last one is the model's."""
        arguments = []
        for place, source in enumerate(graph.sources[self._stage]):
            if source.stage is None:
                arguments.append(part)
                continue
            shape, dtype = graph.shapes[self._stage][place]
            value = self._receive(source.stage, shape, dtype, k, place, back=False)
            arguments.append(value.requires_grad_(dtype.is_floating_point))
        self._clock.enter(FORWARD)
        module = graph.modules[self._stage]
        if self._recompute and torch.is_grad_enabled():
            made = torch.utils.checkpoint.checkpoint(module, *arguments, use_reentrant=False)
        else:
            made = module(*arguments)
        values = made if isinstance(made, tuple | list) else (made,)
        self._graphs[k], self._arguments[k], self._outputs[k] = graph, arguments, tuple(values)
        self._clock.enter(COMM)
        for index, takers in graph.takers[self._stage].items():
            for stage, place in takers:
                self._send(values[index].detach(), stage, k, place, back=False)
        output: torch.Tensor = values[0]
        return output

    def backward(self, k: int, loss: torch.Tensor | None) -> None:
        """Of a micro-batch; `loss` on the last stage alone."""
        graph, arguments = self._graphs.pop(k), self._arguments.pop(k)
        outputs = self._outputs.pop(k)
        if loss is not None:
            self._clock.enter(BACKWARD)
            torch.autograd.backward(loss)
        else:
            kept, gradients = [], []
            for index, takers in graph.takers[self._stage].items():
                value = outputs[index]
                if not value.is_floating_point():
                    continue
                # Whoever takes it cannot know whether it depends on weights, and answers anyhow.
                came = [
                    self._receive(stage, value.shape, value.dtype, k, place, back=True)
                    for stage, place in takers
                ]
                if value.requires_grad:
                    kept.append(value)
                    gradients.append(came[0] if len(came) == 1 else torch.stack(came).sum(0))
            self._clock.enter(BACKWARD)
            if kept:  # a frozen stage has nothing to compute
                torch.autograd.backward(kept, gradients)
        self._clock.enter(COMM)
        for place, source in enumerate(graph.sources[self._stage]):
            argument = arguments[place]
            if source.stage is not None and argument.requires_grad:
                gradient = argument.grad
                if gradient is None:
                    gradient = torch.zeros_like(argument)
                self._send(gradient, source.stage, k, place, back=True)

    def finish(self) -> None:
        """Everything that was sent has left."""
        self._clock.enter(COMM)
        for work, _ in self._sending:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(f"a neighbour took nothing in step {self._step} ({error})") from None

    def _send(self, value: torch.Tensor, stage: int, k: int, place: int, *, back: bool) -> None:
        value = value.contiguous()
        rank = self._first + stage
        try:
            work = self._group.send_async(value, rank, _tag(k, place, back))
        except RuntimeError as error:
            raise PeerLost(
                f"stage {stage} (worker {rank}) is gone in step {self._step} ({error})"
            ) from None
        self._sending.append((work, value))
        self.bytes_sent += value.numel() * value.element_size()

    def _receive(
        self, stage: int, shape: torch.Size, dtype: torch.dtype, k: int, place: int, *, back: bool
    ) -> torch.Tensor:
        self._clock.enter(WAIT)
        value = torch.empty(shape, dtype=dtype)
        rank = self._first + stage
        try:
            self._group.receive(value, rank, _tag(k, place, back))
        except RuntimeError as error:
            what = "gradients" if back else "activations"
            raise PeerLost(
                f"no {what} of step {self._step} came from stage {stage} (worker {rank}): {error}"
            ) from None
        return value


def _tag(k: int, place: int, back: bool) -> int:
    return 2 * (PLACES * k + place) + back
