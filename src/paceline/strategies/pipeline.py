"""pipeline: the model in stages on neighbouring workers; micro-batches pass through them.

Worker r holds stage r % stages of replica r // stages. The last stage of a replica has its samples
in the ledger; the others have empty shares and compute on the same rows.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from paceline.comm.broadcast import collect_sections
from paceline.errors import PeerLost, UsageError
from paceline.protocol.messages import split_batch
from paceline.protocol.messages import Lease, Measured
from paceline.scoring import count_correct
from paceline.specs.strategy import Pipeline
from paceline.state import Section, capture, load_weights, restore
from paceline.strategies.runner import Batch, LossOf, Runner, Surroundings, Work
from paceline.strategies.stages import (
    StageGraph,
    check_cuts,
    cut_evenly,
    order_of_steps,
    trace,
)
from paceline.telemetry.phases import BACKWARD, COMM, FORWARD, OPTIMIZER, OTHER, WAIT


class PipelineRunner(Runner):
    """A stage that dies leaves its neighbours without activations: they raise PeerLost."""

    def __init__(self, spec: Pipeline, around: Surroundings) -> None:
        super().__init__(around)
        self._spec = spec
        self._stages = spec.stages
        self._stage = around.rank % spec.stages
        self._first = around.rank - self._stage
        """The first stage's worker of this replica."""
        model = self.replica.model
        self._cuts = spec.cuts or cut_evenly(model, spec.stages)
        check_cuts(model, self._cuts)
        self._graphs: dict[torch.Size, StageGraph] = {}
        self._owner: dict[str, int] = {}
        """By name of parameter or buffer: the stage that holds it."""
        replicas = around.size // spec.stages
        twins = tuple(
            tuple(stage + spec.stages * r for r in range(replicas)) for stage in range(spec.stages)
        )
        self._twins = around.group.divide(twins) if replicas > 1 else None
        """The workers that hold this stage, of all replicas."""
        self._weights = spec.weights_for(around.size)
        self._sent = 0

    # ---- a step -------------------------------------------------------------------------------

    def reads(self, lease: Lease) -> Lease:
        """All stages of a replica read the rows that its last stage answers for."""
        cuts = split_batch(lease.stop - lease.start, self.around.size, self._weights)
        last = self._first + self._stages - 1
        lo, hi = lease.start + cuts[last], lease.start + cuts[last + 1]
        return dataclasses.replace(lease, lo=lo, hi=hi)

    def compute(self, work: Work, batch: Batch | None, loss_of: LossOf) -> Measured:
        if batch is None:
            return Measured(0, 0, 0.0, 0)
        inputs, targets = batch
        micro = min(self._spec.micro, len(inputs))
        parts, wanted = torch.tensor_split(inputs, micro), torch.tensor_split(targets, micro)
        flow = _Flow(self, work, [self._graph(part) for part in parts])
        last = self._stage == self._stages - 1
        rows = len(inputs)
        loss_sum, told = 0.0, []
        for kind, k in order_of_steps(self._stage, self._stages, micro, self._spec.schedule):
            if kind == "forward":
                output = flow.forward(k, parts[k])
                if last:
                    loss = loss_of(output, wanted[k])
                    loss_sum += loss.item() * len(parts[k])
                    told.append((output.detach(), wanted[k]))
                    flow.outputs[k] = (loss * (work_weight(self, work) * len(parts[k]) / rows),)
            else:
                flow.backward(k)
        flow.finish()
        self.clock.enter(OTHER)
        if not last:
            return Measured(0, 0, 0.0, 0)
        counts = [count_correct(output, target) for output, target in told]
        known = [c for c, _ in counts if c is not None]
        correct = sum(known) if len(known) == len(counts) else None
        return Measured(rows, sum(n for _, n in counts), loss_sum, correct)

    def _graph(self, example: torch.Tensor) -> StageGraph:
        """Traced once a shape: the last batch of an epoch has another."""
        if example.shape not in self._graphs:
            graph = trace(self.replica.model, self._cuts, example)
            self._graphs[example.shape] = graph
            self._note_owners(graph)
        return self._graphs[example.shape]

    def _note_owners(self, graph: StageGraph) -> None:
        by_id = {id(t): n for n, t in self.replica.model.state_dict(keep_vars=True).items()}
        for stage, module in enumerate(graph.modules):
            for tensor in [*module.parameters(), *module.buffers()]:
                name = by_id.get(id(tensor))
                if name is None:
                    continue
                if self._owner.setdefault(name, stage) != stage:
                    raise UsageError(
                        f"pipeline: {name} is used in stages {self._owner[name]} and {stage}: "
                        "put the cut where both uses lie on one side"
                    )

    def finish_step(self, work: Work) -> None:
        self.clock.enter(COMM)
        mine = [(n, p) for n, p in self.replica.trained if self._owner.get(n) == self._stage]
        if self._twins is not None and mine:
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for _, p in mine]
            )
            self._twins.sum(flat)
            for (_, p), part in zip(mine, flat.split([p.numel() for _, p in mine]), strict=True):
                p.grad = part.view_as(p)
        self._clip([p for _, p in mine if p.grad is not None])
        self.clock.enter(OPTIMIZER)
        self.replica.apply_gradients()

    def _clip(self, parameters: list[torch.nn.Parameter]) -> None:
        """By the norm over all stages; replicas hold the same gradients by now."""
        if self.replica.clip is None:
            return
        square = torch.zeros(1, dtype=torch.float64)
        if self._first == 0:
            square += sum(
                float(p.grad.double().square().sum()) for p in parameters if p.grad is not None
            )
        self.around.group.sum(square)
        factor = self.replica.clip / (float(square) ** 0.5 + 1e-6)
        if factor < 1:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(factor)

    # ---- state --------------------------------------------------------------------------------

    def import_state(self, state: Section) -> None:
        restore(state, self.replica.model, self.replica.optimizer)
        if self._owner:
            self._forget_others()

    def _forget_others(self) -> None:
        for name, parameter in self.replica.trained:
            if self._owner.get(name, self._stage) != self._stage:
                self.replica.optimizer.state.pop(parameter, None)

    def settle(self, version: int) -> None:
        """Everybody gets every stage's weights: evaluation and state need the whole model."""
        if self.around.size > 1 and self._owner:
            load_weights(self._merge(slots=False), self.replica.model)

    def export_state(self) -> Section:
        if self.around.size == 1 or not self._owner:
            return capture(self.replica.model, self.replica.optimizer)
        return self._merge(slots=True)

    def _merge(self, *, slots: bool) -> Section:
        """What the stages of the first replica hold, put together."""
        whole = capture(self.replica.model, self.replica.optimizer)
        mine = Section()
        if self._first == 0:
            for key, tensor in whole.tensors.items():
                if self._owner_of(key) == self._stage and (slots or not key.startswith("slots/")):
                    mine.tensors[key] = tensor
            mine.plain = whole.plain if slots else {}
        merged = Section()
        for section in collect_sections(mine, self.around.group):
            merged.tensors.update(section.tensors)
            for name, values in section.plain.get("slots", {}).items():
                merged.plain.setdefault("slots", {}).setdefault(name, {}).update(values)
        for key, tensor in whole.tensors.items():
            if not key.startswith("slots/"):
                merged.tensors.setdefault(key, tensor)  # what no stage uses stays as it is
        return merged

    def _owner_of(self, key: str) -> int:
        kind, _, name = key.partition("/")
        if kind == "slots":
            name = name.rpartition("/")[0]
        return self._owner.get(name, 0)

    @property
    def bytes_sent(self) -> int:
        return self._sent


