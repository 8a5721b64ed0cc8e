"""Compressors: a coder and its residual; residuals by parameter name.

A compressor's residual covers one flat buffer (a bucket, or a server's shard). It is exported as
`residual/<parameter>`, whatever the layout, so that a run can continue under another strategy.
Other codec state belongs to the buffer and is exported as `codec/<buffer>/<key>`.
"""

import math
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.codecs.base import RESIDUAL, Coder, Payload, Shape, check_tensor
from paceline.codecs.powersgd import PowerSgdCoder
from paceline.codecs.registry import codec_record
from paceline.codecs.spec import Codec
from paceline.errors import StateError


def make_coder(spec: Codec, dtype: torch.dtype, shapes: Sequence[Shape] = ()) -> Coder:
    """The coder for a spec; one that looks at whole tensors needs their shapes to encode."""
    kind: type[Coder] = pkgutil.resolve_name(codec_record(spec.name).coder)
    return kind.from_spec(spec, dtype, shapes)


class Compressor:
    """A sender's coder for one buffer, with error feedback if the codec needs it."""

    def __init__(self, spec: Codec, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.numel = sum(math.prod(shape) for shape in shapes)
        self.coder = make_coder(spec, dtype, shapes)
        self.residual: Tensor | None = None
        """Error feedback: what messages have omitted so far, which is added to the next one."""
        if spec.uses_error_feedback:
            self.residual = torch.zeros(self.numel, dtype=dtype)

    def encode(self, flat: Tensor) -> Payload:
        """Adds the residual in place and encodes; NonFiniteGradient leaves the residual as is."""
        if self.residual is None:
            return self.coder.encode(flat)
        payload = self.coder.encode(flat.add_(self.residual))
        self.coder.decode(payload, self.residual)
        torch.sub(flat, self.residual, out=self.residual)
        return payload

    def state(self) -> dict[str, Tensor]:
        """Named tensors (copies) from which another compressor continues bit for bit."""
        kept = self.coder.state()
        if self.residual is not None:
            kept[RESIDUAL] = self.residual.clone()
        return kept

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restores `state()`. Raises StateError for the state of another model or codec."""
        rest = dict(state)
        if self.residual is not None:
            if RESIDUAL not in rest:
                raise StateError("the codec state has no residual")
            self.load_residual(rest.pop(RESIDUAL))
        self.coder.load_state(rest)

    def load_residual(self, residual: Tensor) -> None:
        """Restores a residual. Raises StateError if it belongs to another buffer."""
        assert self.residual is not None
        check_tensor(residual, self.residual, "the residual")
        self.residual.copy_(residual)


def reference_sum(parts: Sequence[tuple[Compressor, Tensor]]) -> Tensor:
    """The sum of each worker's flat gradient after its compressor, in the order of the workers.

    Real exchanges are compared with it, and simulated ones use it. Overwrites the gradients.
    """
    total = torch.zeros_like(parts[0][1])
    if parts[0][0].coder.reduction != "low_rank":
        decoded = torch.empty_like(total)
        for compressor, flat in parts:
            compressor.coder.decode(compressor.encode(flat), decoded)
            total += decoded
        return total
    workers = []
    for compressor, flat in parts:
        assert isinstance(compressor.coder, PowerSgdCoder)
        workers.append(compressor.coder.reduce(flat, compressor.residual))
    for steps in zip(*workers, strict=True):
        collective, first = steps[0]
        tensors = [tensor for _, tensor in steps]
        result = torch.stack(tensors).sum(0) if collective == "sum" else first.clone()
        for tensor in tensors:
            tensor.copy_(result)
    return total.copy_(parts[0][1])


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
