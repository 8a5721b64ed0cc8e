"""Worker side of tensor: layers are sliced over the workers of a replica.

Linear and convolution layers are sliced along their outputs, attention along its heads: each worker
holds and trains its slice of the weights and computes its part, and all receive the whole result.
Other layers, and weights that two layers share, are replicated on every worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import UsageError
from paceline.protocol.messages import StepStats
from paceline.state import RemoteTensor, Section, is_model_tensor
from paceline.strategies.model_parallel import (
    ModelParallelRunner,
    all_reduce_gradients,
    gather_to_rank0,
    parameter_of_key,
)
from paceline.strategies.runner import (
    Batch,
    LossOf,
    TrainStep,
    WorkerContext,
    peer_errors,
)
from paceline.strategies.tensor.sliced_layers import SliceSpec, slice_model
from paceline.strategies.tensor.spec import TensorParallel
from paceline.telemetry.phase_clock import COMM, OPTIMIZER


class TensorRunner(ModelParallelRunner):
    """If a worker dies, the exchange inside a layer fails and the others raise PeerLost."""

    can_repeat_forward = False

    def __init__(self, spec: TensorParallel, context: WorkerContext) -> None:
        super().__init__(spec, context)
        size = context.size
        ranks = [tuple(range(r, r + spec.size)) for r in range(0, size, spec.size)]
        self._inside = context.group.new_subgroup(tuple(ranks))
        self._sliced = slice_model(self.replica.model, self._part, self._parts, self._inside)
        if self._parts > 1 and not self._sliced.cuts:
            raise UsageError(
                "tensor: the model has no linear, convolution or attention layer to slice"
            )

    # ---- a step -------------------------------------------------------------------------------

    def begin_step(self, work: TrainStep) -> None:
        """Seeds all parts equally, because replicated layers must give equal results."""
        if self._parts > 1:
            state = torch.get_rng_state()
            self._inside.broadcast(state, self._first)
            torch.set_rng_state(state)

    def forward_backward(self, work: TrainStep, batch: Batch | None, loss_of: LossOf) -> StepStats:
        if batch is not None and self._parts > 1:
            self._compare(batch)
        with peer_errors(f"an exchange inside step {work.step} failed", inside_layers=True):
            measured = super().forward_backward(work, batch, loss_of)
        return measured if self._computes_loss else StepStats(0, 0, 0.0, 0)

    def _compare(self, batch: Batch) -> None:
        """Checks that all parts of a replica have the same rows."""
        mine = torch.stack([part.double().sum() for part in batch])
        first = mine.clone()
        self._inside.broadcast(first, self._first)
        if not torch.equal(torch.nan_to_num(mine), torch.nan_to_num(first)):
            raise UsageError(
                "tensor: the parts of a model read the same rows but got different values; random "
                "data must depend on seed and epoch only"
            )

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        trained = [p for _, p in self.replica.trained]
        rows = self.rows_for(work.lease)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(rows.samples / rows.batch)
        with peer_errors(f"the exchange of step {work.step} failed"):
            self._sent += all_reduce_gradients(trained, self._data_parallel_group)
            self.clip([p for n, p in self.replica.trained if self._counts(n)], trained)
        self.clock.enter(OPTIMIZER)
        self.replica.apply_gradients()

    def predict(self, inputs: torch.Tensor) -> torch.Tensor | None:
        with peer_errors("an exchange of an evaluation failed", inside_layers=True):
            output = super().predict(inputs)
        return output if self._computes_loss else None

    # ---- state --------------------------------------------------------------------------------

    def _counts(self, name: str) -> bool:
        """Returns whether this worker contributes a tensor: its slices; the first also the rest."""
        return name in self._sliced.cuts or self._part == 0

    def import_state(self, state: Section) -> None:
        mine = Section(plain=state.plain)
        for key, tensor in state.tensors.items():
            cut = self._cut_of(key, tensor.dim())
            mine.tensors[key] = cut.take(tensor, self._part) if cut is not None else tensor
        super().import_state(mine)

    def _cut_of(self, key: str, dims: int) -> SliceSpec | None:
        """Returns how a tensor of the state is sliced; slots are like their weights or scalars."""
        cut = self._sliced.cuts.get(parameter_of_key(key))
        return cut if cut is not None and dims == cut.dims else None

    def _slices(self, tensors: dict[str, torch.Tensor]) -> dict[str, SliceSpec]:
        cuts = {key: self._cut_of(key, tensor.dim()) for key, tensor in tensors.items()}
        return {key: cut for key, cut in cuts.items() if cut is not None}

    def export_state(self) -> Section:
        mine = super().export_state()
        cuts = self._slices(mine.tensors)
        given = {key: mine.tensors[key] for key in cuts if self._replica == 0}
        gathered = self.context.group.all_gather_sections(Section(given))[: self._parts]
        for key, cut in cuts.items():
            mine.tensors[key] = cut.join([section.tensors[key] for section in gathered])
        return mine

    @contextmanager
    def gather_state(self, *, slots: bool) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
        mine = super().export_state()
        kept = {k: t for k, t in mine.tensors.items() if slots or is_model_tensor(k)}
        cuts = self._slices(kept)
        given = {f"{self._part}/{key}": kept[key] for key in cuts if self._replica == 0}
        with gather_to_rank0(self.context.group, Section(given)) as (_, pieces):
            distant = {
                key: _joined(cut, kept[key], [pieces[f"{p}/{key}"] for p in range(1, self._parts)])
                for key, cut in cuts.items()
            }
            yield Section({k: t for k, t in kept.items() if k not in cuts}, mine.plain), distant

    @property
    def bytes_sent(self) -> int:
        return self._sent + self._sliced.wire.bytes_sent

    def model_part(self) -> dict[str, object]:
        held = sum(p.nbytes for p in self.replica.model.parameters())
        return {"part": self._part, "parts": self._parts, "weight_bytes": held}

    def close(self) -> None:
        """Allocates the weights of the model again, for the next strategy."""
        self._sliced.undo()


def _joined(cut: SliceSpec, own: torch.Tensor, others: list[RemoteTensor]) -> RemoteTensor:
    """Returns the whole of a tensor that is sliced over worker 0 and others."""
    shape = list(own.shape)
    shape[cut.dim] += sum(other.shape[cut.dim] for other in others)
    return RemoteTensor(
        torch.Size(shape), own.dtype, lambda: cut.join([own, *(o.fetch() for o in others)])
    )
