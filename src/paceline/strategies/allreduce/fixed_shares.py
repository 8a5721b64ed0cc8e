"""Worker side of allreduce(shares=S): bit-identical weights for any number of workers.

Each worker computes consecutive shares and adds up the complete subtrees that it has. Then each
worker receives a slice of all these sums, adds them along the rest of the tree, and sends its slice
of the total to the others: the traffic of an all-reduce, times the number of subtrees per worker.
"""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.protocol.balance import split_batch
from paceline.protocol.messages import StepStats
from paceline.state import Section
from paceline.strategies.allreduce.share_gradients import ShareGradients, ShareSum
from paceline.strategies.allreduce.share_tree import (
    Node,
    cut_batch,
    held_nodes,
    sum_tree,
    worker_shares,
)
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.runner import (
    Batch,
    CommReport,
    LossOf,
    Runner,
    TrainStep,
    WorkerContext,
    add_stats,
    peer_errors,
    step_optimizer,
)
from paceline.telemetry.phase_clock import COMM, OPTIMIZER


class FixedSharesRunner(Runner):
    """If a worker dies, the exchange fails and the others raise PeerLost immediately."""

    communicates_in_backward = True  # The gradients of the last share alone are of no use.
    keeps_buffers_equal = True

    def __init__(self, spec: AllReduce, context: WorkerContext) -> None:
        super().__init__(context)
        if self.replica.reduce_in_backward:
            raise UsageError(f"{spec} does not support custom training loops; remove shares")
        self._spec, self._shares = spec, spec.shares
        offsets = worker_shares(spec.shares, context.size)
        root = (0, spec.shares)
        self._nodes = [
            list(held_nodes(root, offsets[w], offsets[w + 1])) for w in range(context.size)
        ]
        self._sums: dict[Node, ShareSum] = {}
        self._cuts: list[int] = []
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._comm_report = CommReport(backend="network", reason="sums along a fixed tree")

    def import_state(self, state: Section) -> None:
        super().import_state(state)
        self._gradients = ShareGradients(self.replica, self.context.seed, self.clock)

    def cut_batch(self, count: int, weights: tuple[int, ...] | None) -> list[int]:
        return cut_batch(count, self._shares, self.context.size)

    def begin_step(self, work: TrainStep) -> None:
        if work.lease.row_ranges:
            raise UsageError(
                f"{self._spec} divides each batch into fixed shares of rows, which data that is "
                "read in blocks does not allow; use --shard sample"
            )
        self._cuts = split_batch(work.lease.batch, self._shares)
        self._sums = {}
        self._gradients.begin_step()

    def forward_backward(self, work: TrainStep, batch: Batch | None, loss_of: LossOf) -> StepStats:
        total = StepStats(0, 0, 0.0, 0)
        if batch is None:
            return total
        state = torch.get_rng_state()
        first = work.lease.lo - work.lease.start
        for node in self._nodes[self.context.rank]:
            lo, hi = (self._cuts[share] - first for share in node)
            rows = batch[0][lo:hi], batch[1][lo:hi]
            found, stats = self._gradients.compute(node, self._cuts, work.lease, rows, loss_of)
            if found is not None:
                self._sums[node] = found
            total = add_stats(total, stats)
        torch.set_rng_state(state)
        return total

    def finish_step(self, work: TrainStep) -> None:
        self.clock.enter(COMM)
        counters = self._gradients.counters
        with peer_errors(f"the all-reduce of step {work.step} failed"):
            total = ShareSum(
                [
                    self._sum_all(index, length, dtype)
                    for index, (length, dtype) in enumerate(
                        zip(self._gradients.lengths, self._gradients.dtypes, strict=True)
                    )
                ]
            )
            if counters is not None:
                self.context.group.all_reduce(counters, largest=True)
        self._sums = {}
        self._gradients.apply(total, counters)
        self.clock.enter(OPTIMIZER)
        step_optimizer(self.replica)

    def _sum_all(self, index: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the total of all shares of one dtype."""
        size, mine = self.context.size, self._nodes[self.context.rank]
        root = (0, self._shares)
        if size == 1:
            return self._sums[root].flats[index]
        piece = -(-length // size)
        sums = torch.zeros(len(mine), size * piece, dtype=dtype)
        for row, node in zip(sums, mine, strict=True):
            if node in self._sums:
                row[:length] = self._sums[node].flats[index]
        sending = sums.view(len(mine), size, piece).transpose(0, 1).contiguous()
        counts = [len(nodes) for nodes in self._nodes]
        received = self.context.group.all_to_all(sending, counts)
        nodes = [node for each in self._nodes for node in each]
        rows = dict(zip(nodes, received, strict=True))

        def value_of(node: Node) -> torch.Tensor | None:
            has_samples = self._cuts[node[0]] < self._cuts[node[1]]
            return rows[node] if has_samples else None

        total = sum_tree(root, value_of, rows.__contains__, torch.Tensor.add_)
        assert total is not None, "a batch has samples"
        self._sent += sending.nbytes + total.nbytes
        return torch.cat(self.context.group.all_gather(total))[:length]

    def average_buffers(self, samples: int) -> None:
        """Does nothing: buffers are summed at every step and equal on all workers."""

    def close(self) -> None:
        torch.set_num_threads(self._threads)
