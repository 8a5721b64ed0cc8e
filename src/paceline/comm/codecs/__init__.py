"""The arithmetic of the codecs: flat gradients to small messages and back, with error feedback.

A *payload* is a short list of plain tensors that own their memory. Decoding uses only operations
that IEEE arithmetic fixes to the last bit (copies, single multiplications and additions), so the
same payload gives the same tensor on every machine, whatever its processor and thread count.
Everything lives in host memory.

NaN and infinite gradients are refused (`NotFinite`): a scale or a selection made from them would
turn a whole chunk, or every later message through the residual, into nonsense without a word.
"""

from __future__ import annotations

from paceline.comm.codecs.build import Compressor, make_coder
from paceline.comm.codecs.coder import (
    RESIDUAL,
    Coder,
    NonFiniteGradient,
    Payload,
    Shape,
    check_finite,
)
from paceline.comm.codecs.feedback import ErrorFeedback
from paceline.comm.codecs.low_rank import PowerSgdCoder
from paceline.comm.codecs.payload import from_bytes, to_bytes

__all__ = [
    "RESIDUAL",
    "Coder",
    "Compressor",
    "ErrorFeedback",
    "NonFiniteGradient",
    "Payload",
    "PowerSgdCoder",
    "Shape",
    "check_finite",
    "from_bytes",
    "make_coder",
    "to_bytes",
]
