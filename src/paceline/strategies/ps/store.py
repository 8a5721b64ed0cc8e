"""Tensors of one parameter-server shard: weights, optimizer state and gradients not yet applied."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.codecs.base import Coder
from paceline.codecs.compressor import make_coder
from paceline.codecs.registry import parse_codec
from paceline.comm.shm.parameters import GradientMailbox, SharedWeightsOwner
from paceline.comm.shm.segment import shm_domain_id
from paceline.errors import WireError
from paceline.protocol.messages import ApplyUpdate
from paceline.protocol.shard import Handle
from paceline.strategies.flat_optimizer import FlatOptimizer, FlatSegment


@dataclass
class StoredSlice:
    """A slice of a parameter held here: its weights as a parameter of the optimizer.

    Or several that lie side by side, as one.
    """

    name: str
    offset: int
    nbytes: int
    parameter: torch.nn.Parameter
    group: int
    """Of the optimizer."""


@dataclass
class PendingGradient:
    """A gradient that has arrived and waits to be applied."""

    buffer: torch.Tensor
    missing: frozenset[int]
    groups: tuple[dict[str, Any], ...]
    lane: GradientMailbox | None = None
    """Where the buffer is, if it is its worker's, which waits for its update."""


class ParameterStore:
    """The shard's tensors: weights, optimizer, and the gradients that wait."""

    def __init__(self) -> None:
        self.pieces: list[StoredSlice] = []
        self.weights = torch.zeros(0, dtype=torch.uint8)
        self.board: SharedWeightsOwner | None = None
        """The weights' memory, where workers of this machine can read them."""
        self._room: int | None = None
        self.sums = torch.zeros(0, dtype=torch.uint8)
        self.gradients: dict[Handle, PendingGradient] = {}
        self._spare: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._rows: list[StoredSlice] = []
        self._flat: FlatOptimizer | None = None
        """Steps the rows in place of the pieces, as long as every gradient has all pieces."""
        self.coder: Coder | None = None
        self.weight_coder: Coder | None = None

    def allocate(self, nbytes: int) -> None:
        """For so many bytes of weights, unless there is; where others see them, if there can be."""
        if nbytes == self._room:
            return  # also without a board: weights may be there already
        self.close()
        self._room = nbytes
        self.weights = torch.zeros(0, dtype=torch.uint8)
        if shm_domain_id() is not None:
            try:
                self.board = SharedWeightsOwner(nbytes)
            except OSError:
                pass  # no room there
        self.weights = (
            torch.zeros(nbytes, dtype=torch.uint8) if self.board is None else self.board.weights
        )

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
            self.board = None

    def load(self, head: dict[str, Any], body: torch.Tensor) -> None:
        """Take over weights and slots as a worker sends them."""
        nbytes = int(head["nbytes"])
        self.allocate(nbytes)
        self.weights.copy_(body[:nbytes])
        self.sums = torch.zeros(0, dtype=torch.uint8)
        self.gradients = {}
        self._spare, self._copies = [], []
        self.pieces = []
        members: list[list[torch.nn.Parameter]] = [[] for _ in head["groups"]]
        for name, offset, size, dtype, group, shape in head["pieces"]:
            view = self.weights[offset : offset + size].view(getattr(torch, dtype))
            parameter = torch.nn.Parameter(view.view(shape))
            self.pieces.append(StoredSlice(name, offset, size, parameter, group))
            members[group].append(parameter)
        self.optimizer = optimizer_from_reference(head["optimizer"], head["groups"], members)
        self._load_slots(head["slots"], body[nbytes:])
        self._rows, self._flat = [], None
        if head["codec"] is None:  # which leaves something between pieces
            self.flatten()
        self.coder, self.weight_coder = None, None
        if head["codec"] is not None and self.pieces:
            spec, dtype = parse_codec(head["codec"]), self.pieces[0].parameter.dtype
            self.coder = make_coder(spec, dtype)
            # Half precision suits weights too: they are kept whole here. Coarser codes do not.
            self.weight_coder = self.coder if spec.suits_weights else None

    def _load_slots(self, slots: list[list[Any]], body: torch.Tensor) -> None:
        if self.optimizer is None:
            return
        for piece in self.pieces:
            self.optimizer.state.pop(piece.parameter, None)
        at = 0
        for index, slot, dtype, shape, size in slots:
            # A copy of its own: a view would keep the whole message alive.
            value = body[at : at + size].clone().view(getattr(torch, dtype)).reshape(shape)
            self.optimizer.state[self.pieces[index].parameter][slot] = value
            at += size

    def flatten(self) -> None:
        """Pieces that lie side by side are updated as one from now on, where that is the same."""
        if self.optimizer is None:
            return
        runs: list[list[StoredSlice]] = []
        for piece in self.pieces:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and last.group == piece.group
                and last.parameter.dtype == piece.parameter.dtype
            ):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        rows, found = [], []
        for run in runs:
            lo, hi = run[0].offset, run[-1].offset + run[-1].nbytes
            dtype = run[0].parameter.dtype
            weights = torch.nn.Parameter(self.weights[lo:hi].view(dtype))
            rows.append(StoredSlice("", lo, hi - lo, weights, run[0].group))
            places = [(p.parameter, (p.offset - lo) // dtype.itemsize) for p in run]
            found.append(FlatSegment(weights, places, run[0].group))
        self._flat = FlatOptimizer.from_optimizer(self.optimizer, found)
        self._rows = rows if self._flat is not None else []

    def sync_slots(self) -> None:
        """The pieces' optimizer knows what the rows' does."""
        if self._flat is not None:
            self._flat.write_back()

    def _update_units(self, gradients: Iterable[PendingGradient]) -> list[StoredSlice]:
        """What is updated: rows, until a gradient lacks a piece, and pieces from then on."""
        if self._flat is not None and any(gradient.missing for gradient in gradients):
            self._flat.write_back()
            self._flat = None
        return self.pieces if self._flat is None else self._rows

    def slots(self) -> tuple[list[list[Any]], list[torch.Tensor]]:
        """Table and tensors of all slots, for a worker that exports the state."""
        self.sync_slots()
        table: list[list[Any]] = []
        tensors = []
        for index, piece in enumerate(self.pieces):
            assert self.optimizer is not None
            for slot, value in self.optimizer.state.get(piece.parameter, {}).items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                tensor = tensor.detach().contiguous()
                size = tensor.numel() * tensor.element_size()
                dtype = str(tensor.dtype).removeprefix("torch.")
                table.append([index, slot, dtype, list(tensor.shape), size])
                tensors.append(tensor)
        return table, tensors

    def sum_up(self, order: ApplyUpdate) -> float:
        """Weighted sum of the gradients into `sums`; returns its squared norm."""
        if self.sums.numel() != self.weights.numel():
            self.sums = torch.zeros_like(self.weights)
        square = 0.0
        found = [(self.gradients[p.worker, p.handle], p.weight) for p in order.parts]
        for index, piece in enumerate(self._update_units(gradient for gradient, _ in found)):
            target = self._view(self.sums, piece)
            used = False
            for gradient, weight in found:
                if index in gradient.missing:
                    continue
                values = self._view(gradient.buffer, piece)
                if used:
                    target.add_(values, alpha=weight)
                else:
                    torch.mul(values, weight, out=target)
                used = True
            piece.parameter.grad = target if used else None
            if used and order.clip is not None:
                square += float(target.double().square().sum())
        return square

    def use_single_gradient(self, order: ApplyUpdate) -> None:
        """A single gradient needs no sum: the optimizer reads it where it lies."""
        first = order.parts[0]
        gradient = self.gradients[first.worker, first.handle]
        for index, piece in enumerate(self._update_units([gradient])):
            missing = index in gradient.missing
            piece.parameter.grad = None if missing else self._view(gradient.buffer, piece)

    def step(self, order: ApplyUpdate, factor: float) -> None:
        if self.optimizer is None or not self.pieces:
            return
        units = self.pieces if self._flat is None else self._rows
        if factor != 1.0:
            for piece in units:
                if piece.parameter.grad is not None:
                    piece.parameter.grad.mul_(factor)
        given = self.gradients[order.parts[0].worker, order.parts[0].handle].groups
        for group, hyper in zip(self.optimizer.param_groups, given, strict=True):
            group.update(hyper)
            group["lr"] = hyper["lr"] * order.lr_scale
        if self._flat is None:
            self.optimizer.step()
        else:
            self._flat.step([row.parameter.grad for row in units])

    def borrow_buffer(self) -> torch.Tensor:
        """A buffer for a gradient; as many exist as ever waited at the same time."""
        # Zeros: what lies between pieces is never filled, and must not count.
        return self._spare.pop() if self._spare else torch.zeros_like(self.weights)

    def copy_weights(self) -> torch.Tensor:
        """As they are now, to be sent while they change; in memory that is used again and again."""
        copy = self._copies.pop() if self._copies else torch.empty_like(self.weights)
        return copy.copy_(self.weights)

    def return_copy(self, copy: torch.Tensor) -> None:
        if copy.numel() == self.weights.numel():
            self._copies.append(copy)

    def release_gradients(self, order: ApplyUpdate) -> None:
        """The order is applied: its gradients' buffers are free for the next ones."""
        for piece in self.pieces if self._flat is None else self._rows:
            piece.parameter.grad = None
        for part in order.parts:
            gradient = self.gradients.pop((part.worker, part.handle))
            if gradient.lane is None:
                self._spare.append(gradient.buffer)
            else:
                gradient.lane.mark_consumed(part.handle)

    def _view(self, buffer: torch.Tensor, piece: StoredSlice) -> torch.Tensor:
        raw = buffer[piece.offset : piece.offset + piece.nbytes]
        return raw.view(piece.parameter.dtype).view_as(piece.parameter)


def optimizer_from_reference(
    reference: str, groups: list[dict[str, Any]], members: list[list[torch.nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """The optimizer class named by the workers, over this shard's pieces; None for an empty one."""
    filled = [{**hyper, "params": params} for hyper, params in zip(groups, members, strict=True)]
    if not any(group["params"] for group in filled):
        return None
    module, name = reference.split(":")
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise WireError(f"{reference} is no optimizer")
    made: Any = cls
    optimizer: torch.optim.Optimizer = made(filled, lr=groups[0]["lr"])
    return optimizer
