"""Worker side of allreduce: gradients are summed, and all workers apply the same update."""

from paceline.codecs.compressor import export_residuals, import_residuals
from paceline.comm.algorithm_choice import choose_algorithms, describe_algorithms
from paceline.comm.buckets import (
    RING,
    BackendChoice,
    GradientExchange,
    choose_backend,
    plan_layout,
)
from paceline.comm.process_group import SharedMemoryGroup
from paceline.comm.shm.allreduce import aligned_size
from paceline.errors import UsageError
from paceline.specs.collectives import AUTO, HIERARCHICAL
from paceline.state import Section, slots_by_parameter
from paceline.strategies.allreduce.shared_weights import SharedModelWeights, can_share_weights
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.optimizer_traits import optimizer_traits
from paceline.strategies.runner import (
    NORMS_EVERY,
    CommReport,
    Runner,
    TrainStep,
    WorkerContext,
    peer_errors,
    step_optimizer,
)
from paceline.telemetry.phase_clock import COMM, OPTIMIZER

OVERLAP_EVERY_STEPS = 8
"""Steps between two measurements of the overlap of exchange and backward."""


class AllReduceRunner(Runner):
    """If a worker dies, the collective fails and the others raise PeerLost immediately."""

    communicates_in_backward = True
    can_share_weights = True
    """Workers of one machine may share their weights."""

    def __init__(self, spec: AllReduce, context: WorkerContext) -> None:
        super().__init__(context)
        self._norms: tuple[float, float, float, float] | None = None
        self._common: SharedModelWeights | None = None
        self._count = 0
        """Number of steps so far, the same on every worker."""
        layout = self.replica.bucket_layout
        if layout is None:
            layout = plan_layout(self.replica.trained, int(spec.bucket_bytes))
            self.replica.bucket_layout = layout
        chosen = self._choose_backend(spec, layout)
        algorithms = self._choose_algorithms(spec, layout, chosen)
        room = self._shared_weight_memory(chosen)
        self._exchange = GradientExchange(
            self.replica.trained,
            context.group,
            layout,
            in_backward=self.replica.reduce_in_backward,
            codec=spec.codec,
            on_bucket_ready=context.on_bucket_ready,
            shared=chosen.shared,
            own_pieces=room is not None,
            algorithms=algorithms,
        )
        if room is not None:
            self._common = SharedModelWeights(context, room, self._exchange)

    def optimizer_path(self) -> str:
        if self._common is None:
            return "every worker updates all of its weights"
        reason = optimizer_traits(self.replica.optimizer).reason
        return f"workers share the weights, and each updates its slices: {reason}"

    def _choose_backend(self, spec: AllReduce, layout: list[list[str]]) -> BackendChoice:
        replica, group = self.replica, self.context.group
        if spec.codec is not None:
            return BackendChoice(None, "a codec")
        via = "network" if spec.via_network else spec.via
        # Machine by machine means in the memory of each, wherever there is one.
        before = "shared" if spec.algorithm == HIERARCHICAL else replica.comm_backend
        chosen = choose_backend(via, before, replica.trained, layout, group)
        if via == "auto" and self.context.size > 1:
            replica.comm_backend = chosen.name
        between = chosen.shared is not None and chosen.shared.machines > 1
        self._comm_report = CommReport(
            backend=chosen.name,
            reason=chosen.reason,
            algorithm=HIERARCHICAL if between else None,
        )
        return chosen

    def _choose_algorithms(
        self, spec: AllReduce, layout: list[list[str]], chosen: BackendChoice
    ) -> list[str]:
        """Returns the algorithm of each bucket whose sum is formed by messages, if it is not a ring
        of torch."""
        replica, group = self.replica, self.context.group
        if self.context.size == 1 or spec.codec is not None or chosen.shared is not None:
            return []
        if any(p.device.type != "cpu" for _, p in replica.trained):
            if spec.algorithm not in (AUTO, RING):
                raise UsageError(
                    f"allreduce: algorithm={spec.algorithm} sums in the processor's memory, but "
                    "the model is on another device; remove it"
                )
            return []
        by_name = dict(replica.trained)
        sizes = [sum(by_name[name].nbytes for name in names) for names in layout]
        algorithms, reason = choose_algorithms(
            spec.algorithm, replica.comm_algorithms, sizes, group
        )
        if spec.algorithm == AUTO:
            replica.comm_algorithms = algorithms
        self._comm_report = CommReport(
            backend=chosen.name,
            reason="; ".join(filter(None, (chosen.reason, reason))),
            algorithm=describe_algorithms(algorithms),
        )
        return algorithms

    def _shared_weight_memory(self, chosen: BackendChoice) -> SharedMemoryGroup | None:
        """Returns memory for shared weights; None if each worker has its own."""
        one_machine = chosen.shared is not None and chosen.shared.machines == 1
        if not one_machine or not self.can_share_weights or not can_share_weights(self.replica):
            return None
        if self.context.is_elastic:
            return None  # Each worker would hold the only copy of a part of the optimizer's state.
        sizes = [p.numel() * p.element_size() for _, p in self.replica.trained]
        # Allocated once for all workers: the slots are adjacent.
        each = -(-aligned_size(sizes) // self.context.size)
        found = self.context.group.shared_memory(each, "weights")
        return None if isinstance(found, str) else found

    def import_state(self, state: Section) -> None:
        super().import_state(state)
        if self._common is not None:
            self._common.import_weights(slots_by_parameter(state))

    def begin_step(self, work: TrainStep) -> None:
        measure = self._count % NORMS_EVERY == 0 and work.lease.samples > 0
        timed = work.step % OVERLAP_EVERY_STEPS == 0
        self._exchange.begin(work.weight, measure=measure, timed=timed)

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        with peer_errors(f"the all-reduce of step {work.step} failed"):
            self._exchange.finish()
        self.clock.enter(OPTIMIZER)
        if self._count % NORMS_EVERY == 0:
            self._measure_norms(work)
        self._update(work)
        self._count += 1

    def _update(self, work: TrainStep) -> None:
        if self._common is not None:
            self._common.update(self.replica.clip)
        else:
            step_optimizer(self.replica)

    def _measure_norms(self, work: TrainStep) -> None:
        """Measures norms before clipping; a collective operation if the sums are distributed."""
        if self._common is not None:
            own, whole = self._exchange.local_grad_sq_norm, self._common.measure_square()
        elif work.lease.samples:
            own, whole = self._exchange.grad_sq_norms()
        if work.lease.samples:
            self._norms = (work.lease.samples, own, work.lease.batch, whole)

    def pop_overlapped_us(self) -> int | None:
        return self._exchange.overlapped_us

    def pop_grad_norms(self) -> tuple[float, float, float, float] | None:
        norms, self._norms = self._norms, None
        return norms

    def export_state(self) -> Section:
        state = super().export_state()
        if self._common is not None:
            self._common.export_slots(state)
        return state

    def export_local_state(self) -> Section:
        return Section(export_residuals(self._exchange.codec_buffers()))

    def import_local_state(self, own: Section) -> None:
        import_residuals(self._exchange.codec_buffers(), own.tensors)

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent

    @property
    def uncompressed_bytes(self) -> int:
        return self._exchange.uncompressed_bytes

    def close(self) -> None:
        if self._common is not None:
            self._common.detach()
        self._exchange.close()
