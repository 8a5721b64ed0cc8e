"""Gradients and statistics of one share of a batch, independent of who computes it.

A share starts from the weights and buffers of the last update, has a separate random stream, and is
computed alone, with one thread: sums inside an operator depend on the number of threads and on
the shape of the batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from paceline.protocol.messages import Lease, StepStats
from paceline.state import persistent_buffers
from paceline.strategies.allreduce.share_tree import Node, children
from paceline.strategies.runner import (
    Batch,
    LossOf,
    Replica,
    add_stats,
    compute_gradients,
)
from paceline.telemetry.phase_clock import PhaseClock


def share_seed(seed: int, lease: Lease, share: int) -> int:
    """Returns the seed of the random stream of a share."""
    key = f"{seed}/{lease.epoch}/{lease.start}/{share}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@dataclass(eq=False)
class ShareSum:
    """Sum over shares: gradients, use of each parameter, and changes of floating-point buffers."""

    flats: list[torch.Tensor]
    """One for each dtype."""

    def add(self, other: ShareSum) -> ShareSum:
        """Adds in place."""
        for mine, theirs in zip(self.flats, other.flats, strict=True):
            mine.add_(theirs)
        return self


class _Section:
    """The parameters and buffers of one dtype, and their places in a flat tensor."""

    def __init__(
        self, dtype: torch.dtype, parameters: list[torch.nn.Parameter], buffers: list[torch.Tensor]
    ) -> None:
        self.dtype, self.parameters, self.buffers = dtype, parameters, buffers
        self.sizes = [
            *(p.numel() for p in parameters), len(parameters), *(b.numel() for b in buffers)
        ]  # fmt: skip
        self.numel = sum(self.sizes)

    def split(
        self, flat: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """Returns the parts of gradients, of flags, and of changes of buffers."""
        parts = torch.split(flat, self.sizes)
        count = len(self.parameters)
        gradients = [part.view_as(p) for part, p in zip(parts, self.parameters, strict=False)]
        changes = [b.view_as(o) for b, o in zip(parts[count + 1 :], self.buffers, strict=True)]
        return gradients, parts[count], changes


class ShareGradients:
    """Computes shares on a replica, and applies their sum to its gradients and buffers."""

    def __init__(self, replica: Replica, seed: int, clock: PhaseClock | None = None) -> None:
        self._replica, self._seed, self._clock = replica, seed, clock or PhaseClock(0.0)
        buffers = list(persistent_buffers(replica.model).values())
        self._floats = [b for b in buffers if b.is_floating_point()]
        self._counters = [b for b in buffers if not b.is_floating_point()]
        parameters = [p for _, p in replica.trained]
        dtypes = dict.fromkeys(t.dtype for t in (*parameters, *self._floats))
        self._sections = [
            _Section(
                dtype,
                [p for p in parameters if p.dtype == dtype],
                [b for b in self._floats if b.dtype == dtype],
            )
            for dtype in dtypes
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """Remembers the buffers that every share of a batch starts from."""
        self._kept = {id(b): b.clone() for b in (*self._floats, *self._counters)}
        self._largest = [b.clone() for b in self._counters]

    @property
    def lengths(self) -> list[int]:
        """Number of elements of a sum, for each dtype."""
        return [section.numel for section in self._sections]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [section.dtype for section in self._sections]

    def compute(
        self, node: Node, cuts: list[int], lease: Lease, batch: Batch, loss_of: LossOf
    ) -> tuple[ShareSum | None, StepStats]:
        """Computes a node of the tree whose samples are `batch`; None without samples.

        `cuts` are the offsets of all shares in the global batch.
        """
        lo, hi = node
        if cuts[lo] == cuts[hi]:
            return None, StepStats(0, 0, 0.0, 0)
        if hi - lo == 1:
            return self._compute_share(lo, cuts[hi] - cuts[lo], lease, batch, loss_of)
        left, right = children(node)
        middle = cuts[left[1]] - cuts[lo]
        parts = (part[:middle] for part in batch), (part[middle:] for part in batch)
        found = []
        for child, (inputs, targets) in zip((left, right), parts, strict=True):
            found.append(self.compute(child, cuts, lease, (inputs, targets), loss_of))
        (first, stats), (second, more) = found
        if first is None or second is None:
            return first or second, add_stats(stats, more)
        return first.add(second), add_stats(stats, more)

    def _compute_share(
        self, share: int, samples: int, lease: Lease, batch: Batch, loss_of: LossOf
    ) -> tuple[ShareSum, StepStats]:
        self._replica.optimizer.zero_grad(set_to_none=True)
        for buffer in (*self._floats, *self._counters):
            buffer.copy_(self._kept[id(buffer)])
        # Kernels may choose another order of operations by the alignment of a slice.
        inputs, targets = (part.clone() for part in batch)
        torch.manual_seed(share_seed(self._seed, lease, share))
        stats = compute_gradients(
            self._replica, self._clock, (inputs, targets), loss_of, samples, attempts=1
        )
        weight = samples / lease.batch
        for largest, counter in zip(self._largest, self._counters, strict=True):
            torch.maximum(largest, counter, out=largest)
        return ShareSum([self._pack(section, weight) for section in self._sections]), stats

    def _pack(self, section: _Section, weight: float) -> torch.Tensor:
        flat = torch.zeros(section.numel, dtype=section.dtype)
        gradients, flags, changes = section.split(flat)
        for index, (view, parameter) in enumerate(zip(gradients, section.parameters, strict=True)):
            if parameter.grad is not None:
                view.copy_(parameter.grad).mul_(weight)
                flags[index] = 1
        for view, buffer in zip(changes, section.buffers, strict=True):
            kept = self._kept[id(buffer)]
            # A buffer that does not change stays as it is, also if it is infinite.
            view.copy_(torch.where(buffer == kept, 0, (buffer - kept) * weight))
        return flat

    @property
    def counters(self) -> torch.Tensor | None:
        """The largest integer buffers of the computed shares, flat; None without any."""
        if not self._largest:
            return None
        return torch.cat([b.to(torch.int64).reshape(-1) for b in self._largest])

    def apply(self, total: ShareSum, counters: torch.Tensor | None) -> None:
        """Sets gradients and buffers from the sums and maxima over all shares."""
        for section, flat in zip(self._sections, total.flats, strict=True):
            gradients, flags, changes = section.split(flat)
            used = flags.tolist()
            for view, flag, parameter in zip(gradients, used, section.parameters, strict=True):
                parameter.grad = view.to(parameter.device) if flag > 0 else None
            for change, buffer in zip(changes, section.buffers, strict=True):
                kept = self._kept[id(buffer)]
                buffer.copy_(torch.where(change == 0, kept, kept + change.to(kept.device)))
        if counters is not None:
            parts = torch.split(counters, [b.numel() for b in self._counters])
            for part, buffer in zip(parts, self._counters, strict=True):
                buffer.copy_(part.view_as(buffer))
