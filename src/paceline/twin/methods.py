"""How virtual workers' gradients become weights: all together, each for itself, or by servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.codecs.compressor import Compressor
from paceline.codecs.reference import reference_sum
from paceline.codecs.spec import Codec
from paceline.comm.buckets import plan_layout
from paceline.comm.flat_layout import FlatLayout, as_byte_tensor
from paceline.protocol.messages import ApplyUpdate, Lease
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.allreduce.worker import NORMS_EVERY
from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.store import (
    ParameterStore,
    PendingGradient,
    StoredSlice,
    optimizer_from_reference,
)
from paceline.strategies.ps.worker import optimizer_options
from paceline.strategies.runner import step_optimizer
from paceline.twin.backend import StepOutcome

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend

EMPTY = StepOutcome(0, 0.0, 0)


class Method(Protocol):
    def settle(self) -> None:
        """The newest weights into the model."""
        ...

    def export(self) -> None:
        """The whole state into model and optimizer, to be read there."""
        ...

    def leave(self) -> None:
        """The same, and another method takes over."""
        ...


class ExactUpdate:
    """Every worker computes on the same weights; the weighted sum makes one update."""

    def __init__(self, training: GradientBackend, spec: AllReduce | None) -> None:
        self._training = training
        self._replica = training.replica
        self._steps = 0
        self._coded: ReferenceSum | None = None
        if spec is not None and spec.codec is not None:
            bucket_bytes = int(spec.bucket_mb * (1 << 20))
            self._coded = ReferenceSum(spec.codec, self._replica.trained, bucket_bytes, training)

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        training, parameters = self._training, [p for _, p in self._replica.trained]
        training.set_lr(leases[0])
        measure = self._steps % NORMS_EVERY == 0 and len(leases) > 1
        told, squares = [], []
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for worker, lease in enumerate(leases):
            if not lease.samples:
                told.append(EMPTY)
                squares.append(0.0)
                continue
            told.append(training.forward_backward(worker, lease))
            if measure:
                grads = [p.grad for p in parameters if p.grad is not None]
                squares.append(sum(float(g.square().sum()) for g in grads))
            weight = lease.samples / lease.batch
            if self._coded is not None:
                self._coded.add(worker, weight)
            elif lease.samples < lease.batch:
                _add_up(sums, parameters, weight)
            else:
                sums = [p.grad for p in parameters]
        if self._coded is not None:
            self._coded.finish()
        else:
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total
        if measure:
            grads = [p.grad for p in parameters if p.grad is not None]
            whole = sum(float(g.square().sum()) for g in grads)
            told = [
                dataclasses.replace(t, norms=(le.samples, square, le.batch, whole))
                if le.samples
                else t
                for t, le, square in zip(told, leases, squares, strict=True)
            ]
        step_optimizer(self._replica)
        self._steps += 1
        return told

    def settle(self) -> None:
        return

    def export(self) -> None:
        return

    def leave(self) -> None:
        if self._coded is not None:
            self._coded.hand_back()


def _add_up(
    sums: list[torch.Tensor | None], parameters: list[torch.nn.Parameter], weight: float
) -> None:
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        before = sums[index]
        if before is None:
            sums[index] = parameter.grad * weight
        else:
            before.add_(parameter.grad, alpha=weight)


class ReferenceSum:
    """The sum that workers with a codec arrive at, in the buckets of a real exchange."""

    def __init__(
        self,
        codec: Codec,
        trained: list[tuple[str, torch.nn.Parameter]],
        bucket_bytes: int,
        training: GradientBackend,
    ) -> None:
        by_name = dict(trained)
        layout = plan_layout(trained, bucket_bytes)
        self._buckets = [[by_name[name] for name in names] for names in layout]
        self._compressors = [
            [
                Compressor(codec, [p.shape for p in bucket], bucket[0].dtype)
                for bucket in self._buckets
            ]
            for _ in range(training.workers)
        ]
        self._flats: list[list[tuple[Compressor, torch.Tensor]]] = [[] for _ in self._buckets]
        self._names, self._kept = layout, training.residuals
        for mine, kept in zip(self._compressors, self._kept, strict=True):
            for compressor, names, bucket in zip(mine, layout, self._buckets, strict=True):
                if compressor.feedback is not None and all(n in kept for n in names):
                    flat = [kept[n].reshape(-1) for n in names]
                    compressor.feedback.load(torch.cat(flat).to(bucket[0].dtype))

    def hand_back(self) -> None:
        """What was not sent yet, for whichever strategy comes next."""
        for mine, kept in zip(self._compressors, self._kept, strict=True):
            for compressor, names, bucket in zip(mine, self._names, self._buckets, strict=True):
                if compressor.feedback is not None:
                    parts = torch.split(compressor.feedback.residual, [p.numel() for p in bucket])
                    for name, parameter, part in zip(names, bucket, parts, strict=True):
                        kept[name] = part.view_as(parameter).clone()

    def add(self, worker: int, weight: float) -> None:
        for index, bucket in enumerate(self._buckets):
            parts = [
                torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.reshape(-1)
                for p in bucket
            ]
            flat = torch.cat(parts).mul_(weight)
            self._flats[index].append((self._compressors[worker][index], flat))

    def finish(self) -> None:
        for index, bucket in enumerate(self._buckets):
            given, self._flats[index] = self._flats[index], []
            total = reference_sum(given)
            parts = torch.split(total, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()


class Apart:
    """Every worker has weights and an optimizer of its own; now and then they meet."""

    def __init__(self, training: GradientBackend, spec: LocalSgd | DiLoCo) -> None:
        self._training = training
        self._spec = spec
        replica = training.replica
        self._shown = [p for _, p in replica.trained]
        """The model's parameters: each worker's weights are put there while it computes."""
        self._own = [
            [torch.nn.Parameter(p.detach().clone()) for p in self._shown]
            for _ in range(training.workers)
        ]
        self._optimizers = [self._copy_optimizer(own) for own in self._own]
        self._anchor = [p.detach().clone() for p in self._shown]
        self._outer: torch.optim.SGD | None = None
        self._seen = [0] * training.workers
        self._verdict = False
        self._drift = 0.0

    def _copy_optimizer(self, own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self._training.replica.optimizer
        mine = dict(zip(self._shown, own, strict=True))
        members = [
            [mine[p] for p in group["params"] if p in mine] for group in optimizer.param_groups
        ]
        cls = type(optimizer)
        made = optimizer_from_reference(
            f"{cls.__module__}:{cls.__qualname__}", optimizer_options(optimizer), members
        )
        assert made is not None
        for shown, parameter in mine.items():
            if shown in optimizer.state:
                made.state[parameter] = _copy_slots(optimizer.state[shown])
        return made

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        training, told = self._training, []
        for worker, lease in enumerate(leases):
            if not lease.samples:
                told.append(EMPTY)
                continue
            own, optimizer = self._own[worker], self._optimizers[worker]
            training.set_lr(lease, optimizer)
            _copy_all(own, self._shown)
            told.append(training.forward_backward(worker, lease))
            if training.replica.clip is not None:
                torch.nn.utils.clip_grad_norm_(self._shown, training.replica.clip)
            for parameter, shown in zip(own, self._shown, strict=True):
                parameter.grad = shown.grad
            optimizer.step()
            self._seen[worker] += lease.samples
        training.set_lr(leases[0])
        if isinstance(self._spec, LocalSgd) and self._spec.drift is not None:
            # The vote of a step is read one step later, as in real runs.
            self._verdict = self._drift > self._spec.drift
            self._drift = 0.0 if self._verdict else self._measure_drift()
        return told

    def _measure_drift(self) -> float:
        size = sum(float(a.square().sum()) for a in self._anchor)
        moved = [
            sum(
                float((p.detach() - a).square().sum())
                for p, a in zip(own, self._anchor, strict=True)
            )
            for own in self._own
        ]
        return float((max(moved) / max(size, 1e-30)) ** 0.5)

    def drifted(self) -> bool:
        return self._verdict

    def meet(self) -> None:
        total = sum(self._seen)
        if not total:
            return
        weights = [seen / total for seen in self._seen]
        with torch.no_grad():
            means = []
            for same in zip(*self._own, strict=True):
                mean = same[0] * weights[0]
                for parameter, weight in zip(same[1:], weights[1:], strict=True):
                    mean.add_(parameter, alpha=weight)
                means.append(mean)
            if isinstance(self._spec, DiLoCo):
                self._step_outer(means)
                means = self._anchor
            else:
                self._anchor = [m.clone() for m in means]
            for own in self._own:
                _copy_all(means, own)
        self._seen = [0] * len(self._seen)

    def _step_outer(self, means: list[torch.Tensor]) -> None:
        """Along what the workers have moved since the last meeting."""
        assert isinstance(self._spec, DiLoCo)
        if self._outer is None:
            momentum = self._spec.outer_momentum
            self._outer = torch.optim.SGD(
                self._anchor, lr=self._spec.outer_lr, momentum=momentum, nesterov=momentum > 0
            )
        for anchor, mean in zip(self._anchor, means, strict=True):
            anchor.grad = anchor - mean
        self._outer.step()
        for anchor in self._anchor:
            anchor.grad = None

    def settle(self) -> None:
        self.meet()
        self._drift, self._verdict = 0.0, False
        _copy_all(self._own[0], self._shown)

    def export(self) -> None:
        """Slots are averaged with equal weight over the workers that have them."""
        self.settle()
        state = self._training.replica.optimizer.state
        for index, shown in enumerate(self._shown):
            held = [
                optimizer.state[own[index]]
                for own, optimizer in zip(self._own, self._optimizers, strict=True)
                if own[index] in optimizer.state
            ]
            state.pop(shown, None)
            if held:
                state[shown] = {
                    slot: _mean_slot([slots[slot] for slots in held if slot in slots])
                    for slot in held[0]
                }

    def leave(self) -> None:
        self.export()


def _copy_all(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for given, taken in zip(source, target, strict=True):
            taken.copy_(given)


def _copy_slots(slots: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in slots.items()}


def _mean_slot(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return first.clone() if isinstance(first, torch.Tensor) else first
    return torch.stack([v / len(values) for v in values]).sum(0)


class SimulatedTransport:
    """Weights and optimizer live in a server's store; workers compute on versions of them."""

    def __init__(
        self, training: GradientBackend, spec: ParameterServer, *, in_groups: bool = False
    ) -> None:
        self._training = training
        self._spec = spec
        self._in_groups = in_groups
        replica = training.replica
        self._parameters = [p for _, p in replica.trained]
        self._layout = FlatLayout(self._parameters, 1, elementwise=False)
        self._store = self._fill_store()
        self._weights = self._layout.views(self._store.weights)
        self._version = 0
        self._versions: dict[int, torch.Tensor] = {}
        self._users: dict[int, int] = {}
        self._holds: dict[int, int] = {}
        self._in_model = -1
        dtype = self._parameters[0].dtype
        shapes = self._layout.shapes_of(self._layout.shards[0])
        self._compressors = (
            [Compressor(spec.codec, shapes, dtype) for _ in range(training.workers)]
            if spec.codec is not None
            else []
        )
        for compressor, kept in zip(self._compressors, training.residuals, strict=False):
            if compressor.feedback is not None:
                self._place(kept, compressor.feedback.residual)
        half = spec.codec is not None and spec.codec.suits_weights
        self._weight_coder = self._compressors[0].coder if half else None

    def _place(self, kept: dict[str, torch.Tensor], residual: torch.Tensor) -> None:
        """What was not sent under another strategy, into its places in the flat buffer."""
        for (name, parameter), view in zip(
            self._training.replica.trained,
            self._layout.views(as_byte_tensor(residual)),
            strict=True,
        ):
            if name in kept:
                view.copy_(kept[name].view_as(parameter))

    def _fill_store(self) -> ParameterStore:
        """The store of a real server, holding the whole model."""
        replica, layout = self._training.replica, self._layout
        optimizer = replica.optimizer
        store = ParameterStore()
        store.weights = layout.new_buffer()
        group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        members: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for (name, parameter), view, offset in zip(
            replica.trained, layout.views(store.weights), layout.offsets, strict=True
        ):
            view.copy_(parameter.detach())
            held = torch.nn.Parameter(view)
            nbytes = parameter.numel() * parameter.element_size()
            store.slices.append(StoredSlice(name, offset, nbytes, held, group_of[parameter]))
            members[group_of[parameter]].append(held)
        cls = type(optimizer)
        store.optimizer = optimizer_from_reference(
            f"{cls.__module__}:{cls.__qualname__}", optimizer_options(optimizer), members
        )
        assert store.optimizer is not None
        for piece, parameter in zip(store.slices, self._parameters, strict=True):
            slots = optimizer.state.get(parameter)
            if slots:
                store.optimizer.state[piece.parameter] = _copy_slots(slots)
        if self._spec.codec is None:
            store.flatten()
        return store

    def pull(self, worker: int) -> None:
        """Weights are copied once a version, however many workers take them."""
        self._let_go(worker)
        version = self._version
        if version not in self._versions:
            self._versions[version] = self._as_sent(self._store.weights.clone())
            self._users[version] = 0
        self._users[version] += 1
        self._holds[worker] = version

    def _as_sent(self, weights: torch.Tensor) -> torch.Tensor:
        """Half precision suits weights too: workers compute on what is left of them."""
        if self._weight_coder is not None:
            shard = self._layout.shards[0]
            flat = weights[shard.lo : shard.hi].view(self._parameters[0].dtype)
            self._weight_coder.decode(self._weight_coder.encode(flat), flat)
        return weights

    def _let_go(self, worker: int) -> None:
        version = self._holds.pop(worker, None)
        if version is None:
            return
        self._users[version] -= 1
        if not self._users[version]:
            del self._versions[version], self._users[version]

    def compute(self, worker: int, lease: Lease, handle: int) -> StepOutcome:
        training = self._training
        training.set_lr(lease)
        self._load(self._holds[worker])
        told = training.forward_backward(worker, lease)
        alone = not self._spec.sync.aggregates and not self._in_groups
        if training.replica.clip is not None and alone:
            torch.nn.utils.clip_grad_norm_(self._parameters, training.replica.clip)
        buffer = self._store.borrow_buffer()
        if self._compressors:
            buffer.zero_()
        missing = set()
        for index, (parameter, view) in enumerate(
            zip(self._parameters, self._layout.views(buffer), strict=True)
        ):
            if parameter.grad is None:
                missing.add(index)
                view.zero_()
            else:
                view.copy_(parameter.grad)
        if self._compressors:
            self._pass_through_codec(worker, buffer)
        groups = tuple(optimizer_options(training.replica.optimizer))
        self._store.gradients[worker, handle] = PendingGradient(buffer, frozenset(missing), groups)
        return told

    def _pass_through_codec(self, worker: int, buffer: torch.Tensor) -> None:
        shard = self._layout.shards[0]
        flat = buffer[shard.lo : shard.hi].view(self._parameters[0].dtype)
        compressor = self._compressors[worker]
        payload = compressor.encode(flat)
        compressor.coder.decode(payload, flat)

    def join(self, parts: Sequence[tuple[int, int, float]]) -> None:
        """The gradients of a group become one: its first worker's."""
        (chief, handle, _) = parts[0]
        total = torch.zeros_like(self._store.weights)
        views = self._layout.views(total)
        missing: frozenset[int] | None = None
        groups: tuple[dict[str, Any], ...] = ()
        for worker, number, weight in parts:
            gradient = self._store.gradients.pop((worker, number), None)
            if gradient is None:
                continue
            groups = groups or gradient.options
            missing = gradient.missing if missing is None else missing & gradient.missing
            for view, part in zip(views, self._layout.views(gradient.buffer), strict=True):
                view.add_(part, alpha=weight)
        if self._training.replica.clip is not None:
            self._clip_joined(views, self._training.replica.clip)
        self._store.gradients[chief, handle] = PendingGradient(
            total, missing or frozenset(), groups
        )

    def _clip_joined(self, views: list[torch.Tensor], most: float) -> None:
        """A group's first worker clips what all of it have computed together."""
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v) for v in views]))
        factor = min(1.0, most / (float(norm) + 1e-6))
        if factor < 1.0:
            for view in views:
                view.mul_(factor)

    def _load(self, version: int) -> None:
        if self._in_model != version:
            with torch.no_grad():
                for parameter, view in zip(
                    self._parameters, self._layout.views(self._versions[version]), strict=True
                ):
                    parameter.copy_(view)
            self._in_model = version

    def square(self, order: ApplyUpdate) -> float:
        return self._store.sum_up(order)

    def apply(self, order: ApplyUpdate, factor: float) -> None:
        store = self._store
        if len(order.parts) == 1 and order.parts[0].weight == 1.0:
            store.use_single_gradient(order)
        else:
            # Summed again even where its norm was measured: others may have been summed since.
            store.sum_up(order)
        store.step(order, factor)
        store.release_gradients(order)
        self._version += 1

    def settle(self) -> None:
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._weights, strict=True):
                parameter.copy_(view)
        self._in_model = -1

    def export(self) -> None:
        """Slots back to the workers' optimizer."""
        self.settle()
        self._store.sync_slots()
        assert self._store.optimizer is not None
        state = self._training.replica.optimizer.state
        for piece, parameter in zip(self._store.slices, self._parameters, strict=True):
            state.pop(parameter, None)
            slots = self._store.optimizer.state.get(piece.parameter)
            if slots:
                state[parameter] = _copy_slots(slots)

    def leave(self) -> None:
        self.export()
        names = [name for name, _ in self._training.replica.trained]
        for compressor, kept in zip(self._compressors, self._training.residuals, strict=False):
            if compressor.feedback is not None:
                views = self._layout.views(as_byte_tensor(compressor.feedback.residual))
                kept.update({n: v.clone() for n, v in zip(names, views, strict=True)})
