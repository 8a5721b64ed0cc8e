"""The servers of a fault schedule: one shard whose weights are the samples that it has applied."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.protocol.messages import Message
from paceline.protocol.shard import ServerShard, ShardAction, StepOptimizer

Samples = Counter[tuple[int, int]]
"""How often each sample was trained, by epoch and position."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class FakeServer:
    shard: ServerShard = field(default_factory=ServerShard)
    weights: Samples = field(default_factory=Counter)
    view: int = 0
    """View of the worker that has loaded the weights; pushes from others are dropped."""
    _gradients: dict[tuple[int, int], Samples] = field(default_factory=dict)

    def load(self, weights: Samples, view: int) -> None:
        """Takes over the state of a worker, unless a newer view has loaded one."""
        if view >= self.view:
            self.shard.reset()
            self.weights, self._gradients = weights.copy(), {}
            self.view = view

    def push(self, rank: int, handle: int, gradient: Samples, view: int) -> None:
        if view == self.view:
            self._gradients[rank, handle] = gradient
            self._execute(self.shard.on_gradient(rank, handle))

    def order(self, message: Message) -> None:
        """Takes an order of the coordinator."""
        self._execute(self.shard.on_apply(message))  # type: ignore[arg-type]

    def _execute(self, actions: list[ShardAction]) -> None:
        for action in actions:
            if isinstance(action, StepOptimizer):
                for part in action.order.parts:
                    self.weights.update(self._gradients.pop((part.worker, part.handle)))
