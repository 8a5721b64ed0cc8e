"""Codecs that send a few elements with full precision: topk, threshold."""

import math

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.base import (
    BLOCK,
    SAMPLE,
    Coder,
    Payload,
    ScratchBuffer,
    Shape,
    check_payload_count,
)
from paceline.errors import WireError


class SparseCoder(Coder):
    """Selected elements with their indices; the others are zero.

    If indices and values together would exceed the dense gradient, the dense gradient is sent with
    zeros for the other elements, so a payload is never larger than the gradient.
    """

    def _pack(self, flat: Tensor, chosen: Tensor) -> Payload:
        values = flat.index_select(0, chosen)
        places = chosen.to(torch.int32)
        if self._is_dense(flat.numel(), chosen.numel()):
            values = torch.zeros_like(flat).index_copy_(0, chosen, values)
            places = places[:0].clone()
        return [values, places]

    def _is_dense(self, numel: int, chosen: int) -> bool:
        return chosen * (self.item + 4) >= numel * self.item

    def _check(self, payload: Payload, numel: int) -> None:
        count = payload[1].numel() if len(payload) == 2 else 0
        dense = count == 0 and payload[0].numel() == numel if payload else False
        values = (self.dtype, (numel if dense else count,))
        check_payload_count(payload, values, (torch.int32, (count,)))
        if count:
            low, high = torch.aminmax(payload[1])
            if int(low) < 0 or int(high) >= numel:
                raise WireError(
                    f"invalid sparse gradient: an index is outside its {numel} elements"
                )

    def _decode(self, payload: Payload, out: Tensor) -> None:
        values, places = payload
        if values.numel() == out.numel() and not places.numel():
            out.copy_(values)
        else:
            out.zero_().index_add_(0, places, values)

    def add(self, payload: Payload, out: Tensor) -> None:
        self._check(payload, out.numel())
        values, places = payload
        if values.numel() == out.numel() and not places.numel():
            out.add_(values)
        else:
            out.index_add_(0, places, values)


class TopKCoder(SparseCoder):
    """topk: the k elements of the largest magnitude; the first of equal ones."""

    def __init__(self, dtype: torch.dtype, ratio: float) -> None:
        super().__init__(dtype)
        self.ratio = ratio

    def count(self, numel: int) -> int:
        return min(numel, max(1, round(self.ratio * numel)))

    def _layout(self, numel: int) -> list[tuple[torch.dtype, Shape]]:
        count = self.count(numel)
        dense = self._is_dense(numel, count)
        return [(self.dtype, (numel if dense else count,)), (torch.int32, (0 if dense else count,))]

    def _encode(self, flat: Tensor) -> Payload:
        return self._pack(flat, topk_indices(flat, self.count(flat.numel())))

    def _check(self, payload: Payload, numel: int) -> None:
        super()._check(payload, numel)
        check_payload_count(payload[1:], self._layout(numel)[1])


class ThresholdCoder(SparseCoder):
    """threshold: all elements with at least this magnitude, with their values.

    The exact values are sent, not plus or minus the threshold, so that the residual of every
    element stays below the threshold. With steps of a fixed size, the residual of an element with
    large gradients would grow without bound and be applied much too late.
    """

    fixed_size = False

    def __init__(self, dtype: torch.dtype, limit: float) -> None:
        super().__init__(dtype)
        self.limit = limit

    def _encode(self, flat: Tensor) -> Payload:
        return self._pack(flat, indices_at_least(flat, self.limit))


def indices_at_least(flat: Tensor, limit: float) -> Tensor:
    """Returns the indices of all elements with at least this magnitude, in order."""
    room = ScratchBuffer(flat.dtype)
    found = []
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        magnitude = torch.abs(block, out=room.like(block)).numpy()
        places = torch.from_numpy(np.flatnonzero(magnitude >= limit))
        found.append(places.add_(start))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def topk_indices(flat: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest magnitudes, in order; ties go to the first.

    Selecting candidates above an estimated threshold is several times faster than a partial sort of
    everything. The estimate comes from a sample; a bad sample costs time, not exactness.
    """
    places = _find_candidates(flat, count)
    magnitude = flat.index_select(0, places).abs_() if places is not None else flat.abs()
    if count == 0 or count == magnitude.numel():
        chosen = torch.arange(count)
    else:
        last = magnitude.kthvalue(magnitude.numel() - count + 1).values
        above = magnitude > last
        ties = torch.nonzero(magnitude == last).view(-1)
        above[ties[: count - int(above.count_nonzero())]] = True
        chosen = torch.nonzero(above).view(-1)
    return chosen if places is None else places.index_select(0, chosen)


def _find_candidates(flat: Tensor, count: int) -> Tensor | None:
    if flat.numel() < 4 * SAMPLE:
        return None
    # A stride that is not even does not align with the columns of a matrix.
    sample = flat[:: flat.numel() // SAMPLE | 1].abs()
    expected = count / flat.numel() * sample.numel()
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if rank >= sample.numel() // 2:
        return None
    limit = float(sample.kthvalue(sample.numel() - rank + 1).values)
    places = indices_at_least(flat, limit)
    return places if places.numel() >= count else None
