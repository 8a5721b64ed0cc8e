"""Layers that hold a slice of their weights, and the exchanges that complete their outputs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.process_group import CollectiveGroup
from paceline.strategies.model_parallel import callable_layers

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class SliceSpec:
    """Division of a parameter into slices along one dimension, one per worker.

    With `blocks`, the parameter consists of that many stacked matrices, each sliced separately
    (queries, keys and values in one).
    """

    dim: int
    edges: tuple[int, ...]
    dims: int
    blocks: int = 1

    def take(self, whole: Tensor, part: int) -> Tensor:
        lo, hi = self.edges[part], self.edges[part + 1]
        if self.blocks == 1:
            return whole.narrow(self.dim, lo, hi - lo).contiguous()
        return torch.cat([b.narrow(self.dim, lo, hi - lo) for b in whole.chunk(self.blocks)])

    def join(self, pieces: list[Tensor]) -> Tensor:
        if self.blocks == 1:
            return torch.cat(pieces, self.dim)
        stacked = [piece.chunk(self.blocks) for piece in pieces]
        return torch.cat([torch.cat(b, self.dim) for b in zip(*stacked, strict=True)])


@dataclass
class SlicedModel:
    """Changes made to a model, and how to undo them."""

    wire: TensorParallelGroup
    cuts: dict[str, SliceSpec] = field(default_factory=dict)
    """Slices by name of the parameter."""
    shapes: dict[Tensor, torch.Size] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    fast_attention: bool = False
    """True if torch's fast path of attention was enabled; it is disabled meanwhile."""

    def undo(self) -> None:
        """Restores the layers; their weights are allocated but not initialized."""
        for module in self.modules:
            del module.forward
        if self.fast_attention:
            torch.backends.mha.set_fastpath_enabled(True)
        for parameter, shape in self.shapes.items():
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None


