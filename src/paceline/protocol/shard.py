"""One shard of a parameter server: stores gradients, applies updates in order, answers pulls.

Gradients and orders arrive on different connections and in any order; an order is executed when it
is the next version and all its gradients have arrived.
"""

from paceline.protocol.messages import ApplyUpdate, record

Handle = tuple[int, int]
"""(worker, index of its push)."""


@record
class SumGradients:
    """Sum the gradients of the order and report the squared norm, for clipping."""

    order: ApplyUpdate


@record
class StepOptimizer:
    """Sum the gradients (unless done), multiply by `factor`, and step the optimizer."""

    order: ApplyUpdate
    factor: float
    summed: bool


@record
class SendWeights:
    """Send the weights at `version` in reply to the request with this ticket."""

    ticket: int
    version: int


ShardAction = SumGradients | StepOptimizer | SendWeights


class ServerShard:
    """State machine of a shard; payloads are handles, and the shell holds the tensors."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restarts versions at 0 after an import of state; only valid if nothing is pending."""
        self.version = 0
        self._arrived: set[Handle] = set()
        self._orders: dict[int, ApplyUpdate] = {}
        self._summed: int | None = None
        self._factors: dict[int, float] = {}
        self._pulls: list[tuple[int, int, Handle | None]] = []
        self._last: dict[int, int] = {}
        self._waits_for_pushes = True

    def on_gradient(self, worker: int, handle: int) -> list[ShardAction]:
        self._arrived.add((worker, handle))
        return self._advance() if self._orders else []

    def on_apply(self, order: ApplyUpdate) -> list[ShardAction]:
        if order.version <= self.version or order.version in self._orders:
            return []
        self._orders[order.version] = order
        return self._advance()

    def on_clip(self, version: int, factor: float) -> list[ShardAction]:
        self._factors[version] = factor
        return self._advance()

    def on_pull(self, ticket: int, at_least: int, after: Handle | None = None) -> list[ShardAction]:
        """Replies when the version is reached and the requester's gradient `after` is applied."""
        if self._may_answer(at_least, after):
            return [SendWeights(ticket, self.version)]
        self._pulls.append((ticket, at_least, after))
        return []

    def forget_pushes(self) -> list[ShardAction]:
        """Answers pulls without waiting for gradients, until the next import of state."""
        self._waits_for_pushes = False
        return self._answer_pulls()

    def _may_answer(self, at_least: int, after: Handle | None) -> bool:
        applied = (
            after is None or not self._waits_for_pushes or self._last.get(after[0], 0) >= after[1]
        )
        return self.version >= at_least and applied

    def _advance(self) -> list[ShardAction]:
        actions: list[ShardAction] = []
        while (order := self._orders.get(self.version + 1)) is not None:
            handles = [(p.worker, p.handle) for p in order.parts]
            if not self._arrived.issuperset(handles):
                break
            factor = 1.0
            if order.clip is not None:
                if self._summed != order.version:
                    self._summed = order.version
                    actions.append(SumGradients(order))
                if order.version not in self._factors:
                    break
                factor = self._factors.pop(order.version)
            actions.append(StepOptimizer(order, factor, summed=order.clip is not None))
            del self._orders[order.version]
            self._arrived.difference_update(handles)
            self._last.update(handles)
            self.version = order.version
        if actions and self._pulls:
            actions.extend(self._answer_pulls())
        return actions

    def _answer_pulls(self) -> list[ShardAction]:
        ready = [p for p in self._pulls if self._may_answer(p[1], p[2])]
        self._pulls = [p for p in self._pulls if p not in ready]
        return [SendWeights(ticket, self.version) for ticket, _, _ in ready]
