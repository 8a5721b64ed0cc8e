"""Collectives made of messages between two workers, for any number of workers.

torch's Gloo has one algorithm per collective, for all-reduce a ring. These are the others, with the
number of steps stated in `specs/collectives.py`. An all-reduce ends with the same bits on every
worker: a sum is either formed once and copied, or formed by workers that add the same two numbers,
and `a + b == b + a` in floating-point arithmetic.

Every wait has the deadline of the process group. A lost peer raises RuntimeError (from Gloo) or
PeerLost (in a group of threads) on the workers that wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist

from paceline.comm.process_group import CollectiveGroup
from paceline.specs.collectives import HIERARCHICAL

TAG = 5001
"""Tag of all messages: those of one pair arrive in the order in which they were sent."""

BUFFERED_BYTES = 1 << 16
"""Smaller messages are not worth an acknowledgement."""

Ranks = Sequence[int]


class MessageCollectives:
    """Collectives among `ranks`, of which this worker is one. All members make the same calls."""

    def __init__(self, group: CollectiveGroup, ranks: Ranks | None = None) -> None:
        self._group = group
        self._ranks = list(range(group.size)) if ranks is None else list(ranks)
        self._place = self._ranks.index(group.rank)
        self._scratch: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}
        self._token = torch.zeros(1, dtype=torch.uint8)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        if tensor.numel():
            self._group.isend(tensor, self._ranks[place], TAG).wait()

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        if tensor.numel():
            self._group.irecv(tensor, self._ranks[place], TAG).wait()

    def exchange(self, out: torch.Tensor, target: int, into: torch.Tensor, source: int) -> None:
        """Sends and receives at the same time; without elements, nothing is sent."""
        # Receiving comes first: Gloo announces it on the connection that would carry our data.
        receiving = self.expect(into, source)
        self.send_while(receiving, out, target)

    def expect(self, into: torch.Tensor, place: int) -> dist.Work | None:
        """Posts a receive. One that is posted early saves the sender the wait for it."""
        return self._group.irecv(into, self._ranks[place], TAG) if into.numel() else None

    def send_while(self, receiving: dist.Work | None, out: torch.Tensor, target: int) -> None:
        """Sends a message and waits for the end of both."""
        sending = self._group.isend(out, self._ranks[target], TAG) if out.numel() else None
        for work in (receiving, sending):
            if work is not None:
                work.wait()

    def _room(self, like: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Returns memory for a received vector, which the next call with a number overwrites."""
        key = (like.numel(), like.dtype, number)
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(like)
        return self._scratch[key]

    # ---- from and to a root, the first of the ranks ------------------------------------------

    def broadcast(self, x: torch.Tensor) -> None:
        """Binomial tree: the number of workers that have the vector doubles with every level.

        A message counts as sent when the kernel has it. The next one would share the link with it
        and delay the subtree of its receiver, so large ones are acknowledged first.
        """
        acknowledged = x.nbytes > BUFFERED_BYTES
        reach = 1 << (self.size - 1).bit_length()
        while reach > 1:
            reach //= 2
            if self._place % (2 * reach) == reach:
                self.receive(x, self._place - reach)
                if acknowledged and reach > 1:
                    self.send(self._token, self._place - reach)
            elif self._place % (2 * reach) == 0 and self._place + reach < self.size:
                self.send(x, self._place + reach)
                if acknowledged and reach > 1:
                    self.receive(self._token, self._place + reach)

    def reduce(self, x: torch.Tensor) -> None:
        """Binomial tree. The root has the sum; the vectors of the others are partial sums.

        A worker without children is ready early. Large vectors are requested, so that they do not
        share the link of their receiver with those that come first.
        """
        requested = x.nbytes > BUFFERED_BYTES
        reach = 1
        while reach < self.size:
            if self._place % (2 * reach) == reach:
                if requested and reach > 1:
                    self.receive(self._token, self._place - reach)
                self.send(x, self._place - reach)
            elif self._place % (2 * reach) == 0 and self._place + reach < self.size:
                if requested and reach > 1:
                    self.send(self._token, self._place + reach)
                other = self._room(x)
                self.receive(other, self._place + reach)
                x.add_(other)
            reach *= 2

    def gather(self, parts: Sequence[torch.Tensor]) -> None:
        """Each worker's own part, to the parts of the root, which asks for one after the other."""
        if self._place:
            self.receive(self._token, 0)
            self.send(parts[self._place], 0)
        else:
            for place in range(1, self.size):
                self.send(self._token, place)
                self.receive(parts[place], place)

    def scatter(self, parts: Sequence[torch.Tensor]) -> None:
        if self._place:
            self.receive(parts[self._place], 0)
        else:
            for place in range(1, self.size):
                self.send(parts[place], place)

    # ---- among all ----------------------------------------------------------------------------

    def all_gather(self, parts: Sequence[torch.Tensor]) -> None:
        """Ring: in every step, each worker passes on the part that it received last."""
        p, me = self.size, self._place
        coming = [self.expect(parts[(me - step - 1) % p], (me - 1) % p) for step in range(p - 1)]
        for step, receiving in enumerate(coming):
            self.send_while(receiving, parts[(me - step) % p], (me + 1) % p)

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> None:
        """Ring. Each worker ends with the sum of one part, its own; the others are partial."""
        p, me = self.size, self._place
        others = [self._room(parts[(me - step - 2) % p], step) for step in range(p - 1)]
        coming = [self.expect(other, (me - 1) % p) for other in others]
        for step, receiving in enumerate(coming):
            self.send_while(receiving, parts[(me - step - 1) % p], (me + 1) % p)
            parts[(me - step - 2) % p].add_(others[step])

    def all_to_all(self, parts: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Pairwise: in every step, each worker sends a part to one other and receives one."""
        p, me = self.size, self._place
        received[me].copy_(parts[me])
        sources = [(me - step) % p for step in range(1, p)]
        coming = [self.expect(received[source], source) for source in sources]
        for step, receiving in enumerate(coming, start=1):
            self.send_while(receiving, parts[(me + step) % p], (me + step) % p)

    def scan(self, x: torch.Tensor) -> None:
        """Each worker ends with the sum of the vectors up to its own (Hillis and Steele 1986)."""
        reach, other = 1, self._room(x)
        nothing = x[:0]
        while reach < self.size:
            out = x if self._place + reach < self.size else nothing
            into = other if self._place >= reach else nothing
            # The partial sum is sent before it changes.
            self.exchange(out, self._place + reach if len(out) else 0, into, self._place - reach)
            if len(into):
                x.add_(other)
            reach *= 2

    # ---- all-reduces --------------------------------------------------------------------------

    def ring(self, x: torch.Tensor) -> None:
        parts = torch.tensor_split(x, self.size)
        self.reduce_scatter(parts)
        self.all_gather(parts)

    def tree(self, x: torch.Tensor) -> None:
        self.reduce(x)
        self.broadcast(x)

    def butterfly(self, x: torch.Tensor) -> None:
        """Recursive doubling among the first 2^k workers.

        Each of the others adds its vector to that of a partner before, and receives the sum after.
        """
        whole = 1 << (self.size.bit_length() - 1)
        other = self._room(x)
        if self._place >= whole:
            self.send(x, self._place - whole)
            self.receive(x, self._place - whole)
            return
        extra = self._place + whole
        if extra < self.size:
            self.receive(other, extra)
            x.add_(other)
        partners = [self._place ^ (1 << level) for level in range(whole.bit_length() - 1)]
        coming = [self.expect(self._room(x, level), at) for level, at in enumerate(partners[:2])]
        for level, partner in enumerate(partners):
            self.send_while(coming[level], x, partner)
            x.add_(self._room(x, level % 2))
            if level + 2 < len(partners):
                coming.append(self.expect(self._room(x, level % 2), partners[level + 2]))
        if extra < self.size:
            self.send(x, extra)


class HierarchicalAllReduce:
    """Sums within each machine, then along a ring of the first workers of all machines."""

    def __init__(self, group: CollectiveGroup, machines: Sequence[Ranks]) -> None:
        mine = next(ranks for ranks in machines if group.rank in ranks)
        self._local = MessageCollectives(group, mine)
        self._is_leader = group.rank == mine[0]
        self._leaders = None
        if self._is_leader:
            self._leaders = MessageCollectives(group, [ranks[0] for ranks in machines])

    def __call__(self, x: torch.Tensor) -> None:
        self._local.reduce(x)
        if self._leaders is not None:
            self._leaders.ring(x)
        self._local.broadcast(x)


def make_algorithm(group: CollectiveGroup, name: str) -> Callable[[torch.Tensor], None]:
    """Returns an all-reduce by its name in `specs.collectives`; all workers must call this."""
    if name == HIERARCHICAL:
        return HierarchicalAllReduce(group, group.machines())
    flat = MessageCollectives(group)
    return {"ring": flat.ring, "tree": flat.tree, "butterfly": flat.butterfly}[name]


class PendingSum:
    """An all-reduce in progress, with the part of torch's `Work` that gradient exchanges use."""

    def __init__(self) -> None:
        self._done: Future[None] = Future()

    def run(self, reduce: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        try:
            reduce(tensor)
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def wait(self) -> None:
        """Raises what the collective raised. Its own messages have the deadlines."""
        self._done.result()

    def get_future(self) -> Future[None]:
        return self._done


class BackgroundAllReduce:
    """Carries out all-reduces in a thread, in the order in which they were started."""

    def __init__(self, group: CollectiveGroup, algorithms: Iterable[str]) -> None:
        """All workers must name the same algorithms."""
        self._algorithms = {name: make_algorithm(group, name) for name in sorted(algorithms)}
        self._queue: queue.SimpleQueue[tuple[PendingSum, str, torch.Tensor] | None] = (
            queue.SimpleQueue()
        )
        # A daemon: a worker that lost a peer must be able to exit.
        self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
        self._thread.start()

    def start(self, tensor: torch.Tensor, algorithm: str) -> PendingSum:
        """Starts an in-place sum over all workers, who must start the same ones in this order."""
        pending = PendingSum()
        self._queue.put((pending, algorithm, tensor))
        return pending

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, algorithm, tensor = item
            pending.run(self._algorithms[algorithm], tensor)

    def close(self) -> None:
        """Ends the thread, after the sums that were started."""
        self._queue.put(None)
        self._thread.join(timeout=1.0)