class TensorParallelGroup:
    """Collectives inside a replica, with a count of the bytes sent."""

    def __init__(self, group: CollectiveGroup, part: int) -> None:
        self.group = group
        self.part = part
        self.bytes_sent = 0

    def enter(self, x: Tensor) -> Tensor:
        """Returns the input; backward sums the gradients of the slices."""
        return _exchange(x, _view, self._sum)

    def gather(self, x: Tensor, dim: int, edges: tuple[int, ...]) -> Tensor:
        """Concatenates the parts of all workers; backward takes the local part."""
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        start, size = edges[self.part], sizes[self.part]
        return _exchange(
            x,
            lambda part: self._gather(part, dim, sizes),
            lambda gradient: gradient.narrow(dim, start, size).contiguous(),
        )

    def add(self, x: Tensor) -> Tensor:
        """Sums over all workers; each has the same gradient."""
        return _exchange(x, self._sum, _view)

    def _sum(self, x: Tensor) -> Tensor:
        whole = x.contiguous().clone()
        self.group.all_reduce(whole)
        self.bytes_sent += whole.nbytes
        return whole

    def _gather(self, x: Tensor, dim: int, sizes: list[int]) -> Tensor:
        missing = max(sizes) - x.shape[dim]
        front = x.movedim(dim, 0)
        if missing:
            front = torch.cat([front, front.new_zeros(missing, *front.shape[1:])])
        pieces = self.group.all_gather(front.contiguous())
        self.bytes_sent += front.nbytes
        whole = torch.cat([piece[:n] for piece, n in zip(pieces, sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()


TensorMap = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    """Applies one function to the input and another one to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorMap, backward: TensorMap) -> Tensor:
        ctx.backward_map = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_map(gradient), None, None


def _exchange(x: Tensor, forward: TensorMap, backward: TensorMap) -> Tensor:
    made: Tensor = _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return made


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


def slice_model(model: nn.Module, part: int, parts: int, group: CollectiveGroup) -> SlicedModel:
    """Slices all supported layers in place: parameters keep their identity, not their shape."""
    wire = TensorParallelGroup(group, part)
    done = SlicedModel(wire)
    if parts == 1:
        return done
    uses = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    for _, module, parameters in callable_layers(model):
        plan = None if any(uses[p] > 1 for p in parameters) else _plan(module, parts, wire)
        if plan is None:
            continue
        if isinstance(module, nn.MultiheadAttention) and torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            done.fast_attention = True
        forward, cuts = plan
        for parameter, cut in cuts.items():
            done.cuts[names[parameter]] = cut
            done.shapes[parameter] = parameter.shape
            parameter.data = cut.take(parameter.data, part).clone()
        module.forward = forward
        done.modules.append(module)
    return done


Plan = tuple[Callable[..., Any], dict[Tensor, SliceSpec]]


def _plan(module: nn.Module, parts: int, wire: TensorParallelGroup) -> Plan | None:
    if isinstance(module, nn.MultiheadAttention):
        return _plan_attention(module, parts, wire)
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None  # recomputed in every forward pass, as in weight_norm
    if type(module) is nn.Linear and module.out_features >= parts:
        return _plan_outputs(module, module.out_features, -1, parts, wire)
    if type(module) in CONVOLUTIONS:
        assert isinstance(module, CONVOLUTIONS)
        if module.groups == 1 and module.out_channels >= parts:
            return _plan_outputs(module, module.out_channels, 1, parts, wire)
    return None


def _edges(count: int, parts: int) -> tuple[int, ...]:
    return tuple(count * p // parts for p in range(parts + 1))


def _plan_outputs(
    module: Any, outputs: int, dim: int, parts: int, wire: TensorParallelGroup
) -> Plan:
    edges = _edges(outputs, parts)
    compute = type(module).forward

    def forward(x: Tensor) -> Tensor:
        return wire.gather(compute(module, wire.enter(x)), dim, edges)

    cuts = {module.weight: SliceSpec(0, edges, module.weight.dim())}
    if module.bias is not None:
        cuts[module.bias] = SliceSpec(0, edges, 1)
    return forward, cuts


def _plan_attention(
    module: nn.MultiheadAttention, parts: int, wire: TensorParallelGroup
) -> Plan | None:
    """Slices attention by heads, and the columns of the output layer that belong to them."""
    plain = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    if not plain or module.num_heads < parts or module.in_proj_weight is None:
        return None
    heads = _edges(module.num_heads, parts)
    width = tuple(h * module.head_dim for h in heads)
    first, end = heads[wire.part : wire.part + 2]

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        turned = not module.batch_first and query.dim() == 3
        given = [wire.enter(x) for x in (query, key, value)]
        if turned:
            given = [x.transpose(0, 1) for x in given]
        weights = module.in_proj_weight.chunk(3)
        biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None,) * 3
        q, k, v = (
            _by_heads(F.linear(x, w, b), end - first, module.head_dim)
            for x, w, b in zip(given, weights, biases, strict=True)
        )
        if attn_mask is not None and attn_mask.dim() == 3:  # one for every sample and head
            by_sample = attn_mask.reshape(-1, module.num_heads, *attn_mask.shape[1:])
            attn_mask = by_sample[:, first:end]
        mask = _join_masks(attn_mask, key_padding_mask, q.dtype)
        dropout = module.dropout if module.training else 0.0
        causal = is_causal and mask is None
        attended = weights_out = None
        with _drawing_apart(dropout, wire.part):
            if need_weights:
                scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
                attended = (scores if mask is None else scores + mask).softmax(-1)
                attended = F.dropout(attended, dropout)
                mixed = attended @ v
            else:
                mixed = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal
                )
        if attended is not None and average_attn_weights:
            weights_out = wire.add(attended.sum(-3)) / module.num_heads
        elif attended is not None:
            weights_out = wire.gather(attended, -3, heads)
        mixed = mixed.transpose(-3, -2).flatten(-2)
        out = wire.add(F.linear(mixed, module.out_proj.weight))
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias
        return (out.transpose(0, 1) if turned else out), weights_out

    cuts: dict[Tensor, SliceSpec] = {
        module.in_proj_weight: SliceSpec(0, width, 2, blocks=3),
        module.out_proj.weight: SliceSpec(1, width, 2),
    }
    if module.in_proj_bias is not None:
        cuts[module.in_proj_bias] = SliceSpec(0, width, 1, blocks=3)
    return forward, cuts


@contextmanager
def _drawing_apart(dropout: float, part: int) -> Iterator[None]:
    """Uses separate random numbers per part for its heads; afterwards all generators are equal."""
    if not dropout:
        yield
        return
    seed = int(torch.randint(1 << 31, ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + part)
        yield


def _by_heads(x: Tensor, heads: int, width: int) -> Tensor:
    """(..., time, heads * width) to (..., heads, time, width)."""
    return x.reshape(*x.shape[:-1], heads, width).transpose(-3, -2)


def _join_masks(mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Joins masks to one that is added to the scores of the local heads."""
    if padding is not None:
        padding = padding[:, None, None, :]
    given = [each for each in (mask, padding) if each is not None]
    for index, each in enumerate(given):
        if each.dtype == torch.bool:
            given[index] = torch.zeros_like(each, dtype=dtype).masked_fill_(each, float("-inf"))
    return sum(given[1:], given[0]) if given else None
