"""The interface of all codecs, the checks of their input, and payloads as bytes."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from paceline.comm.flat_layout import as_memoryview
from paceline.errors import PacelineError, StateError, UsageError, WireError

Payload = list[Tensor]
Shape = tuple[int, ...]

BLOCK = 1 << 16
"""Elements processed at a time, so that intermediate results stay in the CPU cache."""
SAMPLE = 1 << 15
"""Number of elements from which topk estimates its threshold."""
MAX_INDEX = 2**31 - 1
RESIDUAL = "residual"
"""Name of the residual in exported state, the same for all codecs, so it survives a change."""
WIRE_TYPES = {
    _name: getattr(torch, _name)
    for _name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32")
}
MAX_DIMS = 2


class NonFiniteGradient(PacelineError):
    """A gradient that contains NaN or infinity, or exceeds the range of the codec's format."""


class Coder(ABC):
    """Encodes flat tensors of one dtype to payloads, and decodes payloads."""

    reduction: ClassVar[Literal["sum", "gather", "low_rank"]] = "gather"
    """Reduction of messages: as plain numbers in an all-reduce, by gathering all payloads, or as
    sums of low-rank factors."""

    fixed_size = True
    """True if the sizes of a payload depend only on the number of elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"{dtype_name(dtype)} gradients cannot be compressed; "
                "train in float32 or float64, or remove the codec"
            )
        self.dtype = dtype
        self.item = dtype.itemsize

    @classmethod
    def from_spec(cls, spec: Any, dtype: torch.dtype, shapes: Sequence[Shape]) -> Self:
        """The coder for a spec of its codec; `shapes` of the parameters in the flat tensor.

        By default, the constructor receives the dtype and the fields of the spec.
        """
        return cls(dtype, *dataclasses.astuple(spec))

    def encode(self, flat: Tensor) -> Payload:
        """Encodes a flat contiguous tensor. Raises NonFiniteGradient for NaN and infinity."""
        if flat.dtype != self.dtype or flat.dim() != 1 or flat.numel() > MAX_INDEX:
            raise UsageError(
                f"a codec for flat {dtype_name(self.dtype)} tensors of at most {MAX_INDEX} "
                f"elements does not support {dtype_name(flat.dtype)} of shape {tuple(flat.shape)}"
            )
        check_finite(flat)
        return self._encode(flat)

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Decodes a payload into `out`. Raises WireError if it does not match."""
        self._check(payload, out.numel())
        self._decode(payload, out)

    def add(self, payload: Payload, out: Tensor) -> None:
        """Decodes a payload and adds it to `out`. Raises WireError if it does not match."""
        decoded = torch.empty_like(out)
        self.decode(payload, decoded)
        out.add_(decoded)

    def max_payload_bytes(self, numel: int) -> int:
        """Upper bound of the payload for this many elements: the buffer that a receiver needs."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._layout(numel))

    def _layout(self, numel: int) -> list[tuple[torch.dtype, Shape]]:
        """Types and shapes of a payload; if they vary, of the largest. By default one tensor."""
        return [(self.dtype, (numel,))]

    @abstractmethod
    def _encode(self, flat: Tensor) -> Payload: ...

    def _check(self, payload: Payload, numel: int) -> None:
        check_payload_count(payload, *self._layout(numel))

    @abstractmethod
    def _decode(self, payload: Payload, out: Tensor) -> None: ...

    def state(self) -> dict[str, Tensor]:
        """State that the coder keeps between messages, apart from the residual."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restores `state`. Raises StateError if it belongs to another coder."""
        if state:
            raise StateError(
                f"the state belongs to another codec: unknown entry {sorted(state)[0]}"
            )


class ScratchBuffer:
    """Memory for intermediate results, allocated once and reused for every block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype)

    def like(self, target: Tensor) -> Tensor:
        if self._flat.numel() < target.numel():
            self._flat = torch.empty(target.numel(), dtype=self._flat.dtype)
        return self._flat[: target.numel()].view(target.shape)


def check_finite(flat: Tensor, short: torch.dtype | None = None) -> None:
    """Raises NonFiniteGradient for NaN, infinity, and values out of range of the shorter type."""
    if not flat.numel():
        return
    low, high = (float(x) for x in torch.aminmax(flat))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteGradient(
            "the gradient contains NaN or infinity and cannot be compressed; "
            "lower the learning rate, or clip the gradients"
        )
    if short is not None and max(-low, high) > torch.finfo(short).max:
        raise NonFiniteGradient(
            f"the gradient reaches {max(-low, high):g}, but the largest {dtype_name(short)} is "
            f"{torch.finfo(short).max:g}; use bf16 or another codec, or scale the loss down"
        )


def check_payload_count(payload: Payload, *wanted: tuple[torch.dtype, Shape]) -> None:
    if [(t.dtype, tuple(t.shape)) for t in payload] != list(wanted):
        found = ", ".join(describe_tensor(t) for t in payload) or "nothing"
        needed = ", ".join(f"{dtype_name(d)} {s}" for d, s in wanted)
        raise WireError(f"invalid payload: {found[:200]}, expected {needed}")


def check_tensor(given: Tensor, wanted: Tensor, what: str) -> None:
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise StateError(f"{what} is {describe_tensor(given)}, expected {describe_tensor(wanted)}")


def describe_tensor(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pack_payload(payload: Payload) -> tuple[list[list[Any]], list[memoryview]]:
    """Returns a table of type, shape and size for a message's head, and the memory of its body."""
    table = [[dtype_name(t.dtype), list(t.shape), t.nbytes] for t in payload]
    return table, [as_memoryview(t) for t in payload]


def unpack_payload(table: Any, body: Tensor) -> Payload:
    """Returns the payload of a message, as views of its body if they are aligned.

    Raises WireError unless the table is well-formed and describes exactly the body's bytes.
    """
    if not isinstance(table, list | tuple):
        raise WireError("invalid payload: the table is not a list")
    parts = [_read_entry(entry) for entry in table]
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)
    if total != body.numel():
        raise WireError(f"invalid payload: {total} bytes in a message of {body.numel()}")
    return split_body(body, parts)


def split_body(body: Tensor, parts: Iterable[tuple[torch.dtype, Shape]]) -> Payload:
    """Returns tensors of these types and shapes from the start of a body."""
    payload, at = [], 0
    for dtype, shape in parts:
        size = dtype.itemsize * math.prod(shape)
        part = body[at : at + size]
        if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
            part = part.clone()
        payload.append(part.view(dtype).view(shape))
        at += size
    return payload


def _read_entry(entry: Any) -> tuple[torch.dtype, Shape]:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise WireError("invalid payload: an entry is not (type, shape, size)")
    name, shape, size = entry
    if not isinstance(name, str) or name not in WIRE_TYPES:
        raise WireError(f"invalid payload: unknown type {str(name)[:40]!r}")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise WireError(f"invalid payload: a shape must have 0 to {MAX_DIMS} sizes")
    if not all(type(n) is int and n >= 0 for n in (*shape, size)):
        raise WireError("invalid payload: a size must be a non-negative integer")
    dtype: torch.dtype = WIRE_TYPES[name]
    if math.prod(shape) * dtype.itemsize != size:
        raise WireError(f"invalid payload: {tuple(shape)} {name} in {size} bytes")
    return dtype, tuple(shape)
