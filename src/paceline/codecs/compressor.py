"""Builds the coder of a spec, and a compressor that keeps its residual."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.base import RESIDUAL, Coder, Payload, Shape
from paceline.codecs.error_feedback import ErrorFeedback
from paceline.codecs.registry import codec_record
from paceline.codecs.spec import Codec
from paceline.errors import StateError


def make_coder(spec: Codec, dtype: torch.dtype, shapes: Sequence[Shape] = ()) -> Coder:
    """The coder for a spec; one that looks at whole tensors needs their shapes to encode."""
    module, _, attribute = codec_record(spec.name).coder.partition(":")
    kind: type[Coder] = getattr(importlib.import_module(module), attribute)
    return kind.from_spec(spec, dtype, shapes)


class Compressor:
    """A sender's coder for one buffer, with error feedback if the codec needs it."""

    def __init__(self, spec: Codec, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.numel = sum(math.prod(shape) for shape in shapes)
        self.coder = make_coder(spec, dtype, shapes)
        self.feedback = ErrorFeedback(self.numel, dtype) if spec.uses_error_feedback else None

    def encode(self, flat: Tensor) -> Payload:
        """Encodes a gradient and adds the residual to it in place.

        Raises NonFiniteGradient and then leaves the residual unchanged.
        """
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
        """Restores `state()`. Raises StateError for the state of another model or codec."""
        rest = dict(state)
        if self.feedback is not None:
            if RESIDUAL not in rest:
                raise StateError("the codec state has no residual")
            self.feedback.load(rest.pop(RESIDUAL))
        self.coder.load_state(rest)
