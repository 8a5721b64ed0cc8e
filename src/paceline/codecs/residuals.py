"""Residuals by parameter name, so that a run can continue under another strategy or layout.

A compressor's residual covers one flat buffer (a bucket, or a server's shard). It is exported as
`residual/<parameter>`, whatever the layout. Other codec state belongs to the buffer and is exported
as `codec/<buffer>/<key>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.codecs.base import RESIDUAL
from paceline.codecs.compressor import Compressor


class ResidualSlice(NamedTuple):
    """Elements [start, stop) of a parameter, at element `offset` of a residual."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    offset: int

    @property
    def range(self) -> slice:
        """Its elements in the residual."""
        return slice(self.offset, self.offset + self.stop - self.start)


CodecBuffers = Iterable[tuple[Compressor, Sequence[ResidualSlice]]]
"""Flat buffers in a fixed order: their compressors, and the slices of parameters in each."""


def export_residuals(buffers: CodecBuffers) -> dict[str, Tensor]:
    """Returns residuals by parameter, and all other codec state by buffer."""
    found: dict[str, Tensor] = {}
    for index, (codec, slices) in enumerate(buffers):
        state = codec.state()
        residual = state.pop(RESIDUAL, None)
        if residual is not None:
            for part in slices:
                key = f"{RESIDUAL}/{part.name}"
                if key not in found:
                    found[key] = torch.zeros(part.shape, dtype=residual.dtype)
                found[key].view(-1)[part.start : part.stop] = residual[part.range]
        found.update({f"codec/{index}/{key}": value for key, value in state.items()})
    return found


def import_residuals(buffers: CodecBuffers, stored: Mapping[str, Tensor]) -> None:
    """Loads exported state; what is missing, or belongs to another layout or codec, starts anew."""
    for index, (codec, slices) in enumerate(buffers):
        state = codec.state()
        for key in state:
            value = stored.get(f"codec/{index}/{key}")
            if value is not None and value.shape == state[key].shape:
                state[key] = value
        if RESIDUAL in state:
            for part in slices:
                value = stored.get(f"{RESIDUAL}/{part.name}")
                if value is not None:
                    state[RESIDUAL][part.range] = value.reshape(-1)[part.start : part.stop]
        codec.load_state(state)
