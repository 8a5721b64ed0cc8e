"""Codecs as data: how gradients are made smaller before they are sent.

fp16   bf16   int8   onebit(chunk=1024)   topk(1%)   threshold(0.001)   powersgd(rank=4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import Spec, float_field, int_field, spec_field
from paceline.specs.expression import Call, Percent, Value, format_expression

MIN_CHUNK, MAX_CHUNK = 8, 1 << 20
"""Shorter chunks send more scales than they save; longer ones share one scale too widely."""
THRESHOLD_FRACTION = 0.05
"""Fraction that threshold(x) is assumed to send; it depends on the gradients."""


@dataclass(frozen=True)
class Codec(Spec):
    """Properties of a codec; the arithmetic is in its coder."""

    positional: ClassVar[bool] = True
    uses_error_feedback: ClassVar[bool] = True
    """The part that is not sent is kept and added to the next message (error feedback)."""
    suits_weights: ClassVar[bool] = False
    """Precise enough for weights sent by a server, which no later message corrects."""
    needs_whole_tensors: ClassVar[bool] = False
    """Treats parameters as matrices, which must not be split between servers."""

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        """Bytes of one message for parameters of these shapes, expected where they vary."""
        raise NotImplementedError


def count_elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class _HalfPrecision(Codec):
    uses_error_feedback: ClassVar[bool] = False
    suits_weights: ClassVar[bool] = True
    short_type: ClassVar[str]

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        return 2.0 * count_elements(shapes)


@dataclass(frozen=True)
class Fp16(_HalfPrecision):
    """Half precision: 11 bits of precision, magnitudes up to 65504."""

    name: ClassVar[str] = "fp16"
    short_type: ClassVar[str] = "float16"


@dataclass(frozen=True)
class Bf16(_HalfPrecision):
    """bfloat16: 8 bits of precision, the range of float32."""

    name: ClassVar[str] = "bf16"
    short_type: ClassVar[str] = "bfloat16"


@dataclass(frozen=True)
class _Chunked(Codec):
    chunk: int = spec_field(int_field(1), 1024)

    def __post_init__(self) -> None:
        # Multiples of 8: the packed bits of a chunk then begin at a whole byte.
        if not MIN_CHUNK <= self.chunk <= MAX_CHUNK or self.chunk % 8:
            raise SpecError(
                f"{self.name}(chunk={self.chunk}): chunk must be a multiple of 8 from "
                f"{MIN_CHUNK} to {MAX_CHUNK}"
            )


@dataclass(frozen=True)
class Int8(_Chunked):
    """255 even steps between the largest magnitudes of each `chunk` elements."""

    name: ClassVar[str] = "int8"

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        count = count_elements(shapes)
        return count + item_bytes * math.ceil(count / self.chunk)


@dataclass(frozen=True)
class OneBit(_Chunked):
    """The sign of each element, and for each `chunk` the mean of either sign."""

    name: ClassVar[str] = "onebit"

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        count = count_elements(shapes)
        return count / 8 + 2 * item_bytes * math.ceil(count / self.chunk)


def _ratio(value: Value, where: str) -> float:
    if isinstance(value, Percent):
        return value.value / 100
    return float(float_field()(value, where))


@dataclass(frozen=True)
class TopK(Codec):
    """The given fraction of the elements, those of the largest magnitude; at least one."""

    name: ClassVar[str] = "topk"
    ratio: float = spec_field(_ratio, 0.01)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise SpecError(
                f"topk({self.ratio:g}): the fraction must be greater than 0 and at most 1, "
                "for example topk(0.01) or topk(1%)"
            )

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        return self.ratio * count_elements(shapes) * (item_bytes + 4)


@dataclass(frozen=True)
class Threshold(Codec):
    """Every element of magnitude `x` or more, as it is; as many as there are."""

    name: ClassVar[str] = "threshold"
    x: float = spec_field(float_field())

    def __post_init__(self) -> None:
        if not 0 < self.x < math.inf:
            raise SpecError(
                f"threshold({self.x:g}): the magnitude must be finite and greater than 0"
            )

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        return THRESHOLD_FRACTION * count_elements(shapes) * (item_bytes + 4)

    @classmethod
    def from_call(cls, call: Call) -> Threshold:
        if not call.args and not call.named:
            raise SpecError(
                f"{format_expression(call)}: the minimum magnitude to send is required, "
                "for example threshold(0.001)"
            )
        built: Threshold = super().from_call(call)
        return built


@dataclass(frozen=True)
class PowerSgd(Codec):
    """Each matrix as a product of two thin ones of `rank` columns; vectors as they are."""

    name: ClassVar[str] = "powersgd"
    needs_whole_tensors: ClassVar[bool] = True
    rank: int = spec_field(int_field(1), 4)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError(f"powersgd(rank={self.rank}): rank must be at least 1")

    def encoded_bytes(self, shapes: Sequence[tuple[int, ...]], item_bytes: int) -> float:
        total = 0
        for shape in shapes:
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            thin = self.rank * (rows + columns)
            whole = math.prod(shape)
            total += min(thin, whole) if len(shape) > 1 else whole
        return float(total * item_bytes)
