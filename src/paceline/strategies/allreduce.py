"""allreduce: every worker computes its share, gradients are summed, everybody updates alike."""

from __future__ import annotations

from paceline.comm.buckets import GradientExchange, plan_layout
from paceline.comm.group import Shared
from paceline.comm.shared import slot_bytes
from paceline.comm.ways import Chosen, choose_way
from paceline.errors import PeerLost
from paceline.specs.strategy import AllReduce
from paceline.state import Section, capture, restore, slots_by_parameter
from paceline.strategies.common_memory import CommonWeights, can_share
from paceline.strategies.runner import Runner, Surroundings, Work, step_optimizer
from paceline.telemetry.phases import COMM, OPTIMIZER

HIDDEN_EVERY = 8
"""Steps between two measurements of what the exchange hides behind backward."""
NORMS_EVERY = 16
"""Steps between two measurements of the gradient's norms, from which its noise is told."""


class AllReduceRunner(Runner):
    """A worker that dies breaks the collective for all: the others raise PeerLost at once."""

    exchanges_in_backward = True
    shares_weights = True
    """Workers of one machine may have their weights in common."""

    def __init__(self, spec: AllReduce, around: Surroundings) -> None:
        super().__init__(around)
        self._exchange: GradientExchange | None = None
        self._norms: tuple[float, float, float, float] | None = None
        self._common: CommonWeights | None = None
        self._count = 0
        """Steps so far, the same on every worker."""
        if around.size > 1 or spec.codec is not None:
            if self.replica.layout is None:
                bucket_bytes = int(spec.bucket_mb * (1 << 20))
                self.replica.layout = plan_layout(self.replica.trained, bucket_bytes)
            chosen = self._choose(spec)
            room = self._find_room(chosen)
            self._exchange = GradientExchange(
                self.replica.trained,
                around.group,
                self.replica.layout,
                in_backward=self.replica.reduce_in_backward,
                codec=spec.codec,
                before_send=around.before_send,
                shared=chosen.shared,
                own_pieces=room is not None,
            )
            if room is not None:
                assert self._exchange.shared is not None
                self._common = CommonWeights(
                    self.replica,
                    around.group,
                    room,
                    self._exchange.shared,
                    self._exchange.buckets,
                    self.clock,
                )

    def _choose(self, spec: AllReduce) -> Chosen:
        replica = self.replica
        assert replica.layout is not None
        if spec.codec is not None:
            return Chosen(None, "a codec")
        chosen = choose_way(
            spec.via, replica.way, replica.trained, replica.layout, self.around.group
        )
        if spec.via == "auto" and self.around.size > 1:
            replica.way = chosen.name
        self.around.collectives = {"way": chosen.name, "why": chosen.why}
        return chosen

    def _find_room(self, chosen: Chosen) -> Shared | None:
        """Memory for weights in common; None where each worker keeps its own."""
        one_machine = chosen.shared is not None and chosen.shared.machines == 1
        if not one_machine or not self.shares_weights or not can_share(self.replica):
            return None
        sizes = [p.numel() * p.element_size() for _, p in self.replica.trained]
        # Once for all of them: the slots lie side by side.
        each = -(-slot_bytes(sizes) // self.around.size)
        found = self.around.group.share(each, "weights")
        return None if isinstance(found, str) else found

    def import_state(self, state: Section) -> None:
        restore(state, self.replica.model, self.replica.optimizer)
        if self._common is not None:
            self._common.take_in(slots_by_parameter(state))

    def begin_step(self, work: Work) -> None:
        if self._exchange is not None:
            measure = self._count % NORMS_EVERY == 0 and work.lease.samples > 0
            timed = work.step % HIDDEN_EVERY == 0
            self._exchange.begin(work.weight, measure=measure, timed=timed)

    def finish_step(self, work: Work) -> None:
        if self._exchange is not None:
            self.clock.enter(COMM)
            try:
                self._exchange.finish()
            except RuntimeError as error:
                raise PeerLost(f"the all-reduce of step {work.step} broke ({error})") from None
        self.clock.enter(OPTIMIZER)
        if self._exchange is not None and self._count % NORMS_EVERY == 0:
            self._note_norms(work, self._exchange)
        self._update(work)
        self._count += 1

    def _update(self, work: Work) -> None:
        if self._common is not None:
            self._common.update(self.replica.clip)
        else:
            step_optimizer(self.replica)

    def _note_norms(self, work: Work, exchange: GradientExchange) -> None:
        """Before they are clipped; everybody takes part where each has a piece of the sums."""
        if self._common is not None:
            own, whole = exchange.own_square, self._common.measure_square()
        elif work.lease.samples:
            own, whole = exchange.squares()
        if work.lease.samples:
            self._norms = (work.lease.samples, own, work.lease.batch, whole)

    def take_hidden_us(self) -> int | None:
        return self._exchange.hidden_us if self._exchange is not None else None

    def take_norms(self) -> tuple[float, float, float, float] | None:
        norms, self._norms = self._norms, None
        return norms

    def export_state(self) -> Section:
        state = capture(self.replica.model, self.replica.optimizer)
        if self._common is not None:
            self._common.put_slots(state)
        return state

    def export_own(self) -> Section:
        return Section(self._exchange.export_residuals() if self._exchange is not None else {})

    def import_own(self, own: Section) -> None:
        if self._exchange is not None:
            self._exchange.import_residuals(own.tensors)

    @property
    def bytes_sent(self) -> int:
        return self._exchange.bytes_sent if self._exchange is not None else 0

    @property
    def bytes_before(self) -> int:
        return self._exchange.bytes_before if self._exchange is not None else 0

    def close(self) -> None:
        if self._common is not None:
            self._common.leave()
        if self._exchange is not None:
            self._exchange.close()
