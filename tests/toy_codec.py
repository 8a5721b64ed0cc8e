"""A codec in one file, as a user would write one: spec, coder, record.

pruned   elements of a magnitude below 1e-12 are sent as zero; all others as they are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

import paceline
from paceline.codecs.base import Coder, Payload, Shape, check_payload_count
from paceline.codecs.spec import Codec, count_elements

LIMIT = 1e-12


@dataclass(frozen=True)
class Pruned(Codec):
    """So small a change that exact strategies stay within their tolerance."""

    name: ClassVar[str] = "pruned"

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        return float(count_elements(shapes) * item_bytes)


class PrunedCoder(Coder):
    @classmethod
    def from_spec(cls, spec: Pruned, dtype: torch.dtype, shapes: Sequence[Shape]) -> Self:
        return cls(dtype)

    def _encode(self, flat: Tensor) -> Payload:
        return [flat.masked_fill(flat.abs() < LIMIT, 0.0)]

    def _check(self, payload: Payload, numel: int) -> None:
        check_payload_count(payload, (self.dtype, (numel,)))

    def _decode(self, payload: Payload, out: Tensor) -> None:
        out.copy_(payload[0])


paceline.register_codec(paceline.CodecRecord(spec=Pruned, coder=f"{__name__}:PrunedCoder"))
