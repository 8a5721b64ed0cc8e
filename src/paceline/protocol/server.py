"""One shard of a parameter server: stores, applies in the order it is given, answers pulls.

Gradients and orders come by different ways and in any order; an order is executed when it is the
next version and all its gradients are here.
"""

from __future__ import annotations

from paceline.protocol.messages import Apply
from paceline.protocol.value import value

Handle = tuple[int, int]
"""(worker, number of its push)."""


@value
class SumUp:
    """Sum the gradients of the order and report the squared norm: it will be clipped."""

    order: Apply


@value
class Update:
    """Sum the gradients (unless summed already), times `factor`, and step the optimizer."""

    order: Apply
    factor: float
    summed: bool


@value
class Answer:
    """Send the weights, now at `version`, to whoever asked under this ticket."""

    ticket: int
    version: int


Action = SumUp | Update | Answer


class Shard:
    """The state machine; payloads are handles, the shell holds the tensors."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """State was imported: versions count from 0 again. Only valid when nothing is pending."""
        self.version = 0
        self._here: set[Handle] = set()
        self._orders: dict[int, Apply] = {}
        self._summed: int | None = None
        self._factors: dict[int, float] = {}
        self._pulls: list[tuple[int, int, Handle | None]] = []
        self._last: dict[int, int] = {}

    def on_gradient(self, worker: int, handle: int) -> list[Action]:
        self._here.add((worker, handle))
        return self._advance() if self._orders else []

    def on_apply(self, order: Apply) -> list[Action]:
        if order.version <= self.version or order.version in self._orders:
            return []
        self._orders[order.version] = order
        return self._advance()

    def on_clip(self, version: int, factor: float) -> list[Action]:
        self._factors[version] = factor
        return self._advance()

    def on_pull(self, ticket: int, at_least: int, after: Handle | None = None) -> list[Action]:
        """Answer when the version is reached, and the gradient `after` of the asker is applied."""
        if self._may_answer(at_least, after):
            return [Answer(ticket, self.version)]
        self._pulls.append((ticket, at_least, after))
        return []

    def _may_answer(self, at_least: int, after: Handle | None) -> bool:
        applied = after is None or self._last.get(after[0], 0) >= after[1]
        return self.version >= at_least and applied

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        while (order := self._orders.get(self.version + 1)) is not None:
            handles = [(p.worker, p.handle) for p in order.parts]
            if not self._here.issuperset(handles):
                break
            factor = 1.0
            if order.clip is not None:
                if self._summed != order.version:
                    self._summed = order.version
                    actions.append(SumUp(order))
                if order.version not in self._factors:
                    break
                factor = self._factors.pop(order.version)
            actions.append(Update(order, factor, summed=order.clip is not None))
            del self._orders[order.version]
            self._here.difference_update(handles)
            self._last.update(handles)
            self.version = order.version
        if actions and self._pulls:
            ready = [p for p in self._pulls if self._may_answer(p[1], p[2])]
            self._pulls = [p for p in self._pulls if p not in ready]
            actions.extend(Answer(ticket, self.version) for ticket, _, _ in ready)
        return actions
