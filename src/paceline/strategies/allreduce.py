"""allreduce: every worker computes its share, gradients are summed, everybody updates alike."""

from __future__ import annotations

from paceline.comm.buckets import GradientExchange, plan_layout
from paceline.comm.ways import Chosen, choose_way
from paceline.errors import PeerLost
from paceline.specs.strategy import AllReduce
from paceline.state import Section, capture, restore
from paceline.strategies.runner import Runner, Surroundings, Work, step_optimizer
from paceline.telemetry.phases import COMM, OPTIMIZER

HIDDEN_EVERY = 8
"""Steps between two measurements of what the exchange hides behind backward."""
NORMS_EVERY = 16
"""Steps between two measurements of the gradient's norms, from which its noise is told."""


class AllReduceRunner(Runner):
    """A worker that dies breaks the collective for all: the others raise PeerLost at once."""

    exchanges_in_backward = True

    def __init__(self, spec: AllReduce, around: Surroundings) -> None:
        super().__init__(around)
        self._exchange: GradientExchange | None = None
        self._norms: tuple[float, float, float, float] | None = None
        if around.size > 1 or spec.codec is not None:
            if self.replica.layout is None:
                bucket_bytes = int(spec.bucket_mb * (1 << 20))
                self.replica.layout = plan_layout(self.replica.trained, bucket_bytes)
            self._exchange = GradientExchange(
                self.replica.trained,
                around.group,
                self.replica.layout,
                in_backward=self.replica.reduce_in_backward,
                codec=spec.codec,
                before_send=around.before_send,
                shared=self._choose(spec).shared,
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

    def import_state(self, state: Section) -> None:
        restore(state, self.replica.model, self.replica.optimizer)

    def begin_step(self, work: Work) -> None:
        if self._exchange is not None:
            measure = work.step % NORMS_EVERY == 0 and work.lease.samples > 0
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
        if self._exchange is not None and work.step % NORMS_EVERY == 0 and work.lease.samples:
            own, whole = self._exchange.squares()
            self._norms = (work.lease.samples, own, work.lease.batch, whole)
        self._update(work)

    def _update(self, work: Work) -> None:
        step_optimizer(self.replica)

    def take_hidden_us(self) -> int | None:
        return self._exchange.hidden_us if self._exchange is not None else None

    def take_norms(self) -> tuple[float, float, float, float] | None:
        norms, self._norms = self._norms, None
        return norms

    def export_state(self) -> Section:
        return capture(self.replica.model, self.replica.optimizer)

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
        if self._exchange is not None:
            self._exchange.close()
