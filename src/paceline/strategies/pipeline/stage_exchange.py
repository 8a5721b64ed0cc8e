"""Exchange of activations and their gradients between the stages of one replica."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import PeerLost, UsageError
from paceline.strategies.pipeline.stage_graph import StageGraph
from paceline.strategies.runner import peer_errors
from paceline.telemetry.phase_clock import BACKWARD, COMM, FORWARD, WAIT, PhaseClock

PLACES = 64
"""Maximum number of values between two stages; skip connections need more than one."""


@dataclass
class StageExchange:
    """Runs the micro-batches of one step on one stage. Raises PeerLost."""

    group: CollectiveGroup
    clock: PhaseClock
    stage: int
    first: int
    """Rank of the replica's first stage."""
    step: int
    _: KW_ONLY
    recompute: bool = False

    def __post_init__(self) -> None:
        self._passes: dict[int, tuple[StageGraph, list[torch.Tensor], tuple[torch.Tensor, ...]]]
        """Graph, arguments and outputs of each micro-batch between forward and backward."""
        self._passes = {}
        self._coming: dict[tuple[int, int], tuple[torch.Tensor, dist.Work]] = {}
        """Receive buffers by stage and tag."""
        self._sent: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}
        """Activations being sent, by micro-batch."""
        self._returned: list[tuple[dist.Work, torch.Tensor]] = []
        """Gradients being sent."""
        self.bytes_sent = 0

    def run(
        self,
        steps: Sequence[tuple[str, int]],
        parts: Sequence[torch.Tensor],
        graph_of: Callable[[torch.Tensor], StageGraph],
        judge: Callable[[int, torch.Tensor], torch.Tensor | None],
    ) -> None:
        """Runs a step; `judge` computes the loss of a micro-batch on the last stage."""
        losses: dict[int, torch.Tensor | None] = {}
        for (kind, k), after in zip(steps, [*steps[1:], None], strict=True):
            # Post receives for the next values while the current ones are computed.
            if after is not None and after[0] == "forward":
                self._expect_activations(after[1], graph_of(parts[after[1]]))
            elif after is not None and after[1] in self._passes:
                self._expect_gradients(after[1])
            if kind == "forward":
                losses[k] = judge(k, self.forward(k, graph_of(parts[k]), parts[k]))
            else:
                self.backward(k, losses.pop(k))
        self.finish()

    def _expect_activations(self, k: int, graph: StageGraph) -> None:
        for place, source in enumerate(graph.sources[self.stage]):
            if source.stage is not None:
                shape, dtype = graph.shapes[self.stage][place]
                self._prepare(source.stage, shape, dtype, _tag(k, place, back=False))

    def _expect_gradients(self, k: int) -> None:
        graph, _, outputs = self._passes[k]
        for index, takers in graph.takers[self.stage].items():
            value = outputs[index]
            for stage, place in takers if value.is_floating_point() else ():
                self._prepare(stage, value.shape, value.dtype, _tag(k, place, back=True))

    def forward(self, k: int, graph: StageGraph, part: torch.Tensor) -> torch.Tensor:
        """Runs the forward pass of a micro-batch; returns the first output of the stage."""
        arguments = []
        for place, source in enumerate(graph.sources[self.stage]):
            if source.stage is None:
                arguments.append(part)
                continue
            shape, dtype = graph.shapes[self.stage][place]
            value = self._receive(source.stage, shape, dtype, k, place, back=False)
            arguments.append(value.requires_grad_(dtype.is_floating_point))
        self.clock.enter(FORWARD)
        module = graph.modules[self.stage]
        if self.recompute and torch.is_grad_enabled():
            made = torch.utils.checkpoint.checkpoint(module, *arguments, use_reentrant=False)
        else:
            made = module(*arguments)
        values = made if isinstance(made, tuple | list) else (made,)
        self._passes[k] = graph, arguments, tuple(values)
        self.clock.enter(COMM)
        for index, takers in graph.takers[self.stage].items():
            for stage, place in takers:
                self._send(values[index].detach(), stage, k, place, back=False)
        output: torch.Tensor = values[0]
        return output

    def backward(self, k: int, loss: torch.Tensor | None) -> None:
        """Runs the backward pass of a micro-batch; `loss` is only set on the last stage."""
        graph, arguments, outputs = self._passes.pop(k)
        if loss is not None:
            self.clock.enter(BACKWARD)
            torch.autograd.backward(loss)
        else:
            kept, gradients = [], []
            for index, takers in graph.takers[self.stage].items():
                value = outputs[index]
                if not value.is_floating_point():
                    continue
                # The receiving stage cannot know whether it depends on weights, and always replies.
                arrived = [
                    self._receive(stage, value.shape, value.dtype, k, place, back=True)
                    for stage, place in takers
                ]
                if value.requires_grad:
                    kept.append(value)
                    gradients.append(
                        arrived[0] if len(arrived) == 1 else torch.stack(arrived).sum(0)
                    )
            self.clock.enter(BACKWARD)
            if kept:  # a frozen stage has nothing to compute
                torch.autograd.backward(kept, gradients)
        self.clock.enter(COMM)
        # A stage that has sent its gradients has received the activations; their memory is free.
        self._see_off(self._sent.pop(k, []))
        for place, source in enumerate(graph.sources[self.stage]):
            argument = arguments[place]
            if source.stage is not None and argument.requires_grad:
                gradient = torch.zeros_like(argument) if argument.grad is None else argument.grad
                self._send(gradient, source.stage, k, place, back=True)

    def finish(self) -> None:
        """Waits until all sends are complete."""
        self.clock.enter(COMM)
        for sent in self._sent.values():
            self._see_off(sent)
        self._see_off(self._returned)

    def _see_off(self, sent: list[tuple[dist.Work, torch.Tensor]]) -> None:
        for work, _ in sent:
            with peer_errors(f"an adjacent stage did not receive in step {self.step}"):
                work.wait()

    def _send(self, value: torch.Tensor, stage: int, k: int, place: int, *, back: bool) -> None:
        value = value.contiguous()
        rank = self.first + stage
        with peer_errors(f"stage {stage} (worker {rank}) was lost in step {self.step}"):
            work = self.group.isend(value, rank, _tag(k, place, back=back))
        (self._returned if back else self._sent.setdefault(k, [])).append((work, value))
        self.bytes_sent += value.nbytes

    def _receive(
        self, stage: int, shape: torch.Size, dtype: torch.dtype, k: int, place: int, *, back: bool
    ) -> torch.Tensor:
        self.clock.enter(WAIT)
        rank, tag = self.first + stage, _tag(k, place, back=back)
        self._prepare(stage, shape, dtype, tag)
        value, work = self._coming.pop((stage, tag))
        try:
            work.wait()
        except RuntimeError as error:
            what = "gradients" if back else "activations"
            raise PeerLost(
                f"no {what} of step {self.step} from stage {stage} (worker {rank}): {error}"
            ) from None
        return value

    def _prepare(self, stage: int, shape: torch.Size, dtype: torch.dtype, tag: int) -> None:
        if (stage, tag) in self._coming:
            return
        value, rank = torch.empty(shape, dtype=dtype), self.first + stage
        with peer_errors(f"stage {stage} (worker {rank}) was lost in step {self.step}"):
            self._coming[stage, tag] = value, self.group.irecv(value, rank, tag)


def _tag(k: int, place: int, *, back: bool) -> int:
    if place >= PLACES:
        raise UsageError(
            f"pipeline: a stage has {place + 1} inputs; at most {PLACES} are supported"
        )
    return 2 * (PLACES * k + place) + back