def work_weight(runner: PipelineRunner, work: Work) -> float:
    """The replica's share of the global batch."""
    lease = runner.reads(work.lease)
    return lease.samples / lease.batch


class _Flow:
    """Activations and their gradients on their way through one step."""

    def __init__(self, runner: PipelineRunner, work: Work, graphs: list[StageGraph]) -> None:
        self._runner = runner
        self._step = work.step
        self._graphs = graphs
        self._stage = runner._stage
        self._arguments: dict[int, list[torch.Tensor]] = {}
        self.outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def forward(self, k: int, part: torch.Tensor) -> torch.Tensor:
        graph, clock = self._graphs[k], self._runner.clock
        arguments = []
        for place, source in enumerate(graph.sources[self._stage]):
            if source.stage is None:
                arguments.append(part)
                continue
            shape, dtype = graph.shapes[self._stage][place]
            value = self._receive(source.stage, shape, dtype, k, place, back=False)
            arguments.append(value.requires_grad_(dtype.is_floating_point))
        clock.enter(FORWARD)
        made = graph.modules[self._stage](*arguments)
        values = made if isinstance(made, tuple | list) else (made,)
        self._arguments[k], self.outputs[k] = arguments, tuple(values)
        clock.enter(COMM)
        for index, takers in graph.takers[self._stage].items():
            for stage, place in takers:
                self._send(values[index].detach(), stage, k, place, back=False)
        return values[0]

    def backward(self, k: int) -> None:
        graph, clock = self._graphs[k], self._runner.clock
        outputs, arguments = self.outputs.pop(k), self._arguments.pop(k)
        takers = graph.takers[self._stage]
        if not takers:  # the last stage: its output is the loss
            clock.enter(BACKWARD)
            torch.autograd.backward(outputs[0])
        else:
            gradients = []
            kept = []
            for index, places in takers.items():
                if not outputs[index].requires_grad:
                    continue
                total = None
                for stage, place in places:
                    value = outputs[index]
                    came = self._receive(stage, value.shape, value.dtype, k, place, back=True)
                    total = came if total is None else total + came
                gradients.append(total)
                kept.append(outputs[index])
            clock.enter(BACKWARD)
            torch.autograd.backward(kept, gradients)
        clock.enter(COMM)
        for place, source in enumerate(graph.sources[self._stage]):
            argument = arguments[place]
            if source.stage is not None and argument.requires_grad:
                gradient = argument.grad
                if gradient is None:
                    gradient = torch.zeros_like(argument)
                self._send(gradient, source.stage, k, place, back=True)

    def _send(self, value: torch.Tensor, stage: int, k: int, place: int, *, back: bool) -> None:
        value = value.contiguous()
        rank = self._runner._first + stage
        work = dist.isend(value, rank, tag=_tag(k, place, back))
        assert work is not None
        self._sending.append((work, value))
        self._runner._sent += value.numel() * value.element_size()

    def _receive(
        self, stage: int, shape: torch.Size, dtype: torch.dtype, k: int, place: int, *, back: bool
    ) -> torch.Tensor:
        self._runner.clock.enter(WAIT)
        value = torch.empty(shape, dtype=dtype)
        rank = self._runner._first + stage
        try:
            dist.recv(value, rank, tag=_tag(k, place, back))
        except RuntimeError as error:
            what = "gradients" if back else "activations"
            raise PeerLost(
                f"no {what} of step {self._step} came from stage {stage} (worker {rank}): {error}"
            ) from None
        return value

    def finish(self) -> None:
        self._runner.clock.enter(COMM)
        for work, _ in self._sending:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(f"a neighbour took nothing in step {self._step} ({error})") from None


def _tag(k: int, place: int, back: bool) -> int:
    return 2 * (64 * k + place) + back
