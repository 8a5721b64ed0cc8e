"""Builds the coder of a spec, and a compressor that keeps its residual."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.codecs.coder import RESIDUAL, Coder, Payload, Shape
from paceline.comm.codecs.dense import CastCoder, Int8Coder, OneBitCoder
from paceline.comm.codecs.feedback import ErrorFeedback
from paceline.comm.codecs.low_rank import PowerSgdCoder
from paceline.comm.codecs.sparse import ThresholdCoder, TopKCoder
from paceline.errors import StateError, UsageError
from paceline.specs.codec import Bf16, Codec, Fp16, Int8, OneBit, PowerSgd, Threshold, TopK


def make_coder(spec: Codec, dtype: torch.dtype, shapes: Sequence[Shape] = ()) -> Coder:
    """The coder for a spec; powersgd needs the shapes of what it encodes, to decode none."""
    if isinstance(spec, Fp16):
        return CastCoder(dtype, torch.float16)
    if isinstance(spec, Bf16):
        return CastCoder(dtype, torch.bfloat16)
    if isinstance(spec, Int8):
        return Int8Coder(dtype, spec.chunk)
    if isinstance(spec, OneBit):
        return OneBitCoder(dtype, spec.chunk)
    if isinstance(spec, TopK):
        return TopKCoder(dtype, spec.ratio)
    if isinstance(spec, Threshold):
        return ThresholdCoder(dtype, spec.x)
    if isinstance(spec, PowerSgd):
        return PowerSgdCoder(dtype, spec.rank, shapes)
    raise UsageError(f"there is no coder for {spec}")


class Compressor:
    """A coder with the error feedback that its codec needs: what a sender keeps for a buffer."""

    def __init__(self, spec: Codec, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.numel = sum(math.prod(shape) for shape in shapes)
        self.coder = make_coder(spec, dtype, shapes)
        self.feedback = ErrorFeedback(self.numel, dtype) if spec.uses_error_feedback else None

    def encode(self, flat: Tensor) -> Payload:
        """The message for a gradient, which becomes what was meant to be sent (gradient and
        residual). Raises NotFinite, and then leaves the residual as it was."""
        if self.feedback is None:
            return self.coder.encode(flat)
        self.feedback.compensate(flat)
        payload = self.coder.encode(flat)
        residual = self.feedback.residual
        self.coder.decode(payload, residual)
        self.feedback.update(flat, residual)
        return payload

    def state(self) -> dict[str, Tensor]:
        """Named tensors (copies) from which another compressor continues bit for bit."""
        kept = self.coder.state()
        if self.feedback is not None:
            kept[RESIDUAL] = self.feedback.export()
        return kept

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back `state()`; raises StateError for that of another model or codec."""
        rest = dict(state)
        if self.feedback is not None:
            if RESIDUAL not in rest:
                raise StateError("codec state without a residual")
            self.feedback.load(rest.pop(RESIDUAL))
        self.coder.load_state(rest)
