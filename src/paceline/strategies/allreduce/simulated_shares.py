"""Weights of allreduce(shares=S) in the twin: one process computes every share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.protocol.balance import split_batch
from paceline.protocol.messages import Lease, StepStats
from paceline.strategies.allreduce.share_gradients import ShareGradients, ShareSum
from paceline.strategies.allreduce.share_tree import Node, held_nodes, sum_tree, worker_shares
from paceline.strategies.runner import add_stats, step_optimizer
from paceline.twin.updates import EMPTY, StepOutcome, WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


class FixedSharesUpdate(WeightUpdates):
    """Computes the shares of all workers, and their sum along the tree."""

    uses_leases = True

    def __init__(self, backend: GradientBackend, shares: int) -> None:
        self._backend, self._shares = backend, shares
        self._gradients = ShareGradients(backend.replica, backend.seed)
        self._loss_of = backend.build_loss(backend.replica.model)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def step(self, leases: Sequence[Lease]) -> list[StepOutcome]:
        backend, root = self._backend, (0, self._shares)
        backend.set_lr(leases[0])
        cuts = split_batch(leases[0].batch, self._shares)
        offsets = worker_shares(self._shares, len(leases))
        sums: dict[Node, ShareSum | None] = {}
        outcomes = []
        self._gradients.begin_step()
        for worker, lease in enumerate(leases):
            if not lease.samples:
                outcomes.append(EMPTY)
                sums |= dict.fromkeys(held_nodes(root, offsets[worker], offsets[worker + 1]))
                continue
            total = StepStats(0, 0, 0.0, 0)
            for node in held_nodes(root, offsets[worker], offsets[worker + 1]):
                lo, hi = (lease.start + cuts[share] for share in node)
                stats = StepStats(0, 0, 0.0, 0)
                sums[node] = None
                if lo < hi:
                    rows = backend.loader.batch(dataclasses.replace(lease, lo=lo, hi=hi))
                    sums[node], stats = self._gradients.compute(
                        node, cuts, lease, rows, self._loss_of
                    )
                total = add_stats(total, stats)
            outcomes.append(backend.outcome(worker, total))
        found = sum_tree(root, sums.get, sums.__contains__, ShareSum.add)
        assert found is not None, "a batch has samples"
        self._gradients.apply(found, self._gradients.counters)
        step_optimizer(backend.replica)
        return outcomes

    def close(self) -> None:
        torch.set_num_threads(self._threads)
