"""Worker side of pipeline: stages on consecutive workers; micro-batches pass through them.

Worker r holds stage r % stages of replica r // stages: weights, gradients and optimizer state of
its stage only. The last stage of a replica holds its samples in the ledger; the others have
empty shares and compute on the same rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import UsageError
from paceline.protocol.messages import StepStats
from paceline.specs.optimizer import count_slots
from paceline.state import RemoteTensor, Section, is_model_tensor, persistent_buffers
from paceline.strategies.model_parallel import (
    ModelParallelRunner,
    all_reduce_gradients,
    gather_to_all,
    gather_to_rank0,
    select_state,
)
from paceline.strategies.pipeline.cut_selection import check_cuts, choose_cuts
from paceline.strategies.pipeline.spec import PipelineParallel
from paceline.strategies.pipeline.stage_exchange import StageExchange
from paceline.strategies.pipeline.stage_graph import StageGraph, stage_schedule, trace_stages
from paceline.strategies.runner import Batch, LossOf, TrainStep, WorkerContext, measure, peer_errors
from paceline.telemetry.phase_clock import COMM, OPTIMIZER, OTHER, WAIT


class PipelineRunner(ModelParallelRunner):
    """Runs one stage. If a stage dies, the adjacent stages raise PeerLost."""

    _spec: PipelineParallel

    def __init__(self, spec: PipelineParallel, context: WorkerContext) -> None:
        super().__init__(spec, context)
        check_cuts(self.replica.model, spec.cuts)
        if any("forward" in vars(module) for module in self.replica.model.modules()):
            raise UsageError(
                "pipeline traces the model and does not support recompute; "
                "use pipeline(recompute=true) instead"
            )
        self._cuts: tuple[str, ...] | None = None
        batch_norm = torch.nn.modules.batchnorm._BatchNorm
        self._normalises = any(isinstance(m, batch_norm) for m in self.replica.model.modules())
        self._graphs: dict[tuple[torch.Size, bool], StageGraph] = {}
        self._holders: dict[str, tuple[int, ...]] = {}
        """Stages that hold each parameter or buffer; several for tied ones."""
        self._tied_groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        """Parameters that several stages use, by those stages: their gradients are added up."""
        self._remote_parameters: set[str] = set()
        """Parameters whose weights only other stages hold; here only their shape is kept."""
        self._waited_ns = self._passed_ns = 0

    # ---- a step -------------------------------------------------------------------------------

    def forward_backward(self, work: TrainStep, batch: Batch | None, loss_of: LossOf) -> StepStats:
        if batch is None:
            self._prepare(torch.empty(0))
            return StepStats(0, 0, 0.0, 0)
        inputs, targets = batch
        # BatchNorm requires more than one row, and the last batch of an epoch may be short.
        least = 2 if self._normalises else 1
        micro = min(self._spec.micro, max(1, len(inputs) // least))
        parts, wanted = torch.tensor_split(inputs, micro), torch.tensor_split(targets, micro)
        self._prepare(parts[0])
        flow = self._stage_exchange(work.step)
        measured: list[StepStats] = []
        self.clock.enter(OTHER)
        began_ns, waited_ns = sum(self.clock.total_ns), self.clock.total_ns[WAIT]

        def judge(k: int, output: torch.Tensor) -> torch.Tensor | None:
            if not self._computes_loss:
                return None
            loss = loss_of(output, wanted[k])
            measured.append(measure(len(parts[k]), loss, output, wanted[k]))
            return loss * (len(parts[k]) / work.lease.batch)

        steps = stage_schedule(self._part, self._parts, micro, self._spec.schedule)
        flow.run(steps, parts, self._graph, judge)
        self.clock.enter(OTHER)
        self._waited_ns += self.clock.total_ns[WAIT] - waited_ns
        self._passed_ns += sum(self.clock.total_ns) - began_ns
        self._sent += flow.bytes_sent
        return add_up(measured)

    def _stage_exchange(self, step: int) -> StageExchange:
        group, recompute = self.context.group, self._spec.recompute
        return StageExchange(group, self.clock, self._part, self._first, step, recompute=recompute)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None:
        if not self._holders:  # no step yet: the model is not split
            return super().predict(inputs) if self._computes_loss else None
        phase = self.clock.current
        flow = self._stage_exchange(0)
        output = flow.forward(0, self._graph(inputs), inputs)
        flow.finish()
        self.clock.enter(phase)
        return output if self._computes_loss else None

    # ---- splitting ----------------------------------------------------------------------------

    def _prepare(self, rows: torch.Tensor) -> None:
        """Splits the model in the first step; a collective operation, also without rows."""
        if self._holders:
            return
        example = self._agree_on_example(rows)
        optimizer = self.replica.optimizer
        slots = count_slots(type(optimizer).__name__, optimizer.defaults)
        group = self.context.group
        self._cuts = choose_cuts(self._spec, self.replica.model, example, slots, group)
        self._graph(example)
        for name, parameter in self.replica.model.named_parameters():
            if self._part not in self._holders.get(name, (self._part,)):
                self._remote_parameters.add(name)
                parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                self.replica.optimizer.state.pop(parameter, None)
        for name, parameter in self.replica.trained:
            stages = self._holders.get(name, ())
            if len(stages) > 1:
                self._tied_groups.setdefault(stages, []).append(parameter)

    def _agree_on_example(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows with the shape of some worker's rows; their values do not matter."""
        form = {"shape": list(rows.shape), "dtype": str(rows.dtype).removeprefix("torch.")}
        for section in self.context.group.all_gather_sections(Section(plain=form)):
            if section.plain["shape"] != [0]:
                dtype = getattr(torch, section.plain["dtype"])
                return torch.zeros(section.plain["shape"], dtype=dtype)
        raise UsageError("pipeline: no worker has a row to train on")

    def _graph(self, example: torch.Tensor) -> StageGraph:
        """Traces once per input shape, which the last batch of an epoch changes, and per mode."""
        model = self.replica.model
        key = (example.shape, model.training)
        if key not in self._graphs:
            assert self._cuts is not None
            graph = trace_stages(model, self._cuts, example)
            self._graphs[key] = graph
            if not self._holders:
                self._holders = find_holders(model, graph)
        return self._graphs[key]

    # ---- exchange and update ------------------------------------------------------------------

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        trained = self.replica.trained
        own = [p for n, p in trained if self._holders.get(n) == (self._part,)]
        with peer_errors(f"the exchange of step {work.step} failed"):
            self._sent += all_reduce_gradients(own, self._data_parallel_group)
            for stages, parameters in self._tied_groups.items():
                self._sent += all_reduce_gradients(parameters, self._together(stages))
            self.clip([p for n, p in trained if self._holds(n)], [p for _, p in trained])
        self.clock.enter(OPTIMIZER)
        self.replica.apply_gradients()

    def _together(self, stages: tuple[int, ...]) -> CollectiveGroup | None:
        """Returns the group of workers of all replicas with these stages; None for others."""
        size = self.context.size
        inside = tuple(w for w in range(size) if w % self._parts in stages)
        outside = tuple((w,) for w in range(size) if w not in inside)
        group = self.context.group.new_subgroup((inside, *outside))
        return group if self._part in stages else None

    # ---- state --------------------------------------------------------------------------------

    def average_buffers(self, samples: int) -> None:
        """Averages statistics, then gathers those of all stages on all workers."""
        super().average_buffers(samples)
        buffers = persistent_buffers(self.replica.model)
        if not self._holders or not buffers:
            return
        mine = {name: b for name, b in buffers.items() if self._holds(name)}
        given = Section(mine if self._replica == 0 else {})
        for section in self.context.group.all_gather_sections(given):
            for name, tensor in section.tensors.items():
                if name not in mine:
                    buffers[name].copy_(tensor)

    def _holds(self, name: str) -> bool:
        """Returns whether this is the first stage that holds it; stage 0 holds unused ones."""
        return self._holders.get(name, (0,))[0] == self._part

    def export_state(self) -> Section:
        if not self._holders or self.context.size == 1:
            return super().export_state()
        return gather_to_all(self.context.group, self._own_state())

    @contextmanager
    def gather_state(self, *, slots: bool) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
        if not self._holders or self.context.size == 1:
            yield super().export_state(), {}
            return
        mine = self._own_state()
        if not slots:
            mine.tensors = {k: t for k, t in mine.tensors.items() if is_model_tensor(k)}
        with gather_to_rank0(self.context.group, mine) as handed:
            yield handed

    def _own_state(self) -> Section:
        """Returns the state that this worker contributes: its stage, in the first replica."""
        return Section() if self._replica else select_state(super().export_state(), self._holds)

    # ---- reports --------------------------------------------------------------------------------

    def model_part(self) -> dict[str, object]:
        """Returns the stage and the fraction of time that it waited for adjacent stages."""
        held = sum(tensor.nbytes for _, tensor in self.owned_tensors())
        return {
            "stage": self._part,
            "stages": self._parts,
            "cut": list(self._cuts or ()),
            "bubble": self._waited_ns / self._passed_ns if self._passed_ns else None,
            "bubble_formula": (self._parts - 1) / (self._spec.micro + self._parts - 1),
            "weight_bytes": held,
        }

    def close(self) -> None:
        """Allocates the weights of the model again, for the next strategy."""
        for name, parameter in self.replica.model.named_parameters():
            if name in self._remote_parameters:
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)


def add_up(measured: list[StepStats]) -> StepStats:
    """Adds up the results of the micro-batches of a step."""
    correct = [m.correct for m in measured if m.correct is not None]
    return StepStats(
        sum(m.samples for m in measured),
        sum(m.predictions for m in measured),
        sum(m.loss_sum or 0.0 for m in measured),
        sum(correct) if len(correct) == len(measured) else None,
    )


def find_holders(model: torch.nn.Module, graph: StageGraph) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter or buffer."""
    names = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    holders: dict[str, tuple[int, ...]] = {}
    for stage, module in enumerate(graph.modules):
        for key in names.keys() & {id(t) for t in [*module.parameters(), *module.buffers()]}:
            holders[names[key]] = (*holders.get(names[key], ()), stage)
    return holders
