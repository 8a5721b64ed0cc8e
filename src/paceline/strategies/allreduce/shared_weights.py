"""One copy of the weights for all workers of a machine; each worker updates its slices.

Gradients are in shared memory, and here the weights are, too: when all workers have filled their
buckets, each sums its slice of every bucket and updates the corresponding weights with a separate
optimizer over those slices. Neither sums nor weights are copied between workers, and the
optimizer's work and memory are divided. The result equals that of full updates on every worker, for
element-wise optimizers.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from paceline.comm.buckets import GradientBucket, GradientExchange
from paceline.comm.process_group import SharedMemoryGroup
from paceline.state import Section
from paceline.strategies.flat_optimizer import FlatOptimizer, FlatSegment
from paceline.strategies.optimizer_traits import optimizer_traits
from paceline.strategies.runner import (
    Replica,
    WorkerContext,
    copy_options,
    peer_errors,
    scale_to_norm,
)
from paceline.telemetry.phase_clock import COMM, OPTIMIZER


def can_share_weights(replica: Replica) -> bool:
    """Returns whether the model is exclusive to the runner and its optimizer can be sliced."""
    return (
        optimizer_traits(replica.optimizer).sliceable
        and not replica.reduce_in_backward
        and replica.apply_gradients == replica.optimizer.step
        and all(p.is_contiguous() and p.numel() > 0 for _, p in replica.trained)
        # Such a layer changes its weights in forward; all workers would, one after another.
        and not any(getattr(m, "max_norm", None) for m in replica.model.modules())
    )


@dataclass
class OwnedSlice:
    """Slice of a parameter that this worker updates."""

    name: str
    bucket: int
    index: int
    """Index of the parameter in its bucket."""
    start: int
    """Offset in the flattened parameter."""
    weights: torch.nn.Parameter
    gradient: torch.Tensor


class SharedModelWeights:
    """Weights in shared memory, and the optimizer of this worker's slices."""

    def __init__(
        self, context: WorkerContext, shared: SharedMemoryGroup, exchange: GradientExchange
    ) -> None:
        """Creates it; the slots of `shared` together hold all weights."""
        assert exchange.shared is not None
        self._clock, self._group = context.clock, context.group
        replica = self._replica = context.replica
        self._sums = exchange.shared
        buckets = self._buckets = exchange.buckets
        self._slices: list[OwnedSlice] = []
        self._rows: list[FlatSegment] = []
        self._row_gradients: list[torch.Tensor] = []
        self._flat: FlatOptimizer | None = None
        """Updates rows of slices, as long as every parameter has been used."""
        self._views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        members = {p: i for i, g in enumerate(replica.optimizer.param_groups) for p in g["params"]}
        groups: list[dict[str, Any]] = [{**g, "params": []} for g in replica.optimizer.param_groups]
        group_of = {name: members[parameter] for name, parameter in replica.trained}
        offset = 0
        for number, bucket in enumerate(buckets):
            dtype, count = bucket.flat.dtype, bucket.values.numel()
            flat = shared.region.slot_tensor(0, offset, count, dtype)
            offset += -(-count * dtype.itemsize // 64) * 64
            self._take_slices(number, bucket, flat, group_of)
        for one in self._slices:
            groups[group_of[one.name]]["params"].append(one.weights)
        self._groups = [i for i, g in enumerate(groups) if g["params"]]
        place = {group: index for index, group in enumerate(self._groups)}
        for row in self._rows:
            row.group = place[row.group]
        kind: Any = type(replica.optimizer)
        self._optimizer: torch.optim.Optimizer | None = None
        if self._groups:
            self._optimizer = kind([groups[i] for i in self._groups])

    def _take_slices(
        self, number: int, bucket: GradientBucket, flat: torch.Tensor, group_of: dict[str, int]
    ) -> None:
        mine, total = self._sums.owned_ranges[number], self._sums.reduced_bucket(number)
        start = 0
        pieces: list[tuple[int, int, torch.nn.Parameter]] = []
        """Group, start and weights of this worker's slices, which are adjacent."""
        for index, (name, parameter) in enumerate(bucket.parameters):
            stop = start + parameter.numel()
            self._views.append((parameter, flat[start:stop].view_as(parameter)))
            lo, hi = max(start, mine.start), min(stop, mine.stop)
            if lo < hi:
                weights, gradient = torch.nn.Parameter(flat[lo:hi]), total[lo:hi]
                self._slices.append(OwnedSlice(name, number, index, lo - start, weights, gradient))
                pieces.append((group_of[name], lo, weights))
            start = stop
        for group, found in groupby(pieces, key=lambda piece: piece[0]):
            run = [(weights, lo) for _, lo, weights in found]
            begin, end = run[0][1], run[-1][1] + run[-1][0].numel()
            row = torch.nn.Parameter(flat[begin:end])
            self._rows.append(FlatSegment(row, [(w, lo - begin) for w, lo in run], group))
            self._row_gradients.append(total[begin:end])

    # ---- a step -------------------------------------------------------------------------------

    def update(self, clip: float | None) -> None:
        """Clips and applies the update to this worker's slices, then waits for the others."""
        moved = self._find_replaced()
        self._assign_gradients()
        if clip is not None:
            found = [one.weights.grad for one in self._slices]
            gradients = found if self._flat is None else self._row_gradients
            scale_to_norm(clip, self.measure_square(), (g for g in gradients if g is not None))
        if self._optimizer is not None:
            current = self._replica.optimizer.param_groups
            copy_options(self._optimizer, (current[group] for group in self._groups))
            flat = self._flat
            (self._optimizer if flat is None else flat.prepare(self._row_gradients)).step()
        self._clock.enter(COMM)
        self._sums.finish_update()
        for parameter, view in moved:
            parameter.data = view

    def _find_replaced(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Restores weights that a layer has replaced in forward, as with max-norm constraints.

        All workers have computed the same values; each restores its slices.
        """
        moved = [(p, view) for p, view in self._views if p.data_ptr() != view.data_ptr()]
        if moved:
            found = {p for p, _ in moved}
            by_name = dict(self._replica.trained)
            for one in self._slices:
                parameter = by_name[one.name]
                if parameter in found:
                    count = one.weights.numel()
                    one.weights.data.copy_(parameter.data.reshape(-1)[one.start :][:count])
        return moved

    def _assign_gradients(self) -> None:
        """Assigns gradients; a slice of a parameter that no worker used has none."""
        by_bucket = [self._sums.used_parameters(number) for number in range(len(self._buckets))]
        if self._flat is not None:
            if all(used is None for used in by_bucket):
                return
            self._flat.write_back()
            self._flat = None
        for one in self._slices:
            used = by_bucket[one.bucket]
            one.weights.grad = one.gradient if used is None or used[one.index] else None

    def measure_square(self) -> float:
        """Returns the squared norm of all sums; a collective operation. Raises PeerLost."""
        self._clock.enter(COMM)
        mine = sum(float(one.gradient.square().sum()) for one in self._slices)
        square = torch.tensor([mine], dtype=torch.float64)
        with peer_errors("the gradient norm could not be summed"):
            self._group.all_reduce(square)
        self._clock.enter(OPTIMIZER)
        return float(square)

    # ---- state --------------------------------------------------------------------------------

    def import_weights(self, slots: dict[str, dict[str, Any]]) -> None:
        """Moves the model's weights to shared memory; keeps this worker's slices of the slots."""
        self._group.barrier()
        if self._group.rank == 0:
            for parameter, view in self._views:
                view.copy_(parameter.detach())
        self._group.barrier()
        for parameter, view in self._views:
            parameter.data = view
            self._replica.optimizer.state.pop(parameter, None)
        if self._optimizer is None:
            return
        shapes = {name: parameter.shape for name, parameter in self._replica.trained}
        for one in self._slices:
            kept = {}
            for slot, value in slots.get(one.name, {}).items():
                if isinstance(value, torch.Tensor):
                    if value.shape == shapes[one.name]:
                        value = value.reshape(-1)[one.start : one.start + one.weights.numel()]
                    value = value.clone()
                kept[slot] = value
            if kept:
                self._optimizer.state[one.weights] = kept
        self._flat = FlatOptimizer.from_optimizer(self._optimizer, self._rows)

    def export_slots(self, section: Section) -> None:
        """Adds the complete slots of all workers to a section.

        The memory of the gradients, which is unused between steps, transports them.
        """
        if self._flat is not None:
            self._flat.write_back()
        names = self._gather_slot_names(section)
        for slot in names:
            for one in self._slices:
                value = self._state(one).get(slot)
                if isinstance(value, torch.Tensor) and value.shape == one.weights.shape:
                    one.gradient.copy_(value)
            self._group.barrier()
            for number, bucket in enumerate(self._buckets):
                total, start = self._sums.reduced_bucket(number), 0
                for name, parameter in bucket.parameters:
                    stop = start + parameter.numel()
                    if name in names[slot]:
                        whole = total[start:stop].clone().view_as(parameter)
                        section.tensors[f"slots/{name}/{slot}"] = whole
                    start = stop
            self._group.barrier()

    def _gather_slot_names(self, section: Section) -> dict[str, set[str]]:
        """Returns the parameters of each slot of parameter size; adds the other slots directly."""
        mine: dict[str, list[str]] = {}
        small = Section()
        for one in self._slices:
            for slot, value in self._state(one).items():
                if isinstance(value, torch.Tensor) and value.shape == one.weights.shape:
                    mine.setdefault(slot, []).append(one.name)
                elif isinstance(value, torch.Tensor):
                    small.tensors[f"slots/{one.name}/{slot}"] = value
                elif value is not None:
                    small.plain.setdefault(one.name, {})[slot] = value
        found: dict[str, set[str]] = {}
        for received in self._group.all_gather_sections(
            Section(small.tensors, {"large": mine, "plain": small.plain})
        ):
            section.tensors.update(received.tensors)
            for name, values in received.plain["plain"].items():
                section.plain.setdefault("slots", {}).setdefault(name, {}).update(values)
            for slot, names in received.plain["large"].items():
                found.setdefault(slot, set()).update(names)
        return dict(sorted(found.items()))

    def _state(self, one: OwnedSlice) -> dict[str, Any]:
        return self._optimizer.state.get(one.weights, {}) if self._optimizer is not None else {}

    def detach(self) -> None:
        """Gives each worker separate weights again."""
        for parameter, view in self._views:
            parameter.data = view.clone()
        self._group.barrier()
