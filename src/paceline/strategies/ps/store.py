"""Tensors of one parameter-server shard: weights, optimizer state and gradients not yet applied."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch

from paceline.codecs.base import Coder
from paceline.codecs.compressor import make_coder
from paceline.codecs.registry import parse_codec
from paceline.comm.shm.parameters import GradientMailbox, SharedWeightsOwner
from paceline.comm.shm.segment import shm_domain_id
from paceline.errors import UsageError, WireError
from paceline.protocol.messages import ApplyUpdate
from paceline.protocol.shard import Handle
from paceline.protocol.staleness import Fraction
from paceline.strategies.flat_optimizer import FlatOptimizer, FlatSegment
from paceline.strategies.ps.fractional import (
    fractional_rate,
    fractional_step,
    has_fractional_step,
    settle_state,
)
from paceline.strategies.ps.messages import Options, SliceEntry


class Slot(NamedTuple):
    """One optimizer tensor of one slice."""

    slice_index: int
    name: str
    value: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """All that a server needs to hold a shard: weights, and an optimizer with its state."""

    slices: tuple[SliceEntry, ...]
    options: tuple[Options, ...]
    """Per parameter group of the optimizer."""
    optimizer: str
    """Reference of its class, `module:name`."""
    codec: str | None
    weights: torch.Tensor
    """Bytes; copied by the store."""
    slots: tuple[Slot, ...]
    """The store keeps these tensors."""
    view: int = 0
    """Number of the view that continues from this state."""


@dataclass
class StoredSlice:
    """A slice of a parameter, or several adjacent ones, as a parameter of the optimizer."""

    offset: int
    nbytes: int
    parameter: torch.nn.Parameter
    group: int
    """Index of its parameter group in the optimizer."""


@dataclass
class PendingGradient:
    """A gradient that has arrived and waits to be applied."""

    buffer: torch.Tensor
    missing: frozenset[int]
    options: tuple[Options, ...]
    mailbox: GradientMailbox | None = None
    """Holds the buffer until the update, if it is the worker's; None if it is the store's."""


class ParameterStore:
    def __init__(self, *, use_shared_memory: bool = True) -> None:
        self._use_shared_memory = use_shared_memory
        self.slices: list[StoredSlice] = []
        self.weights = torch.zeros(0, dtype=torch.uint8)
        self.shared_weights: SharedWeightsOwner | None = None
        """Memory of `weights`, if workers on this host can read it."""
        self._allocated: int | None = None
        self.sums = torch.zeros(0, dtype=torch.uint8)
        self.gradients: dict[Handle, PendingGradient] = {}
        self._spare: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._rows: list[StoredSlice] = []
        self._flat: FlatOptimizer | None = None
        """Updates the rows instead of the slices, as long as every gradient has all slices."""
        self.coder: Coder | None = None
        self.weight_coder: Coder | None = None

    def allocate(self, nbytes: int) -> None:
        """Allocates the weights unless they have this size; in shared memory if there is room."""
        if nbytes == self._allocated:
            return  # Also outside shared memory: the weights may be loaded already.
        self.close()
        self._allocated = nbytes
        self.weights = torch.zeros(0, dtype=torch.uint8)
        if self._use_shared_memory and shm_domain_id() is not None:
            try:
                self.shared_weights = SharedWeightsOwner(nbytes)
            except OSError:
                pass  # No room: `OfferMemory` is answered with the reason.
        shared = self.shared_weights
        self.weights = torch.zeros(nbytes, dtype=torch.uint8) if shared is None else shared.weights

    def close(self) -> None:
        if self.shared_weights is not None:
            self.shared_weights.close()
            self.shared_weights = None

    def load(self, state: ShardState) -> None:
        """Replaces weights, optimizer and slots; gradients that wait are dropped."""
        self.allocate(state.weights.numel())
        self.weights.copy_(state.weights)
        self.sums = torch.zeros(0, dtype=torch.uint8)
        self.gradients = {}
        self._spare, self._copies = [], []
        self.slices = []
        members: list[list[torch.nn.Parameter]] = [[] for _ in state.options]
        for _, offset, nbytes, dtype, group, shape in state.slices:
            view = self.weights[offset : offset + nbytes].view(dtype_from_name(dtype))
            parameter = torch.nn.Parameter(view.view(shape))
            self.slices.append(StoredSlice(offset, nbytes, parameter, group))
            members[group].append(parameter)
        self.optimizer = optimizer_from_reference(state.optimizer, state.options, members)
        if self.optimizer is not None:
            for index, name, value in state.slots:
                self.optimizer.state[self.slices[index].parameter][name] = value
        self._rows, self._flat = [], None
        if state.codec is None:  # A codec writes into the padding between slices.
            self.flatten()
        self.coder, self.weight_coder = None, None
        if state.codec is not None and self.slices:
            spec = parse_codec(state.codec)
            self.coder = make_coder(spec, self.slices[0].parameter.dtype)
            # Half precision suits weights, which are kept in full here. Coarser codes do not.
            self.weight_coder = self.coder if spec.suits_weights else None

    def flatten(self) -> None:
        """Updates adjacent slices as one from now on, if the optimizer allows it."""
        if self.optimizer is None:
            return
        rows, segments = [], []
        adjacent = groupby(self.slices, key=lambda piece: (piece.group, piece.parameter.dtype))
        for (group, dtype), run in adjacent:
            pieces = list(run)
            lo, hi = pieces[0].offset, pieces[-1].offset + pieces[-1].nbytes
            weights = torch.nn.Parameter(self.weights[lo:hi].view(dtype))
            rows.append(StoredSlice(lo, hi - lo, weights, group))
            places = [(p.parameter, (p.offset - lo) // dtype.itemsize) for p in pieces]
            segments.append(FlatSegment(weights, places, group))
        self._flat = FlatOptimizer.from_optimizer(self.optimizer, segments)
        self._rows = rows

    @property
    def _units(self) -> list[StoredSlice]:
        """The parameters of the optimizer in use: rows or slices."""
        return self.slices if self._flat is None else self._rows

    def _update_units(self, gradients: Iterable[PendingGradient]) -> list[StoredSlice]:
        """Returns the rows, or the slices from the first gradient on that lacks one."""
        if self._flat is not None and any(gradient.missing for gradient in gradients):
            self._settle()
            self._flat = None
        return self._units

    def _settle(self) -> None:
        """Brings the state of the optimizer, which has the slices, up to date."""
        if self._flat is not None:
            settle_state(self._flat.optimizer)
            self._flat.write_back()
        elif self.optimizer is not None:
            settle_state(self.optimizer)

    def slots(self) -> list[Slot]:
        """Returns the optimizer state; the tensors are the optimizer's own."""
        self._settle()
        found = []
        for index, held in enumerate(self.slices):
            assert self.optimizer is not None
            for name, value in self.optimizer.state.get(held.parameter, {}).items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                found.append(Slot(index, name, tensor.detach().contiguous()))
        return found

    def sum_up(self, order: ApplyUpdate) -> float:
        """Adds up the weighted gradients in `sums`; returns the squared norm, if it is clipped."""
        if self.sums.numel() != self.weights.numel():
            self.sums = torch.zeros_like(self.weights)
        square = 0.0
        found = [(self.gradients[p.worker, p.handle], p.weight) for p in order.parts]
        for index, piece in enumerate(self._update_units(gradient for gradient, _ in found)):
            target = self._view(self.sums, piece)
            used = False
            for gradient, weight in found:
                if index not in gradient.missing:
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

    def gather_gradient(self, order: ApplyUpdate) -> None:
        """Prepares an update; a single gradient is read from its own buffer, without a sum."""
        first = order.parts[0]
        if len(order.parts) > 1 or first.weight != 1.0:
            self.sum_up(order)
            return
        gradient = self.gradients[first.worker, first.handle]
        for index, piece in enumerate(self._update_units([gradient])):
            missing = index in gradient.missing
            piece.parameter.grad = None if missing else self._view(gradient.buffer, piece)

    def step(self, order: ApplyUpdate, factor: float) -> None:
        if self.optimizer is None or not self.slices:
            return
        units = self._units
        if factor != 1.0:
            for piece in units:
                if piece.parameter.grad is not None:
                    piece.parameter.grad.mul_(factor)
        given = self.gradients[order.parts[0].worker, order.parts[0].handle].options
        fraction = Fraction(*order.fraction) if order.fraction is not None else None
        for group, hyper in zip(self.optimizer.param_groups, given, strict=True):
            group.update(hyper)
            group["lr"] = hyper["lr"] * fractional_rate(hyper, fraction, order.lr_scale)
        optimizer = self.optimizer
        if self._flat is not None:
            optimizer = self._flat.prepare([row.parameter.grad for row in units])
        if fraction is None or fraction.is_whole or not has_fractional_step(optimizer):
            settle_state(optimizer)
            optimizer.step()
        else:
            fractional_step(optimizer, fraction)

    def borrow_buffer(self) -> torch.Tensor:
        """Returns a buffer for a gradient; released ones are used again."""
        # Zeros: the padding between slices is never filled, and must not count.
        return self._spare.pop() if self._spare else torch.zeros_like(self.weights)

    def copy_weights(self) -> torch.Tensor:
        """Copies the weights, to be sent while they change; give it back with `return_copy`."""
        copy = self._copies.pop() if self._copies else torch.empty_like(self.weights)
        return copy.copy_(self.weights)

    def return_copy(self, copy: torch.Tensor) -> None:
        if copy.numel() == self.weights.numel():
            self._copies.append(copy)

    def release_gradients(self, order: ApplyUpdate) -> None:
        """Frees the buffers of an order's gradients after its update."""
        for piece in self._units:
            piece.parameter.grad = None
        for part in order.parts:
            gradient = self.gradients.pop((part.worker, part.handle))
            if gradient.mailbox is None:
                self._spare.append(gradient.buffer)
            else:
                gradient.mailbox.consumed = part.handle

    def _view(self, buffer: torch.Tensor, piece: StoredSlice) -> torch.Tensor:
        raw = buffer[piece.offset : piece.offset + piece.nbytes]
        return raw.view(piece.parameter.dtype).view_as(piece.parameter)


def optimizer_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the current options of each parameter group; raises UsageError if not plain."""
    plain = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key == "params" or value is None:
                continue
            if isinstance(value, torch.Tensor):
                value = value.item()
            if not isinstance(value, bool | int | float | str | list | tuple):
                raise UsageError(
                    f"optimizer option {key} is a {type(value).__name__}; "
                    "ps supports only plain values"
                )
            options[key] = value
        plain.append(options)
    return plain


def optimizer_from_reference(
    reference: str, options: Sequence[Options], members: list[list[torch.nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """Creates the workers' optimizer over this shard's slices; returns None for an empty shard."""
    filled = [{**hyper, "params": params} for hyper, params in zip(options, members, strict=True)]
    if not any(group["params"] for group in filled):
        return None
    module, name = reference.split(":")
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise WireError(f"{reference} is not an optimizer")
    made: Any = cls
    optimizer: torch.optim.Optimizer = made(filled, lr=options[0]["lr"])
    return optimizer


def dtype_from_name(name: str) -> torch.dtype:
    """Returns the type of that name; raises WireError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"{name!r} is not a tensor type")
    return dtype
