"""The servers of a fault schedule: their weights are the samples that they have applied."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from paceline.protocol.messages import ApplyUpdate, ClipFactor, Message, ShardSqNorm
from paceline.protocol.shard import ServerShard, ShardAction, StepOptimizer, SumGradients

Samples = Counter[tuple[int, int]]
"""How often each sample was trained, by epoch and position."""


class Violation(AssertionError):
    """An invariant does not hold."""


class ServerGone(Exception):
    """A server closed its connections."""


class ServerSilent(Exception):
    """A server does not answer."""


@dataclass(eq=False)
class FakeServer:
    number: int
    port: int
    """Differs from that of its predecessor, if it was started again."""
    shard: ServerShard = field(default_factory=ServerShard)
    weights: Samples = field(default_factory=Counter)
    view: int = 0
    """View of the worker that has loaded the weights; pushes from others are dropped."""
    orders: deque[Message] = field(default_factory=deque)
    """Orders that are under way to it."""
    norms: deque[ShardSqNorm] = field(default_factory=deque)
    """Reports that are under way to the coordinator."""
    last_norm: ShardSqNorm | None = None
    """The last report: a coordinator that is lost may not have answered."""
    alive: bool = True
    silent: bool = False
    """True if it was stopped: its connections remain open."""
    _gradients: dict[tuple[int, int], Samples] = field(default_factory=dict)

    def check(self) -> None:
        if self.silent:
            raise ServerSilent
        if not self.alive:
            raise ServerGone

    def load(self, weights: Samples, view: int) -> None:
        """Takes over the state of a worker, unless a newer view has loaded one."""
        self.check()
        if view >= self.view:
            self.shard.reset()
            self.last_norm = None
            self.weights, self._gradients = weights.copy(), {}
            self.view = view

    def push(self, rank: int, handle: int, gradient: Samples, view: int) -> None:
        self.check()
        if view == self.view:
            self._gradients[rank, handle] = gradient
            self._execute(self.shard.on_gradient(rank, handle))

    def has(self, version: int) -> bool:
        self.check()
        return self.shard.version >= version

    def forget_pushes(self) -> None:
        self._execute(self.shard.forget_pushes())

    def serve(self) -> None:
        """Takes the next order of the coordinator."""
        message = self.orders.popleft()
        if isinstance(message, ApplyUpdate | ClipFactor) and message.view != self.view:
            return
        if isinstance(message, ApplyUpdate):
            self._execute(self.shard.on_apply(message))
        elif isinstance(message, ClipFactor):
            self._execute(self.shard.on_clip(message.version, message.factor))

    def _execute(self, actions: list[ShardAction]) -> None:
        for action in actions:
            if isinstance(action, StepOptimizer):
                for part in action.order.parts:
                    self.weights.update(self._gradients.pop((part.worker, part.handle)))
            elif isinstance(action, SumGradients):
                self.last_norm = ShardSqNorm(self.number, action.order.version, 4.0)
                self.norms.append(self.last_norm)
